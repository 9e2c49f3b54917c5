"""How a model reads virtual tokens. Those of prefix tuning, and of prompt tuning in a decoder, are
keys and values before those of the tokens; a prompt in an encoder-decoder is tokens of the source.

In a causal stack the activations of a prompt depend on the prompt alone, so its keys and values are
the same for all rows and segments, and are computed once.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.adapters.virtual_tokens import without_virtual
from jaxformer.arrays.params import Params, Weight, contract, lookup
from jaxformer.arrays.sharding import Axes, constrain
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.block import empty_cache
from jaxformer.layers.cache import Cache
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.families import decoder_hidden
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import compute_dtype, stacked_as


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
        if not config.max_segments:
            raise ConfigError(
                "a prompt in an encoder-decoder is read once for each segment of a source, and"
                " under jax.jit source_segment_ids are not known: set model.max_segments to the"
                " most that a row has (1 where they only mark padding)."
            )
        segments = config.max_segments
    elif layout.segments is not None:
        segments = max(int(layout.segments.max()), 1)
    in_prompt = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), segments)  # [n P]

    def for_all_rows(values: jax.Array) -> jax.Array:
        """[n P] -> [B, n P]"""
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
    """Params without virtual tokens, in which each layer has their keys and values: those of a
    prefix, or in a decoder of a prompt. A prompt of an encoder-decoder is left out."""
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
    """Stacked blocks whose self-attention has its `prefix_k` and `prefix_v`."""
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
    config = replace(config, window=window, attention_kernel="xla")
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
        """As `params.lookup` of a table with both."""
        token_rows = lookup(self.weight, jnp.maximum(index, 0), to)
        prompt_rows = lookup(self.prompt, jnp.minimum(index, -1) + len(self.prompt), to)
        return jnp.where(index[..., None] < 0, prompt_rows.astype(token_rows.dtype), token_rows)

    def contract(self, equation: str, x: jax.Array, **how: Any) -> jax.Array:
        """As `params.contract` of the table of tokens."""
        return contract(equation, x, self.weight, **how)

    def astype(self, dtype: Any) -> "PromptedTable":
        return PromptedTable(self.weight.astype(dtype), self.prompt.astype(dtype))
