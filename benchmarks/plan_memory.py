"""Compares the memory that `jaxformer plan` estimates with what the compilers of TPUs and GPUs say
of the same steps. Nothing is run.

    python benchmarks/plan_memory.py [--rows gpt2 ...] [--table docs/plan.md]

Needs the extras plan-tpu and plan-gpu. Each step compiles in a process of its own, and is saved at
once in results/plan_memory.json; without --rows, only the steps that the file lacks compile.
--table writes the table between the marks `<!-- memory -->` and `<!-- /memory -->` of a Markdown
file. The bytes of each kind of collective are saved beside the memory.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections import Counter
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # compilers of other platforms are asked by name

import jax
from compiled import Row, saved
from hlo import count
from pairing import Answer, add_smoke, print_table, save, write_table

from jaxformer.arrays.hardware import DEVICES, GIB
from jaxformer.arrays.mesh import make_mesh
from jaxformer.files import ConfigError
from jaxformer.runs.resolve import resolve_without_data
from jaxformer.tools.plan import make_plan
from jaxformer.tools.plan_compiled import compile_for_target, compiled_report, parse_target
from jaxformer.tools.plan_memory import PlannedRun, planned_run

HEADER = ["step", "target", "settings", "compiled", "planned", "error"]
NAME = "plan_memory"


def step(config: str, target: str, rows: int, *settings: str, packed: bool | None = None) -> Row:
    """A step of a config on rows of its length; scanned and in one piece unless the settings say
    otherwise."""
    whole = ("model.layer_loop=scan", "train.microbatches=1", f"train.batch_size={rows}")
    return Row(config, config, target, (*whole, *settings), packed)


GPU, GPUS, SLICE = "h100:1x1", "h100:1x8", "v5e:2x2"
FULL, NAMES, UNROLLED = "model.remat=full", "model.remat=names", "model.layer_loop=unroll"
PLAIN = "model.dropout=0.0"
C4, C8 = "mesh.context=4", "mesh.context=8"


def long(length: int) -> tuple[str, str]:
    """Settings for rows of `length` tokens."""
    return f"model.max_length={length}", f"data.sequence_length={length}"


LONG, LONGER = long(8192), long(32_768)
E8 = "mesh.expert=8"
STEPS = {
    "gpt2": step("gpt2_124m", GPU, 64),
    "gpt2_packed": step("gpt2_124m", GPU, 64, packed=True),
    "gpt2_full": step("gpt2_124m", GPU, 64, FULL),
    "gpt2_names": step("gpt2_124m", GPU, 64, NAMES),
    "gpt2_unrolled": step("gpt2_124m", GPU, 64, UNROLLED),
    "gpt2_microbatches": step("gpt2_124m", GPU, 128, "train.microbatches=4"),
    "gpt2_data": step("gpt2_124m", GPUS, 256),
    "gpt2_data_microbatches": step("gpt2_124m", GPUS, 256, "train.microbatches=4"),
    "gpt2_data_fsdp": step("gpt2_124m", GPUS, 128, "mesh.fsdp=4", "train.microbatches=2"),
    "gpt2_tensor_full": step("gpt2_124m", "h100:1x4", 64, "mesh.tensor=4", FULL),
    "gpt2_fsdp_tensor": step("gpt2_124m", GPUS, 128, "mesh.fsdp=2", "mesh.tensor=2"),
    "gpt2_muon": step("gpt2_124m", GPU, 32, "optimizer.name=muon"),
    "gpt2_long": step("gpt2_124m", GPU, 8, *LONG),
    "llama_1b": step("llama_1b", GPU, 8),
    "llama_1b_packed": step("llama_1b", GPU, 8, packed=True),
    "llama_1b_full": step("llama_1b", GPU, 16, FULL),
    "llama_1b_names": step("llama_1b", GPU, 16, NAMES),
    "llama_1b_fsdp": step("llama_1b", GPUS, 64, "mesh.fsdp=8"),
    "llama_1b_fsdp_microbatches": step(
        "llama_1b", GPUS, 128, "mesh.fsdp=8", "train.microbatches=4", FULL
    ),
    "llama_1b_tensor": step("llama_1b", "h100:1x4", 32, "mesh.tensor=4"),
    "llama3_8b": step("llama3_8b", GPUS, 128, "mesh.fsdp=8", "train.microbatches=4", FULL),
    "llama3_8b_packed": step("llama3_8b", GPUS, 8, "mesh.fsdp=8", FULL, packed=True),
    "bert_base": step("bert_base", GPU, 64, PLAIN),
    "bert_base_full": step("bert_base", GPU, 128, PLAIN, FULL),
    "bert_base_dropout": step("bert_base", GPU, 64),
    "bert_base_data_dropout": step(
        "bert_base", GPUS, 256, "train.microbatches=2", "model.attention.dropout=auto"
    ),
    "bert_base_fsdp": step("bert_base", GPUS, 256, PLAIN, "mesh.fsdp=8"),
    "t5_small": step("t5_small", GPU, 128, PLAIN),
    "t5_small_full": step("t5_small", GPU, 128, PLAIN, FULL),
    "t5_small_tensor": step("t5_small", "h100:1x4", 64, PLAIN, "mesh.tensor=4"),
    "transformer_base": step("transformer_base", GPU, 56, PLAIN),
    "transformer_base_fsdp": step("transformer_base", GPUS, 128, PLAIN, "mesh.fsdp=4"),
    "gpt2_context": step("gpt2_124m", "h100:1x4", 8, C4, *LONG),
    "gpt2_context_ring": step("gpt2_124m", GPUS, 8, C8, *LONG),
    "gpt2_context_ring_full": step("gpt2_124m", GPUS, 1, C8, *long(65_536), FULL),
    "gpt2_fsdp_context_full": step("gpt2_124m", GPUS, 8, "mesh.fsdp=2", C4, FULL, *LONG),
    "gpt2_data_context": step("gpt2_124m", GPUS, 16, C4, "train.microbatches=2", *LONG),
    "llama_1b_context": step("llama_1b", GPUS, 1, C8, *LONGER),
    "llama_1b_context_packed": step("llama_1b", "h100:1x4", 1, C4, FULL, *LONGER, packed=True),
    "llama_1b_context_tensor": step("llama_1b", GPUS, 1, C4, "mesh.tensor=2", *LONGER),
    "llama_1b_fsdp_context": step("llama_1b", GPUS, 2, "mesh.fsdp=2", C4, FULL, *LONGER),
    "llama3_8b_context": step("llama3_8b", GPUS, 1, C8, FULL, *LONGER),
    "bert_base_context": step("bert_base", "h100:1x4", 32, PLAIN, C4, *long(2048)),
    "t5_small_context": step("t5_small", "h100:1x4", 64, PLAIN, C4),
    "transformer_base_context": step("transformer_base", "h100:1x4", 56, PLAIN, C4),
    "gpt2_data_unrolled": step("gpt2_124m", GPUS, 256, UNROLLED, "train.microbatches=2"),
    "gpt2_tensor_unrolled": step("gpt2_124m", "h100:1x4", 64, "mesh.tensor=4", UNROLLED),
    "gpt2_context_unrolled": step("gpt2_124m", "h100:1x4", 8, C4, UNROLLED, *LONG),
    "llama_1b_fsdp_unrolled": step("llama_1b", GPUS, 64, "mesh.fsdp=8", UNROLLED),
    "bert_base_unrolled": step("bert_base", GPU, 64, PLAIN, UNROLLED),
    "olmoe": step("olmoe_1b_7b", GPU, 4, "model.n_layers=2"),
    "olmoe_full": step("olmoe_1b_7b", GPU, 8, "model.n_layers=3", FULL),
    "olmoe_names": step("olmoe_1b_7b", GPU, 8, "model.n_layers=2", NAMES),
    "olmoe_fsdp": step("olmoe_1b_7b", GPUS, 16, "model.n_layers=8", "mesh.fsdp=8", FULL),
    "olmoe_expert": step("olmoe_1b_7b", GPUS, 16, "model.n_layers=4", E8),
    "olmoe_expert_capacity": step(
        "olmoe_1b_7b", GPUS, 16, "model.n_layers=8", E8, "model.experts.capacity=1.25"
    ),
    "olmoe_expert_fsdp": step(
        "olmoe_1b_7b", GPUS, 16, "model.n_layers=4", "mesh.expert=4", "mesh.fsdp=2", FULL
    ),
    "mixtral_expert": step("mixtral_8x7b", GPUS, 8, "model.n_layers=2", E8),
    "mixtral_expert_tensor": step(
        "mixtral_8x7b", GPUS, 8, "model.n_layers=2", "mesh.expert=4", "mesh.tensor=2", FULL
    ),
    "mixtral_data_expert": step("mixtral_8x7b", GPUS, 8, "model.n_layers=2", "mesh.expert=4", FULL),
    "v5e_gpt2": step("gpt2_124m", SLICE, 32, "mesh.fsdp=4"),
    "v5e_gpt2_full": step("gpt2_124m", SLICE, 64, "mesh.fsdp=4", FULL),
    "v5e_gpt2_packed": step("gpt2_124m", SLICE, 32, "mesh.fsdp=4", packed=True),
    "v5e_gpt2_tensor": step("gpt2_124m", SLICE, 32, "mesh.tensor=4"),
    "v5e_gpt2_data": step("gpt2_124m", SLICE, 32),
    "v5e_llama_1b": step("llama_1b", SLICE, 8, "mesh.fsdp=4"),
    "v5e_bert_base": step("bert_base", SLICE, 64, PLAIN, "mesh.fsdp=4"),
    "v5e_transformer_base": step("transformer_base", SLICE, 64, PLAIN, "mesh.fsdp=4"),
    "v5e_llama_1b_context": step("llama_1b", SLICE, 1, C4, *LONG),
    "v5e_llama3_8b": step("llama3_8b", "v5e:4x4", 16, "mesh.fsdp=16", FULL),
    "v5p_llama_1b": step("llama_1b", "v5p:2x2x1", 32, "mesh.fsdp=4"),
    "v5p_llama_1b_names": step("llama_1b", "v5p:2x2x1", 64, "mesh.fsdp=4", NAMES),
    "v5e_olmoe_expert": step(
        "olmoe_1b_7b", "v5e:4x4", 16, "model.n_layers=4", "mesh.expert=16", FULL
    ),
    "v6e_gpt2": step("gpt2_124m", "v6e:2x2", 64, "mesh.fsdp=4"),
}


def measure(row: Row) -> Answer:
    """What the compiler says of a step: bytes of a device, and those of each kind of collective; or
    an "error" in their place."""
    found: Answer = {"config": row.config, "target": row.target, "settings": [*row.settings]}
    found["packed"] = row.packed
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.hlo")
        try:
            report = compiled_report(row.run(), row.target, row.packed, hlo=path)
        except ConfigError as error:
            return found | {"error": str(error)}
        found |= {"needed": report.needed, "kernel": report.kernel}
        if report.memory:
            found |= {"memory": report.memory, "collectives": sums_by_group(path.read_text())}
    return found


def sums_by_group(program: str) -> list[tuple[str, int, int]]:
    """(kind, devices of a group, bytes) of all collectives of a step; 0 devices where the group is
    that of all, and for a collective-permute."""
    found: Counter[tuple[str, int]] = Counter()
    for entry in count(program).collectives:
        found[entry.kind, entry.group] += entry.count * entry.bytes
    return [(kind, devices, size) for (kind, devices), size in sorted(found.items())]


def planned_step(result: Answer) -> PlannedRun:
    """The plan of a step of the results."""
    target = parse_target(result["target"])
    row = Row("", result["config"], result["target"], tuple(result["settings"]))
    return planned_run(row.run(), target.kind, target.size, result["packed"])


def planned_peak(result: Answer) -> float:
    """The bytes of a device that the plan estimates for a step of the results."""
    return make_plan(planned_step(result)).memory.peak


def compared(rows: dict[str, Answer]) -> dict[str, tuple[float, float]]:
    """(compiled, planned) bytes of a device for each step that compiled."""
    done = {name: result for name, result in rows.items() if "needed" in result}
    return {name: (result["needed"], planned_peak(result)) for name, result in done.items()}


def error_of(compiled: float, planned: float) -> str:
    return f"{planned / compiled - 1:+.1%}"


def step_of(result: Answer) -> list[str]:
    """The columns that say which step it is."""
    hidden = ("model.layer_loop=scan", "train.microbatches=1")
    settings = [text for text in result["settings"] if text not in hidden]
    settings += ["packed"] * bool(result["packed"])
    return [result["config"], result["target"], " ".join(settings)]


def table_of(rows: dict[str, Answer]) -> list[list[str]]:
    found = []
    for name, sizes in compared(rows).items():
        shown = [f"{size / GIB:.2f} GiB" for size in sizes]
        found.append([*step_of(rows[name]), *shown, error_of(*sizes)])
    return found


def smoke() -> list[str]:
    """A row of the table for a small step that is compiled for this CPU."""
    sizes = ("model.d_model=32", "model.n_layers=2", "model.n_heads=2")
    tiny = step("quickstart", "cpu", 4, *sizes)
    resolved, batch = resolve_without_data(tiny.run(), make_mesh(devices=jax.devices()[:1]))
    compiled = compile_for_target(resolved, batch, DEVICES["cpu"], "cpu").needed
    peak = make_plan(planned_run(tiny.run(), "cpu")).memory.peak
    sizes_shown = [f"{size / 2**20:.1f} MiB" for size in (compiled, peak)]
    return ["tiny", "cpu", "", *sizes_shown, error_of(compiled, peak)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="*", choices=STEPS, metavar="ROW")
    parser.add_argument("--table", type=Path, help="a Markdown file that gets the table")
    add_smoke(parser)
    options = parser.parse_args()
    rows = saved(NAME)
    if options.smoke:
        print_table(HEADER, [smoke()])
        save(NAME, {}, smoke=True)
        return
    missing = [name for name in STEPS if "needed" not in rows.get(name, {})]
    for name in missing if options.rows is None else options.rows:
        rows[name] = measure(STEPS[name])
        save(NAME, {"rows": rows}, smoke=False)
        print(
            f"{name}: {json.dumps(rows[name].get('needed', rows[name].get('error')))}", flush=True
        )
    errors = [planned / compiled - 1 for compiled, planned in compared(rows).values()]
    sentence = (
        f"{len(errors)} steps: median error {statistics.median(map(abs, errors)):.1%}, from"
        f" {min(errors):+.1%} to {max(errors):+.1%}."
    )
    print_table(HEADER, table_of(rows))
    print(sentence)
    if options.table:
        write_table(options.table, "memory", HEADER, table_of(rows), sentence)


if __name__ == "__main__":
    main()
