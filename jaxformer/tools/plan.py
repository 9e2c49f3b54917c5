"""The plan of a run: what it needs of each device, the products of a step and the time below which
it cannot be done, and the smallest changes of settings with which it fits; as text for people, and
as numbers for programs."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxformer.arrays.mesh import check_split
from jaxformer.arrays.params import rows
from jaxformer.files import ConfigError
from jaxformer.layers.exchange import CONTEXT
from jaxformer.models.cost import count_text, score_flops, visible_pairs
from jaxformer.report import banner, human_bytes, human_time
from jaxformer.report.banner import INDENT, aligned
from jaxformer.runs.summary import model_text
from jaxformer.tools.plan_memory import (
    REFERENCE,
    MemoryPlan,
    PlannedRun,
    activations,
    gradient_bytes,
    matrix_elements,
    memory_plan,
    of_mesh,
    recomputed_names,
    replanned,
    tile_length,
)
from jaxformer.training.compiler_options import compiler_options

# Kernels that leave out the keys beyond a window; the others compute them and mask their scores.
WINDOWED_KERNELS = ("cudnn", "tpu", "ring")
MOST_CHANGES = 4
# Policies of model.remat from the one that recomputes least to the one that recomputes all.
REMAT_POLICIES = ("none", "dots", "names", "full")
CERTAINTIES_TEXT = (
    "exact: follows from the settings; estimate: what a compiler is expected to need, which"
    " `--compile` asks it; bound: published peaks, with products, memory and links overlapped"
    " entirely. No speed is promised: a real step takes longer than its bound."
)
# How attention gets the keys and values of tokens that mesh.context has on other devices.
EXCHANGE_TEXTS = {
    "heads": "devices of mesh.context exchange tokens for heads before attention, and back",
    "gather": "each device of mesh.context gathers the keys and values of all tokens",
    "ring": "keys and values pass around the devices of mesh.context",
}


class Products(NamedTuple):
    """FLOPs of a step over all devices: `model` as MFU counts them, `recomputed` what remat adds,
    and `skipped` the masked scores that a fused kernel does not compute. What every device computes
    because the mesh does not divide it counts once."""

    per_token: int
    model: float
    recomputed: float
    skipped: float

    @property
    def done(self) -> float:
        return self.model + self.recomputed - self.skipped


class Bound(NamedTuple):
    """Seconds of a step that the products, the memory traffic and the links of a device take at
    their published rates."""

    products: float
    memory: float
    links: float

    @property
    def seconds(self) -> float:
        """The least time of a step: the largest of the three, if they overlap entirely."""
        return max(self)

    @property
    def binds(self) -> str:
        """The name of the largest."""
        return self._fields[self.index(self.seconds)]


def skipped_flops(planned: PlannedRun) -> float:
    """Return FLOPs a token of the masked scores of self-attention that a fused kernel does not
    compute."""
    kernel = planned.model.attention.kernel
    if kernel in ("auto", "xla"):
        return 0.0
    total = 0.0
    for stack in planned.stacks:
        for layer in stack.layers:
            window = 0
            if kernel in WINDOWED_KERNELS:
                window = layer.window
            masked_pairs = stack.tokens**2 - visible_pairs(stack.tokens, window, stack.causal)
            for sublayer in stack.sublayers(layer).values():
                if not sublayer.reads_source:
                    # Forward once, backward twice: by the queries and by the keys.
                    total += 3 * sublayer.scores(layer, masked_pairs)
    return total / planned.length


def repeated_flops(planned: PlannedRun) -> float:
    """Return FLOPs a token of the products that the backward pass computes again: those that it
    reads and that are not stored."""
    model = planned.model
    recomputed = recomputed_names(planned)
    total = 0.0
    if planned.of_pairs and tile_length(planned) < planned.length:
        total += 2 * model.vocab_size * model.embedded_width
    for path, spec in rows(planned.specs).items():
        name = path.rpartition(".")[2]
        if spec.is_matrix and spec.is_stacked and name in recomputed:
            # 2 for each multiplication, of the share of experts that a token has.
            flops = 2 * spec.active * math.prod(spec.shape)
            if spec.reads == "source":
                flops *= planned.source_length / planned.length
            total += flops
    if "weights" in recomputed:
        total += score_flops(model, planned.length, planned.source_length) / 3
    return total


def traffic(planned: PlannedRun, memory: MemoryPlan) -> float:
    """Return the least bytes that a step moves between a device and its memory.

    The state is read and written once, and so is each gradient; a reference is read once. In every
    microbatch the matrices are read in the forward and in the backward pass, and what is stored is
    written and read.
    """
    held = {line.name: line.bytes for line in memory.held}
    del held["batch"]
    reference = held.pop(REFERENCE, 0)
    state = sum(held.values())
    # Gathered, since a product reads its whole matrix.
    matrices = matrix_elements(planned, gathered=True) * planned.dtype_bytes
    stored = sum(stack.stored for stack in activations(planned))
    pieces = planned.run.train.n_microbatches * (matrices + stored)
    return reference + 2 * (state + gradient_bytes(planned) + pieces)


def link_bytes(planned: PlannedRun) -> float:
    """Return the least bytes that a device sends in a step, as in rings (Patarasuk and Yuan 2009):
    the weights that fsdp and context divide are gathered in the forward and in the backward pass of
    every microbatch, and their gradients are scattered; the gradients are summed over data; and the
    output and the gradient of each sublayer over tensor. What context and expert exchange besides
    is not counted."""
    microbatches = planned.run.train.n_microbatches
    # The switches between GPUs can sum, so that a device sends its array once and not twice.
    summed = 2
    if planned.device.platform == "gpu":
        summed = 1
    # What a device gathers is what it has not.
    weights = matrix_elements(planned, gathered=True) - matrix_elements(planned)
    sent = 3 * microbatches * weights * planned.dtype_bytes
    gradients = gradient_bytes(planned) * planned.dtype_bytes / 4
    sent += summed * gradients * (1 - 1 / planned.size("data"))
    # Tensor parallelism sums the output of each sublayer, and its gradient.
    sublayers = 0
    for stack in planned.stacks:
        tokens = planned.rows * planned.positions(stack.tokens)
        for layer in stack.layers:
            sublayers += tokens * len(stack.sublayers(layer))
    streams = 2 * microbatches * sublayers * planned.model.d_model * planned.dtype_bytes
    return sent + summed * streams * (1 - 1 / planned.size("tensor"))


class Change(NamedTuple):
    """Settings by name with which the run fits, and the bytes that it then takes of a device."""

    settings: dict[str, Any]
    peak: float


@dataclass(frozen=True)
class Plan:
    """The figures of a run before it starts.

    bound: None where a rate of the device is unknown.
    mfu: the model FLOPs utilization of steps that take no longer than the bound; 0 without one.
        Masked scores count, so where a kernel skips them it can exceed 1.
    changes: the smallest changes of settings with which it fits; None where it fits as it is, or
        the device's memory is unknown.
    """

    planned: PlannedRun
    memory: MemoryPlan
    products: Products
    bound: Bound | None
    mfu: float
    changes: list[Change] | None


def make_plan(planned: PlannedRun) -> Plan:
    """Return the plan of a run. No array is made, and nothing is traced but the optimizer's
    state."""
    memory = memory_plan(planned)
    tokens = planned.tokens_per_step
    # Of the whole step, so that figures do not depend on the mesh.
    flops = Products(
        planned.flops_per_token,
        model=planned.flops_per_token * tokens,
        recomputed=repeated_flops(planned) * tokens,
        skipped=skipped_flops(planned) * tokens,
    )
    device = planned.device
    devices = planned.mesh.size
    peak = device.peak(planned.model.dtype)

    least = None
    mfu = 0.0
    if peak and device.bandwidth and device.link:
        links = 0.0
        if devices > 1:
            links = link_bytes(planned) / device.link
        moved = traffic(planned, memory)
        least = Bound(flops.done / devices / peak, moved / device.bandwidth, links)
        # By the model's products, as MFU is defined: recomputed ones are no use to the model.
        mfu = flops.model / least.seconds / (peak * devices)
    changes = None
    if memory.fits is False:
        changes = smallest_changes(planned)
    return Plan(planned, memory, flops, least, mfu, changes)


def smallest_changes(planned: PlannedRun) -> list[Change]:
    """Return up to `MOST_CHANGES` changes with which the run fits, those of one setting before
    those of several; of each combination of settings only the smallest. Empty where none fits."""
    train = planned.run.train
    model = planned.model
    devices = planned.size("data", "fsdp", CONTEXT)
    options: dict[str, list[Any]] = {
        "mesh.fsdp": _more(planned.size("fsdp"), devices),
        "train.microbatches": _more(train.n_microbatches, train.batch_size),
        "model.remat": [*REMAT_POLICIES[REMAT_POLICIES.index(model.remat) + 1 :]],
        "model.layer_loop": [loop for loop in ("unroll", "scan") if loop != model.layer_loop],
        # Divides the tokens of a row, and exchanges more than mesh.fsdp does.
        "mesh.context": _more(planned.context, devices),
    }
    # The run on each mesh, since the placement of its state takes longer than all else.
    placed: dict[tuple[Any, ...], PlannedRun] = {}
    # One setting first: what a user has to change is as little as possible.
    for number in range(1, len(options) + 1):
        changes: list[Change] = []
        for names in itertools.combinations(options, number):
            if {"mesh.fsdp", "mesh.context"} <= {*names}:
                continue  # mesh.context brings its mesh.fsdp
            for values in itertools.product(*(options[name] for name in names)):
                settings = dict(zip(names, values, strict=True))
                if "mesh.context" in settings:
                    # All devices divide the parameters, and may have more rows each.
                    settings = {"mesh.fsdp": devices // settings["mesh.context"]} | settings
                axes, others = of_mesh(settings)
                try:
                    if (key := tuple(axes.items())) not in placed:
                        placed[key] = replanned(planned, axes)
                    memory = memory_plan(replanned(placed[key], others))
                except ConfigError:
                    continue
                if memory.fits:
                    # Values ascend, so the first that fits is the smallest change.
                    changes.append(Change(settings, memory.peak))
                    break
        if changes:
            return changes[:MOST_CHANGES]
    return []


def _more(number: int, whole: int) -> list[int]:
    """Return the divisors of `whole` that are larger than a number."""
    sizes = np.arange(number + 1, whole + 1)
    return sizes[whole % sizes == 0].tolist()  # type: ignore[no-any-return]


def plan_text(plan: Plan, title: str) -> str:
    """Return the plan as text."""
    parts = parameters_by_part(plan.planned)
    flops = plan.products
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
    title = "Least time (bound)"
    least = plan.bound
    if least is not None:
        counts_masked = ""
        if flops.skipped:
            counts_masked = ", which counts masked scores too,"
        binding = {"memory": "memory traffic"}.get(least.binds, least.binds)
        steps = plan.planned.run.train.steps
        entries: dict[str, str | list[str]] = {
            "a step": [
                f"not faster than {human_time(least.seconds)}, which the {binding} take;"
                f" MFU{counts_masked} at most {plan.mfu:.1%}",
                f"products {human_time(least.products)}, memory traffic"
                f" {human_time(least.memory)}, links {human_time(least.links)}",
            ],
            f"{steps:,} steps": f"not faster than {human_time(steps * least.seconds)}",
        }
        sections.append(banner(entries, title))
    elif plan.planned.device.platform != "cpu":
        none = {"a step": "no bound, because no peak of this device is published"}
        sections.append(banner(none, title))
    sections.append(banner({"words": CERTAINTIES_TEXT}, "How to read this"))
    return "\n\n".join(sections)


def _head(plan: Plan) -> dict[str, str | list[str]]:
    planned = plan.planned
    run = planned.run
    model = planned.model
    device = planned.device
    mesh = ", ".join(f"{name} {size}" for name, size in planned.mesh.shape.items())
    rows_of_step = f"{planned.sequences:,} rows of {planned.length:,} tokens"
    if planned.source_length:
        rows_of_step += f" and sources of {planned.source_length:,}"
    if planned.of_pairs:
        rows_of_step += f", those of {run.train.batch_size:,} pairs"
    rows_of_step += ", with segment ids" if planned.packed else ", without segment ids"
    microbatches = "microbatches"
    if run.train.n_microbatches == 1:
        microbatches = "microbatch"
    of_device = f"{planned.rows:,} rows of a device at a time"
    attention = [planned.kernel]
    if planned.context > 1:
        attention.append(EXCHANGE_TEXTS[planned.exchange])
        of_device += f", {planned.positions(planned.length):,} tokens of each"
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
        "attention": attention,
        "a step": f"{rows_of_step}, in {run.train.n_microbatches} {microbatches}: {of_device}",
    }
    if options := compiler_options(planned.mesh, run.train.deterministic):
        head["compiler"] = [f"{name}={value}" for name, value in options.items()]
    if planned.notes:
        head["assumed"] = list(planned.notes)
    return head


def parameters_by_part(planned: PlannedRun) -> dict[str, int]:
    """Return the number of parameters of each part of the model: embed, attention, cross, ffn,
    norms, head and so on; an encoder-decoder's encoder apart."""
    parts: dict[str, int] = {}
    for path, spec in rows(planned.specs).items():
        names = iter(path.split("."))
        before = ""
        part = next(names)
        if part == "encoder":
            before = "encoder "
            part = next(names)
        while part == "blocks" or part.isdigit():
            part = next(names)
        if part.endswith("norm"):
            part = "norms"  # small and many: one line for all
        parts[before + part] = parts.get(before + part, 0) + math.prod(spec.shape)
    return parts


