"""The real train step of a run, compiled by the real compiler for devices that are not attached,
TPU and GPU topologies by name, and what that compiler says of it.

The work is done in a process of its own, `python -m jaxformer.tools.plan_compiled`: libtpu reads
its environment when it is loaded, a compiler may end its process, and both write their warnings to
standard error.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxformer.arrays.hardware import GIB, Device, device_named
from jaxformer.arrays.mesh import bytes_of_device, mesh_of
from jaxformer.arrays.private_jax import private
from jaxformer.config.run import RunConfig, from_json, to_json
from jaxformer.files import ConfigError, write_text
from jaxformer.models.cost import flops_per_token
from jaxformer.runs.resolve import AbstractBatch, Resolved, resolve_without_data
from jaxformer.tools.plan_memory import capacity_of

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
COMPILER_WARNING = re.compile(
    r"^[WE]\d{4} .*?\.cc:\d+\] (.*(?:remateriali|exceed|spill).*)$", re.MULTILINE
)
# An instruction of an optimized program in which devices exchange arrays.
COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-permute"
    r"|collective-broadcast)(?:-start)?\("
)
REFERENCE_APART = (
    "the parameters of the reference are in the memory that is needed; the program in which they"
    " score each batch was not compiled: its products and its time are not in these figures"
)
# The versions that programs are compiled for.
CUDNN_VERSION = (9, 10)
CUDA_VERSION = (12, 9)
# TPU generations by the names of their topologies, and how many axes those have.
TPU_AXES = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}

# The environment that libtpu needs on a machine without a TPU: no metadata server, no lock file.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class GpuModel:
    """What XLA's GPU compiler reads of a device beside the figures of `hardware.DEVICES`.

    `fp32_units` and `shared` are the units and the bytes of shared memory of a multiprocessor, of
    which a block may take 1 KiB less; `l2_cache` is in bytes.
    """

    name: str
    fp32_units: int
    clock_ghz: float
    l2_cache: int
    shared: int

    def config_text(self, device: Device) -> str:
        """Return a GpuTargetConfigProto as text."""
        major, minor = device.capability
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: {48 * 1024}
              shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: 2048
              core_count: {device.cores}
              fpus_per_core: {self.fp32_units}
              block_dim_limit_x: {2**31 - 1}
              block_dim_limit_y: {2**16 - 1}
              block_dim_limit_z: {2**16 - 1}
              memory_bandwidth: {round(device.bandwidth or 0)}
              l2_cache_size: {self.l2_cache}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {device.memory}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: {CUDNN_VERSION[0]} minor: {CUDNN_VERSION[1]} }}
            runtime_version {{ major: {CUDA_VERSION[0]} minor: {CUDA_VERSION[1]} }}
            device_description_str: "{self.name}"
        """


# Units, clocks and caches: NVIDIA's white papers of the architectures (A100 tensor core GPU, H100
# tensor core GPU, Blackwell); shared memory and limits of blocks: CUDA C++ programming guide,
# "Technical specifications per compute capability".
GPU_MODELS = {
    "a100": GpuModel(
        name="NVIDIA A100-SXM4-80GB",
        fp32_units=64,
        clock_ghz=1.41,
        l2_cache=40 * 2**20,
        shared=164 * 1024,
    ),
    "h100": GpuModel(
        name="NVIDIA H100 80GB HBM3",
        fp32_units=128,
        clock_ghz=1.98,
        l2_cache=50 * 2**20,
        shared=228 * 1024,
    ),
    "b200": GpuModel(
        name="NVIDIA B200", fp32_units=128, clock_ghz=1.965, l2_cache=126 * 2**20, shared=228 * 1024
    ),
}
# The H200 differs from the H100 in its memory.
GPU_MODELS["h200"] = replace(GPU_MODELS["h100"], name="NVIDIA H200")


