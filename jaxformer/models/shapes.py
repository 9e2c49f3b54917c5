"""The shapes of a model: every sublayer and product in the order of computation, read from a trace
of the forward pass.

The forward pass is traced twice, with the sizes asked for and with sizes of which no two are equal:
the second trace tells which size of the config each axis is.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxformer.config_model import ModelConfig
from jaxformer.models.shape_trace import Shape, ShapeRow, traced_rows
from jaxformer.settings import ConfigError

# Sizes of the trace for symbols: no two are equal, nor is a product of some of them one of them.
SYMBOLS = {
    "B": 7,
    "T": 33,
    "S": 39,
    "D": 130,
    "N": 12,
    "K": 4,
    "G": 3,
    "H": 10,
    "W": 14,
    "F": 88,
    "V": 101,
    "C": 17,
}
LEGEND = {
    "B": "rows of the batch",
    "T": "tokens of a row",
    "S": "tokens of a source",
    "D": "model.d_model",
    "N": "heads",
    "K": "key-value heads",
    "G": "query heads of a key-value head",
    "H": "width of a head",
    "W": "width of a value",
    "F": "model.d_ff",
    "V": "model.vocab_size",
    "C": "classes",
}


def shapes_of(
    config: ModelConfig, batch_size: int, length: int, source_length: int = 0
) -> list[ShapeRow]:
    """The rows of a forward pass of `batch_size` rows of `length` tokens, with sources of
    `source_length` tokens (0: as many), in the order of computation. Layers of equal shapes are one
    row. Parameters that no sublayer reads, such as the biases of T5's positions or a second head,
    are in a last row "other". Raises ConfigError for lengths that the model does not take."""
    numbers = traced_rows(config, batch_size, length, source_length or length)
    try:
        symbolic = traced_rows(_symbolic(config), *(SYMBOLS[name] for name in "BTS"))
    except ConfigError as error:  # settings that allow some sizes only
        raise ConfigError(f"the axes of this model cannot be named: {error}") from error
    names = {size: name for name, size in SYMBOLS.items()}

    def named(shapes: Sequence[Shape]) -> tuple[str, ...]:
        found = (", ".join(names.get(size, str(size)) for size in shape) for shape in shapes)
        return tuple(f"[{text}]" for text in found)

    pairs = zip(numbers, symbolic, strict=True)
    rows = [row._replace(symbols=(named(s.reads), named(s.makes))) for row, s in pairs]
    return _merged(rows)


def _symbolic(config: ModelConfig) -> ModelConfig:
    """The model with the sizes of `SYMBOLS`."""
    sizes = {name: SYMBOLS[name] for name in SYMBOLS}
    grouped = config.kv_heads != config.n_heads
    return replace(
        config,
        d_model=sizes["D"],
        n_heads=sizes["N"],
        n_kv_heads=sizes["K"] if grouped else 0,
        head_dim=sizes["H"],
        value_dim=sizes["W"] if config.value_width != config.head_width else 0,
        d_ff=sizes["F"],
        vocab_size=sizes["V"],
        n_classes=sizes["C"] if config.n_classes else 0,
        max_length=max(config.max_length, sizes["S"]),
    )


def _merged(rows: list[ShapeRow]) -> list[ShapeRow]:
    """Layers in a row whose rows are equal, as one layer."""
    found: list[list[ShapeRow]] = []  # a layer, or what is between layers
    for row in rows:
        stack = row.name.partition(".")[0]
        last = found[-1][-1] if found else None
        if last and row.layers == last.layers and stack == last.name.partition(".")[0]:
            found[-1].append(row)
        else:
            found.append([row])
    kept: list[list[ShapeRow]] = []
    for part in found:
        if kept and _same(kept[-1], part):
            layers = kept[-1][0].layers + part[0].layers
            kept[-1] = [row._replace(layers=layers) for row in kept[-1]]
        else:
            kept.append(part)
    return [row for part in kept for row in part]


def _same(one: list[ShapeRow], other: list[ShapeRow]) -> bool:
    """Whether two layers of a stack have equal rows."""

    def without_layer(row: ShapeRow) -> ShapeRow:
        stack, _, rest = row.name.partition(".")
        return row._replace(name=f"{stack}.{rest.partition('.')[2]}", layers=())

    if not (one[0].layers and other[0].layers):
        return False
    return list(map(without_layer, one)) == list(map(without_layer, other))
