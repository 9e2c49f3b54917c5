"""The shapes of a model: every sublayer and product in the order of computation, from its table of
parameters and the rows of its sublayers."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Spec, Specs, count, rows
from jaxformer.config.model import ModelConfig
from jaxformer.layers.block import PLACEMENTS, all_sublayers, block_specs, shared_norm
from jaxformer.layers.embed import embed_formula
from jaxformer.layers.head import HEADS, head_formula, is_tied, reads_pooler
from jaxformer.layers.norm import norm_formula
from jaxformer.layers.sublayer import Sublayer
from jaxformer.models.cost import Stack, stacks
from jaxformer.models.inputs import check_inputs
from jaxformer.models.transformer import specs

# What the symbols of axes count.
SYMBOLS = {
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
    "E": "experts",
    "X": "width of an expert",
    "Y": "width of the shared expert",
    "M": "pairs of a token and an expert",
    "R": "model.latent.kv_rank",
    "Q": "model.latent.query_rank",
    "P": "model.latent.rope_head_dim",
    "H-P": "width of a head without the shared key",
}
# The symbols that an axis of a parameter may have, and the sizes of the config that they stand for:
# the first with the size of the axis is its own.
AXIS_SYMBOLS = {
    "embed": {"D": "d_model", "Q": "latent.query_rank", "R": "latent.kv_rank"},
    "hidden": {"D": "d_model"},
    "latent": {"Q": "latent.query_rank", "R": "latent.kv_rank", "P": "latent.rope_head_dim"},
    "heads": {"N": "n_heads"},
    "kv_heads": {"N": "n_heads", "K": "kv_heads"},
    "head_dim": {"H": "head_width", "W": "value_width"},
    "mlp": {"F": "ff_width"},
    "scores": {"E": "experts.n"},
    "vocab": {"V": "vocab_size"},
    "classes": {"C": "head.n_classes"},
}


class Axis(int):
    """The size of an axis, with its symbol."""

    symbol: str

    def __new__(cls, symbol: str, size: int) -> "Axis":
        axis = super().__new__(cls, size)
        axis.symbol = symbol
        return axis


Shape = tuple[Axis, ...]


class ShapeRow(NamedTuple):
    """A sublayer, or a product within one (`depth` 1), of each of `layers` (empty: of no layer).

    `name` is that in the first of the layers. `reads` and `makes` are shapes in numbers,
    `reads_symbols` and `makes_symbols` in symbols. `parameters` and `flops` are those of one layer;
    FLOPs are 2 for each multiplication of a product of the forward pass, for the whole batch.
    """

    name: str
    reads: tuple[Shape, ...]
    makes: tuple[Shape, ...]
    parameters: int = 0
    flops: int = 0
    layers: tuple[int, ...] = ()
    depth: int = 0

    @property
    def reads_symbols(self) -> tuple[str, ...]:
        return tuple(map(_in_symbols, self.reads))

    @property
    def makes_symbols(self) -> tuple[str, ...]:
        return tuple(map(_in_symbols, self.makes))

    @property
    def times(self) -> int:
        """How many layers have this row."""
        return max(len(self.layers), 1)

    @property
    def label(self) -> str:
        """The name with all its layers, as in "decoder.0-5.attention"."""
        if len(self.layers) < 2:
            return self.name
        first = self.layers[0]
        last = self.layers[-1]
        return self.name.replace(f".{first}.", f".{first}-{last}.", 1)


def _in_symbols(shape: Shape) -> str:
    return f"[{', '.join(axis.symbol for axis in shape)}]"


def formula_of(config: ModelConfig, name: str) -> tuple[str, ...]:
    """Return the lines of the formula of a sublayer named as in the rows of `shapes_of`
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


