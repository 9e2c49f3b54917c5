"""Many prompts in a few rows: where a text ends, the next prompt takes its row, so that the device
never waits for the longest text.

A prompt is read by itself, and what the layers keep of it is put into the cache of all rows. The
newest slot is the same for all rows, and a prompt ends there. After the last slot comes the first
again: they are as many as the tokens of the longest text, so that only those of texts that have
ended are overwritten. One program reads prompts of a length of a short ladder, and one makes a
chunk of tokens of all rows. The key of a token is that of its prompt and its place in the text, so
that a text does not depend on its row or on the texts beside it.

In the comments, B is the number of rows, S that of the slots of the cache and V the size of the
vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.decode import Stream, continued, start
from jaxformer.generation.prompts import EMPTY, capacity, padded, rung
from jaxformer.generation.sampling import Sampling, draw, sampling_key
from jaxformer.generation.text_so_far import TextSoFar
from jaxformer.generation.weights import prepared
from jaxformer.layers.cache import Slots, is_slots

CHUNK = 16  # tokens of each row between two looks at which texts have ended
NO_TOKEN = -1  # in place of a token of a row whose text has ended

Tokens = Sequence[int]
EndsText = Callable[[int, list[int]], bool]


def refill(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[Tokens],
    max_new_tokens: int = 64,
    *,
    rows: int = 8,
    key: jax.Array | None = None,
    sources: Sequence[Tokens] | None = None,
    stopped: EndsText = lambda number, tokens: False,
    **sampling: Any,
) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of a prompt, from 0, and its new tokens with the end token, as texts end.

    `rows` prompts are continued at a time. A text has at most `max_new_tokens` tokens, and as many
    as fit into the context behind its prompt. An encoder-decoder reads a source for each prompt.
    `stopped(number, tokens)` is asked after each `CHUNK` tokens of a text whether it ends there.
    `sampling` are the fields of `Sampling`, as for `jf.generate`, of which greedy texts are those
    that it writes for each prompt by itself. Sampled ones need `key`, and are the same for any
    `rows`, and whatever the other prompts are. Raises ConfigError for an empty prompt, one that
    leaves no space for a token, and what `jf.generate` refuses.
    """
    rules = Sampling(**sampling)
    key = sampling_key(key, rules)
    if rows < 1:
        raise ConfigError(f"rows={rows} must be at least 1.")
    if not all(map(len, prompts)) or not all(map(len, sources or ())):
        raise ConfigError(EMPTY)
    if sources is not None and len(sources) != len(prompts):
        raise ConfigError(
            f"there are {len(sources)} sources and {len(prompts)} prompts: give a source for each"
            " prompt."
        )
    if not prompts:
        return
    config = replace(config, layer_loop="unroll")  # its programs run often
    source_of = sources or [()] * len(prompts)  # a decoder reads none
    longest = max(map(len, prompts))
    longest_source = max(map(len, source_of))

    def read(
        params: Params, prompt: Tokens, source: Tokens, key: jax.Array, count: int, **more: int
    ) -> Stream:
        """Return the stream after a prompt, of one row."""
        tokens, segments = padded([prompt], _padded_length(len(prompt), longest), left=True)
        of_source: tuple[Any, Any] = (None, None)
        if source:
            of_source = padded([source], _padded_length(len(source), longest_source))
        return start(params, config, tokens, count, key, segments, of_source, **more)

    def longest_rows(params: Params) -> Stream:
        spare = max_new_tokens - 1
        prompt = [0] * longest
        source = [0] * longest_source
        stream = read(params, prompt, source, jax.random.key(0), 1, n=rows, spare=spare)
        return replace(stream, key=jnp.int32(0))  # there are no zeros of a key

    rows = min(rows, len(prompts))
    stream = _empty_rows(jax.eval_shape(longest_rows, params), rows)
    weights = prepared(params, config)
    waiting = iter(range(len(prompts)))
    texts: dict[int, tuple[int, list[int]]] = {}  # by row: the number of a prompt, its new tokens
    while True:
        # Each free row takes the next prompt, read by itself: as many programs as rungs of length.
        free = [row for row in range(rows) if row not in texts]
        for row, number in zip(free, waiting, strict=False):
            prompt = prompts[number]
            source = source_of[number]
            space = capacity(params, config, len(prompt), len(source))
            count = min(max_new_tokens, max(space, 1))  # without space `start` raises
            one_row = read(params, prompt, source, jax.random.fold_in(key, number), count)
            stream = _with_prompt(stream, np.int32(row), one_row)
            texts[row] = number, []
        if not texts:
            return
        made, stream = _advance(weights, config, rules, CHUNK, stream)
        done = np.array(stream.done)  # [B]; a copy, since an array of JAX cannot be written
        for row, (number, text) in texts.items():
            new = np.asarray(made)[row]
            text += new[new != NO_TOKEN].tolist()
            done[row] |= stopped(number, text)
        stream = replace(stream, done=jnp.asarray(done))
        for row in [*texts]:
            if done[row]:
                yield texts.pop(row)


