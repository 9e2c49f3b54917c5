"""Parameters and FLOPs of a model, counted from its table of parameters."""

import math

from jaxformer.config_model import ModelConfig
from jaxformer.models.transformer import specs
from jaxformer.params import count, rows


def parameter_count(config: ModelConfig) -> int:
    return count(specs(config))


def flops_per_token(
    config: ModelConfig, length: int, source_length: int = 0, reference: bool = False
) -> int:
    """FLOPs of a forward and backward pass per token of sequences of `length`: 6 for each parameter
    of a matrix, plus attention; with a `reference` those of its forward pass too, a third more.

    As in appendix B of PaLM (arXiv:2204.02311), lookups are free, and masked attention scores count
    too. In an encoder-decoder the token is one of the target, with its share of the source.
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
        total += config.encoder_layers * source_length * width * share  # its own attention
        total += config.n_layers * source_length * width  # cross-attention
    return round((8 if reference else 6) * total)
