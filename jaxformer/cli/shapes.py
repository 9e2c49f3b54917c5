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
from jaxformer.tools.model_shapes import SYMBOLS, Shape, shapes_of

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
    if args.json:
        print(json.dumps({"rows": [row._asdict() for row in rows], **total}, indent=1))
        return 0
    lines = [SHAPE_COLUMNS]
    for row in rows:
        name = f"    {row.label.rpartition('.')[2]}" if row.depth else row.label
        times = f"x {row.times}" if row.times > 1 else ""
        symbols = ""
        numbers = ""
        if row.makes:
            symbols = f"{' '.join(row.reads_symbols)} -> {' '.join(row.makes_symbols)}"
            numbers = f"{_sizes(row.reads)} -> {_sizes(row.makes)}"
        amounts = _amount(row.parameters), _amount(row.flops)
        lines.append((name, times, symbols, numbers, *amounts))
    totals = _amount(total["parameters"]), _amount(total["flops"])
    lines.append(("total", "", "", "", *totals))
    print("\n".join(aligned(lines, right=(4, 5))))
    shapes = " ".join(shape for row in rows for shape in row.reads_symbols + row.makes_symbols)
    legend = [f"{name} {symbol.meaning}" for name, symbol in SYMBOLS.items() if name in shapes]
    print(f"\n{', '.join(legend)}.")
    print("Parameters and FLOPs are those of one layer, and in the total those of all layers.")
    return 0


def _sizes(shapes: Sequence[Shape]) -> str:
    return " ".join(str(list(shape)) for shape in shapes)


def _amount(number: int) -> str:
    if number:
        return human_count(number)
    return ""
