"""The summary of a run that is printed before its first step."""

import math
from typing import Any

import jax

from jaxformer.arrays.params import Specs
from jaxformer.config.model import ModelConfig
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.config.train import TrainConfig
from jaxformer.data import Corpus
from jaxformer.models.cost import count_text
from jaxformer.models.stack import compute_dtype
from jaxformer.report import human_bytes, human_count
from jaxformer.runs.setup import RunSetup
from jaxformer.training.compiler_options import option_lines
from jaxformer.training.optimizers.groups import group_lines
from jaxformer.training.optimizers.rule_table import unread
from jaxformer.training.optimizers.run_optimizer import decay_groups
from jaxformer.training.optimizers.schedules import schedule_text
from jaxformer.training.state import TrainState, split_frozen

LOOPS = {"scan": "in a loop", "unroll": "unrolled"}


def summary(setup: RunSetup) -> dict[str, str | list[str]]:
    """The banner of a run: what it computes, on which devices, and from which data."""
    run, model, device = setup.run, setup.run.model, jax.devices()[0]
    state = sum(map(_bytes_per_device, jax.tree.leaves(setup.target)))
    flops = human_count(setup.flops_per_token)
    compared = ""
    if setup.reference:
        reference = sum(map(_bytes_per_device, jax.tree.leaves(setup.target.params)))
        compared = f", and {human_bytes(reference)} of those of the reference"
    groups = decay_groups(run.optimizer, setup.specs).items()
    mesh = ", ".join(f"{name} {size}" for name, size in setup.mesh.shape.items())
    options = option_lines(setup.mesh, *run.train.stated_options)
    return {
        "device": (
            f"{jax.device_count()} x {device.device_kind} ({device.platform})"
            f"{peak_text(device.platform, setup.peak)}"
        ),
        "mesh": [mesh, *setup.undivided],
        "model": (
            f"{model.family}, {_parameters(setup.counted_specs, setup.target)}, {_layers(model)}"
            f" layers, {model.d_model} wide, {model.n_heads} heads ({model.kv_heads} key-value),"
            f" {compute_dtype(model)} products, layers {LOOPS[model.layer_loop]}"
        ),
        "learning rate": schedule_text(run.optimizer, run.train.steps),
        "weight decay": "; ".join(
            f"{name}: {tensors} tensors, {human_count(size)} parameters"
            for name, (tensors, size) in groups
        ),
        **_groups(run.optimizer, setup.specs),
        **_average(run.train),
        "memory": f"{human_bytes(state)} of parameters and optimizer state per device{compared}",
        "FLOPs": f"{flops} per token, forward and backward{' and reference' if compared else ''}",
        "attention": setup.kernel,
        **({"compiler": options} if options else {}),
        **_dropout(setup),
        **_data(setup),
        "run directory": run.run.dir,
    }


def _groups(optimizer: OptimizerConfig, specs: Specs) -> dict[str, str | list[str]]:
    """The groups of the optimizer, if there are any, and the settings that it does not read."""
    lines = group_lines(optimizer, specs)
    ignored = ", ".join(unread(optimizer))
    return {
        **({"groups": lines} if lines else {}),
        **({"no effect": f"{ignored}: not read by {optimizer.name}"} if ignored else {}),
    }


def _average(train: TrainConfig) -> dict[str, str]:
    if not train.ema:
        return {}
    rule = "plain mean" if train.ema == 1 else f"exponential, decay {train.ema:g}"
    start = f"from step {train.average_from + 1:,} on"
    return {"average": f"{rule}, {start}; evaluations and the result take it"}


def _parameters(counted_specs: Specs, target: TrainState) -> str:
    """How many parameters a model has, where a quantized matrix counts as the unquantized one, and
    how many of them learn, if not all."""
    parameters = count_text(counted_specs)
    if not target.frozen:
        return parameters
    learning, _ = split_frozen(target.params, target.frozen)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(learning)]
    return f"{parameters}, of which {human_count(sum(sizes))} learn"


def peak_text(platform: str, flops: float | None) -> str:
    """The peak of a device, to follow its name; empty for CPUs, for which none is published."""
    if flops is not None:
        return f", peak {flops / 1e12:.3g} TFLOP/s each"
    return "" if platform == "cpu" else ", unknown peak (no MFU)"


def _data(setup: RunSetup) -> dict[str, str | list[str]]:
    settings, train, validation = setup.run.train, setup.corpus.train, setup.corpus.validation
    held_out = f"{human_count(validation.tokens)} held out" if validation else "none held out"
    lines: dict[str, str | list[str]] = {
        "data": (
            f"{setup.corpus.task.name}: {human_count(train.tokens)} tokens to train on"
            f" ({train.documents:,} documents), {held_out}"
        )
    }
    if text := beginning_text(setup.corpus, setup.run.data.bos):
        lines["documents"] = text
    if shares := train.shares(settings.steps, settings.batch_size):
        lines["mixture"] = [
            f"{drawn.share:.2%} of {drawn.name}: {drawn.rows:,} rows, {drawn.epochs:.2f} epochs"
            for drawn in shares
        ]
    filled = setup.corpus.train.filled
    if filled < 1:
        lines["rows"] = f"{filled:.2%} filled"
    if (count := settings.n_microbatches) > 1:
        lines["microbatches"] = f"{count} of {settings.batch_size // count:,} sequences"
    rate = train.bytes / max(train.tokens, 1)
    epoch = setup.batches.examples / settings.batch_size
    return lines | {
        "tokenizer": f"{setup.corpus.tokenizer.vocab_size:,} tokens, {rate:.2f} bytes per token",
        "one epoch": (
            f"{epoch:,.1f} steps of {human_count(setup.tokens_per_step)} tokens; the run is"
            f" {settings.steps / epoch:.2f} epochs"
        ),
    }


def beginning_text(corpus: Corpus, bos: str) -> str:
    """The token with which documents begin, as data.bos=`bos` says; empty if they begin with their
    text."""
    stores = [store for store in corpus.stores["train"] if store.beginning]
    if not stores:
        return ""
    shown = " ".join(map(corpus.tokenizer.shown, stores[0].beginning))
    return f"begin with {shown}, which is no target (data.bos={bos})"


def _dropout(setup: RunSetup) -> dict[str, str]:
    """A line where the settings ask for a dropout that the objective leaves out."""
    model, adapter = setup.asked.model, setup.asked.adapter
    rates = {"model.dropout": model.dropout}
    if model.attention_dropout != "auto":
        rates["model.attention_dropout"] = model.attention_dropout
    rates["adapter.dropout"] = adapter.dropout
    named = " and ".join(f"{name}={rate:g}" for name, rate in rates.items() if rate)
    if setup.drops_out or not named:
        return {}
    return {
        "dropout": f"none: data.objective={setup.task.name} does not apply {named};"
        " train.preference_dropout=True does"
    }


def _layers(model: ModelConfig) -> str:
    decoder = str(model.n_layers)
    return f"{model.encoder_layers} + {decoder}" if model.family == "encoder_decoder" else decoder


def _bytes_per_device(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(leaf.dtype.itemsize)
