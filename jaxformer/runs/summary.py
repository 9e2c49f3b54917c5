"""The summary of a run that is printed before its first step."""

import math

import jax

from jaxformer.arrays.hardware import bfloat16_note
from jaxformer.arrays.mesh import bytes_of_device
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import TrainConfig
from jaxformer.data.batches import Batches
from jaxformer.data.corpus import Corpus
from jaxformer.data.mixture import Mixture
from jaxformer.data.store import GrowingStore, TokenStore
from jaxformer.models.cost import count_text
from jaxformer.report import human_bytes, human_count
from jaxformer.runs.setup import RunSetup
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.optimizers.groups import group_sizes
from jaxformer.training.optimizers.run_optimizer import unread
from jaxformer.training.optimizers.schedules import schedule_text
from jaxformer.training.state import split_frozen

LOOPS = {"scan": "in a loop", "unroll": "unrolled"}


def summary(setup: RunSetup) -> dict[str, str | list[str]]:
    """The banner of a run: what it computes, on which devices, and from which data."""
    run = setup.run
    model = setup.run.model
    device = jax.devices()[0]
    optimizer = run.optimizer
    train = run.train
    lines: dict[str, str | list[str]] = {}
    lines["device"] = (
        f"{jax.device_count()} x {device.device_kind} ({device.platform})"
        f"{peak_text(device.platform, setup.peak)}"
    )
    if device.platform == "cpu" and model.dtype == "float32" and (note := bfloat16_note()):
        lines["dtype"] = note
    mesh = ", ".join(f"{name} {size}" for name, size in setup.mesh.shape.items())
    lines["mesh"] = [mesh, *setup.undivided]
    # A quantized matrix counts as the unquantized one.
    parameters = count_text(setup.counted_specs)
    if setup.target.frozen:
        learning, _ = split_frozen(setup.target.params, setup.target.frozen)
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(learning))
        parameters += f", of which {human_count(size)} learn"
    lines["model"] = model_text(model, parameters)
    lines["learning rate"] = schedule_text(optimizer, train.steps)
    lines["weights"] = [
        f"{group.pattern}: {len(sizes)} tensors, {human_count(sum(sizes))} parameters, learning"
        f" rate x {group.rate:g}, weight decay x {group.decay:g}"
        for group, sizes in group_sizes(optimizer, setup.specs).items()
    ]
    if ignored := unread(optimizer):
        lines["no effect"] = f"{', '.join(ignored)}: not read by {optimizer.name}"
    if train.ema:
        rule = f"exponential, decay {train.ema:g}"
        if train.ema == 1:
            rule = "plain mean"
        start = f"from step {train.average_from + 1:,} on"
        lines["average"] = f"{rule}, {start}; evaluations and the result take it"
    state = human_bytes(bytes_of_device(setup.target))
    memory = f"{state} of parameters and optimizer state per device"
    flops = f"{human_count(setup.flops_per_token)} per token, forward and backward"
    if setup.reference:
        reference = human_bytes(bytes_of_device(setup.with_teacher({}) or setup.target.params))
        memory += f", and {reference} of those of the reference"
        flops += " and reference"
    lines["memory"] = memory
    lines["FLOPs"] = flops
    lines["attention"] = setup.kernel
    if options := compiler_options(setup.mesh):
        lines["compiler"] = [f"{name}={value}" for name, value in options.items()]
    asked = setup.asked.model
    adapter = setup.asked.adapter
    rates = {"model.dropout": asked.dropout, "adapter.dropout": adapter.dropout}
    if asked.attention.dropout != "auto":
        rates["model.attention.dropout"] = asked.attention.dropout
    named = " and ".join(f"{name}={rate:g}" for name, rate in rates.items() if rate)
    if named and not setup.objective.dropout:
        lines["dropout"] = f"none: data.objective={setup.task.name} does not apply {named}"
    lines |= data_lines(setup.corpus, setup.batches, train, run.data.bos, setup.tokens_per_step)
    return lines | {"run directory": run.run.dir}


def model_text(model: ModelConfig, parameters: str) -> str:
    """The family and the sizes of a model, of which nothing is automatic any more."""
    layers = str(model.n_layers)
    if model.family == "encoder_decoder":
        layers = f"{model.encoder_layers} + {layers}"
    return (
        f"{model.family}, {parameters}, {layers} layers, {model.d_model} wide, {model.n_heads}"
        f" heads ({model.kv_heads} key-value), {model.vocab_size:,} tokens, {model.dtype} products,"
        f" layers {LOOPS[model.layer_loop]}, remat {model.remat}"
    )


def peak_text(platform: str, flops: float | None) -> str:
    """The peak of a device, to follow its name; empty for CPUs, for which none is published."""
    if flops is not None:
        return f", peak {flops / 1e12:.3g} TFLOP/s each"
    if platform == "cpu":
        return ""
    return ", unknown peak (no MFU)"


def data_lines(
    corpus: Corpus, batches: Batches, settings: TrainConfig, bos: str, tokens_per_step: int
) -> dict[str, str | list[str]]:
    """What is said of the data of a run. Of a text that is still tokenized neither its tokens nor
    its rows are asked for, which would wait for all of it."""
    train = corpus.train
    validation = corpus.validation
    held_out = "none"
    if validation:
        held_out = human_count(validation.tokens)
    stores = [rows.store for _, rows in train.sources("")]
    in_making = any(isinstance(store, GrowingStore) for store in stores)
    on = "tokens in the making to train on"
    if not in_making:
        on = f"{human_count(train.tokens)} tokens to train on ({train.documents:,} documents)"
    lines: dict[str, str | list[str]] = {"data": f"{corpus.task.name}: {on}, {held_out} held out"}
    if isinstance(stores[0], TokenStore) and stores[0].beginning:
        shown = " ".join(map(corpus.tokenizer.shown, stores[0].beginning))
        lines["documents"] = f"begin with {shown}, which is no target (data.bos={bos})"
    if isinstance(train, Mixture):
        shares = train.shares(settings.steps, settings.batch_size)
        lines["mixture"] = [
            f"{drawn.share:.2%} of {drawn.name}: {drawn.rows:,} rows, {drawn.epochs:.2f} epochs"
            for drawn in shares
        ]
    if train.filled < 1:
        lines["rows"] = f"{train.filled:.2%} filled"
    if (count := settings.n_microbatches) > 1:
        lines["microbatches"] = f"{count} of {settings.batch_size // count:,} sequences"
    entries = f"{corpus.tokenizer.vocab_size:,} tokens"
    lines["tokenizer"] = entries
    if in_making:
        return lines
    rate = train.bytes / max(train.tokens, 1)
    lines["tokenizer"] = f"{entries}, {rate:.2f} bytes per token"
    epoch = batches.examples / settings.batch_size
    lines["one epoch"] = (
        f"{epoch:,.1f} steps of {human_count(tokens_per_step)} tokens; the run is"
        f" {settings.steps / epoch:.2f} epochs"
    )
    return lines
