"""The real train step of a run, compiled by the real compiler for devices that are not here, and
what that compiler says of it.

The work is done in a process of its own, `python -m jaxformer.plan.compiled`: libtpu reads its
environment when it is loaded, a compiler may end its process, and both write their warnings to
standard error.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxformer.config import ConfigError, RunConfig
from jaxformer.config_json import from_json, to_json
from jaxformer.plan.targets import Target, cudnn_of, parse_target, require_compiler

GIB = 2**30
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)"
# What XLA's compiler for TPUs says of a program that is too large.
TOO_LARGE = re.compile(rf"Used {SIZE} of {SIZE} hbm|\({SIZE}\) exceeds available HBM \({SIZE}\)")
# A warning or error that the compiler logs; the group is what it says.
LOGGED = re.compile(r"^[WE]\d{4} .*?\.cc:\d+\] (.*(?:remateriali|exceed|spill).*)$", re.MULTILINE)
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device, by the compiler.

    `argument` is state and batch, of which `alias` is given over to the `output`; `temporary` is
    live at most at one time beside them, `code` the program. `peak` is the compiler's own figure of
    all together where it gives one, else their sum.
    """

    argument: int
    output: int
    alias: int
    temporary: int
    code: int
    peak: int


@dataclass(frozen=True)
class CompiledReport:
    """What a compiler says of one train step.

    Where the program does not fit, `needed` and `capacity` are the compiler's figures in bytes, and
    `memory` is None if it gave no program at all. `warnings` are the compiler's own lines.
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
    memory: MemoryUse | None = None
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The report for a terminal."""
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        on = f"{self.target} ({self.device_kind}, mesh {shape})"
        found = [f"compiled for {on}: {self.dtype}, attention {self.kernel}"]
        fit = "fits" if self.fits else "does not fit"
        found.append(
            f"{fit}: {self.needed / GIB:.2f} GiB needed a device, {self.capacity / GIB:.2f} there"
        )
        if m := self.memory:
            parts = {"arguments": m.argument, "temporaries": m.temporary, "peak": m.peak}
            found.append(", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items()))
        found += [f"the compiler warns: {line}" for line in self.warnings]
        return found


def compiled_report(
    run: RunConfig,
    target: str | Target,
    packed: bool | None = None,
    *,
    hlo: str | Path = "",
    timeout: float | None = None,
) -> CompiledReport:
    """Compiles the train step of a run for a target, in a process of its own.

    Args:
      run: the settings; the mesh is run.mesh over the devices of the target.
      target: as "v5e:4x4" or "h100:1x8".
      packed: whether rows have segment ids; None: as the settings make them.
      hlo: a file to which the optimized program is written.
      timeout: seconds after which the compiler is stopped.

    Raises:
      ConfigError: for settings that do not go together, a target that there is not, a compiler that
        is not installed, or one that fails.
    """
    target = parse_target(target) if isinstance(target, str) else target
    require_compiler(target.platform)
    asked = {"run": to_json(run), "target": str(target), "packed": packed, "hlo": str(hlo)}
    command = [sys.executable, "-m", "jaxformer.plan.compiled"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as stopped:
        raise ConfigError(f"compiling for {target} took more than {timeout:.0f} s.") from stopped
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not answer.startswith("{"):
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise ConfigError(f"the compiler for {target} failed (status {done.returncode}):\n{tail}")
    found = json.loads(answer)
    if "error" in found:
        raise ConfigError(found["error"])
    warnings = dict.fromkeys(LOGGED.findall(done.stderr))
    return report_of(found | {"warnings": tuple(warnings)})


def report_of(record: dict[str, Any]) -> CompiledReport:
    """The inverse of `CompiledReport.as_json`."""
    memory = record["memory"] and MemoryUse(**record["memory"])
    return CompiledReport(**(record | {"memory": memory, "warnings": tuple(record["warnings"])}))


def compile_here(
    run: RunConfig, target: Target, packed: bool | None = None, hlo: str = ""
) -> CompiledReport:
    """As `compiled_report`, in this process, whose standard error has the compiler's warnings."""
    import jax

    from jaxformer.mesh import make_mesh
    from jaxformer.plan.abstract import abstract_run, assumed_segments, with_kernel

    devices = target.devices()
    sizes = run.mesh
    mesh = make_mesh(sizes.data, sizes.fsdp, sizes.tensor, devices=devices)
    begin = time.perf_counter()
    with cudnn_of(target):
        step, state, batch = abstract_run(run, mesh, packed)
        has_segments = "segment_ids" in batch
        ready, kernel = with_kernel(run, assumed_segments(run, batch), target.platform)
        lowered = step.lower(state, batch)
        lowered_at = time.perf_counter()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if not (found := TOO_LARGE.search(str(error))):
                raise
            compiled = None
            used, unit, there, unit_there = (group for group in found.groups() if group is not None)
            needed, capacity = (
                round(float(size) * UNITS[of]) for size, of in ((used, unit), (there, unit_there))
            )
    compiled_at = time.perf_counter()
    memory = None
    if compiled is not None:
        memory = memory_of(compiled.memory_analysis())
        needed, capacity = memory.peak, target.memory
        if hlo:
            Path(hlo).write_text(compiled.as_text(), encoding="utf-8")
    return CompiledReport(
        target=str(target),
        device_kind=devices[0].device_kind,
        mesh=dict(mesh.shape),
        packed=has_segments,
        dtype=ready.model.dtype,
        kernel=kernel,
        fits=needed <= capacity and compiled is not None,
        capacity=capacity,
        needed=needed,
        memory=memory,
        lower_seconds=lowered_at - begin,
        compile_seconds=compiled_at - lowered_at,
        versions=versions(),
    )


def memory_of(stats: Any) -> MemoryUse:
    """The bytes of a device in the answer of `compiled.memory_analysis()`."""
    argument, output = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temporary = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    code = stats.generated_code_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    return MemoryUse(
        argument=argument,
        output=output,
        alias=alias,
        temporary=temporary,
        code=code,
        peak=max(peak, argument + output - alias + temporary + code),
    )


def versions() -> dict[str, str]:
    """The versions of what compiled, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Reads what to compile from standard input, and writes the report as one line of JSON."""
    asked = json.loads(sys.stdin.read())
    try:
        run = from_json(asked["run"], "the settings to compile")
        target = parse_target(asked["target"])
        answer = compile_here(run, target, asked["packed"], asked["hlo"]).as_json()
    except ConfigError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
