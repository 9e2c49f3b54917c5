"""Beam search: the likeliest texts rather than drawn ones, by one loop on the device."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.generation.decode import Stream, start
from jaxformer.generation.prepare import prepared
from jaxformer.generation.sampling import EndToken, ends, filler, within
from jaxformer.layers.cache import KVCache
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout
from jaxformer.models.inputs import Inputs
from jaxformer.models.transformer import hidden
from jaxformer.params import Params


@dataclass(frozen=True)
class Search:
    """How wide the search is, and what is best. Raises ConfigError out of range."""

    beams: int = 5  # unfinished texts kept at every step
    keep: int = 0  # texts returned; 0 means as many as beams, and fewer let the search stop earlier
    length_penalty: float = 0.6  # alpha: 0 ranks by probability, which favours the short
    end_token: EndToken = None  # a text is finished with it, or with any of several
    vocab_size: int | None = None  # ids from here on are padding of the table and never chosen

    def __post_init__(self) -> None:
        problems = {
            f"beams={self.beams} must be at least 1": self.beams >= 1,
            f"keep={self.keep} must be from 0 to beams={self.beams} (0 keeps as many)": (
                0 <= self.keep <= self.beams
            ),
            f"length_penalty={self.length_penalty} must be at least 0": self.length_penalty >= 0,
        }
        if not all(problems.values()):
            raise ConfigError("; ".join(message for message, fine in problems.items() if not fine))

    def penalty(self, length: jax.Array | int) -> jax.Array:
        """What the log-probability of `length` tokens is divided by: ((5 + length) / 6)^alpha
        (arXiv:1609.08144)."""
        return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** self.length_penalty


class Beams(NamedTuple):
    """The best texts of each row, best first: tokens [B, keep, max_new_tokens] int32, scores [B,
    keep] float32.

    A score of -inf marks a place for which there was no text.
    """

    tokens: jax.Array
    scores: jax.Array


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
    """The likeliest continuations of each prompt, as far as a beam finds them: [B, T] int ->
    `Beams`.

    The arguments before `search` are those of `generate`; `search` are the fields of `Search`:
    beams, keep, length_penalty, end_token, vocab_size. The score of a text is log p / ((5 + length)
    / 6)^length_penalty, its end token counted in; a text is over at its end token, which the rest
    repeats, or at max_new_tokens. Raises ConfigError as `generate` does.
    """
    rules = Search(**search)
    sources = {"source": source, "source_segment_ids": source_segment_ids}
    stream = start(
        params,
        config,
        prompt,
        max_new_tokens,
        key=jax.random.key(0),
        segment_ids=segment_ids,
        **sources,
    )
    return _search(prepared(params, config), config, rules, max_new_tokens, stream)


class _Live(NamedTuple):
    """Unfinished texts: tokens [B, beams, n], log-probabilities [B, beams], and behind each what
    follows [B beams, V]."""

    tokens: jax.Array
    logs: jax.Array
    logits: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _search(params: Params, config: ModelConfig, rules: Search, n: int, stream: Stream) -> Beams:
    batch, beams = stream.logits.shape[0], rules.beams
    keep = rules.keep or beams
    cache, logits, layout = _repeated((stream.cache, stream.logits, stream.layout), beams)
    tokens = jnp.full((batch, beams, n), filler(rules.end_token), jnp.int32)
    one = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)  # the beams begin as one
    live = _Live(tokens, jnp.broadcast_to(one, (batch, beams)), logits)
    over = Beams(tokens[:, :keep], jnp.full((batch, keep), -jnp.inf))

    def going(carry: tuple[jax.Array, _Live, Beams, KVCache]) -> jax.Array:
        i, live, over, _ = carry
        hope = live.logs.max(axis=1) / rules.penalty(n)  # no live text can come to more
        return (i < n) & (hope > over.scores.min(axis=1)).any()

    def step(
        carry: tuple[jax.Array, _Live, Beams, KVCache],
    ) -> tuple[jax.Array, _Live, Beams, KVCache]:
        i, live, over, cache = carry
        live, over, parents = _extend(live, over, rules, i)
        cache = _of_parents(cache, parents)
        here = TokenLayout(layout.positions + i, layout.segments)
        x, cache, _ = hidden(
            params, config, Inputs(live.tokens[:, :, i].reshape(-1, 1), here), cache
        )
        return i + 1, live._replace(logits=head(params, config, x, here)[:, 0]), over, cache

    i, live, over, _ = jax.lax.while_loop(going, step, (jnp.int32(0), live, over, cache))
    return _best(over, Beams(live.tokens, live.logs / rules.penalty(i)))


def _extend(
    live: _Live, over: Beams, rules: Search, i: jax.Array
) -> tuple[_Live, Beams, jax.Array]:
    """One more token for the live texts, and the finished ones among the best; the row of the cache
    that each came from.

    Of the 2 beams best candidates at least `beams` do not end, so a text that ends takes no place
    from the live.
    """
    batch, beams = live.logs.shape
    logits = within(live.logits, rules.vocab_size).reshape(batch, beams, -1)
    best, ids = jax.lax.top_k(logits, min(2 * beams, logits.shape[-1]))
    logs = live.logs[..., None] + best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    logs, index = jax.lax.top_k(logs.reshape(batch, -1), 2 * beams)
    parents, new = index // ids.shape[-1], _at(ids.reshape(batch, -1), index)
    tokens = _at(live.tokens, parents).at[:, :, i].set(new)
    over_now = ends(new, rules.end_token)
    first = jnp.arange(2 * beams) < beams  # further down an end is not yet one of the best
    over = _best(
        over, Beams(tokens, jnp.where(over_now & first, logs / rules.penalty(i + 1), -jnp.inf))
    )
    logs, chosen = jax.lax.top_k(jnp.where(over_now, -jnp.inf, logs), beams)
    rows = (_at(parents, chosen) + beams * jnp.arange(batch)[:, None]).reshape(-1)
    return _Live(_at(tokens, chosen), logs, live.logits), over, rows


def _best(kept: Beams, more: Beams) -> Beams:
    """As many as were kept, the best of all, ties as they were."""
    both = Beams(*(jnp.concatenate(pair, axis=1) for pair in zip(kept, more, strict=True)))
    scores, index = jax.lax.top_k(both.scores, kept.scores.shape[1])
    return Beams(_at(both.tokens, index), scores)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """Of each row of [B, N, ...] the entries [B, M]."""
    return jnp.take_along_axis(array, index.reshape(*index.shape, *[1] * (array.ndim - 2)), axis=1)


def _repeated(tree: Any, times: int) -> Any:
    """Every row of every array as often in a row; the cache's number of slots stays one."""
    return jax.tree.map(lambda a: jnp.repeat(a, times, axis=0) if a.ndim else a, tree)


def _of_parents(cache: KVCache, rows: jax.Array) -> KVCache:
    """The cache with the keys and values of the texts that each row continues; what all beams of a
    row share stays."""
    k, v = (
        tuple(jnp.take(layer, rows, axis=0) for layer in layers) for layers in (cache.k, cache.v)
    )
    return cache.replace(k=k, v=v)  # type: ignore[attr-defined, no-any-return]
