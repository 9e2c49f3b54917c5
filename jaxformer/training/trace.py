"""Reads a trace of `jax.profiler` into a table of the time of a step by named scopes."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.config.format import human_time
from jaxformer.layers.block import CROSS, FEED_FORWARDS, MIXERS

# The scopes of the library's own layers, losses and step (`jax.named_scope`).
SUBLAYERS = (*MIXERS, CROSS, *FEED_FORWARDS)
SCOPES = ("embed", "layer", *SUBLAYERS, "norm", "head", "loss", "optimizer")
OTHER = "other"
PASSES = ("forward", "recomputed", "backward")
# Instructions whose time is that of the instructions inside them.
CONTAINERS = {"while", "conditional", "call"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective")
HLO_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([\w\-]+)\(", re.MULTILINE)
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


class ScopedPass(NamedTuple):
    """The scope and the pass over the model to which an instruction belongs."""

    scope: str
    direction: str


class Spent(NamedTuple):
    """An operation that a device ran: its program, two candidates for the name of its instruction,
    and its begin and end in nanoseconds."""

    program: str
    names: tuple[str, str]
    begin: float
    end: float


def places_of(program: str, scopes: Sequence[str] = SCOPES) -> dict[str, ScopedPass]:
    """The scope and pass of each instruction of a compiled program (`compiled.as_text()`) that is
    not a container of others, by the name of the instruction and by that of its kernel."""
    scoped_passes = {}
    for line in program.splitlines():
        match = HLO_LINE.match(line)
        if match is None or match[2] in CONTAINERS:
            continue
        op_name = OP_NAME.search(line)
        scoped_pass = place_of(op_name[1] if op_name else "", scopes)
        if match[2].startswith(COLLECTIVES):
            scoped_pass = scoped_pass._replace(scope="collectives")
        scoped_passes[match[1]] = scoped_pass
        # A kernel has the name of its instruction with underscores.
        scoped_passes[re.sub(r"[.\-]", "_", match[1])] = scoped_pass
    return scoped_passes


def place_of(op_name: str, scopes: Sequence[str] = SCOPES) -> ScopedPass:
    """The innermost of the scopes in the name of an operation, such as
    "jit(advance)/transpose(jvp(layer))/attention/dot_general"."""
    levels = op_name.partition(";")[0].split("/")
    innermost = OTHER
    for level in levels:
        *transforms, name = level.rstrip(")").split("(")
        if name in scopes and "jit" not in transforms:
            innermost = name
    if "rematted_computation" in levels:
        return ScopedPass(innermost, "recomputed")
    backward = any(level.startswith("transpose(") for level in levels)
    return ScopedPass(innermost, "backward" if backward else "forward")


def newest_trace(directory: Path) -> Path | None:
    """The newest trace of this host below a directory that `jax.profiler` wrote to."""
    traces = sorted(directory.glob("plugins/profile/*/*.xplane.pb"))
    return traces[-1] if traces else None


def operations(trace: Path) -> list[list[Spent]]:
    """The operations that each device ran: a list for each GPU or TPU, or one for the CPU."""
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    accelerators = [list(_spent(plane)) for plane in planes if plane.name.startswith("/device:")]
    used = [spent for spent in accelerators if spent]
    if used:
        return used
    return [list(_spent(plane)) for plane in planes if plane.name == "/host:CPU"]


def _spent(plane: Any) -> Iterator[Spent]:
    """The operations in a plane of a trace. A TPU has one line of operations, among other lines
    about the same time; a GPU has a line for each stream, a CPU one for each thread."""
    lines = list(plane.lines)
    operation_lines = [line for line in lines if line.name == "XLA Ops"]
    for line in operation_lines or lines:
        for event in line.events:
            stats = dict(event.stats)
            # A TPU names the event by the whole instruction, "%fusion.1 = ...", and a GPU by the
            # kernel, which is named as the instruction.
            names = str(stats.get("hlo_op", "")), event.name.lstrip("%").partition(" ")[0]
            program = str(stats.get("program_id", ""))
            yield Spent(program, names, event.start_ns, event.end_ns)


class TimeTable(NamedTuple):
    """Mean nanoseconds of a step on a device: of each scope and pass, which may overlap; in which
    any operation ran; and of wall-clock time."""

    places: Mapping[ScopedPass, float]
    busy: float
    elapsed: float

    def __str__(self) -> str:
        """A Markdown table, the scopes with the most time first."""
        sums = {
            scope: [self.places.get(ScopedPass(scope, direction), 0.0) for direction in PASSES]
            for scope, _ in self.places
        }
        total = sum(self.places.values()) or 1.0
        rows = [["scope", *PASSES, "ms a step", "share"]]
        for scope, by_pass in sorted(sums.items(), key=lambda item: -sum(item[1])):
            cells = [f"{nanoseconds / 1e6:.3f}" for nanoseconds in (*by_pass, sum(by_pass))]
            rows.append([scope, *cells, f"{sum(by_pass) / total:.1%}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * (width - 1) + ":" for width in widths])
        rows[1][0] = "-" * widths[0]
        lines = []
        for scope, *numbers in rows:
            cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
            lines.append(f"| {' | '.join([scope.ljust(widths[0]), *cells])} |")
        idle = max(self.elapsed - self.busy, 0.0)
        lines.append(
            f"\nA step took {human_time(self.elapsed / 1e9)}, in {human_time(idle / 1e9)} of which"
            " none of its operations ran."
        )
        return "\n".join(lines)


def time_table(
    devices: Sequence[Sequence[Spent]],
    programs: Iterable[Mapping[str, ScopedPass]],
    steps: int,
    seconds: float,
) -> TimeTable:
    """The table of `steps` steps that took `seconds`, from the operations of each device and the
    scopes and passes of the instructions of each program (from `places_of`)."""
    tables, totals, busy = list(programs), defaultdict[ScopedPass, float](float), 0.0
    shares = steps * max(len(devices), 1)
    for spent in devices:
        intervals = _scoped_intervals(spent, tables)
        for scoped_pass, begin, end in intervals:
            totals[scoped_pass] += (end - begin) / shares
        busy += covered((begin, end) for _, begin, end in intervals) / shares
    return TimeTable(dict(totals), busy, seconds * 1e9 / steps)


def _scoped_intervals(
    spent: Sequence[Spent], tables: Sequence[Mapping[str, ScopedPass]]
) -> list[tuple[ScopedPass, float, float]]:
    """The scope and pass, begin and end of each operation of the programs; other operations are
    left out. Programs are identified by the names of their instructions."""
    of_program = defaultdict[str, set[str]](set)
    for operation in spent:
        of_program[operation.program].update(operation.names)
    table = {
        program: max(tables, key=lambda table: len(names & table.keys()), default={})
        for program, names in of_program.items()
    }
    intervals = []
    for operation in spent:
        first_name, second_name = operation.names
        instructions = table[operation.program]
        scoped_pass = instructions.get(first_name) or instructions.get(second_name)
        if scoped_pass:
            intervals.append((scoped_pass, operation.begin, operation.end))
    return intervals


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