@dataclass(frozen=True)
class Target:
    """A topology: `kind` and the sizes of its axes, for a GPU (hosts, devices of a host)."""

    kind: str
    shape: tuple[int, ...]

    @property
    def platform(self) -> str:
        if self.kind in GPU_MODELS:
            return "gpu"
        return "tpu"

    @property
    def size(self) -> int:
        """The number of devices as JAX counts them: a TPU7x chip is two."""
        if self.kind == "tpu7x":
            return 2 * math.prod(self.shape)
        return math.prod(self.shape)

    @property
    def device(self) -> Device:
        """The published figures of one of its devices."""
        return device_named(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def devices(self) -> list[jax.Device]:
        """Return the devices of the topology, which programs can be compiled for and not run on."""
        require_compiler(self.platform)
        try:
            if self.platform == "gpu":
                hosts, of_host = self.shape
                config = GPU_MODELS[self.kind].config_text(self.device)
                described = topologies.get_topology_desc(
                    platform="cuda", target_config=config, topology=f"{hosts}x1x{of_host}"
                )
                return list(described.devices)
            for name, value in TPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            name = str(self)
            if {*self.shape} == {1}:
                # libtpu has no topology of one chip: it is the first of the smallest.
                name = f"{self.kind}:{'x'.join('221'[: len(self.shape)])}"
            options = {}
            if self.kind == "v4":
                # Both cores of a chip are one device, as they are when JAX runs on it.
                options["chip_config_name"] = "megacore"
            described = topologies.get_topology_desc(name, "tpu", **options)
            return list(described.devices)[: self.size]
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the compiler knows no topology {self}: {error}") from error


def parse_target(text: str) -> Target:
    """Return the target that "v5e:4x4" or "h100:1x8" names."""
    kind, _, shape = text.partition(":")
    axes = (TPU_AXES | dict.fromkeys(GPU_MODELS, 2)).get(kind, 0)
    if not re.fullmatch(r"[1-9]\d*" + r"x[1-9]\d*" * (axes - 1), shape, re.ASCII) or not axes:
        raise ConfigError(
            f"there is no target {text!r} to compile for: name one of"
            f" {', '.join([*GPU_MODELS, *TPU_AXES])} with its sizes, as in h100:1x8 (one host with"
            " eight GPUs), v5e:4x4 or v5p:2x2x4."
        )
    return Target(kind, tuple(map(int, shape.split("x"))))


def require_compiler(platform: str) -> None:
    """Raise ConfigError unless the wheel with the compiler for a platform is installed."""
    wheels = {"gpu": ("jax_plugins.xla_cuda12", "plan-gpu"), "tpu": ("libtpu", "plan-tpu")}
    # Or JAX would say something of a missing backend, and not what to install.
    module, extra = wheels[platform]
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The parent package is missing.
        is_installed = False
    if not is_installed:
        raise ConfigError(
            f"the compiler for a {platform} is not installed: pip install 'jaxformer[{extra}]'."
        )


@contextlib.contextmanager
def cudnn_of(target: Target) -> Iterator[None]:
    """State for the target what JAX reads of an attached GPU when cuDNN attention is lowered: the
    version of cuDNN, and the device's compute capability.

    JAX has no public way to state them, so three private functions are replaced meanwhile. This
    does not prove that cuDNN itself accepts the graph, nor how large its workspace is.
    """
    if target.platform != "gpu":
        yield
        return
    from unittest import mock

    def numbers(capability: str) -> tuple[int, ...]:
        return tuple(map(int, capability.split(".")))

    capability = target.device.capability
    answers: dict[str, Any] = {
        "check_cudnn_version": lambda: 10_000 * CUDNN_VERSION[0] + 100 * CUDNN_VERSION[1],
        "check_compute_capability": lambda required: capability >= numbers(required),
        "is_cuda_compute_capability_equal": lambda required: capability == numbers(required),
    }
    fused = private("cudnn.fused_attention_stablehlo", "plan --compile for a GPU")
    with mock.patch.multiple(fused, **answers):
        yield


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
        """Return the report for a terminal."""
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
    """Compile the train step of a run for a target, in a process of its own.

    Args:
      run: the settings; the mesh is run.mesh over the devices of the target.
      target: as "v5e:4x4" or "h100:1x8".
      packed: whether rows have segment ids; None: as the settings make them.
      hlo: a file to which the optimized program is written.
    """
    if isinstance(target, str):
        target = parse_target(target)
    require_compiler(target.platform)
    request = {"run": to_json(run), "target": str(target), "packed": packed, "hlo": str(hlo)}
    command = [sys.executable, "-m", "jaxformer.tools.plan_compiled"]
    # The process imports this very package, also from a checkout.
    environment = os.environ | ENVIRONMENT
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, env=environment
    )
    # Compilers may write to standard output as well: the answer is the last line.
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not answer.startswith("{"):
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise ConfigError(f"the compiler for {target} failed (status {done.returncode}):\n{tail}")
    record = json.loads(answer)
    if "error" in record:
        raise ConfigError(record["error"])
    warnings = dict.fromkeys(COMPILER_WARNING.findall(done.stderr))
    return CompiledReport(**(record | {"warnings": [*warnings]}))