def _empty_rows(shapes: Stream, rows: int) -> Stream:
    """Rows without a text, of the shapes of a stream after the longest prompt."""
    stream = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    # The texts so far count their tokens each by itself.
    # Three arrays, since the same one cannot be donated twice.
    counts = [jnp.zeros(rows, jnp.int32) for _ in ("begin", "count", "limit")]
    written = TextSoFar(stream.written.tokens[:, None], *counts)
    keys = jax.random.split(jax.random.key(0), rows)
    done = jnp.ones(rows, bool)
    return replace(stream, done=done, key=keys, written=written)  # type: ignore[no-any-return]


def _padded_length(length: int, longest: int) -> int:
    """Return the length to which a prompt is padded. A prompt of one token, such as the start of a
    target, is not padded where all are."""
    if longest == 1:
        return 1
    return rung(length, longest)


@functools.partial(jax.jit, donate_argnums=0)
def _with_prompt(stream: Stream, row: np.int32, prompt: Stream) -> Stream:
    """Return the rows, one of which holds a prompt that was read by itself."""
    # The newest token of the prompt comes into the newest slot of the rows.
    shift = stream.cache.length - prompt.cache.length

    def put(old: Any, new: Any) -> Any:
        """Return `old` [B, ...] with `new` [1, ...], which may be smaller, in the row."""
        if is_slots(old):
            return Slots(put_numbers(old.array, new.array[0], in_slots=True))
        return put_numbers(old, new[0])

    def put_numbers(old: jax.Array, new: jax.Array, in_slots: bool = False) -> jax.Array:
        if new.ndim:
            space = zip(old.shape[1:], new.shape, strict=True)
            # A prompt may have fewer slots. Those that are added have segment 0, and are empty.
            new = jnp.pad(new, [(0, most - size) for most, size in space])
        if in_slots:
            new = jnp.roll(new, shift, axis=0)
        return old.at[row].set(new)

    def arrays_of_rows(state: Stream) -> Stream:
        """The state without the length, which all rows share; its layout has an entry a slot."""
        layout = jax.tree.map(Slots, state.cache.layout)
        return replace(state, cache=replace(state.cache, layout=layout, length=None))  # type: ignore[arg-type]

    # The texts so far count their tokens each by itself.
    key, written = jax.tree.map(lambda array: array[None], (prompt.key, prompt.written))
    prompt = replace(prompt, key=key, written=written)
    rows = jax.tree.map(put, arrays_of_rows(stream), arrays_of_rows(prompt), is_leaf=is_slots)
    layout = jax.tree.map(lambda slots: slots.array, rows.cache.layout, is_leaf=is_slots)
    cache = replace(rows.cache, layout=layout, length=stream.cache.length)
    return replace(rows, cache=cache)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=4)
def _advance(
    params: Params, config: ModelConfig, rules: Sampling, n: int, stream: Stream
) -> tuple[jax.Array, Stream]:
    """`n` more tokens of each row [B, n], NO_TOKEN after its end, and the rows after them; fewer
    steps are run where all texts end."""

    def drawn(stream: Stream) -> tuple[jax.Array, jax.Array]:
        def of_row(logits: jax.Array, key: jax.Array, written: TextSoFar) -> jax.Array:
            key = jax.random.fold_in(key, written.count)
            return draw(logits[None], key, rules, written)[0]

        token = jax.vmap(of_row)(stream.logits, stream.key, stream.written)
        return jnp.where(stream.done, 0, token), stream.key

    def add(written: TextSoFar, token: jax.Array) -> TextSoFar:
        return jax.vmap(TextSoFar.add)(written, token[:, None])

    made = jnp.full((stream.done.shape[0], n), NO_TOKEN, jnp.int32)
    return continued(params, config, rules, n, made, stream, drawn, add)
