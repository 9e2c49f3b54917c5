"""The attention kernels: a table of implementations of attention, and what each cannot do.

Every kernel maps q [B, T, N, H], k [B, S, K, H], v [B, S, K, W] and an `AttentionMask` to [B, T, N,
W]; `xla` is the reference, in plain jax.numpy, for every transform and device. `runs/resolve.py`
selects one for a training run.
"""

import math
from collections.abc import Callable
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

HOPPER = (9, 0)
# The log-sum-exp of packed rows has, for each token and head, as many floats as a row may have
# segments.
MOST_SEGMENTS = 64


def features_of(
    *,
    lengths: tuple[int, ...],
    exchanges: tuple[Exchange, ...],
    context: int,
    segments: int | float,
    causal: bool,
    window: int,
    leading: int,
    has_dropout: bool,
    is_biased: bool,
    has_soft_cap: bool,
    has_sinks: bool,
    own_positions: bool = False,
    has_wide_values: bool = False,
) -> dict[str, str]:
    """Return the features that a kernel must have for all batches of a training run, or for one
    call, with the reason why a run cannot use a kernel without each.

    `lengths` and `exchanges` are those of queries and of keys; `segments` is the highest segment
    id, infinite where it is not known and 0 without ids.
    """
    is_gathered = exchanges[0] == "gather"
    features = {
        "many segments": (
            segments > MOST_SEGMENTS,
            f"it takes rows of at most {MOST_SEGMENTS} texts, and these have more",
        ),
        "window to both sides": (
            window and not causal,
            "its window is to the left, and an encoder's is to both sides",
        ),
        "wide values": (
            has_wide_values,
            "its values are at most as wide as its keys, and model.value_dim is more",
        ),
        "positions": (own_positions, "its positions are the index, and these rows have their own"),
        "short pieces": (
            is_gathered and any(length % (256 * context) for length in lengths),
            "each device has two pieces of a row, which are multiples of 128 tokens, and"
            " data.sequence_length / (2 mesh.context) is not",
        ),
        "one device": (
            "none" in exchanges,
            "its keys pass between the devices of mesh.context, which is 1",
        ),
        "leading": (
            leading,
            "it has no keys that all segments see, as those of adapter.kind=prompt and prefix",
        ),
        "divided queries": (
            is_gathered,
            "it needs all tokens of a row, and mesh.tensor x mesh.context does not divide"
            " model.n_heads",
        ),
        "dropout": (
            has_dropout,
            "it has no dropout of attention weights, and model.attention_dropout is not 0",
        ),
        "score bias": (is_biased, "it has no bias of the scores, and model.positions adds one"),
        "biased texts": (
            is_biased and segments > 1,
            "it has no bias of the scores of packed rows, and model.positions adds one",
        ),
        "biased window": (
            is_biased and window,
            "it has no window beside a bias of the scores, as model.positions adds one",
        ),
        "biased odd length": (
            is_biased and any(length % 2 for length in lengths),
            "beside a bias of the scores its sequences have even lengths",
        ),
        "soft-cap": (has_soft_cap, "it has no soft-cap, and model.attention_soft_cap is set"),
        "sinks": (has_sinks, "it has no sinks, and model.attention_sinks is set"),
    }
    return {name: reason for name, (is_needed, reason) in features.items() if is_needed}


class Case(NamedTuple):
    """The properties of a training run on which the choice of a kernel depends.

    `segments` is the highest segment id of its rows: 1 for padded rows, 0 for rows without ids.
    `capability` is the compute capability of an NVIDIA GPU; `leading` the number of leading keys
    that all queries see; `exchange`: how the devices of `context`, which divide the tokens of a
    row, get its keys.
    """

    platform: str
    dtype: str
    length: int
    segments: int
    model: ModelConfig
    capability: tuple[int, ...] = HOPPER
    leading: int = 0
    exchange: Exchange = "none"
    context: int = 1

    def features(self) -> dict[str, str]:
        """Return what the batches need of a kernel, as `features_of` gives it."""
        model = self.model
        return features_of(
            lengths=(self.length,),
            exchanges=(self.exchange,),
            context=self.context,
            segments=self.segments,
            causal=model.family == "decoder",
            window=model.window,
            leading=self.leading,
            has_dropout=model.attention_dropout_rate > 0,
            is_biased=model.positions in BIASED_SCORES,
            has_soft_cap=model.attention_soft_cap > 0,
            has_sinks=model.attention_sinks,
            has_wide_values=model.value_width > model.head_width,
        )


