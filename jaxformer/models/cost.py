"""Parameters and FLOPs of a model, counted from its table of parameters."""

import math

from jaxformer.arrays.params import Specs, count, rows
from jaxformer.config.model import ModelConfig
from jaxformer.models.transformer import specs


def parameter_count(config: ModelConfig) -> int:
    return count(specs(config))


def flops_per_token(
    config: ModelConfig,
    length: int,
    source_length: int = 0,
    table: Specs | None = None,
    reference: bool = False,
) -> int:
    """FLOPs of a forward and backward pass per token of sequences of `length`: 6 for each parameter
    of a matrix (4 where it does not learn, and so has no gradient), plus attention. `table` are the
    parameters where they are not those of the config, as with an adapter. With a `reference`, which
    has the parameters of the config, those of its forward pass too: 2 for each.

    As in appendix B of PaLM (arXiv:2204.02311), lookups are free, and masked attention scores count
    too. In an encoder-decoder the token is one of the target, with its share of the source.
    """
    source_length = source_length or length
    share = source_length / length  # source tokens a target token
    width = config.n_heads * (config.head_width + config.value_width)
    keys = float(config.n_layers * length)  # that a token is multiplied with, in all layers
    if config.family == "encoder_decoder":
        keys += config.encoder_layers * source_length * share  # its own attention
        keys += config.n_layers * source_length  # cross-attention
    total = sum(matrix_flops(config, share, table or specs(config)).values()) + 6 * width * keys
    if reference:
        total += flops_per_token(config, length, source_length) / 3
    return round(total)


def matrix_flops(config: ModelConfig, share: float, table: Specs) -> dict[str, float]:
    """The part of `flops_per_token` that is of each matrix of a table, by its path; that of a tied
    output layer is the embedding's. `share` is the number of source tokens a token."""
    found, leaves = {}, rows(table)
    for path, spec in leaves.items():
        if spec.is_matrix and not spec.lookup:
            passes = 1.0 if spec.trainable else 2 / 3
            found[path] = 6 * passes * math.prod(spec.shape)
            found[path] *= share if spec.reads == "source" else 1
    if config.tied_head and config.output in ("language", "masked"):
        embedding = leaves.get("embed.tokens")  # None where it is below an adapter
        passes = 1.0 if embedding is not None and embedding.trainable else 2 / 3
        found["embed.tokens"] = 6 * passes * config.vocab_size * config.d_model
    return found
