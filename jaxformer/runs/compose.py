"""The train step of a run with its state and batch as shapes: what can be lowered or compiled for
devices that are not here, without data and without an array."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxformer.arrays.mesh import (
    AnyMesh,
    batch_devices,
    batch_sharding,
    check_batch_size,
    parameter_sharding,
    undivided,
)
from jaxformer.arrays.params import Specs, rows
from jaxformer.arrays.sharding import platform
from jaxformer.config.format import human_bytes
from jaxformer.config.run import RunConfig
from jaxformer.config.train import TrainConfig
from jaxformer.data.templates import SEGMENTS
from jaxformer.files import ConfigError
from jaxformer.layers import kernels
from jaxformer.models.stack import compute_dtype
from jaxformer.models.transformer import specs as model_specs
from jaxformer.runs.objectives import OBJECTIVES, loss_of, objective_of, task_of
from jaxformer.training.optim import make_optimizer, make_schedule
from jaxformer.training.program import Step
from jaxformer.training.state import TrainState, abstract_state
from jaxformer.training.step import Loss, make_step

# A microbatch on a CPU has at least so many tokens of a device, since activations take memory in
# proportion. On two cores of an AMD EPYC a step of benchmarks/train_cpu.py (small, 4,096 tokens)
# has 1,176 tokens/s and 1.17 GB in 4 microbatches, 1,160 and 1.69 GB in 1, not run in turn.
CPU_TOKENS = 1024
ASSUMED_SEGMENTS = 16  # texts in a packed row, where the data is not read

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


class AbstractRun(NamedTuple):
    """`step.lower(state, batch)` is the program of a run's train step."""

    step: Step
    state: TrainState
    batch: AbstractBatch


def abstract_run(
    run: RunConfig, mesh: Mesh | AbstractMesh, packed: bool | None = None
) -> AbstractRun:
    """The step that a run would train with on the devices of a mesh, and its arguments.

    Args:
      run: the settings; model.vocab_size is known.
      mesh: devices, maybe of a topology, or an AbstractMesh with an `abstract_device`.
      packed: whether rows come with segment ids; None: as the run's objective and packing make
        them.

    Raises:
      ConfigError: for settings that a run refuses: rows that the mesh does not divide, a kernel
        that does not serve the run on this platform, an objective that the model cannot learn.
    """
    places: Any = mesh  # the functions below take an AbstractMesh too
    check_batch_size(places, run.train.batch_size, run.train.n_microbatches)
    batch = abstract_batch(run, mesh, packed)
    run, _ = with_kernel(run, assumed_segments(run, batch), mesh)
    specs = run_specs(run)
    schedule = make_schedule(run.optimizer, run.train.steps)
    optimizer = make_optimizer(run.optimizer, schedule, specs)
    step = step_of(run, task_of(run.model, run.data).name, optimizer, schedule)
    return AbstractRun(step, abstract_state(specs, optimizer, places), batch)


def step_of(
    run: RunConfig,
    objective: str,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
) -> Step:
    """The train step of a run whose dtype and attention kernel are selected."""
    return make_step(
        run_loss(run, objective),
        optimizer,
        microbatches=run.train.n_microbatches,
        seed=run.run.seed,
        schedules={"learning_rate": schedule},
        rowwise=is_rowwise(run, objective),
    )


def is_rowwise(run: RunConfig, objective: str) -> bool:
    """Whether the loss of a run is a sum over rows that do not read each other, nor its key."""
    dropout = run.model.dropout or run.adapter.dropout
    return OBJECTIVES[objective].rowwise and not (dropout and drops_out(run))


def drops_out(run: RunConfig) -> bool:
    """Whether the steps of a run apply the dropout of its model and its adapter."""
    objective = OBJECTIVES[objective_of(run.model, run.data)]
    return objective.dropout or run.train.preference_dropout == "on"


def run_specs(run: RunConfig, learned: tuple[str, ...] = ()) -> Specs:
    """The table of parameters of a run: with an adapter, that of the adapted model, in which only
    it is trainable, and the branches named in `learned`."""
    if run.adapter.kind == "none":
        return model_specs(run.model)
    from jaxformer.models.adapt import adapted_table

    return adapted_table(run.model, run.adapter, learned)