def shapes_of(
    config: ModelConfig, batch_size: int, length: int, source_length: int = 0
) -> list[ShapeRow]:
    """Return the rows of a forward pass of `batch_size` rows of `length` tokens, with sources of
    `source_length` tokens (0: as many), in the order of computation. Layers of equal shapes are one
    row. Parameters that no sublayer reads, such as the biases of T5's positions or a second head,
    are in a last row "other"."""
    source_length = source_length or length
    batch = {"tokens": jax.ShapeDtypeStruct((batch_size, length), jnp.int32)}
    if config.family == "encoder_decoder":
        batch["source"] = jax.ShapeDtypeStruct((batch_size, source_length), jnp.int32)
    check_inputs(config, batch)
    table = specs(config)
    shape_rows = list[ShapeRow]()
    in_batch = Axis("B", batch_size)
    width = Axis("D", config.d_model)
    for stack in stacks(config, length, source_length):
        x = (in_batch, Axis("T", stack.tokens), width)
        branch = table
        path = ""
        embed_name = "embed"
        if config.family == "encoder_decoder":
            embed_name = f"{stack.name}.embed"
            if stack.name == "encoder":
                branch = table["encoder"]
                path = "encoder."
                x = (in_batch, Axis("S", stack.tokens), width)
        embedding = branch.get("embed", {})
        products = _products(config, embedding, embed_name, x, x)
        shape_rows += _sublayer(embed_name, (x[:2],), (x,), embedding, products)
        shape_rows += _layer_rows(stack, x, config.layers_in_group)
        if "final_norm" in branch:
            shape_rows += _sublayer(f"{path}final_norm", (x,), (x,), branch["final_norm"], [])
    head = table.get("head", {})
    if reads_pooler(config):
        head = table["pooler"] | head
    y = x
    if HEADS[config.output].of_row:
        y = (in_batch, Axis("1", 1), width)
    matrices = head
    if is_tied(config):
        matrix: Spec = table["embed"]["tokens"]
        inputs = tuple(axis for axis in matrix.axes if axis != "vocab")
        matrices = head | {"weight": replace(matrix, inputs=inputs, lookup=False)}
    products = _products(config, matrices, "head", y, y, "weight")
    makes = products[-1].makes if products else (x,)
    shape_rows += _sublayer("head", (x,), makes, head, products)
    # Nothing is left out silently: what no row has counted is a row of its own.
    remaining = count(table) - sum(row.times * row.parameters for row in shape_rows)
    if remaining:
        shape_rows.append(ShapeRow("other", (), (), remaining))
    return shape_rows


