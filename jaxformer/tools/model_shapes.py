"""The shapes of a model: every sublayer and product in the order of computation, read from a trace
of the forward pass.

The forward pass is traced twice, with the sizes asked for and with sizes of which no two are equal:
the second trace tells which size of the config each axis is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.block import PLACEMENTS, all_sublayers
from jaxformer.layers.embed import embed_formula
from jaxformer.layers.head import head_formula
from jaxformer.layers.norm import norm_formula
from jaxformer.tools.shape_trace import Shape, ShapeRow, traced_rows


class Symbol(NamedTuple):
    """The name of an axis: its size in the trace for symbols, and what it counts."""

    size: int
    meaning: str


# No two sizes are equal, nor is the product of two of them a third, but for N = K G.
SYMBOLS = {
    "B": Symbol(7, "rows of the batch"),
    "T": Symbol(33, "tokens of a row"),
    "S": Symbol(39, "tokens of a source"),
    "D": Symbol(130, "model.d_model"),
    "N": Symbol(12, "heads"),
    "K": Symbol(4, "key-value heads"),
    "G": Symbol(3, "query heads of a key-value head"),
    "H": Symbol(10, "width of a head"),
    "W": Symbol(14, "width of a value"),
    "F": Symbol(88, "model.d_ff"),
    "V": Symbol(101, "model.vocab_size"),
    "C": Symbol(17, "classes"),
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
        symbolic = traced_rows(_symbolic(config), *(SYMBOLS[name].size for name in "BTS"))
    except ConfigError as error:
        # Some settings allow certain sizes only.
        raise ConfigError(f"the axes of this model cannot be named: {error}") from error
    names = {symbol.size: name for name, symbol in SYMBOLS.items()}

    def named(shapes: Sequence[Shape]) -> tuple[str, ...]:
        texts = []
        for shape in shapes:
            axes = ", ".join(names.get(size, str(size)) for size in shape)
            texts.append(f"[{axes}]")
        return tuple(texts)

    pairs = zip(numbers, symbolic, strict=True)
    rows = [
        row._replace(reads_symbols=named(s.reads), makes_symbols=named(s.makes)) for row, s in pairs
    ]
    return _merged(rows)


def _symbolic(config: ModelConfig) -> ModelConfig:
    """The model with the sizes of `SYMBOLS`."""
    sizes = {name: symbol.size for name, symbol in SYMBOLS.items()}
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
    # The rows of each layer, and those between layers.
    groups: list[list[ShapeRow]] = []
    for row in rows:
        stack = row.name.partition(".")[0]
        last = groups[-1][-1] if groups else None
        if last and row.layers == last.layers and stack == last.name.partition(".")[0]:
            groups[-1].append(row)
        else:
            groups.append([row])
    merged: list[list[ShapeRow]] = []
    for group in groups:
        if merged and _same(merged[-1], group):
            layers = merged[-1][0].layers + group[0].layers
            merged[-1] = [row._replace(layers=layers) for row in merged[-1]]
        else:
            merged.append(group)
    return [row for group in merged for row in group]


def _same(first: list[ShapeRow], second: list[ShapeRow]) -> bool:
    """Whether two layers of a stack have equal rows."""

    def without_layer(row: ShapeRow) -> ShapeRow:
        stack, _, sublayer = row.name.partition(".")
        return row._replace(name=f"{stack}.{sublayer.partition('.')[2]}", layers=())

    if not (first[0].layers and second[0].layers):
        return False
    return list(map(without_layer, first)) == list(map(without_layer, second))


def formula_of(config: ModelConfig, name: str) -> tuple[str, ...]:
    """The lines of the formula of a sublayer named as in the rows of `shapes_of`
    ("decoder.0.attention"); none for a name that has none.

    Rows of x are tokens: x W is the product of the rows with a matrix, and + b a bias. The last
    line of a sublayer of a block is how its output is added to the residual stream.
    """
    what = name.rpartition(".")[2]
    if what == "norm" or what.endswith("_norm"):
        return (norm_formula(config),)
    if what == "embed":
        return embed_formula(config)
    if what == "head":
        return head_formula(config)
    sublayer = all_sublayers().get(what)
    if sublayer is None:
        return ()
    added = PLACEMENTS[config.norm_placement].formula.format(what)
    if config.residual == "parallel":
        added += ", with the same x for all sublayers of a block"
    return (*sublayer.formula(config), added)
