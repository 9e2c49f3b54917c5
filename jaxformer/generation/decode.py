"""Generation: one program reads the prompt into the cache, another runs the whole decode loop on
the device."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.generation.prepare import prepared
from jaxformer.generation.sampling import Sampling, draw, ends, filler
from jaxformer.layers.cache import KVCache, empty_cache
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.encoder_decoder import remember
from jaxformer.models.inputs import Inputs
from jaxformer.models.stack import compute_dtype
from jaxformer.models.transformer import check_model, hidden
from jaxformer.params import Params

SLOTS = 32  # cache and prompt lengths are rounded up to this, so that few programs are compiled

EMPTY = (
    "a prompt is empty: give each row at least one token (the end-of-text token starts a new text)."
)


@struct.dataclass
class Stream:
    """Where generation stands: the cache, the next token's logits [B, V], its place, and which rows
    have ended [B]."""

    cache: KVCache
    logits: jax.Array
    layout: TokenLayout
    done: jax.Array
    key: jax.Array


def generate(
    params: Params,
    config: ModelConfig,
    prompt: Any,
    max_new_tokens: int = 64,
    *,
    key: jax.Array | None = None,
    segment_ids: Any = None,
    source: Any = None,
    source_segment_ids: Any = None,
    **sampling: Any,
) -> jax.Array:
    """New tokens for each prompt: [B, T] int -> [B, max_new_tokens] int32.

    `segment_ids` [B, T] are 0 on padding, on the left or the right. An encoder-decoder reads
    `source` [B, S], with its `source_segment_ids`, and continues a prompt that begins with its
    start token. `sampling` are the fields of `Sampling`: temperature (0 is greedy), top_k, top_p,
    end_token (or several), vocab_size; behind a row's end is the (first) end token. `key` may be
    left out where sampling is greedy. Raises ConfigError for an empty prompt or one that leaves no
    room.
    """
    rules = Sampling(**sampling)
    sources = {"source": source, "source_segment_ids": source_segment_ids}
    stream = start(
        params,
        config,
        prompt,
        max_new_tokens,
        key=_key(key, rules),
        segment_ids=segment_ids,
        **sources,
    )
    return decode(prepared(params, config), config, rules, max_new_tokens, stream)[0]


def stream_tokens(
    params: Params,
    config: ModelConfig,
    prompt: Any,
    max_new_tokens: int,
    *,
    key: jax.Array,
    source: Any = None,
    chunk: int = 8,
    **sampling: Any,
) -> Iterator[np.ndarray]:
    """`generate` in pieces: arrays [B, chunk] as they are made, until max_new_tokens or all rows
    have ended."""
    rules = Sampling(**sampling)
    stream = start(params, config, prompt, max_new_tokens, key=key, source=source)
    weights = prepared(params, config)
    for made in range(0, max_new_tokens, chunk):
        tokens, stream = decode(weights, config, rules, chunk, stream)
        yield np.asarray(tokens)[:, : max_new_tokens - made]
        if bool(stream.done.all()):
            return


def _key(key: jax.Array | None, rules: Sampling) -> jax.Array:
    if key is None and rules.temperature > 0:
        raise ConfigError(
            "sampling at a temperature needs key=jax.random.key(...); temperature=0 is greedy and"
            " needs none."
        )
    return jax.random.key(0) if key is None else key


def start(
    params: Params,
    config: ModelConfig,
    prompt: Any,
    max_new_tokens: int,
    *,
    key: jax.Array,
    segment_ids: Any = None,
    source: Any = None,
    source_segment_ids: Any = None,
) -> Stream:
    """The stream after the prompt was read; ConfigError where the prompt cannot be continued."""
    check_model(params, config)
    if config.output != "language":
        raise ConfigError(
            f"a model with the head {config.output!r} does not write text; generation needs one"
            " that does."
        )
    if (config.family == "encoder_decoder") != (source is not None):
        raise ConfigError(
            "an encoder-decoder writes from source=[B, S], which is missing."
            if source is None
            else f"source= is for an encoder-decoder, and model.family is {config.family!r}."
        )
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    tokens, segments = _read(config, "prompt", prompt, segment_ids)
    longest = int((segments != 0).sum(axis=1).max())
    if longest + max_new_tokens > config.max_length:
        space = max(config.max_length - longest, 0)
        raise ConfigError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the context of"
            f" model.max_length={config.max_length}: shorten the prompt, or ask for at most {space}"
            " new tokens."
        )
    slots = -(-(tokens.shape[1] + max_new_tokens) // SLOTS) * SLOTS
    read = None if source is None else _read(config, "source", source, source_segment_ids)
    if read is not None and (longest := int((read[1] != 0).sum(axis=1).max())) > config.max_length:
        raise ConfigError(
            f"a source of {longest} tokens exceeds model.max_length={config.max_length}:"
            " shorten it."
        )
    if read is not None and read[0].shape[0] != tokens.shape[0]:
        raise ConfigError(f"source has {read[0].shape[0]} rows, and the prompt {tokens.shape[0]}.")
    return _prefill(params, config, slots, (tokens, segments), read, key)


def _read(
    config: ModelConfig, name: str, rows: Any, segment_ids: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments (1, or 0 on padding) [B, T] int32, padded on the left to a length that
    programs are made for."""
    tokens = np.asarray(rows)
    if tokens.size == 0:
        raise ConfigError(EMPTY)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"{name} must be integer tokens [B, T], not {tokens.dtype}{list(tokens.shape)}."
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ConfigError(
            f"{name} tokens must lie in 0 .. {config.vocab_size - 1}, and one is {tokens.min()} or"
            f" {tokens.max()}."
        )
    segments = np.ones_like(tokens) if segment_ids is None else np.asarray(segment_ids) != 0
    if segments.shape != tokens.shape:
        raise ConfigError(
            f"the segment ids of {name} have shape {list(segments.shape)}, its tokens"
            f" {list(tokens.shape)}."
        )
    if not segments.any(axis=1).all():
        raise ConfigError(EMPTY)
    pad = (
        -tokens.shape[1] % SLOTS if tokens.shape[1] > 1 else 0
    )  # a start token alone needs no width
    return tuple(np.pad(a, ((0, 0), (pad, 0))).astype(np.int32) for a in (tokens, segments))  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _prefill(
    params: Params, config: ModelConfig, slots: int, prompt: Any, source: Any | None, key: jax.Array
) -> Stream:
    tokens, segments = prompt
    layout = layout_of(tokens, None, segments)
    cache = empty_cache(config, tokens.shape[0], slots, compute_dtype(config))
    inputs = Inputs(tokens, layout)
    if source is not None:
        heard = layout_of(source[0], None, source[1])
        cache = remember(params, config, Inputs(tokens, layout, None, source[0], heard), cache)
    x, cache, _ = hidden(params, config, inputs, cache)
    index = jnp.arange(tokens.shape[1])
    last = jnp.max(jnp.where(segments != 0, index, -1), axis=1, keepdims=True)
    position, segment = (jnp.take_along_axis(a, last, axis=1) for a in (layout.positions, segments))
    logits = head(
        params,
        config,
        jnp.take_along_axis(x, last[..., None], axis=1),
        TokenLayout(position, segment),
    )[:, 0]
    after = TokenLayout(position + 1, segment)
    return Stream(cache, logits, after, jnp.zeros(tokens.shape[0], bool), key)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=4)
