"""Weights packed as MXFP4, as in the checkpoints of gpt-oss (OCP Microscaling Formats 1.0).

A tensor `NAME` of experts, [E, in, out], is two in the files. `NAME_blocks` uint8 [E, out, G, 16]
has the numbers of G blocks of 32 inputs, two in a byte, the lower four bits first; `NAME_scales`
uint8 [E, out, G] has the exponent of each block, plus 127. A number of four bits is a sign and one
of the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6, so that bfloat16 has the product exactly.
"""

from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxformer.files import ConfigError, first_of
from jaxformer.interop.tensor_files import Entry, TensorFiles

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
PACKED_DTYPES = {"U8": np.dtype("u1")}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
# The two numbers of a byte, times 2, and 2^(scale - 128): no power of a scale is beyond float32.
PAIRS = 2 * FP4_VALUES[np.arange(256)[:, None] >> np.array([0, 4]) & 15]
POWERS = np.exp2(np.arange(256, dtype=np.float32) - 128)


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 blocks [E, out, G, 16] and scales [E, out, G] -> bfloat16 [E, in, out]."""
    experts, outputs, groups, _ = blocks.shape
    numbers = PAIRS[blocks].reshape(experts, outputs, groups, 2 * BLOCK_BYTES)
    with np.errstate(over="ignore"):
        numbers *= POWERS[scales][..., None]
    return numbers.reshape(experts, outputs, -1).swapaxes(1, 2).astype(ml_dtypes.bfloat16)


class Packed(NamedTuple):
    """The two tensors that hold one."""

    blocks: Entry
    scales: Entry


class Mxfp4Files(TensorFiles):
    """The tensors of a model directory, those packed as MXFP4 as the bfloat16 tensors that they
    stand for.

    A read unpacks the rows that are asked for, so that as many experts are in memory. Raises
    ConfigError as `TensorFiles`, and where blocks and scales do not belong together.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.packed: dict[str, Packed] = {}
        problems: list[str] = []
        for name in [*self.entries]:
            stem = name.removesuffix(BLOCKS)
            if stem == name:
                continue
            scales = self.entries.get(stem + SCALES)
            if scales is None:
                problems.append(f"{name} without {stem}{SCALES}")
                continue
            packed = Packed(self.entries[name], scales)
            if _is_mxfp4(packed):
                self.packed[stem] = packed
            else:
                problems.append(_problem(name, packed))
        if problems:
            raise ConfigError(
                f"the packed tensors of {directory} are not MXFP4, whose blocks are uint8 [experts,"
                f" out, groups, {BLOCK_BYTES}] (32 numbers each) with scales uint8 [experts, out,"
                f" groups]:\n  {first_of(problems)}"
            )
        for stem, (blocks, _) in self.packed.items():
            del self.entries[stem + BLOCKS], self.entries[stem + SCALES]
            experts, outputs, groups, _ = blocks.shape
            shape = (experts, 2 * BLOCK_BYTES * groups, outputs)
            self.entries[stem] = Entry(blocks.file, shape, "BF16")

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        if name not in self.packed:
            return super().read(name, rows)
        blocks, scales = self.packed[name]
        return unpacked(
            self.read_entry(name + BLOCKS, blocks, rows, PACKED_DTYPES),
            self.read_entry(name + SCALES, scales, rows, PACKED_DTYPES),
        )


def _is_mxfp4(packed: Packed) -> bool:
    blocks, scales = packed
    is_stacked = len(blocks.shape) == 4 and scales.shape == blocks.shape[:3]
    has_bytes = blocks.dtype in PACKED_DTYPES and scales.dtype in PACKED_DTYPES
    return is_stacked and has_bytes and blocks.shape[3] == BLOCK_BYTES


def _problem(name: str, packed: Packed) -> str:
    blocks, scales = packed
    return (
        f"{name}: {blocks.dtype} {list(blocks.shape)} with scales {scales.dtype}"
        f" {list(scales.shape)}"
    )
