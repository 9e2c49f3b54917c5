"""The collectives of a step, by the placements of `sharding.py`.

fsdp: each device holds a shard of every matrix. A layer's matrices are gathered in the compute
dtype in the forward and again in the backward pass of every microbatch, and their gradients are
summed and scattered. data: the gradients of the shards are summed over the replicas. tensor: heads,
feed-forward width and vocabulary are split, so the output of attention and of the feed-forward, and
the gradients of their inputs, are summed.
"""

import math
from typing import NamedTuple

from jaxformer.params import Spec, rows
from jaxformer.plan.planned import PlannedRun
from jaxformer.sharding import PARAMETERS, partition


class Collective(NamedTuple):
    """Collectives of one kind and purpose in a step.

    `bytes` is the size of the array that one device has whole: the result of an all-gather, the
    operand of the others; of all `count` together. `devices` is the size of a group.
    """

    kind: str
    purpose: str
    axis: str
    count: int
    bytes: float
    devices: int

    def sent(self, platform: str) -> float:
        """The least bytes that each device sends, as in a ring (Patarasuk and Yuan 2009); the
        switches between GPUs can sum, so that each sends its operand of an all-reduce once."""
        share = (self.devices - 1) / self.devices
        if self.kind != "all-reduce":
            return self.bytes * share
        return self.bytes if platform == "gpu" else 2 * share * self.bytes


def link_bytes(collectives: list[Collective], platform: str) -> float:
    """The least bytes that a device sends in a step."""
    return sum(collective.sent(platform) for collective in collectives)


def collectives_of(planned: PlannedRun) -> list[Collective]:
    """The collectives of a step; those of a few numbers are left out."""
    found = []
    if planned.size("fsdp") > 1:
        found += _of_fsdp(planned)
    if planned.size("data") > 1:
        found += _of_data(planned)
    if planned.size("tensor") > 1:
        found += _of_tensor(planned)
    return [one for one in found if one.bytes]


class _Split(NamedTuple):
    """Elements of a kind of leaf that a device has whole after a gather over fsdp, their number of
    arrays, and whether fsdp divides them."""

    leaves: int
    elements: float
    divided: bool


def _leaves(planned: PlannedRun, wanted: str) -> list[tuple[Spec, _Split]]:
    """The rows that are matrices of layers ("layers"), the output layer ("head"), the table of
    tokens ("embed"), or all the others ("rest")."""
    found = []
    for path, spec in rows(planned.specs).items():
        if _kind(planned, path, spec) != wanted:
            continue
        placed = partition(spec.shape, spec.axes, PARAMETERS, planned.mesh.shape)
        split = math.prod(planned.size(axis) for axis in placed if axis and axis != "fsdp")
        count = spec.shape[0] if "layers" in spec.axes else 1
        found.append((spec, _Split(count, math.prod(spec.shape) / split, "fsdp" in placed)))
    return found


def _kind(planned: PlannedRun, path: str, spec: Spec) -> str:
    if spec.is_matrix and "layers" in spec.axes:
        return "layers"
    if path == "embed.tokens":
        return "embed"
    return "head" if path == "head.weight" else "rest"


def _of_fsdp(planned: PlannedRun) -> list[Collective]:
    devices, microbatches = planned.size("fsdp"), planned.run.train.microbatches
    numbers, model = planned.dtype_bytes, planned.model
    found = []

    def add(kind: str, purpose: str, count: float, size: float) -> None:
        found.append(Collective(kind, purpose, "fsdp", round(count), size, devices))

    layers = [split for _, split in _leaves(planned, "layers") if split.divided]
    gathered = sum(split.elements for split in layers) * numbers
    count = sum(split.leaves for split in layers)
    for direction in ("forward", "backward"):
        purpose = f"weights of the layers, {direction}"
        add("all-gather", purpose, microbatches * count, microbatches * gathered)
    add("reduce-scatter", "gradients of the layers", count, gathered * 4 / numbers)
    tied = model.tied_head and model.output in ("language", "masked")
    matrices = [split for _, split in _leaves(planned, "embed" if tied else "head")]
    if matrices and matrices[0].divided:
        size = matrices[0].elements
        add("all-gather", "output layer", microbatches, microbatches * size * numbers)
        add("reduce-scatter", "gradient of the output layer", 1, size * 4)
    # Each device looks up the tokens of all in its columns of the table; then rows are exchanged.
    tokens = planned.rows * (planned.length + planned.source_length) * microbatches
    exchanged = tokens * model.d_model * 4
    add("all-to-all", "looked-up rows, and their gradients", 2 * microbatches, 2 * exchanged)
    whole = sum(s.elements for _, s in _leaves(planned, "rest") if not s.divided)
    add("all-reduce", "gradients of replicated parameters", 1, whole * 4)
    return found


def _of_data(planned: PlannedRun) -> list[Collective]:
    devices = planned.size("data")
    kinds = ("layers", "head", "embed", "rest")
    fsdp = planned.size("fsdp")
    splits = [split for kind in kinds for _, split in _leaves(planned, kind)]
    elements = sum(split.elements / (fsdp if split.divided else 1) for split in splits)
    return [Collective("all-reduce", "gradients", "data", len(splits), elements * 4, devices)]


def _of_tensor(planned: PlannedRun) -> list[Collective]:
    devices, microbatches = planned.size("tensor"), planned.run.train.microbatches
    model, numbers = planned.model, planned.dtype_bytes
    stacks = [(model.n_layers, 3 if model.family == "encoder_decoder" else 2, planned.length)]
    if model.family == "encoder_decoder":
        stacks.append((model.encoder_layers, 2, planned.source_length))
    count, size = 0, 0.0
    for depth, sublayers, length in stacks:
        count += depth * sublayers
        size += depth * sublayers * planned.rows * length * model.d_model * numbers
    count, size = count * microbatches, size * microbatches
    again = 1 if model.remat == "none" else 2  # remat computes the outputs once more
    found = [
        Collective(
            "all-reduce", "outputs of the sublayers", "tensor", again * count, again * size, devices
        ),
        Collective("all-reduce", "gradients of their inputs", "tensor", count, size, devices),
    ]
    rest = planned.rows * planned.length * model.d_model * numbers * microbatches
    return [
        *found,
        Collective(
            "all-reduce",
            "embedding and output layer",
            "tensor",
            2 * microbatches,
            2 * rest,
            devices,
        ),
    ]