def decode(
    params: Params, config: ModelConfig, rules: Sampling, n: int, stream: Stream
) -> tuple[jax.Array, Stream]:
    """`n` more tokens [B, n]; fewer steps are run where all rows end."""
    blank = filler(rules.end_token)
    made = jnp.full((stream.logits.shape[0], n), blank, jnp.int32)

    def going(carry: tuple[jax.Array, jax.Array, Stream]) -> jax.Array:
        i, _, stream = carry
        return (i < n) & ~stream.done.all()

    def one(carry: tuple[jax.Array, jax.Array, Stream]) -> tuple[jax.Array, jax.Array, Stream]:
        i, made, stream = carry
        key, now = jax.random.split(stream.key)
        token = jnp.where(stream.done, blank, draw(stream.logits, now, rules))
        x, cache, _ = hidden(params, config, Inputs(token[:, None], stream.layout), stream.cache)
        done = stream.done | ends(token, rules.end_token)
        after = TokenLayout(stream.layout.positions + 1, stream.layout.segments)
        logits = head(params, config, x, stream.layout)[:, 0]
        return i + 1, made.at[:, i].set(token), Stream(cache, logits, after, done, key)  # type: ignore[arg-type]

    _, made, stream = jax.lax.while_loop(going, one, (jnp.int32(0), made, stream))
    return made, stream
