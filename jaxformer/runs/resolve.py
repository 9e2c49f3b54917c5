"""The settings of a run on its devices: `resolve` makes every setting the value that it is, and the
functions below take values. What "auto" stands for depends on the devices: kernels, the dtype, the
loop over the layers and the microbatches."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh

from jaxformer.arrays.hardware import DEVICES, name_of
from jaxformer.arrays.mesh import (
    SHARED_ENTRY,
    AnyMesh,
    batch_devices,
    batch_sharding,
    check_batch_size,
    check_experts,
    check_length,
    placement,
)
from jaxformer.arrays.params import Spec, Specs, map_specs
from jaxformer.arrays.sharding import platform
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.config.settings import parts_of, with_settings
from jaxformer.config.train import TrainConfig
from jaxformer.data.batches import invented_row
from jaxformer.data.rows import SEGMENTS
from jaxformer.data.task import Task
from jaxformer.files import ConfigError
from jaxformer.layers import kernels
from jaxformer.layers.exchange import exchange_of
from jaxformer.layers.grouped import GROUPED_KERNELS, PREFERRED_KERNELS
from jaxformer.losses.heads import Distillation, head_loss
from jaxformer.models.cost import activation_bytes, flops_per_token
from jaxformer.models.stack import compute_dtype, layer_loop_of
from jaxformer.models.transformer import specs as model_specs
from jaxformer.runs.objectives import OBJECTIVES, Objective, loss_of, objective_specs, task_of
from jaxformer.training.optimizers.run_optimizer import make_optimizer, with_average
from jaxformer.training.optimizers.schedules import make_schedule
from jaxformer.training.program import Step
from jaxformer.training.spikes import skip_spikes
from jaxformer.training.state import TrainState, abstract_state
from jaxformer.training.step import Loss, make_step

# The settings of train that losses take as options; a loss may lack one that is at its default.
LOSS_SETTINGS = ("label_smoothing", "z_loss", "logits_dtype", "products")
# The same of the losses of pairs, with the names of their options.
PAIR_SETTINGS = {
    "preference_beta": "beta",
    "preference_margin": "margin",
    "preference_desirable": "desirable",
    "preference_undesirable": "undesirable",
    "contrastive_temperature": "temperature",
    "contrastive_widths": "widths",
}
ASSUMED_SEGMENTS = 16  # texts in a packed row, where the data is not read
ASSUMED_CLASSES = 2  # of a head, where the data is not read
AbstractBatch = dict[str, jax.ShapeDtypeStruct]
# On a CPU the activations of a microbatch take at most so many bytes of the host: a quarter of a
# laptop's. More microbatches are not faster: see docs/training.md.
CPU_ACTIVATIONS = 4e9


@dataclass(frozen=True)
class Resolved:
    """A run on devices, of which nothing is automatic any more.

    Attributes:
      run: the settings with every automatic choice made: the vocabulary, classes, dtype, attention
        kernel, loop over the layers, microbatches, segments of a row, and no dropout of the model
        where steps apply none.
      asked: the settings before these choices, with the sizes that the data has: what config.json
        holds.
      mesh: its devices, which need not be attached.
      task: how its rows are made.
      kernel: a sentence about the attention kernel, which `kernel_check` proves.
      learned: the branches of the model below an adapter that learn with it.
      added: the ids of the tokens that the run adds, whose rows learn with an adapter.
      sources: the names of the sources of its text, where there are several and the loss tells them
        apart.
      notes: a sentence for each thing that is assumed because the data is not read.
      teacher: the model of distill.teacher on these devices, None without one.
    """

    run: RunConfig
    asked: RunConfig
    mesh: AnyMesh
    task: Task
    kernel: str
    learned: tuple[str, ...] = ()
    added: range = range(0)
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    teacher: ModelConfig | None = None

    def fields(self) -> dict[str, Any]:
        """Its fields by name, to make a record that has more of them."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}

    @property
    def model(self) -> ModelConfig:
        return self.run.model

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[self.task.name]

    @property
    def has_reference(self) -> bool:
        """Whether the devices also keep the parameters that the run starts from."""
        return keeps_start(self.objective, self.run)

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.run.data.sequence_length

    @property
    def source_length(self) -> int:
        """Tokens of a row of sources, with a prompt before them; 0 where the model reads none."""
        run = self.run
        return encoded_length(run.model, run.data, run.adapter, run.model.attention.max_segments)

    @property
    def sequences(self) -> int:
        """Sequences of the model in a step: a row of the batch is one, or the two of a pair and
        its negatives."""
        of_row = self.objective.sequences + self.run.data.n_negatives
        return self.run.train.batch_size * of_row

    @property
    def tokens_per_step(self) -> int:
        return self.sequences * self.length

    @functools.cached_property
    def specs(self) -> Specs:
        """Its table of parameters. With an adapter only this, `learned` and `added` are trainable
        in it."""
        return run_specs(
            self.task.name, self.asked.model, self.asked.adapter, self.learned, self.added
        )

    @functools.cached_property
    def schedule(self) -> optax.Schedule:
        """The learning rate by step."""
        return make_schedule(self.run.optimizer, self.run.train.steps)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        train = self.run.train
        rule = make_optimizer(self.run.optimizer, self.schedule, self.specs, self.run.run.seed)
        rule = with_average(rule, train.ema, train.average_from)
        if train.spike_factor:
            rule = skip_spikes(rule, train.spike_factor)
        return rule

    @functools.cached_property
    def counted_specs(self) -> Specs:
        """The table whose products a step computes: `specs`, with the unquantized weights in place
        of quantized ones."""
        unquantized = dataclasses.replace(self.run.adapter, base="float32")
        return run_specs(self.task.name, self.model, unquantized, self.learned, self.added)

    @functools.cached_property
    def flops_per_token(self) -> int:
        """FLOPs of a step for each of its tokens, those of a reference or a teacher included."""
        reference = self.teacher
        if self.objective.reference or self.run.grpo.kl:
            reference = self.model
        return flops_per_token(
            self.model, self.length, self.source_length, self.counted_specs, reference
        )

    @property
    def target(self) -> TrainState:
        """The train state as shapes and shardings."""
        return abstract_state(self.specs, self.optimizer, self.mesh)

    @property
    def loss_options(self) -> dict[str, Any]:
        """The options of `loss_of` with which a run is evaluated."""
        options = preference_options(self.objective, self.run.train, self.run.adapter)
        if self.teacher is not None:
            distill = self.run.distill
            options["distill"] = Distillation(self.teacher, distill.temperature, distill.share)
        if self.objective.writes:
            options["grpo"] = self.run.grpo
        return options

    def with_scores(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of the data as a step reads it, with shapes of what is computed before: the
        scores of a reference, or the answers to its prompts."""
        # Imported here, because only preferences need it.
        from jaxformer.losses.pairs import REFERENCE_ARRAYS

        def shape_of(dtype: Any, *length: int) -> jax.ShapeDtypeStruct:
            sizes = (self.run.train.batch_size, *length)
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=batch_sharding(self.mesh))

        of_rows = shape_of(jnp.float32)
        if not self.objective.writes:
            names = REFERENCE_ARRAYS if self.has_reference else ()
            return {**batch, **dict.fromkeys(names, of_rows)}
        ids = shape_of(jnp.int32, self.length)
        shapes = dict.fromkeys(("tokens", "targets", "segment_ids"), ids)
        shapes |= dict.fromkeys(("advantages", "rewards", "mismatch"), of_rows)
        of_tokens = shape_of(jnp.float32, self.length)
        shapes |= dict.fromkeys(("weights", "sampled_log_probs"), of_tokens)
        if self.run.grpo.kl:
            shapes["reference_log_probs"] = of_tokens
        return shapes

    def with_teacher(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch with the parameters of the teacher, where there is one, as shapes."""
        if self.teacher is None:
            return {**batch}

        def shape_of(_: str, spec: Spec) -> jax.ShapeDtypeStruct:
            sharding = placement(self.mesh, spec.shape, spec.axes)
            return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=sharding)

        return {**batch, SHARED_ENTRY: map_specs(shape_of, model_specs(self.teacher))}

    @property
    def loss(self) -> Loss:
        """What the run minimizes."""
        train = self.run.train
        options = self.loss_options
        for name in LOSS_SETTINGS:
            value = getattr(train, name)
            if value != getattr(TrainConfig, name):
                options[name] = value
        if self.sources:
            options["sources"] = self.sources
        return loss_of(self.task.name, self.model, **options)

    @property
    def is_rowwise(self) -> bool:
        """Whether the loss is a sum over rows that do not read each other, nor its key."""
        # The balance of experts, and what of theirs is dropped, is that of all rows.
        models = [self.model, self.teacher or self.model]
        if any(model.feed_forward == "experts" for model in models):
            return False
        if self.objective.dropout and (self.model.has_dropout or self.run.adapter.dropout):
            return False
        return self.objective.rowwise

    @property
    def step(self) -> Step:
        """The train step; `step.lower(target, batch)` is its program."""
        train = self.run.train
        return make_step(
            self.loss,
            self.optimizer,
            microbatches=train.n_microbatches,
            seed=self.run.run.seed,
            schedules={"learning_rate": self.schedule},
            rowwise=self.is_rowwise,
            deterministic=train.deterministic,
        )


