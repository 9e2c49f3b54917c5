"""Linear recurrences with a matrix for each head as their state, and what the mixers that have one
share: their projections, the short convolution before them, and what they keep of a text.

    S_t = a_t S_t-1 + b_t k_t (v_t - k_t^T a_t S_t-1)^T    the gated delta rule (arXiv:2412.06464)
    S_t = a_t S_t-1 + k_t v_t^T                            Mamba-2 (arXiv:2405.21060)
    o_t = S_t^T q_t

S [H, W] is the state of a head, a_t its decay, of the head or of each of its H channels
(arXiv:2510.26692), and b_t the rate at which it learns. Several tokens are computed in chunks, with
products of matrices inside a chunk and a scan over chunks. A backward pass has the states between
chunks and computes the inside of each again, so that memory is linear in the length.

A text begins without a state, and padding neither reads nor changes one. The tokens of a text have
to be adjacent in their row.

In the comments, B is the number of rows, T that of tokens, C that of tokens in a chunk, N that of
heads, K that of heads of queries and keys, each of which serves N / K, H the width of queries and
keys and W that of values. G is H where each channel has its decay, and else 1.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxformer.arrays.exact import is_exact, unknown, with_derivatives_of
from jaxformer.arrays.params import Params, Spec, Specs, wide_product
from jaxformer.arrays.sharding import (
    Axes,
    activation,
    constrain,
    explicit_axes,
    free_axes,
    on_devices,
)
from jaxformer.config.model import ModelConfig
from jaxformer.layers.exchange import CONTEXT, DIVIDED_TOKENS, devices_along
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.masks import AttentionMask, segment_ids
from jaxformer.layers.output import Aux, Output
from jaxformer.layers.sublayer import Call, Sizes, StoredArray, Sublayer


class Recurrence(NamedTuple):
    """What a recurrence reads of each token: q [B, T, K, H], k [B, T, K, H], v [B, T, N, W], the
    logarithm of the decay [B, T, N, G] and the rate [B, T, N], both float32, and whether a text
    begins [B, T]. Without a rate a value is added as it is, whatever stands under its key."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    rate: jax.Array | None
    begins: jax.Array


# What a mixer makes of its convolved projections, on the device that has them.
Prepare = Callable[[Recurrence], Recurrence]


