"""A model's params with an adapter, from those of the model and its config, and the way back."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxformer.adapters.adapted_params import MakeLeaf, adapt_specs, frozen_specs
from jaxformer.adapters.lora import LoRA, adapted_specs, targets_of
from jaxformer.adapters.low_rank import LowRank, begun, is_adapted, learned_rows
from jaxformer.arrays.params import Params, Spec, Specs, dotted, init_params, is_custom, rows
from jaxformer.config.adapter import LORA_WORDS, AdapterConfig, Quantization
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import parsed_groups, parts_of
from jaxformer.files import ConfigError
from jaxformer.models.transformer import check_model, specs, without_objective
from jaxformer.models.virtual import (
    PrefixTuning,
    PromptTuning,
    first_virtual,
    has_virtual,
    virtual_specs,
    without_virtual,
)

Adapter = LoRA | PromptTuning | PrefixTuning


def adapt(
    params: Params,
    config: ModelConfig,
    adapter: Adapter | None = None,
    key: jax.Array | None = None,
) -> Params:
    """Return `params` in which the weights that a `LoRA` names are its leaves, or with the virtual
    tokens of a `PromptTuning` or a `PrefixTuning` beside them.

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


def filled(table: Specs, base: Params, key: jax.Array) -> Params:
    """Return the params of an adapted table: the weights of `base`, and the initial values of an
    adapter, which depend on the key and the path of each leaf alone (those of a prompt also on the
    table of tokens)."""
    if has_virtual(table):
        virtual = first_virtual(table["virtual"], base, key)
        return filled(without_virtual(table), base, key) | {"virtual": virtual}

    def with_adapter(path: Any, entry: Any, weight: Any) -> Any:
        if not isinstance(entry, LowRank):
            return weight
        # `init_params` folds the dotted path of each leaf into the key.
        name = dotted(path)
        factors = {f"{name}.a": entry.a, f"{name}.b": entry.b, f"{name}.scale": entry.scale}
        a, b, scale = init_params(factors, key).values()
        return begun(replace(entry, weight=weight, a=a, b=b, scale=scale))

    def is_row(node: Any) -> bool:
        return isinstance(node, Spec) or is_custom(node)

    params: Params = jax.tree.map_with_path(with_adapter, table, base, is_leaf=is_row)
    return params


def without_adapters(params: Params) -> Params:
    """Return the params below the adapters, without virtual tokens: those of the base, which are
    not copied."""

    def below(node: Any) -> Any:
        return node.weight if is_adapted(node) else node

    params = without_virtual(params) if has_virtual(params) else params
    base: Params = jax.tree.map(below, params, is_leaf=is_adapted)
    return base


def merge(params: Params) -> Params:
    """Return plain params that compute the same: to each adapted weight its product is added in
    float32, and the sum has the dtype of the weight. Quantized weights are dequantized, with an
    adapter or without one."""
    if has_virtual(params):
        raise ConfigError(
            "the virtual tokens of prompt tuning and prefix tuning cannot be merged into weights:"
            " use these params as they are, or the model below them, jf.without_adapters(params)."
        )

    def merged_weight(node: Any) -> Any:
        return node.array() if is_custom(node) else node

    merged: Params = jax.tree.map(merged_weight, params, is_leaf=is_custom)
    return merged


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
        dora=settings.dora,
        init=settings.init,
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
    """Return how the base of an adapter is quantized, the matrices of its blocks alone, since rows
    of its tables may learn; None where it is not."""
    if settings.base == "float32":
        return None
    return "int8_blocks" if settings.base == "int8" else settings.base
