"""Evaluation: a model's loss on held-out text, per token and per byte."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.config import ConfigError, ModelConfig, Objective, RunConfig
from jaxformer.generation.translate import translate
from jaxformer.layers.head import head, logits_of_rows, output_layer, pooled
from jaxformer.loading import load, run_of
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.params import Params
from jaxformer.sharding import MESH_AXES, batch_sharding
from jaxformer.tokenizer.files import tokenizer_file
from jaxformer.training.step import Batch, loss_sums

Evaluation = dict[str, float]


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This process's rows of a batch as global arrays on the mesh."""
    where = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(where, rows) for name, rows in batch.items()}


def make_evaluate(
    config: ModelConfig, mesh: Mesh, token_bytes: np.ndarray | None = None
) -> Callable[[Params, Iterable[Batch]], Evaluation]:
    """A function of params and batches to `val_loss` (nats a target), and what else tells of the model's objective.

    With `token_bytes` [V], the UTF-8 bytes each token stands for, `val_bits_per_byte` (ends of text counted in); for heads
    other than a language model's `val_accuracy`, the share of targets that the likeliest class is; and with next_sentence
    `val_next_sentence_accuracy`.
    """

    sums_of = jax.jit(functools.partial(_sums, config))

    def evaluate(params: Params, batches: Iterable[Batch]) -> Evaluation:
        sums: list[dict[str, Any]] = []
        weights = pairs = length = 0.0
        with jax.set_mesh(mesh):
            for batch in batches:
                sums.append(sums_of(params, place_batch(batch, mesh)))
                weights += float(batch["weights"].sum())
                pairs += float(batch.get("next_sentence_weights", np.zeros(1)).sum())
                if token_bytes is not None:
                    length += float((token_bytes[batch["targets"]] * batch["weights"]).sum())
                if len(sums) > 2:
                    jax.block_until_ready(sums[-3])  # a few batches ahead, not all of them
        total = {name: math.fsum(float(entry[name]) for entry in sums) for name in (sums[0] if sums else {"nats": 0})}
        found = {"val_loss": total["nats"] / max(weights, 1)}
        if token_bytes is not None:
            found["val_bits_per_byte"] = total["nats"] / math.log(2) / max(length, 1)
        if "right" in total:
            found["val_accuracy"] = total["right"] / max(weights, 1)
        if "follows" in total:
            found["val_next_sentence_accuracy"] = total["follows"] / max(pairs, 1)
        return found

    return evaluate


def _sums(config: ModelConfig, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Nats of a batch, and how many of its targets the likeliest classes are."""
    sums = {"nats": loss_sums(params, config, batch)[1]}
    if config.output == "language":
        return sums
    inputs = inputs_of(batch)
    x = hidden(params, config, inputs).x
    right = jnp.argmax(head(params, config, x, inputs.places), axis=-1) == batch["targets"]
    sums["right"] = (right * batch["weights"]).sum()
    if config.next_sentence:
        layer = output_layer(params, config, pooled(params, config, x, inputs.places), "next_sentence")
        follows = jnp.argmax(logits_of_rows(*layer), axis=-1) == batch["next_sentence"]
        sums["follows"] = (follows * batch["next_sentence_weights"]).sum()
    return sums


def evaluate_run(
    path: str | Path, validation: str = "", step: int | None = None, objective: Objective = "auto"
) -> Evaluation:
    """Evaluates a run's checkpoint (the newest, or that of `step`) on the text `validation`, or on what the run held out.

    A model that was trained elsewhere has held out nothing, and may be asked another `objective` than its family's own.
    Raises ConfigError if there is no model at `path` that can be read, or no text to evaluate on.
    """
    model = load(path, step)
    run = _on_text(run_of(path), Path(path), validation, objective)
    corpus = data.prepare(run, labels=model.labels)
    if corpus.validation is None or model.tokenizer is None:
        raise ConfigError(f"{path} held out no text: name some, as in --data.validation PATH.")
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), MESH_AXES)
    rows = run.train.batch_size // run.train.microbatches
    evaluate = make_evaluate(model.config, mesh, bytes_of_targets(corpus))
    return evaluate(model.params, data.evaluation_batches(corpus.validation, run.data, rows))


class Translations(NamedTuple):
    """Sources, what was to be written for each, and what the model wrote."""

    sources: list[str]
    references: list[str]
    outputs: list[str]


def translate_run(path: str | Path, validation: str = "", step: int | None = None, **search: Any) -> Translations:
    """The pairs of `validation`, or those the run held out, each source translated by beam search.

    `search` are the keywords of `generate.translate.translate`. Raises ConfigError where `evaluate_run` does, and for a run
    that learnt no pairs.
    """
    run = _on_text(run_of(path), Path(path), validation)
    if data.objective_of(run) != "pairs":
        raise ConfigError(f"{path} learnt data.objective={data.objective_of(run)}: only a model of pairs translates.")
    model, records = load(path, step), [piece.record for piece in data.prepare(run).validation_records()]
    if not records or model.tokenizer is None:
        raise ConfigError(f"{path} held out no text: name some, as in --data.validation PATH.")
    sources, references = ([str(record[side]) for record in records] for side in (0, 1))
    outputs = translate(model.params, model.config, model.tokenizer, sources, **search)
    return Translations(sources, references, outputs)


def bytes_of_targets(corpus: data.Corpus) -> np.ndarray | None:
    """Bytes of each token where every byte of the text is predicted once; None where bits per byte would mean nothing."""
    return corpus.tokenizer.token_bytes() if corpus.objective == "causal" else None


def _on_text(run: RunConfig, path: Path, validation: str, objective: Objective = "auto") -> RunConfig:
    """`run` with the tokenizer it was trained with, reading only the text to evaluate on where that stands apart."""
    text = validation or run.data.validation
    if objective != "auto" and run.data.train:
        raise ConfigError(f"{path} is evaluated on what it learnt, data.objective={data.objective_of(run)}: name no other.")
    if objective != "auto":
        run = dataclasses.replace(run, data=dataclasses.replace(run.data, objective=objective))
    if not text and not run.data.train:
        raise ConfigError(
            f"{path} was trained elsewhere, and has held out no text: name some, as in --data.validation PATH."
        )
    if text:
        data.find_texts(dataclasses.replace(run.data, validation=text), "data.validation", data.fields_of(run))
    alone = dataclasses.replace(run.data, train=text, validation=text, weights="", epochs="", length_warmup="")
    texts = alone if text else run.data
    return dataclasses.replace(run, data=texts, tokenizer=dataclasses.replace(run.tokenizer, path=str(tokenizer_file(path))))
