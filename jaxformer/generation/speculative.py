"""Speculative decoding: tokens are proposed by a smaller model, or looked up in the text, and the
model reads several of them at once. What is written has the distribution of `generate`.

In the comments, B is the number of rows, k the number of proposed tokens of a round, n the number
of new tokens, S the slots of a text and V the size of the vocabulary.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.decode import Stream, read, start
from jaxformer.generation.sampling import Sampling, choices, sampling_key
from jaxformer.generation.text_so_far import TextSoFar, ends, filler
from jaxformer.generation.weights import on_automatic_axes, prepared
from jaxformer.layers.block import empty_cache
from jaxformer.models.inputs import warn_of_padding

MOST_AHEAD = 64  # proposed tokens of a round
BY_LENGTH = ("dynamic", "longrope")  # scalings of RoPE that depend on the length of a call
LOOKUPS = (3, 2, 1)  # the newest tokens that are looked up, as many as possible


class Speculation(NamedTuple):
    """New tokens [B, n] int32, how often the model read for them (`rounds`, int32), and how many of
    the tokens that were proposed to each row are in its text (`accepted`, int32)."""

    tokens: jax.Array
    rounds: jax.Array
    accepted: jax.Array


@on_automatic_axes
def speculate(
    params: Params,
    config: ModelConfig,
    prompt: ArrayLike,
    max_new_tokens: int = 64,
    *,
    draft: tuple[Params, ModelConfig] | None = None,
    ahead: int = 4,
    key: jax.Array | None = None,
    n: int = 1,
    segment_ids: ArrayLike | None = None,
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
    few. The other keywords are those of `generate`."""
    rules = Sampling(**sampling)
    key = sampling_key(key, rules)
    if type(ahead) is not int or not 1 <= ahead <= MOST_AHEAD:
        raise ConfigError(f"ahead={ahead!r} must be from 1 to {MOST_AHEAD}.")
    models = [(params, config)]
    if draft is not None:
        models.append(draft)
    for _, model_config in models:
        if model_config.family != "decoder":
            raise ConfigError(
                "speculative decoding is for decoders, and a model has"
                f" model.family={model_config.family!r}: write with jf.generate."
            )
        cache = jax.eval_shape(lambda config=model_config: empty_cache(config, 1, 1, "float32"))
        if not cache.can_rewind:
            raise ConfigError(
                "speculative decoding reads tokens that the text does not keep, and layers of model"
                f".mixer={model_config.mixer!r} with model.layer_pattern="
                f"{model_config.layer_pattern!r} have a state from which no token can be taken"
                " back: write with jf.generate."
            )
        if model_config.vocab_size != config.vocab_size:
            raise ConfigError(
                f"the draft has model.vocab_size={model_config.vocab_size}, and the model"
                f" {config.vocab_size}: a draft must have the same tokens, so that what it proposes"
                " can be compared. Choose another, or leave it out to look up tokens in the text."
            )
    longest = np.shape(prompt)[-1] + max_new_tokens + ahead
    if config.rope.scaling in BY_LENGTH and longest > config.original_length:
        raise ConfigError(
            f"model.rope.scaling={config.rope.scaling!r} turns a token by the length of what is"
            f" read with it, and a round reads {ahead} tokens more than it keeps: beyond"
            f" {config.original_length} tokens (here {longest}) the text would differ from that of"
            " jf.generate. Use jf.generate."
        )
    warn_of_padding("prompt", prompt, segment_ids, level=4)
    streams = []
    weights = []
    for model_params, model_config in models:
        # A round reads tokens that are not kept, and needs slots for them.
        stream = start(
            model_params, model_config, prompt, max_new_tokens, key, segment_ids, n=n, spare=ahead
        )
        streams.append(stream)
        weights.append(prepared(model_params, model_config))
    configs = tuple(model_config for _, model_config in models)
    return _speculate(weights, configs, rules, ahead, max_new_tokens, streams)


