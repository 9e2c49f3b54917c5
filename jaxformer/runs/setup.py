"""Everything a run needs before its first step: text, mesh, kernel, optimizer, and what it says
about them."""

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import optax
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.config import ConfigError, ModelConfig, RunConfig
from jaxformer.config_file import check, with_vocabulary
from jaxformer.evaluation import corpus_of
from jaxformer.mesh import check_batch_size, make_mesh, parameter_sharding, undivided
from jaxformer.models.cost import flops_per_token
from jaxformer.models.stack import compute_dtype
from jaxformer.models.transformer import specs as model_specs
from jaxformer.objectives import loss_of
from jaxformer.optim import decay_groups, make_optimizer, make_schedule
from jaxformer.params import Specs, count, rows
from jaxformer.report import human_bytes, human_count
from jaxformer.runs.device import peak_flops, with_kernel, with_rows_of
from jaxformer.runs.directory import claim
from jaxformer.runs.init_from import check_base, with_classes
from jaxformer.settings import Log
from jaxformer.training.state import TrainState, abstract_state
from jaxformer.training.step import Step, make_step

SummaryValue = str | list[str]


@dataclass(frozen=True)
class RunSetup:
    """A run made ready. `run` has every choice made; `summary` is the start banner.

    `runs` is the run as it is with each length of its rows, of which there are several where
    data.length_warmup says so.
    """

    run: RunConfig
    runs: dict[int, RunConfig]
    corpus: data.Corpus
    batches: data.Batches
    heldout: data.EvaluationBatches | None
    mesh: Mesh
    specs: Specs
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    peak: float
    summary: dict[str, SummaryValue]

    @property
    def tokens_per_step(self) -> int:
        return self.run.train.batch_size * self.run.data.sequence_length

    @functools.cached_property
    def flops_per_token(self) -> dict[int, int]:
        """By the length of the rows."""
        source = self.run.data.source_length
        return {
            length: flops_per_token(run.model, length, source) for length, run in self.runs.items()
        }

    def length(self, step: int) -> int:
        """Tokens of a row of the batch of a step, counted from 0."""
        return data.length_at(self.batches.lengths, step)

    def lengths(self, first: int) -> list[int]:
        """The lengths of the rows of the steps from `first` to the end."""
        later = [
            length for step, length in self.batches.lengths if first < step < self.run.train.steps
        ]
        return list(dict.fromkeys([self.length(first), *later]))

    def flops(self, first: int, stop: int) -> int:
        """Of the steps from `first` to `stop`, not included."""
        return self.tokens_per_step * sum(
            self.flops_per_token[self.length(step)] for step in range(first, stop)
        )

    @property
    def target(self) -> TrainState:
        """The train state as shapes and shardings."""
        return abstract_state(self.specs, self.optimizer, self.mesh)

    @functools.cached_property
    def packed(self) -> bool:
        """Whether rows come with segment ids."""
        return "segment_ids" in self.batches[0]

    def step(self, length: int) -> Step:
        """The train step for rows of this many tokens."""
        run = self.runs[length]
        extras = {"label_smoothing": run.train.label_smoothing, "z_loss": run.train.z_loss}
        return make_step(
            loss_of(self.corpus.task.name, run.model, **extras),
            self.optimizer,
            microbatches=run.train.microbatches,
            seed=run.run.seed,
            schedules={"learning_rate": self.schedule},
        )


def make_setup(run: RunConfig, log: Log) -> RunSetup:
    """Prepares text, tokenizer and optimizer, picks the kernel, and claims the run directory when
    all is well.

    Raises ConfigError at the door.
    """
    run = check_base(check(run))
    mesh = make_mesh(run.mesh.data, run.mesh.fsdp, run.mesh.tensor)
    check_batch_size(mesh, run.train.batch_size, run.train.microbatches)
    keep_compiled(run.run.compilation_cache)
    corpus = corpus_of(run, log=log)
    if run.run.sample_tokens:
        corpus.tokenizer.encode(
            run.run.sample_prompt
        )  # one that it cannot is said now, not at the end
    run = with_classes(with_vocabulary(run, corpus.tokenizer.vocab_size), corpus.labels)
    size, place = run.train.batch_size, (jax.process_index(), jax.process_count())
    batches = data.Batches(corpus.train, run.data, size, run.run.seed, *place)
    heldout = (
        data.evaluation_batches(corpus.validation, run.data, size, *place)
        if corpus.validation
        else None
    )
    specs = model_specs(run.model)
    schedule = make_schedule(run.optimizer, run.train.steps)
    split = check_split(specs, mesh)
    packed, lengths = "segment_ids" in batches[0], dict(batches.lengths).values()
    kernels = {length: with_kernel(with_rows_of(run, length), packed) for length in lengths}
    runs = {length: ready for length, (ready, _) in kernels.items()}
    peak = peak_flops(str(compute_dtype(run.model)))
    optimizer = make_optimizer(run.optimizer, schedule, specs)
    setup = RunSetup(
        runs[run.data.sequence_length],
        runs,
        corpus,
        batches,
        heldout,
        mesh,
        specs,
        schedule,
        optimizer,
        peak,
        {},
    )
    setup.summary.update(
        _summary(setup, {length: reason for length, (_, reason) in kernels.items()}, split)
    )
    texts = {"train": corpus.train, "validation": corpus.validation}
    claim(
        run,
        corpus.tokenizer,
        {name: rows.fingerprint for name, rows in texts.items() if rows},
        corpus.labels,
    )
    return setup


