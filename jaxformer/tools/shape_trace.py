"""The sublayers and products of a model, read from a trace of its forward pass: equations by the
scope that they were traced in, with the weights and activations that they read and make."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxformer.arrays.params import count, dotted, map_specs
from jaxformer.config.model import ModelConfig
from jaxformer.layers.block import all_sublayers
from jaxformer.layers.head import head
from jaxformer.models.inputs import check_inputs, inputs_of
from jaxformer.models.stack import layers_of
from jaxformer.models.transformer import hidden, specs

Shape = tuple[int, ...]
# Those of `jax.named_scope`.
OUTER_SCOPES = ("embed", "layer", "norm", "head")  # beside those of sublayers
# Primitives that change the form of an array and none of its numbers.
FORMS = {"reshape", "transpose", "convert_element_type", "squeeze", "broadcast_in_dim"}


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


def traced_rows(
    config: ModelConfig, batch_size: int, length: int, source_length: int
) -> list[ShapeRow]:
    """The rows of a trace, each of one layer, without symbols."""
    # None of these changes a shape; with them every product is an equation of its own.
    plain = {"layer_loop": "unroll", "attention_kernel": "xla", "remat": "none", "dropout": 0.0}
    plain["dtype"] = "float32"
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
    paths = [dotted(path) for path, _ in jax.tree.leaves_with_path(params)]
    n = len(paths)
    weights = {
        var: _full_name(path, config)
        for path, var in zip(paths, program.jaxpr.invars[:n], strict=True)
    }
    batch_inputs = dict(zip(program.jaxpr.invars[n:], sorted(batch), strict=True))
    trace = _Trace(program.jaxpr, weights, batch_inputs)
    rows = list(_rows(trace, grouped=config.kv_heads != config.n_heads))
    remaining = count(table) - sum(row.parameters for row in rows)
    if remaining:
        rows.append(ShapeRow("other", (), 0, (), (), remaining, 0))
    return rows


def _by_layer(params: Any) -> Any:
    """The params with a tree for each layer in place of the stacks."""
    tree = {}
    for name, branch in params.items():
        tree[name] = _by_layer(branch) if isinstance(branch, dict) else branch
    if "blocks" in params:
        tree["blocks"] = layers_of(params["blocks"])
    return tree


def _full_name(path: str, config: ModelConfig) -> str:
    """The name of a leaf with the stack of its layer: "decoder.3.attention.q"."""
    stack = "encoder" if config.family == "encoder" else "decoder"
    if path.startswith("encoder.blocks."):
        return path.replace("encoder.blocks", "encoder", 1)
    return path.replace("blocks", stack, 1) if path.startswith("blocks.") else path


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
    runs: list[tuple[tuple[str, ...], list[Any]]] = []
    for eqn in trace.program.eqns:
        names = str(eqn.source_info.name_stack).split("/")
        scope = tuple(name for name in names if name in scopes)
        # A norm within attention belongs to the attention.
        scope = scope[: 2 if scope[:1] == ("layer",) else 1]
        if runs and runs[-1][0] == scope:
            runs[-1][1].append(eqn)
        else:
            runs.append((scope, [eqn]))
    for scope, eqns in runs:
        if scope in ((), ("layer",)):
            continue
        made = {var for eqn in eqns for var in eqn.outvars}
        inside = set(map(id, eqns))
        read: dict[Any, None] = {}
        for eqn in eqns:
            for var in eqn.invars:
                if not isinstance(var, Literal) and var not in made:
                    read[var] = None
        weights = {var: trace.weights[var] for var in read if var in trace.weights}
        reads = [var for var in read if var in trace.inputs or _is_activation(var, trace)]
        makes = []
        for var in made:
            read_later = any(id(eqn) not in inside for eqn in trace.readers.get(var, []))
            if _is_float(var) and (read_later or var in trace.program.outvars):
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
        name = _name(group, names, layer, trace)
        new_weights = {var for var in group.weights if var not in seen}
        seen |= new_weights
        reads, makes = ([var.aval.shape for var in side] for side in (group.reads, group.makes))
        sizes = sum(math.prod(var.aval.shape) for var in new_weights)
        flops = sum(map(_flops, group.eqns))
        yield _row(name, 0, reads, makes, sizes, flops)
        if group.scope[-1] in (*all_sublayers(), "head"):
            yield from _products(trace, group, name, grouped)


def _name(group: _Group, names: list[str], layer: str, trace: _Trace) -> str:
    what = group.scope[-1]
    if what == "embed" and "source" in trace.inputs.values():
        of_source = any(trace.inputs.get(var) == "source" for var in group.reads)
        return "encoder.embed" if of_source else "decoder.embed"
    if what in ("embed", "head"):
        return what
    if names:
        return names[0].rpartition(".")[0]
    return f"{layer}.{what}" if "layer" in group.scope else what


def _products(trace: _Trace, group: _Group, name: str, grouped: bool) -> Iterator[ShapeRow]:
    """The products of a sublayer: with a weight, by its name, and of queries with keys and of
    weights with values."""

    def shape(var: Any) -> Shape:
        dims: Shape = var.aval.shape
        # [B, K, G, T, S], where heads that share no keys are groups of one
        return dims[:2] + dims[3:] if len(dims) == 5 and not grouped else dims

    names_without_weight = iter(("scores", "values") if "layer" in group.scope else ())
    for eqn in group.eqns:
        if eqn.primitive.name != "dot_general":
            continue
        weights = [trace.weights.get(trace.origin(var), "") for var in eqn.invars]
        if any(weights):
            what = max(weights).rpartition(".")[2]
            sides = zip(eqn.invars, weights, strict=True)
            reads = [trace.by_rows(var) for var, weight in sides if not weight]
        else:
            what = next(names_without_weight, "product")
            # Queries before keys.
            reads = [trace.origin(var) for var in reversed(eqn.invars)]
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


def _flops(eqn: Any) -> int:
    """2 for each multiplication of the products of an equation, and of those within it."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * inner * math.prod(eqn.outvars[0].aval.shape)
    inner_programs = (
        value.jaxpr if isinstance(value, ClosedJaxpr) else value
        for value in eqn.params.values()
        if isinstance(value, ClosedJaxpr | Jaxpr)
    )
    return sum(_flops(inner) for program in inner_programs for inner in program.eqns)
