"""What "auto" stands for on the devices of a run: its attention kernel, its dtype, the loop over
its layers and its microbatches."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh

from jaxformer.arrays.hardware import DEVICES, name_of
from jaxformer.arrays.mesh import AnyMesh, batch_devices, check_experts, check_length
from jaxformer.arrays.sharding import platform
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import TrainConfig
from jaxformer.files import ConfigError
from jaxformer.layers import kernels
from jaxformer.layers.exchange import exchange_of
from jaxformer.layers.grouped import GROUPED_KERNELS, PREFERRED_KERNELS
from jaxformer.models.stack import compute_dtype, layer_loop_of

# On a CPU the activations of a microbatch take at most so many bytes of the host: a quarter of a
# laptop's. More microbatches are not faster: see docs/training.md.
CPU_ACTIVATIONS = 4e9


def with_kernel(
    model: ModelConfig,
    adapter: AdapterConfig,
    length: int,
    segments: int,
    mesh: AnyMesh,
    failed: Mapping[str, str] = {},
    failed_experts: Mapping[str, str] = {},
) -> tuple[ModelConfig, str]:
    """`model` with its attention kernel, its dtype and the loop over its layers selected for the
    devices of a mesh, and a sentence about the kernel.

    `length` divides the lengths of all rows, and `segments` is their highest segment id, 0 if they
    have none; `failed` and `failed_experts` have kernels of attention and of experts that are not
    selected automatically, and why.
    """
    if 0 < model.max_segments < segments:
        raise ConfigError(
            f"model.max_segments={model.max_segments} is below the {segments} texts of the fullest"
            " row: set it to 0, which takes the number from the data."
        )
    on = platform(mesh)
    dtype: Any = str(compute_dtype(model, on))
    shared = adapter.kind == "prefix" or (adapter.kind, model.family) == ("prompt", "decoder")
    prefix = adapter.tokens if shared else 0
    check_length(mesh, length)
    check_experts(mesh, model.n_experts if model.feed_forward == "experts" else 0)
    exchange = exchange_of(length, model.n_heads, mesh.shape)
    # Of GPUs; that of Hopper where it is not known. Only an attached device states its own.
    capability: tuple[int, ...] = kernels.HOPPER
    if on == "gpu":
        device: Any = (
            mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
        )
        stated = getattr(device, "compute_capability", None)
        name = name_of(device.device_kind)
        if stated:
            capability = tuple(int(number) for number in stated.split("."))
        elif name:
            capability = DEVICES[name].capability
    case = kernels.Case(
        on,
        dtype,
        length,
        segments,
        model,
        capability=capability,
        leading=prefix,
        exchange=exchange,
        context=mesh.shape["context"],
    )
    kernel: Any
    kernel, reason = attention_kernel(model.attention_kernel, case, failed)
    expert_kernel: Any = model.expert_kernel
    if model.feed_forward == "experts":
        expert_kernel, grouped = kernel_of_experts(expert_kernel, on, capability, failed_experts)
        reason = f"{reason}; experts: {grouped}"
    selected = dataclasses.replace(
        model,
        attention_kernel=kernel,
        expert_kernel=expert_kernel,
        dtype=dtype,
        layer_loop=layer_loop_of(model, on),
        max_segments=segments,
    )
    return selected, reason


def attention_kernel(
    asked: str, case: kernels.Case, failed: Mapping[str, str] = {}
) -> tuple[str, str]:
    """The name of the attention kernel for a training run, and a text that names and explains the
    choice. `failed` has kernels that "auto" passes over, and why."""
    if case.platform == "cpu" and case.model.attention_dropout_rate:
        reason = "on a CPU the dropout of attention weights is that of plain attention"
        failed = {"blocked": reason, **failed}
    order = kernels.PREFERRED.get(case.platform, ("xla",))
    rows = kernels.KERNELS
    setting = f"model.attention_kernel={asked!r}"
    return _chosen(setting, asked, rows, order, lambda name: rows[name].refuses(case), failed)


def kernel_of_experts(
    asked: str, on: str, capability: tuple[int, ...], failed: Mapping[str, str] = {}
) -> tuple[str, str]:
    """As `attention_kernel`, for the kernel of experts on a platform."""
    rows, order = GROUPED_KERNELS, PREFERRED_KERNELS[on]

    def refuses(name: str) -> str:
        return rows[name].refuses(on, capability)

    return _chosen(f"model.expert_kernel={asked!r}", asked, rows, order, refuses, failed)


def _chosen(
    setting: str,
    asked: str,
    rows: Mapping[str, Any],
    order: Sequence[str],
    refuses: Callable[[str], str],
    failed: Mapping[str, str],
) -> tuple[str, str]:
    if asked != "auto":
        reason = refuses(asked)
        if reason:
            able = ["auto", *(name for name in rows if not refuses(name))]
            raise ConfigError(
                f"{setting} cannot run here: {reason}. Choose {' or '.join(map(repr, able))}."
            )
        return asked, f"{asked} ({rows[asked].what}), as asked"
    passed = ""
    for name in order:
        reason = failed.get(name) or refuses(name)
        if not reason:
            return name, f"{name} ({rows[name].what}){passed}"
        passed += f"; not {name}: {reason}"
    raise ConfigError(f"{setting}: no kernel runs here{passed}.")


def microbatches_of(train: TrainConfig, row_bytes: float, mesh: AnyMesh) -> int:
    """train.microbatches, "auto" resolved for the devices of a mesh; a row of the batch has
    `row_bytes` of activations."""
    if train.microbatches != "auto" or platform(mesh) != "cpu":
        return train.n_microbatches
    # Rows of a device in all microbatches. Several devices of a CPU share the memory of one host.
    rows = train.batch_size // batch_devices(mesh)
    fewest = math.ceil(train.batch_size * row_bytes / CPU_ACTIVATIONS)
    return next((count for count in range(fewest, rows) if rows % count == 0), rows)