def _layer_rows(stack: Stack, x: Shape, layers_in_group: int) -> Iterator[ShapeRow]:
    """Yield the rows of the layers of a stack; equal layers in a row are one. Layers are numbered
    by the group whose parameters they read, and the first of a group counts these."""
    source = (x[0], Axis("S", stack.source), x[2])

    def kind_of(number: int) -> tuple[ModelConfig, bool]:
        return stack.layers[number], number % layers_in_group == 0

    # A group of equal layers in a row is one row with their numbers.
    for (layer, is_first), members in itertools.groupby(range(len(stack.layers)), kind_of):
        layers = tuple(number // layers_in_group for number in members)
        is_after = "after" in PLACEMENTS[layer.norm_placement].norms
        branches = block_specs(layer, stack.cross)
        for kind, sublayer in stack.sublayers(layer).items():
            norm = f"{kind}_norm"
            for part in (kind, norm) if is_after else (norm, kind, f"{kind}_output_norm"):
                if part not in branches:
                    continue
                name = f"{stack.name}.{layers[0]}.{part}"
                reads: tuple[Shape, ...] = (x,)
                products = list[ShapeRow]()
                if part == kind:
                    if sublayer.reads_source:
                        reads = (source, x)
                    last = sublayer.product
                    products = _products(layer, branches[part], name, x, source, last)
                    keys = source[1] if sublayer.reads_source else x[1]
                    products[-1:-1] = _without_weight(sublayer, layer, name, x, keys)
                branch = branches[part] if is_first else {}
                for row in _sublayer(name, reads, (x,), branch, products):
                    yield row._replace(layers=layers)


def _sublayer(
    name: str,
    reads: tuple[Shape, ...],
    makes: tuple[Shape, ...],
    branch: Specs,
    products: list[ShapeRow],
) -> list[ShapeRow]:
    """Return a sublayer with its number of parameters and the FLOPs of its products, and these."""
    flops = sum(product.flops for product in products)
    return [ShapeRow(name, reads, makes, count(branch), flops), *products]


def _products(
    config: ModelConfig, branch: Specs, name: str, x: Shape, source: Shape, last: str = ""
) -> list[ShapeRow]:
    """Return the products of x [B, T, D], or of a source [B, S, D], with the matrices of a
    sublayer, and that with the matrix `last` after all others."""
    table = rows(branch)
    products = []
    for path in sorted(table, key=lambda path: path == last):
        spec = table[path]
        # A lookup reads rows and multiplies nothing.
        if not spec.is_matrix or spec.lookup:
            continue
        tokens = x[:2]
        if spec.reads == "source":
            tokens = source[:2]
        if "experts" in spec.axes:
            # A row for each pair of a token and an expert.
            tokens = (Axis("M", round(math.prod(tokens) * spec.active * config.experts.n)),)
        inputs: Shape = ()
        outputs: Shape = ()
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            settings = AXIS_SYMBOLS.get(axis, {})
            names = [
                symbol for symbol, name in settings.items() if attrgetter(name)(config) == size
            ]
            symbol = (*names, str(size))[0]
            if axis == "mlp" and "experts" in spec.axes:
                symbol = "X"
            elif axis == "mlp" and path.startswith("shared"):
                symbol = "Y"
            elif axis == "head_dim" and path == "k" and size != config.head_width:
                symbol = "H-P"
            if axis in spec.inputs:  # the product sums over it
                inputs += (Axis(symbol, size),)
            elif axis not in spec.batch:
                outputs += (Axis(symbol, size),)
        row = ShapeRow(
            f"{name}.{path.replace('.', ' ')}",
            ((*tokens, *inputs),),
            ((*tokens, *outputs),),
            flops=2 * math.prod((*tokens, *inputs, *outputs)),
            depth=1,
        )
        products.append(row)
    return products


def _without_weight(
    sublayer: Sublayer, layer: ModelConfig, name: str, x: Shape, keys: Axis
) -> list[ShapeRow]:
    """Return the products of a sublayer that no parameter has. Those of attention are of queries
    with the rows of relative positions and with keys, and of the weights with values."""
    in_batch, queries, _ = x
    # FLOPs of the products without a parameter, as the FLOPs of a step count them.
    total = round(in_batch * queries * sublayer.scores(layer, keys))
    if not total:
        return []
    if sublayer.capture not in ("attention_out", "cross_out"):
        return [ShapeRow(f"{name}.product", (x,), (x,), flops=total, depth=1)]
    heads = Axis("N", layer.n_heads)
    shared_heads = heads
    weights: Shape = (in_batch, heads, queries, keys)
    if layer.kv_heads != layer.n_heads:
        shared_heads = Axis("K", layer.kv_heads)
        group = Axis("G", layer.n_heads // layer.kv_heads)
        weights = (in_batch, shared_heads, group, queries, keys)
    head_width = Axis("H", layer.head_width)
    value_width = head_width
    if layer.value_width != layer.head_width:
        value_width = Axis("W", layer.value_width)
    q = (in_batch, queries, heads, head_width)
    of_keys = (in_batch, keys, shared_heads, head_width)
    flops = 2 * math.prod(weights) * head_width
    scores = ShapeRow(f"{name}.scores", (q, of_keys), (weights,), flops=flops, depth=1)
    values = (in_batch, keys, shared_heads, value_width)
    out = (in_batch, queries, heads, value_width)
    flops = 2 * math.prod(weights) * value_width
    mean = ShapeRow(f"{name}.values", (weights, values), (out,), flops=flops, depth=1)
    positions = total - scores.flops - mean.flops
    if positions:
        return [scores._replace(name=f"{name}.positions", flops=positions), scores, mean]
    return [scores, mean]
