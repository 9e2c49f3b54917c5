"""cuDNN's fused attention on NVIDIA GPUs.

Rows of one text go through `jax.nn.dot_product_attention`. For padded rows it is passed their
lengths. Packed rows need the length and the offset of each segment, which only a private function
of JAX takes: it is used in the versions of JAX named here, and `runs.kernel_check` compares
it with plain attention before a run relies on it.

A bias of the scores [1 or B, N, T, S] is rounded to the dtype of the queries. cuDNN adds it to the
scaled products and gives its gradient, summed over the rows that share it; for that it takes two
bytes of workspace for each score [B, N, T, S], which no compiler here counts. (Plain attention has
four and more, blocked attention about three.) JAX refuses it in training where a length is odd, and
cuDNN below 9.10.2 beside a window. Beside lengths the public entry and cuDNN from 9.5 on accept it.
Packed rows with a bias are left out: on Blackwell cuDNN refuses its gradient there, and nothing
says that each segment reads the bias from its first row and column.

On an H200 with jax 0.11.2 causal, padded and packed rows, a window and T5's bias with padding were
right. `check_attention` compares the output and all gradients, that of the bias too, on the rows,
lengths and mesh of the run, and a run with attention.kernel=auto takes the next kernel where they
are wrong or refused.

The private function has other options, which are not used because a training run cannot rely on
them (read in JAX 0.12.0.1 and the XLA of its CUDA plugin; compiled for an H100 without one):

`score_mod`, a function of the scores [B, N, T, S], would serve soft-caps.
  - cuDNN refuses it beside its causal mask, its lengths, its windows and its own ALiBi, so that the
    mask would have to be part of the function: hidden blocks are computed, and packed rows are out.
  - `score_mod_args` get no gradient, silently: T5's biases would not be learned in this way.
  - XLA builds the graph of the backward pass from the call of the forward pass, which it looks for
    behind the log-sum-exp in the same computation. In a scan over layers there is none, and the
    program is refused. An operation without a counterpart in cuDNN ends the process, so that a
    check before the run could not report it.
  - That code runs only where a GPU is attached: a program that it refuses compiles without one.
`dropout_rate` has a seed that is a constant of the program: all steps would drop the same weights.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxformer.arrays.private_jax import private
from jaxformer.layers.masks import AttentionMask, sees_any, segment_ids

# The first and the last version of JAX whose function for packed rows is known.
KNOWN = ((0, 10), (0, 12))
# The first version whose function for packed rows takes fewer key heads than query heads.
GROUPED = (0, 12)


@functools.cache
def _entry() -> Callable[..., Any] | None:
    """Return JAX's function that takes offsets; None in a version in which it may be a different
    one."""
    if not KNOWN[0] <= jax.__version_info__[:2] <= KNOWN[1]:
        return None
    dot_product_attention: Callable[..., Any] = private(
        "cudnn.fused_attention_stablehlo.dot_product_attention", "cuDNN attention of packed rows"
    )
    parameters = inspect.signature(dot_product_attention).parameters
    needed = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "sliding_window_length")
    return dot_product_attention if all(name in parameters for name in needed) else None


def lacks_packed_rows() -> str:
    """Return why packed rows cannot be computed; empty if they can."""
    if _entry():
        return ""
    first, last = (".".join(map(str, version)) for version in KNOWN)
    return (
        f"packed rows need an entry of JAX that is known in versions {first} to {last}, and this is"
        f" {jax.__version__}"
    )


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Map q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] -> [B, T, N, W], in 16 bits, W at most
    H."""
    width = q.shape[-1]
    value_width = v.shape[-1]
    if value_width == width:
        return attention_of_one_width(q, k, v, mask)
    # Zeros in further dimensions of values change no others. Compiled for an H100, a step with
    # heads of 96 and values of 64 has a bound of 51 ms, and of 139 ms with blocked attention.
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, width - value_width)))
    return attention_of_one_width(q, k, v, mask)[..., :value_width]


