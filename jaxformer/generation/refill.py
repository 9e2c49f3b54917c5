"""Many prompts in a few rows: where a text ends, the next prompt takes its row, so that the device
never waits for the longest text.

A prompt is read by itself, and what the layers keep of it is put into the cache of all rows. The
newest slot is the same for all rows, and a prompt ends there. After the last slot comes the first
again: they are at least as many as the tokens of the longest text, so that only those of texts that
have ended are overwritten. One program reads prompts of a length of a short ladder, and one makes a
chunk of tokens of all rows. The key of a token is that of its prompt and its place in the text, so
that a text does not depend on its row or on the texts beside it.

In the comments, B is the number of rows, S that of the slots of the cache, V the size of the
vocabulary and n the most tokens that are made at a time.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.exact import log_softmax
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.decode import Stream, continued, start
from jaxformer.generation.prompts import EMPTY, capacity, padded, rung
from jaxformer.generation.sampling import NUMBERS, ROW_AXIS, Sampling, draw, sampling_key
from jaxformer.generation.text_so_far import TextSoFar
from jaxformer.generation.weights import prepared
from jaxformer.layers.cache import Slots, is_slots

CHUNK = 16  # tokens of each row between two looks at which texts have ended
NO_TOKEN = -1  # in place of a token of a row whose text has ended
TOP = 20  # of the likeliest tokens in the place of one, as the API of OpenAI gives at most
LEAST_SLOTS = 128  # of rows whose slots grow with their texts

Tokens = Sequence[int]
EndsText = Callable[[int, list[int]], bool]


class Made(NamedTuple):
    """New tokens of a text: ids [n], and where its row is scored the log-probability of each [n]
    and those of the likeliest tokens in its place, ids and values [n, TOP], as `jf.score` has
    them."""

    tokens: Any
    log_probs: Any = None
    alternatives: Any = None
    alternative_log_probs: Any = None


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
    source_of = sources or [()] * len(prompts)  # a decoder reads none
    longest = (max(map(len, prompts)), max(map(len, source_of)))
    slots = rung(_padded_length(*longest[:1] * 2) + max_new_tokens, config.max_length)
    writer = RowWriter(params, config, rules, min(rows, len(prompts)), longest, slots)
    waiting = iter(range(len(prompts)))
    texts: dict[int, tuple[int, list[int]]] = {}  # by row: the number of a prompt, its new tokens
    while True:
        for _, number in zip(writer.free(), waiting, strict=False):
            prompt = prompts[number]
            source = source_of[number]
            space = capacity(params, config, len(prompt), len(source))
            count = min(max_new_tokens, max(space, 1))  # without space `start` raises
            row = writer.read(prompt, jax.random.fold_in(key, number), count, source)
            texts[row] = number, []
        if not texts:
            return
        for row, made in writer.advance(CHUNK).items():
            number, text = texts[row]
            text += made.tokens.tolist()
            if stopped(number, text):
                writer.end(row)
        for row in writer.free():
            if row in texts:
                yield texts.pop(row)


class RowWriter:
    """Rows in which texts are written side by side: the loop of `refill`, for callers whose prompts
    come later.

    `read` puts a prompt into a free row, `advance` makes the next tokens of all rows, and `end`
    frees a row whose text is not wanted any more. `longest` are the lengths of the longest prompt
    and of the longest source, and `slots` those of the cache; without them they grow with the
    texts and shrink after them, by powers of two, of which each is a program. With
    `own_numbers` each text brings the `NUMBERS` of the rules and whether it is `scored`.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        rules: Sampling,
        rows: int,
        longest: tuple[int, int],
        slots: int = 0,
        own_numbers: bool = False,
    ) -> None:
        self.params = params
        self.config = replace(config, layer_loop="unroll")  # its programs run often
        self.rules = rules
        self.longest = longest
        self.grows = not slots
        self.slots = slots or LEAST_SLOTS
        self._done = np.ones(rows, bool)
        self._lengths = np.zeros(rows, int)  # of each text with its padded prompt
        self._numbers: dict[str, np.ndarray] = {}
        if own_numbers:
            self._numbers = {name: np.zeros(rows, np.float32) for name in NUMBERS}
            self._numbers |= {"top_k": np.zeros(rows, np.int32), "scored": np.zeros(rows, bool)}
        self._last: tuple[Any, Any] = (None, None)  # a prompt with its source, and its stream
        self.weights = prepared(params, self.config)

        def all_rows(params: Params) -> Stream:
            spare = self.slots - 1 - _padded_length(1, longest[0])
            source = [0] * longest[1]
            stream = self._stream(params, [0], source, jax.random.key(0), 1, n=rows, spare=spare)
            return replace(stream, key=jnp.int32(0))  # there are no zeros of a key

        self._all = _empty_rows(jax.eval_shape(all_rows, params), rows)

    def free(self) -> list[int]:
        """Return the rows without a text, or whose text has ended."""
        return np.flatnonzero(self._done).tolist()

    def end(self, row: int) -> None:
        """Frees a row."""
        self._done[row] = True

    def read(
        self, prompt: Tokens, key: jax.Array, count: int, source: Tokens = (), **numbers: Any
    ) -> int:
        """Return the row of a new text of at most `count` tokens. Raises ConfigError for what
        `jf.generate` refuses."""
        row = self.free()[0]
        # Several texts of a prompt read it once. The slots for the new tokens are in the rows.
        text = ([*prompt], [*source])
        if self._last[0] != text:
            stream = self._stream(self.params, prompt, source, key, count, spare=-count)
            self._last = (text, stream)
        stream = self._last[1]
        written = replace(stream.written, limit=jnp.int32(count))
        stream = replace(stream, key=key, written=written)
        self._lengths[row] = stream.written.tokens.shape[1]
        self._done[row] = False
        self._fit()
        self._all = _with_prompt(self._all, np.int32(row), stream)
        for name, value in numbers.items():
            self._numbers[name][row] = value
        return row

    def advance(self, steps: int) -> dict[int, Made]:
        """Return the new tokens of each row that had a text, at most `steps` (up to `CHUNK`) of
        them."""
        running = np.flatnonzero(~self._done).tolist()
        self._lengths[running] += steps
        self._fit()
        stream = replace(self._all, done=jnp.asarray(self._done))
        made, self._all = _advance(
            self.weights, self.config, self.rules, CHUNK, stream, np.int32(steps), self._numbers
        )
        made = jax.device_get(made)
        self._done = np.array(self._all.done)  # a copy, since an array of JAX cannot be written
        texts = {}
        for row in running:
            count = int((made.tokens[row] != NO_TOKEN).sum())
            texts[row] = jax.tree.map(lambda array: array[row, :count], made)  # noqa: B023
        return texts

    def _stream(
        self,
        params: Params,
        prompt: Tokens,
        source: Tokens,
        key: jax.Array,
        count: int,
        **more: int,
    ) -> Stream:
        """Return the stream after a prompt, of one row."""
        tokens, segments = padded([prompt], _padded_length(len(prompt), self.longest[0]), left=True)
        of_source: tuple[Any, Any] = (None, None)
        if len(source):
            of_source = padded([source], _padded_length(len(source), self.longest[1]))
        return start(params, self.config, tokens, count, key, segments, of_source, **more)

    def _fit(self) -> None:
        """Gives the rows as many slots as their texts take, and a few more."""
        longest = int(np.max(self._lengths, where=~self._done, initial=LEAST_SLOTS))
        slots = 1 << (longest - 1).bit_length()
        if self.grows and (slots > self.slots or 4 * slots <= self.slots):
            self._all = _resized(self._all, slots)
            self.slots = slots


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


