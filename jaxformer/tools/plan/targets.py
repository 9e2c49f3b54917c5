"""Devices to compile for that are not attached: TPU and GPU topologies by name."""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import topologies

from jaxformer.arrays.hardware import Device, device_named
from jaxformer.files import ConfigError

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
        """A GpuTargetConfigProto as text."""
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
            dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
            runtime_version {{ major: {CUDA[0]} minor: {CUDA[1]} }}
            device_description_str: "{self.name}"
        """


# The versions that programs are compiled for.
CUDNN, CUDA = (9, 10), (12, 9)

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
        return "gpu" if self.kind in GPU_MODELS else "tpu"

    @property
    def size(self) -> int:
        """The number of devices as JAX counts them: a TPU7x chip is two."""
        return math.prod(self.shape) * (2 if self.kind == "tpu7x" else 1)

    @property
    def device(self) -> Device:
        """The published figures of one of its devices."""
        return device_named(self.kind)

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def devices(self) -> list[jax.Device]:
        """The devices of the topology, which programs can be compiled for and not run on."""
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
            # libtpu has no topology of one chip: it is the first of the smallest.
            smallest = f"{self.kind}:{'x'.join('221'[: len(self.shape)])}"
            name = smallest if set(self.shape) == {1} else str(self)
            # Both cores of a v4 chip are one device, as they are when JAX runs on it.
            options = {"chip_config_name": "megacore"} if self.kind == "v4" else {}
            described = topologies.get_topology_desc(name, "tpu", **options)
            return list(described.devices)[: self.size]
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the compiler knows no topology {self}: {error}") from error


def parse_target(text: str) -> Target:
    """The target that "v5e:4x4" or "h100:1x8" names."""
    kind, _, shape = text.partition(":")
    axes = 2 if kind in GPU_MODELS else TPU_AXES.get(kind, 0)
    sizes = shape.split("x")
    if not axes or len(sizes) != axes or not all(re.fullmatch("[1-9][0-9]*", s) for s in sizes):
        kinds = [*(f"{name}:HOSTSxGPUS" for name in GPU_MODELS)]
        kinds += [f"{name}:{'x'.join('ABC'[:n])}" for name, n in TPU_AXES.items()]
        raise ConfigError(
            f"there is no target {text!r} to compile for: name one of {', '.join(kinds)}, as in"
            " h100:1x8 (one host with eight GPUs) or v5e:4x4."
        )
    return Target(kind, tuple(map(int, sizes)))


def require_compiler(platform: str) -> None:
    """Raises ConfigError unless the wheel with the compiler for a platform is installed."""
    wheels = {"gpu": ("jax_plugins.xla_cuda12", "plan-gpu"), "tpu": ("libtpu", "plan-tpu")}
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
    """States for the target what JAX reads of an attached GPU when cuDNN attention is lowered: the
    version of cuDNN, and the device's compute capability.

    JAX has no public way to state them, so three private functions are replaced meanwhile. This
    does not prove that cuDNN itself accepts the graph, nor how large its workspace is.
    """
    if target.platform != "gpu":
        yield
        return
    from unittest import mock

    from jax._src.cudnn import fused_attention_stablehlo as fused

    def numbers(capability: str) -> tuple[int, ...]:
        return tuple(int(digits) for digits in capability.split("."))

    capability = target.device.capability
    answers: dict[str, Any] = {
        "check_cudnn_version": lambda: 10_000 * CUDNN[0] + 100 * CUDNN[1],
        "check_compute_capability": lambda asked: capability >= numbers(asked),
        "is_cuda_compute_capability_equal": lambda asked: capability == numbers(asked),
    }
    with mock.patch.multiple(fused, **answers):
        yield
