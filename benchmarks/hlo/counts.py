"""Sums over an optimized HLO program of one step: products, bytes, collectives, custom calls and
loops, everything in a loop as often as it runs."""

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass, field

from hlo.cost import (
    COLLECTIVE,
    kernel_flops,
    moved_bytes,
    operand_dtypes,
    product_flops,
    synchronous,
    target_of,
)
from hlo.program import Computation, Instruction, Program, parse, trip_count

# Custom calls of XLA's TPU compiler that are no work.
BOOKKEEPING = {
    "AllocateBuffer",
    "ConcatBitcast",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveStart",
    "AsyncCollectiveDone",
}


@dataclass(frozen=True)
class CompiledCollective:
    """Collectives of one kind and size, `count` times a step.

    `bytes` is one device's whole array, once: what a gather gives and what a scatter takes.
    `group` is the number of devices that take part together, 0 where it is not known. `shape` is
    that array, or several of one call. `asynchronous` ones may run behind other work.
    """

    kind: str
    shape: str
    bytes: int
    group: int
    asynchronous: bool
    op_name: str
    count: int


@dataclass(frozen=True)
class Loop:
    """A loop of `trips` rounds (0: not known, counted as one), entered `times` a step."""

    name: str
    trips: int
    times: int


@dataclass(frozen=True)
class Operation:
    """An instruction outside of fusions: where it comes from by JAX's names, the target of a custom
    call, how often it runs, its FLOPs in products and kernels, and bytes and seconds as in
    `Counts`, all runs together."""

    op_name: str
    target: str
    times: int
    flops: int
    bytes: int
    seconds: float

    def repeated(self, times: int) -> "Operation":
        return dataclasses.replace(
            self,
            times=times * self.times,
            flops=times * self.flops,
            bytes=times * self.bytes,
            seconds=times * self.seconds,
        )


@dataclass(frozen=True)
class Counts:
    """What one device does in a step.

    `products` are FLOPs by dtypes, as "bf16 x bf16 -> f32"; `kernels` those inside custom calls, as
    far as known. `bytes` go to and from main memory. `seconds` is the bound: the sum over
    instructions of what takes longer, products at the peak or bytes at the bandwidth, with
    collectives left out; 0 where peak and bandwidth were not given.
    """

    products: dict[str, int]
    kernels: int
    bytes: int
    seconds: float
    collectives: tuple[CompiledCollective, ...]
    custom_calls: dict[str, int]
    loops: tuple[Loop, ...]

    @property
    def flops(self) -> int:
        return sum(self.products.values()) + self.kernels


def count(text: str, peak: float = math.inf, bandwidth: float = math.inf) -> Counts:
    """Counts an HLO text; `peak` in FLOP/s and `bandwidth` in bytes/s of one device."""
    program = parse(text)
    total = _Counter(program, peak, bandwidth).of(program.entry, fused=False)
    return Counts(
        products=dict(total.products.most_common()),
        kernels=total.kernels,
        bytes=total.bytes,
        seconds=total.seconds,
        collectives=_merged(total.collectives),
        custom_calls=dict(total.custom_calls.most_common()),
        loops=tuple(Loop(name, trips, times) for (name, trips), times in total.loops.items()),
    )


def operations(text: str, peak: float, bandwidth: float) -> dict[str, Operation]:
    """The instructions of an HLO text outside of fusions, by name."""
    program = parse(text)
    return _Counter(program, peak, bandwidth).of(program.entry, fused=False).operations


# The computation and the name of an instruction, which tell it from all others of a program.
InstructionKey = tuple[str, str]