def compile_for_target(
    resolved: Resolved, batch: AbstractBatch, device: Device, target: str, hlo: str | Path = ""
) -> CompiledReport:
    """Compile the step of a run, whose devices are of the kind `device`; the report calls them
    `target`."""
    mesh: Any = resolved.mesh
    figures: dict[str, Any] = {}
    begin = time.perf_counter()
    lowered = resolved.step.lower(resolved.target, resolved.with_teacher(batch))
    capacity = round(capacity_of(device) or 0)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # The compilers of TPUs refuse a program that does not fit; those of GPUs compile it.
        needed, capacity = too_large(error)
    else:
        figures["memory"] = memory_of(compiled.memory_analysis())
        needed = figures["memory"]["peak"]
        costs = compiled.cost_analysis() or {}
        figures["flops"] = costs.get("flops", 0.0)
        figures["bytes"] = costs.get("bytes accessed", 0.0)
        text = compiled.as_text() or ""
        figures["collectives"] = dict(Counter(COLLECTIVE.findall(text)).most_common())
        if hlo:
            write_text(Path(hlo), text)
    if resolved.has_reference:
        needed += bytes_of_device(resolved.target.params)
        figures["notes"] = [REFERENCE_APART]
    return CompiledReport(
        target=target,
        device_kind=mesh.devices.flat[0].device_kind,
        mesh=dict(mesh.shape),
        packed="segment_ids" in batch,
        dtype=resolved.model.dtype,
        kernel=resolved.kernel,
        fits="memory" in figures and (needed <= capacity or not capacity),
        capacity=capacity,
        needed=needed,
        model_flops=model_flops(resolved) / mesh.size,
        seconds=time.perf_counter() - begin,
        **figures,
    )


def memory_of(stats: Any) -> dict[str, int]:
    """Return the bytes of a device in the answer of `memory_analysis()`, as in `CompiledReport`."""
    argument = stats.argument_size_in_bytes
    output = stats.output_size_in_bytes
    alias = stats.alias_size_in_bytes
    temporary = stats.temp_size_in_bytes
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
    """Return FLOPs of the model in the program of a step over all devices, as MFU counts them:
    without the forward pass of a reference that scores batches in a program of its own."""
    reference = resolved.teacher
    if resolved.objective.reference and not resolved.has_reference:
        reference = resolved.model
    per_token = flops_per_token(
        resolved.model, resolved.length, resolved.source_length, resolved.counted_specs, reference
    )
    return float(per_token * resolved.tokens_per_step)


def too_large(error: Exception) -> tuple[int, int]:
    """Return (bytes needed, bytes available) from the message of a compiler that refused a program.
    Raises the error where it says something else."""
    match = TOO_LARGE.search(str(error))
    if match is None:
        raise error
    # The pattern has two forms, of which one matches: its groups are two sizes with their units.
    used, unit, available, available_unit = filter(lambda group: group is not None, match.groups())
    return round(float(used) * UNITS[unit]), round(float(available) * UNITS[available_unit])


def main() -> None:
    """Read what to compile from standard input, and write the report as one line of JSON."""
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
