"""What a model costs, counted from its table of parameters."""

import math

from jaxformer.config_model import ModelConfig
from jaxformer.models.transformer import specs
from jaxformer.params import count, rows


def parameter_count(config: ModelConfig) -> int:
    return count(specs(config))


def flops_per_token(config: ModelConfig, length: int, source_length: int = 0) -> int:
    """Of a forward and a backward pass over sequences of `length`: 6 a matrix parameter, and
    attention counted in full.

    The convention of PaLM's appendix B (arXiv:2204.02311): lookups are free, and the half of the
    attention scores that causality hides counts too. A token of an encoder-decoder is one of the
    target, and carries its share of the source.
    """
    source_length = source_length or length
    share = source_length / length  # source tokens a target token
    total = 0.0
    for spec in rows(specs(config)).values():
        if spec.is_matrix and not spec.lookup:
            total += math.prod(spec.shape) * (share if spec.reads == "source" else 1)
    if config.tied_head and config.output in ("language", "masked"):
        total += config.vocab_size * config.d_model
    width = config.n_heads * (config.head_width + config.value_width)
    total += config.n_layers * length * width
    if config.family == "encoder_decoder":
        total += (
            config.encoder_layers * source_length * width * share
            + config.n_layers * source_length * width
        )
    return round(6 * total)
