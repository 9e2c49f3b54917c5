"""All that a run needs before its first step: its settings resolved, its data, and the model below
an adapter."""

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from jaxformer import data
from jaxformer.adapters.adapted_params import base_paths, over_base
from jaxformer.arrays.hardware import peak_flops
from jaxformer.arrays.mesh import check_batch_size, check_split, held_blocks, mesh_of, place_batch
from jaxformer.arrays.sharding import platform
from jaxformer.config.config_file import check
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig, to_json
from jaxformer.config.settings import Log
from jaxformer.data.rows import Rows
from jaxformer.files import ConfigError
from jaxformer.layers.kernels import MOST_SEGMENTS
from jaxformer.losses.heads import head_loss
from jaxformer.models.stack import compute_dtype
from jaxformer.runs.directory import RunDirectory, identity_of
from jaxformer.runs.evaluation import Tasks
from jaxformer.runs.objectives import OBJECTIVES, task_of
from jaxformer.runs.resolve import Resolved, check_start, resolve, teacher_of, with_sizes
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import template_fingerprint
from jaxformer.training.compiler_options import keep_compiled
from jaxformer.training.state import TrainState

if TYPE_CHECKING:
    from jaxformer.runs.init_from import Reference, WarmStart
    from jaxformer.runs.model_files import ModelFiles
    from jaxformer.runs.rollouts import Rollouts


@dataclass(frozen=True, kw_only=True)
class RunSetup(Resolved):
    """A run that is ready to start, on attached devices.

    Attributes:
      directory: that of the run.
      peak: the published peak FLOP/s of a device, None if it is unknown.
      undivided: the lines of `check_split`.
      record: a fingerprint of its data, which data.json holds.
      init_from: the files of the model of run.init_from.
      base: the parameters that it gives to a run with an adapter.
      tasks: those of train.eval_tasks.
      rollouts: what writes the answers to the prompts of a batch, for an objective that needs them.
    """

    mesh: Mesh
    directory: RunDirectory
    corpus: data.Corpus
    batches: data.Batches
    heldout: data.EvaluationBatches | None
    peak: float | None
    undivided: list[str]
    record: dict[str, Any] = field(default_factory=dict)
    init_from: "ModelFiles | None" = None
    base: "WarmStart | None" = None
    tasks: Tasks | None = None
    rollouts: "Rollouts | None" = None

    def warm_start(self) -> "WarmStart":
        """The parameters that the model of run.init_from gives to the run, read from its files."""
        # Imported here, because only a run with run.init_from reads a model.
        from jaxformer.models.adapt import quantization_of
        from jaxformer.runs.init_from import warm_start

        assert self.init_from is not None
        return warm_start(
            self.init_from,
            self.asked.model,
            objective=self.task.name,
            seed=self.run.run.seed,
            mesh=self.mesh,
            quantize=quantization_of(self.run.adapter),
            labels=self.corpus.labels,
            added=self.added,
        )

    @functools.cached_property
    def reference(self) -> "Reference | None":
        """What scores batches, for an objective that compares the model with its start, or adds
        the parameters of the teacher to them."""
        # Imported here, because only such a run reads another model beside its own.
        from jaxformer.runs.init_from import Reference, Teacher
        from jaxformer.runs.model_files import ModelFiles

        if self.teacher is not None:
            files = ModelFiles(self.run.distill.teacher)
            return Teacher(files, self.teacher, self.directory.reference, self.mesh)
        if not self.has_reference or self.init_from is None:
            return None
        return Reference(self.init_from, self.model, self.directory.reference, self.mesh)

    @property
    def first_batch(self) -> Any:
        """The batch of step 0 on the devices; with the scores of a reference, the answers that the
        model writes, or the parameters of a teacher, as shapes."""
        # The step is compiled before the reference is read, and takes the shapes of its scores.
        return self.with_teacher(self.with_scores(place_batch(self.batches[0], self.mesh)))

    @property
    def evaluation_options(self) -> dict[str, Any]:
        """The options of `loss_of` with which the run is evaluated on what it held out, each source
        of that by itself where the loss tells them apart."""
        options = self.loss_options
        if self.corpus.validation and self.objective.loss is head_loss:
            names = source_names(self.corpus.validation)
            if names:
                options = options | {"sources": names}
        return options

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
        if self.base is None:
            return self.target
        target = self.target
        return replace(target, params=over_base(self.specs, target.params, self.base.params))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Those of the tokenizer and of each split, and of the template of conversations."""
        corpus = self.corpus
        names = {"tokenizer": corpus.tokenizer.fingerprint(), "train": corpus.train.fingerprint}
        if corpus.validation:
            names["validation"] = corpus.validation.fingerprint
        if self.run.data.messages_field:
            names["chat_template"] = template_fingerprint(corpus.tokenizer)
        return names

    @property
    def config_json(self) -> str:
        """The text of config.json: the settings asked for, which begin nothing anew."""
        settings = replace(self.asked.run, restart=False)
        return to_json(replace(self.asked, run=settings))

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the run that saved it."""
        return identity_of(self.record, self.run.run.seed)

    def placed(self, batch: Any, params: Any = None, step: int = 0) -> Any:
        """A batch on the devices, with what the reference or the teacher adds to it, or the answers
        that the model writes with these params before a step, counted from 0."""
        if self.rollouts:
            start = params
            if self.reference:
                start, _ = self.reference.load()
            return self.rollouts(batch, params, start, step)
        if self.reference:
            return self.reference(batch)
        return place_batch(batch, self.mesh)


