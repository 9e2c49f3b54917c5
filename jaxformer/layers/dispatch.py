"""From tokens to the rows of their experts and back, on one device and on the devices of a mesh.

On a device, the pairs of a token and an expert are sorted by expert, each gets its token as a row,
and the rows of a token are added up after the experts have run. On a mesh each device has its own
tokens, and with `mesh.expert` its own experts, so that rows or tokens travel:

    rows     Each row goes to the device of its expert and back, by an all-to-all in which a device
             sends as many rows as there are (arXiv:2006.16668): for k experts of a token and P
             devices k (P - 1) / P rows a token, each way.
    tokens   Each device gets all tokens and computes those of its experts; the sums are added up
             and scattered: P - 1 tokens a token, each way. It is chosen where k is at least P.

A device has room for as many rows as could be sent to it. `model.experts.capacity` bounds them.

In the comments, N are the tokens of a device, K the experts of a token, M the rows, E the experts,
P the devices of mesh.expert and D the width of the model.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxformer.arrays.exact import sum_in_order
from jaxformer.arrays.params import Params, Specs, is_custom
from jaxformer.arrays.sharding import (
    PARAMETERS,
    activation,
    constrain,
    entry_axes,
    free_axes,
    on_devices,
    partition,
    platform,
)
from jaxformer.layers.grouped import GroupedRows

# The axis of the mesh that divides experts.
(EXPERT,) = PARAMETERS["experts"]
TOKEN_AXES = ("batch", "sequence", None)

# run(weights, rows [M, D], scale [M], groups) -> [M, D]: the rows of each expert through it, times
# their scale.
RunExperts = Callable[[Params, jax.Array, jax.Array, GroupedRows], jax.Array]


class Routes(NamedTuple):
    """The experts int32 [B, T, K] of each token, E where a token is sent to none, and their weights
    float32 [B, T, K]."""

    experts: jax.Array
    weights: jax.Array


class ExpertRows(NamedTuple):
    """Pairs of a token and an expert, sorted by expert: a row for each.

    `token` int32 [M] is the token of a row, and `choice` int32 [M] the number of the pair among all
    N K; `row` int32 [N, K] is the row of each pair, and `real` bool [N, K] whether it has one;
    `sizes` int32 [E] are the rows of each expert.
    """

    token: jax.Array
    choice: jax.Array
    row: jax.Array
    real: jax.Array
    sizes: jax.Array


def sorted_pairs(experts: jax.Array, number: int, most: int) -> ExpertRows:
    """Return the pairs of tokens with their experts [N, K]; an expert of `number` or above is none.
    There are `most` rows, at least as many as pairs that have an expert."""
    n, k = experts.shape
    of_pair = experts.reshape(-1)
    # The pair of each row, [N K]: stable, so that the tokens of an expert keep their order.
    order = jnp.argsort(of_pair, stable=True)
    index = jnp.arange(n * k, dtype=order.dtype)
    # The inverse: the row of each pair.
    row = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    sizes = (of_pair[:, None] == jnp.arange(number)).sum(0, dtype=jnp.int32)  # [number]
    choice = order[:most]
    # Pairs without an expert are sorted last, and may be beyond the rows that there are.
    in_range = jnp.minimum(row.reshape(n, k), most - 1)
    return ExpertRows(choice // k, choice, in_range, experts < number, sizes)


def _gather(x: jax.Array, pairs: ExpertRows) -> jax.Array:
    return x[pairs.token]


def _combine(y: jax.Array, pairs: ExpertRows) -> jax.Array:
    # [N, K, D] -> [N, D]. A pair without an expert reads any row, and counts 0.
    return sum_in_order(jnp.where(pairs.real[..., None], y[pairs.row], 0), 1)


# The transpose of `_gather` is `_combine`, and the reverse. JAX's own are scatters, which a GPU
# adds in any order.
_gather_once = jax.custom_vjp(_gather)
_gather_once.defvjp(
    lambda x, pairs: (_gather(x, pairs), pairs), lambda pairs, dx: (_combine(dx, pairs), None)
)
_combine_once = jax.custom_vjp(_combine)
_combine_once.defvjp(
    lambda y, pairs: (_combine(y, pairs), pairs), lambda pairs, dy: (_gather(dy, pairs), None)
)


def gather(x: Float[Array, "N D"], pairs: ExpertRows, kernel: str) -> Float[Array, "M D"]:
    """Return the token of each row; with the kernel "xla" for every transform of JAX."""
    return _gather(x, pairs) if kernel == "xla" else _gather_once(x, pairs)


def combine(y: Float[Array, "M D"], pairs: ExpertRows, kernel: str) -> Float[Array, "N D"]:
    """Return the sum of the rows of each token; with the kernel "xla" for every transform of
    JAX."""
    return _combine(y, pairs) if kernel == "xla" else _combine_once(y, pairs)


def _scale_of_rows(scale: jax.Array, pairs: ExpertRows) -> jax.Array:
    """Return the weight of each row [M], of those of the pairs [N, K]. That of a row without an
    expert, for which a kernel may give anything, is 0 and has no gradient."""
    of_row = scale.reshape(-1).at[pairs.choice].get(unique_indices=True)
    return jnp.where(jnp.arange(len(of_row)) < pairs.sizes.sum(), of_row, 0)


class Dispatch(NamedTuple):
    """How tokens find their experts: the number of experts, the kernel of their products, and the
    most tokens of a row that an expert takes (0: any number)."""

    number: int
    kernel: str
    capacity: int = 0


class Division(NamedTuple):
    """How the mesh in force divides experts: the number P of devices that have different ones, and
    of those among them that have different tokens (1 or P); the axes that divide the hidden width
    of an expert; the partition of each weight; and the biases of what is summed along `width`."""

    devices: int
    of_tokens: int
    width: tuple[str, ...] = ()
    weights: Any = None
    added_once: tuple[str, ...] = ()


def expert_sum(
    run: RunExperts,
    weights: Params,
    table: Specs,
    x: Float[Array, "B T D"],
    routes: Routes,
    dispatch: Dispatch,
) -> Float[Array, "B T D"]:
    """Return the sum of what the experts of each token return, on the devices of the mesh in force.
    `table` has the rows of `weights`, whose first axis counts experts."""
    axes = free_axes()
    if jax.sharding.get_abstract_mesh().size == 1 or not axes:
        return _on_device(run, dispatch, Division(1, 1), weights, x, *routes)
    # Cast before they are divided, so that their gradients are summed over replicas as narrow.
    weights = {
        name: leaf if is_custom(leaf) else leaf.astype(x.dtype) for name, leaf in weights.items()
    }
    tokens = activation(x.shape, TOKEN_AXES)
    division = _division(weights, table, tokens, axes, dispatch)
    local = functools.partial(_on_device, run, dispatch, division)
    divided = on_devices(local, (division.weights, tokens, tokens, tokens), tokens)
    return divided(weights, *(constrain(array, TOKEN_AXES) for array in (x, *routes)))


def _division(
    weights: Params,
    table: Specs,
    tokens: PartitionSpec,
    axes: Mapping[str, int],
    dispatch: Dispatch,
) -> Division:
    devices = axes.get(EXPERT, 1)
    if dispatch.number % devices:
        # A number that the mesh does not divide is on all devices.
        devices = 1
    of_tokens = 1
    # Rows that the mesh does not divide are the same on all devices of mesh.expert.
    if EXPERT in entry_axes(tokens[0]):
        of_tokens = devices
    if any(is_custom(leaf) for leaf in weights.values()):
        # The parts of a leaf that is no array have experts first, and nothing else is divided. A
        # key of dropout, uint32 [2], has none.
        def of_part(part: jax.Array) -> PartitionSpec:
            has_experts = np.shape(part)[:1] == (dispatch.number,) and part.dtype != jnp.uint32
            return PartitionSpec(EXPERT) if has_experts and devices > 1 else PartitionSpec()

        by_experts = jax.tree.map(of_part, weights)
        return Division(devices, of_tokens, weights=by_experts)
    shards = {}
    width: tuple[str, ...] = ()
    for name in weights:
        spec = table[name]
        shards[name] = partition(spec.shape, spec.axes, PARAMETERS, axes)
        if "mlp" in spec.axes:
            width = entry_axes(shards[name][spec.axes.index("mlp")])
    added_once = tuple(name for name in weights if width and "mlp" not in table[name].axes)
    return Division(devices, of_tokens, width, shards, added_once)


def sends_rows(k: int, devices: int) -> bool:
    """Return whether rows travel, and not tokens, where so many devices have different tokens and
    experts."""
    return k < devices


def most_rows(tokens: int, rows: int, k: int, dispatch: Dispatch, devices: int) -> int:
    """Return the most rows of experts that a device can have, of so many tokens in so many rows of
    a batch, where `devices` divide the experts."""
    number = dispatch.number // devices
    # No token has an expert twice.
    most = tokens * min(k, number)
    if dispatch.capacity:
        most = min(most, rows * number * dispatch.capacity)
    return most


class Traffic(NamedTuple):
    """An all-to-all as a device sees it, int32 [P] each: the offset and the number of the rows that
    it sends to each device, their offset there, and the number that it gets from each."""

    offsets: jax.Array
    sizes: jax.Array
    offsets_there: jax.Array
    received: jax.Array


def traffic_of(sent: jax.Array, me: jax.Array) -> tuple[Traffic, Traffic]:
    """Return the traffic of device `me` where device i sends sent[i, j] rows to j, [P, P], and that
    of the way back. Rows lie by destination where they are sent, and by source where they
    arrive."""
    # [P, P]: what the devices before i send to j, and what i sends to those before j.
    before_there = jnp.cumsum(sent, axis=0) - sent
    before_here = jnp.cumsum(sent, axis=1) - sent
    there = Traffic(before_here[me], sent[me], before_there[me], sent[:, me])
    back = Traffic(before_there[:, me], sent[:, me], before_here[:, me], sent[me])
    return there, back


def exchanged(x: jax.Array, most: int, traffic: Traffic) -> jax.Array:
    """Return the rows [most, ...] that a device gets from all, of the rows [M, ...] of each; those
    after the last are 0."""
    if platform() != "cpu":
        out = jnp.zeros((most, *x.shape[1:]), x.dtype)
        return jax.lax.ragged_all_to_all(x, out, *traffic, axis_name=EXPERT)
    # XLA has no such collective for a CPU. Every device sends as many rows as there could be.
    index = jnp.arange(len(x))
    blocks = x[jnp.minimum(traffic.offsets[:, None] + index, len(x) - 1)]  # [P, M, ...]
    blocks = jax.lax.all_to_all(blocks, EXPERT, split_axis=0, concat_axis=0, tiled=True)
    offsets = jnp.cumsum(traffic.received) - traffic.received
    real = index < traffic.received[:, None]
    # [P, M]: the place of each row here; `most`, which is dropped, for what is none.
    targets = jnp.where(real, offsets[:, None] + index, most)
    return jnp.zeros((most, *x.shape[1:]), x.dtype).at[targets].set(blocks, mode="drop")


def _on_device(
    run: RunExperts,
    dispatch: Dispatch,
    division: Division,
    weights: Params,
    x: jax.Array,
    experts: jax.Array,
    scale: jax.Array,
) -> jax.Array:
    """Return the sum for the tokens [B, T, D] of a device, with the experts that it has."""
    shape = x.shape
    kernel = dispatch.kernel
    x, experts, scale = (array.reshape(-1, array.shape[-1]) for array in (x, experts, scale))
    if division.weights is not None:
        whole = {}
        for name, leaf in weights.items():
            # Arrays are gathered along the axes of the mesh that divide `embed`.
            for axis, entry in enumerate(() if is_custom(leaf) else division.weights[name]):
                along = tuple(one for one in entry_axes(entry) if one in PARAMETERS["embed"])
                # Axis 0 counts experts, and stays divided.
                if along and axis > 0:
                    leaf = jax.lax.all_gather(leaf, along, axis=axis, tiled=True)
            whole[name] = leaf
        weights = whole
    # A bias of what the devices of `width` add up is added by the first of them alone.
    for name in division.added_once:
        weights[name] = weights[name] * (jax.lax.axis_index(division.width) == 0)
    n, k = experts.shape
    devices = division.devices
    of_all = division.of_tokens
    number = dispatch.number // devices
    most = most_rows(n * of_all, shape[0] * of_all, k, dispatch, devices)

    def summed(x: jax.Array, scale: jax.Array, pairs: ExpertRows) -> jax.Array:
        """Return the sum of the experts of this device for tokens [N, D] with these scales [N,
        K]."""
        rows = gather(x, pairs, kernel)
        groups = GroupedRows(pairs.sizes, kernel)
        return combine(run(weights, rows, _scale_of_rows(scale, pairs), groups), pairs, kernel)

    if sends_rows(k, of_all):
        # Each row is sent to the device of its expert and back.
        me = jax.lax.axis_index(EXPERT)
        pairs = sorted_pairs(experts, dispatch.number, experts.size)
        # [P, P, E / P]: the rows that each device sends to each expert of each.
        sizes = jax.lax.all_gather(pairs.sizes, EXPERT).reshape(devices, devices, number)
        there, back = traffic_of(sizes.sum(-1), me)
        rows = exchanged(gather(x, pairs, kernel), most, there)
        scale = exchanged(_scale_of_rows(scale, pairs)[:, None], most, there)
        # They arrive by source, and from each by expert.
        ends = jnp.cumsum(sizes[:, me].reshape(-1))
        block = jnp.searchsorted(ends, jnp.arange(most), side="right")
        # Block s (E / P) + e has the rows from device s for expert e of this one; the rows after
        # the last block have no expert.
        expert = jnp.where(block < len(ends), block % number, number)
        here = sorted_pairs(expert[:, None].astype(jnp.int32), number, most)
        returned = exchanged(summed(rows, scale, here), experts.size, back)
        out = combine(returned, pairs, kernel)
    else:
        # The tokens of all devices are gathered, and the sums scattered.
        if of_all > 1:
            x, experts, scale = (
                jax.lax.all_gather(array, EXPERT, tiled=True) for array in (x, experts, scale)
            )
        if devices > 1:
            # Experts of this device are numbered 0 .. E / P - 1.
            experts = experts - number * jax.lax.axis_index(EXPERT)
            # Those of other devices are none.
            experts = jnp.where((experts < 0) | (experts >= number), number, experts)
        pairs = sorted_pairs(experts, number, most)
        out = summed(x, scale, pairs)
        if of_all > 1:
            out = jax.lax.psum_scatter(out, EXPERT, tiled=True)
        elif devices > 1:
            # Each has summed the same tokens over its own experts.
            out = jax.lax.psum(out, EXPERT)
    if division.width:
        out = jax.lax.psum(out, division.width)
    return out.reshape(shape)