def text_starts(mask: AttentionMask, segment: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether each token is the first of a text behind another one in its row, and whether
    it is no padding, bool [B, T] each, and the segment of the last that is none, [B].

    `segment` [B] is that of the tokens read before; 0 where there are none.
    """
    segments = segment_ids(mask)[0]
    real = segments != 0
    # The segment of the last token before each that is no padding, [B, 1 + T].
    behind = jnp.concatenate([segment[:, None], segments], axis=1)
    latest = jax.lax.associative_scan(lambda a, b: jnp.where(b != 0, b, a), behind, axis=1)
    before = latest[:, :-1]
    return real & (before != 0) & (before != segments), real, latest[:, -1]


def short_convolution(
    x: jax.Array, w: jax.Array, begins: jax.Array, previous: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Return the sum of the last K tokens of a text, each times its row of w [N, H, K], whose last
    entry is that of the token itself: x [B, T, N, H] -> [B, T, N, H], in x's dtype.

    `previous` are the K - 1 tokens before x [B, K - 1, N, H], and where texts begin among them.
    """
    length = x.shape[1]
    before, begins_before = previous
    tokens = jnp.concatenate([before.astype(x.dtype), x], axis=1)  # [B, K - 1 + T, N, H]
    # The number of a token's text in its row: only those of the same one are added.
    text = jnp.cumsum(jnp.concatenate([begins_before, begins], axis=1), axis=1)
    width = w.shape[-1]
    total = jnp.zeros(x.shape, jnp.float32)
    for i in range(width):
        same = text[:, i : i + length] == text[:, width - 1 :]
        term = tokens[:, i : i + length].astype(jnp.float32) * w[..., i].astype(jnp.float32)
        total += jnp.where(same[..., None, None], term, 0)
    return total.astype(x.dtype)


def last_tokens(x: jax.Array, begins: jax.Array, real: jax.Array, previous: jax.Array) -> jax.Array:
    """Return what `short_convolution` reads of x [B, T, N, H] in a later call: the last K - 1
    tokens of the last text, without padding, and zeros where it has fewer."""
    kept = previous.shape[1]
    tokens = jnp.concatenate([previous.astype(x.dtype), x], axis=1)
    none = jnp.zeros((len(x), kept), bool)
    text = jnp.cumsum(jnp.concatenate([none, begins], axis=1), axis=1)
    index = jnp.arange(1, x.shape[1] + 1)
    # How many of x's tokens there are up to the last that is no padding, [B].
    end = jnp.where(real, index, 0).max(axis=1)

    def of_row(tokens: jax.Array, text: jax.Array, end: jax.Array) -> jax.Array:
        newest = jax.lax.dynamic_slice_in_dim(tokens, end, kept)
        same = jax.lax.dynamic_slice_in_dim(text, end, kept) == text[-1]
        return jnp.where(same[:, None, None], newest, 0)

    return jax.vmap(of_row)(tokens, text, end)


def recur(tokens: Recurrence, state: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to all tokens, from a state [B, N, H, W] float32 on: returns [B, T, N,
    W] float32 and the state behind them. Products are in the dtype of q."""
    length = tokens.q.shape[1]
    if length == 1:
        return _one_token(tokens, state)
    size = min(chunk, length)
    count = -(-length // size)

    def in_chunks(a: jax.Array) -> jax.Array:
        """Map [B, T, N, ...] -> [T / C, B, N, C, ...]; what fills the last chunk changes
        nothing."""
        filling = [(0, 0), (0, count * size - length)] + [(0, 0)] * (a.ndim - 2)
        chunks = jnp.pad(a, filling).reshape(a.shape[0], count, size, *a.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(chunks, 1, 0), 3, 2)

    # One head of where texts begin, [T / C, B, 1, C], serves all.
    chunks = jax.tree.map(in_chunks, tokens._replace(begins=tokens.begins[..., None]))

    @jax.checkpoint
    def inside(state: jax.Array, chunk: Recurrence) -> tuple[jax.Array, jax.Array]:
        return _chunk(state, chunk)

    def body(state: jax.Array, chunk: Recurrence) -> tuple[jax.Array, jax.Array]:
        # Kept with the output of attention, whatever else a layer computes again.
        return inside(checkpoint_name(state, "attention"), chunk)

    state, out = jax.lax.scan(body, state, chunks)  # [T / C, B, N, C, W]
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)  # [B, T / C, C, N, W]
    return out.reshape(out.shape[0], count * size, *out.shape[3:])[:, :length], state


def _one_token(tokens: Recurrence, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to one token of each row."""
    token = jax.tree.map(lambda a: a[:, 0].astype(jnp.float32), tokens)
    q, k, news, log_decay, rate, begins = token
    q = _of_heads(q, news)
    k = _of_heads(k, news)
    kept = jnp.exp(log_decay) * (1 - begins[:, None, None])  # [B, N, G]
    state = state * kept[..., None]
    if rate is not None:
        news = rate[..., None] * (news - jnp.einsum("BNHW,BNH->BNW", state, k))
    state = state + _outer(k, news)
    return jnp.einsum("BNHW,BNH->BNW", state, q)[:, None], state


def _outer(k: jax.Array, news: jax.Array) -> jax.Array:
    """Return the outer product of each head, [B, N, H] and [B, N, W] -> [B, N, H, W]."""
    if not is_exact():
        return jnp.einsum("BNH,BNW->BNHW", k, news)
    # With a second term, of zeros, it is a product of matrices for XLA, which reads arrays. In the
    # loop over tokens XLA for CPUs would else compute the convolutions before it again for each
    # number of the state.
    terms = jnp.stack([news, jnp.zeros_like(news)], axis=2)
    return jnp.einsum("BNCH,BNCW->BNHW", jnp.stack([k, k], axis=2), terms)


def _of_heads(a: jax.Array, values: jax.Array) -> jax.Array:
    """Return queries or keys [B, K, ...] of each head of the values [B, N, ...]."""
    return jnp.repeat(a, values.shape[1] // a.shape[1], axis=1)


def _chunk(state: jax.Array, tokens: Recurrence) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to a chunk: arrays [B, N, C, ...], of q and k [B, K, C, ...], and a
    state [B, N, H, W]. The second result is [B, N, C, W]."""
    q, k, v, log_decay, rate, begins = tokens
    q_of_heads = _of_heads(q, v)
    k_of_heads = _of_heads(k, v)
    dtype = q.dtype

    def multiplied(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return wide_product(equation, a.astype(dtype), b.astype(dtype))

    text = jnp.cumsum(begins, axis=-1)  # [B, 1, C], 0 where a token goes on with the state
    earlier = jnp.tril(jnp.ones((q.shape[2],) * 2, bool))
    same = earlier & (text[..., :, None] == text[..., None, :])  # [B, 1, C, C]
    # The sums of each text, [B, N, C, G]. Those of a row would cancel between texts but for their
    # rounding, and one would get a gradient of another.
    ones = jnp.broadcast_to(same, (*log_decay.shape[:2], *same.shape[2:])).astype(jnp.float32)
    total = jnp.matmul(ones, log_decay, precision="highest")
    # From the state to each token, and from each token to the end of the chunk.
    since_state = jnp.where((text == 0)[..., None], jnp.exp(total), 0)
    until_end = jnp.exp(total[..., -1:, :] - total)
    until_end = jnp.where((text == text[..., -1:])[..., None], until_end, 0)

    def scores(read: jax.Array, pairs: jax.Array) -> jax.Array:
        """Return the products of rows [B, K, C, H] with the keys of earlier tokens as far as these
        have not decayed: [B, N, C, C]. The decay of a pair is at most 1, but the factors of which a
        product of matrices would make it need not be finite."""
        # [B, N, C, C, G]; what is not a pair has no gradient either.
        between = total[..., :, None, :] - total[..., None, :, :]
        decay = jnp.exp(jnp.where(pairs[..., None], between, -jnp.inf))
        if total.shape[-1] == 1:
            return _of_heads(multiplied("BKCH,BKDH->BKCD", read, k), v) * decay[..., 0]
        read = _of_heads(read, v)
        return (read[..., :, None, :] * k_of_heads[..., None, :, :] * decay).sum(-1)

    news = v.astype(jnp.float32)  # [B, N, C, W]
    if rate is not None:
        # What each token finds under its key depends on what the tokens before it have written:
        # (1 + L) news = b (v - k S), of which the right side is known but for the state. The rows
        # for the state are solved with it: news = solution - keys S (the UT transform of
        # arXiv:2406.06484).
        lower = rate[..., None] * scores(k, same & ~jnp.eye(q.shape[2], dtype=bool))
        found = rate[..., None] * k_of_heads.astype(jnp.float32) * since_state  # [B, N, C, H]
        known = jnp.concatenate([rate[..., None] * news, found], axis=-1)  # [B, N, C, W + H]
        solved = jnp.matmul(inverse_of(lower), known, precision="highest")
        news, keys = jnp.split(solved, [v.shape[-1]], axis=-1)
        news = news - multiplied("BNCH,BNHW->BNCW", keys, state)
    out = multiplied("BNCH,BNHW->BNCW", q_of_heads * since_state, state)
    out += multiplied("BNCD,BNDW->BNCW", scores(q, same), news)
    written = multiplied("BNCH,BNCW->BNHW", k_of_heads * until_end, news)
    # [B, N, G, 1], 0 where another text has begun.
    return state * since_state[..., -1, :, None] + written, out


def inverse_of(lower: jax.Array) -> jax.Array:
    """Return the inverse of 1 + L for L [..., C, C] below the diagonal, from those of blocks of 1,
    2, 4, ... rows: two of them make one of twice the size.

        | A  0 |           |     A^-1          0   |
        | M  D |  inverse  | -D^-1 M A^-1    D^-1  |

    It is as exact as substitution, where sums of powers of L cancel if keys are alike. The solver
    of LAPACK in jaxlib 0.10.2 is not called: two of its batches at once wait for each other's
    threads forever on a CPU of two cores.
    """
    count = lower.shape[-1]
    size = 2 ** math.ceil(math.log2(count))
    filling = [(0, 0)] * (lower.ndim - 2) + [(0, size - count)] * 2
    lower = jnp.pad(lower, filling)
    blocks = jnp.ones((*lower.shape[:-2], size, 1, 1))  # [..., C / s, s, s] for s = 1
    for s in [2**i for i in range(size.bit_length() - 1)]:
        first = blocks[..., ::2, :, :]  # A^-1
        second = blocks[..., 1::2, :, :]  # D^-1
        # [..., C / 2 s, 2 s, C / 2 s, 2 s], of which the blocks on the diagonal have M.
        pairs = lower.reshape(*lower.shape[:-2], size // (2 * s), 2 * s, size // (2 * s), 2 * s)
        on_diagonal = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
        m = on_diagonal[..., s:, :s]
        below = -jnp.matmul(jnp.matmul(second, m, precision="highest"), first, precision="highest")
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
    return blocks[..., 0, :count, :count]


def state_of_device(tokens: Recurrence, chunk: int) -> jax.Array:
    """Return the state [B, N, H, W] before the first token of this device, from the tokens of all
    devices of mesh.context before it, inside `jax.shard_map`.

    What the tokens of a device make of a state is M S + U. M [H, H] and U [H, W] are its state if
    it begins with [1, 0], in which the values have H more columns, of zeros: a device passes on
    H (H + W) numbers of each head, and no tokens. Without a rate M is the product of the decays.
    """
    b, t, n, w = tokens.v.shape
    h = tokens.k.shape[-1]
    empty = jnp.zeros((b, n, h, w))
    if tokens.rate is None:
        kept = jnp.exp(tokens.log_decay.sum(1)) * ~tokens.begins.any(1)[:, None, None]  # [B, N, G]
        added = recur(tokens, empty, chunk)[1]
        change = jnp.concatenate([kept[..., None] * jnp.eye(h), added], axis=-1)
    else:
        zeros = jnp.zeros((b, t, n, h), tokens.v.dtype)
        start = jnp.broadcast_to(jnp.eye(h, h + w), (b, n, h, h + w))
        wide = tokens._replace(v=jnp.concatenate([zeros, tokens.v], axis=-1))
        change = recur(wide, start, chunk)[1]
    states = [empty]
    for of_device in jax.lax.all_gather(change, CONTEXT)[:-1]:
        kept, added = jnp.split(of_device, [h], axis=-1)
        states.append(kept @ states[-1] + added)
    return jnp.stack(states)[jax.lax.axis_index(CONTEXT)]


def tokens_before(x: jax.Array, count: int) -> jax.Array:
    """Return the last tokens [B, count, ...] of the device before this one along mesh.context,
    inside `jax.shard_map`; zeros on the first."""
    devices = jax.lax.axis_size(CONTEXT)
    pairs = [(i, i + 1) for i in range(devices - 1)]
    return jax.lax.ppermute(x[:, -count:], CONTEXT, pairs)


def projection(
    config: ModelConfig, shape: tuple[int, ...], axes: tuple[str, ...], **what: Any
) -> Spec:
    """Return the row of a matrix that is multiplied with the input."""
    init = INITIALIZERS[config.init](config).weight
    return Spec((config.d_model, *shape), ("embed", *axes), init, inputs=("embed",), **what)


def recurrent_specs(config: ModelConfig) -> Specs:
    """Return the rows that every mixer with a recurrence has: q, k, v and gate, the taps of the
    convolutions of the first three, the logarithm of the speed at which a head decays, the
    projection and the bias of its steps, and out."""
    d = config.d_model
    n = config.recurrent_heads
    shared = config.recurrent_key_heads
    h = config.recurrent_key_width
    w = config.recurrent_value_width
    width = config.recurrent.convolution
    key = ("kv_heads", "head_dim")
    value = ("heads", "head_dim")
    residual = INITIALIZERS[config.init](config).residual
    decayed: tuple[int, ...] = (n,)
    decayed_axes: tuple[str, ...] = ("heads",)
    if config.recurrent.decay == "channel":
        decayed = (n, h)
        decayed_axes = value

    def taps(shape: tuple[int, int], axes: tuple[str, ...]) -> Spec:
        return Spec((*shape, width), (*axes, "tap"), _uniform_taps)

    return {
        "q": projection(config, (shared, h), key),
        "k": projection(config, (shared, h), key),
        "v": projection(config, (n, w), value),
        "gate": projection(config, (n, w), value),
        "q_taps": taps((shared, h), key),
        "k_taps": taps((shared, h), key),
        "v_taps": taps((n, w), value),
        "log_speed": Spec((n,), ("heads",), _log_speeds),
        # As with a router, a small error of a step is one of all later tokens.
        "decay": projection(config, decayed, decayed_axes, quantizable=False),
        "step_bias": Spec(decayed, decayed_axes, _log_steps),
        "out": Spec((n, w, d), (*value, "embed"), residual, inputs=value),
    }


def _uniform_taps(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw as PyTorch does the weights of a convolution of one channel."""
    bound = 1 / math.sqrt(spec.shape[-1])
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)


def _log_speeds(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw logarithms of numbers between 1 and 16 (arXiv:2405.21060)."""
    return jnp.log(jax.random.uniform(key, spec.shape, minval=1.0, maxval=16.0))


def _log_steps(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw the inverse of softplus of steps between 0.001 and 0.1, uniform in their logarithm."""
    shortest = math.log(1e-3)
    longest = math.log(0.1)
    step = jnp.exp(jax.random.uniform(key, spec.shape, minval=shortest, maxval=longest))
    return step + jnp.log(-jnp.expm1(-step))


def of_latent(
    equation: str, params: Params, name: str, x: jax.Array, to: Axes | None = None
) -> jax.Array:
    """Return the product with the weight of this name, of the token or of its latent."""
    if f"{name}_down" in params:
        x = linear("BTD,DC->BTC", params, f"{name}_down", x, point="latent")
    return linear(equation, params, name, x, to=to, point="gate")


def steps(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return the length of the step of each token, by which a head decays, [B, T, N] float32, or
    each of its channels, [B, T, N, H]."""
    equation = "BTD,DN->BTN"
    if config.recurrent.decay == "channel":
        equation = "BTD,DNH->BTNH"
    step = of_latent(equation, params, "decay", x).astype(jnp.float32)
    return jax.nn.softplus(step + params["step_bias"])


def start(config: ModelConfig, batch: int, slots: int, dtype: DTypeLike) -> dict[str, jax.Array]:
    """Return what is kept of a text: its state [B, N, H, W] float32, the last tokens that the
    convolutions read [B, K - 1, heads, width], and its segment [B]. It does not grow with the
    text."""
    specs = recurrent_specs(config)
    kept = {
        name: jnp.zeros((batch, config.recurrent.convolution - 1, *specs[name].shape[1:]), dtype)
        for name in ("q", "k", "v")
    }
    sizes = config.recurrent_heads, config.recurrent_key_width, config.recurrent_value_width
    state = jnp.zeros((batch, *sizes), jnp.float32)
    state = constrain(state, ("batch", "heads", None, None))
    return kept | {"state": state, "segment": jnp.zeros(batch, jnp.int32)}


def read_texts(
    params: Params,
    config: ModelConfig,
    x: jax.Array,
    call: Call,
    log_decay: jax.Array,
    rate: jax.Array,
    prepare: Prepare,
) -> Output:
    """Return what each token of x [B, T, D] reads of the state of its text, [B, T, N, W] float32,
    and the cache behind the last: of the convolved projections, as `prepare` makes them, and
    the decay [B, T, N, G] and rate [B, T, N] of each token, which leave the state as it is on
    padding.
    """
    cache = call.cache
    kept = start(config, len(x), 0, x.dtype) if cache is None else cache.kept
    begins, real, segment = text_starts(call.mask, kept["segment"])
    projected = {
        name: linear("BTD,DNH->BTNH", params, name, x, to=DIVIDED_TOKENS)
        for name in ("q", "k", "v")
    }
    weights = {}
    for name, array in params.items():
        if name == "skip" or name.endswith(("_taps", "_taps_bias")):
            weights[name] = array
    log_decay = jnp.where(real[..., None, None], log_decay, 0)
    rate = jnp.where(real[..., None], rate, 0)
    kept = {name: array for name, array in kept.items() if name != "segment"}

    # Each device reads its rows, heads and tokens. With a cache it reads all tokens of its rows,
    # since the state behind the last is kept, and so it does where it would have fewer tokens than
    # a convolution reads of the device before it.
    batch, tokens, heads, _ = activation(projected["v"].shape, DIVIDED_TOKENS)
    keys = activation(projected["q"].shape, DIVIDED_TOKENS)[2]
    # A single head of keys serves the heads of every device.
    if keys is None and projected["q"].shape[2] > 1:
        heads = None
    few = x.shape[1] // devices_along(tokens) < config.recurrent.convolution - 1
    if cache is not None or few:
        tokens = None
    run: Callable[..., Any] = functools.partial(
        _on_device, config, cache is not None, tokens is not None, prepare
    )
    if is_exact() and tokens is None:
        run = with_derivatives_of(run, functools.partial(_token_by_token, config, prepare))
    read: tuple[Any, ...] = projected, weights, log_decay, rate, begins, real, kept
    if math.prod(free_axes().values()) > 1:
        heads_of = {"q": keys, "k": keys, "v": heads}
        of_values = PartitionSpec(batch, tokens, heads)
        of_tokens = PartitionSpec(batch, tokens)
        of_kept = {name: PartitionSpec(batch, None, axis) for name, axis in heads_of.items()}
        of_kept["state"] = PartitionSpec(batch, heads)
        in_specs = (
            {name: PartitionSpec(batch, tokens, axis) for name, axis in heads_of.items()},
            {name: PartitionSpec(heads_of.get(name[0], heads)) for name in weights},
            of_values,
            of_values,
            of_tokens,
            of_tokens,
            of_kept,
        )
        if explicit_axes():
            # What the layers before have left in another place.
            read = jax.tree.map(_resharded, in_specs, read)
        run = on_devices(run, in_specs, (of_values, of_kept))
    out, kept = run(*read)
    state, captures = call.request.apply(f"{config.mixer}_state", kept["state"])
    if cache is not None:
        cache = cache._replace(kept=kept | {"state": state, "segment": segment})
    return Output(constrain(out, DIVIDED_TOKENS), cache, Aux(captures=captures))


def _resharded(place: PartitionSpec, tree: Any) -> Any:
    return jax.tree.map(lambda array: jax.sharding.reshard(array, place), tree)


def _token_by_token(
    config: ModelConfig,
    prepare: Prepare,
    projected: dict[str, jax.Array],
    weights: dict[str, jax.Array],
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    real: jax.Array,
    kept: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return what `_on_device` does of whole rows, of which each token is read as in decoding: one
    program of one token, whose bits depend on no other token than those before it in its text."""
    batch, length = begins.shape

    def padded(a: jax.Array, axes: int = 1) -> jax.Array:
        # Two rows and two tokens more than there are: with fewer XLA for CPUs makes another
        # program of the loop, which has other bits (seen with jaxlib 0.10.2).
        return jnp.pad(a, [(0, 2)] * axes + [(0, 0)] * (a.ndim - axes))

    # With the number 1 a compiler would leave out the division by it.
    length_of_row = unknown(length, log_decay)
    arrays = (projected, log_decay, rate, begins, real)
    tokens = jax.tree.map(functools.partial(padded, axes=2), arrays)

    def read(i: jax.Array, done: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        out, kept = done
        row = i // length_of_row
        at = i % length_of_row

        def token_of(a: jax.Array) -> jax.Array:
            start = [row, at] + [0] * (a.ndim - 2)
            return jax.lax.dynamic_slice(a, start, (1, 1, *a.shape[2:]))

        before = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, row, 1), kept)
        x, log_decay, rate, begins, real = jax.tree.map(token_of, tokens)
        of_token, after = _on_device(
            config, True, False, prepare, x, weights, log_decay, rate, begins, real, before
        )

        def put(a: jax.Array, new: jax.Array) -> jax.Array:
            # A cache may have a wider dtype than the model.
            return jax.lax.dynamic_update_slice_in_dim(a, new.astype(a.dtype), row, 0)

        kept = jax.tree.map(put, kept, after)
        return jax.lax.dynamic_update_slice(out, of_token, (row, at, 0, 0)), kept

    out = padded(jnp.zeros(projected["v"].shape, jnp.float32), axes=2)
    start = out, jax.tree.map(padded, kept)
    out, kept = jax.lax.fori_loop(0, unknown(batch * length, log_decay), read, start)
    return out[:batch, :length], jax.tree.map(lambda a: a[:batch], kept)


def _on_device(
    config: ModelConfig,
    cached: bool,
    divided: bool,
    prepare: Prepare,
    projected: dict[str, jax.Array],
    weights: dict[str, jax.Array],
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    real: jax.Array,
    kept: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return what the tokens of a device read, [B, T, N, W] float32, and what is kept behind them.
    Where tokens are `divided`, those before them are on other devices."""
    tail = config.recurrent.convolution - 1
    begins_before = jnp.zeros((len(begins), tail), bool)
    if divided:
        begins_before = tokens_before(begins, tail)
    convolved = {}
    new = {}
    for name, x in projected.items():
        x = jnp.where(real[..., None, None], x, 0)
        before = tokens_before(x, tail) if divided else kept[name]
        sums = short_convolution(x, weights[f"{name}_taps"], begins, (before, begins_before))
        bias = weights.get(f"{name}_taps_bias")
        if bias is not None:
            sums += bias.astype(x.dtype)
        convolved[name] = jax.nn.silu(sums)
        new[name] = last_tokens(x, begins, real, before) if cached else kept[name]
    read = prepare(Recurrence(**convolved, log_decay=log_decay, rate=rate, begins=begins))
    chunk = config.recurrent.chunk
    state = state_of_device(read, chunk) if divided else kept["state"]
    out, state = recur(read, state, chunk)
    if "skip" in weights:
        out += weights["skip"][:, None] * convolved["v"]
    if divided:
        # That behind the last token of the row.
        is_last = jax.lax.axis_index(CONTEXT) == jax.lax.axis_size(CONTEXT) - 1
        state = jax.lax.psum(jnp.where(is_last, state, 0), CONTEXT)
    return out, new | {"state": state}


def _stored(config: ModelConfig, sizes: Sizes) -> list[StoredArray]:
    """Return the products, what the convolutions make of them, and a state for each chunk."""
    specs = recurrent_specs(config)
    sum_of_widths = 0.0
    arrays = []
    for name in ("q", "k", "v", "gate"):
        _, heads, width = specs[name].shape
        numbers = sizes.tokens * sizes.share(heads) * width
        arrays.append(StoredArray(name, numbers * sizes.number))
        sum_of_widths += numbers
    n, h = specs["out"].shape[0], specs["q"].shape[2]
    out = sizes.tokens * sizes.share(n) * specs["v"].shape[2]
    states = out * h / min(config.recurrent.chunk, sizes.length)
    convolved = StoredArray("convolved", (sum_of_widths - out) * sizes.number)
    # In float32: the states, and the output before its norm.
    return [*arrays, convolved, StoredArray("attention", 4 * states), StoredArray("read", 4 * out)]


def _flops(config: ModelConfig, keys: int | float) -> int | float:
    """Return FLOPs per token of the products inside a chunk and of those with the state, whatever
    the number of tokens before."""
    n = config.recurrent_heads
    h = config.recurrent_key_width
    w = config.recurrent_value_width
    chunk = config.recurrent.chunk
    # Scores of queries, of those heads alone; the sum of values; the state is read and written.
    scores = 2 * chunk * config.recurrent_key_heads * h
    total = scores + n * (2 * chunk * w + 4 * h * w)
    if config.mixer == "delta":
        # Scores of keys, half of a square for the solution of both sides; keys read the state.
        total += scores + n * (chunk * (h + w) + 2 * h * w)
    return total


def recurrent_mixer(
    name: str,
    specs: Callable[[ModelConfig], Specs],
    apply: Callable[[Params, ModelConfig, jax.Array, Call], Output],
    formula: Callable[[ModelConfig], tuple[str, ...]],
) -> Sublayer:
    """Return the row of a mixer with a recurrence."""
    return Sublayer(
        specs=specs,
        apply=apply,
        product="out",
        stored=_stored,
        gradients=("q", "k", "v", "gate", "convolved"),
        formula=formula,
        scores=_flops,
        start=start,
        in_order=True,
        capture=f"{name}_out",
    )
