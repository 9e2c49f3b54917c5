"""Speculative decoding: tokens are proposed by a smaller model, or looked up in the text, and the
model reads several of them at once. What is written has the distribution of `generate`.

In the comments, B is the number of rows, k the number of proposed tokens of a round, n the number
of new tokens, S the slots of a text and V the size of the vocabulary.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.decode import Stream, start, with_stops
from jaxformer.generation.sampling import Sampling, choices
from jaxformer.generation.text_so_far import TextSoFar, ends, filler
from jaxformer.generation.weights import prepared
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout
from jaxformer.models.inputs import Inputs, warn_of_padding
from jaxformer.models.transformer import hidden

MOST_AHEAD = 64  # proposed tokens of a round
LOOKUPS = (3, 2, 1)  # the newest tokens that are looked up, as many as possible


class Speculation(NamedTuple):
    """New tokens [B, n] int32, how often the model read for them (`rounds`, int32), and how many of
    the tokens that were proposed to each row are in its text (`accepted`, int32)."""

    tokens: jax.Array
    rounds: jax.Array
    accepted: jax.Array


@dataclass(frozen=True)
class _Settings:
    """What a program depends on; `draft` is None for look-up."""

    config: ModelConfig
    draft: ModelConfig | None
    rules: Sampling
    ahead: int
    count: int


def speculate(
    params: Params,
    config: ModelConfig,
    prompt: ArrayLike,
    max_new_tokens: int = 64,
    *,
    draft: tuple[Params, ModelConfig] | None = None,
    ahead: int = 4,
    **sampling: Any,
) -> Speculation:
    """`generate` with fewer reads of the model: [B, T] int -> `Speculation` of [B, max_new_tokens].

    `draft` are the params and config of a smaller model with the same tokens, which proposes
    `ahead` tokens a round (arXiv:2211.17192, arXiv:2302.01318). Without it they are what followed
    the last time that the newest three, two or one tokens were in the text (prompt look-up). The
    model reads all at once, and a proposed token x is kept with probability min(1, p(x) / q(x)),
    p and q its probabilities after the rules; the first that is not is drawn from max(0, p - q).
    So texts are distributed as those of `generate`, and equal to them where sampling is greedy.
    Rows go on together by the number of tokens that the shortest one keeps: it pays for one row or
    few. `sampling` are the keywords of `generate`, key and segment_ids with them."""
    key, segment_ids = sampling.pop("key", None), sampling.pop("segment_ids", None)
    rules = Sampling(**sampling)
    _check(config, draft, ahead)
    if key is None and rules.temperature > 0:
        raise ConfigError(
            "sampling at a temperature needs key=jax.random.key(...); with temperature=0 (greedy)"
            " leave it out."
        )
    warn_of_padding("prompt", prompt, segment_ids)
    key = jax.random.key(0) if key is None else key
    streams, weights = [], []
    for model_params, model_config in ((params, config), *([draft] if draft else [])):
        stream = start(model_params, model_config, prompt, max_new_tokens, key, segment_ids)
        streams.append(with_stops(stream, model_config, rules))
        weights.append(prepared(model_params, model_config))
    draft_config = None if draft is None else draft[1]
    settings = _Settings(config, draft_config, rules.of_program(), ahead, max_new_tokens)
    return _speculate(tuple(weights), settings, tuple(streams))


def _check(config: ModelConfig, draft: tuple[Params, ModelConfig] | None, ahead: int) -> None:
    if type(ahead) is not int or not 1 <= ahead <= MOST_AHEAD:
        raise ConfigError(f"ahead={ahead!r} must be from 1 to {MOST_AHEAD}.")
    for name, family in (("model", config.family), ("draft", draft[1].family if draft else "")):
        if family not in ("decoder", ""):
            raise ConfigError(
                f"speculative decoding is for decoders, and the {name} has model.family={family!r}:"
                " write with jf.generate."
            )
    if draft is not None and draft[1].vocab_size != config.vocab_size:
        raise ConfigError(
            f"the draft has model.vocab_size={draft[1].vocab_size}, and the model"
            f" {config.vocab_size}: a draft must have the same tokens, so that what it proposes can"
            " be compared. Choose another draft, or leave it out to look up tokens in the text."
        )


class _Round(NamedTuple):
    """The state of the loop: tokens [B, n] int32; the newest token [B], which no model has read;
    the streams of the model and of the draft; the numbers of `Speculation`."""

    made: jax.Array
    newest: jax.Array
    streams: tuple[Stream, ...]
    rounds: jax.Array
    accepted: jax.Array


@functools.partial(jax.jit, static_argnums=1)
def _speculate(
    weights: tuple[Params, ...], settings: _Settings, streams: tuple[Stream, ...]
) -> Speculation:
    rules, count = settings.rules, settings.count
    streams = tuple(_longer(stream, settings.ahead) for stream in streams)
    stream = streams[0]
    key, first_key = jax.random.split(stream.key)
    first = _drawn(_probabilities(stream.logits, rules, stream.written), first_key)
    made = jnp.full((stream.done.shape[0], count), filler(rules.end_token), jnp.int32)
    written, done = _written(stream.written, stream.done, first, rules)
    stream = replace(stream, key=key, written=written, done=done)
    carry = _Round(
        made.at[:, 0].set(first), first, (stream, *streams[1:]), jnp.int32(0), jnp.int32(0)
    )

    def unfinished(carry: _Round) -> jax.Array:
        stream = carry.streams[0]
        return (stream.written.count < count) & ~stream.done.all()

    final = jax.lax.while_loop(unfinished, lambda carry: _round(weights, settings, carry), carry)
    return Speculation(final.made, final.rounds, final.accepted)


def _round(weights: tuple[Params, ...], settings: _Settings, carry: _Round) -> _Round:
    """Tokens are proposed, read by the model, and kept as far as all rows keep theirs."""
    rules, ahead, stream = settings.rules, settings.ahead, carry.streams[0]
    key, propose_key, keep_key, next_key = jax.random.split(stream.key, 4)
    if settings.draft is None:
        proposed = _looked_up(stream.written, ahead)  # [B, k]
        proposal = jax.nn.one_hot(proposed, settings.config.vocab_size)  # [B, k, V]
        drafts: tuple[Stream, ...] = ()
    else:
        draft = replace(carry.streams[1], key=propose_key, written=stream.written)
        proposed, proposal, draft = _drafted(
            weights[1], settings.draft, rules, ahead, draft, carry.newest
        )
        drafts = (draft,)
    read = jnp.concatenate([carry.newest[:, None], proposed], axis=1)  # [B, 1 + k]
    logits, stream = _read(weights[0], settings.config, read, stream)

    # p has the probabilities of the tokens after each token that was read.
    texts = [stream.written]
    for index in range(ahead):
        texts.append(texts[-1].add(proposed[:, index]))
    p = jnp.stack(
        [_probabilities(logits[:, i], rules, text) for i, text in enumerate(texts)], axis=1
    )
    p_of = jnp.take_along_axis(p[:, :-1], proposed[..., None], axis=-1)[..., 0]  # [B, k]
    q_of = jnp.take_along_axis(proposal, proposed[..., None], axis=-1)[..., 0]
    keeps = jax.random.uniform(keep_key, p_of.shape) * q_of < p_of
    kept = jnp.cumprod(keeps.astype(jnp.int32), axis=1).sum(axis=1)  # [B], 0 .. k
    # A row that has ended holds up no other one.
    common = jnp.where(stream.done, ahead, kept).min()

    q = jnp.pad(proposal, ((0, 0), (0, 1), (0, 0)))  # nothing is proposed after the last token
    at = functools.partial(jax.lax.dynamic_index_in_dim, index=common, axis=1, keepdims=False)
    residual = jnp.maximum(at(p) - at(q), 0.0)
    # Where p and q are equal but for rounding nothing remains, and nothing was refused.
    residual = jnp.where(residual.sum(axis=-1, keepdims=True) > 0, residual, at(p))
    drawn = _drawn(residual, next_key)
    token = jnp.where(kept > common, at(jnp.pad(proposed, ((0, 0), (0, 1)))), drawn)
    accepted = jnp.where(stream.done, 0, jnp.minimum(kept, common + 1)).sum()
    carry = _kept(carry, (proposed, token, common), stream, rules)
    stream = replace(carry.streams[0], key=key)
    streams = tuple(_back(each, ahead - common) for each in (stream, *drafts))
    return carry._replace(
        streams=streams, rounds=carry.rounds + 1, accepted=carry.accepted + accepted
    )


def _kept(
    carry: _Round, tokens: tuple[jax.Array, jax.Array, jax.Array], stream: Stream, rules: Sampling
) -> _Round:
    """The round with the first `common` of the proposed tokens [B, k] and one more token [B]."""
    proposed, token, common = tokens
    made, newest, first = carry.made, carry.newest, stream.written.count
    written, done = stream.written, stream.done
    for index in range(proposed.shape[1] + 1):
        candidate = proposed[:, min(index, proposed.shape[1] - 1)]
        candidate = jnp.where(index == common, token, candidate)
        candidate = jnp.where(done, filler(rules.end_token), candidate)
        is_kept = index <= common
        longer, ended = _written(written, done, candidate, rules)
        written = jax.tree.map(functools.partial(jnp.where, is_kept), longer, written)
        done = jnp.where(is_kept, ended, done)
        newest = jnp.where(is_kept, candidate, newest)
        # What is beyond max_new_tokens is dropped.
        slot = jnp.where(is_kept, first + index, made.shape[1])
        made = made.at[:, slot].set(candidate, mode="drop")
    stream = replace(stream, written=written, done=done)
    return carry._replace(made=made, newest=newest, streams=(stream, *carry.streams[1:]))


def _written(
    written: TextSoFar, done: jax.Array, token: jax.Array, rules: Sampling
) -> tuple[TextSoFar, jax.Array]:
    """The texts with one more token [B], and which of them have ended."""
    written = written.add(token)
    done = done | ends(token, rules.end_token)
    return written, done if written.stops is None else done | written.stops.reached


def _probabilities(logits: jax.Array, rules: Sampling, written: TextSoFar) -> jax.Array:
    """The probabilities [B, V] of the next token after the rules; 1 of the likeliest if greedy."""
    logits = choices(logits, rules, written)
    if rules.temperature == 0:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jax.nn.softmax(logits, axis=-1)


def _drawn(probabilities: jax.Array, key: jax.Array) -> jax.Array:
    """A token of each row by probabilities [B, V] of any sum above 0: int32 [B]."""
    return jax.random.categorical(key, jnp.log(probabilities), axis=-1).astype(jnp.int32)


def _read(
    params: Params, config: ModelConfig, tokens: jax.Array, stream: Stream
) -> tuple[jax.Array, Stream]:
    """The logits [B, T, V] after each of the tokens [B, T], and the stream that has read them."""
    layout = stream.layout
    index = jnp.arange(tokens.shape[1])
    # A position beyond those that a text may have is never kept, but has to be one of the model.
    last = layout.positions + stream.written.limit - stream.written.count
    positions = jnp.minimum(layout.positions + index, last)
    segments = jnp.repeat(stream.layout.segments, tokens.shape[1], axis=1)  # type: ignore[arg-type]
    token_layout = TokenLayout(positions, segments)
    x, cache, _ = hidden(params, config, Inputs(tokens, token_layout), stream.cache)
    logits = head(params, config, x, token_layout)
    after = TokenLayout(layout.positions + tokens.shape[1], layout.segments)
    return logits, replace(stream, cache=cache, layout=after)


def _back(stream: Stream, count: jax.Array) -> Stream:
    """The stream before it read the last `count` tokens. Their slots are written again before any
    later token sees them: until then their positions are in its future."""
    layout = TokenLayout(stream.layout.positions - count, stream.layout.segments)
    cache = replace(stream.cache, length=stream.cache.length - count)
    return replace(stream, cache=cache, layout=layout)


def _longer(stream: Stream, count: int) -> Stream:
    """The stream with `count` more slots, since a round reads tokens that are not kept."""

    def padded(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, count), *[(0, 0)] * (array.ndim - 2)))

    cache = stream.cache
    k, v, layout = jax.tree.map(padded, (cache.k, cache.v, cache.layout))
    written = replace(stream.written, tokens=padded(stream.written.tokens))
    return replace(stream, cache=replace(cache, k=k, v=v, layout=layout), written=written)


def _drafted(
    params: Params,
    config: ModelConfig,
    rules: Sampling,
    ahead: int,
    draft: Stream,
    newest: jax.Array,
) -> tuple[jax.Array, jax.Array, Stream]:
    """`ahead` tokens [B, k] that the draft writes after the newest ones [B], its probabilities [B,
    k, V] of each, and the draft after reading them."""

    def step(carry: tuple[jax.Array, Stream], key: jax.Array) -> tuple[Any, Any]:
        token, draft = carry
        logits, draft = _read(params, config, token[:, None], draft)
        q = _probabilities(logits[:, 0], rules, draft.written)
        token = _drawn(q, key)
        return (token, replace(draft, written=draft.written.add(token))), (token, q)

    keys = jax.random.split(draft.key, ahead)
    (last, draft), (tokens, q) = jax.lax.scan(step, (newest, draft), keys)
    _, draft = _read(params, config, last[:, None], draft)
    return jnp.moveaxis(tokens, 0, 1), jnp.moveaxis(q, 0, 1), draft


def _looked_up(written: TextSoFar, ahead: int) -> jax.Array:
    """The tokens [B, k] that followed the newest tokens of each row the last time that they were in
    its text, repeated where they are fewer than k; any tokens where they were not."""
    batch, slots = written.tokens.shape
    after = jnp.zeros(batch, jnp.int32)  # the slot behind the last occurrence
    for size in reversed(LOOKUPS):  # a longer one replaces a shorter one
        newest = written.newest(size)  # [B, size]
        starts = jnp.arange(slots - size)
        same = (starts + size < written.end)[None] & (newest[:, :1] >= 0)
        for index in range(size):
            same &= written.tokens[:, index : slots - size + index] == newest[:, index, None]
        latest = jnp.where(same, starts + size, 0).max(axis=1)
        after = jnp.where(latest > 0, latest, after)
    period = jnp.maximum(written.end - after, 1)[:, None]
    following = after[:, None] + jnp.arange(ahead) % period
    return jnp.maximum(jnp.take_along_axis(written.tokens, following, axis=1), 0)
