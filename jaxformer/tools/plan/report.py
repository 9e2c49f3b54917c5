"""A plan as text for people, and as numbers for programs."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from jaxformer.arrays.mesh import check_split
from jaxformer.arrays.params import rows
from jaxformer.models.cost import count_text
from jaxformer.report import banner, human_bytes, human_time
from jaxformer.report.banner import INDENT, aligned
from jaxformer.runs.summary import model_text
from jaxformer.tools.plan.plan import Plan
from jaxformer.tools.plan.planned import PlannedRun
from jaxformer.training.compiler_options import compiler_options

WORDS = (
    "exact: follows from the settings; estimate: what a compiler is expected to need, which"
    " `--compile` asks it; bound: published peaks, with products, memory and links overlapped"
    " entirely. No speed is promised: a real step takes longer than its bound."
)
# How attention gets the keys and values of tokens that mesh.context has on other devices.
EXCHANGE_WORDS = {
    "heads": "devices of mesh.context exchange tokens for heads before attention, and back",
    "gather": "each device of mesh.context gathers the keys and values of all tokens",
    "ring": "keys and values pass around the devices of mesh.context",
}


def plan_text(plan: Plan, title: str) -> str:
    """The plan as text."""
    parts, flops = parameters_by_part(plan.planned), plan.products
    total = sum(parts.values())
    parameters = [
        (name, f"{size:,}", f"{size / total:.1%}")
        for name, size in [*parts.items(), ("all", total)]
    ]
    sections = [
        banner(_head(plan), title),
        _titled("Parameters (exact)", parameters, right=(1, 2)),
        memory_text(plan),
    ]
    if plan.changes:
        table = []
        for change in plan.changes:
            settings = " ".join(f"--{name} {value}" for name, value in change.settings.items())
            table.append((settings, human_bytes(change.peak)))
        sections.append(_titled("Smallest changes that fit (estimate)", table))
    elif plan.changes is not None:
        sections.append(
            "No change of mesh.fsdp, mesh.context, microbatches, remat and layer_loop fits: use"
            " more devices."
        )
    products = [
        ("of the model, a token", flops.per_token, "exact, forward and backward"),
        ("of the model, a step", flops.model, "exact"),
        ("recomputed", flops.recomputed, "estimate"),
        ("skipped, masked scores", flops.skipped, "estimate"),
    ]
    counted = []
    for name, number, word in products:
        if number:
            # `1.5 GFLOP`, `60.7 PFLOP`.
            power = min(max(math.floor(math.log10(number) / 3), 2), 5)
            amount = f"{number / 1000**power:,.4g} {'MGTP'[power - 2]}FLOP"
            counted.append((name, amount, word))
    sections.append(_titled("Products, over all devices", counted))
    title, least = "Least time (bound)", plan.bound
    if least.seconds is not None:
        counts_masked = ", which counts masked scores too," if flops.skipped else ""
        binding = {"memory": "memory traffic"}.get(least.binds, least.binds)
        steps = plan.planned.run.train.steps
        entries: dict[str, str | list[str]] = {
            "a step": [
                f"not faster than {human_time(least.seconds)}, which the {binding} take;"
                f" MFU{counts_masked} at most {plan.mfu or 0:.1%}",
                f"products {human_time(least.products or 0)}, memory traffic"
                f" {human_time(least.memory or 0)}, links {human_time(least.links or 0)}",
            ],
            f"{steps:,} steps": f"not faster than {human_time(steps * least.seconds)}",
        }
        sections.append(banner(entries, title))
    elif plan.planned.device.platform != "cpu":
        none = {"a step": "no bound, because no peak of this device is published"}
        sections.append(banner(none, title))
    sections.append(banner({"words": WORDS}, "How to read this"))
    return "\n\n".join(sections)


def _head(plan: Plan) -> dict[str, str | list[str]]:
    planned = plan.planned
    run, model, device = planned.run, planned.model, planned.device
    mesh = ", ".join(f"{name} {size}" for name, size in planned.mesh.shape.items())
    source = f" and sources of {planned.source_length:,}" if planned.source_length else ""
    pairs = f", both of {run.train.batch_size:,} pairs" if planned.of_pairs else ""
    exchange = [EXCHANGE_WORDS[planned.exchange]] if planned.context > 1 else []
    tokens = f", {planned.positions(planned.length):,} tokens of each" if exchange else ""
    microbatches = "microbatch" if run.train.n_microbatches == 1 else "microbatches"
    figures = ""
    if device.bfloat16 and device.memory and device.bandwidth and device.link:
        figures = (
            f": {device.bfloat16 / 1e12:.4g} TFLOP/s in bfloat16, {human_bytes(device.memory)} at"
            f" {device.bandwidth / 1e12:.3g} TB/s, links of {device.link / 1e9:.3g} GB/s one way"
        )
    head: dict[str, str | list[str]] = {
        "devices": f"{planned.mesh.size} x {planned.device_name}{figures}",
        "mesh": [mesh, *check_split(planned.specs, planned.mesh)],
        "model": model_text(model, count_text(planned.specs)),
        "attention": [planned.kernel, *exchange],
        "a step": (
            f"{planned.sequences:,} rows of {planned.length:,} tokens{source}{pairs},"
            f" {'with' if planned.packed else 'without'} segment ids, in"
            f" {run.train.n_microbatches} {microbatches}: {planned.rows:,} rows of a device at a"
            f" time{tokens}"
        ),
    }
    if options := compiler_options(planned.mesh):
        head["compiler"] = [f"{name}={value}" for name, value in options.items()]
    if planned.notes:
        head["assumed"] = list(planned.notes)
    return head


def parameters_by_part(planned: PlannedRun) -> dict[str, int]:
    """The number of parameters of each part of the model: embed, attention, cross, ffn, norms,
    head and so on; an encoder-decoder's encoder apart."""
    parts: dict[str, int] = {}
    for path, spec in rows(planned.specs).items():
        names = path.split(".")
        before = f"{names.pop(0)} " if names[0] == "encoder" else ""
        if names[0] == "blocks":
            names = [name for name in names[1:] if not name.isdigit()]
        part = before + ("norms" if names[0].endswith("norm") else names[0])
        parts[part] = parts.get(part, 0) + math.prod(spec.shape)
    return parts