@dataclass
class _Total:
    """Sums over a computation. `add` adds those of another one, multiplied by a number."""

    products: Counter[str] = field(default_factory=Counter)
    kernels: int = 0
    bytes: int = 0
    seconds: float = 0.0
    collectives: dict[InstructionKey, tuple[str, CompiledCollective]] = field(default_factory=dict)
    custom_calls: Counter[str] = field(default_factory=Counter)
    loops: Counter[tuple[str, int]] = field(default_factory=Counter)
    operations: dict[str, Operation] = field(default_factory=dict)

    def add(self, other: "_Total", times: int = 1) -> None:
        for name in ("products", "custom_calls", "loops"):
            added = getattr(other, name).items()
            getattr(self, name).update({key: times * number for key, number in added})
        self.kernels += times * other.kernels
        self.bytes += times * other.bytes
        self.seconds += times * other.seconds
        for name, operation in other.operations.items():
            before = self.operations[name].times if name in self.operations else 0
            runs = before // operation.times + times
            self.operations[name] = operation.repeated(runs)
        for key, (channel, collective) in other.collectives.items():
            before = self.collectives[key][1].count if key in self.collectives else 0
            total = before + times * collective.count
            self.collectives[key] = channel, dataclasses.replace(collective, count=total)

    @property
    def work(self) -> float:
        """The measure by which the branches of a conditional are compared."""
        return self.seconds or sum(self.products.values()) + self.kernels + self.bytes


class _Counter:
    def __init__(self, program: Program, peak: float, bandwidth: float) -> None:
        self.program, self.peak, self.bandwidth = program, peak, bandwidth
        self.totals: dict[tuple[str, bool], _Total] = {}

    def of(self, name: str, fused: bool) -> _Total:
        """The sums of a computation; those of a fused one have no bytes and no time."""
        if (name, fused) not in self.totals:
            computation, total = self.program.computations[name], _Total()
            for row in computation.instructions.values():
                total.add(*self.row(computation, synchronous(computation, row), fused))
            self.totals[name, fused] = total
        return self.totals[name, fused]

    def row(self, computation: Computation, row: Instruction, fused: bool) -> tuple[_Total, int]:
        """(sums, times) of an instruction with the computations that it calls."""
        if row.opcode == "while":
            trips, name = trip_count(self.program, row), row.called("body")[0]
            loop = _Total(loops=Counter({(name, trips): 1}))
            loop.add(self.of(name, fused), max(trips, 1))
            return loop, 1
        if row.opcode == "conditional":
            names = row.called("branch_computations", "true_computation", "false_computation")
            return max((self.of(name, fused) for name in names), key=lambda branch: branch.work), 1
        if row.opcode in ("call", "async-start"):
            total = _Total()
            for name in row.called("to_apply", "calls"):
                total.add(self.of(name, fused))
            return total, 1
        total = _Total()
        if row.opcode == "fusion":
            total.add(self.of(row.called("calls")[0], fused=True))
        self.instruction(computation, row, total, fused)
        if not fused:
            total.bytes = moved_bytes(self.program, computation, row)
            flops = sum(total.products.values()) + total.kernels
            # Devices that multiply codes of 8 bits do so at twice the rate of 16.
            short = sum(n for name, n in total.products.items() if name.startswith("f8"))
            total.seconds = max((flops - short / 2) / self.peak, total.bytes / self.bandwidth)
            total.operations[row.name] = Operation(
                self.origin(row), target_of(row), 1, flops, total.bytes, total.seconds
            )
        return total, 1

    def origin(self, row: Instruction) -> str:
        """Where an instruction comes from by JAX's names; a fusion without a name has that of the
        last instruction in it that has one."""
        if row.op_name or row.opcode != "fusion":
            return row.op_name
        inside = self.program.computations[row.called("calls")[0]].instructions.values()
        return next((part.op_name for part in reversed(inside) if part.op_name), "")

    def instruction(
        self, computation: Computation, row: Instruction, total: _Total, fused: bool
    ) -> None:
        """Adds the counts of an instruction itself, without the computations that it calls."""
        if flops := product_flops(computation, row):
            total.products[operand_dtypes(computation, row)] += flops
        total.kernels += kernel_flops(computation, row)
        if (target := target_of(row)) and target not in BOOKKEEPING:
            total.custom_calls[target] += 1
        if matched := COLLECTIVE.match(row.opcode):
            channel = row.attribute(r"channel_id=(\d+)") or f"{computation.name}/{row.name}"
            # Those of `jax.shard_map` share a channel: sums have a reduction of their own, and the
            # others have copies only where they run behind other instructions.
            reduction = row.attribute(r"to_apply=%?([\w.\-]+)")
            copied = fused or _runs_behind(row)
            channel += reduction or ("" if copied else f"{computation.name}/{row.name}")
            collective = _collective(computation, row, matched[1], bool(matched[2]))
            total.collectives[computation.name, row.name] = channel, collective


