"""The shapes of a model: every sublayer and product in the order of computation, from its table of
parameters and the rows of its sublayers.

They are made twice, for the sizes that are asked for and for sizes of which no two are equal, which
tell what size of the config each axis is.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Spec, Specs, count, rows
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.layers.block import PLACEMENTS, all_sublayers, block_specs, shared_norm
from jaxformer.layers.embed import embed_formula
from jaxformer.layers.head import HEADS, head_formula, is_tied, reads_pooler
from jaxformer.layers.norm import norm_formula
from jaxformer.layers.sublayer import Sublayer
from jaxformer.models.cost import Stack, stacks
from jaxformer.models.inputs import check_inputs
from jaxformer.models.transformer import specs

Shape = tuple[int, ...]


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
    "R": Symbol(23, "model.latent.kv_rank"),
    "Q": Symbol(29, "model.latent.query_rank"),
    "P": Symbol(8, "model.latent.rope_head_dim"),
    "H-P": Symbol(10, "width of a head without the shared key"),
}


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
        first = self.layers[0]
        last = self.layers[-1]
        return self.name.replace(f".{first}.", f".{first}-{last}.", 1)


def shapes_of(
    config: ModelConfig, batch_size: int, length: int, source_length: int = 0
) -> list[ShapeRow]:
    """Return the rows of a forward pass of `batch_size` rows of `length` tokens, with sources of
    `source_length` tokens (0: as many), in the order of computation. Layers of equal shapes are one
    row. Parameters that no sublayer reads, such as the biases of T5's positions or a second head,
    are in a last row "other"."""
    numbers = model_rows(config, batch_size, length, source_length or length)
    sizes = {name: symbol.size for name, symbol in SYMBOLS.items()}
    # Axes that not every model has.
    optional = {"head.n_classes": "C", "experts.n": "E", "experts.shared_ff": "Y"}
    optional |= {"latent.kv_rank": "R", "latent.query_rank": "Q", "latent.rope_head_dim": "P"}
    settings = {name: sizes[axis] for name, axis in optional.items() if attrgetter(name)(config)}
    try:
        symbolic_config = with_settings(
            config,
            {
                "d_model": sizes["D"],
                "n_heads": sizes["N"],
                "n_kv_heads": sizes["K"] if config.kv_heads != config.n_heads else 0,
                "head_dim": sizes["H"],
                "attention.value_dim": sizes["W"] if config.value_width != config.head_width else 0,
                "d_ff": sizes["F"],
                "vocab_size": sizes["V"],
                "max_length": max(config.max_length, sizes["S"]),
                "experts.per_token": sizes["M"] // (sizes["B"] * sizes["T"]),
                "experts.d_ff": sizes["X"],
                "experts.groups": 1,
                "experts.top_groups": 1,
                "experts.capacity": 0.0,
                **settings,
            },
        )
        symbolic = model_rows(symbolic_config, sizes["B"], sizes["T"], sizes["S"])
    except ConfigError as error:
        # Some settings allow certain sizes only.
        raise ConfigError(f"the axes of this model cannot be named: {error}") from error
    names = {size: name for name, size in sizes.items()}

    def named(shapes: Sequence[Shape]) -> tuple[str, ...]:
        axes = (", ".join(names.get(size, str(size)) for size in shape) for shape in shapes)
        return tuple(f"[{text}]" for text in axes)

    # Both have the same rows: only sizes differ between the two configs.
    pairs = zip(numbers, symbolic, strict=True)
    return [
        row._replace(reads_symbols=named(s.reads), makes_symbols=named(s.makes)) for row, s in pairs
    ]


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


def model_rows(
    config: ModelConfig, batch_size: int, length: int, source_length: int
) -> list[ShapeRow]:
    """Return the rows of a model, without symbols."""
    batch = {"tokens": jax.ShapeDtypeStruct((batch_size, length), jnp.int32)}
    if config.family == "encoder_decoder":
        batch["source"] = jax.ShapeDtypeStruct((batch_size, source_length), jnp.int32)
    check_inputs(config, batch)
    table = specs(config)
    shape_rows = list[ShapeRow]()
    for stack in stacks(config, length, source_length):
        x = (batch_size, stack.tokens, config.d_model)  # [B, T, D]
        branch = table
        path = ""
        embed_name = "embed"
        if config.family == "encoder_decoder":
            embed_name = f"{stack.name}.embed"
            if stack.name == "encoder":
                branch = table["encoder"]
                path = "encoder."
        embedding = branch.get("embed", {})
        products = _products(embedding, embed_name, x, x)
        shape_rows += _sublayer(embed_name, (x[:2],), (x,), embedding, products)
        shape_rows += _layer_rows(stack, x, config.layers_in_group)
        if "final_norm" in branch:
            shape_rows += _sublayer(f"{path}final_norm", (x,), (x,), branch["final_norm"], [])
    head = table.get("head", {})
    if reads_pooler(config):
        head = table["pooler"] | head
    y = x
    if HEADS[config.output].of_row:
        y = (batch_size, 1, config.d_model)
    matrices = head
    if is_tied(config):
        matrix: Spec = table["embed"]["tokens"]
        inputs = tuple(axis for axis in matrix.axes if axis != "vocab")
        matrices = head | {"weight": replace(matrix, inputs=inputs, lookup=False)}
    products = _products(matrices, "head", y, y, "weight")
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
    source = (x[0], stack.source, x[2])

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
                    products = _products(branches[part], name, x, source, sublayer.product)
                    products[-1:-1] = _without_weight(sublayer, layer, stack, name, x)
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


def _products(branch: Specs, name: str, x: Shape, source: Shape, last: str = "") -> list[ShapeRow]:
    """Return the products of x [B, T, D], or of a source [B, S, D], with the matrices of a
    sublayer, and that with the matrix `last` after all others."""
    table = rows(branch)
    products = []
    for path in sorted(table, key=lambda path: path == last):
        spec = table[path]
        # A lookup reads rows and multiplies nothing.
        if not spec.is_matrix or spec.lookup:
            continue
        sizes = dict(zip(spec.axes, spec.shape, strict=True))
        tokens = (source if spec.reads == "source" else x)[:2]
        if "experts" in sizes:
            # A row for each pair of a token and an expert.
            tokens = (round(math.prod(tokens) * spec.active * sizes["experts"]),)
        # The axes of the matrix that the product sums over.
        inputs = [size for axis, size in sizes.items() if axis in spec.inputs]
        outputs = [size for axis, size in sizes.items() if axis not in (*spec.inputs, *spec.batch)]
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
    sublayer: Sublayer, layer: ModelConfig, stack: Stack, name: str, x: Shape
) -> list[ShapeRow]:
    """Return the products of a sublayer that no parameter has. Those of attention are of queries
    with the rows of relative positions and with keys, and of the weights with values."""
    batch_size, queries, _ = x
    keys = stack.keys(sublayer)
    # FLOPs of the products without a parameter, as the FLOPs of a step count them.
    total = round(batch_size * queries * sublayer.scores(layer, keys))
    if not total:
        return []
    if sublayer.capture not in ("attention_out", "cross_out"):
        return [ShapeRow(f"{name}.product", (x,), (x,), flops=total, depth=1)]
    n = layer.n_heads
    k = layer.kv_heads
    q = (batch_size, queries, n, layer.head_width)
    weights: Shape = (batch_size, n, queries, keys)
    if k != n:
        weights = (batch_size, k, n // k, queries, keys)
    of_keys = (batch_size, keys, k, layer.head_width)
    flops = 2 * math.prod(weights) * layer.head_width
    scores = ShapeRow(f"{name}.scores", (q, of_keys), (weights,), flops=flops, depth=1)
    values = (batch_size, keys, k, layer.value_width)
    out = (batch_size, queries, n, layer.value_width)
    flops = 2 * math.prod(weights) * layer.value_width
    mean = ShapeRow(f"{name}.values", (weights, values), (out,), flops=flops, depth=1)
    positions = total - scores.flops - mean.flops
    if positions:
        return [scores._replace(name=f"{name}.positions", flops=positions), scores, mean]
    return [scores, mean]
