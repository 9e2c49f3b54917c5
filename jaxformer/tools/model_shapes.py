"""The shapes of a model: every sublayer and product in the order of computation, read from a trace
of the forward pass: equations by the scope that they were traced in, with the weights and
activations that they read and make.

The forward pass is traced twice, with the sizes asked for and with sizes of which no two are equal:
the second trace tells which size of the config each axis is.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxformer.arrays.params import count, dotted, map_specs
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.biases import POSITION_SCOPE
from jaxformer.layers.block import PLACEMENTS, all_sublayers, shared_norm
from jaxformer.layers.embed import embed_formula
from jaxformer.layers.head import head, head_formula
from jaxformer.layers.norm import norm_formula
from jaxformer.models.inputs import check_inputs, inputs_of
from jaxformer.models.stack import layers_of
from jaxformer.models.transformer import hidden, specs

Shape = tuple[int, ...]
OUTER_SCOPES = ("embed", "layer", "norm", "head")  # named scopes beside those of sublayers
# Primitives that change the form of an array and none of its numbers.
FORMS = {"reshape", "transpose", "convert_element_type", "squeeze", "broadcast_in_dim"}
# The kernel of grouped products that is one product for each weight, and its primitive.
RAGGED_KERNEL, RAGGED_PRODUCT = "ragged", "ragged_dot_general"


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
    "H": Symbol(18, "width of a head"),
    "W": Symbol(14, "width of a value"),
    "F": Symbol(88, "model.d_ff"),
    "V": Symbol(101, "model.vocab_size"),
    "C": Symbol(17, "classes"),
    "E": Symbol(26, "experts"),
    "X": Symbol(46, "width of an expert"),
    "Y": Symbol(58, "width of the shared expert"),
    "M": Symbol(693, "pairs of a token and an expert"),
    "R": Symbol(23, "model.kv_rank"),
    "Q": Symbol(29, "model.query_rank"),
    "P": Symbol(8, "model.rope_head_dim"),
    "H-P": Symbol(10, "width of a head without the shared key"),
}


class ShapeRow(NamedTuple):
    """A sublayer, or a product within one (`depth` 1), of each of `layers` (empty: of no layer).

    `name` is that in the first of the layers. `reads` and `makes` are shapes in numbers,
    `reads_symbols` and `makes_symbols` in symbols. `parameters` and `flops` are those of one layer;
    FLOPs are 2 for each multiplication of a product of the forward pass, for the whole batch.
    """

    name: str
    layers: tuple[int, ...]
    depth: int
    reads: tuple[Shape, ...]
    makes: tuple[Shape, ...]
    parameters: int
    flops: int
    reads_symbols: tuple[str, ...] = ()
    makes_symbols: tuple[str, ...] = ()

    @property
    def times(self) -> int:
        """How many layers have this row."""
        return max(len(self.layers), 1)

    @property
    def label(self) -> str:
        """The name with all its layers, as in "decoder.0-5.attention"."""
        if len(self.layers) < 2:
            return self.name
        first, last = self.layers[0], self.layers[-1]
        return self.name.replace(f".{first}.", f".{first}-{last}.", 1)


def shapes_of(
    config: ModelConfig, batch_size: int, length: int, source_length: int = 0
) -> list[ShapeRow]:
    """The rows of a forward pass of `batch_size` rows of `length` tokens, with sources of
    `source_length` tokens (0: as many), in the order of computation. Layers of equal shapes are one
    row. Parameters that no sublayer reads, such as the biases of T5's positions or a second head,
    are in a last row "other"."""
    numbers = traced_rows(config, batch_size, length, source_length or length)
    sizes = {name: symbol.size for name, symbol in SYMBOLS.items()}
    # Axes that not every model has.
    optional = {"n_classes": "C", "n_experts": "E", "shared_ff": "Y"}
    optional |= {"kv_rank": "R", "query_rank": "Q", "rope_head_dim": "P"}
    settings = {name: sizes[axis] for name, axis in optional.items() if getattr(config, name)}
    try:
        symbolic_config = replace(
            config,
            d_model=sizes["D"],
            n_heads=sizes["N"],
            n_kv_heads=sizes["K"] if config.kv_heads != config.n_heads else 0,
            head_dim=sizes["H"],
            value_dim=sizes["W"] if config.value_width != config.head_width else 0,
            d_ff=sizes["F"],
            vocab_size=sizes["V"],
            max_length=max(config.max_length, sizes["S"]),
            experts_per_token=sizes["M"] // (sizes["B"] * sizes["T"]),
            expert_ff=sizes["X"],
            router_groups=1,
            router_top_groups=1,
            expert_capacity=0.0,
            **settings,  # type: ignore[arg-type]
        )
        symbolic = traced_rows(symbolic_config, sizes["B"], sizes["T"], sizes["S"])
    except ConfigError as error:
        # Some settings allow certain sizes only.
        raise ConfigError(f"the axes of this model cannot be named: {error}") from error
    names = {size: name for name, size in sizes.items()}

    def named(shapes: Sequence[Shape]) -> tuple[str, ...]:
        axes = (", ".join(names.get(size, str(size)) for size in shape) for shape in shapes)
        return tuple(f"[{text}]" for text in axes)

    pairs = zip(numbers, symbolic, strict=True)
    rows = [
        row._replace(reads_symbols=named(s.reads), makes_symbols=named(s.makes)) for row, s in pairs
    ]
    return _merged(rows)


def _merged(rows: list[ShapeRow]) -> list[ShapeRow]:
    """Layers in a row whose rows are equal, as one layer."""

    def layer_of(row: ShapeRow) -> tuple[str, tuple[int, ...]]:
        return row.name.partition(".")[0], row.layers

    def of_any_layer(row: ShapeRow) -> ShapeRow:
        stack, _, sublayer = row.name.partition(".")
        return row._replace(name=f"{stack}.{sublayer.partition('.')[2]}", layers=())

    merged: list[list[ShapeRow]] = []
    # The rows of each layer, and those between layers.
    for _, rows_of_layer in itertools.groupby(rows, layer_of):
        group = list(rows_of_layer)
        before = merged[-1] if merged else group
        in_layers = group[0].layers and before[0].layers
        if merged and in_layers and [*map(of_any_layer, before)] == [*map(of_any_layer, group)]:
            layers = before[0].layers + group[0].layers
            merged[-1] = [row._replace(layers=layers) for row in before]
        else:
            merged.append(group)
    return [row for group in merged for row in group]


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
    if config.residual_multiplier != 1:
        added = added.replace("x + ", f"x + {config.residual_multiplier:g} · ")
    if config.residual != "sequential":
        shared = "norm(x)" if shared_norm(config) else "x"
        added += f", with the same {shared} for all sublayers of a block"
    return (*sublayer.formula(config), added)


def traced_rows(
    config: ModelConfig, batch_size: int, length: int, source_length: int
) -> list[ShapeRow]:
    """The rows of a trace, each of one layer, without symbols."""
    # None of these changes a shape; with them every product is an equation of its own.
    plain = {"layer_loop": "unroll", "attention_kernel": "xla", "remat": "none", "dropout": 0.0}
    plain |= {"attention_dropout": 0.0, "dtype": "float32", "expert_kernel": RAGGED_KERNEL}
    config = replace(config, **plain)  # type: ignore[arg-type]
    table = specs(config)
    params = map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), table)
    params = jax.eval_shape(_by_layer, params)
    batch = {"tokens": jax.ShapeDtypeStruct((batch_size, length), jnp.int32)}
    if config.family == "encoder_decoder":
        batch["source"] = jax.ShapeDtypeStruct((batch_size, source_length), jnp.int32)
    check_inputs(config, batch)

    def forward(params: Any, batch: Any) -> jax.Array:
        inputs = inputs_of(batch)
        x = hidden(params, config, inputs).x
        return head(params, config, x, inputs.layout)

    program = jax.make_jaxpr(forward)(params, batch)
    stack = "encoder" if config.family == "encoder" else "decoder"
    weights = {}
    for (path, _), var in zip(
        jax.tree.leaves_with_path(params), program.jaxpr.invars, strict=False
    ):
        # A leaf by the stack of its layer: "decoder.3.attention.q".
        name = dotted(path)
        if name.startswith("encoder.blocks."):
            name = name.replace("encoder.blocks", "encoder", 1)
        elif name.startswith("blocks."):
            name = name.replace("blocks", stack, 1)
        weights[var] = name
    n = len(weights)
    batch_inputs = dict(zip(program.jaxpr.invars[n:], sorted(batch), strict=True))
    trace = _Trace(program.jaxpr, weights, batch_inputs)
    rows = list(_rows(trace, grouped=config.kv_heads != config.n_heads))
    remaining = count(table) - sum(row.parameters for row in rows)
    if remaining:
        rows.append(ShapeRow("other", (), 0, (), (), remaining, 0))
    return rows


def _by_layer(params: Any) -> Any:
    """The params with a tree for each layer in place of the stacks."""
    tree = {name: _by_layer(b) if isinstance(b, dict) else b for name, b in params.items()}
    if "blocks" in params:
        tree["blocks"] = layers_of(params["blocks"])
    return tree


class _Trace:
    """A program with the names of its weights and inputs, and where each variable comes from."""

    def __init__(self, program: Jaxpr, weights: dict[Any, str], inputs: dict[Any, str]) -> None:
        self.program, self.weights, self.inputs = program, weights, inputs
        # The rows of the batch.
        self.rows = next(iter(inputs)).aval.shape[0]
        self.maker = {var: eqn for eqn in program.eqns for var in eqn.outvars}
        self.readers: dict[Any, list[Any]] = {}
        for eqn in program.eqns:
            for var in eqn.invars:
                if not isinstance(var, Literal):
                    self.readers.setdefault(var, []).append(eqn)

    def origin(self, var: Any) -> Any:
        """The variable of which this one is another form."""
        while (eqn := self.maker.get(var)) is not None and eqn.primitive.name in FORMS:
            var = eqn.invars[0]
        return var

    def has_rows(self, var: Any) -> bool:
        """Whether rows and tokens are axes of their own, which products of matrices merge."""
        return var.aval.ndim > 2 and var.aval.shape[0] == self.rows

    def by_rows(self, var: Any) -> Any:
        """The nearest form of a variable before it that has an axis for the rows of the batch."""
        while not self.has_rows(var) and self.maker[var].primitive.name in FORMS:
            var = self.maker[var].invars[0]
        return var

    def result(self, var: Any) -> Any:
        """The last form of a product that has an axis for the rows of the batch."""
        result = var
        while len(readers := self.readers.get(var, [])) == 1:
            if readers[0].primitive.name not in FORMS:
                break
            var = readers[0].outvars[0]
            if self.has_rows(result) and not self.has_rows(var):
                break
            result = var
        return result


class _Group(NamedTuple):
    """Equations of one scope in a row, and the weights and activations that they read and make."""

    scope: tuple[str, ...]
    eqns: list[Any]
    weights: dict[Any, str]
    reads: list[Any]
    makes: list[Any]


def _groups(trace: _Trace) -> Iterator[_Group]:
    """The sublayers: runs of equations within a scope that is more than that of the layer."""
    scopes = {*OUTER_SCOPES, *all_sublayers()}

    def scope_of(eqn: Any) -> tuple[str, ...]:
        names = str(eqn.source_info.name_stack).split("/")
        scope = tuple(name for name in names if name in scopes)
        # A norm within attention belongs to the attention.
        return scope[: 2 if scope[:1] == ("layer",) else 1]

    for scope, group in itertools.groupby(trace.program.eqns, scope_of):
        if scope in ((), ("layer",)):
            continue
        eqns = list(group)
        made = {var for eqn in eqns for var in eqn.outvars}
        inside = set(map(id, eqns))
        variables = (var for eqn in eqns for var in eqn.invars if not isinstance(var, Literal))
        read = dict.fromkeys(var for var in variables if var not in made)
        weights = {var: trace.weights[var] for var in read if var in trace.weights}
        reads = [var for var in read if var in trace.inputs or _is_activation(var, trace)]
        makes = []
        for var in made:
            read_later = any(id(eqn) not in inside for eqn in trace.readers.get(var, []))
            # The losses and metrics of a layer are scalars.
            if _is_activation(var, trace) and (read_later or var in trace.program.outvars):
                makes.append(var)
        yield _Group(scope, eqns, weights, reads, makes)


def _is_float(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.floating)


def _is_activation(var: Any, trace: _Trace) -> bool:
    return _is_float(var) and var.aval.ndim > 1 and var not in trace.weights


def _rows(trace: _Trace, grouped: bool) -> Iterator[ShapeRow]:
    seen, layer = set[Any](), ""
    for group in _groups(trace):
        names = list(group.weights.values())
        layers = [".".join(name.split(".")[:2]) for name in names]
        layer = layers[0] if "layer" in group.scope and names else layer
        name = what = group.scope[-1]
        if what == "embed" and "source" in trace.inputs.values():
            of_source = any(trace.inputs.get(var) == "source" for var in group.reads)
            name = "encoder.embed" if of_source else "decoder.embed"
        elif what not in ("embed", "head") and names:
            name = names[0].rpartition(".")[0]
        elif what not in ("embed", "head") and "layer" in group.scope:
            name = f"{layer}.{what}"
        new_weights = {var for var in group.weights if var not in seen}
        seen |= new_weights
        reads, makes = ([var.aval.shape for var in side] for side in (group.reads, group.makes))
        sizes = sum(math.prod(var.aval.shape) for var in new_weights)
        flops = sum(map(_flops, group.eqns))
        yield _row(name, 0, reads, makes, sizes, flops)
        if group.scope[-1] in (*all_sublayers(), "embed", "head"):
            yield from _products(trace, group, name, grouped)


def _products(trace: _Trace, group: _Group, name: str, grouped: bool) -> Iterator[ShapeRow]:
    """The products of a sublayer: with a weight, by its name, of queries and keys with those of
    positions, of queries with keys, and of weights with values."""

    def shape(var: Any) -> Shape:
        dims: Shape = var.aval.shape
        # [B, K, G, T, S], where heads that share no keys are groups of one
        return dims[:2] + dims[3:] if len(dims) == 5 and not grouped else dims

    names_without_weight = iter(("scores", "values") if "layer" in group.scope else ())
    for eqn in group.eqns:
        if eqn.primitive.name != "dot_general" and not _is_grouped(eqn):
            continue
        weights = [trace.weights.get(trace.origin(var), "") for var in eqn.invars]
        if any(weights):
            # "shared up" of a branch within the sublayer.
            _, within, inner = max(weights).partition(f"{name}.")
            what = inner.replace(".", " ") if within else max(weights).rpartition(".")[2]
            sides = zip(eqn.invars, weights, strict=True)
            reads = [trace.by_rows(var) for var, weight in sides if not weight and _is_float(var)]
        else:
            inner_scopes = str(eqn.source_info.name_stack).split("/")
            of_positions = POSITION_SCOPE in inner_scopes
            what = POSITION_SCOPE if of_positions else next(names_without_weight, "product")
            # Queries before keys, and weights before values: those with an axis of groups first.
            by_rank = sorted(reversed(eqn.invars), key=lambda var: -var.aval.ndim)
            reads = [trace.origin(var) for var in by_rank]
        makes = trace.result(eqn.outvars[0])
        yield _row(
            f"{name}.{what}", 1, [shape(var) for var in reads], [shape(makes)], 0, _flops(eqn)
        )


def _row(
    name: str, depth: int, reads: list[Shape], makes: list[Shape], parameters: int, flops: int
) -> ShapeRow:
    parts = name.split(".")
    layers = (int(parts[1]),) if len(parts) > 2 and parts[1].isdigit() else ()
    return ShapeRow(name, layers, depth, tuple(reads), tuple(makes), parameters, flops)


def _inner_programs(eqn: Any) -> list[Jaxpr]:
    return [
        value.jaxpr if isinstance(value, ClosedJaxpr) else value
        for value in eqn.params.values()
        if isinstance(value, ClosedJaxpr | Jaxpr)
    ]


def _is_grouped(eqn: Any) -> bool:
    """Whether an equation is the product of rows in groups, which has gradients of its own."""
    inner = itertools.chain(*(program.eqns for program in _inner_programs(eqn)))
    return any(each.primitive.name == RAGGED_PRODUCT or _is_grouped(each) for each in inner)


def _flops(eqn: Any) -> int:
    """2 for each multiplication of the products of an equation, and of those within it."""
    if eqn.primitive.name in ("dot_general", RAGGED_PRODUCT):
        ragged = eqn.params.get("ragged_dot_dimension_numbers")
        numbers = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
        (contracted, _), _ = numbers
        inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * inner * math.prod(eqn.outvars[0].aval.shape)
    return sum(_flops(inner) for program in _inner_programs(eqn) for inner in program.eqns)
