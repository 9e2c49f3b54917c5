"""The table of a family's tensors, (name in the files, paths of the params, transform), and the
functions that apply it in both directions."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from jaxformer.arrays.params import Spec, Specs
from jaxformer.arrays.params import rows as spec_rows
from jaxformer.models.stack import layer_order

Arrays = Sequence[np.ndarray]
LayerSpecs = Sequence[Spec]  # of the leaves in one tensor, without the axes of layers and experts


class Transform(NamedTuple):
    """How leaves of one layer (and of one expert) are stored in a tensor: the tensor's shape, the
    leaves of a tensor, and the tensor of the leaves."""

    shape: Callable[[LayerSpecs], tuple[int, ...]]
    split: Callable[[np.ndarray, LayerSpecs], Arrays]
    join: Callable[[Arrays, LayerSpecs], np.ndarray]


def _flat_shape(specs: LayerSpecs) -> tuple[int, ...]:
    """Return the shape of a table, or of a vector with its axes flattened."""
    if specs[0].is_matrix:
        return specs[0].shape
    return (math.prod(specs[0].shape),)


def _reshaped(shape: Callable[[LayerSpecs], tuple[int, ...]]) -> Transform:
    """Return how one leaf is stored whose numbers are in the same order."""
    return Transform(
        shape,
        lambda tensor, specs: [tensor.reshape(specs[0].shape)],
        lambda leaves, specs: leaves[0].reshape(shape(specs)),
    )


def _rows_of_leaves(groups: Callable[[Spec], int]) -> Transform:
    """Return the matrices [out, in] of one leaf, or of several below one another: first the rows of
    each in the first group, then of each in the second, and so on. `groups` is their number, from
    the last leaf. Leaves [I..., O...] have the same inputs; biases have none."""

    def shape(specs: LayerSpecs) -> tuple[int, ...]:
        outputs = sum(spec.fan_out for spec in specs)
        if not specs[0].is_matrix:
            return (outputs,)
        return outputs, specs[0].fan_in

    def split(tensor: np.ndarray, specs: LayerSpecs) -> Arrays:
        count = groups(specs[-1])
        inputs = tensor.shape[1:]
        ends = np.cumsum([spec.fan_out // count for spec in specs])
        parts = np.split(tensor.reshape(count, -1, *inputs), ends[:-1], axis=1)
        return [
            part.reshape(-1, *inputs).T.reshape(spec.shape)
            for part, spec in zip(parts, specs, strict=True)
        ]

    def join(leaves: Arrays, specs: LayerSpecs) -> np.ndarray:
        count = groups(specs[-1])
        inputs = shape(specs)[1:]
        parts = [leaf.reshape(*inputs, -1).T.reshape(count, -1, *inputs) for leaf in leaves]
        return np.concatenate(parts, axis=1).reshape(shape(specs))

    return Transform(shape, split, join)


def _transposed(transform: Transform) -> Transform:
    """Return the same as [in, out]; biases are as they were."""
    return Transform(
        lambda specs: transform.shape(specs)[::-1],
        lambda tensor, specs: transform.split(tensor.T, specs),
        lambda leaves, specs: np.ascontiguousarray(transform.join(leaves, specs).T),
    )


SAME = _reshaped(_flat_shape)
AS_STORED = _reshaped(lambda specs: specs[0].shape)  # vectors of each head as a matrix
AS_ROW = _reshaped(lambda specs: (1, *specs[0].shape))  # a vector as a matrix of one row
AS_4D = _reshaped(lambda specs: (1, 1, *specs[0].shape, 1))  # Kimi Linear's numbers of heads
# torch.nn.Linear: [out, in]; of Phi-3 also queries, keys and values, or gate and up.
LINEAR = _rows_of_leaves(lambda last: 1)
CONV = _transposed(LINEAR)  # GPT-2's Conv1D: [in, out]
# [out, in], of each key head its queries, key and value (GPT-NeoX, BLOOM, Falcon), or its key and
# value (DeepSeek-V3).
BY_HEAD = _rows_of_leaves(lambda last: last.shape[-2])
# [channels, 1, K]: the taps of the convolutions of each channel, [heads, width, K] of each leaf.
TAPS = Transform(
    lambda specs: (sum(math.prod(spec.shape[:-1]) for spec in specs), 1, specs[0].shape[-1]),
    lambda tensor, specs: [
        part.reshape(spec.shape)
        for part, spec in zip(
            np.split(tensor, np.cumsum([math.prod(spec.shape[:-1]) for spec in specs[:-1]])),
            specs,
            strict=True,
        )
    ],
    lambda leaves, specs: np.concatenate([x.reshape(-1, 1, x.shape[-1]) for x in leaves]),
)


def by_groups(count: int) -> Transform:
    """Return [out, in], of each of so many groups of heads the rows of all leaves (Qwen3-Next)."""
    return _rows_of_leaves(lambda last: count)


IN_TURN = _rows_of_leaves(lambda last: last.fan_out)  # [out, in], the rows of gate and up in turn
INTERLEAVED = _transposed(IN_TURN)  # gpt-oss: [in, out]


class TensorRow(NamedTuple):
    """The name of a tensor, with {} for the layer, and the dotted path of its leaf in the params,
    or the paths of the leaves that share it.

    Leaves of experts, or with a vector of each head, have a tensor for each where the name has a
    second {}, and else one of all, whose first axis counts them. Where the layers of a stack
    differ, "blocks" in a path stands for the tree of each layer, and a row is of the layers that
    have its leaves.
    """

    hf: str
    leaves: str | tuple[str, ...]
    transform: Transform = SAME

    @property
    def paths(self) -> tuple[str, ...]:
        if isinstance(self.leaves, str):
            return (self.leaves,)
        return self.leaves


def linear(
    hf: str, leaves: str | tuple[str, ...], transform: Transform = LINEAR
) -> tuple[TensorRow, ...]:
    """Return the weight of a linear layer and its bias, or of queries, keys and values in one."""
    weight = TensorRow(f"{hf}.weight", leaves, transform)
    biases = tuple(f"{path}_bias" for path in weight.paths)
    return weight, TensorRow(f"{hf}.bias", biases, transform)


def projections(
    hf: str, out: str, path: str = "blocks.attention", end: str = "_proj"
) -> tuple[TensorRow, ...]:
    """Return the matrices of an attention below `hf`, each by itself: q, k and v with this `end`,
    and `out`."""
    rows = linear(f"{hf}.{out}", f"{path}.out")
    for leaf in ("q", "k", "v"):
        rows += linear(f"{hf}.{leaf}{end}", f"{path}.{leaf}")
    return rows


def output(hf: str, path: str) -> tuple[TensorRow, ...]:
    """Return the weight [out, in] of an output layer, which is stored as it is, and its bias."""
    return TensorRow(f"{hf}.weight", f"{path}.weight"), TensorRow(f"{hf}.bias", f"{path}.bias")


def norm(hf: str, path: str) -> tuple[TensorRow, ...]:
    """Return the scale of a norm and its bias."""
    return TensorRow(f"{hf}.weight", f"{path}.scale"), TensorRow(f"{hf}.bias", f"{path}.bias")


QKV = ("blocks.attention.q", "blocks.attention.k", "blocks.attention.v")
FUSED_LEAVES = {"qkv": QKV, "gate_up": ("blocks.ffn.gate", "blocks.ffn.up")}


def block(
    prefix: str, transform: Transform = LINEAR, stack: str = "", /, **modules: str
) -> tuple[TensorRow, ...]:
    """Return the rows of a layer: the name below `prefix` of the module of each leaf of attention
    and feed-forward (q, k, v, out, gate, up, down; qkv and gate_up are several in one), and of each
    norm. `stack` begins the paths of the encoder of two stacks."""
    rows: tuple[TensorRow, ...] = ()
    for leaf, name in modules.items():
        if leaf.endswith("norm"):
            rows += norm(prefix + name, f"{stack}blocks.{leaf}")
        else:
            sublayer = "attention" if leaf in ("q", "k", "v", "out") else "ffn"
            leaves = FUSED_LEAVES.get(leaf, f"{stack}blocks.{sublayer}.{leaf}")
            rows += linear(prefix + name, leaves, transform)
    return rows


def with_rows(rows: Iterable[TensorRow], *others: TensorRow) -> tuple[TensorRow, ...]:
    """Return the rows with `others` in the place of those with a leaf of theirs."""
    replaced: set[str] = set()
    for row in others:
        replaced.update(row.paths)
    return *(row for row in rows if replaced.isdisjoint(row.paths)), *others


@dataclass(frozen=True)
class Tensor:
    """One tensor in the files: the paths of its leaves, and the entry that it holds of them: the
    index of a layer, those of a layer and an expert, or none where they are not stacked.

    With `experts` it has so many entries, of all experts of a layer, on its first axis. `specs` are
    those of one entry.
    """

    name: str
    paths: tuple[str, ...]
    entry: tuple[int, ...]
    specs: tuple[Spec, ...]
    transform: Transform
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.transform.shape(self.specs)
        if self.experts:
            return self.experts, *shape
        return shape

    def leaves_of(self, values: np.ndarray) -> Arrays:
        """Return the values of its leaves, with the axis of its experts if it has one."""
        if not self.experts:
            return self.transform.split(values, self.specs)
        experts = [self.transform.split(value, self.specs) for value in values]
        return [np.stack(leaf) for leaf in zip(*experts, strict=True)]


def tensors(rows: Iterable[TensorRow], specs: Specs) -> list[Tensor]:
    """Return all tensors of a model; rows whose leaves the model does not have are left out."""
    table = spec_rows(specs)
    plan: list[Tensor] = []
    for row in rows:
        name, _, transform = row
        first = table.get(row.paths[0])
        # The leaves of each tensor, and the entry of its layer in them.
        places: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        if first is None:
            # Where layers differ, each kind has a tree.
            stack, _, _ = row.paths[0].partition("blocks.")
            depths = {}
            for path, spec in table.items():
                if match := re.match(rf"{re.escape(stack)}blocks\.(\d+)\.", path):
                    depths[int(match[1])] = spec.shape[0]
            for tree, index in layer_order([depths[tree] for tree in range(len(depths))]):
                paths = tuple(path.replace("blocks.", f"blocks.{tree}.", 1) for path in row.paths)
                places.append((paths, (index,)))
        elif first.is_stacked:
            # A leaf stacks its layers, [L, ...], and a file has a tensor for each.
            places += [(row.paths, (layer,)) for layer in range(first.shape[0])]
        else:
            places.append((row.paths, ()))
        for layer, (paths, entry) in enumerate(places):
            if not all(path in table for path in paths):
                continue
            first = table[paths[0]]
            # Of one matrix or vector of a leaf that stacks them on its first axes.
            depth = len(first.batch) * len(entry)
            entries = [entry]
            experts = 0
            if name.count("{}") > 1:
                depth = 2
                entries = [(*entry, expert) for expert in range(first.shape[1])]
            elif "experts" in first.batch:
                experts = first.shape[1]
            entry_specs = tuple(
                replace(table[path], shape=table[path].shape[depth:], axes=table[path].axes[depth:])
                for path in paths
            )
            for place in entries:
                tensor_name = name.format(layer, *place[1:])
                plan.append(Tensor(tensor_name, paths, place, entry_specs, transform, experts))
    return plan


def paths_without_tensor(plan: Iterable[Tensor], specs: Specs) -> list[str]:
    """Return the leaves that no tensor of a plan holds."""
    paths = {*spec_rows(specs)}
    for tensor in plan:
        paths.difference_update(tensor.paths)
    return sorted(paths)


def _empty(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Return an empty array that begins at a multiple of 64 bytes: JAX on a CPU uses it without a
    copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size].view(dtype).reshape(shape)


# Reads, of the leaf at a path, the numbers at an index (a slice of each axis) in a dtype.
LeafReader = Callable[[str, tuple[slice, ...], DTypeLike], np.ndarray]


def leaf_reader(
    plan: Iterable[Tensor],
    specs: Specs,
    names: Mapping[str, str],
    read: Callable[[str, slice], np.ndarray],
) -> LeafReader:
    """Return a function (path, index, dtype) that reads the numbers of a leaf of `specs` which one
    device holds.

    `names` maps tensors to their names in the files; `read` gives rows of a tensor by that name.
    Besides these numbers, memory holds one tensor of a layer, or of an expert, or as many rows of a
    table.
    """
    table = spec_rows(specs)
    # The tensor with an entry of a leaf, which is that of a layer and of an expert; and the length
    # of such an entry.
    tensor_with: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    depths: dict[str, int] = {}
    for tensor in plan:
        entries = [tensor.entry]
        if tensor.experts:
            entries = [(*tensor.entry, expert) for expert in range(tensor.experts)]
        for path in tensor.paths:
            depths[path] = len(entries[0])
            tensor_with |= dict.fromkeys([(path, entry) for entry in entries], tensor)

    def read_entry(path: str, entry: tuple[int, ...]) -> np.ndarray:
        tensor = tensor_with[path, entry]
        if tensor.experts:
            (values,) = read(names[tensor.name], slice(entry[-1], entry[-1] + 1))
        else:
            values = read(names[tensor.name], slice(None))
        return tensor.transform.split(values, tensor.specs)[tensor.paths.index(path)]

    def read_leaf(path: str, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
        depth = depths[path]
        # Of each axis [n] the places that are read.
        places = [range(n)[cut] for n, cut in zip(table[path].shape, index, strict=True)]
        values = _empty([len(axis) for axis in places], dtype)
        if depth:
            # A leaf [L, ...] or [L, E, ...], whose entries are read one after another.
            by_entry = values.reshape(math.prod(values.shape[:depth]), *values.shape[depth:])
            for row, entry in zip(by_entry, itertools.product(*places[:depth]), strict=True):
                row[...] = read_entry(path, entry)[index[depth:]]
            return values
        tensor = tensor_with[path, ()]
        if tensor.transform is SAME and values.ndim == 2:
            # A table [rows, width], as of the embedding, is the largest leaf: of its tensor no
            # other rows are read.
            values[...] = read(names[tensor.name], index[0])[:, index[1]]
        else:
            values[...] = read_entry(path, ())[index]
        return values

    return read_leaf


def joined_tensor(tensor: Tensor, leaves: Mapping[str, Any]) -> np.ndarray:
    """Return the tensor for the files, from the leaves by path; only its entry is copied to the
    host."""
    arrays = []
    for path in tensor.paths:
        leaf = leaves[path]
        # A copy, because an array keeps its value on the host for as long as it lives.
        entry = leaf[tensor.entry] if tensor.entry else leaf.copy()
        arrays.append(np.asarray(entry))
    if not tensor.experts:
        return tensor.transform.join(arrays, tensor.specs)
    experts = zip(*arrays, strict=True)
    return np.stack([tensor.transform.join(expert, tensor.specs) for expert in experts])


def matched(
    names: Iterable[str], expected: Iterable[str], prefix: str, renamed: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Return the name in the files of each expected tensor: the same, or that of older files
    (without the prefix, or with other endings)."""
    expected_names = {*expected}
    name_in_file = {}
    for name in names:
        modern = name
        for pattern, new in renamed:
            modern = re.sub(pattern, new, modern)
        for candidate in (name, modern, prefix + modern, modern.removeprefix(prefix)):
            if candidate in expected_names:
                name_in_file[candidate] = name
                break
    return name_in_file
