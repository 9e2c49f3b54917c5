"""The real train step of a run, compiled by the real compiler for devices that are not attached,
and what that compiler says of it.

The work is done in a process of its own, `python -m jaxformer.tools.plan.compiled`: libtpu reads
its environment when it is loaded, a compiler may end its process, and both write their warnings to
standard error.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxformer.arrays.hardware import GIB, Device
from jaxformer.arrays.mesh import bytes_of_device, mesh_of
from jaxformer.config.run import RunConfig, from_json, to_json
from jaxformer.files import ConfigError, write_text
from jaxformer.models.cost import flops_per_token
from jaxformer.runs.resolve import AbstractBatch, Resolved, resolve_without_data
from jaxformer.tools.plan.memory import capacity_of
from jaxformer.tools.plan.targets import Target, cudnn_of, parse_target, require_compiler

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Of the process that compiles: no device, the compiler's defaults and warnings, and no program from
# a cache, which would come without them.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "TF_CPP_MIN_LOG_LEVEL": "1",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
SIZE = r"([\d.]+)([KMGT]?)"
# What XLA's compiler for TPUs says of a program that is too large.
TOO_LARGE = re.compile(rf"Used {SIZE} of {SIZE} hbm|\({SIZE}\) exceeds available HBM \({SIZE}\)")
# A warning or error that the compiler logs; the group is its text.
LOGGED = re.compile(r"^[WE]\d{4} .*?\.cc:\d+\] (.*(?:remateriali|exceed|spill).*)$", re.MULTILINE)
# An instruction of an optimized program in which devices exchange arrays.
COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)
REFERENCE_APART = (
    "the parameters of the reference are in the memory that is needed; the program in which they"
    " score each batch was not compiled: its products and its time are not in these figures"
)


@dataclass(frozen=True)
class CompiledReport:
    """What a compiler says of one train step.

    `needed` and `capacity` are bytes of a device, the latter those that JAX takes of it. Where the
    compiler refuses a program that is too large, both are its own figures, and `memory`, `flops`,
    `bytes` and `collectives` are empty or 0.

    `memory` is `memory_analysis()` in bytes: `argument` is state and batch, of which `alias` is
    given over to the `output`; `temporary` is live at most at one time beside them, `code` the
    program, `peak` all together, `host` what the memory of the device's host keeps. `flops` and
    `bytes` are those of `cost_analysis()`, and `collectives` the instructions of each kind: in both
    the body of a loop counts once, however often it runs. `model_flops` are those of a step and
    device by `models.cost`, `seconds` those of lowering and compiling. `warnings` are the
    compiler's own; `notes` say what the figures leave out.
    """

    target: str
    device_kind: str
    mesh: dict[str, int]
    packed: bool
    dtype: str
    kernel: str
    fits: bool
    capacity: int
    needed: int
    memory: dict[str, int] = field(default_factory=dict)
    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[str, int] = field(default_factory=dict)
    model_flops: float = 0.0
    seconds: float = 0.0
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report for a terminal."""
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        on = f"{self.target} ({self.device_kind}, mesh {shape})"
        lines = [f"compiled for {on}: {self.dtype}, attention {self.kernel}"]
        fit = "fits" if self.fits else "does not fit"
        lines.append(
            f"{fit}: {self.needed / GIB:.2f} GiB of {self.capacity / GIB:.2f} GiB a device"
        )
        if self.memory:
            shown = {"arguments": "argument", "temporaries": "temporary", "peak": "peak"}
            if self.memory["host"]:
                shown["in the memory of the host"] = "host"
            lines += [
                ", ".join(f"{name} {self.memory[at] / GIB:.2f} GiB" for name, at in shown.items()),
                f"products a device and step: the model's are {self.model_flops / 1e12:.3f} TFLOP;"
                f" the compiler counts {self.flops / 1e12:.3f} TFLOP and {self.bytes / GIB:.1f} GiB"
                " of memory traffic, with the body of a loop once and kernels as nothing",
            ]
            numbers = ", ".join(f"{number} {kind}" for kind, number in self.collectives.items())
            once = "collectives in the program, with the body of a loop once"
            lines.append(f"{once}: {numbers or 'none'}")
        lines += self.notes
        lines += [f"the compiler warns: {line}" for line in self.warnings]
        return [
            *lines,
            f"compiled in {self.seconds:.1f} s; nothing was run and no tokens/s are promised",
        ]


