"""Reads a trace of `jax.profiler`: where the time of a step went, by named scopes."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxformer.config.format import human_time
from jaxformer.layers.block import all_sublayers

# The scopes of the library's own layers, losses and step (`jax.named_scope`).
SCOPES = ("embed", "layer", *all_sublayers(), "norm", "head", "loss", "optimizer")
OTHER = "other"
PASSES = ("forward", "recomputed", "backward")
# Instructions whose time is that of the instructions inside them.
CONTAINERS = {"while", "conditional", "call"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective")
HLO_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([\w\-]+)\(", re.MULTILINE)
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


class ScopedPass(NamedTuple):
    """What an instruction belongs to: a scope, and the pass over the model."""

    scope: str
    direction: str


class Spent(NamedTuple):
    """An operation that a device ran: its program, names that may be those of its instruction, and
    begin and end in nanoseconds."""

    program: str
    names: tuple[str, str]
    begin: float
    end: float


def places_of(program: str, scopes: Sequence[str] = SCOPES) -> dict[str, ScopedPass]:
    """The place of each instruction of a compiled program (`compiled.as_text()`) that runs by
    itself, by the name of the instruction."""
    found = {}
    for line in program.splitlines():
        match = HLO_LINE.match(line)
        if match is None or match[2] in CONTAINERS:
            continue
        name = OP_NAME.search(line)
        place = place_of(name[1] if name else "", scopes)
        if match[2].startswith(COLLECTIVES):
            place = place._replace(scope="collectives")
        found[match[1]] = found[re.sub(r"[.\-]", "_", match[1])] = place  # and as a kernel's name
    return found


def place_of(op_name: str, scopes: Sequence[str] = SCOPES) -> ScopedPass:
    """The innermost of the scopes in the name of an operation, such as
    "jit(advance)/transpose(jvp(layer))/attention/dot_general"."""
    parts = op_name.partition(";")[0].split("/")
    inside = [OTHER]
    for part in parts:
        *transforms, name = part.rstrip(")").split("(")
        if name in scopes and "jit" not in transforms:
            inside.append(name)
    backward = any(part.startswith("transpose(") for part in parts)
    direction = "backward" if backward else "forward"
    return ScopedPass(inside[-1], "recomputed" if "rematted_computation" in parts else direction)


def newest_trace(directory: Path) -> Path | None:
    """The newest trace of this host below a directory that `jax.profiler` wrote to."""
    traces = sorted(directory.glob("plugins/profile/*/*.xplane.pb"))
    return traces[-1] if traces else None


def operations(trace: Path) -> list[list[Spent]]:
    """The operations that each device ran: a list for each GPU or TPU, or one for the CPU."""
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    devices = [list(_spent(plane)) for plane in planes if plane.name.startswith("/device:")]
    if devices := [found for found in devices if found]:
        return devices
    return [list(_spent(plane)) for plane in planes if plane.name == "/host:CPU"]


def _spent(plane: Any) -> Iterator[Spent]:
    """A TPU has a line of its operations among others about the same time; a GPU has a line for
    each stream, a CPU one for each thread."""
    lines = list(plane.lines)
    own = [line for line in lines if line.name == "XLA Ops"]
    for line in own or lines:
        for event in line.events:
            stats = dict(event.stats)
            # A TPU names the event by the whole instruction, "%fusion.1 = ...", and a GPU by the
            # kernel, which is named as the instruction.
            names = str(stats.get("hlo_op", "")), event.name.lstrip("%").partition(" ")[0]
            program = str(stats.get("program_id", ""))
            yield Spent(program, names, event.start_ns, event.end_ns)


class TimeTable(NamedTuple):
    """Mean nanoseconds of a step on a device: by place, of which those of different places may
    overlap; in which any operation ran; and as the clock counts it."""

    places: Mapping[ScopedPass, float]
    busy: float
    elapsed: float

    def __str__(self) -> str:
        """A Markdown table, the scopes that took most first."""
        sums = {
            scope: [self.places.get(ScopedPass(scope, direction), 0.0) for direction in PASSES]
            for scope, _ in self.places
        }
        total = sum(self.places.values()) or 1.0
        rows = [["scope", *PASSES, "ms a step", "share"]]
        for scope, parts in sorted(sums.items(), key=lambda item: -sum(item[1])):
            cells = [f"{part / 1e6:.3f}" for part in (*parts, sum(parts))]
            rows.append([scope, *cells, f"{sum(parts) / total:.1%}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * (width - 1) + ":" for width in widths])
        rows[1][0] = "-" * widths[0]
        lines = []
        for row in rows:
            first, *rest = zip(row, widths, strict=True)
            cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
            lines.append(f"| {' | '.join(cells)} |")
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
    """Where `steps` steps that took `seconds` spent the time of the devices, whose operations are
    those of `programs` (from `places_of`)."""
    tables, totals, busy = list(programs), defaultdict[ScopedPass, float](float), 0.0
    shares = steps * max(len(devices), 1)
    for spent in devices:
        known = _known(spent, tables)
        for place, begin, end in known:
            totals[place] += (end - begin) / shares
        busy += covered((begin, end) for _, begin, end in known) / shares
    return TimeTable(dict(totals), busy, seconds * 1e9 / steps)


def _known(
    spent: Sequence[Spent], tables: Sequence[Mapping[str, ScopedPass]]
) -> list[tuple[ScopedPass, float, float]]:
    """The operations of the programs, each with its place. Programs are told apart by the names of
    their instructions."""
    of_program = defaultdict[str, set[str]](set)
    for operation in spent:
        of_program[operation.program].update(operation.names)
    table = {
        program: max(tables, key=lambda table: len(names & table.keys()), default={})
        for program, names in of_program.items()
    }
    known = []
    for one in spent:
        places = [table[one.program].get(name) for name in one.names]
        if place := places[0] or places[1]:
            known.append((place, one.begin, one.end))
    return known


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total
