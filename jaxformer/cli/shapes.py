"""`jaxformer shapes CONFIG`: what goes into every sublayer of a model and what comes out."""

import json
import sys
from collections.abc import Sequence

from jaxformer.cli.arguments import ShapesArguments
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.format import human_count
from jaxformer.config.run import RunConfig
from jaxformer.report.banner import aligned
from jaxformer.runs.resolve import encoded_length, with_assumed_sizes
from jaxformer.tools.model_shapes import SYMBOLS, Shape, ShapeRow, shapes_of

SHAPE_COLUMNS = ("sublayer", "layers", "shapes", "in numbers", "parameters", "FLOPs")


def run(args: ShapesArguments, config: RunConfig) -> int:
    model, notes = with_assumed_sizes(config.model)
    if config.adapter.kind != "none":
        notes += (f"the model is shown without its adapter ({config.adapter.kind})",)
    source = encoded_length(model, config.data, AdapterConfig(), 1)
    rows = shapes_of(model, config.train.batch_size, config.data.sequence_length, source)
    for note in notes:
        print(f"note: {note}.", file=sys.stderr)
    total = {
        "parameters": sum(row.times * row.parameters for row in rows),
        "flops": sum(row.times * row.flops for row in rows if not row.depth),
    }
    if args.format == "json":
        print(json.dumps({"rows": [row._asdict() for row in rows], **total}, indent=1))
        return 0
    lines = [_cells(row, args.format) for row in rows]
    lines.append(("total", "", "", "", *_amounts(total["parameters"], total["flops"])))
    print(_table(lines, args.format))
    shapes = " ".join(shape for row in rows for shape in row.reads_symbols + row.makes_symbols)
    legend = [f"{name} {symbol.meaning}" for name, symbol in SYMBOLS.items() if name in shapes]
    print(f"\n{', '.join(legend)}.")
    print("Parameters and FLOPs are those of one layer, and in the total those of all layers.")
    return 0


def _cells(row: ShapeRow, style: str) -> tuple[str, ...]:
    """A row as text."""
    name = row.label
    if row.depth:
        name = name.rpartition(".")[2]
        name = f"- {name}" if style == "markdown" else f"    {name}"
    symbols = f"{' '.join(row.reads_symbols)} -> {' '.join(row.makes_symbols)}"
    numbers = f"{_sizes(row.reads)} -> {_sizes(row.makes)}"
    shapes = (symbols, numbers) if row.makes else ("", "")
    times = f"x {row.times}" if row.times > 1 else ""
    return name, times, *shapes, *_amounts(row.parameters, row.flops)


def _sizes(shapes: Sequence[Shape]) -> str:
    return " ".join(str(list(shape)) for shape in shapes)


def _amounts(*numbers: int) -> tuple[str, ...]:
    return tuple(human_count(number) if number else "" for number in numbers)


def _table(lines: Sequence[Sequence[str]], style: str) -> str:
    """Aligned columns, the last two to the right, or a table of Markdown."""
    if style == "markdown":
        bars = ("---",) * 4 + ("---:",) * 2
        return "\n".join(f"| {' | '.join(line)} |" for line in (SHAPE_COLUMNS, bars, *lines))
    return "\n".join(aligned([SHAPE_COLUMNS, *lines], right=(4, 5)))
