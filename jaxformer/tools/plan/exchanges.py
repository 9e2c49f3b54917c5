"""What devices exchange in a layer: those of `mesh.context`, which have some tokens of each row, in
attention, and those of `mesh.expert`, which have some of the experts, in these.

heads: tokens for heads before attention, and back after it. gather: the keys and values of all
tokens. ring: keys and values, sent on from device to device. Where the tokens of a row are in a
balanced order in the layers, the residual stream is brought into it, and back
(`layers/exchange.py`, `layers/ring.py`). Experts get rows or tokens (`layers/dispatch.py`).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.layers.dispatch import EXPERT, sends_rows
from jaxformer.layers.exchange import CONTEXT
from jaxformer.layers.kernels import reads_balanced
from jaxformer.layers.masks import AttentionMask, TokenLayout
from jaxformer.models.cost import Stack
from jaxformer.tools.plan.activations import bias_bytes, planned_stacks, recomputed_names, sizes_of
from jaxformer.tools.plan.planned import PlannedRun

# Kernels that name the queries, keys and values that they read, so that a layer may store these.
NAMED_INPUTS = ("cudnn", "tpu", "flash")


class Exchanged(NamedTuple):
    """Collectives of a microbatch over axes of the mesh, with `times` and `bytes` as in
    `Collective`."""

    kind: str
    purpose: str
    axes: tuple[str, ...]
    times: int
    bytes: float


class _Arrays(NamedTuple):
    """Bytes of queries, keys, values and the output of attention on a device."""

    q: float
    k: float
    v: float
    out: float


# (kind, purpose, times, bytes) of one sublayer.
_OfSublayer = Iterator[tuple[str, str, int, float]]


def _of_heads(planned: PlannedRun, arrays: _Arrays, again: set[str]) -> _OfSublayer:
    """Tokens for heads, and back. The product with the output matrix reads tokens, so that what
    attention stored is exchanged once more for its gradient."""
    total, unnamed = sum(arrays), planned.model.attention_kernel not in NAMED_INPUTS
    inputs = [getattr(arrays, name) for name in ("q", "k", "v") if unnamed or name in again]
    yield "all-to-all", "tokens of attention for heads, and back", 4, total
    yield (
        "all-to-all",
        "tokens for heads again, backward",
        1 + len(inputs),
        arrays.out + sum(inputs),
    )
    yield "all-to-all", "gradients of tokens and heads", 4, total


def _of_gathers(planned: PlannedRun, arrays: _Arrays, again: set[str]) -> _OfSublayer:
    """The keys and values of all tokens for the queries of each device, in both passes. Of plain
    attention, which the compiler divides, the gradients of all are summed."""
    del again
    keys = planned.context * (arrays.k + arrays.v)
    scattered = planned.model.attention_kernel in NAMED_INPUTS
    yield "all-gather", "keys and values of all tokens, forward", 2, keys
    yield "all-gather", "keys and values of all tokens, backward", 2, keys
    kind = "reduce-scatter" if scattered else "all-reduce"
    yield kind, "gradients of keys and values", 2, keys


def _of_ring(planned: PlannedRun, arrays: _Arrays, again: set[str]) -> _OfSublayer:
    """Keys and values around the ring, and with them their float32 gradients."""
    steps, keys = planned.context, arrays.k + arrays.v
    passes = 2 if "attention" in again else 1
    yield (
        "collective-permute",
        "keys and values, forward",
        2 * steps * passes,
        steps * passes * keys,
    )
    yield "collective-permute", "keys and values, backward", 2 * steps, steps * keys
    gradients = steps * keys * 4 / planned.dtype_bytes
    yield "collective-permute", "gradients of keys and values", 2 * steps, gradients


# How attention gets the keys and values of the tokens of other devices (`PlannedRun.exchange`).
EXCHANGES = {"heads": _of_heads, "gather": _of_gathers, "ring": _of_ring}


def attention_exchanges(planned: PlannedRun) -> Iterator[Exchanged]:
    """What attention exchanges over context, where each device has some tokens of a row."""
    exchange, again = EXCHANGES[planned.exchange], recomputed_names(planned)
    totals: dict[tuple[str, str], tuple[int, float]] = {}

    def add(name: tuple[str, str], times: int, size: float) -> None:
        before = totals.get(name, (0, 0.0))
        totals[name] = before[0] + times, before[1] + size

    for stack in planned_stacks(planned):
        for layer in stack.layers:
            for sublayer in stack.sublayers(layer).values():
                if "attention" not in sublayer.gradients:
                    continue
                sizes = sizes_of(planned, stack.tokens, stack.keys(sublayer))._replace(lanes=1)
                stored = {array.name: array.bytes for array in sublayer.stored(layer, sizes)}
                out = stored["q"] * layer.value_width / layer.head_width
                arrays = _Arrays(stored["q"], stored["k"], stored["v"], out)
                for kind, purpose, times, size in exchange(planned, arrays, again):
                    add((kind, purpose), times, size)
        biases, slopes = bias_bytes(planned, stack)
        if slopes and planned.exchange == "heads":
            # They are looked up for the tokens of a device.
            add(("all-to-all", "biases of scores and their gradients"), 2, biases + slopes)
    for (kind, purpose), (times, size) in totals.items():
        yield Exchanged(kind, purpose, (CONTEXT,), times, size)


def balance_exchanges(planned: PlannedRun) -> Iterator[Exchanged]:
    """The residual stream before and after a stack that has its tokens in a balanced order, and its
    gradients: each device sends both halves of its tokens."""
    for stack in planned_stacks(planned):
        if not is_balanced(planned, stack):
            continue
        tokens = planned.rows * planned.positions(stack.tokens)
        size = 4 * tokens * planned.model.d_model * planned.dtype_bytes
        purpose = f"tokens of the {stack.name} in a balanced order"
        yield Exchanged("collective-permute", purpose, (CONTEXT,), 8, size)


def is_balanced(planned: PlannedRun, stack: Stack) -> bool:
    """Whether a stack has the tokens of each row in the order of `exchange.balanced`."""
    model = planned.model
    positions: Any = jax.ShapeDtypeStruct((planned.rows, stack.tokens), jnp.int32)
    tokens = TokenLayout(positions, positions if planned.packed else None, ordered=True)
    mask = AttentionMask(tokens, tokens, stack.causal, model.window)
    mask = mask._replace(max_segments=model.max_segments)
    with jax.sharding.use_abstract_mesh(planned.mesh):
        reads = reads_balanced(model.attention_kernel, mask, model.n_heads)
    return reads and not model.has_dropout


def expert_exchanges(planned: PlannedRun) -> Iterator[Exchanged]:
    """The rows or tokens of the experts of other devices, and their gradients. The rows that the
    experts read are sent once more for the backward pass."""
    model, devices = planned.model, planned.size(EXPERT)
    layers = [
        (layer, planned.rows * planned.positions(stack.tokens))
        for stack in planned_stacks(planned)
        for layer in stack.layers
        if layer.feed_forward == "experts"
    ]
    number, wide = len(layers), model.d_model * planned.dtype_bytes
    sizes = [tokens * layer.experts_per_token for layer, tokens in layers]
    if sends_rows(model.experts_per_token, devices):
        size = sum(sizes) * wide
        for purpose, times in (
            ("rows of experts, and back", 2),
            ("rows of experts again, backward", 1),
            ("gradients of the rows of experts", 2),
        ):
            yield Exchanged("ragged-all-to-all", purpose, (EXPERT,), times * number, times * size)
        return
    size = devices * sum(tokens for _, tokens in layers) * wide
    yield Exchanged("all-gather", "tokens of experts, forward", (EXPERT,), number, size)
    yield Exchanged("all-gather", "tokens and gradients, backward", (EXPERT,), 2 * number, 2 * size)
    yield Exchanged("reduce-scatter", "sums of experts", (EXPERT,), number, size)
    yield Exchanged("reduce-scatter", "gradients of the tokens", (EXPERT,), number, size)
