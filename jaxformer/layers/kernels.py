"""The attention kernels: one table of ways to compute the same thing, and how one is chosen.

Every kernel maps q [B, T, N, H], k and v [B, S, K, H] and the places of queries and keys to [B, T, N, H]; `xla` is the
reference, plain mathematics that every transform and device understands. `choose` picks for a training run and says why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.config import ConfigError
from jaxformer.layers.blocked import blocked_attention
from jaxformer.layers.masks import Places, causal_mask

Kernel = Callable[[jax.Array, jax.Array, jax.Array, Places, Places], jax.Array]


def dot_product_attention(
    q: Float[Array, "... T N H"],
    k: Float[Array, "... S K H"],
    v: Float[Array, "... S K W"],
    mask: Bool[Array, "... T S"] | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
) -> Float[Array, "... T N W"]:
    """softmax(q k^T / sqrt(H)) v: [..., T, N, H], [..., S, K, H] twice, bool [..., T, S] -> [..., T, N, H].

    N is a multiple of K: query heads share key heads in groups of N/K. The softmax is float32; a row that may see nothing
    gives 0. `drop` maps the weights [..., K, N/K, T, S] to what is used of them. (arXiv:1706.03762, arXiv:2305.13245)
    """
    *_, n, h = q.shape
    grouped = q.reshape(*q.shape[:-2], k.shape[-2], n // k.shape[-2], h)
    scores = jnp.einsum("...TKGH,...SKH->...KGTS", grouped, k, preferred_element_type=jnp.float32) / math.sqrt(h)
    if mask is not None:
        mask = mask[..., None, None, :, :]
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None:
        weights = jnp.where(mask, weights, 0)
    if drop is not None:
        weights = drop(weights)
    return jnp.einsum("...KGTS,...SKH->...TKGH", weights.astype(v.dtype), v).reshape(q.shape[:-1] + v.shape[-1:])


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, queries: Places, keys: Places) -> jax.Array:
    return dot_product_attention(q, k, v, causal_mask(queries, keys))


def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, queries: Places, keys: Places) -> jax.Array:
    if queries.ordered and keys.ordered:
        return blocked_attention(q, k, v, q_segments=queries.segments, k_segments=keys.segments)
    return blocked_attention(q, k, v, queries.positions, keys.positions, queries.segments, keys.segments)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, queries: Places, keys: Places) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _tpu(q: jax.Array, k: jax.Array, v: jax.Array, queries: Places, keys: Places) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

    groups = q.shape[2] // k.shape[2]
    heads_first = [jnp.swapaxes(a, 1, 2) for a in (q, jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2))]
    segments = None
    if queries.segments is not None and keys.segments is not None:
        segments = SegmentIds(queries.segments, keys.segments)
    out = flash_attention(*heads_first, segment_ids=segments, causal=True, sm_scale=1 / math.sqrt(q.shape[-1]))
    return jnp.swapaxes(out, 1, 2)


class Case(NamedTuple):
    """What a kernel's limits depend on."""

    platform: str
    dtype: str
    length: int
    head_width: int
    packed: bool
    dropout: float


@dataclass(frozen=True)
class Row:
    """A kernel, what it is for in one phrase, and why it cannot serve a case (empty where it can)."""

    run: Kernel
    what: str
    refuses: Callable[[Case], str]


def _refuses_dropout(case: Case) -> str:
    return f"it has no dropout on attention weights, and model.dropout is {case.dropout}" if case.dropout else ""


def _cudnn_refuses(case: Case) -> str:
    if case.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this device is a {case.platform}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits only, and model.dtype is {case.dtype}"
    if case.head_width % 8 or case.head_width > 256:
        return f"its head width is a multiple of 8 up to 256, not {case.head_width}"
    if case.packed:
        return "it knows no segment ids, and data.packing is 'documents'"
    return _refuses_dropout(case)


def _tpu_refuses(case: Case) -> str:
    if case.platform != "tpu":
        return f"it needs a TPU, and this device is a {case.platform}"
    if case.length % 128:
        return f"its sequences are multiples of 128, not {case.length}"
    return _refuses_dropout(case)


KERNELS = {
    "cudnn": Row(_cudnn, "fused cuDNN attention", _cudnn_refuses),
    "tpu": Row(_tpu, "Pallas flash attention", _tpu_refuses),
    "blocked": Row(_blocked, "blocked attention with a saved log-sum-exp", _refuses_dropout),
    "xla": Row(_xla, "plain XLA attention", lambda case: ""),
}
PREFERRED = {"gpu": ("cudnn", "xla"), "tpu": ("tpu", "xla"), "cpu": ("blocked", "xla")}


def choose(asked: str, case: Case) -> tuple[str, str]:
    """The kernel for a training run, and a sentence that says which runs and why.

    Raises ConfigError if the one asked for by name cannot serve the case.
    """
    if asked != "auto":
        reason = KERNELS[asked].refuses(case)
        if reason:
            raise ConfigError(f"model.attention_kernel={asked!r} cannot run here: {reason}. Choose 'auto' or 'xla'.")
        return asked, f"{asked} ({KERNELS[asked].what}), as asked"
    passed: list[str] = []
    for name in PREFERRED.get(case.platform, ("xla",)):
        reason = KERNELS[name].refuses(case)
        if not reason:
            return name, f"{name} ({KERNELS[name].what})" + "".join(passed)
        passed.append(f"; not {name}: {reason}")
    raise ConfigError(f"no attention kernel serves {case}")


def reference(q: jax.Array, k: jax.Array, v: jax.Array, queries: Places, keys: Places) -> jax.Array:
    """The plain mathematics in float32, that every kernel is held against."""
    q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    return _xla(q, k, v, queries, keys)
