"""Generation: one program reads the prompt into the cache, another runs the decode loop on the
device.

In the comments, B is the number of rows, T the length of a prompt and S that of a source, D the
width of the model and V the size of the vocabulary.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import ArrayLike

from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import platform
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.generation.prompts import capacity, read_rows, rung
from jaxformer.generation.sampling import Sampling, draw, sampling_key
from jaxformer.generation.stop_strings import StopStrings, TokenBytes
from jaxformer.generation.text_so_far import TextSoFar, ends, filler
from jaxformer.generation.weights import on_automatic_axes, prepared
from jaxformer.layers.block import empty_cache
from jaxformer.layers.cache import Cache
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.inputs import Inputs, warn_of_padding
from jaxformer.models.stack import compute_dtype
from jaxformer.models.transformer import check_model, context_of, hidden

ModelRows = tuple[np.ndarray, np.ndarray]  # tokens and segment ids, int32 [B, T] each


@struct.dataclass
class Stream:
    """The state of generation: the cache, the logits of the next token [B, V] float32, its position
    [B, 1], which rows have ended [B] bool, the key of the tokens to come, and the texts so far."""

    cache: Cache
    logits: jax.Array
    position: jax.Array
    done: jax.Array
    key: jax.Array
    written: TextSoFar


@on_automatic_axes
def generate(
    params: Params,
    config: ModelConfig,
    prompt: ArrayLike,
    max_new_tokens: int = 64,
    *,
    key: jax.Array | None = None,
    n: int = 1,
    segment_ids: ArrayLike | None = None,
    source: ArrayLike | None = None,
    source_segment_ids: ArrayLike | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: TokenBytes | None = None,
    **sampling: Any,
) -> jax.Array:
    """Return new tokens for each prompt: [B, T] int -> [B, max_new_tokens] int32.

    `segment_ids` [B, T] are 0 on padding, on the left or the right; without them, rows that look
    padded are warned of. An encoder-decoder reads `source` [B, S], with its `source_segment_ids`,
    and continues a prompt that begins with its start token. `sampling` are the fields of
    `Sampling`, which docs/generation.md has with their formulas: temperature (0 is greedy), top_k,
    top_p, min_p, end_token (or several), vocab_size; presence_penalty, frequency_penalty, rule (a
    function of the caller); and what a published model says in its files and
    `**jf.writing_rules(tokenizer)` gives: suppress_tokens, begin_suppress_tokens, bad_words,
    min_length, min_new_tokens, no_repeat_ngram_size, forced_eos_token_id, repetition_penalty (each
    as in transformers). A text also ends with the token that completes one of `stop_strings`, which
    need `tokenizer` and cannot be used under a transform of JAX. With n=4 a prompt is read once and
    continued four times: text j of prompt i is row 4 i + j. After its end a row is filled with the
    (first) end token. `key` may be left out where sampling is greedy. Raises ConfigError for an
    empty prompt, and for one that leaves no space for the new tokens.
    """
    warn_of_padding("prompt", prompt, segment_ids, level=4)
    warn_of_padding("source", source, source_segment_ids, level=4)
    rules = Sampling(**sampling)
    texts: dict[str, Any] = {
        "key": sampling_key(key, rules),
        "n": n,
        "segment_ids": segment_ids,
        "sources": (source, source_segment_ids),
    }
    if stop_strings:
        # Python looks for them between pieces of a text.
        how = texts | {"stop_strings": stop_strings, "tokenizer": tokenizer} | sampling
        pieces = [*stream_tokens(params, config, prompt, max_new_tokens, **how)]
        made = np.concatenate(pieces, axis=1)
        unused = max_new_tokens - made.shape[1]
        return jnp.pad(made, ((0, 0), (0, unused)), constant_values=filler(rules.end_token))
    stream = start(params, config, prompt, max_new_tokens, **texts)
    weights = prepared(params, config)
    return fitted(weights)(weights, config, rules, max_new_tokens, stream, True)[0]


def stream_tokens(
    params: Params,
    config: ModelConfig,
    prompt: ArrayLike,
    max_new_tokens: int,
    *,
    key: jax.Array,
    n: int = 1,
    segment_ids: ArrayLike | None = None,
    sources: tuple[ArrayLike | None, ArrayLike | None] = (None, None),
    stop_strings: Sequence[str] = (),
    tokenizer: TokenBytes | None = None,
    chunk: int = 8,
    **sampling: Any,
) -> Iterator[np.ndarray]:
    """`generate` in pieces: arrays [B, chunk] as they are made, until max_new_tokens or all rows
    have ended. `sources` is a source with its segment ids. A stop string is found when its piece is
    there: up to chunk - 1 tokens behind it are made for nothing, and replaced by the filler."""
    rules = Sampling(**sampling)
    stops = None
    if stop_strings:
        stops = StopStrings(stop_strings, tokenizer)
    stream = start(params, config, prompt, max_new_tokens, key, segment_ids, sources, n)
    weights = prepared(params, config)
    program = fitted(weights)
    texts = np.zeros((stream.done.shape[0], 0), np.int32)
    for made in range(0, max_new_tokens, chunk):
        tokens, stream = program(weights, config, rules, chunk, stream)
        piece = np.asarray(tokens)[:, : max_new_tokens - made]
        if stops is not None:
            texts = np.concatenate([texts, piece], axis=1)
            lengths = np.array([stops.length(text) for text in texts.tolist()])
            is_after = np.arange(made, texts.shape[1]) >= lengths[:, None]
            is_stopped = lengths > 0
            piece = np.where(is_stopped[:, None] & is_after, filler(rules.end_token), piece)
            stream = replace(stream, done=stream.done | is_stopped)
        yield piece
        if bool(stream.done.all()):
            return


def start(
    params: Params,
    config: ModelConfig,
    prompt: ArrayLike,
    max_new_tokens: int,
    key: jax.Array,
    segment_ids: ArrayLike | None = None,
    sources: tuple[ArrayLike | None, ArrayLike | None] = (None, None),
    n: int = 1,
    spare: int = 0,
) -> Stream:
    """Return the stream after the prompt was read; the arguments are those of `generate`, `sources`
    its source with its segment ids, and `spare` the slots beyond the longest text."""
    check_model(params, config)
    source, source_segment_ids = sources
    if config.output != "language":
        raise ConfigError(
            f"a model with the head {config.output!r} does not write text: generation needs the"
            " head 'language'."
        )
    if (source is None) != (config.family != "encoder_decoder"):
        raise ConfigError(
            "source= is for an encoder-decoder, which writes from source=[B, S]; here it is"
            f" {'missing' if source is None else 'given'}, and model.family is {config.family!r}."
        )
    for name, value in (("max_new_tokens", max_new_tokens), ("n", n)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    tokens, segments = read_rows(config, "prompt", prompt, segment_ids)
    source_rows = None
    longest_source = 0
    if source is not None:
        source_rows = read_rows(config, "source", source, source_segment_ids)
        source_tokens, source_segments = source_rows
        if len(source_tokens) != len(tokens):
            raise ConfigError(
                f"source has {len(source_tokens)} rows, and the prompt {len(tokens)}."
            )
        longest_source = int(source_segments.sum(axis=1).max())
    longest = int(segments.sum(axis=1).max())
    space = capacity(params, config, longest, longest_source)
    if max_new_tokens > space:
        raise ConfigError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the context of"
            f" {context_of(params, config)} (model.max_length={config.max_length}): shorten the"
            f" prompt, or ask for at most {space} new tokens."
        )
    lengths = segments.sum(axis=1)
    original = config.original_length
    crosses = (lengths <= original) & (lengths + max_new_tokens > original)
    if config.rope.scaling == "longrope" and crosses.any():
        warnings.warn(
            f"a text that crosses {original} tokens (model.rope.original_length) while it is"
            " written keeps the rotations of its beginning, where transformers reads it anew: end"
            " a call there, and continue its text by another.",
            stacklevel=3,
        )
    slots = rung(tokens.shape[1] + max_new_tokens + spare, config.max_length)
    limit = np.int32(max_new_tokens)
    weights = params
    if "virtual" not in params:  # prepared weights lack the prompt of a source
        weights = prepared(params, config)
    stream = _prefill(weights, config, slots, (tokens, segments), source_rows, key, limit)
    # `bool` waits for the device, once a call.
    if not isinstance(stream.logits, jax.core.Tracer) and bool(jnp.isnan(stream.logits).any()):
        raise ConfigError(
            "the logits after the prompt are NaN: the weights hold numbers that are not finite, or"
            " overflow in this dtype."
        )
    if n > 1:
        stream = jax.jit(repeated, static_argnums=1)(stream, n)
    return stream


@functools.partial(jax.jit, static_argnums=(1, 2))
def _prefill(
    params: Params,
    config: ModelConfig,
    slots: int,
    prompt: ModelRows,
    source: ModelRows | None,
    key: jax.Array,
    max_new_tokens: np.int32,
) -> Stream:
    """Return the stream after the prompt; `max_new_tokens` is an array, so that one program serves
    all."""
    tokens, segments = map(jnp.asarray, prompt)
    layout = layout_of(tokens, None, segments)
    cache = empty_cache(config, tokens.shape[0], slots, compute_dtype(config))
    inputs = Inputs(tokens, layout)
    if source is not None:
        # The encoder runs once; from here on the cache has the keys and values of the source.
        source_tokens, source_segments = map(jnp.asarray, source)  # [B, S]
        source_layout = layout_of(source_tokens, None, source_segments)
        inputs = replace(inputs, source=source_tokens, source_layout=source_layout)
    # A row is one text.
    x, cache, _ = hidden(
        params, with_settings(config, {"attention.max_segments": 1}), inputs, cache
    )  # [B, T, D]

    # Rows may be padded on either side: the last token of each is where its segment id last is not
    # 0. Only its logits are computed.
    index = jnp.arange(tokens.shape[1])
    last = jnp.max(jnp.where(segments != 0, index, -1), axis=1, keepdims=True)  # [B, 1]
    position, segment = (jnp.take_along_axis(a, last, axis=1) for a in (layout.positions, segments))
    x = jnp.take_along_axis(x, last[..., None], axis=1)  # [B, 1, D]
    logits = head(params, config, x, TokenLayout(position, segment))[:, 0]
    written = TextSoFar.prompt(tokens, segments, slots, jnp.asarray(max_new_tokens))
    done = jnp.zeros(tokens.shape[0], bool)
    # All rows share the slot of the next token, and each has its own position.
    return Stream(cache, logits, position + 1, done, key, written)


def read(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Cache,
    done: jax.Array | bool = False,
) -> tuple[jax.Array, Cache]:
    """Return the logits [B, T, V] after each of the tokens [B, T] at `positions`, and the cache of
    them too. Rows that are `done` [B, 1] run on with the others, as padding that no row reads."""
    layout = TokenLayout(positions, jnp.where(done, 0, jnp.ones_like(positions)))
    x, cache, _ = hidden(params, config, Inputs(tokens, layout), cache)
    return head(params, config, x, layout), cache


def repeated(tree: Any, times: int) -> Any:
    """Repeat every row [B, ...] of every array: [B times, ...]. Scalars, such as the length of the
    cache, stay."""
    return jax.tree.map(lambda a: jnp.repeat(a, times, axis=0) if a.ndim else a, tree)


def _decode(
    params: Params,
    config: ModelConfig,
    rules: Sampling,
    n: int,
    stream: Stream,
    final: bool = False,
) -> tuple[jax.Array, Stream]:
    """Return `n` more tokens [B, n] and the stream after them; fewer steps are run where all end.
    With `final` the model does not read the very last of them, and the stream is that before it."""
    made = jnp.full((stream.done.shape[0], n), filler(rules.end_token), jnp.int32)
    steps = n
    if final:
        # Nothing is drawn after the very last token, which would be read for nothing.
        steps = n - 1
    if steps:
        drawn = functools.partial(_drawn, rules=rules)
        made, stream = continued(params, config, rules, steps, made, stream, drawn, TextSoFar.add)
    if final:
        token, _ = _drawn(stream, rules)
        made = made.at[:, steps].set(token)
    return made, stream


_program = functools.partial(jax.jit, _decode, static_argnums=(1, 2, 3, 5), donate_argnums=4)
decode = _program()
_decode_wide = _program(compiler_options={"xla_cpu_prefer_vector_width": 512})


def fitted(weights: Params) -> Any:
    """Return `decode` as it is compiled for these weights. On a CPU loops over codes of int8 have
    vectors of 512 bits instead of the 256 that XLA prefers: a token of GPT-2 124M takes 0.9 and one
    of SmolLM2-135M 0.8 times as long (an AMD EPYC with AVX-512). With NF4, which looks values up,
    it would take 1.2 times as long."""
    leaves = jax.tree.leaves(weights)
    # Under a transform of JAX a program has no options of its own.
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if is_traced or platform() != "cpu" or all(leaf.dtype != jnp.int8 for leaf in leaves):
        return decode
    return _decode_wide


# The state of the loop: the number of the step, what is noted of all steps and the stream.
_DecodeCarry = tuple[jax.Array, Any, Stream]


def continued(
    params: Params,
    config: ModelConfig,
    rules: Sampling,
    steps: int | jax.Array,
    made: Any,
    stream: Stream,
    drawn: Callable[[Stream], tuple[jax.Array, jax.Array]],
    add: Callable[[TextSoFar, jax.Array], TextSoFar],
    noted: Callable[[Stream, jax.Array], Any] = lambda stream, token: token,
) -> tuple[Any, Stream]:
    """Return the tokens [B, n] and the stream after at most `steps` steps; fewer where all rows
    end.

    `made` has the tokens that stand where a row has ended. `drawn` gives the next token of each row
    [B] and the key after it, and `add` the texts with one more token [B]. `noted` gives what is
    returned of a step, arrays [B, ...] in place of the tokens alone; `made` has arrays
    [B, n, ...] of them."""

    def unfinished(carry: _DecodeCarry) -> jax.Array:
        i, _, stream = carry
        return (i < steps) & ~stream.done.all()

    def step(carry: _DecodeCarry) -> _DecodeCarry:
        i, made, stream = carry
        done = stream.done
        token, key = drawn(stream)
        position = stream.position
        # [B, 1, V]: one token of each row, also of rows that have ended.
        logits, cache = read(
            params, config, token[:, None], position, stream.cache, done=done[:, None]
        )

        def put(array: jax.Array, new: jax.Array) -> jax.Array:
            ended = done.reshape(-1, *[1] * (new.ndim - 1))
            return array.at[:, i].set(jnp.where(ended, array[:, i], new))

        made = jax.tree.map(put, made, noted(stream, token))
        written = add(stream.written, token)
        done = done | ends(token, rules.end_token) | (written.count >= written.limit)
        return i + 1, made, Stream(cache, logits[:, 0], position + 1, done, key, written)

    _, made, stream = jax.lax.while_loop(unfinished, step, (jnp.int32(0), made, stream))
    return made, stream


def _drawn(stream: Stream, rules: Sampling) -> tuple[jax.Array, jax.Array]:
    """Return the next token of each row [B], the filler where it has ended, and the key after."""
    key, token_key = jax.random.split(stream.key)
    token = draw(stream.logits, token_key, rules, stream.written)
    return jnp.where(stream.done, filler(rules.end_token), token), key
