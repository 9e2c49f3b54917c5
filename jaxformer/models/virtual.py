"""How a model reads virtual tokens. Those of prefix tuning, and of prompt tuning in a decoder, are
keys and values before those of the tokens; a prompt in an encoder-decoder is tokens of the source.

In a causal stack the activations of a prompt depend on the prompt alone, so its keys and values are
the same for all rows and segments, and are computed once.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxformer.adapters.virtual_tokens import prefix_specs, prompt_specs, without_virtual
from jaxformer.arrays.params import Params, Specs, Weight, check_params, contract, lookup
from jaxformer.arrays.sharding import Axes, constrain
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.layers.cache import KVCache, empty_cache
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models import decoder
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import compute_dtype, layers_of, stacked_as


def refuse_encoder(config: ModelConfig) -> None:
    """Raises ConfigError for an encoder."""
    if config.family == "encoder":
        raise ConfigError(
            "virtual tokens (prompt tuning, prefix tuning) are for decoders and encoder-decoders,"
            " and model.family is 'encoder': choose LoRA, or another model."
        )


def checked(params: Params, config: ModelConfig, specs: Specs) -> Params:
    """Params without their virtual tokens. Raises ConfigError if these do not fit the model whose
    table is `specs`."""
    refuse_encoder(config)
    virtual, expected = params["virtual"], {}
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
    check_params({"virtual": expected}, {"virtual": virtual})
    return without_virtual(params)


def _count(virtual: Any, axis: int) -> int:
    """The number of virtual tokens, the length of an axis of the first leaf, but at least 1."""
    shape = next((np.shape(leaf) for leaf in jax.tree.leaves(virtual)), ())
    return max(shape[axis], 1) if len(shape) >= -axis else 1


def virtual_counts(params: Params, config: ModelConfig) -> tuple[int, int]:
    """The numbers of virtual tokens before the tokens of a segment, and before those of its
    source."""
    virtual = params.get("virtual", {})
    if "prompt" in virtual:
        tokens = len(virtual["prompt"])
        return (0, tokens) if config.family == "encoder_decoder" else (tokens, 0)
    before, before_source = (
        _count(virtual[stack], -3) if stack in virtual else 0 for stack in ("decoder", "encoder")
    )
    return before, before_source


def context(params: Params, config: ModelConfig, source: bool = False) -> int:
    """How many tokens, or tokens of a source, a segment may have: model.max_length, less the
    virtual tokens before them where these take rows of a table of positions."""
    before = virtual_counts(params, config)[source] if config.positions == "learned" else 0
    return max(config.max_length - before, 0)


def with_virtual(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    cache: KVCache | None = None,
    key: jax.Array | None = None,
) -> tuple[Params, Inputs]:
    """The params and inputs that a family reads instead of params with virtual tokens: layers with
    a prefix, positions that begin after it, or a source that begins with the prompt.

    Raises ConfigError if there are not enough learned positions. With a cache this is not checked:
    generation calls `context` before.
    """
    if cache is None:
        _check_context(params, config, inputs)
    virtual, params = params["virtual"], without_virtual(params)
    if "prompt" in virtual:
        if config.family == "encoder_decoder":
            return _with_prompt(params, config, inputs, virtual["prompt"])
        virtual = {"decoder": prefix_of(params, config, virtual["prompt"], key)}
    if "decoder" in virtual:
        prefix = virtual["decoder"]
        params = params | {"blocks": _inserted(params["blocks"], prefix)}
        inputs = replace(inputs, layout=_behind(inputs.layout, _count(prefix, -3)))
    if "encoder" in virtual and inputs.source_layout is not None:
        prefix, encoder = virtual["encoder"], params["encoder"]
        params = params | {"encoder": encoder | {"blocks": _inserted(encoder["blocks"], prefix)}}
        layout = _behind(inputs.source_layout, _count(prefix, -3))
        inputs = replace(inputs, source_layout=layout)
    return params, inputs


def _check_context(params: Params, config: ModelConfig, inputs: Inputs) -> None:
    """Raises ConfigError for rows longer than the learned positions after the virtual tokens."""
    if config.positions != "learned":
        return
    for name, layout in (("tokens", inputs.layout), ("source", inputs.source_layout)):
        # There is no source, or the caller passes positions.
        if layout is None or not layout.ordered:
            continue
        limit, length = context(params, config, name == "source"), layout.positions.shape[1]
        if length > limit:
            raise ConfigError(
                f"{name} has rows of {length}, and behind {config.max_length - limit} virtual"
                f" tokens the learned positions of model.max_length={config.max_length} reach"
                f" {limit}: shorten the rows, or use fewer virtual tokens."
            )


def _behind(layout: TokenLayout, tokens: int) -> TokenLayout:
    """The layout with its positions after those of `tokens` virtual tokens."""
    return replace(layout, positions=layout.positions + tokens, virtual=tokens)


def _inserted(blocks: Any, prefix: Any) -> Any:
    """Blocks whose self-attention has its `prefix_k` and `prefix_v`: stacked, or a list of
    layers."""
    if isinstance(blocks, list):
        pairs = zip(blocks, layers_of(prefix), strict=True)
        return [_inserted(layer, layer_prefix) for layer, layer_prefix in pairs]
    # A model with a pattern of layers has stacked blocks for each position of the pattern.
    if "attention" not in blocks:
        return {name: _inserted(stacked, prefix[name]) for name, stacked in blocks.items()}
    return blocks | {"attention": blocks["attention"] | prefix}


def prefix_of(
    params: Params, config: ModelConfig, prompt: jax.Array, key: jax.Array | None = None
) -> Params:
    """The prefix of a decoder that is equivalent to a prompt [P, D]: its keys and values in each
    layer, in the nesting of the blocks.

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
    k = tuple(constrain(layer, heads) for layer in cache.k)
    v = tuple(constrain(layer, heads) for layer in cache.v)
    cache = replace(cache, k=k, v=v)
    inputs = Inputs(ids, layout_of(ids, None, None))
    # The dropout of the prompt has another key than that of the tokens.
    key = None if key is None else jax.random.fold_in(key, tokens)
    filled: KVCache = decoder.hidden(with_prompt, config, inputs, cache, key).cache
    # The cache has one row: [1, P, K, H] and [1, P, K, W] of each layer.
    layers = [{"prefix_k": k[0], "prefix_v": v[0]} for k, v in zip(filled.k, filled.v, strict=True)]
    return stacked_as(params["blocks"], layers)