def with_sizes(
    model: ModelConfig, vocab_size: int, labels: tuple[str, ...], origin: str
) -> ModelConfig:
    """`model` with the sizes of its data where these are 0: the vocabulary, and the number of
    classes."""
    model = dataclasses.replace(model, vocab_size=model.vocab_size or vocab_size)
    if model.output not in ("classes", "tags"):
        return model
    if len(labels) < 2:
        raise ConfigError(
            f"the data has {len(labels)} label, but a classifier needs at least 2: check"
            " data.label_field."
        )
    if model.head.n_classes == 0:
        return with_settings(model, {"head.n_classes": len(labels)})
    if model.head.n_classes < len(labels):
        raise ConfigError(
            f"model.head.n_classes={model.head.n_classes} is less than the {len(labels)} labels of"
            f" {origin}: set it to 0, which uses their number."
        )
    return model


def with_assumed_sizes(model: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """`model` with the sizes that otherwise come from the data, and a sentence about each."""
    if not model.vocab_size:
        raise ConfigError(
            "model.vocab_size=0, and the size of this tokenizer is not known before its data is"
            " read: give it, as in --model.vocab_size 32000."
        )
    if model.output not in ("classes", "tags") or model.head.n_classes:
        return model, ()
    note = f"{ASSUMED_CLASSES} classes are assumed; the data says how many there are"
    return with_settings(model, {"head.n_classes": ASSUMED_CLASSES}), (note,)


def resolve(run: RunConfig, mesh: AnyMesh, segments: int) -> Resolved:
    """A run whose sizes are known, on the devices of a mesh.

    Args:
      run: the settings, with the sizes of `with_sizes`.
      mesh: devices, maybe of a topology, or an AbstractMesh with an `abstract_device`.
      segments: the highest segment id of its rows, 0 if they have none.

    Raises:
      ConfigError: for settings that a run refuses: rows that the mesh does not divide, a kernel
        that does not serve the run on this platform, an objective that the model cannot learn.
    """
    check_batch_size(mesh, run.train.batch_size, run.train.n_microbatches)
    experts = 0
    if run.model.feed_forward == "experts":
        experts = run.model.experts.n
    check_experts(mesh, experts)
    task = task_of(run.model, run.data)
    objective = OBJECTIVES[task.name]
    source_length = encoded_length(run.model, run.data, run.adapter, segments)
    model = run.model
    if not objective.dropout:
        # Nothing below has to ask whether the objective applies the rates.
        model = with_settings(model, {"dropout": 0.0, "attention.dropout": 0.0})
    # The kernel serves rows of targets and of sources alike.
    length = math.gcd(run.data.sequence_length, source_length)
    check_length(mesh, length)
    model, kernel = with_kernel(model, run.adapter, length, segments, mesh)
    row_bytes = activation_bytes(model, run.data.sequence_length, source_length)
    pieces = microbatches_of(run.train, objective.sequences * row_bytes, mesh)
    if not objective.rowwise:
        # Each row is compared with those of its microbatch, so their number is no matter of memory.
        pieces = run.train.n_microbatches
    train = dataclasses.replace(run.train, microbatches=pieces)
    teacher = None
    if run.distill.teacher:
        teacher = teacher_of(run, objective)
        teacher, _ = with_kernel(teacher, AdapterConfig(), length, segments, mesh)
    return Resolved(
        run=dataclasses.replace(run, model=model, train=train),
        asked=run,
        mesh=mesh,
        task=task,
        kernel=kernel,
        teacher=teacher,
    )


def teacher_of(run: RunConfig, objective: Objective) -> ModelConfig:
    """The model of distill.teacher, in the dtype of the run and without dropout. Raises ConfigError
    where it cannot teach the model of the run."""
    # Imported here, because only such a run reads the files of a second model.
    from jaxformer.runs.model_files import ModelFiles

    named = f"distill.teacher={run.distill.teacher!r}"
    if objective.loss is not head_loss:
        able = ", ".join(name for name, row in OBJECTIVES.items() if row.loss is head_loss)
        raise ConfigError(
            f"{named} gives probabilities to the cross-entropy of a head, which"
            f" data.objective={run.data.objective} has not: set it to one of {able}, or leave the"
            " teacher out."
        )
    teacher = ModelFiles(run.distill.teacher, weights=False).config
    for setting in ("family", "output"):
        kind = getattr(teacher, setting)
        if kind != getattr(run.model, setting):
            raise ConfigError(
                f"{named} has model.{setting.replace('output', 'head.kind')}={kind}, and the run"
                f" {getattr(run.model, setting)}: name a teacher of the same kind."
            )
    if run.data.sequence_length > teacher.max_length:
        raise ConfigError(
            f"data.sequence_length={run.data.sequence_length} exceeds the"
            f" model.max_length={teacher.max_length} of {named}: shorten the sequences."
        )
    settings = {
        "dtype": run.model.dtype,
        "layer_loop": run.model.layer_loop,
        "attention.kernel": "auto",
        "experts.kernel": "auto",
        "dropout": 0.0,
        "attention.dropout": 0.0,
    }
    return with_settings(teacher, settings)


def resolve_without_data(
    run: RunConfig, mesh: AnyMesh, packed: bool | None = None
) -> tuple[Resolved, AbstractBatch]:
    """As `resolve`, for a run whose data is not read, with its global batch as shapes: what can be
    lowered or compiled for devices that are not here. `packed` says whether rows come with segment
    ids; None: as the run's objective and packing make them."""
    model = run.model
    tokenizer = run.tokenizer
    added = range(0)
    if tokenizer.added:
        # Imported here, because only such a run reads the tokenizer of its base.
        from jaxformer.runs.init_from import with_vocabulary_of
        from jaxformer.runs.model_files import ModelFiles

        base = ModelFiles(run.run.init_from)
        origin = base.or_begun(run.run)
        model, tokenizer, added = with_vocabulary_of(base, origin, model, tokenizer)
    model, notes = with_assumed_sizes(model)
    run = dataclasses.replace(run, model=model, tokenizer=tokenizer)
    task = task_of(model, run.data)
    # A row without text has the names, the shapes and the dtypes of any other.
    row = invented_row(task, run.data)
    for name, array in SEGMENTS.items():
        if packed is True and array in row:
            row[name] = row[array]
        elif packed is False:
            row.pop(name, None)
    of_rows = batch_sharding(mesh)
    batch = {
        name: jax.ShapeDtypeStruct(
            (run.train.batch_size, *array.shape), array.dtype, sharding=of_rows
        )
        for name, array in row.items()
    }
    segments = 0
    if "segment_ids" in batch:
        packs = task.name == "causal" or run.data.packing != "stream"
        if task.template is not None:
            packs |= task.template.packs
        # A row that is only padded has one text; how many a packed one has, the data says.
        segments = 1
        if packs:
            segments = model.attention.max_segments or ASSUMED_SEGMENTS
    resolved = dataclasses.replace(resolve(run, mesh, segments), added=added, notes=notes)
    return resolved, resolved.with_scores(batch)


def run_specs(
    objective: str,
    model: ModelConfig,
    adapter: AdapterConfig,
    learned: tuple[str, ...] = (),
    added: range = range(0),
) -> Specs:
    """The table of parameters of a run: with an adapter, that of the adapted model, in which only
    it is trainable, the branches named in `learned`, the rows of `added` tokens, and what the
    objective brings."""
    brought = objective_specs(objective, model)
    if adapter.kind == "none":
        return model_specs(model) | brought
    # Imported here, because runs without an adapter do not need it.
    from jaxformer.models.adapt import adapted_table

    return adapted_table(model, adapter, learned, added) | brought


def keeps_start(objective: Objective, run: RunConfig) -> bool:
    """Whether an objective compares the model with the one that the run starts from, which has to
    be kept in memory because the run trains all of it."""
    compares = objective.reference or run.grpo.kl > 0
    return compares and run.adapter.kind == "none"


def check_start(objective: str, run: RunConfig) -> None:
    """Raises ConfigError where a run that compares the model with its start names none."""
    if keeps_start(OBJECTIVES[objective], run) and not run.run.init_from:
        raise ConfigError(
            f"data.objective={objective} compares the model with the one that the run"
            " starts from, and run.init_from is empty: name a run directory or a Hugging Face model"
            " there, choose orpo or simpo, which compare with none, or set grpo.kl to 0."
        )


def preference_options(
    objective: Objective, train: TrainConfig, adapter: AdapterConfig
) -> dict[str, Any]:
    """The options of the loss of preferences, or the contrastive one, that a run does not leave at
    their defaults. With an adapter the reference is the model below it."""
    options = dict[str, Any]()
    for setting, option in PAIR_SETTINGS.items():
        value = getattr(train, setting)
        if value != getattr(TrainConfig, setting):
            options[option] = value
    if "widths" in options:
        # The loss takes numbers.
        try:
            options["widths"] = tuple(map(int, parts_of(train.contrastive_widths)))
        except ValueError:
            raise ConfigError(
                f"train.contrastive_widths={train.contrastive_widths!r} must be whole numbers"
                " separated by commas, as in '64, 128'."
            ) from None
    if objective.reference and adapter.kind != "none":
        # Imported here, because runs without an adapter do not need it.
        from jaxformer.models.adapt import without_adapters

        options["reference_of"] = without_adapters
    return options


def encoded_length(
    model: ModelConfig, data: DataConfig, adapter: AdapterConfig, segments: int
) -> int:
    """Tokens of a row that an encoder below a decoder reads: the source, and before it a prompt for
    each of so many segments if the run learns one. 0 without such an encoder."""
    if model.family != "encoder_decoder":
        return 0
    source = data.source_length or data.sequence_length
    if adapter.kind != "prompt":
        return source
    return source + adapter.tokens * max(segments, 1)


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
    if 0 < model.attention.max_segments < segments:
        raise ConfigError(
            f"model.attention.max_segments={model.attention.max_segments} is below the"
            f" {segments} texts of the fullest row: set it to 0, which takes the number from"
            " the data."
        )
    on = platform(mesh)
    dtype: Any = str(compute_dtype(model, on))
    prefix = 0
    if adapter.kind == "prefix" or (adapter.kind, model.family) == ("prompt", "decoder"):
        prefix = adapter.tokens
    exchange = exchange_of(length, model.n_heads, mesh.shape)
    # Of GPUs; that of Hopper where it is not known. Only an attached device states its own.
    capability: tuple[int, ...] = kernels.HOPPER
    if on == "gpu":
        device: Any
        device = mesh.abstract_device if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
        stated = getattr(device, "compute_capability", None)
        name = name_of(device.device_kind)
        if stated:
            capability = tuple(map(int, stated.split(".")))
        elif name:
            capability = DEVICES[name].capability
    needs = kernels.Needs.of_run(
        model,
        on,
        dtype,
        length,
        segments,
        capability=capability,
        leading=prefix,
        exchange=exchange,
        context=mesh.shape["context"],
    )
    kernel: Any
    kernel, reason = attention_kernel(model.attention.kernel, needs, failed)
    expert_kernel: Any = model.experts.kernel
    if model.feed_forward == "experts":
        expert_kernel, grouped = kernel_of_experts(expert_kernel, needs, failed_experts)
        reason = f"{reason}; experts: {grouped}"
    selected = with_settings(
        model,
        {
            "attention.kernel": kernel,
            "experts.kernel": expert_kernel,
            "dtype": dtype,
            "layer_loop": layer_loop_of(model, on),
            "attention.max_segments": segments,
        },
    )
    return selected, reason


def attention_kernel(
    setting: str, needs: kernels.Needs, failed: Mapping[str, str] = {}
) -> tuple[str, str]:
    """Return the name of the attention kernel for a training run, and a text that names and
    explains the choice. `failed` has kernels that "auto" passes over, and why."""
    if needs.platform == "cpu" and needs.dropout:
        reason = "on a CPU the dropout of attention weights is that of plain attention"
        failed = {"blocked": reason, **failed}
    order = kernels.PREFERRED.get(needs.platform, ("xla",))
    return _chosen("model.attention.kernel", setting, kernels.KERNELS, order, needs, failed)


def kernel_of_experts(
    setting: str, needs: kernels.Needs, failed: Mapping[str, str] = {}
) -> tuple[str, str]:
    """Return the kernel of experts as `attention_kernel` does that of attention."""
    order = PREFERRED_KERNELS[needs.platform]
    return _chosen("model.experts.kernel", setting, GROUPED_KERNELS, order, needs, failed)


def _chosen(
    name: str,
    setting: str,
    rows: Mapping[str, Any],
    order: Sequence[str],
    needs: kernels.Needs,
    failed: Mapping[str, str],
) -> tuple[str, str]:
    def refuses(kernel: str) -> str:
        return kernels.missing(rows[kernel].lacks, needs)

    if setting != "auto":
        reason = refuses(setting)
        if reason:
            able = ["auto", *(kernel for kernel in rows if not refuses(kernel))]
            raise ConfigError(
                f"{name}={setting!r} cannot run here: {reason}."
                f" Choose {' or '.join(map(repr, able))}."
            )
        return setting, f"{setting} ({rows[setting].what}), as asked"
    passed = ""
    for kernel in order:
        reason = failed.get(kernel) or refuses(kernel)
        if not reason:
            return kernel, f"{kernel} ({rows[kernel].what}){passed}"
        passed += f"; not {kernel}: {reason}"
    raise ConfigError(f"{name}='auto': no kernel runs here{passed}.")


def microbatches_of(train: TrainConfig, row_bytes: float, mesh: AnyMesh) -> int:
    """train.microbatches, "auto" resolved for the devices of a mesh; a row of the batch has
    `row_bytes` of activations."""
    if train.microbatches != "auto" or platform(mesh) != "cpu":
        return train.n_microbatches
    # Rows of a device in all microbatches. Several devices of a CPU share the memory of one host.
    rows = train.batch_size // batch_devices(mesh)
    fewest = math.ceil(train.batch_size * row_bytes / CPU_ACTIVATIONS)
    # The microbatches of a step have one shape, so their number divides the rows. It is that of the
    # rows where no smaller one is enough.
    return next((count for count in range(fewest, rows) if rows % count == 0), rows)
