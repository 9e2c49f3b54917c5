"""All that a run needs before its first step: its settings resolved, its data, and the model below
an adapter."""

import dataclasses
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.adapters.adapted_params import base_paths, filled, over_base
from jaxformer.arrays.hardware import peak_flops
from jaxformer.arrays.mesh import (
    check_batch_size,
    check_split,
    held_blocks,
    mesh_of,
    place_array,
    place_batch,
)
from jaxformer.arrays.params import Params, Specs
from jaxformer.arrays.sharding import platform
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import Log
from jaxformer.data.rows import Rows
from jaxformer.files import ConfigError
from jaxformer.layers.kernels import MOST_SEGMENTS
from jaxformer.losses.heads import head_loss
from jaxformer.models.stack import compute_dtype
from jaxformer.runs.directory import RunDirectory, identity_of
from jaxformer.runs.evaluation import corpus_of
from jaxformer.runs.resolve import Resolved, resolve, settle, with_sizes
from jaxformer.tokenizer.chat import template_fingerprint
from jaxformer.training.compiler_options import keep_compiled
from jaxformer.training.state import TrainState, merged, split_frozen

if TYPE_CHECKING:
    from jaxformer.runs.evaluation import Tasks
    from jaxformer.runs.init_from import Reference, WarmStart
    from jaxformer.runs.model_files import ModelFiles


class Base(NamedTuple):
    """The model below an adapter: its parameters on the mesh, and the branches among them (a new
    head) that learn with the adapter. `record` is what data.json says of it."""

    params: Params
    learned: tuple[str, ...]
    record: dict[str, Any]
    sentence: str

    def first_params(self, specs: Specs, target: TrainState, seed: int) -> Params:
        """The params of the adapted model before the first step, placed as those of the state
        `target`. Those of the base that learn are copied, because a step donates its state."""
        params = jax.tree.map(
            lambda leaf, target_leaf: place_array(leaf, target_leaf.sharding),
            filled(specs, self.params, jax.random.key(seed)),
            target.params,
        )
        learned, still = split_frozen(params, target.frozen)
        return merged(jax.tree.map(jnp.copy, learned), still, target.frozen)

    def below(self, specs: Specs, target: TrainState) -> TrainState:
        """`target`, a state as shapes, with the arrays of the base in place of its leaves."""
        return replace(target, params=over_base(specs, target.params, self.params))


def base_below(start: "WarmStart", files: "ModelFiles", directory: RunDirectory) -> Base:
    """The model of run.init_from, below the adapter of a run."""
    # Imported here, because only such a run has a model to read.
    from jaxformer.runs.loading import fingerprint_below

    learned = tuple(dict.fromkeys(path.partition(".")[0] for path in start.new))
    base_fingerprint = fingerprint_below(start.params, learned)
    before = directory.record().get("base")
    if before not in (None, base_fingerprint):
        raise ConfigError(
            f"run.init_from={str(files)!r} is not the model that the adapter in"
            f" {directory} was begun with: its fingerprint is {base_fingerprint}, and data.json"
            f" has {before}. Restore that model there, or choose another run.dir."
        )
    base_path = str(files.path.absolute())
    record = {"base": base_fingerprint, "base_path": base_path, "learned": list(learned)}
    return Base(start.params, learned, record, start.sentence(str(files)))


