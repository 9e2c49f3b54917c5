"""The table of a family's tensors, (theirs, ours, transform), and the one engine that applies it in
both directions."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxformer.params import Spec, Specs
from jaxformer.params import rows as spec_rows

Arrays = Sequence[np.ndarray]
PIECE = 1 << 22  # numbers of a table that are read at a time


class Transform(NamedTuple):
    """How leaves of one layer lie in a tensor of theirs: its shape, the leaves of a tensor, and the
    tensor of the leaves."""

    shape: Callable[[Sequence[Spec]], tuple[int, ...]]
    split: Callable[[np.ndarray, Sequence[Spec]], Arrays]
    join: Callable[[Arrays, Sequence[Spec]], np.ndarray]


def _sizes(spec: Spec) -> tuple[int, int]:
    """Fan-in and the rest, of a matrix whose inputs come first."""
    return spec.fan_in, math.prod(spec.shape) // spec.fan_in


def _flat_shape(specs: Sequence[Spec]) -> tuple[int, ...]:
    return specs[0].shape if specs[0].is_matrix else (math.prod(specs[0].shape),)


def _transform(shape: Any, split: Any, join: Any) -> Transform:
    """One tensor that is one leaf."""
    return Transform(
        shape,
        lambda w, specs: [split(w, specs[0])],
        lambda leaves, specs: join(leaves[0], specs[0]),
    )


# Tables and vectors as they are, the axes of a vector flattened.
SAME = _transform(
    _flat_shape, lambda w, s: w.reshape(s.shape), lambda w, s: w.reshape(_flat_shape([s]))
)
# torch.nn.Linear: [out, in].
LINEAR = _transform(
    lambda specs: _sizes(specs[0])[::-1],
    lambda w, s: w.T.reshape(s.shape),
    lambda w, s: w.reshape(_sizes(s)).T,
)
# GPT-2's Conv1D: [in, out].
CONV = _transform(
    lambda specs: _sizes(specs[0]),
    lambda w, s: w.reshape(s.shape),
    lambda w, s: w.reshape(_sizes(s)),
)
# A vector as one row.
AS_ROW = _transform(lambda specs: (1, *specs[0].shape), lambda w, s: w[0], lambda w, s: w[None])


def _thirds(specs: Sequence[Spec]) -> tuple[int, ...]:
    shape = CONV.shape(specs) if specs[0].is_matrix else _flat_shape(specs)
    return (*shape[:-1], 3 * shape[-1])


# Queries, keys and values beside each other, as GPT-2 has them: [in, 3 out].
STACKED_QKV = Transform(
    _thirds,
    lambda w, specs: [
        part.reshape(s.shape) for part, s in zip(np.split(w, 3, axis=-1), specs, strict=True)
    ],
    lambda leaves, specs: np.concatenate(
        [leaf.reshape(*_thirds(specs)[:-1], -1) for leaf in leaves], axis=-1
    ),
)


def _by_head(specs: Sequence[Spec]) -> tuple[int, ...]:
    """[heads, 3, head_dim], and behind them the fan-in where they are matrices."""
    heads, width = specs[0].shape[-2:]
    return (heads, 3, width, *specs[0].shape[:-2])


def _of_heads(w: np.ndarray, specs: Sequence[Spec]) -> Arrays:
    parts = np.moveaxis(w.reshape(_by_head(specs)), 1, 0)
    return [part if part.ndim == 2 else np.moveaxis(part, -1, 0) for part in parts]


def _to_heads(leaves: Arrays, specs: Sequence[Spec]) -> np.ndarray:
    parts = [leaf if leaf.ndim == 2 else np.moveaxis(leaf, 0, -1) for leaf in leaves]
    return np.stack(parts, axis=1).reshape(_heads_shape(specs))


def _heads_shape(specs: Sequence[Spec]) -> tuple[int, ...]:
    heads, three, width, *inputs = _by_head(specs)
    return (heads * three * width, *inputs)


# Queries, keys and values of each head together, as GPT-NeoX and BLOOM have them: [heads 3
# head_dim, in].
BY_HEAD = Transform(_heads_shape, _of_heads, _to_heads)


class TensorRow(NamedTuple):
    """`hf` with {} for the layer; `ours` a dotted path of the table of parameters, or the paths
    that share a tensor."""

    hf: str
    ours: str | tuple[str, ...]
    transform: Transform = SAME

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


def linear(
    hf: str, ours: str | tuple[str, ...], transform: Transform = LINEAR
) -> tuple[TensorRow, ...]:
    """The weight of a linear layer and its bias, or of queries, keys and values in one."""
    if isinstance(ours, str):
        return TensorRow(f"{hf}.weight", ours, transform), TensorRow(f"{hf}.bias", f"{ours}_bias")
    biases = tuple(f"{path}_bias" for path in ours)
    return TensorRow(f"{hf}.weight", ours, transform), TensorRow(f"{hf}.bias", biases, transform)


def norm(hf: str, ours: str) -> tuple[TensorRow, ...]:
    """The scale of a norm and its bias."""
    return TensorRow(f"{hf}.weight", f"{ours}.scale"), TensorRow(f"{hf}.bias", f"{ours}.bias")


QKV = ("blocks.attention.q", "blocks.attention.k", "blocks.attention.v")


@dataclass(frozen=True)
class Tensor:
    """One tensor of theirs: the leaves in it, of which layer (None where they are not stacked), and
    how they lie there."""

    name: str
    paths: tuple[str, ...]
    layer: int | None
    specs: tuple[Spec, ...]
    transform: Transform

    @property
    def shape(self) -> tuple[int, ...]:
        return self.transform.shape(self.specs)


def tensors(rows: Iterable[TensorRow], specs: Specs) -> list[Tensor]:
    """All tensors of a model; rows of leaves that it has not are left out."""
    table, found = spec_rows(specs), []
    for row in rows:
        if not all(path in table for path in row.paths):
            continue
        whole = tuple(table[path] for path in row.paths)
        if whole[0].axes[0] != "layers":
            found.append(Tensor(row.hf, row.paths, None, whole, row.transform))
            continue
        one = tuple(replace(spec, shape=spec.shape[1:], axes=spec.axes[1:]) for spec in whole)
        for layer in range(whole[0].shape[0]):
            found.append(Tensor(row.hf.format(layer), row.paths, layer, one, row.transform))
    return found


def unplaced(found: Iterable[Tensor], specs: Specs) -> list[str]:
    """Leaves of ours that no tensor holds."""
    held = {path for tensor in found for path in tensor.paths}
    return [path for path in spec_rows(specs) if path not in held]


def _space(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An empty array that begins at a multiple of 64 bytes, which JAX on a CPU takes over without a
    copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + size].view(dtype).reshape(shape)


def leaf_reader(
    found: Iterable[Tensor], names: Mapping[str, str], read: Callable[[str, slice], np.ndarray]
) -> Callable[[str, tuple[slice, ...], Any], np.ndarray]:
    """A function that gives a part of a leaf, (path, index, dtype); `read` gives rows of a tensor
    by its name in the files.

    No more than that part is in memory, and one tensor of a layer or a piece of a table.
    """
    where: dict[str, list[Tensor]] = {}
    for tensor in found:
        for path in tensor.paths:
            where.setdefault(path, []).append(tensor)

    def one(tensor: Tensor, path: str) -> np.ndarray:
        return tensor.transform.split(read(names[tensor.name], slice(None)), tensor.specs)[
            tensor.paths.index(path)
        ]

    def part(path: str, index: tuple[slice, ...], dtype: Any) -> np.ndarray:
        first = where[path][0]
        spec = first.specs[first.paths.index(path)]
        if first.layer is not None:
            layers = where[path][index[0]]
            made = _space((len(layers), *_lengths(index[1:], spec.shape)), dtype)
            for row, tensor in zip(made, layers, strict=True):
                row[...] = one(tensor, path)[index[1:]]
            return made
        if first.transform is not SAME or len(spec.shape) != 2:
            return one(first, path)[index].astype(dtype)
        made = _space(_lengths(index, spec.shape), dtype)
        begin, step = index[0].start or 0, max(1, PIECE // spec.shape[1])
        for at in range(0, len(made), step):
            count = min(step, len(made) - at)
            made[at : at + count] = read(names[first.name], slice(begin + at, begin + at + count))[
                :, index[1]
            ]
        return made

    return part


def _lengths(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[int]:
    return [len(range(*cut.indices(length))) for cut, length in zip(index, shape, strict=True)]


def tensor_of(tensor: Tensor, leaves: Mapping[str, Any]) -> np.ndarray:
    """The tensor of theirs, of our leaves by path; only the layer that it holds is brought to the
    host."""
    # A copy, because an array keeps what was brought to the host of it for as long as it lives.
    arrays = [
        leaves[path].copy() if tensor.layer is None else leaves[path][tensor.layer]
        for path in tensor.paths
    ]
    return tensor.transform.join([np.asarray(array) for array in arrays], tensor.specs)


def matched(
    names: Iterable[str], expected: Iterable[str], prefix: str, renamed: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Names in the files by the names expected: as they are, or as older files have them (no
    prefix, other endings)."""
    wanted, found = {*expected}, {}
    for name in names:
        modern = name
        for pattern, new in renamed:
            modern = re.sub(pattern, new, modern)
        for candidate in (name, modern, prefix + modern, modern.removeprefix(prefix)):
            if candidate in wanted:
                found[candidate] = name
                break
    return found