def make_setup(run: RunConfig, log: Log) -> RunSetup:
    """Prepares what comes before the first step: the base, the tokenizer and the data, and every
    setting as the value that it is. Writes nothing."""
    check(run)
    directory = RunDirectory(run.run.dir)
    # The base, which gives the tokenizer and the labels where the run was not begun before.
    init_from = None
    added = range(0)
    labels = tuple[str, ...]()
    if run.run.init_from:
        # Imported here, because it reads models of every format.
        from jaxformer.runs.init_from import settled_over
        from jaxformer.runs.model_files import ModelFiles

        init_from = ModelFiles(run.run.init_from)
        model, tokenizer, added, labels = settled_over(
            init_from, run.run, run.model, run.adapter, run.tokenizer
        )
        run = replace(run, model=model, tokenizer=tokenizer)
    task = task_of(run.model, run.data)
    check_start(task.name, run)
    # The teacher and the devices are checked before the data is read, which may take long.
    if run.distill.teacher:
        teacher_of(run, OBJECTIVES[task.name])
    mesh = mesh_of(run.mesh.sizes)
    check_batch_size(mesh, run.train.batch_size, run.train.n_microbatches)
    keep_compiled(run.run.compilation_cache, named=bool(run.run.profile))
    # The data, which gives the sizes of the vocabulary and of the head.
    corpus = data.prepare(
        run.data,
        run.tokenizer,
        task,
        seed=run.run.seed,
        vocab_size=run.model.vocab_size,
        model_labels=data.ModelLabels(labels, may_grow=True),
        log=log,
    )
    if run.run.sample_tokens:
        # A prompt that cannot be encoded raises now rather than at the end.
        corpus.tokenizer.encode(run.run.sample_prompt)
    if run.distill.teacher:
        # Imported here, because only such a run reads the files of a second model.
        from jaxformer.runs.model_files import ModelFiles

        teacher = ModelFiles(run.distill.teacher)
        tokenizer_of_teacher = Tokenizer.load(teacher.tokenizer)
        different = ""
        if tokenizer_of_teacher.fingerprint() != corpus.tokenizer.fingerprint():
            different = f"the tokenizer of {corpus.tokenizer.origin} (tokenizer.path sets it)"
        elif teacher.labels != corpus.labels:
            different = f"the labels {', '.join(corpus.labels)} in this order"
        if different:
            raise ConfigError(
                f"distill.teacher={run.distill.teacher!r} has not {different}, so that its"
                " probabilities are of other classes: name a teacher that has."
            )
    origin = "the data and of run.init_from" if init_from else "the data"
    model = with_sizes(run.model, corpus.tokenizer.vocab_size, corpus.labels, origin)
    run = replace(run, model=model)
    size = run.train.batch_size
    blocks = data.RowBlocks(*held_blocks(mesh))
    if OBJECTIVES[task.name].writes:
        # Rows are those of answers, and one process reads all prompts.
        size //= run.grpo.group
        blocks = data.RowBlocks()
    batches = data.Batches(corpus.train, run.data, size, run.run.seed, blocks)
    heldout = None
    if corpus.validation:
        heldout = data.evaluation_batches(corpus.validation, run.data, size, blocks)
    # The values of the settings.
    segments = 0
    if "segment_ids" in batches[0]:
        segments = most_segments(corpus)
    resolved = replace(resolve(run, mesh, segments), added=added)
    if resolved.objective.loss is head_loss:
        resolved = replace(resolved, sources=source_names(corpus.train))
    tasks = None
    if run.train.eval_tasks:
        tasks = Tasks(run.train.eval_tasks, resolved.model, corpus.tokenizer)
    rollouts = None
    if resolved.objective.writes:
        # Imported here, because only such a run writes before a step.
        from jaxformer.runs.rollouts import Rollouts

        rollouts = Rollouts(resolved, corpus.tokenizer)
    setup = RunSetup(
        **resolved.fields(),
        directory=directory,
        corpus=corpus,
        batches=batches,
        heldout=heldout,
        peak=published_peak(resolved.model, mesh),
        undivided=check_split(resolved.specs, mesh),
        init_from=init_from,
        tasks=tasks,
        rollouts=rollouts,
    )
    # The directory belongs to this config and this data, and its adapter to this base.
    base_record: dict[str, Any] = {}
    if init_from and run.adapter.kind != "none":
        base = setup.warm_start()
        setup = replace(setup, base=base, learned=base.learned)
        base_record = base.record(init_from, directory)
    record = directory.check_data(setup.fingerprints, corpus.labels, base_record)
    # Again, with the sizes that the data has: before it was read, `check_config` took the size of
    # the vocabulary and the number of classes from the directory.
    directory.check_config(run)
    return replace(setup, record=record)


def source_names(rows: Rows) -> tuple[str, ...]:
    """The names of the sources of rows; empty for those of one source."""
    names = tuple(name for name, _ in rows.sources(""))
    if len(names) == 1:
        return ()
    return names


def published_peak(model: ModelConfig, mesh: Mesh) -> float | None:
    """The peak FLOP/s of a device, None where none is published, as for a CPU."""
    on = platform(mesh)
    if on == "cpu":
        return None
    return peak_flops(mesh.devices.flat[0].device_kind, str(compute_dtype(model, on)))


def most_segments(corpus: data.Corpus) -> int:
    """The highest segment id of all rows; more than any kernel bounds where it is not known."""
    texts = [corpus.train]
    if corpus.validation:
        texts.append(corpus.validation)
    most = 0
    for rows in texts:
        count = rows.most_segments()
        if count is None:
            return MOST_SEGMENTS + 1
        most = max(most, count)
    return most
