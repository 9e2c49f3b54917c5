"""cuDNN's fused attention on NVIDIA GPUs.

Rows of one text go through `jax.nn.dot_product_attention`. Padded rows pass their lengths; packed
rows pass the length and the offset of each segment, for which JAX has an entry that is not public:
it is used in the versions of JAX named here, and `runs.device.prove_kernel` compares it with plain
attention before a run trusts it.

That entry has more that is not used, because a training run cannot rely on it (read in JAX 0.12.0.1
and the XLA of its CUDA plugin; compiled for an H100 without one):

`score_mod`, a function of the scores [B, N, T, S], would serve soft-caps and ALiBi.
  - cuDNN refuses it beside its causal mask, its lengths, its windows and its own ALiBi, so that the
    mask would have to be part of the function: hidden blocks are computed, and packed rows are out.
  - `score_mod_args` get no gradient, silently: T5's biases would never be learned.
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

from jaxformer.layers.masks import AttentionMask, lengths_and_starts, sees_any, segment_ids

KNOWN = ((0, 10), (0, 12))  # the first and last version of JAX whose entry for packed rows is known
GROUPED = (0, 12)  # the first whose entry for packed rows takes fewer key heads than query heads


@functools.cache
def _entry() -> Callable[..., Any] | None:
    """JAX's entry that takes offsets; None in a version where it may be another."""
    if not KNOWN[0] <= jax.__version_info__[:2] <= KNOWN[1]:
        return None
    from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention

    known = inspect.signature(dot_product_attention).parameters
    needed = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "sliding_window_length")
    return dot_product_attention if all(name in known for name in needed) else None


def lacks_packed_rows() -> str:
    """Why packed rows cannot be computed; empty if they can."""
    if _entry():
        return ""
    first, last = (".".join(map(str, version)) for version in KNOWN)
    return (
        f"packed rows need an entry of JAX that is known in versions {first} to {last}, and this is"
        f" {jax.__version__}"
    )


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """q [B, T, N, H], k [B, S, K, H], v [B, S, K, H] -> [B, T, N, H], in 16 bits.

    Where `mask.max_segments` is 1, a row is one text, from its first token on, and padding. A query
    that sees nothing gives 0.
    """
    options: dict[str, Any] = {
        "is_causal": mask.causal,
        "scale": mask.scoring.scale or 1 / math.sqrt(q.shape[-1]),
        "local_window_size": (mask.window - 1, 0) if mask.window else None,
        "implementation": "cudnn",
    }
    if mask.queries.segments is None and mask.keys.segments is None:
        q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
        return jax.nn.dot_product_attention(q, k, v, **options)
    queries, keys = segment_ids(mask)
    # cuDNN writes nothing for tokens of no segment, neither outputs nor gradients. `where` puts
    # zeros in their place; its transpose does so in the gradients.
    q = jnp.where((queries != 0)[..., None, None], q, 0)
    k, v = (jnp.where((keys != 0)[..., None, None], x, 0) for x in (k, v))
    # As the kernel reads them, so that the points q, k and v of `model.remat` are kept like this.
    q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
    if mask.max_segments == 1:
        for name, ids in (("query", queries), ("key_value", keys)):
            options[f"{name}_seq_lengths"] = jnp.sum(ids != 0, axis=1, dtype=jnp.int32)
        out = jax.nn.dot_product_attention(q, k, v, **options)
    else:
        out = _packed(q, k, v, mask, options["scale"])
    out = jnp.where(sees_any(mask)[..., None, None], out, 0)
    # Rows that break the bound would be computed wrongly; a NaN ends the run instead.
    return jnp.where(_as_promised(queries, mask) & _as_promised(keys, mask), out, jnp.nan)


def _as_promised(ids: jax.Array, mask: AttentionMask) -> jax.Array:
    """Whether the segments [B, T] keep to `mask.max_segments`: a bool."""
    kept = jnp.all(ids <= mask.max_segments)
    if mask.max_segments == 1:  # the text begins with the row
        kept &= jnp.all(ids[:, 1:] <= ids[:, :-1])
    return kept


def _packed(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask, scale: float
) -> jax.Array:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    if jax.__version_info__[:2] < GROUPED:  # there the offsets of keys count the heads of queries
        groups = q.shape[2] // k.shape[2]
        k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    places: dict[str, jax.Array] = {}
    found = [lengths_and_starts(ids, mask.max_segments) for ids in segment_ids(mask)]
    both = (found[0][0] > 0) & (found[1][0] > 0)  # segments with queries and keys; others are -1
    for name, (lengths, starts) in zip(("q", "kv"), found, strict=True):
        places[f"{name}_seqlen"] = jnp.where(both, lengths, -1)  # [B, segments]
        begins = jnp.where(both, starts, -1)
        places[f"{name}_offsets"] = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)
    entry: Any = _entry()
    return entry(  # type: ignore[no-any-return]
        q,
        k,
        v,
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL if mask.causal else MaskType.PADDING,
        sliding_window_length=mask.window or None,
        **places,
    )
