"""All that a run needs before its first step: text, mesh, attention kernel and optimizer."""

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import optax
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.arrays.mesh import check_batch_size, held_blocks, make_mesh, place_batch
from jaxformer.arrays.params import Specs
from jaxformer.arrays.sharding import platform
from jaxformer.config.config_file import check, with_vocabulary
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError
from jaxformer.layers.kernels import MOST_SEGMENTS
from jaxformer.models.cost import flops_per_token
from jaxformer.models.stack import compute_dtype
from jaxformer.runs.compose import (
    check_split,
    check_start,
    compares_with_start,
    counted_specs,
    encoded_length,
    run_specs,
    step_of,
    with_kernel,
)
from jaxformer.runs.directory import as_begun, check_data
from jaxformer.runs.evaluation import corpus_of
from jaxformer.runs.objectives import OBJECTIVES
from jaxformer.training.optim import make_optimizer, make_schedule
from jaxformer.training.program import Step
from jaxformer.training.state import TrainState, abstract_state

if TYPE_CHECKING:
    from jaxformer.runs.reference import Reference


@dataclass(frozen=True)
class RunSetup:
    """A run that is ready to start. In `run` every automatic choice is made.

    `kernel` is a sentence about the attention kernel. `peak` is the published peak FLOP/s of a
    device, None if it is unknown. `undivided` are the lines of `check_split`.
    `asked` is the run before automatic choices, and `record` a fingerprint of its data: what
    config.json and data.json hold. `base` is the model below an adapter (`runs.adapter_base.Base`).
    """

    run: RunConfig
    corpus: data.Corpus
    batches: data.Batches
    heldout: data.EvaluationBatches | None
    mesh: Mesh
    specs: Specs
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    peak: float | None
    kernel: str
    undivided: list[str]
    asked: RunConfig
    record: dict[str, Any]
    base: Any = None

    @property
    def tokens_per_step(self) -> int:
        sequences = OBJECTIVES[self.corpus.task.name].sequences
        return self.run.train.batch_size * sequences * self.run.data.sequence_length

    @functools.cached_property
    def reference(self) -> "Reference | None":
        """What scores batches, for an objective that compares the model with its start."""
        if not compares_with_start(self.run):
            return None
        from jaxformer.runs.reference import Reference

        run = self.run
        return Reference(run.run.init_from, run.model, run.run.dir, self.mesh)

    @functools.cached_property
    def flops_per_token(self) -> int:
        run, length = self.run, self.run.data.sequence_length
        source = encoded_length(run, run.model.max_segments)
        table = counted_specs(run, self.base.learned if self.base else ())
        has_reference = OBJECTIVES[self.corpus.task.name].reference
        return flops_per_token(run.model, length, source, table, has_reference)

    @property
    def target(self) -> TrainState:
        """The train state as shapes and shardings."""
        return abstract_state(self.specs, self.optimizer, self.mesh)

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the run that saved it."""
        # These may change, or follow from what may not.
        left_out = ("labels", "base_path")
        entries = {name: value for name, value in self.record.items() if name not in left_out}
        return entries | {"seed": self.run.run.seed}

    def placed(self, batch: Any) -> Any:
        """A batch on the devices, scored by the reference where there is one."""
        return self.reference(batch) if self.reference else place_batch(batch, self.mesh)

    @property
    def step(self) -> Step:
        """The train step."""
        return step_of(self.run, self.corpus.task.name, self.optimizer, self.schedule)


def make_setup(run: RunConfig, log: Log) -> RunSetup:
    """Prepares text, tokenizer and optimizer, and selects the attention kernel. Raises ConfigError
    for settings or input that cannot work, or that are not those of the run directory."""
    run, labels = as_begun(check(run)), tuple[str, ...]()
    if run.run.init_from:
        from jaxformer.runs.init_from import check_base, labels_before

        run = check_base(run)
        labels = labels_before(run)
    check_start(run)
    mesh = make_mesh(run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
    check_batch_size(mesh, run.train.batch_size, run.train.n_microbatches)
    keep_compiled(run.run.compilation_cache, named=bool(run.run.profile))
    corpus = corpus_of(run, labels, new_labels=True, log=log)
    if run.run.sample_tokens:
        # A prompt that cannot be encoded raises now rather than at the end.
        corpus.tokenizer.encode(run.run.sample_prompt)
    run = with_classes(with_vocabulary(run, corpus.tokenizer.vocab_size), corpus.labels)
    size, blocks = run.train.batch_size, data.RowBlocks(*held_blocks(mesh))
    batches = data.Batches(corpus.train, run.data, size, run.run.seed, blocks)
    texts, heldout = [corpus.train], None
    if corpus.validation:
        texts.append(corpus.validation)
        heldout = data.evaluation_batches(corpus.validation, run.data, size, blocks)
    base = _base(run, mesh, corpus.labels)
    specs = run_specs(run, base.learned if base else ())
    schedule = make_schedule(run.optimizer, run.train.steps)
    split = check_split(specs, mesh)
    packed = "segment_ids" in batches[0]
    segments = most_segments(texts) if packed else 0
    composed, kernel = with_kernel(run, segments, mesh)
    fingerprints = fingerprints_of(run, corpus)
    return RunSetup(
        run=composed,
        corpus=corpus,
        batches=batches,
        heldout=heldout,
        mesh=mesh,
        specs=specs,
        schedule=schedule,
        optimizer=make_optimizer(run.optimizer, schedule, specs),
        peak=published_peak(run, mesh),
        kernel=kernel,
        undivided=split,
        asked=run,
        record=check_data(run, corpus.tokenizer, fingerprints, corpus.labels, base and base.record),
        base=base,
    )


def _base(run: RunConfig, mesh: Mesh, labels: tuple[str, ...]) -> Any:
    """The model below the adapter of a run (`runs.adapter_base.Base`); None without an adapter."""
    if run.adapter.kind == "none":
        return None
    from jaxformer.runs.adapter_base import read_base

    return read_base(run, mesh, labels)


def fingerprints_of(run: RunConfig, corpus: data.Corpus) -> dict[str, str]:
    """What data.json says of the data of a run, beside its tokenizer and its labels."""
    fingerprints = {"train": corpus.train.fingerprint}
    if corpus.validation:
        fingerprints["validation"] = corpus.validation.fingerprint
    if run.data.messages_field:
        from jaxformer.tokenizer.chat import ChatTemplate

        fingerprints["chat_template"] = ChatTemplate.of(corpus.tokenizer).fingerprint()
    return fingerprints


def published_peak(run: RunConfig, mesh: Mesh) -> float | None:
    """The peak FLOP/s of a device, None where none is published, as for a CPU."""
    on = platform(mesh)
    if on == "cpu":
        return None
    from jaxformer.arrays.hardware import peak_flops

    return peak_flops(mesh.devices.flat[0].device_kind, str(compute_dtype(run.model, on)))


def most_segments(texts: list[data.Rows]) -> int:
    """The highest segment id of all rows; more than any kernel bounds where it is not known."""
    segment_counts = [rows.most_segments() for rows in texts]
    return max(MOST_SEGMENTS + 1 if count is None else count for count in segment_counts)


def keep_compiled(folder: str, named: bool = False) -> None:
    """Turns on JAX's persistent compilation cache, unless the process has one already or `folder`
    is empty. With `named` the names of scopes are part of the key of a program, so that one from
    the cache has the scopes of this code."""
    if named:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if folder and not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def with_classes(run: RunConfig, labels: tuple[str, ...]) -> RunConfig:
    """`run` with model.n_classes filled in from the labels of the data where it is 0. Raises
    ConfigError where they do not fit."""
    model = run.model
    if model.output not in ("classes", "tags"):
        return run
    if len(labels) < 2:
        raise ConfigError(
            f"the data has {len(labels)} label, but a classifier needs at least 2: check"
            " data.label_field."
        )
    if model.n_classes and model.n_classes < len(labels):
        origin = "the data and of run.init_from" if run.run.init_from else "the data"
        raise ConfigError(
            f"model.n_classes={model.n_classes} is less than the {len(labels)} labels of {origin}:"
            " set it to 0, which uses their number."
        )
    classes = model.n_classes or len(labels)
    return dataclasses.replace(run, model=dataclasses.replace(model, n_classes=classes))
