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
from jaxformer.layers.positions import BIASES
from jaxformer.settings import ConfigError, Table

Kernel = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask], jax.Array]


def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    how: Any = {"causal": mask.causal, "window": mask.window, "scale": mask.scoring.scale}
    queries, keys = mask.queries, mask.keys
    if queries.ordered and keys.ordered:
        return blocked_attention(q, k, v, segments=(queries.segments, keys.segments), **how)
    layout = (queries.positions, keys.positions)
    return blocked_attention(q, k, v, layout, (queries.segments, keys.segments), **how)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    scale = mask.scoring.scale or None
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=mask.causal, scale=scale, implementation="cudnn"
    )


def _tpu(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

    groups, scale = q.shape[2] // k.shape[2], mask.scoring.scale or 1 / math.sqrt(q.shape[-1])
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
    """A training run, as far as the choice of a kernel depends on it."""

    platform: str
    dtype: str
    length: int
    packed: bool
    model: ModelConfig


@dataclass(frozen=True)
class KernelRow:
    """A kernel, its description, the features of `FEATURES` that it lacks, and why it cannot run on
    a device (empty if it can)."""

    run: Kernel
    what: str
    lacks: frozenset[str] = frozenset()
    device: Callable[[Case], str] = lambda case: ""

    def refuses(self, case: Case) -> str:
        """Why the kernel cannot serve a training run; empty if it can."""
        wanted = self.lacks & _features_of_run(case)
        reasons = (reason for name, reason in FEATURES.items() if name in wanted)
        return self.device(case) or next(reasons, "")

    def serves(self, mask: AttentionMask) -> bool:
        """Whether the kernel can serve a call."""
        return not self.lacks & _features_of_call(mask)


# Features that not every kernel has, and why a run that needs one cannot use a kernel without it.
FEATURES = {
    "segments": "it has no segment ids, and these rows are packed or padded",
    "any length": "its sequences are multiples of 128, and data.sequence_length is not",
    "window": "it has no window, and model.window is set",
    "value width": "its values are as wide as its keys, and model.value_dim is set",
    "positions": "its positions are the index, and these rows have their own",
    "dropout": "it has no dropout of attention weights, and model.dropout is set",
    "score bias": "it has no bias of the scores, and model.positions adds one",
    "soft-cap": "it has no soft-cap, and model.attention_soft_cap is set",
    "sinks": "it has no sinks, and model.attention_sinks is set",
}
SCORES = frozenset({"dropout", "score bias", "soft-cap", "sinks"})
FUSED = SCORES | {"window", "value width", "positions"}


def _features_of_run(case: Case) -> set[str]:
    model = case.model
    wanted = {
        "segments": case.packed,
        "any length": case.length % 128,
        "window": model.window,
        "value width": model.value_width != model.head_width,
        "dropout": model.dropout,
        "score bias": model.positions in BIASES,
        "soft-cap": model.attention_soft_cap,
        "sinks": model.attention_sinks,
    }
    return {name for name, value in wanted.items() if value}


def _features_of_call(mask: AttentionMask) -> set[str]:
    sides, scoring = (mask.queries, mask.keys), mask.scoring
    wanted = {
        "segments": any(side.segments is not None for side in sides),
        "any length": any(side.positions.shape[-1] % 128 for side in sides),
        "window": mask.window,
        "positions": mask.causal and not all(side.ordered for side in sides),
        "score bias": scoring.bias is not None,
        "soft-cap": scoring.soft_cap,
        "sinks": scoring.sinks is not None,
    }
    return {name for name, value in wanted.items() if value}


def _cudnn_device(case: Case) -> str:
    if case.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this device is a {case.platform}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits only, and model.dtype is {case.dtype}"
    if case.model.head_width % 8 or case.model.head_width > 256:
        return f"its head width is a multiple of 8 up to 256, not {case.model.head_width}"
    return ""


def _tpu_device(case: Case) -> str:
    return "" if case.platform == "tpu" else f"it needs a TPU, and this device is a {case.platform}"


KERNELS: Table[KernelRow] = Table(
    AttentionKernel,
    {
        "cudnn": KernelRow(_cudnn, "cuDNN attention", FUSED | {"segments"}, _cudnn_device),
        "tpu": KernelRow(_tpu, "Pallas flash attention", FUSED | {"any length"}, _tpu_device),
        "blocked": KernelRow(_blocked, "blocked attention with a saved log-sum-exp", SCORES),
        "xla": KernelRow(plain, "plain XLA attention"),
    },
    besides=("auto",),
)
PREFERRED = {"gpu": ("cudnn", "xla"), "tpu": ("tpu", "xla"), "cpu": ("blocked", "xla")}


def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Attention by the named kernel ("auto": plain), or by the plain one for a call that it does
    not serve: one chosen for the batches of a run meets a cache and padded prompts too.
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
