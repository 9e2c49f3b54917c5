"""The attention kernels: a table of implementations of attention, and what each cannot do.

`features` names what a kernel may lack, those of experts (`layers/grouped.py`) too, and `missing`
compares it with what a run or a call needs; `runs/resolve.py` selects a kernel for a run.

Every kernel maps q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] and an `AttentionMask` to [B, T, N,
W]; `xla` is the reference, in plain jax.numpy, for every transform and device.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jaxformer.arrays.sharding import free_axes
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import BIASED_SCORES, AttentionKernel
from jaxformer.layers.blocked import blocked_attention
from jaxformer.layers.cudnn import cudnn_attention, lacks_packed_rows
from jaxformer.layers.dot_product import plain
from jaxformer.layers.exchange import CONTEXT, Exchange, Kernel, exchange_of, on_each_device, placed
from jaxformer.layers.masks import AttentionMask
from jaxformer.layers.pallas import splash_attention, splash_on_mesh
from jaxformer.layers.ring import around_ring, ring_attention

# Compute capabilities of NVIDIA GPUs.
AMPERE = (8, 0)
HOPPER = (9, 0)
# The log-sum-exp of packed rows has, for each token and head, as many floats as a row may have
# segments.
MOST_SEGMENTS = 64


class Needs(NamedTuple):
    """What the batches of a training run, or one call, need of a kernel of attention or of experts.

    A call is compared on a device that its kernel was chosen for, so `platform`, `dtype` and
    `head_width` are empty there. `lengths` and `exchanges` are those of queries and of keys;
    `context` devices divide the tokens of a row. `segments` is the highest segment id: infinite
    where it is not known, 1 for padded rows and 0 for rows without ids. `leading` is the number of
    keys that all queries see.
    """

    platform: str = ""
    capability: tuple[int, ...] = HOPPER
    dtype: str = ""
    head_width: int = 0
    lengths: tuple[int, ...] = ()
    exchanges: tuple[Exchange, ...] = ("heads",)
    context: int = 1
    segments: float = 0
    causal: bool = True
    window: int = 0
    leading: int = 0
    dropout: bool = False
    bias: bool = False
    soft_cap: bool = False
    sinks: bool = False
    positions: bool = False
    wide_values: bool = False

    @classmethod
    def of_run(
        cls,
        model: ModelConfig,
        platform: str,
        dtype: str,
        length: int,
        segments: int,
        capability: tuple[int, ...] = HOPPER,
        leading: int = 0,
        exchange: Exchange = "none",
        context: int = 1,
    ) -> "Needs":
        """Return what a model needs on rows of multiples of `length`."""
        return cls(
            platform=platform,
            capability=capability,
            dtype=dtype,
            head_width=model.head_width,
            lengths=(length,),
            exchanges=(exchange,),
            context=context,
            segments=segments,
            causal=model.family == "decoder",
            window=model.window,
            leading=leading,
            dropout=model.attention_dropout_rate > 0,
            bias=model.positions in BIASED_SCORES,
            soft_cap=model.attention.soft_cap > 0,
            sinks=model.attention.sinks,
            wide_values=model.value_width > model.head_width,
        )

    @classmethod
    def of_call(cls, mask: AttentionMask, heads: int) -> "Needs":
        """Return what attention under a mask needs on the mesh in force."""
        sides = (mask.queries, mask.keys)
        lengths = tuple(side.positions.shape[-1] for side in sides)
        segments = 0.0
        if any(side.segments is not None for side in sides):
            # Ids without a bound may be those of any number of texts.
            segments = mask.max_segments or math.inf
        is_ordered = mask.balanced or all(side.ordered for side in sides)
        rate, key = mask.dropout
        return cls(
            lengths=lengths,
            exchanges=tuple(exchange_of(length, heads) for length in lengths),
            context=free_axes().get(CONTEXT, 1),
            segments=segments,
            causal=mask.causal,
            window=mask.window,
            leading=mask.leading,
            dropout=bool(rate) and key is not None,
            bias=mask.scoring.bias is not None,
            soft_cap=bool(mask.scoring.soft_cap),
            sinks=mask.scoring.sinks is not None,
            positions=(mask.causal or mask.window > 0) and not is_ordered,
        )


def features(needs: Needs) -> Iterator[tuple[str, str]]:
    """Yield each feature that a kernel must have to serve the needs, by its name in the `lacks` of
    the rows, with the reason why a kernel without it cannot."""
    if needs.platform and needs.platform != "gpu":
        yield "off gpu", f"it needs an NVIDIA GPU, and this device is a {needs.platform}"
    if needs.platform and needs.platform != "tpu":
        yield "off tpu", f"it needs a TPU, and this device is a {needs.platform}"
    if needs.platform == "gpu" and needs.capability < AMPERE:
        actual = ".".join(map(str, needs.capability))
        yield "before Ampere", f"it needs compute capability 8.0, and this device has {actual}"
    if needs.dtype and needs.dtype not in ("bfloat16", "float16"):
        yield "32 bits", f"it computes in 16 bits only, and model.dtype is {needs.dtype}"
    # Calls have no width here, 0, which fits.
    if needs.head_width % 8 or needs.head_width > 256:
        yield "head width", f"its head width is a multiple of 8 up to 256, not {needs.head_width}"
    if needs.segments > 1:
        if needs.capability < HOPPER:
            yield (
                "packed before Hopper",
                "it takes packed rows from compute capability 9.0 (Hopper) on",
            )
        if unknown := lacks_packed_rows():
            yield "packed in any JAX", unknown
    if needs.segments > MOST_SEGMENTS:
        yield (
            "many segments",
            f"it takes rows of at most {MOST_SEGMENTS} texts, and these have more",
        )
    if needs.window and not needs.causal:
        yield (
            "window to both sides",
            "its window is to the left, and an encoder's is to both sides",
        )
    if needs.wide_values:
        yield (
            "wide values",
            "its values are at most as wide as its keys, and model.attention.value_dim is more",
        )
    if needs.positions:
        yield "positions", "its positions are the index, and these rows have their own"
    if needs.exchanges[0] == "gather":
        if any(length % (256 * needs.context) for length in needs.lengths):
            yield (
                "short pieces",
                "each device has two pieces of a row, which are multiples of 128 tokens, and"
                " data.sequence_length / (2 mesh.context) is not",
            )
        yield (
            "divided queries",
            "it needs all tokens of a row, and mesh.tensor x mesh.context does not divide"
            " model.n_heads",
        )
    if "none" in needs.exchanges:
        yield "one device", "its keys pass between the devices of mesh.context, which is 1"
    if needs.leading:
        yield (
            "leading",
            "it has no keys that all segments see, as those of adapter.kind=prompt and prefix",
        )
    if needs.dropout:
        yield (
            "dropout",
            "it has no dropout of attention weights, and model.attention.dropout is not 0",
        )
    if needs.bias:
        yield "score bias", "it has no bias of the scores, and model.positions adds one"
        if needs.segments > 1:
            yield (
                "biased texts",
                "it has no bias of the scores of packed rows, and model.positions adds one",
            )
        if needs.window:
            yield (
                "biased window",
                "it has no window beside a bias of the scores, as model.positions adds one",
            )
        if any(length % 2 for length in needs.lengths):
            yield "biased odd length", "beside a bias of the scores its sequences have even lengths"
    if needs.soft_cap:
        yield "soft-cap", "it has no soft-cap, and model.attention.soft_cap is set"
    if needs.sinks:
        yield "sinks", "it has no sinks, and model.attention.sinks is set"


def missing(lacks: frozenset[str], needs: Needs) -> str:
    """Return why a kernel that lacks these features cannot serve the needs; empty if it can."""
    for name, reason in features(needs):
        if name in lacks:
            return reason
    return ""


@dataclass(frozen=True)
class KernelRow:
    """A kernel, its description, and the features that it lacks, by their names in `features`.

    `on_mesh` runs it on the devices of a mesh: `on_each_device` if the compiler cannot divide it
    among them. `balanced` are the exchanges in which it reads `exchange.balanced` tokens.
    """

    run: Kernel
    what: str
    lacks: frozenset[str] = frozenset()
    on_mesh: Callable[..., jax.Array] = placed
    balanced: tuple[Exchange, ...] = ()

    def serves(self, mask: AttentionMask, heads: int) -> bool:
        """Return whether the kernel can serve a call of so many query heads."""
        return not missing(self.lacks, Needs.of_call(mask, heads))


KERNELS: Table[KernelRow] = Table(
    AttentionKernel,
    {
        "cudnn": KernelRow(
            cudnn_attention,
            "cuDNN attention",
            frozenset(
                {
                    "off gpu",
                    "32 bits",
                    "head width",
                    "packed before Hopper",
                    "packed in any JAX",
                    "many segments",
                    "window to both sides",
                    "wide values",
                    "positions",
                    "divided queries",
                    "leading",
                    "dropout",
                    "biased texts",
                    "biased window",
                    "biased odd length",
                    "soft-cap",
                    "sinks",
                }
            ),
            on_each_device,
        ),
        "tpu": KernelRow(
            splash_attention,
            "Pallas splash attention",
            frozenset({"off tpu", "positions", "short pieces", "leading", "dropout", "score bias"}),
            splash_on_mesh,
            balanced=("gather",),
        ),
        "blocked": KernelRow(
            blocked_attention,
            "blocked attention with a saved log-sum-exp",
            frozenset({"divided queries"}),
        ),
        "ring": KernelRow(
            ring_attention,
            "ring attention over mesh.context",
            frozenset({"dropout", "leading", "score bias", "one device"}),
            around_ring,
            balanced=("heads", "gather"),
        ),
        "xla": KernelRow(plain, "plain XLA attention"),
    },
    besides=("auto",),
)
# The kernels that auto tries on a platform, the fastest first; plain attention serves everything.
PREFERRED = {
    "gpu": ("cudnn", "blocked", "ring", "xla"),
    "tpu": ("tpu", "blocked", "ring", "xla"),
    "cpu": ("blocked", "xla"),
}


def _row(kernel: str) -> KernelRow:
    return KERNELS["xla" if kernel == "auto" else kernel]


def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Attend by the named kernel ("auto": plain), on the devices of the mesh in force. A call that
    this kernel does not serve is computed by the plain one: a kernel chosen for the batches of a
    run is also called with a cache and with padded prompts."""
    row = _row(kernel)
    if not row.serves(mask, q.shape[2]):
        row = KERNELS["xla"]
    return row.on_mesh(row.run, q, k, v, mask)


def reads_balanced(kernel: str, mask: AttentionMask, heads: int) -> bool:
    """Return whether the named kernel wants the tokens of such a call balanced over mesh.context,
    because a causal mask would give the devices unequal work."""
    length = mask.queries.positions.shape[1]
    row = _row(kernel)
    # Without a causal mask all devices have equal work already.
    if not mask.causal or exchange_of(length, heads) not in row.balanced:
        return False
    # Each device has two pieces of a row.
    if length % (2 * free_axes().get(CONTEXT, 1)):
        return False
    return row.serves(mask, heads)