class _Round(NamedTuple):
    """The state of the loop: tokens [B, n] int32; the newest token [B], which no model has read;
    the streams of the model and of the draft; the numbers of `Speculation`."""

    made: jax.Array
    newest: jax.Array
    streams: tuple[Stream, ...]
    rounds: jax.Array
    accepted: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _speculate(
    weights: list[Params],
    configs: tuple[ModelConfig, ...],
    rules: Sampling,
    ahead: int,
    count: int,
    streams: list[Stream],
) -> Speculation:
    end = filler(rules.end_token)
    index = jnp.arange(ahead + 1)

    def unfinished(carry: _Round) -> jax.Array:
        stream = carry.streams[0]
        return (stream.written.count < count) & ~stream.done.all()

    def next_round(carry: _Round) -> _Round:
        """Tokens are proposed, read by the model, and kept as far as all rows keep theirs."""
        stream = carry.streams[0]
        written = stream.written
        first = stream.written.count
        # A key for what each of these draws: the proposal, whether it is kept, the token after it.
        key, propose_key, keep_key, next_key = jax.random.split(stream.key, 4)
        drafts = []
        if len(configs) == 1:
            proposed = _looked_up(written, ahead)  # [B, k]
            # What is looked up is proposed with certainty: q is 1.
            proposal = jax.nn.one_hot(proposed, configs[0].vocab_size)  # [B, k, V]
        else:
            draft = replace(carry.streams[1], key=propose_key, written=written)
            proposed, proposal, draft = _drafted(
                weights[1], configs[1], rules, ahead, draft, carry.newest
            )
            drafts.append(draft)
        unread = jnp.concatenate([carry.newest[:, None], proposed], axis=1)  # [B, 1 + k]
        logits, stream = _read(weights[0], configs[0], unread, stream)

        # p has the probabilities of the tokens after each token that was read.
        texts = [written.with_new(proposed, first, first + i) for i in range(ahead + 1)]
        # The rules read the text before each token, with those proposed before it.
        after = [_probabilities(logits[:, i], rules, text) for i, text in enumerate(texts)]
        p = jnp.stack(after, axis=1)  # [B, 1 + k, V]
        tokens, common, accepted = _kept(p, proposal, proposed, (keep_key, next_key), stream.done)
        is_end = ends(tokens, rules.end_token) & (index <= common)
        ended = stream.done[:, None] | (jnp.cumsum(is_end, axis=1) - is_end > 0)
        tokens = jnp.where(ended, end, tokens)
        written = written.with_new(tokens, first, first + common + 1)
        newest = jax.lax.dynamic_index_in_dim(tokens, common, axis=1, keepdims=False)
        # What is beyond max_new_tokens is dropped.
        slots = jnp.where(index <= common, first + index, count)
        made = carry.made.at[:, slots].set(tokens, mode="drop")
        stream = replace(stream, key=key, written=written, done=stream.done | is_end.any(axis=1))
        # The streams before they read what is not kept.
        refused = ahead - common  # the same for all rows, whose caches have one length
        streams = tuple(
            replace(each, cache=each.cache.rewind(refused), position=each.position - refused)
            for each in (stream, *drafts)
        )
        return _Round(made, newest, streams, carry.rounds + 1, carry.accepted + accepted)

    stream = streams[0]
    key, first_key = jax.random.split(stream.key)
    newest = _drawn(_probabilities(stream.logits, rules, stream.written), first_key)
    made = jnp.full((stream.done.shape[0], count), end, jnp.int32).at[:, 0].set(newest)
    done = stream.done | ends(newest, rules.end_token)
    stream = replace(stream, key=key, written=stream.written.add(newest), done=done)
    carry = _Round(made, newest, (stream, *streams[1:]), jnp.int32(0), jnp.int32(0))
    final = jax.lax.while_loop(unfinished, next_round, carry)
    return Speculation(final.made, final.rounds, final.accepted)