def attention_of_one_width(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask
) -> jax.Array:
    """Map q [B, T, N, H], k [B, S, K, H], v [B, S, K, H] -> [B, T, N, H], in 16 bits.

    The bias of the scores, float32, is rounded to 16 bits: in bfloat16 by 2^-9 of itself at most,
    and a weight exp(s - b) beside the largest one by less than 2^-9 b exp(-b) < 0.001 for ALiBi's
    -b. If `mask.max_segments` is 1, each row is one text, which begins with the row, followed by
    padding. A query that sees nothing gives 0.
    """
    options: dict[str, Any] = {
        "bias": None if mask.scoring.bias is None else mask.scoring.bias.astype(q.dtype),
        "is_causal": mask.causal,
        "scale": mask.scoring.scale or 1 / math.sqrt(q.shape[-1]),
        # How many tokens a query sees before itself, and how many behind.
        "local_window_size": (mask.window - 1, 0) if mask.window else None,
        "implementation": "cudnn",
    }
    if mask.queries.segments is None and mask.keys.segments is None:
        q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
        return jax.nn.dot_product_attention(q, k, v, **options)
    queries, keys = segment_ids(mask)
    # cuDNN leaves the outputs and gradients of tokens without a segment unwritten. `where` makes
    # them zeros, and so does its transpose in the gradients.
    q = jnp.where((queries != 0)[..., None, None], q, 0)
    k, v = (jnp.where((keys != 0)[..., None, None], x, 0) for x in (k, v))
    # The points q, k and v of `model.remat` are the arrays that the kernel reads.
    q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
    if mask.max_segments == 1:
        for name, ids in (("query", queries), ("key_value", keys)):
            options[f"{name}_seq_lengths"] = jnp.sum(ids != 0, axis=1, dtype=jnp.int32)
        out = jax.nn.dot_product_attention(q, k, v, **options)
    else:
        out = _packed(q, k, v, mask, options["scale"])
    out = jnp.where(sees_any(mask)[..., None, None], out, 0)
    # Rows with more segments than the bound would be computed wrongly; a NaN ends the run instead.
    return jnp.where(_within_bound(queries, mask) & _within_bound(keys, mask), out, jnp.nan)


def _within_bound(ids: jax.Array, mask: AttentionMask) -> jax.Array:
    """Return whether no segment id in [B, T] exceeds `mask.max_segments`, as a bool scalar."""
    within = jnp.all(ids <= mask.max_segments)
    # With a bound of 1, the text begins with the row: no token follows padding.
    if mask.max_segments == 1:
        within &= jnp.all(ids[:, 1:] <= ids[:, :-1])
    return within


def _packed(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, scale: float
) -> jax.Array:
    """Attend within each segment of packed rows: [B, T, N, H], two of [B, S, K, H] -> [B, T, N,
    H]."""
    # In older versions the offsets of keys are computed with the number of query heads.
    if jax.__version_info__[:2] < GROUPED:
        groups = q.shape[2] // k.shape[2]
        k = jnp.repeat(k, groups, axis=2)
        v = jnp.repeat(v, groups, axis=2)
    segments: dict[str, jax.Array] = {}
    # The number of tokens of each segment, and the index of its first one, both [B, segments].
    # Segments are numbered from 1; each is contiguous.
    numbers = jnp.arange(1, mask.max_segments + 1)[:, None]
    spans = []
    for ids in segment_ids(mask):
        belongs = ids[:, None, :] == numbers  # [B, segments, T]
        # The first token of the segment; 0 for one without tokens, which `both` leaves out.
        starts = jnp.argmax(belongs, axis=-1).astype(jnp.int32)
        spans.append((jnp.sum(belongs, axis=-1, dtype=jnp.int32), starts))
    (query_lengths, _), (key_lengths, _) = spans
    # Segments that have both queries and keys; the length and the offset of others are -1.
    both = (query_lengths > 0) & (key_lengths > 0)
    for name, (lengths, starts) in zip(("q", "kv"), spans, strict=True):
        segments[f"{name}_seqlen"] = jnp.where(both, lengths, -1)  # [B, segments]
        offsets = jnp.where(both, starts, -1)
        # The function takes one offset more than there are segments: [B, segments + 1].
        segments[f"{name}_offsets"] = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
    entry: Any = _entry()
    masks = private("cudnn.fused_attention_stablehlo.MaskType", "cuDNN attention of packed rows")
    return entry(  # type: ignore[no-any-return]
        q,
        k,
        v,
        scale=scale,
        mask_type=masks.PADDING_CAUSAL if mask.causal else masks.PADDING,
        sliding_window_length=mask.window or None,
        **segments,
    )