def memory_text(plan: Plan) -> str:
    """What a device holds at its largest moment, and whether that fits."""
    memory = plan.memory
    lines = [*memory.held, *memory.stages[memory.largest]]
    table = [(line.name, human_bytes(line.bytes), str(line.certainty)) for line in lines]
    table.append(("peak", human_bytes(memory.peak), "estimate"))
    if memory.capacity is not None:
        verdict = "fits" if memory.fits else "does NOT fit"
        table.append(("capacity", human_bytes(memory.capacity), verdict))
    blocks = [_titled(f"Memory of a device, at its largest: {memory.largest}", table)]
    device_bytes = plan.planned.device.memory
    if device_bytes is not None and memory.capacity is not None and memory.capacity < device_bytes:
        share = f"{memory.capacity / device_bytes:.0%} of the {human_bytes(device_bytes)}"
        blocks.append(f"{INDENT}JAX takes {share} of a GPU; XLA_CLIENT_MEM_FRACTION changes that.")
    return "\n".join(blocks)


def _titled(title: str, table: Sequence[Sequence[str]], right: Collection[int] = (1,)) -> str:
    """A title and aligned columns, those numbered in `right` to the right."""
    return "\n".join([title, *(f"{INDENT}{line}" for line in aligned(table, right))])


def plan_numbers(plan: Plan) -> dict[str, Any]:
    """The plan as a dict for JSON: bytes, FLOPs and seconds, None where unknown."""
    planned, memory = plan.planned, plan.memory
    changes = None if plan.changes is None else [change._asdict() for change in plan.changes]
    return {
        "device": planned.device_name,
        "devices": planned.mesh.size,
        "mesh": dict(planned.mesh.shape),
        "attention": planned.kernel,
        "exchange": planned.exchange,
        "compiler_options": compiler_options(planned.mesh),
        "packed": planned.packed,
        "assumed": list(planned.notes),
        "parameters": parameters_by_part(planned),
        "memory": {
            "held": {line.name: line.bytes for line in memory.held},
            "stages": {
                name: {line.name: line.bytes for line in lines}
                for name, lines in memory.stages.items()
            },
            "largest": memory.largest,
            "temporary": memory.temporary,
            "peak": memory.peak,
            "capacity": memory.capacity,
            "fits": memory.fits,
        },
        "changes": changes,
        "flops": plan.products._asdict(),
        "bound": {
            **plan.bound._asdict(),
            "seconds": plan.bound.seconds,
            "binds": plan.bound.binds if plan.bound.seconds is not None else None,
            "mfu": plan.mfu,
        },
    }