def compiled_report(
    run: RunConfig, target: str | Target, packed: bool | None = None, *, hlo: str | Path = ""
) -> CompiledReport:
    """Compiles the train step of a run for a target, in a process of its own.

    Args:
      run: the settings; the mesh is run.mesh over the devices of the target.
      target: as "v5e:4x4" or "h100:1x8".
      packed: whether rows have segment ids; None: as the settings make them.
      hlo: a file to which the optimized program is written.
    """
    target = parse_target(target) if isinstance(target, str) else target
    require_compiler(target.platform)
    request = {"run": to_json(run), "target": str(target), "packed": packed, "hlo": str(hlo)}
    command = [sys.executable, "-m", "jaxformer.tools.plan.compiled"]
    environment = os.environ | ENVIRONMENT
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, env=environment
    )
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not answer.startswith("{"):
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise ConfigError(f"the compiler for {target} failed (status {done.returncode}):\n{tail}")
    record = json.loads(answer)
    if "error" in record:
        raise ConfigError(record["error"])
    warnings = dict.fromkeys(LOGGED.findall(done.stderr))
    return CompiledReport(**(record | {"warnings": [*warnings]}))


def compile_for_target(
    resolved: Resolved, batch: AbstractBatch, device: Device, target: str, hlo: str | Path = ""
) -> CompiledReport:
    """Compiles the step of a run, whose devices are of the kind `device`; the report calls them
    `target`."""
    mesh: Any = resolved.mesh
    found: dict[str, Any] = {}
    begin = time.perf_counter()
    lowered = resolved.step.lower(resolved.target, batch)
    capacity = round(capacity_of(device) or 0)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed, capacity = too_large(error)
    else:
        found["memory"] = memory_of(compiled.memory_analysis())
        needed = found["memory"]["peak"]
        costs = compiled.cost_analysis() or {}
        found["flops"] = costs.get("flops", 0.0)
        found["bytes"] = costs.get("bytes accessed", 0.0)
        text = compiled.as_text() or ""
        found["collectives"] = dict(Counter(COLLECTIVE.findall(text)).most_common())
        if hlo:
            write_text(Path(hlo), text)
    if resolved.has_reference:
        needed += bytes_of_device(resolved.target.params)
        found["notes"] = [REFERENCE_APART]
    return CompiledReport(
        target=target,
        device_kind=mesh.devices.flat[0].device_kind,
        mesh=dict(mesh.shape),
        packed="segment_ids" in batch,
        dtype=resolved.model.dtype,
        kernel=resolved.kernel,
        fits="memory" in found and (needed <= capacity or not capacity),
        capacity=capacity,
        needed=needed,
        model_flops=model_flops(resolved) / mesh.size,
        seconds=time.perf_counter() - begin,
        **found,
    )


def memory_of(stats: Any) -> dict[str, int]:
    """The bytes of a device in the answer of `memory_analysis()`, as in `CompiledReport`."""
    argument, output = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temporary = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    code = stats.generated_code_size_in_bytes
    # The compiler of TPUs says what is held at once, which is less than the sum of all.
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    if peak <= argument:
        peak = argument + output - alias + temporary + code
    return {
        "argument": argument,
        "output": output,
        "alias": alias,
        "temporary": temporary,
        "code": code,
        "peak": peak,
        "host": stats.host_temp_size_in_bytes,
    }


def model_flops(resolved: Resolved) -> float:
    """FLOPs of the model in the program of a step over all devices, as MFU counts them: without the
    forward pass of a reference that scores batches in a program of its own."""
    per_token = flops_per_token(
        resolved.model,
        resolved.length,
        resolved.source_length,
        resolved.counted_specs,
        resolved.objective.reference and not resolved.has_reference,
    )
    return float(per_token * resolved.tokens_per_step)


def too_large(error: Exception) -> tuple[int, int]:
    """(bytes needed, bytes available) from the message of a compiler that refused a program. Raises
    the error where it says something else."""
    match = TOO_LARGE.search(str(error))
    if match is None:
        raise error
    # The pattern has two forms, of which one matches: its groups are two sizes with their units.
    used, unit, available, available_unit = filter(lambda group: group is not None, match.groups())
    return round(float(used) * UNITS[unit]), round(float(available) * UNITS[available_unit])


def main() -> None:
    """Reads what to compile from standard input, and writes the report as one line of JSON."""
    request = json.loads(sys.stdin.read())
    try:
        run = from_json(request["run"], "the settings to compile")
        target = parse_target(request["target"])
        mesh = mesh_of(run.mesh.sizes, target.devices())
        with cudnn_of(target):
            resolved, batch = resolve_without_data(run, mesh, request["packed"])
            report = compile_for_target(resolved, batch, target.device, str(target), request["hlo"])
        answer = dataclasses.asdict(report)
    except ConfigError as error:
        answer = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        answer = {
            "error": f"the step does not compile for {request['target']}:"
            f" {type(error).__name__}: {first_line}"
        }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