def keep_compiled(folder: str) -> None:
    """Turns on JAX's persistent compilation cache, unless the process has one already or `folder`
    is empty."""
    if folder and not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _summary(
    setup: RunSetup, kernels: dict[int, str], undivided: list[str]
) -> dict[str, SummaryValue]:
    run, mesh, device = setup.run, setup.mesh, jax.devices()[0]
    train, validation = setup.corpus.train, setup.corpus.validation
    state = sum(_bytes_here(leaf) for leaf in jax.tree.leaves(setup.target))
    epoch = setup.batches.examples / run.train.batch_size
    groups = decay_groups(run.optimizer, setup.specs)
    return {
        "device": (
            f"{jax.device_count()} x {device.device_kind} ({device.platform}), "
            f"best product {setup.peak / 1e12:.3g} TFLOP/s each"
        ),
        "mesh": [", ".join(f"{name} {size}" for name, size in mesh.shape.items()), *undivided],
        "model": (
            f"{run.model.family}, {human_count(count(setup.specs))} parameters,"
            f" {_layers(run.model)} layers, {run.model.d_model} wide, {run.model.n_heads} heads"
            f" ({run.model.kv_heads} key-value), {compute_dtype(run.model)} products"
        ),
        "weight decay": "; ".join(
            f"{name}: {n} tensors, {human_count(size)} parameters"
            for name, (n, size) in groups.items()
        ),
        "memory": f"{human_bytes(state)} of parameters and optimizer state a device",
        "FLOPs": (
            f"{human_count(setup.flops_per_token[run.data.sequence_length])} a token, forward and"
            " backward"
        ),
        "attention": (
            [f"rows of {length}: {reason}" for length, reason in kernels.items()]
            if len({*kernels.values()}) > 1
            else next(iter(kernels.values()))
        ),
        "data": (
            f"{setup.corpus.task.name}: {human_count(train.tokens)} tokens to train on"
            f" ({train.documents:,} documents), "
            + (f"{human_count(validation.tokens)} held out" if validation else "none held out")
        ),
        **_plan(setup),
        "tokenizer": (
            f"{setup.corpus.tokenizer.vocab_size:,} tokens,"
            f" {train.bytes / max(train.tokens, 1):.2f} bytes a token"
        ),
        "one epoch": (
            f"{epoch:,.1f} steps of {human_count(setup.tokens_per_step)} tokens; "
            f"the run is {run.train.steps / epoch:.2f} epochs"
        ),
        "run directory": str(Path(run.run.dir)),
    }


def _plan(setup: RunSetup) -> dict[str, SummaryValue]:
    """What is read of each source, where there are several, and the lengths of rows and how full
    they are."""
    found: dict[str, SummaryValue] = {}
    train, settings = setup.corpus.train, setup.run.train
    if isinstance(train, data.Mixture):
        found["mixture"] = [
            f"{drawn.share:.2%} of {drawn.name}: {drawn.rows:,} rows, {drawn.epochs:.2f} epochs"
            " of it"
            for drawn in train.shares(settings.steps, settings.batch_size)
        ]
    lengths = [
        f"{setup.runs[length].train.batch_size:,} of {length} tokens"
        f" {f'after step {step:,}' if step else 'at first'}"
        for step, length in setup.batches.lengths
    ]
    rows = lengths * (len(lengths) > 1) + [f"{train.filled:.2%} filled"] * (train.filled < 1)
    return found | ({"rows": "; ".join(rows)} if rows else {})


def check_split(specs: Specs, mesh: Mesh) -> list[str]:
    """A line for each parameter that the mesh would split but cannot, since it does not divide an
    axis, with its bytes.

    Raises ConfigError where mesh.fsdp or mesh.tensor was given and splits no parameter at all.
    """
    table = rows(specs)
    whole = {
        path: found
        for path, spec in table.items()
        if (found := undivided(mesh, spec.shape, spec.axes))
    }
    used = {
        name
        for spec in table.values()
        for entry in parameter_sharding(mesh, spec.shape, spec.axes).spec
        for name in ((entry,) if isinstance(entry, str) else entry or ())
    }
    for name in ("fsdp", "tensor"):
        if mesh.shape[name] > 1 and name not in used:
            reasons = "\n  ".join(
                f"{path}: {', '.join(found)}" for path, found in list(whole.items())[:8]
            )
            raise ConfigError(
                f"mesh.{name}={mesh.shape[name]} splits no parameter of this model, since it"
                " divides none of their axes; every device would hold all of them:\n "
                f" {reasons}\nChoose a mesh.{name} that divides them, or leave it at 1."
            )
    return [
        f"{path}, {human_bytes(4 * math.prod(table[path].shape))}, is not split along"
        f" {', '.join(found)}"
        for path, found in whole.items()
    ]


def _layers(model: ModelConfig) -> str:
    return (
        f"{model.encoder_layers} + {model.n_layers}"
        if model.family == "encoder_decoder"
        else str(model.n_layers)
    )


def _bytes_here(leaf: jax.ShapeDtypeStruct) -> int:
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)  # type: ignore[union-attr]
    size = leaf.dtype.itemsize
    for length in shape:
        size *= length
    return int(size)
