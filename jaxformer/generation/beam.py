"""Beam search for the likeliest texts, in one loop on the device, and what each of its steps chose.

In the comments, B is the number of rows, b the beams of a row, n the number of new tokens and V the
size of the vocabulary. The model runs on [B b] rows: beam j of row i is row i b + j.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from jaxformer.arrays.exact import log_softmax
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.decode import Stream, read, repeated, start
from jaxformer.generation.sampling import (
    COUNT,
    FILTERS,
    LOGIT_PENALTIES,
    TextRules,
    Values,
    number_from,
    permitted,
    whole_from,
    within,
)
from jaxformer.generation.text_so_far import TextSoFar, end_tokens, ends, filler
from jaxformer.generation.weights import on_automatic_axes, prepared
from jaxformer.layers.cache import Cache
from jaxformer.models.inputs import warn_of_padding

MAX_BEAMS = 1024  # of a row; each takes the memory of a row of a batch
MAX_PENALTY = 10.0  # with it the divisor of 20,000 tokens is a float32

# By what the log-probability of a text of n tokens is divided, before the power of length_penalty:
# that of GNMT (arXiv:1609.08144), and that of transformers.
LENGTH_DIVISORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gnmt": lambda length: (5.0 + length) / 6.0,
    "tokens": lambda length: length,
}


@dataclass(frozen=True)
class Search(TextRules):
    """The width of a search, the score of a text and what it may hold."""

    values: ClassVar[dict[str, Values]] = TextRules.values | {
        "beams": Values(whole_from(1, MAX_BEAMS), f"from 1 to {MAX_BEAMS:,}"),
        "keep": COUNT,
        "length_penalty": Values(number_from(0, MAX_PENALTY), f"from 0 to {MAX_PENALTY:g}"),
        "length_divisor": Values(
            LENGTH_DIVISORS.__contains__, f"one of {', '.join(LENGTH_DIVISORS)}"
        ),
        "early_stopping": Values((True, False, "never").__contains__, "True, False or 'never'"),
    }

    beams: int = 5  # unfinished texts kept at every step
    keep: int = 0  # texts returned (0: as many as beams); with fewer the search may stop earlier
    length_penalty: float = 0.6  # alpha: 0 ranks by probability, which favors short texts
    length_divisor: str = "gnmt"  # a row of LENGTH_DIVISORS
    # When a row ends that has as many finished texts as beams. "never": when no other text can be
    # better. True: at once. False: when no unfinished text would be better if it ended here. The
    # values are those of transformers, but there "never" is exact for length_penalty >= 0 alone.
    early_stopping: bool | Literal["never"] = "never"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep > self.beams:
            raise ConfigError(f"keep={self.keep} must be from 0 to beams={self.beams}")

    @property
    def kept(self) -> int:
        """How many texts are returned."""
        return self.keep or self.beams

    @property
    def candidates(self) -> int:
        """How many candidates of a row are compared: so many that b of them do not end."""
        return self.beams * max(2, 1 + len(end_tokens(self.end_token)))

    def penalty(self, length: jax.Array | int) -> jax.Array:
        """Return the divisor of the log-probability of `length` tokens, as ((5 + length) /
        6)^alpha."""
        divisor = LENGTH_DIVISORS[self.length_divisor](jnp.asarray(length, jnp.float32))
        return divisor**self.length_penalty


class Beams(NamedTuple):
    """The best texts of each row, best first: tokens [B, keep, max_new_tokens] int32, scores [B,
    keep] float32, which are -inf where fewer texts were found."""

    tokens: jax.Array
    scores: jax.Array


class BeamSteps(NamedTuple):
    """What the steps of a search chose from, in the order of the steps: C candidates of each row,
    likeliest first, where C is b times one more than the number of end tokens, and at least 2 b.

    `parents` int32 [n, B, C] is the live text (0 .. b - 1) that a candidate continues, `tokens`
    int32 [n, B, C] its new token, `log_probabilities` float32 [n, B, C] that of the new text as far
    as it goes, in nats, -inf where there are fewer candidates; `scores` [n, B, C] is -inf but for
    those that finish a text; `chosen` int32 [n, B, b] are the indices of the candidates that live
    on. `done` int32 is how many of the n steps were taken; the entries of later steps say nothing.
    """

    parents: jax.Array
    tokens: jax.Array
    log_probabilities: jax.Array
    scores: jax.Array
    chosen: jax.Array
    done: jax.Array


def beam_search(
    params: Params,
    config: ModelConfig,
    prompt: ArrayLike,
    max_new_tokens: int = 64,
    *,
    segment_ids: ArrayLike | None = None,
    source: ArrayLike | None = None,
    source_segment_ids: ArrayLike | None = None,
    **search: Any,
) -> Beams:
    """Return the likeliest continuations of each prompt that a beam search finds: [B, T] int ->
    `Beams`.

    The arguments before `search` are those of `generate`; `search` are the fields of `Search`:
    beams, keep (the n best), length_penalty, length_divisor, early_stopping, end_token, vocab_size,
    and the rules on the text that `generate` has. The score of a text is
    log p / ((5 + length) / 6)^length_penalty, or log p / length^length_penalty with
    length_divisor="tokens", with its end token counted, which adds nothing where it is forced; a
    text ends at its end token, which fills the rest, or at max_new_tokens. With
    length_divisor="tokens" the texts are those of transformers with the same length_penalty and
    early_stopping."""
    warn_of_padding("prompt", prompt, segment_ids)
    warn_of_padding("source", source, source_segment_ids)
    inputs = {
        "segment_ids": segment_ids,
        "source": source,
        "source_segment_ids": source_segment_ids,
    }
    how = inputs | search
    return beam_search_steps(params, config, prompt, max_new_tokens, record=False, **how)[0]


@on_automatic_axes
def beam_search_steps(
    params: Params,
    config: ModelConfig,
    prompt: ArrayLike,
    max_new_tokens: int = 64,
    *,
    segment_ids: ArrayLike | None = None,
    source: ArrayLike | None = None,
    source_segment_ids: ArrayLike | None = None,
    record: bool = True,
    **search: Any,
) -> tuple[Beams, Any]:
    """Return what `beam_search` returns for the same arguments, and the `BeamSteps` from which its
    steps chose; None where these are not recorded."""
    foreign = sorted({"stop_strings", "tokenizer", *FILTERS} & search.keys())
    if foreign:
        raise ConfigError(
            f"beam_search has no {', '.join(foreign)}: it compares the probabilities of whole texts"
            " and draws nothing. Leave out these, or write with jf.generate."
        )
    rules = Search(**search)
    key = jax.random.key(0)  # of no draw
    sources = (source, source_segment_ids)
    stream = start(params, config, prompt, max_new_tokens, key, segment_ids, sources)
    return _search(prepared(params, config), config, rules, max_new_tokens, stream, record)


class _Live(NamedTuple):
    """Unfinished texts: tokens [B, b, n] int32, log-probabilities [B, b] float32, and the logits of
    the next token of each [B b, V]."""

    tokens: jax.Array
    logs: jax.Array
    logits: jax.Array


# The state of the loop: the number of the step, the unfinished and the finished texts, the cache,
# the rows [B] that take no other text, and the steps so far, or None where they are not recorded.
_Carry = tuple[jax.Array, _Live, Beams, Cache, jax.Array, BeamSteps | None]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 5))
def _search(
    params: Params, config: ModelConfig, rules: Search, n: int, stream: Stream, record: bool
) -> tuple[Beams, Any]:
    """Return the best texts, and the steps if they are recorded."""
    batch = stream.logits.shape[0]
    beams = rules.beams
    tokens = jnp.full((batch, beams, n), filler(rules.end_token), jnp.int32)
    # All beams of a row begin equal. Only the first counts, or the first step would choose the same
    # token for each.
    first_only = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
    logs = jnp.broadcast_to(first_only, (batch, beams))
    cache, position, written, logits = repeated(
        (stream.cache, stream.position, stream.written, stream.logits), beams
    )
    live = _Live(tokens, logs, logits)
    finished = Beams(tokens, jnp.full_like(logs, -jnp.inf))
    steps = None
    if record:
        ids = jnp.zeros((n, batch, rules.candidates), jnp.int32)
        none = jnp.full(ids.shape, -jnp.inf)
        steps = BeamSteps(ids, ids, none, none, ids[..., :beams], jnp.zeros(n, jnp.int32))

    def goes_on(carry: _Carry) -> jax.Array:
        i, _, _, _, closed, _ = carry
        return (i < n) & ~closed.all()

    def step(carry: _Carry) -> _Carry:
        i, live, finished, cache, closed, steps = carry
        # All n slots are written, since the texts of beams change; the first i count.
        texts = written.with_new(live.tokens.reshape(batch * beams, n), 0, i)
        live, extended, parents, new_step = _extend(live, finished, rules, texts, config.exact)
        finished = _where(closed, finished, extended)
        if steps is not None:
            steps = jax.tree.map(lambda of_steps, new: of_steps.at[i].set(new), steps, new_step)
        # What the layers keep of a row [B b, ...] is that of the text which it continues.
        # Positions, and the source, are the same for all beams of a row.
        kept = jax.tree.map(lambda array: jnp.take(array, parents, axis=0), cache.layers)
        tokens = live.tokens[:, :, i].reshape(-1, 1)  # [B b, 1]
        cache = replace(cache, layers=kept)
        next_logits, cache = read(params, config, tokens, position + i, cache)
        live = live._replace(logits=next_logits[:, 0])
        best = live.logs.max(axis=1)  # [B]
        if rules.early_stopping == "never":
            # A log-probability only falls, and is divided by penalty(n) at most: this is the best
            # score that a live text can still reach.
            closed |= best / rules.penalty(n) <= finished.scores[:, rules.kept - 1]
        else:
            closes = jnp.isfinite(finished.scores).all(axis=1)
            if not rules.early_stopping:
                closes &= best / rules.penalty(i + 1) <= finished.scores.min(axis=1)
            closed |= closes
        return i + 1, live, finished, cache, closed, steps

    i, live, finished, _, closed, steps = jax.lax.while_loop(
        goes_on, step, (jnp.int32(0), live, finished, cache, jnp.zeros(batch, bool), steps)
    )
    # A text that reached n tokens without its end counts too.
    best = _best(finished, Beams(live.tokens, live.logs / rules.penalty(i)))
    best = jax.tree.map(lambda a: a[:, : rules.kept], _where(closed, finished, best))
    if steps is not None:
        steps = steps._replace(done=i)
    return best, steps


def _where(rows: jax.Array, left: Beams, right: Beams) -> Beams:
    """Return the texts of `left` in these rows [B], and those of `right` in the others."""
    tokens = jnp.where(rows[:, None, None], left.tokens, right.tokens)
    return Beams(tokens, jnp.where(rows[:, None], left.scores, right.scores))


def _extend(
    live: _Live, finished: Beams, rules: Search, written: TextSoFar, exact: bool
) -> tuple[_Live, Beams, jax.Array, BeamSteps]:
    """Return the live texts, which are `written`, with one more token; the best finished texts; for
    each live text the row [B b] of the text that it continues; and this step alone."""
    batch, beams = live.logs.shape
    i = written.count
    logits = within(live.logits, rules.vocab_size)  # [B b, V]
    # A rule takes tokens away and leaves the probabilities of the others, as in transformers, whose
    # penalties change log-probabilities.
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)  # [B b, 1]
    if exact:
        # The sum of a text is then that of the log-probabilities of `jf.score`, in their order.
        logits = log_softmax(logits, exact)
        total = jnp.zeros_like(total)
    elif any(getattr(rules, name) != getattr(Search, name) for name in (*LOGIT_PENALTIES, "rule")):
        logits = logits - total
        total = jnp.zeros_like(total)
    logits = permitted(logits, rules, written, certain=total).reshape(batch, beams, -1)

    # C candidates of each row, from the C best tokens of each beam (or V). With one end token at
    # most b of 2 b end, so that b others always remain live.
    count = rules.candidates
    best, ids = jax.lax.top_k(logits, min(count, logits.shape[-1]))  # [B, b, C]
    logs = live.logs[..., None] + best - total.reshape(batch, beams, 1)
    logs, index = jax.lax.top_k(logs.reshape(batch, -1), count)  # [B, C] of [B, b C]
    # [B, C]: the beam within its row, from the index in [b C].
    parents = index // ids.shape[-1]
    new_tokens = _at(ids.reshape(batch, -1), index)
    tokens = _at(live.tokens, parents).at[:, :, i].set(new_tokens)  # [B, C, n]

    # A candidate is finished where it ends and is among the b best; further down it is dropped.
    ended = ends(new_tokens, rules.end_token)  # [B, C]
    among_best = jnp.arange(count) < beams
    scores = jnp.where(ended & among_best, logs / rules.penalty(i + 1), -jnp.inf)
    finished = _best(finished, Beams(tokens, scores))

    live_logs, chosen = jax.lax.top_k(jnp.where(ended, -jnp.inf, logs), beams)  # [B, b]
    # As rows of the model, [B b].
    parent_rows = (_at(parents, chosen) + beams * jnp.arange(batch)[:, None]).reshape(-1)
    step = BeamSteps(parents, new_tokens, logs, scores, chosen, i)
    return _Live(_at(tokens, chosen), live_logs, live.logits), finished, parent_rows, step


def _best(best: Beams, new: Beams) -> Beams:
    """Return the best of both, as many as `best` has; ties stay in order."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), best, new)
    scores, index = jax.lax.top_k(both.scores, best.scores.shape[1])
    return Beams(_at(both.tokens, index), scores)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Return the entries [B, M, ...] of an array [B, N, ...] at an index [B, M]."""
    return jnp.take_along_axis(array, index.reshape(*index.shape, *[1] * (array.ndim - 2)), axis=1)
