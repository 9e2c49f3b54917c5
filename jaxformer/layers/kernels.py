"""The attention kernels: one table of ways to compute the same thing, and how one is chosen.

Every kernel maps q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] and an `AttentionMask` to [B, T, N,
W]; `xla` is the reference, plain mathematics that every transform and device understands. `choose`
picks for a training run and says why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.config_model import AttentionKernel, ModelConfig
from jaxformer.layers.blocked import blocked_attention
from jaxformer.layers.dot_product import plain
from jaxformer.layers.masks import AttentionMask
from jaxformer.settings import ConfigError, Table

Kernel = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask], jax.Array]


def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    how: Any = {"causal": mask.causal, "window": mask.window, "scale": mask.scale}
    queries, keys = mask.queries, mask.keys
    if queries.ordered and keys.ordered:
        return blocked_attention(q, k, v, segments=(queries.segments, keys.segments), **how)
    layout = (queries.positions, keys.positions)
    return blocked_attention(q, k, v, layout, (queries.segments, keys.segments), **how)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    scale = mask.scale or None
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=mask.causal, scale=scale, implementation="cudnn"
    )


def _tpu(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

    groups, scale = q.shape[2] // k.shape[2], mask.scale or 1 / math.sqrt(q.shape[-1])
    heads_first = [
        jnp.swapaxes(a, 1, 2) for a in (q, jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2))
    ]
    ids = [mask.queries.segments, mask.keys.segments]
    segments = None
    if any(of is not None for of in ids):
        sides = zip(ids, (q, k), strict=True)
        segments = SegmentIds(
            *(jnp.ones(x.shape[:2], jnp.int32) if of is None else of for of, x in sides)
        )
    out = flash_attention(*heads_first, segment_ids=segments, causal=mask.causal, sm_scale=scale)
    return jnp.swapaxes(out, 1, 2)


class Case(NamedTuple):
    """What a kernel's limits depend on."""

    platform: str
    dtype: str
    length: int
    packed: bool
    model: ModelConfig


@dataclass(frozen=True)
class KernelRow:
    """A kernel, what it is for in one phrase, why it cannot serve a case (empty where it can), and
    whether it can a call."""

    run: Kernel
    what: str
    refuses: Callable[[Case], str]
    serves: Callable[[AttentionMask], bool]


def _lacks(case: Case) -> str:
    """What no kernel but the plain one knows."""
    model = case.model
    settings = {
        "dropout of attention weights": (
            f"model.dropout is {model.dropout}" if model.dropout else ""
        ),
        "bias of the scores": (
            f"model.positions is {model.positions!r}" if model.positions in ("alibi", "t5") else ""
        ),
        "soft-cap": "model.attention_soft_cap is set" if model.attention_soft_cap else "",
        "sinks": "model.attention_sinks is set" if model.attention_sinks else "",
    }
    return next(
        (f"it has no {what}, and {setting}" for what, setting in settings.items() if setting), ""
    )


def _fused_lacks(case: Case) -> str:
    if case.model.window:
        return "it has no window, and model.window is set"
    if case.model.value_width != case.model.head_width:
        return "its values are as wide as its keys, and model.value_dim is set"
    return _lacks(case)


def _cudnn_refuses(case: Case) -> str:
    if case.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this device is a {case.platform}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits only, and model.dtype is {case.dtype}"
    if case.model.head_width % 8 or case.model.head_width > 256:
        return f"its head width is a multiple of 8 up to 256, not {case.model.head_width}"
    if case.packed:
        return "it knows no segment ids, and these rows are packed or padded"
    return _fused_lacks(case)


def _tpu_refuses(case: Case) -> str:
    if case.platform != "tpu":
        return f"it needs a TPU, and this device is a {case.platform}"
    if case.length % 128:
        return f"its sequences are multiples of 128, not {case.length}"
    return _fused_lacks(case)


def _has_plain_scores(mask: AttentionMask) -> bool:
    return mask.bias is None and not mask.soft_cap and mask.sinks is None


def _goes_by_order(mask: AttentionMask) -> bool:
    """No window, and where it is causal no cache and no positions of its own: for kernels that know
    the index alone."""
    ordered = not mask.causal or (mask.queries.ordered and mask.keys.ordered)
    return ordered and mask.window == 0 and _has_plain_scores(mask)


def _goes_by_order_unpacked(mask: AttentionMask) -> bool:
    return _goes_by_order(mask) and mask.queries.segments is None and mask.keys.segments is None


def _goes_by_tiles(mask: AttentionMask) -> bool:
    return _goes_by_order(mask) and all(
        side.positions.shape[-1] % 128 == 0 for side in (mask.queries, mask.keys)
    )


KERNELS: Table[KernelRow] = Table(
    AttentionKernel,
    {
        "cudnn": KernelRow(
            _cudnn, "fused cuDNN attention", _cudnn_refuses, _goes_by_order_unpacked
        ),
        "tpu": KernelRow(_tpu, "Pallas flash attention", _tpu_refuses, _goes_by_tiles),
        "blocked": KernelRow(
            _blocked, "blocked attention with a saved log-sum-exp", _lacks, _has_plain_scores
        ),
        "xla": KernelRow(plain, "plain XLA attention", lambda case: "", lambda mask: True),
    },
    besides=("auto",),
)
PREFERRED = {"gpu": ("cudnn", "xla"), "tpu": ("tpu", "xla"), "cpu": ("blocked", "xla")}


def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Attention by the kernel of a name ("auto": plain), or the plain one for a call that it cannot
    serve.

    A kernel chosen for the batches of a run meets other calls too: a cache, padded prompts.
    """
    row = KERNELS["xla" if kernel == "auto" else kernel]
    return (row.run if row.serves(mask) else plain)(q, k, v, mask)


def choose(asked: str, case: Case) -> tuple[str, str]:
    """The kernel for a training run, and a sentence that says which runs and why.

    Raises ConfigError if the one asked for by name cannot serve the case.
    """
    if asked != "auto":
        reason = KERNELS[asked].refuses(case)
        if reason:
            raise ConfigError(
                f"model.attention_kernel={asked!r} cannot run here: {reason}. Choose 'auto' or"
                " 'xla'."
            )
        return asked, f"{asked} ({KERNELS[asked].what}), as asked"
    passed: list[str] = []
    for name in PREFERRED.get(case.platform, ("xla",)):
        reason = KERNELS[name].refuses(case)
        if not reason:
            return name, f"{name} ({KERNELS[name].what})" + "".join(passed)
        passed.append(f"; not {name}: {reason}")
    raise ConfigError(f"no attention kernel serves {case}")
