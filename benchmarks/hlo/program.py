"""Reads the text of an optimized XLA program (HLO), as `compiled.as_text()` gives it for a CPU, GPU
or TPU.

The text is read because it is the one form that is public and complete: `jaxlib._hlo`, which parses
it too, gives instructions without their types and attributes, and the definitions of the protocol
buffer are in no package that JAX needs.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Bits of an element by the name of its type; types not listed, such as token, hold no data.
BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
SIZED = re.compile(r"^(?:[suf]|f)(\d+)(?:e\d+m\d+\w*)?$")  # s32, u8, f16, f8e4m3fn

ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=?]*)\](\{[^{}]*\})?")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
OPCODE = re.compile(r"\s*([\w\-]+)\(")
OPENING, CLOSING = "([{", ")]}"


@dataclass(frozen=True)
class ArrayType:
    """An array of a program. `space` is its memory: 0 the device's main memory, on a TPU 1 the
    vector memory beside the units, and others for scalars, semaphores and the host."""

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def bytes(self) -> int:
        return -(-math.prod(self.shape) * bits(self.dtype) // 8)

    @property
    def main_bytes(self) -> int:
        """The bytes, if it is in main memory."""
        return self.bytes if self.space == 0 else 0

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = types opcode(arguments), attributes`.

    `types` are the arrays of its value, a tuple flattened; `operands` are names of instructions of
    the same computation.
    """

    name: str
    types: tuple[ArrayType, ...]
    opcode: str
    arguments: str
    attributes: str
    is_root: bool = False

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        if self.opcode in ("parameter", "constant"):
            return ()
        listed = _split(re.sub(r"/\*.*?\*/", "", self.arguments))
        return tuple(text.split()[-1].removeprefix("%") for text in listed if text.strip())

    @property
    def number(self) -> int:
        """Which parameter this is, or the value of an integer constant; -1 for others."""
        match = re.fullmatch(r"-?\d+", self.arguments.strip())
        return int(match[0]) if match and self.opcode in ("parameter", "constant") else -1

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern in the attributes, "" where it is not found."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    def called(self, *names: str) -> list[str]:
        """The computations that attributes of these names name."""
        computations = []
        for name in names:
            several = self.attribute(rf"\b{name}=\{{([^}}]*)\}}")
            single = self.attribute(rf"\b{name}=%?([\w.\-]+)")
            if several:
                computations += [text.strip().removeprefix("%") for text in several.split(",")]
            elif single:
                computations.append(single)
        return computations

    def numbers(self, name: str) -> list[int]:
        """The numbers of an attribute such as lhs_contracting_dims={1,2}."""
        listed = self.attribute(rf"\b{name}=\{{([\d,]*)\}}")
        return [int(number) for number in listed.split(",") if number]

    @property
    def op_name(self) -> str:
        """Where the instruction comes from, by JAX's names."""
        return self.attribute(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        rows = list(self.instructions.values())
        return next((row for row in rows if row.is_root), rows[-1])

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        rows = self.instructions.values()
        return {row.number: row for row in rows if row.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each one."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for row in self.instructions.values():
            for name in dict.fromkeys(row.operands):
                if name in users:
                    users[name].append(row)
        return users

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        """An operand, None where there is none of that number."""
        names = instruction.operands
        return self.instructions.get(names[index]) if index < len(names) else None


@dataclass(frozen=True)
class Program:
    """Computations by name; the program is the one named `entry`."""

    computations: dict[str, Computation]
    entry: str


def bits(dtype: str) -> int:
    """The bits of an element; 0 for a type that holds no data."""
    match = SIZED.match(dtype)
    return BITS.get(dtype, int(match[1]) if match else 0)


def parse_types(text: str) -> tuple[ArrayType, ...]:
    """The arrays in a type such as "(f32[8]{0}, (bf16[2,4]{1,0:T(8,128)S(1)}))"."""
    arrays = []
    for dtype, sizes, layout in ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        arrays.append(ArrayType(dtype, shape, int(space[1]) if space else 0))
    return tuple(arrays)


def parse(text: str) -> Program:
    """The program of an HLO text. Raises ValueError for a text that has none."""
    computations: dict[str, Computation] = {}
    entry = ""
    rows: dict[str, Instruction] | None = None
    for line in _joined_lines(text):
        if line[:1] != " ":
            rows = None
            if header := COMPUTATION.match(line):
                rows = {}
                computations[header[2]] = Computation(header[2], rows)
                entry = header[2] if header[1] else entry
        elif rows is not None and (row := _instruction(line)):
            rows[row.name] = row
    if not entry:
        raise ValueError("this text is no HLO program: it has no line that begins with ENTRY.")
    return Program(computations, entry)


def _joined_lines(text: str) -> Iterator[str]:
    """The lines of computations, with those of one instruction joined: the attributes of a kernel
    are written over several lines."""
    inside, joined = False, ""
    for line in text.splitlines():
        if inside and line != "}" and not line.startswith(" "):
            joined += line
            continue
        if joined:
            yield joined
        joined = line
        inside = line.startswith(" ") or COMPUTATION.match(line) is not None
    if joined:
        yield joined


def _instruction(line: str) -> Instruction | None:
    start = INSTRUCTION.match(line)
    if not start:
        return None
    begin = start.end()
    end = _closing(line, begin) + 1 if line[begin] == "(" else line.index(" ", begin)
    opcode = OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    return Instruction(
        name=start[2],
        types=parse_types(line[begin:end]),
        opcode=opcode[1],
        arguments=line[opcode.end() : close],
        attributes=line[close + 1 :],
        is_root=bool(start[1]),
    )


def _closing(text: str, start: int) -> int:
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] in OPENING:
            depth += 1
        elif text[index] in CLOSING:
            depth -= 1
            if depth == 0:
                return index
    return len(text) - 1


def _split(text: str) -> list[str]:
    """The parts of a text between commas that are in no bracket."""
    parts, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if character == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    return [*parts, text[begin:]]


def trip_count(program: Program, loop: Instruction) -> int:
    """How often a `while` runs its body: what the compiler wrote beside it, else from its counter,
    which starts at a constant, grows by one and is compared with another; 0 where it is not known.
    """
    if trips := loop.attribute(r'known_trip_count":\{"n":"(\d+)"'):
        return int(trips)
    condition = program.computations[loop.called("condition")[0]]
    body = program.computations[loop.called("body")[0]]
    for row in condition.instructions.values():
        if row.opcode not in ("compare", "fusion"):
            continue
        sides = [condition.instructions.get(name) for name in row.operands]
        limits = [side.number for side in sides if side and side.opcode == "constant"]
        counters = [side for side in sides if side and side.opcode == "get-tuple-element"]
        if limits and counters:
            index = int(counters[0].attribute(r"index=(\d+)"))
            return max(0, -(-limits[0] // (_step(body, index) or 1)))
    return 0


def _step(body: Computation, index: int) -> int:
    """By how much a body of a loop raises element `index` of its tuple."""
    row = body.operand(body.root, index) if body.root.opcode == "tuple" else None
    total = 0
    while row and row.opcode in ("add", "copy"):
        candidates = [body.operand(row, number) for number in range(len(row.operands))]
        operands = [operand for operand in candidates if operand]
        total += sum(operand.number for operand in operands if operand.opcode == "constant")
        row = next((operand for operand in operands if operand.opcode != "constant"), None)
    return total
