"""Prompt tuning and prefix tuning: virtual tokens that learn, in front of what a model reads.

They are the branch `virtual` of the params, beside the weights of the model, which stay as they
are (P virtual tokens, L layers, K key/value heads of width H, values of width W):

prompt tuning   {"prompt": [P, D]}
prefix tuning   {"decoder": {"prefix_k": [L, P, K, H], "prefix_v": [L, P, K, W]}}, and "encoder"

Those of prefix tuning, and of prompt tuning in a decoder, are keys and values before those of the
tokens; a prompt in an encoder-decoder is tokens of the source. In a causal stack the activations of
a prompt depend on the prompt alone, so its keys and values are the same for all rows and segments,
and are computed once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxformer.arrays.params import (
    Params,
    Spec,
    Specs,
    Weight,
    contract,
    init_params,
    lookup,
    normal,
)
from jaxformer.arrays.sharding import Axes, constrain
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.layers.block import empty_cache
from jaxformer.layers.cache import Cache
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.layers.pattern import layer_configs
from jaxformer.models.families import decoder_hidden
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import compute_dtype, stacked_as


@dataclass(frozen=True)
class _VirtualTokens:
    tokens: int = 20

    def __post_init__(self) -> None:
        tokens = self.tokens
        name = type(self).__name__
        if isinstance(tokens, bool) or tokens != int(tokens) or tokens < 1:
            raise ConfigError(f"{name}: tokens={tokens!r} must be a whole number of at least 1.")


class PromptTuning(_VirtualTokens):
    """Vectors that a model reads in front of the embedded tokens (arXiv:2104.08691).

    The virtual tokens stand at the positions 0 .. tokens - 1 of each segment, and the tokens behind
    them. They are read as rows of the table of tokens are, with its scale, positions and norm, and
    begin as rows of tokens drawn at random. A decoder computes their keys and values once for all
    rows, with one draw of dropout, and each query sees them all, whatever its window. An
    encoder-decoder reads them in front of its source, as tokens like the others.

    Args:
      tokens: P, how many.
    """


class PrefixTuning(_VirtualTokens):
    """Keys and values in front of those of each layer's self-attention (arXiv:2101.00190).

    The virtual tokens stand at the positions 0 .. tokens - 1 of each segment, and the tokens behind
    them; each query sees them all, whatever its window. Their keys are used as they are, neither
    normed nor rotated. An encoder-decoder has them in both stacks. The paper's second
    parametrization, a feed-forward network that makes keys and values, is not computed.

    Args:
      tokens: P, how many.
    """


def virtual_specs(specs: Specs, config: ModelConfig, adapter: PromptTuning | PrefixTuning) -> Specs:
    """Return the table of the virtual tokens of a model, from that of its parameters."""
    _refuse_encoder(config)
    # A prompt of an encoder-decoder is tokens of the source; all others are keys and values.
    of_source = isinstance(adapter, PromptTuning) and config.family == "encoder_decoder"
    others = {layer.mixer for layer in layer_configs(config, config.n_layers)} - {"attention"}
    if others and not of_source:
        raise ConfigError(
            "virtual tokens (prompt tuning, prefix tuning) are keys and values of"
            f" model.mixer='attention', and here layers have {', '.join(sorted(others))!r}: choose"
            " LoRA, or another model."
        )
    if config.layer_groups:
        raise ConfigError(
            "virtual tokens (prompt tuning, prefix tuning) give each layer keys and values, and"
            f" with model.layer_groups={config.layer_groups} layers share them: choose LoRA."
        )
    if isinstance(adapter, PromptTuning):
        if "tokens" not in specs["embed"]:
            raise ConfigError(
                "prompt tuning puts rows before those of a table of tokens, which model.embedding"
                f".kind={config.embedding.kind} has not: choose prefix tuning or LoRA."
            )
        return prompt_specs(specs, adapter.tokens)
    stacks = {"decoder": specs["blocks"]}
    if "encoder" in specs:
        stacks["encoder"] = specs["encoder"]["blocks"]
    return {name: prefix_specs(blocks, adapter.tokens) for name, blocks in stacks.items()}


def _refuse_encoder(config: ModelConfig) -> None:
    if config.family == "encoder":
        raise ConfigError(
            "virtual tokens (prompt tuning, prefix tuning) are for decoders and encoder-decoders,"
            " and model.family is 'encoder': choose LoRA, or another model."
        )


def prompt_specs(specs: Specs, tokens: int) -> Specs:
    """Return the row of a prompt [P, D]."""
    rows: Spec = specs["embed"]["tokens"]
    shape = (tokens, rows.shape[1])
    axes = ("virtual", rows.axes[1])
    return {"prompt": Spec(shape, axes, rows.init, inputs=("virtual",), lookup=True)}


def prefix_specs(blocks: Specs, tokens: int) -> Specs:
    """Return the rows of the prefix of a stack, in the nesting of its blocks."""
    if "attention" not in blocks:  # the positions of a pattern
        return {name: prefix_specs(layers, tokens) for name, layers in blocks.items()}

    def row(projection: Spec) -> Spec:
        """Return the row of what a projection makes of P tokens: [L, D, K, H] -> [L, P, K, H]."""
        index = projection.axes.index("embed")
        shape = (*projection.shape[:index], tokens, *projection.shape[index + 1 :])
        axes = (*projection.axes[:index], "virtual", *projection.axes[index + 1 :])
        start = normal(0.02)
        return replace(projection, shape=shape, axes=axes, init=start, inputs=(), base_fans=None)

    attention = blocks["attention"]
    return {"prefix_k": row(attention["k"]), "prefix_v": row(attention["v"])}


def first_virtual(table: Specs, base: Params, key: jax.Array) -> Params:
    """Return the initial values of virtual tokens over the params of a model; they depend on the
    key and their path alone, and a prompt on the table of tokens."""
    if "prompt" in table:
        # That of the source, where it has its own.
        of_source = base.get("encoder", {}).get("embed", {})
        tokens = (base["embed"] | of_source)["tokens"]

        def sampled(key: jax.Array, spec: Spec) -> jax.Array:
            """Return [P, D]: rows of the table of tokens [V, D], drawn at random."""
            ids = jax.random.randint(key, spec.shape[:1], 0, tokens.shape[0])
            return lookup(tokens, ids, (None, None))

        table = {"prompt": replace(table["prompt"], init=sampled)}
    # Under the path of the branch, on which the randomness of a leaf depends.
    values: Params = init_params({"virtual": table}, key)["virtual"]
    return values


def virtual_rows(params: Params, config: ModelConfig, specs: Specs) -> Specs:
    """Return the rows that the virtual tokens of params must have in the model with this table."""
    _refuse_encoder(config)
    virtual = params["virtual"]
    expected = {}
    names = [*virtual] if isinstance(virtual, dict) else []
    if "prompt" in names and len(names) > 1:
        raise ConfigError(
            f"params['virtual'] has {', '.join(names)}: a prompt and a prefix exclude each other."
        )
    if "prompt" in names:
        expected = prompt_specs(specs, _count(virtual, -2))
    for name, stack in (("decoder", specs), ("encoder", specs.get("encoder"))):
        if name in names and stack is not None:
            expected[name] = prefix_specs(stack["blocks"], _count(virtual[name], -3))
    return expected


def _count(virtual: Any, axis: int) -> int:
    """Return the number of virtual tokens, the length of an axis of the first leaf, at least 1."""
    shape = next((np.shape(leaf) for leaf in jax.tree.leaves(virtual)), ())
    return max(shape[axis], 1) if len(shape) >= -axis else 1


def virtual_counts(params: Params, config: ModelConfig) -> tuple[int, int]:
    """Return the numbers of virtual tokens before the tokens of a segment, and before those of its
    source."""
    virtual = params.get("virtual", {})
    if "prompt" in virtual:
        tokens = len(virtual["prompt"])
        return (0, tokens) if config.family == "encoder_decoder" else (tokens, 0)
    before = _count(virtual["decoder"], -3) if "decoder" in virtual else 0
    before_source = _count(virtual["encoder"], -3) if "encoder" in virtual else 0
    return before, before_source


def without_virtual(params: Params) -> Params:
    """Return the params without their virtual tokens."""
    return {name: branch for name, branch in params.items() if name != "virtual"}


def has_virtual(params: object) -> bool:
    """Return whether params have virtual tokens."""
    return isinstance(params, Mapping) and "virtual" in params


def with_virtual(
    params: Params, config: ModelConfig, inputs: Inputs, key: jax.Array | None = None
) -> tuple[Params, Inputs]:
    """Return the params and inputs that a family reads instead of params with virtual tokens:
    layers with leading keys, or a source that begins with the prompt.

    Each row of such a source has a copy of the P tokens of the prompt for each of the n segments
    that a row may have, and then its S tokens. Copies for segments that a row does not have are
    padding.
    """
    prompt = params["virtual"].get("prompt")
    params = with_leading_keys(params, config, key)
    if prompt is None or config.family != "encoder_decoder":
        return params, inputs
    source = inputs.source
    layout = inputs.source_layout
    # In later calls of generation the source is in the cache.
    if source is None or layout is None:
        return params, inputs
    tokens = len(prompt)
    rows = layout.positions.shape[0]
    # The static maximum of the number of segments in a row of a source.
    segments = 1
    if isinstance(layout.segments, jax.core.Tracer):
        if not config.attention.max_segments:
            raise ConfigError(
                "a prompt in an encoder-decoder is read once for each segment of a source, and"
                " under jax.jit source_segment_ids are not known: set"
                " model.attention.max_segments to the most that a row has (1 where they only"
                " mark padding)."
            )
        segments = config.attention.max_segments
    elif layout.segments is not None:
        segments = max(int(layout.segments.max()), 1)
    in_prompt = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), segments)  # [n P]

    def for_all_rows(values: jax.Array) -> jax.Array:
        """Map [n P] -> [B, n P]"""
        repeated = jnp.broadcast_to(values, (rows, len(in_prompt)))
        return constrain(repeated, ("batch", "sequence"))

    prompt_ids = in_prompt - tokens  # [n P], of -P .. -1
    positions = for_all_rows(in_prompt)
    ids = for_all_rows(prompt_ids)
    segment_ids = None
    if layout.segments is not None:
        numbers = jnp.arange(1, segments + 1, dtype=jnp.int32)  # [n]
        present = (layout.segments[:, :, None] == numbers).any(1)  # [B, n]
        prompt_segments = jnp.repeat(jnp.where(present, numbers, 0), tokens, axis=1)  # [B, n P]
        segment_ids = jnp.concatenate([prompt_segments, layout.segments], axis=1)  # [B, n P + S]
    with_prompt = TokenLayout(
        jnp.concatenate([positions, layout.positions + tokens], axis=1),
        segment_ids,
        # With segments, the prompt of one segment is not next to its text.
        ordered=layout.ordered and segment_ids is None,
    )
    source = jnp.concatenate([ids, source], axis=1)
    encoder = params["encoder"]
    tables = params["embed"] | encoder.get("embed", {})
    prompted = {"tokens": PromptedTable(tables["tokens"], prompt)}
    encoder = encoder | {"embed": encoder.get("embed", {}) | prompted}
    inputs = replace(inputs, source=source, source_layout=with_prompt)
    return params | {"encoder": encoder}, inputs


def with_leading_keys(params: Params, config: ModelConfig, key: jax.Array | None = None) -> Params:
    """Return params without virtual tokens, in which each layer has their keys and values: those of
    a prefix, or in a decoder of a prompt. A prompt of an encoder-decoder is left out."""
    virtual = params["virtual"]
    params = without_virtual(params)
    if "prompt" in virtual and config.family != "encoder_decoder":
        virtual = {"decoder": prefix_of(params, config, virtual["prompt"], key)}
    if "decoder" in virtual:
        params = params | {"blocks": _inserted(params["blocks"], virtual["decoder"])}
    if "encoder" in virtual:
        encoder = params["encoder"]
        blocks = _inserted(encoder["blocks"], virtual["encoder"])
        params = params | {"encoder": encoder | {"blocks": blocks}}
    return params


def _inserted(blocks: Params, prefix: Params) -> Params:
    """Return stacked blocks whose self-attention has its `prefix_k` and `prefix_v`."""
    # A model with a pattern of layers has stacked blocks for each position of the pattern.
    if "attention" not in blocks:
        return {name: _inserted(stacked, prefix[name]) for name, stacked in blocks.items()}
    return blocks | {"attention": blocks["attention"] | prefix}


def prefix_of(
    params: Params, config: ModelConfig, prompt: jax.Array, key: jax.Array | None = None
) -> Params:
    """Return the prefix of a decoder that is equivalent to a prompt [P, D]: its keys and values in
    each layer, in the nesting of the blocks.

    The layers are run one by one, also where model.layer_loop is scan; a window is at least P.
    """
    tokens = len(prompt)
    window = max(config.window, tokens) if config.window else 0
    config = with_settings(config, {"window": window, "attention.kernel": "xla"})
    # The prompt replaces the table of tokens, and its rows are the tokens 0, 1, ..., P - 1.
    ids = jnp.arange(tokens, dtype=jnp.int32)[None]
    with_prompt = params | {"embed": params["embed"] | {"tokens": prompt}}
    cache = empty_cache(config, 1, tokens, compute_dtype(config))
    heads = (None, None, "kv_heads", None)
    layers = jax.tree.map(lambda entries: constrain(entries, heads), cache.layers)
    cache = replace(cache, layers=layers)
    inputs = Inputs(ids, layout_of(ids, None, None))
    # The dropout of the prompt has another key than that of the tokens.
    key = None if key is None else jax.random.fold_in(key, tokens)
    filled: Cache = decoder_hidden(with_prompt, config, inputs, cache, key).cache
    # The cache has one row: [1, P, K, H] and [1, P, K, W] of each layer.
    prefixes = [{"prefix_k": k.array[0], "prefix_v": v.array[0]} for k, v in filled.layers]
    return stacked_as(params["blocks"], prefixes)


@struct.dataclass
class PromptedTable:
    """The table of tokens [V, D], of ids 0 .. V - 1, with a prompt [P, D], of ids -P .. -1."""

    weight: Weight
    prompt: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def lookup(self, index: jax.Array, to: Axes) -> jax.Array:
        """Look up as `params.lookup` does in a table with both."""
        # Every id is looked up in both tables, at a valid index, and one of the rows is taken.
        token_rows = lookup(self.weight, jnp.maximum(index, 0), to)
        prompt_rows = lookup(self.prompt, jnp.minimum(index, -1) + len(self.prompt), to)
        return jnp.where(index[..., None] < 0, prompt_rows.astype(token_rows.dtype), token_rows)

    def contract(self, equation: str, x: jax.Array, **how: Any) -> jax.Array:
        """Contract as `params.contract` does the table of tokens."""
        return contract(equation, x, self.weight, **how)

    def astype(self, dtype: Any) -> "PromptedTable":
        return PromptedTable(self.weight.astype(dtype), self.prompt.astype(dtype))
