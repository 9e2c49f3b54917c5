"""Beam search for the likeliest texts, in one loop on the device, and what each of its steps chose.

In the comments, B is the number of rows, b the beams of a row and V the size of the vocabulary. The
model runs on [B b] rows: beam j of row i is row i b + j.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.generation.decode import Stream, start
from jaxformer.generation.prepare import prepared
from jaxformer.generation.rules import TextRules, TextSoFar, ends, filler, permitted, refuse, within
from jaxformer.layers.cache import KVCache
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout
from jaxformer.models.inputs import Inputs
from jaxformer.models.padding import warn_of_padding
from jaxformer.models.transformer import hidden

MOST_BEAMS = 1024  # of a row; each takes the memory of a row of a batch
MOST_PENALTY = 10.0  # with it the divisor of 20,000 tokens is a float32


@dataclass(frozen=True)
class Search(TextRules):
    """The width of a search, the score of a text and what it may hold. Raises ConfigError for a
    value out of range."""

    beams: int = 5  # unfinished texts kept at every step
    keep: int = 0  # texts returned (0: as many as beams); with fewer the search may stop earlier
    length_penalty: float = 0.6  # alpha: 0 ranks by probability, which favors short texts

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            {
                f"beams={self.beams} must be from 1 to {MOST_BEAMS:,}": (
                    1 <= self.beams <= MOST_BEAMS
                ),
                f"keep={self.keep} must be from 0 to beams={self.beams} (0 keeps as many)": (
                    0 <= self.keep <= self.beams
                ),
                f"length_penalty={self.length_penalty} must be from 0 to {MOST_PENALTY}": (
                    0 <= self.length_penalty <= MOST_PENALTY
                ),
            }
        )

    def penalty(self, length: jax.Array | int) -> jax.Array:
        """The divisor of the log-probability of `length` tokens: ((5 + length) / 6)^alpha
        (arXiv:1609.08144)."""
        return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** self.length_penalty


class Beams(NamedTuple):
    """The best texts of each row, best first: tokens [B, keep, max_new_tokens] int32, scores [B,
    keep] float32, which are -inf where fewer texts were found."""

    tokens: jax.Array
    scores: jax.Array


class BeamSteps(NamedTuple):
    """What the steps of a search chose from, in the order of the steps: C = 2 b candidates of each
    row, likeliest first.

    `parents` int32 [n, B, C] is the live text (0 .. b - 1) that a candidate continues, `tokens`
    int32 [n, B, C] its new token, `log_probabilities` float32 [n, B, C] that of the whole new text
    in nats, -inf where there are fewer candidates; `scores` [n, B, C] is -inf but for those that
    finish a text; `chosen` int32 [n, B, b] are the places of the candidates that live on. `done`
    int32 is how many of the n steps were taken; the rest is not filled.
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
    prompt: Any,
    max_new_tokens: int = 64,
    *,
    segment_ids: Any = None,
    source: Any = None,
    source_segment_ids: Any = None,
    **search: Any,
) -> Beams:
    """The likeliest continuations of each prompt that a beam search finds: [B, T] int -> `Beams`.

    The arguments before `search` are those of `generate`; `search` are the fields of `Search`:
    beams, keep, length_penalty, end_token, vocab_size and the rules on the text that `generate`
    has. The score of a text is log p / ((5 + length) / 6)^length_penalty, with its end token
    counted, which adds nothing where it is forced; a text ends at its end token, which fills the
    rest, or at max_new_tokens. Raises ConfigError as `generate` does.
    """
    warn_of_padding("prompt", prompt, segment_ids)
    warn_of_padding("source", source, source_segment_ids)
    rules, key = Search(**search), jax.random.key(0)
    sources = (source, source_segment_ids)
    stream = start(params, config, prompt, max_new_tokens, key, segment_ids, *sources)
    return _search(prepared(params, config), config, rules, max_new_tokens, stream)[0]


def beam_search_steps(
    params: Params,
    config: ModelConfig,
    prompt: Any,
    max_new_tokens: int = 64,
    *,
    source: Any = None,
    **search: Any,
) -> tuple[Beams, BeamSteps]:
    """What `beam_search` returns for the same arguments, and what each of its steps chose from. All
    prompts [B, T] have one length, and so have all sources [B, S]."""
    rules, key = Search(**search), jax.random.key(0)
    stream = start(params, config, prompt, max_new_tokens, key, None, source)
    return _search(prepared(params, config), config, rules, max_new_tokens, stream, keeps=True)


class _Live(NamedTuple):
    """Unfinished texts: tokens [B, b, n], log-probabilities [B, b], and the logits of each one's
    next token [B b, V]."""

    tokens: jax.Array
    logs: jax.Array
    logits: jax.Array


# Of the loop: the step, the texts, the cache, and the steps so far, or None where not asked for.
_Carry = tuple[jax.Array, _Live, Beams, KVCache, BeamSteps | None]