def for_decoding(params: Params, config: ModelConfig) -> Params:
    """The virtual tokens as the decode loop reads them: the prefix of each layer of the decoder, if
    it has one, in the dtype of the products. Those of the encoder were read with the source."""
    virtual, below = params["virtual"], without_virtual(params)
    if "prompt" in virtual and config.family != "encoder_decoder":
        virtual = {"decoder": prefix_of(below, config, virtual["prompt"])}
    if "decoder" not in virtual:
        return {}
    dtype = compute_dtype(config)
    return {"decoder": layers_of(jax.tree.map(lambda a: a.astype(dtype), virtual["decoder"]))}


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

    def contract(self, equation: str, x: jax.Array, *, to: Axes | None, dtype: Any) -> jax.Array:
        """As `params.contract` of the table of tokens."""
        return contract(equation, x, self.weight, to=to, dtype=dtype)

    def astype(self, dtype: Any) -> "PromptedTable":
        return PromptedTable(self.weight.astype(dtype), self.prompt.astype(dtype))


def _with_prompt(
    params: Params, config: ModelConfig, inputs: Inputs, prompt: jax.Array
) -> tuple[Params, Inputs]:
    """The params and inputs of an encoder-decoder whose source begins with the prompt: each row has
    a copy of the P tokens of the prompt for each of the n segments that a row may have, and then
    its S tokens. Copies for segments that a row does not have are padding."""
    source, layout = inputs.source, inputs.source_layout
    # In later calls of generation the source is in the cache.
    if source is None or layout is None:
        return params, inputs
    tokens, rows = len(prompt), layout.positions.shape[0]
    segments = _segments_of_source(config, layout.segments)
    in_prompt = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), segments)  # [n P]

    def for_all_rows(values: jax.Array) -> jax.Array:
        """[n P] -> [B, n P]"""
        repeated = jnp.broadcast_to(values, (rows, len(in_prompt)))
        return constrain(repeated, ("batch", "sequence"))

    prompt_ids = in_prompt - tokens  # [n P], of -P .. -1
    positions, ids = for_all_rows(in_prompt), for_all_rows(prompt_ids)
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
    table = {"tokens": PromptedTable(params["embed"]["tokens"], prompt)}
    encoder = params["encoder"]
    encoder = encoder | {"embed": encoder.get("embed", {}) | table}
    inputs = replace(inputs, source=source, source_layout=with_prompt)
    return params | {"encoder": encoder}, inputs


def _segments_of_source(config: ModelConfig, segments: jax.Array | None) -> int:
    """The static maximum of the number of segments in a row of a source. Raises ConfigError if it
    is not known."""
    if segments is None:
        return 1
    if not isinstance(segments, jax.core.Tracer):
        return max(int(segments.max()), 1)
    if not config.max_segments:
        raise ConfigError(
            "a prompt in an encoder-decoder is read once for each segment of a source, and under"
            " jax.jit source_segment_ids are not known: set model.max_segments to the most that a"
            " row has (1 where they only mark padding)."
        )
    return config.max_segments