@functools.partial(jax.jit, static_argnums=1)
def _resized(stream: Stream, slots: int) -> Stream:
    """Return the rows with another number of slots S', which are enough for the running texts."""
    cache = stream.cache
    before = cache.layout.positions.shape[1]

    def resized(array: jax.Array) -> jax.Array:
        """Return [B, S', ...] of [B, S, ...]: the newest entries, the oldest of them first."""
        array = jnp.roll(array, -cache.length, axis=1)
        if slots < before:
            return array[:, before - slots :]
        return jnp.pad(array, [(0, 0), (0, slots - before), *[(0, 0)] * (array.ndim - 2)])

    def of_layer(node: Any) -> Any:
        return Slots(resized(node.array)) if is_slots(node) else node

    # The next token takes the slot after the newest, or the first.
    cache = replace(
        cache,
        layers=jax.tree.map(of_layer, cache.layers, is_leaf=is_slots),
        layout=jax.tree.map(resized, cache.layout),
        length=jnp.int32(min(before, slots)),
    )
    tokens = stream.written.tokens[..., :slots]  # [B, 1, S], the first slots of which are used
    tokens = jnp.pad(tokens, [(0, 0), (0, 0), (0, slots - tokens.shape[-1])])
    return replace(stream, cache=cache, written=replace(stream.written, tokens=tokens))


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=4)
def _advance(
    params: Params,
    config: ModelConfig,
    rules: Sampling,
    n: int,
    stream: Stream,
    steps: jax.Array,
    numbers: Mapping[str, jax.Array],
) -> tuple[Made, Stream]:
    """At most `steps` more tokens of each row, in arrays of `n`, with NO_TOKEN after its end, and
    the rows after them; fewer steps are run where all texts end. `numbers` [B] are those of the
    rules of each row, if it has its own."""
    of_rules = {name: values for name, values in numbers.items() if name != "scored"}
    rows, vocabulary = stream.logits.shape

    def drawn(stream: Stream) -> tuple[jax.Array, jax.Array]:
        def of_row(logits: Any, key: Any, written: TextSoFar, own: dict[str, Any]) -> jax.Array:
            key = jax.random.fold_in(key, written.count)
            return draw(logits[None], key, replace(rules, **own), written)[0]

        mapped = jax.vmap(of_row, axis_name=ROW_AXIS)
        token = mapped(stream.logits, stream.key, stream.written, of_rules)
        return jnp.where(stream.done, 0, token), stream.key

    def noted(stream: Stream, token: jax.Array) -> Made:
        if not numbers:
            return Made(token)

        def scores(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            logs = log_softmax(logits, config.exact)  # [B, V]
            best, ids = jax.lax.top_k(logs, min(TOP, vocabulary))
            return jnp.take_along_axis(logs, token[:, None], axis=-1)[:, 0], ids, best

        def none(logits: jax.Array) -> Any:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(scores, logits))

        return Made(token, *jax.lax.cond(numbers["scored"].any(), scores, none, stream.logits))

    def add(written: TextSoFar, token: jax.Array) -> TextSoFar:
        return jax.vmap(TextSoFar.add)(written, token[:, None])

    shapes = jax.eval_shape(noted, stream, jnp.zeros(rows, jnp.int32))
    made = jax.tree.map(
        lambda of_step: jnp.full((rows, n, *of_step.shape[1:]), NO_TOKEN, of_step.dtype), shapes
    )
    return continued(params, config, rules, steps, made, stream, drawn, add, noted)