def _runs_behind(row: Instruction) -> bool:
    """Whether XLA's TPU compiler lets a collective run behind other instructions."""
    return bool(row.attribute("(async_collective_name|chain_id)="))


def _collective(
    computation: Computation, row: Instruction, kind: str, asynchronous: bool
) -> CompiledCollective:
    results = row.types
    if asynchronous and kind != "all-reduce":
        # The type of a start: operands, results, and contexts, which have no axes.
        arrays = [array for array in row.types if array.shape]
        results = tuple(arrays[len(arrays) // 2 :])
    operands = [computation.operand(row, index) for index in range(len(row.operands))]
    operand_arrays = tuple(array for operand in operands if operand for array in operand.types)
    larger = max(results, operand_arrays, key=lambda arrays: sum(array.bytes for array in arrays))
    if kind == "ragged-all-to-all":
        # The rows of a device, and the array that they come into or that they come from, which has
        # room for more: no more than those can be sent.
        larger = (min(operand_arrays[:2], key=lambda array: array.bytes),)
    # A fusion of XLA's TPU compiler in which each device keeps its part of the sum.
    scattered = kind == "all-reduce" and computation.name.startswith("all-reduce-scatter")
    shape = ", ".join(map(str, larger[:3]))
    if len(larger) > 3:
        shape += f" and {len(larger) - 3} more"
    return CompiledCollective(
        kind="reduce-scatter" if scattered else kind,
        shape=shape,
        bytes=sum(array.bytes for array in larger),
        group=_group_size(row),
        asynchronous=asynchronous or _runs_behind(row),
        op_name=row.op_name,
        count=1,
    )


def _group_size(row: Instruction) -> int:
    """Devices of a replica group, which is written as {{0,1},{2,3}}, as [2,2]<=[4], or as names of
    axes of a mesh."""
    if listed := row.attribute(r"replica_groups=\{\{([\d,]+)\}"):
        return len(listed.split(","))
    if size := row.attribute(r"replica_groups=\[\d+,(\d+)\]<="):
        return int(size)
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", row.attribute(r"replica_groups=mesh\[([^\]]*)\]")))
    # An order of the devices may stand between the sizes and the names of the axes.
    axes = row.attribute(r"replica_groups=mesh\[[^\]]*\][^{]*\{([^}]*)\}")
    named = re.findall(r"'(\w+)'", axes)
    return math.prod(int(sizes.get(name, 1)) for name in named) if named else 0


def _merged(
    collectives: dict[InstructionKey, tuple[str, CompiledCollective]],
) -> tuple[CompiledCollective, ...]:
    """Collectives with those of one channel counted once, and equal ones added up, the most bytes
    first.

    XLA's TPU compiler lets a collective run behind several fusions, and then it is in each of them.
    Those may be in a loop around which it starts and ends: it runs as often as the rarest of them.
    """
    by_channel: dict[str, CompiledCollective] = {}
    for channel, entry in collectives.values():
        if channel not in by_channel or entry.count < by_channel[channel].count:
            by_channel[channel] = entry
    together: Counter[CompiledCollective] = Counter()
    for entry in by_channel.values():
        together[dataclasses.replace(entry, count=1)] += entry.count
    merged = [dataclasses.replace(entry, count=number) for entry, number in together.items()]
    return tuple(sorted(merged, key=lambda entry: -entry.count * entry.bytes))