@functools.partial(jax.jit, static_argnums=(1, 2, 3), static_argnames="keeps")
def _search(
    params: Params, config: ModelConfig, rules: Search, n: int, stream: Stream, keeps: bool = False
) -> tuple[Beams, Any]:
    """The best texts, and the steps if they are kept."""
    batch, beams = stream.logits.shape[0], rules.beams
    keep = rules.keep or beams
    cache, logits, layout, written = _repeated(
        (stream.cache, stream.logits, stream.layout, stream.written), beams
    )
    tokens = jnp.full((batch, beams, n), filler(rules.end_token), jnp.int32)
    # All beams of a row begin equal. Only the first counts, or the first step would choose the same
    # token for each.
    one = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
    live = _Live(tokens, jnp.broadcast_to(one, (batch, beams)), logits)
    over = Beams(tokens[:, :keep], jnp.full((batch, keep), -jnp.inf))

    def going(carry: _Carry) -> jax.Array:
        i, live, over, *_ = carry
        # A log-probability only falls and is divided at most by penalty(n): the best score that a
        # live text can still reach.
        hope = live.logs.max(axis=1) / rules.penalty(n)
        return (i < n) & (hope > over.scores.min(axis=1)).any()

    def step(carry: _Carry) -> _Carry:
        i, live, over, cache, steps = carry
        now = written.replace_new(live.tokens.reshape(batch * beams, n), i)
        live, over, parents, made = _extend(live, over, rules, now)
        if steps is not None:
            steps = jax.tree.map(lambda kept, new: kept.at[i].set(new), steps, made)
        cache = _of_parents(cache, parents)
        here = TokenLayout(layout.positions + i, layout.segments)  # [B b, 1]
        tokens = live.tokens[:, :, i].reshape(-1, 1)
        x, cache, _ = hidden(params, config, Inputs(tokens, here), cache)
        live = live._replace(logits=head(params, config, x, here)[:, 0])
        return i + 1, live, over, cache, steps

    steps = _no_steps(n, batch, beams) if keeps else None
    i, live, over, _, steps = jax.lax.while_loop(
        going, step, (jnp.int32(0), live, over, cache, steps)
    )
    best = _best(over, Beams(live.tokens, live.logs / rules.penalty(i)))
    return best, steps and steps._replace(done=i)


def _no_steps(n: int, batch: int, beams: int) -> BeamSteps:
    """Room for n steps."""
    ids = jnp.zeros((n, batch, 2 * beams), jnp.int32)
    logs = jnp.full(ids.shape, -jnp.inf)
    return BeamSteps(ids, ids, logs, logs, ids[..., :beams], jnp.zeros(n, jnp.int32))


def _extend(
    live: _Live, over: Beams, rules: Search, written: TextSoFar
) -> tuple[_Live, Beams, jax.Array, BeamSteps]:
    """The live texts, which are `written`, with one more token, the best finished texts, for each
    live text the row [B b] of the text that it continues, and this step alone."""
    (batch, beams), i = live.logs.shape, written.count
    logits = within(live.logits, rules.vocab_size)  # [B b, V]
    # A rule takes tokens away and leaves the probabilities of the others, as in transformers.
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logits = permitted(logits, rules, written, certain=total).reshape(batch, beams, -1)

    # 2 b candidates of each row, from the 2 b best tokens of each beam (or V). With one end token
    # at most b of them end, so that b others always remain live.
    best, ids = jax.lax.top_k(logits, min(2 * beams, logits.shape[-1]))  # [B, b, 2 b]
    logs = live.logs[..., None] + best - total.reshape(batch, beams, 1)
    logs, index = jax.lax.top_k(logs.reshape(batch, -1), 2 * beams)  # [B, 2 b] of [B, b 2 b]
    parents, new = index // ids.shape[-1], _at(ids.reshape(batch, -1), index)
    tokens = _at(live.tokens, parents).at[:, :, i].set(new)  # [B, 2 b, n]

    # A candidate is finished where it ends and is among the b best; further down it is dropped.
    ended = ends(new, rules.end_token)
    first = jnp.arange(2 * beams) < beams
    scores = jnp.where(ended & first, logs / rules.penalty(i + 1), -jnp.inf)
    over = _best(over, Beams(tokens, scores))

    kept, chosen = jax.lax.top_k(jnp.where(ended, -jnp.inf, logs), beams)  # [B, b]
    rows = (_at(parents, chosen) + beams * jnp.arange(batch)[:, None]).reshape(-1)
    step = BeamSteps(parents, new, logs, scores, chosen, i)
    return _Live(_at(tokens, chosen), kept, live.logits), over, rows, step


def _best(kept: Beams, more: Beams) -> Beams:
    """The best of both, as many as `kept` has; ties stay in order."""
    both = Beams(*(jnp.concatenate(pair, axis=1) for pair in zip(kept, more, strict=True)))
    scores, index = jax.lax.top_k(both.scores, kept.scores.shape[1])
    return Beams(_at(both.tokens, index), scores)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """The entries [B, M, ...] of an array [B, N, ...] at an index [B, M]."""
    return jnp.take_along_axis(array, index.reshape(*index.shape, *[1] * (array.ndim - 2)), axis=1)


def _repeated(tree: Any, times: int) -> Any:
    """Every row [B, ...] of every array `times` times: [B b, ...]. The length of the cache is a
    scalar and stays."""
    return jax.tree.map(lambda a: jnp.repeat(a, times, axis=0) if a.ndim else a, tree)


def _of_parents(cache: KVCache, rows: jax.Array) -> KVCache:
    """The cache with each row's keys and values [B b, S, K, H] taken from the text that it
    continues. Positions, and the source, are the same for all beams of a row."""
    k, v = (
        tuple(jnp.take(layer, rows, axis=0) for layer in layers) for layers in (cache.k, cache.v)
    )
    return replace(cache, k=k, v=v)