def counted_specs(run: RunConfig, learned: tuple[str, ...] = ()) -> Specs:
    """The table whose products a run computes: `run_specs`, with the unquantized weights in place
    of quantized ones."""
    adapter = dataclasses.replace(run.adapter, base="float32")
    return run_specs(dataclasses.replace(run, adapter=adapter), learned)


def run_loss(run: RunConfig, objective: str) -> Loss:
    """The loss that a run minimizes."""
    extras = {"label_smoothing": run.train.label_smoothing, "z_loss": run.train.z_loss}
    options = {name: value for name, value in extras.items() if value}
    return loss_of(objective, run.model, **options, **preference_options(run, objective))


def preference_options(run: RunConfig, objective: str) -> dict[str, Any]:
    """The options of the loss of preferences that a run does not leave at their defaults. With an
    adapter the reference is the model below it."""
    train, options = run.train, dict[str, Any]()
    if train.preference_beta:
        options["beta"] = train.preference_beta
    if train.preference_margin != TrainConfig.preference_margin:
        options["margin"] = train.preference_margin
    if train.preference_dropout != "auto":
        options["dropout"] = train.preference_dropout == "on"
    if OBJECTIVES[objective].reference and run.adapter.kind != "none":
        from jaxformer.adapters.adapted_params import without_adapters

        options["reference_of"] = without_adapters
    return options


def abstract_batch(
    run: RunConfig, mesh: Mesh | AbstractMesh, packed: bool | None = None
) -> AbstractBatch:
    """The global batch of a run as shapes, with rows over the batch axes of the mesh."""
    # Imported here, because a run with data does not need it.
    from jaxformer.data.batch_shapes import batch_shapes

    task = task_of(run.model, run.data)
    shapes = batch_shapes(task, run.data, run.train.batch_size)
    for name, array in SEGMENTS.items():
        if packed is True and array in shapes:
            shapes[name] = shapes[array]
        elif packed is False:
            shapes.pop(name, None)
    places: Any = mesh  # an AbstractMesh too
    of_rows = batch_sharding(places)
    batch = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=of_rows)
        for name, array in shapes.items()
    }
    return with_reference(batch, run, places)


def with_reference(batch: dict[str, Any], run: RunConfig, mesh: Mesh) -> dict[str, Any]:
    """A batch with the log-probabilities of the reference as shapes, where a run reads them."""
    if not compares_with_start(run):
        return batch
    from jaxformer.losses.preferences import REFERENCE_ARRAYS

    pairs = run.train.batch_size
    scores = jax.ShapeDtypeStruct((pairs,), np.float32, sharding=batch_sharding(mesh))
    return batch | dict.fromkeys(REFERENCE_ARRAYS, scores)


def compares_with_start(run: RunConfig) -> bool:
    """Whether the objective of a run compares the model with the one that it starts from, which
    has to be kept in memory because the run trains all of it."""
    objective = OBJECTIVES[objective_of(run.model, run.data)]
    return objective.reference and run.adapter.kind == "none"


def check_start(run: RunConfig) -> None:
    """Raises ConfigError where a run that compares the model with its start names none."""
    if compares_with_start(run) and not run.run.init_from:
        raise ConfigError(
            f"data.objective={run.data.objective} compares the model with the one that the run"
            " starts from, and run.init_from is empty: name a run directory or a Hugging Face model"
            " there, or choose orpo or simpo, which compare with none."
        )


def assumed_segments(run: RunConfig, batch: AbstractBatch) -> int:
    """The highest segment id of the rows of a batch, which only the data knows: 0 without ids, 1
    for padded rows, else `model.max_segments` or ASSUMED_SEGMENTS."""
    if "segment_ids" not in batch:
        return 0
    task = task_of(run.model, run.data)
    packs = run.data.packing != "stream" or (task.template is not None and task.template.packs)
    padded = task.name != "causal" and not packs
    return 1 if padded else run.model.max_segments or ASSUMED_SEGMENTS


