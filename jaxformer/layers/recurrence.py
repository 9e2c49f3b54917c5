"""A linear recurrence with a matrix for each head as its state, that of the gated delta rule
(arXiv:2412.06464), and the short convolution before it:

    S_t = a_t S_t-1 + b_t k_t (v_t - k_t^T a_t S_t-1)^T
    o_t = S_t^T q_t

S [H, W] is the state of a head, a_t its decay, of the head or of each of its H channels
(arXiv:2510.26692), and b_t the rate at which it learns. Several tokens are computed in chunks, with
products of matrices inside a chunk and a scan over chunks. A backward pass has the states between
chunks and computes the inside of each again, so that memory is linear in the length.

A text begins without a state, and padding neither reads nor changes one. The tokens of a text have
to be adjacent in their row.

In the comments, B is the number of rows, T that of tokens, C that of tokens in a chunk, N that of
heads, H the width of queries and keys and W that of values. G is H where each channel has its
decay, and else 1.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.arrays.params import wide_product
from jaxformer.layers.exchange import CONTEXT
from jaxformer.layers.masks import AttentionMask, segment_ids


class Recurrence(NamedTuple):
    """What a recurrence reads of each token: q [B, T, N, H], k [B, T, N, H], v [B, T, N, W], the
    logarithm of the decay [B, T, N, G] and the rate [B, T, N], both float32, and whether a text
    begins [B, T]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    rate: jax.Array
    begins: jax.Array


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
    chunks = Recurrence(*map(in_chunks, tokens._replace(begins=tokens.begins[..., None])))

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
    q, k, v, log_decay, rate, begins = (a[:, 0].astype(jnp.float32) for a in tokens)
    kept = jnp.exp(log_decay) * (1 - begins[:, None, None])  # [B, N, G]
    state = state * kept[..., None]
    news = v - jnp.einsum("BNHW,BNH->BNW", state, k)
    state = state + jnp.einsum("BN,BNH,BNW->BNHW", rate, k, news)
    return jnp.einsum("BNHW,BNH->BNW", state, q)[:, None], state


def _chunk(state: jax.Array, tokens: Recurrence) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to a chunk: arrays [B, N, C, ...] and a state [B, N, H, W]. The second
    result is [B, N, C, W]."""
    q, k, v, log_decay, rate, begins = tokens
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
        """Return the products of rows with the keys of earlier tokens as far as these have not
        decayed: [B, N, C, C]. The decay of a pair is at most 1, but the factors of which a product
        of matrices would make it need not be finite."""
        # [B, N, C, C, G]; what is not a pair has no gradient either.
        between = total[..., :, None, :] - total[..., None, :, :]
        decay = jnp.exp(jnp.where(pairs[..., None], between, -jnp.inf))
        if total.shape[-1] == 1:
            return multiplied("BNCH,BNDH->BNCD", read, k) * decay[..., 0]
        return (read[..., :, None, :] * k[..., None, :, :] * decay).sum(-1)

    news = rate[..., None] * v.astype(jnp.float32)  # [B, N, C, W]
    # What each token finds under its key depends on what the tokens before it have written:
    # (1 + L) news = b (v - k S), of which the right side is known but for the state. The rows for
    # the state are solved with it: news = solution - keys S (the UT transform of arXiv:2406.06484).
    lower = rate[..., None] * scores(k, same & ~jnp.eye(q.shape[2], dtype=bool))
    found = rate[..., None] * k.astype(jnp.float32) * since_state  # [B, N, C, H]
    known = jnp.concatenate([news, found], axis=-1)  # [B, N, C, W + H]
    solved = jnp.matmul(inverse_of(lower), known, precision="highest")
    news, keys = jnp.split(solved, [v.shape[-1]], axis=-1)
    news = news - multiplied("BNCH,BNHW->BNCW", keys, state)
    out = multiplied("BNCH,BNHW->BNCW", q * since_state, state)
    out += multiplied("BNCD,BNDW->BNCW", scores(q, same), news)
    written = multiplied("BNCH,BNCW->BNHW", k * until_end, news)
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
    H (H + W) numbers of each head, and no tokens.
    """
    b, _, n, h = tokens.k.shape
    zeros = jnp.zeros_like(tokens.k)
    w = tokens.v.shape[-1]
    start = jnp.broadcast_to(jnp.eye(h, h + w), (b, n, h, h + w))
    wide = tokens._replace(v=jnp.concatenate([zeros, tokens.v], axis=-1))
    changes = jax.lax.all_gather(recur(wide, start, chunk)[1], CONTEXT)
    states = [jnp.zeros((b, n, h, w))]
    for change in changes[:-1]:
        kept, added = jnp.split(change, [h], axis=-1)
        states.append(kept @ states[-1] + added)
    return jnp.stack(states)[jax.lax.axis_index(CONTEXT)]


def tokens_before(x: jax.Array, count: int) -> jax.Array:
    """Return the last tokens [B, count, ...] of the device before this one along mesh.context,
    inside `jax.shard_map`; zeros on the first."""
    devices = jax.lax.axis_size(CONTEXT)
    pairs = [(i, i + 1) for i in range(devices - 1)]
    return jax.lax.ppermute(x[:, -count:], CONTEXT, pairs)
