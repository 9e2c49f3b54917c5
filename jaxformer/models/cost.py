"""What a model costs, counted from its table of parameters."""

import math

from jaxformer.config import ModelConfig
from jaxformer.models.decoder import specs
from jaxformer.params import count, rows


def parameter_count(config: ModelConfig) -> int:
    return count(specs(config))


def flops_per_token(config: ModelConfig, length: int) -> int:
    """Of a forward and a backward pass over sequences of `length`: 6 a matrix parameter, and attention counted in full.

    The convention of PaLM's appendix B (arXiv:2204.02311): lookups are free, and the half of the attention scores that
    causality hides counts too.
    """
    lookups = ("embed.tokens", "embed.positions")
    products = sum(
        math.prod(spec.shape) for path, spec in rows(specs(config)).items() if spec.is_matrix and path not in lookups
    )
    if config.tied_head:
        products += config.vocab_size * config.d_model
    scores = 2 * config.n_layers * length * config.n_heads * config.head_width
    return 6 * (products + scores)