def memory_text(plan: Plan) -> str:
    """Return what a device holds at its largest moment, and whether that fits."""
    memory = plan.memory
    lines = [*memory.held, *memory.stages[memory.largest]]
    table = [(line.name, human_bytes(line.bytes), str(line.certainty)) for line in lines]
    table.append(("peak", human_bytes(memory.peak), "estimate"))
    device_bytes = plan.planned.device.memory
    if memory.capacity is not None:
        verdict = "does NOT fit"
        if memory.fits:
            verdict = "fits"
        table.append(("capacity", human_bytes(memory.capacity), verdict))
    blocks = [_titled(f"Memory of a device, at its largest: {memory.largest}", table)]
    if memory.capacity and device_bytes and memory.capacity < device_bytes:
        share = f"{memory.capacity / device_bytes:.0%} of the {human_bytes(device_bytes)}"
        blocks.append(f"{INDENT}JAX takes {share} of a GPU; XLA_CLIENT_MEM_FRACTION changes that.")
    return "\n".join(blocks)


def _titled(title: str, table: Sequence[Sequence[str]], right: Collection[int] = (1,)) -> str:
    """Return a title and aligned columns, those numbered in `right` to the right."""
    return "\n".join([title, *(f"{INDENT}{line}" for line in aligned(table, right))])


def plan_numbers(plan: Plan) -> dict[str, Any]:
    """Return the plan as a dict for JSON: bytes, FLOPs and seconds, None where unknown."""
    planned = plan.planned
    memory = plan.memory
    bound = None
    if plan.bound is not None:
        seconds = {"seconds": plan.bound.seconds, "binds": plan.bound.binds, "mfu": plan.mfu}
        bound = plan.bound._asdict() | seconds
    changes = None
    if plan.changes is not None:
        changes = [change._asdict() for change in plan.changes]
    return {
        "device": planned.device_name,
        "devices": planned.mesh.size,
        "mesh": dict(planned.mesh.shape),
        "attention": planned.kernel,
        "exchange": planned.exchange,
        "compiler_options": compiler_options(planned.mesh, planned.run.train.deterministic),
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
        "bound": bound,
    }