def _kept(
    p: jax.Array,
    proposal: jax.Array,
    proposed: jax.Array,
    keys: tuple[jax.Array, jax.Array],
    done: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [B, 1 + k], how many of them all rows keep less one, and how many proposed tokens are
    kept.

    `p` [B, 1 + k, V] are the probabilities of the model, and `proposal` [B, k, V] those of the
    `proposed` tokens [B, k]. Rows that are `done` [B] hold up no other one."""
    ahead = proposed.shape[1]
    # p(x) and q(x) of each proposed token x.
    p_of = jnp.take_along_axis(p[:, :-1], proposed[..., None], axis=-1)[..., 0]  # [B, k]
    q_of = jnp.take_along_axis(proposal, proposed[..., None], axis=-1)[..., 0]
    # Kept with probability min(1, p / q), without a division by a q that may be 0.
    keeps = jax.random.uniform(keys[0], p_of.shape) * q_of < p_of
    kept = jnp.cumprod(keeps.astype(jnp.int32), axis=1).sum(axis=1)  # [B], 0 .. k
    # The row that keeps the fewest decides for all, since their caches have one length.
    common = jnp.where(done, ahead, kept).min()

    q = jnp.pad(proposal, ((0, 0), (0, 1), (0, 0)))  # nothing is proposed after the last token
    at = functools.partial(jax.lax.dynamic_index_in_dim, index=common, axis=1, keepdims=False)
    residual = jnp.maximum(at(p) - at(q), 0.0)
    # Where p and q are equal but for rounding nothing remains, and nothing was refused.
    residual = jnp.where(residual.sum(axis=-1, keepdims=True) > 0, residual, at(p))
    tokens = jnp.pad(proposed, ((0, 0), (0, 1)))
    token = jnp.where(kept > common, at(tokens), _drawn(residual, keys[1]))
    tokens = jnp.where(jnp.arange(ahead + 1) == common, token[:, None], tokens)
    accepted = jnp.where(done, 0, jnp.minimum(kept, common + 1)).sum()
    return tokens, common, accepted


def _probabilities(logits: jax.Array, rules: Sampling, written: TextSoFar) -> jax.Array:
    """Return the probabilities [B, V] of the next token after the rules; 1 of the likeliest if
    greedy."""
    logits = choices(logits, rules, written)
    if rules.temperature == 0:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    return jax.nn.softmax(logits, axis=-1)


def _drawn(probabilities: jax.Array, key: jax.Array) -> jax.Array:
    """A token of each row by probabilities [B, V] of any sum above 0: int32 [B]."""
    # A probability of 0 is a logit of -inf, which is never drawn.
    return jax.random.categorical(key, jnp.log(probabilities), axis=-1).astype(jnp.int32)


def _read(
    params: Params, config: ModelConfig, tokens: jax.Array, stream: Stream
) -> tuple[jax.Array, Stream]:
    """Return the logits [B, T, V] after each of the tokens [B, T], and the stream that has read
    them."""
    length = tokens.shape[1]
    # A position beyond those that a text may have is never kept, but has to be one of the model.
    last = stream.position + stream.written.limit - stream.written.count
    positions = jnp.minimum(stream.position + jnp.arange(length), last)
    logits, cache = read(params, config, tokens, positions, stream.cache)
    return logits, replace(stream, cache=cache, position=stream.position + length)


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
    # The last one is read too, so that both caches have k + 1 tokens more.
    _, draft = _read(params, config, last[:, None], draft)
    return jnp.moveaxis(tokens, 0, 1), jnp.moveaxis(q, 0, 1), draft


def _looked_up(written: TextSoFar, ahead: int) -> jax.Array:
    """Return the tokens [B, k] that followed the newest tokens of each row the last time that they
    were in its text, repeated where they are fewer than k; any tokens where they were not."""
    after = jnp.zeros(len(written.tokens), jnp.int32)  # [B], the slot behind the last occurrence
    for size in reversed(LOOKUPS):  # a longer one replaces a shorter one
        found = written.occurrences(size)
        latest = jnp.where(found, size + jnp.arange(found.shape[1]), 0).max(axis=1)
        after = jnp.where(latest > 0, latest, after)
    period = jnp.maximum(written.end - after, 1)[:, None]
    following = after[:, None] + jnp.arange(ahead) % period
    return jnp.maximum(jnp.take_along_axis(written.tokens, following, axis=1), 0)
