"""A model's params with an adapter, from those of the model and its config."""

from functools import partial

import jax

from jaxformer.adapters.adapted_params import MakeLeaf, adapt_specs, filled, frozen_specs
from jaxformer.adapters.lora import LoRA, adapted_specs, targets_of
from jaxformer.adapters.low_rank import learned_rows
from jaxformer.adapters.virtual_tokens import PrefixTuning, PromptTuning, has_virtual, virtual_specs
from jaxformer.arrays.params import Params, Specs, rows
from jaxformer.config.adapter import LORA_WORDS, AdapterConfig, Quantization
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import parsed_groups, parts_of
from jaxformer.files import ConfigError
from jaxformer.models.transformer import check_model, specs, without_objective

Adapter = LoRA | PromptTuning | PrefixTuning


def adapt(
    params: Params,
    config: ModelConfig,
    adapter: Adapter | None = None,
    key: jax.Array | None = None,
) -> Params:
    """`params` in which the weights that a `LoRA` names are its leaves, or with the virtual tokens
    of a `PromptTuning` or a `PrefixTuning` beside them.

    Args:
      params: those of a model, whose arrays are not copied; leaves may be quantized, or be those
        of a `LoRA`.
      config: of the model; virtual tokens are for decoders and encoder-decoders.
      adapter: which weights, and how; or how many virtual tokens.
      key: of the initial values. With `LoRA` `forward` of the result equals that of `params`.

    `jf.forward`, `generate`, `inspect` and every transform take the result as they take `params`.
    To train the adapter alone: `trainable=jf.adapter_mask(params)`. `jf.merge` makes plain params
    of those of `LoRA`. Raises ConfigError for params of another model or with virtual tokens, a
    target that fits no matrix, or a rank beyond the width of one.
    """
    if not isinstance(adapter, Adapter):
        raise ConfigError(
            f"adapt: the adapter is a {type(adapter).__name__}: give a jf.LoRA(rank=...,"
            " alpha=...), a jf.PromptTuning(tokens=...) or a jf.PrefixTuning(tokens=...)."
        )
    if key is None:
        raise ConfigError("adapt: there is no key: give jax.random.key(0), or another.")
    check_model(params, config)
    if has_virtual(params):
        raise ConfigError(
            "adapt: these params have virtual tokens already: adapt those without them,"
            " jf.without_adapters(params), and where both are wanted with LoRA first."
        )
    below = without_objective(params)
    return params | filled(_table_with(config, adapter), below, key)


def _table_with(
    config: ModelConfig,
    adapter: Adapter,
    learned: tuple[str, ...] = (),
    kind: Quantization | None = None,
    tokens: range = range(0),
) -> Specs:
    """Return the table of a model with an adapter, over weights that are quantized as `kind` says,
    in whose tables the rows of `tokens` learn too."""
    table = specs(config)
    below = dict[str, MakeLeaf]()
    if kind is not None:
        from jaxformer.adapters.quantized import QUANTIZERS
        from jaxformer.models.quantize import is_quantized

        quantizer = QUANTIZERS[kind]
        below = {
            path: quantizer.rows for path, spec in rows(table).items() if is_quantized(spec, kind)
        }
    if tokens:
        tables = [p for p, spec in rows(table).items() if "vocab" in spec.axes and spec.is_matrix]
        targets = targets_of(table, adapter) if isinstance(adapter, LoRA) else []
        if adapted := [path for path in tables if path in targets]:
            raise ConfigError(
                f"adapter.targets names {', '.join(adapted)}, of which the rows of the tokens of"
                " tokenizer.add_tokens learn already: leave it out, or add the tokens in a run with"
                " adapter.kind=none (optimizer.learning_rate 0 and one step change nothing else)"
                " and start the adapter from that run."
            )
        below |= dict.fromkeys(tables, partial(learned_rows, tokens=tokens))
    if isinstance(adapter, LoRA):
        return adapted_specs(table, adapter, below, learned)
    virtual = virtual_specs(table, config, adapter)
    frozen = adapt_specs(frozen_specs(table, learned, {*below}), below)
    return frozen | {"virtual": virtual}


def adapter_of(settings: AdapterConfig) -> Adapter:
    """Return the adapter that the settings of a run describe."""
    if settings.kind == "prompt":
        return PromptTuning(settings.tokens)
    if settings.kind == "prefix":
        return PrefixTuning(settings.tokens)
    groups = parsed_groups(settings.groups, LORA_WORDS)
    ranks, alphas = (
        {pattern: numbers[word] for pattern, numbers in groups if word in numbers}
        for word in LORA_WORDS
    )
    return LoRA(
        rank=settings.rank,
        alpha=settings.alpha,
        targets=tuple(parts_of(settings.targets)),
        dropout=settings.dropout,
        rslora=settings.rslora,
        ranks=tuple(ranks.items()),
        alphas=tuple(alphas.items()),
    )


def adapted_table(
    config: ModelConfig,
    settings: AdapterConfig,
    learned: tuple[str, ...] = (),
    tokens: range = range(0),
) -> Specs:
    """Return the table of a model with the adapter of a run, in which the adapter alone is
    trainable, the branches named in `learned`, and the rows of `tokens`, which the run adds, in the
    embedding and the output layer."""
    return _table_with(config, adapter_of(settings), learned, quantization_of(settings), tokens)


def quantization_of(settings: AdapterConfig) -> Quantization | None:
    """How the base of an adapter is quantized, the matrices of its blocks alone, since rows of its
    tables may learn; None where it is not."""
    if settings.base == "float32":
        return None
    return "int8_blocks" if settings.base == "int8" else settings.base