@dataclass(frozen=True, kw_only=True)
class RunSetup(Resolved):
    """A run that is ready to start, on attached devices.

    Attributes:
      directory: that of the run.
      peak: the published peak FLOP/s of a device, None if it is unknown.
      undivided: the lines of `check_split`.
      record: a fingerprint of its data, which data.json holds.
      init_from: the files of the model of run.init_from.
      base: the model below an adapter.
      tasks: those of train.eval_tasks.
    """

    mesh: Mesh
    directory: RunDirectory
    corpus: data.Corpus
    batches: data.Batches
    heldout: data.EvaluationBatches | None
    peak: float | None
    undivided: list[str]
    record: dict[str, Any]
    init_from: "ModelFiles | None" = None
    base: Base | None = None
    tasks: "Tasks | None" = None

    @functools.cached_property
    def reference(self) -> "Reference | None":
        """What scores batches, for an objective that compares the model with its start."""
        if not self.has_reference or self.init_from is None:
            return None
        # Imported here, because only such an objective reads the model that it starts from.
        from jaxformer.runs.init_from import Reference

        return Reference(self.init_from, self.model, self.directory.reference, self.mesh)

    @property
    def first_batch(self) -> Any:
        """The batch of step 0 on the devices; of pairs with the scores of a reference as shapes."""
        batch = place_batch(self.batches[0], self.mesh)
        if not self.has_reference:
            return batch
        # Imported here, because only preferences need it.
        from jaxformer.runs.init_from import with_reference

        return with_reference(batch, self.run.train.batch_size, self.mesh)

    @property
    def evaluation_options(self) -> dict[str, Any]:
        """The options of `loss_of` with which the run is evaluated on what it held out, each source
        of that by itself where the loss tells them apart."""
        names = source_names(self.corpus.validation) if self.corpus.validation else ()
        if not names or self.objective.loss is not head_loss:
            return self.loss_options
        return self.loss_options | {"sources": names}

    @property
    def unsaved(self) -> list[str]:
        """The paths of the leaves of a state that its checkpoints do not hold: those below an
        adapter."""
        if self.base is None:
            return []
        return [f"params.{path}" for path in base_paths(self.specs)]

    @property
    def target_over_base(self) -> TrainState:
        """`target`, in which the leaves below an adapter are arrays."""
        return self.target if self.base is None else self.base.below(self.specs, self.target)

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the run that saved it."""
        return identity_of(self.record, self.run.run.seed)

    def placed(self, batch: Any) -> Any:
        """A batch on the devices, scored by the reference where there is one."""
        return self.reference(batch) if self.reference else place_batch(batch, self.mesh)


def make_setup(run: RunConfig, log: Log) -> RunSetup:
    """Prepares what comes before the first step: the base, the tokenizer and the data, and every
    setting as the value that it is. Writes nothing."""
    directory = RunDirectory(run.run.dir)
    # The base, which gives the tokenizer and the labels where the run was not begun before.
    init_from = None
    if run.run.init_from:
        # Imported here, because it reads models of every format.
        from jaxformer.runs.model_files import ModelFiles

        init_from = ModelFiles(run.run.init_from)
    run, labels = settle(run, init_from)
    # The devices are checked before the data is read, which may take long.
    mesh = mesh_of(run.mesh.sizes)
    check_batch_size(mesh, run.train.batch_size, run.train.n_microbatches)
    keep_compiled(run.run.compilation_cache, named=bool(run.run.profile))
    # The data, which gives the sizes of the vocabulary and of the head.
    corpus = corpus_of(run, labels, new_labels=True, log=log)
    if run.run.sample_tokens:
        # A prompt that cannot be encoded raises now rather than at the end.
        corpus.tokenizer.encode(run.run.sample_prompt)
    origin = "the data and of run.init_from" if run.run.init_from else "the data"
    model = with_sizes(run.model, corpus.tokenizer.vocab_size, corpus.labels, origin)
    run = dataclasses.replace(run, model=model)
    size, blocks = run.train.batch_size, data.RowBlocks(*held_blocks(mesh))
    batches = data.Batches(corpus.train, run.data, size, run.run.seed, blocks)
    heldout = None
    if corpus.validation:
        heldout = data.evaluation_batches(corpus.validation, run.data, size, blocks)
    # The model below an adapter, and the values of the settings.
    base = None
    if run.adapter.kind != "none" and init_from:
        # Imported here, because runs without an adapter do not need it.
        from jaxformer.runs.init_from import warm_start

        start = warm_start(run, init_from, mesh, corpus.labels)
        base = base_below(start, init_from, directory)
    segments = most_segments(corpus) if "segment_ids" in batches[0] else 0
    added = range(0)
    if base and run.tokenizer.added:
        from jaxformer.runs.loading import added_ids

        added = added_ids(run.tokenizer, corpus.tokenizer)
    resolved = resolve(run, mesh, segments, base.learned if base else (), added)
    sources = source_names(corpus.train) if resolved.objective.loss is head_loss else ()
    resolved = dataclasses.replace(resolved, sources=sources)
    tasks = None
    if run.train.eval_tasks:
        # Imported here, because it reads tasks by an optional package.
        from jaxformer.runs.evaluation import Tasks

        tasks = Tasks(run.train.eval_tasks, resolved.model, corpus.tokenizer)
    # The directory belongs to this config and this data.
    fingerprints = {"tokenizer": corpus.tokenizer.fingerprint(), "train": corpus.train.fingerprint}
    if corpus.validation:
        fingerprints["validation"] = corpus.validation.fingerprint
    if run.data.messages_field:
        # Their template is part of the data.
        fingerprints["chat_template"] = template_fingerprint(corpus.tokenizer)
    record = directory.check_data(fingerprints, corpus.labels, base.record if base else {})
    directory.check_config(run)
    return RunSetup(
        **resolved.fields(),
        directory=directory,
        corpus=corpus,
        batches=batches,
        heldout=heldout,
        peak=published_peak(resolved.model, mesh),
        undivided=check_split(resolved.specs, mesh),
        record=record,
        init_from=init_from,
        base=base,
        tasks=tasks,
    )


def source_names(rows: Rows) -> tuple[str, ...]:
    """The names of the sources of rows; empty for those of one source."""
    names = tuple(name for name, _ in rows.sources(""))
    return names if len(names) > 1 else ()


def published_peak(model: ModelConfig, mesh: Mesh) -> float | None:
    """The peak FLOP/s of a device, None where none is published, as for a CPU."""
    on = platform(mesh)
    if on == "cpu":
        return None
    return peak_flops(mesh.devices.flat[0].device_kind, str(compute_dtype(model, on)))


def most_segments(corpus: data.Corpus) -> int:
    """The highest segment id of all rows; more than any kernel bounds where it is not known."""
    texts = [corpus.train, corpus.validation] if corpus.validation else [corpus.train]
    segment_counts = [rows.most_segments() for rows in texts]
    return max(MOST_SEGMENTS + 1 if count is None else count for count in segment_counts)