def with_kernel(
    run: RunConfig, segments: int, mesh: Mesh | AbstractMesh | None = None
) -> tuple[RunConfig, str]:
    """`run` with its attention kernel, its dtype and its microbatches selected for the devices of a
    mesh (None: for one of JAX's default backend), without model.dropout where steps do not apply
    it; and a sentence about the kernel, which `prove_kernel` checks.

    `segments` is the highest segment id of its rows, 0 if they have none. Raises ConfigError if a
    kernel selected by name does not support the run, or model.max_segments is below that.
    """
    config = run.model if drops_out(run) else dataclasses.replace(run.model, dropout=0.0)
    if 0 < config.max_segments < segments:
        raise ConfigError(
            f"model.max_segments={config.max_segments} is below the {segments} texts of the fullest"
            " row: set it to 0, which takes the number from the data."
        )
    length = math.gcd(run.data.sequence_length, encoded_length(run, segments))
    on = platform(mesh)
    dtype: Any = str(compute_dtype(config, on))
    adapter = run.adapter
    shared = adapter.kind == "prefix" or (adapter.kind, config.family) == ("prompt", "decoder")
    prefix = adapter.tokens if shared else 0
    case = kernels.Case(on, dtype, length, segments, config, _capability(mesh), prefix)
    kernel: Any
    kernel, reason = kernels.choose(config.attention_kernel, case)
    model = dataclasses.replace(config, attention_kernel=kernel, dtype=dtype, max_segments=segments)
    train = dataclasses.replace(run.train, microbatches=_microbatches(run, mesh))
    return dataclasses.replace(run, model=model, train=train), reason


def _microbatches(run: RunConfig, mesh: Mesh | AbstractMesh | None) -> int:
    """train.microbatches, "auto" resolved for the devices of a mesh."""
    if run.train.microbatches != "auto" or platform(mesh) != "cpu":
        return run.train.n_microbatches
    places: Any = mesh
    batch, split = run.train.batch_size, 1 if mesh is None else batch_devices(places)
    sequences = OBJECTIVES[task_of(run.model, run.data).name].sequences
    tokens = sequences * (run.data.sequence_length + encoded_length(run, 1))
    # The fewest rows of a device in a microbatch.
    rows = math.ceil(CPU_TOKENS / tokens)
    for count in range(batch // (split * rows), 1, -1):
        if batch % (count * split) == 0:
            return count
    return 1


def encoded_length(run: RunConfig, segments: int) -> int:
    """Tokens of a row that an encoder below a decoder reads: the source, and before it a prompt for
    each of so many segments if the run learns one. 0 without such an encoder."""
    if run.model.family != "encoder_decoder":
        return 0
    source = run.data.source_length or run.data.sequence_length
    if run.adapter.kind != "prompt":
        return source
    return source + run.adapter.tokens * max(segments, 1)


def _capability(mesh: Mesh | AbstractMesh | None) -> tuple[int, ...]:
    """The compute capability of the GPUs of a mesh; that of Hopper where it is not known."""
    if platform(mesh) != "gpu":
        return kernels.HOPPER
    # Imported here, because runs on other platforms do not need it.
    from jaxformer.arrays.hardware import DEVICES, name_of

    device: Any
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
    else:
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    # Only an attached device states its capability.
    stated = getattr(device, "compute_capability", None)
    if stated:
        return tuple(int(number) for number in stated.split("."))
    name = name_of(device.device_kind)
    return DEVICES[name].capability if name else kernels.HOPPER


def check_split(specs: Specs, mesh: AnyMesh) -> list[str]:
    """A line for each parameter that the mesh should split but cannot, because none of its axes is
    divisible, with its bytes.

    Raises ConfigError where mesh.fsdp or mesh.tensor was given and splits no parameter at all.
    """
    used, undivided_axes = set[str](), dict[str, list[str]]()
    for path, spec in rows(specs).items():
        axes = undivided(mesh, spec.shape, spec.axes)
        if axes:
            undivided_axes[path] = axes
        for entry in parameter_sharding(mesh, spec.shape, spec.axes).spec:
            used |= {entry} if isinstance(entry, str) else {*(entry or ())}
    for name in ("fsdp", "tensor"):
        if mesh.shape[name] > 1 and name not in used:
            reasons = [f"{path}: {', '.join(axes)}" for path, axes in undivided_axes.items()]
            listed = "\n  ".join(reasons[:8])
            raise ConfigError(
                f"mesh.{name}={mesh.shape[name]} splits no parameter of this model, because it"
                " divides none of their axes; every device would hold all of them:\n"
                f"  {listed}\nChoose a mesh.{name} that divides them, or leave it at 1."
            )
    sizes = {path: human_bytes(4 * math.prod(spec.shape)) for path, spec in rows(specs).items()}
    return [
        f"{path}, {sizes[path]}, is not split along {', '.join(axes)}"
        for path, axes in undivided_axes.items()
    ]
