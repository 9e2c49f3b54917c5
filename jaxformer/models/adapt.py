"""A model's params with an adapter, from those of the model and its config."""

import warnings
from collections.abc import Mapping

import jax

from jaxformer.adapters.lora import LoRA, adapted_specs, filled
from jaxformer.adapters.rows import adapt_specs
from jaxformer.config_adapter import AdapterConfig, Quantization, pairs_of, parts_of
from jaxformer.config_model import ModelConfig
from jaxformer.models.transformer import check_model, specs
from jaxformer.params import Params, Specs, rows
from jaxformer.settings import ConfigError


def adapt(
    params: Params, config: ModelConfig, adapter: LoRA | None = None, key: jax.Array | None = None
) -> Params:
    """`params` in which the weights that an adapter names are its leaves.

    Args:
      params: those of a model, whose arrays are not copied; leaves may be quantized.
      config: of the model.
      adapter: which weights, and how.
      key: of the initial values. `forward` of the result equals that of `params`.

    `jf.forward`, `generate`, `inspect` and every transform take the result as they take `params`.
    To train the adapter alone: `trainable=jf.adapter_mask(params)`. `jf.merge` makes plain params.
    Raises ConfigError for params of another model, a target that fits no matrix, or a rank beyond
    the width of one.
    """
    if isinstance(config, Mapping):  # the former meaning of this name
        said = "jf.adapt(specs, changes) is now called jf.adapt_specs."
        warnings.warn(said, FutureWarning, stacklevel=2)
        return adapt_specs(params, config)
    if not isinstance(adapter, LoRA):
        given = type(adapter).__name__
        raise ConfigError(f"adapt: the adapter is a {given}: give a jf.LoRA(rank=..., alpha=...).")
    if key is None:
        raise ConfigError("adapt: there is no key: give jax.random.key(0), or another.")
    check_model(params, config)
    return filled(adapted_specs(specs(config), adapter), params, key)


def lora_of(settings: AdapterConfig) -> LoRA:
    """The adapter that the settings of a run describe. Raises ConfigError."""
    return LoRA(
        rank=settings.rank,
        alpha=settings.alpha,
        targets=tuple(parts_of(settings.targets)),
        dropout=settings.dropout,
        rslora=settings.rslora,
        ranks=pairs_of(settings.ranks),
        alphas=pairs_of(settings.alphas),
    )


def adapted_table(
    config: ModelConfig, settings: AdapterConfig, learned: tuple[str, ...] = ()
) -> Specs:
    """The table of a model with the adapter of a run, in which the adapter alone is trainable, and
    the branches named in `learned`. Raises ConfigError as `adapt` does."""
    table, kind = specs(config), quantization_of(settings)
    below = {}
    if kind is not None:
        from jaxformer.adapters.quantized import QUANTIZERS
        from jaxformer.models.quantize import is_quantized

        below = {
            path: QUANTIZERS[kind].rows for path, spec in rows(table).items() if is_quantized(spec)
        }
    return adapted_specs(table, lora_of(settings), below, learned)


def quantization_of(settings: AdapterConfig) -> Quantization | None:
    """How the base of an adapter is quantized; None where it is not."""
    return None if settings.base == "float32" else settings.base
