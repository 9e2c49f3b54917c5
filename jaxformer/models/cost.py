"""Parameters, stacks, FLOPs and activations of a model, counted from its table of parameters and
the rows of its sublayers."""

import math
from typing import NamedTuple

from jaxformer.arrays.params import Specs, count, rows
from jaxformer.config.format import human_count
from jaxformer.config.model import ModelConfig
from jaxformer.layers.block import PLACEMENTS, shared_norm, sublayers_of
from jaxformer.layers.head import is_tied
from jaxformer.layers.pattern import layer_configs, of_source
from jaxformer.layers.sublayer import Sizes, StoredArray, Sublayer
from jaxformer.models.transformer import specs


def parameter_count(config: ModelConfig) -> int:
    return count(specs(config))


def count_text(table: Specs) -> str:
    """Return how many parameters a table has, and how many of them compute a token where experts
    make these fewer."""
    text = f"{human_count(count(table))} parameters"
    active = sum(round(spec.active * math.prod(spec.shape)) for spec in rows(table).values())
    if active != count(table):
        text += f", {human_count(active)} for a token"
    return text


class Stack(NamedTuple):
    """A stack of layers on rows of `tokens` tokens: its name, the config of each layer, whether its
    layers read an encoder's output of `source` tokens, and whether its attention is causal."""

    name: str
    layers: tuple[ModelConfig, ...]
    cross: bool
    causal: bool
    tokens: int
    source: int

    def sublayers(self, layer: ModelConfig) -> dict[str, Sublayer]:
        return sublayers_of(layer, self.cross)

    def keys(self, sublayer: Sublayer) -> int:
        """Return the number of tokens that a sublayer attends to."""
        if sublayer.reads_source:
            return self.source
        return self.tokens


def stacks(config: ModelConfig, length: int, source_length: int = 0) -> list[Stack]:
    """Return the stacks of a model in the order of its forward pass, for rows of `length` tokens
    and sources of `source_length`."""
    layers = layer_configs(config, config.n_layers)
    if config.family != "encoder_decoder":
        return [Stack(config.family, layers, False, config.family == "decoder", length, 0)]
    encoder = layer_configs(of_source(config), config.encoder_layers)
    return [
        Stack("encoder", encoder, False, False, source_length, 0),
        Stack("decoder", layers, True, True, length, source_length),
    ]


def score_flops(config: ModelConfig, length: int, source_length: int = 0) -> float:
    """Return the FLOPs per token, forward and backward, of the products without a parameter:
    attention scores and their products with the values, masked ones included. In an encoder-decoder
    the token is one of the target, with its share of the source."""
    total = 0.0
    for stack in stacks(config, length, source_length):
        for layer in stack.layers:
            for sublayer in stack.sublayers(layer).values():
                # Of an encoder, S / T tokens for each token of the target.
                total += sublayer.scores(layer, stack.keys(sublayer)) * (stack.tokens / length)
    # The backward pass has two products for each product of the forward pass.
    return 3 * total


def flops_per_token(
    config: ModelConfig,
    length: int,
    source_length: int = 0,
    table: Specs | None = None,
    reference: ModelConfig | None = None,
) -> int:
    """Return the FLOPs of a forward and backward pass per token of sequences of `length`: 6 for
    each parameter of a matrix (4 where it does not learn, and so has no gradient), plus attention.
    `table` are the parameters where they are not those of the config, as with an adapter. With a
    `reference`, another model that reads the same rows, those of its forward pass too: 2 for each.

    As in appendix B of PaLM (arXiv:2204.02311), lookups are free, and masked attention scores count
    too. In an encoder-decoder the token is one of the target, with its share of the source.
    """
    source_length = source_length or length
    # Source tokens per target token.
    share = source_length / length
    leaves = rows(table or specs(config))
    total = 0.0
    for spec in leaves.values():
        if spec.is_matrix and not spec.lookup:
            # Forward, and backward to the rows and to the matrix, if that learns.
            passes = 1.0 if spec.trainable else 2 / 3
            flops = 6 * passes * spec.active * math.prod(spec.shape)
            if spec.reads == "source":
                flops *= share
            total += flops
    if is_tied(config):
        # With an adapter on the embedding, this path is not a leaf.
        embedding = leaves.get("embed.tokens")
        passes = 1.0 if embedding is not None and embedding.trainable else 2 / 3
        total += 6 * passes * config.vocab_size * config.embedded_width
    total += score_flops(config, length, source_length)
    if reference is not None:
        total += flops_per_token(reference, length, source_length) / 3
    return round(total)


def block_arrays(layer: ModelConfig, stack: Stack, sizes: Sizes) -> list[StoredArray]:
    """Return all arrays of a layer that its backward pass reads, stored or computed again; `sizes`
    are those of the self-attention of its stack."""
    norms = PLACEMENTS[layer.norm_placement].norms
    sublayers = stack.sublayers(layer)
    wide = sizes.tokens * layer.d_model * sizes.number  # a residual stream
    arrays = [StoredArray("input", wide)]
    for name, sublayer in sublayers.items():
        last = name == list(sublayers)[-1]
        has_norm = shared_norm(layer) in ("", f"{name}_norm")
        if has_norm and ("before" in norms or "after" in norms):
            # The input of the products after its norm, or the sum before its norm.
            arrays.append(StoredArray("normed", wide))
        # The output of a sublayer is read again by its norm, and for what the next one reads.
        read_by_next = not last and layer.residual == "sequential"
        if read_by_next or "output" in norms or "after" in norms:
            arrays.append(StoredArray(sublayer.product, wide))
        if read_by_next:
            arrays.append(StoredArray("residual", wide))
        arrays += sublayer.stored(layer, sizes._replace(keys=stack.keys(sublayer)))
        if layer.dropout:
            # The mask of the elements that are zero.
            arrays.append(StoredArray("dropout", sizes.tokens * layer.d_model))
    return arrays


def activation_bytes(config: ModelConfig, length: int, source_length: int = 0) -> float:
    """Return the bytes of float32 arrays that the backward passes of all layers read for a row of
    `length` tokens and a source of `source_length`, where none is computed again."""
    return sum(
        array.bytes
        for stack in stacks(config, length, source_length)
        for layer in stack.layers
        for array in block_arrays(layer, stack, Sizes(1, stack.tokens, stack.tokens, number=4))
    )


def visible_pairs(length: int, window: int = 0, causal: bool = True) -> int:
    """Return the pairs of a query and a key that it sees, of the length^2 pairs of a row of one
    text.

    `window` is the number of tokens that a query sees, with itself, to the left (to both sides
    where the mask is not causal); 0: all.
    """
    reach = min(window or length, length)
    # Queries before `reach` see 1, 2, ... keys, the others `reach` keys; the query itself counts.
    one_side = reach * (reach + 1) // 2 + (length - reach) * reach
    if causal:
        return one_side
    # A query itself is on both sides.
    return 2 * one_side - length