@dataclass(frozen=True)
class KernelRow:
    """A kernel, its description, the features that it lacks, by their names in `features_of`, and
    why it cannot run on a device (empty if it can).

    `on_mesh` runs it on the devices of a mesh: `on_each_device` if the compiler cannot divide it
    among them. `balanced` are the exchanges in which it reads `exchange.balanced` tokens.
    """

    run: Kernel
    what: str
    lacks: frozenset[str] = frozenset()
    device: Callable[[Case], str] = lambda case: ""
    on_mesh: Callable[..., jax.Array] = placed
    balanced: tuple[Exchange, ...] = ()

    def refuses(self, case: Case) -> str:
        """Return why the kernel cannot serve a training run; empty if it can."""
        missing = (why for name, why in case.features().items() if name in self.lacks)
        return self.device(case) or next(missing, "")

    def serves(self, mask: AttentionMask, heads: int) -> bool:
        """Return whether the kernel can serve a call of so many query heads."""
        sides = (mask.queries, mask.keys)
        lengths = tuple(side.positions.shape[-1] for side in sides)
        segments = 0.0
        if any(side.segments is not None for side in sides):
            segments = mask.max_segments or math.inf
        is_ordered = mask.balanced or all(side.ordered for side in sides)
        rate, key = mask.dropout
        needed = features_of(
            lengths=lengths,
            exchanges=tuple(exchange_of(length, heads) for length in lengths),
            context=free_axes().get(CONTEXT, 1),
            segments=segments,
            causal=mask.causal,
            window=mask.window,
            leading=mask.leading,
            has_dropout=bool(rate) and key is not None,
            is_biased=mask.scoring.bias is not None,
            has_soft_cap=bool(mask.scoring.soft_cap),
            has_sinks=mask.scoring.sinks is not None,
            own_positions=mask.causal and not is_ordered,
        )
        return not self.lacks & needed.keys()


# The features that all fused kernels lack, those of cuDNN and Pallas; and cuDNN's.
FUSED_LACKS = frozenset({"positions", "dropout", "leading", "divided queries"})
CUDNN_LACKS = FUSED_LACKS | {"many segments", "window to both sides", "wide values"}
CUDNN_LACKS |= {"biased texts", "biased window", "biased odd length", "soft-cap", "sinks"}


def _cudnn_device(case: Case) -> str:
    """Return why cuDNN's kernel cannot run on the device of a case; empty if it can."""
    if case.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this device is a {case.platform}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"it computes in 16 bits only, and model.dtype is {case.dtype}"
    if case.model.head_width % 8 or case.model.head_width > 256:
        return f"its head width is a multiple of 8 up to 256, not {case.model.head_width}"
    if case.segments > 1 and case.capability < HOPPER:
        return "it takes packed rows from compute capability 9.0 (Hopper) on"
    return lacks_packed_rows() if case.segments > 1 else ""


def _tpu_device(case: Case) -> str:
    """Return why the Pallas kernels cannot run on the device of a case; empty if they can."""
    return "" if case.platform == "tpu" else f"it needs a TPU, and this device is a {case.platform}"


KERNELS: Table[KernelRow] = Table(
    AttentionKernel,
    {
        "cudnn": KernelRow(
            cudnn_attention, "cuDNN attention", CUDNN_LACKS, _cudnn_device, on_each_device
        ),
        "tpu": KernelRow(
            splash_attention,
            "Pallas splash attention",
            (FUSED_LACKS - {"divided queries"}) | {"score bias", "short pieces"},
            _tpu_device,
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
            on_mesh=around_ring,
            balanced=("heads", "gather"),
        ),
        "xla": KernelRow(plain, "plain XLA attention"),
    },
    besides=("auto",),
)
PREFERRED = {
    "gpu": ("cudnn", "blocked", "ring", "xla"),
    "tpu": ("tpu", "blocked", "ring", "xla"),
    "cpu": ("blocked", "xla"),
}


def attend(kernel: str, q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask) -> jax.Array:
    """Attention by the named kernel ("auto": plain), on the devices of the mesh in force. A call
    that this kernel does not serve is computed by the plain one: a kernel chosen for the batches of
    a run is also called with a cache and with padded prompts.
    """
    row = KERNELS["xla" if kernel == "auto" else kernel]
    if not row.serves(mask, q.shape[2]):
        row = KERNELS["xla"]
    return row.on_mesh(row.run, q, k, v, mask)


def reads_balanced(kernel: str, mask: AttentionMask, heads: int) -> bool:
    """Return whether the named kernel wants the tokens of such a call balanced over mesh.context,
    because a causal mask would give the devices unequal work."""
    length = mask.queries.positions.shape[1]
    exchange = exchange_of(length, heads)
    halves = length % (2 * free_axes().get(CONTEXT, 1)) == 0
    row = KERNELS["xla" if kernel == "auto" else kernel]
    return exchange in row.balanced and mask.causal and halves and row.serves(mask, heads)
