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
    parameters = 0
    flops = 0
    for row in rows:
        parameters += row.times * row.parameters
        if not row.depth:
            flops += row.times * row.flops
    if args.json:
        records = []
        for row in rows:
            record = row._asdict()
            record["reads_symbols"] = row.reads_symbols
            record["makes_symbols"] = row.makes_symbols
            records.append(record)
        print(json.dumps({"rows": records, "parameters": parameters, "flops": flops}, indent=1))
        return 0
    lines = [SHAPE_COLUMNS]
    used = set[str]()
    for row in rows:
        name = row.label
        times = ""
        symbols = ""
        numbers = ""
        if row.depth:
            name = f"    {name.rpartition('.')[2]}"
        if row.times > 1:
            times = f"x {row.times}"
        if row.makes:
            symbols = f"{' '.join(row.reads_symbols)} -> {' '.join(row.makes_symbols)}"
            numbers = f"{_sizes(row.reads)} -> {_sizes(row.makes)}"
        for shape in row.reads + row.makes:
            used |= {axis.symbol for axis in shape}
        lines.append((name, times, symbols, numbers, _amount(row.parameters), _amount(row.flops)))
    lines.append(("total", "", "", "", _amount(parameters), _amount(flops)))
    print("\n".join(aligned(lines, right=(4, 5))))
    legend = [f"{name} {meaning}" for name, meaning in SYMBOLS.items() if name in used]
    print(f"\n{', '.join(legend)}.")
    print("Parameters and FLOPs are those of one layer, and in the total those of all layers.")
    return 0


def _sizes(shapes: Sequence[Shape]) -> str:
    return " ".join(map(str, map(list, shapes)))


def _amount(number: int) -> str:
    if number:
        return human_count(number)
    return ""
