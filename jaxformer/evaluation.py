"""Evaluation: a model's loss on held-out text, per token and per byte."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer import data
from jaxformer.config import ConfigError, DataConfig, ModelConfig, ObjectiveName, RunConfig
from jaxformer.objectives import OBJECTIVES, loss_of, objective_of, task_of
from jaxformer.params import Params
from jaxformer.settings import Log
from jaxformer.tokenizer.files import tokenizer_file
from jaxformer.training.evaluate import Totals, make_totals
from jaxformer.training.step import Batch, Sums

Evaluation = dict[str, float]


def make_evaluation(
    objective: str, config: ModelConfig, token_bytes: np.ndarray | None = None
) -> Callable[[Params, Iterable[Batch]], Evaluation]:
    """A function of params and batches to `val_loss` (nats per target) and the other entries of the
    loss and the metrics of the objective.

    `val_accuracy` is the fraction of targets that are the most likely class. With `token_bytes`
    [V], the UTF-8 bytes of each token, also `val_bits_per_byte` (including ends of text).
    """
    loss = loss_of(objective, config)
    metrics = OBJECTIVES[objective].metrics

    def sums(params: Params, batch: Batch, key: jax.Array | None) -> Sums:
        found = dict(loss(params, batch, None))
        if token_bytes is not None:
            length = (jnp.asarray(token_bytes)[batch["targets"]] * batch["weights"]).sum()
            found["bytes"] = (length, length)
        return {**found, **(metrics(params, config, batch) if metrics else {})}

    totals = make_totals(sums)

    def evaluate(params: Params, batches: Iterable[Batch]) -> Evaluation:
        return _line(totals(params, batches))

    return evaluate


def _line(totals: Totals) -> Evaluation:
    """The numbers of an evaluation from its totals. If the loss is not in nats, `val_loss` is the
    "nats" beside it."""
    nats, weight = totals.get("nats") or totals.get("loss") or (0.0, 0.0)
    line = {"val_loss": nats / max(weight, 1)}
    if "bytes" in totals:
        line["val_bits_per_byte"] = nats / math.log(2) / max(totals["bytes"][0], 1)
    for name, (total, weight) in totals.items():
        if name not in ("loss", "nats", "bytes"):
            line[f"val_{name}"] = total / (weight or 1)
    return line


def evaluate_run(
    path: str | Path,
    validation: str = "",
    step: int | None = None,
    objective: ObjectiveName = "auto",
    cache_dir: str | Path = "",
) -> Evaluation:
    """Evaluates a run's checkpoint (the newest, or that of `step`) on the text `validation`, or on
    the text that the run held out.

    A Hugging Face model has held out nothing, and may be evaluated with another `objective` than
    that of its family. Tokenized text is kept in `cache_dir`, by default that of this user
    (`own_cache`), and never where the run says, which may be a stranger's. Raises ConfigError if
    there is no readable model at `path`, or no text to evaluate on.
    """
    from jaxformer.loading import load, run_of

    model = load(path, step)
    run = _on_text(run_of(path), Path(path), validation, objective, cache_dir)
    corpus = corpus_of(run, model.labels)
    if corpus.validation is None or model.tokenizer is None:
        raise _nothing_held_out(path)
    rows, config = run.train.batch_size // run.train.microbatches, model.config
    if "virtual" in model.params and not config.max_segments:  # each segment may have a prompt
        most = corpus.validation.most_segments() or 0
        config = dataclasses.replace(config, max_segments=most)
    evaluate = make_evaluation(corpus.task.name, config, bytes_of_targets(corpus))
    return evaluate(model.params, data.evaluation_batches(corpus.validation, run.data, rows))


class Translations(NamedTuple):
    """Sources, their reference translations, and what the model wrote."""

    sources: list[str]
    references: list[str]
    outputs: list[str]


def translate_run(
    path: str | Path,
    validation: str = "",
    step: int | None = None,
    cache_dir: str | Path = "",
    **search: Any,
) -> Translations:
    """The pairs of `validation`, or those the run held out, each source translated by beam search.

    `search` are the keywords of `generation.translate.translate`. Raises ConfigError where
    `evaluate_run` does, and for a run that was not trained on pairs.
    """
    from jaxformer.generation.translate import translate
    from jaxformer.loading import load, run_of

    run = _on_text(run_of(path), Path(path), validation, cache_dir=cache_dir)
    objective = objective_of(run.model, run.data)
    if objective != "seq2seq":
        raise ConfigError(
            f"{path} was trained with data.objective={objective}, but translation needs a model"
            " trained with seq2seq."
        )
    model = load(path, step)
    records = [piece.record for piece in corpus_of(run).validation_records()]
    if not records or model.tokenizer is None:
        raise _nothing_held_out(path)
    sources, references = ([str(record[side]) for record in records] for side in (0, 1))
    outputs = translate(model.params, model.config, model.tokenizer, sources, **search)
    return Translations(sources, references, outputs)


def _nothing_held_out(path: str | Path) -> ConfigError:
    return ConfigError(f"{path} held out no text: name some with --data.validation PATH.")


def bytes_of_targets(corpus: data.Corpus) -> np.ndarray | None:
    """The bytes of each token if every byte of the text is predicted once; None where bits per byte
    are not defined."""
    return corpus.tokenizer.token_bytes() if corpus.task.every_token else None


def corpus_of(
    run: RunConfig, labels: tuple[str, ...] = (), log: Log = lambda line: None
) -> data.Corpus:
    """The data of a run as rows. Raises ConfigError as `data.prepare` does."""
    return data.prepare(
        run.data,
        run.tokenizer,
        task_of(run.model, run.data),
        seed=run.run.seed,
        vocab_size=run.model.vocab_size,
        labels=labels,
        log=log,
    )


def own_cache() -> str:
    """The directory in which this user keeps tokenized text: that of the environment variable
    JAXFORMER_DATA_CACHE, else the default of data.cache_dir."""
    return os.environ.get("JAXFORMER_DATA_CACHE") or DataConfig.cache_dir


def _on_text(
    run: RunConfig,
    path: Path,
    validation: str,
    objective: ObjectiveName = "auto",
    cache_dir: str | Path = "",
) -> RunConfig:
    """`run` with the tokenizer it was trained with and a cache of this user, and without its
    training text where the text to evaluate on is separate."""
    text = validation or run.data.validation
    if objective != "auto" and run.data.train:
        trained = objective_of(run.model, run.data)
        raise ConfigError(
            f"{path} is evaluated with the objective of its training, data.objective={trained}:"
            " leave out --data.objective."
        )
    if not text and not run.data.train:
        raise _nothing_held_out(path)
    settings = dataclasses.replace(run.data, cache_dir=str(cache_dir or own_cache()))
    if objective != "auto":
        settings = dataclasses.replace(settings, objective=objective)
    if text:
        named = dataclasses.replace(settings, validation=text)
        data.find_texts(named, "data.validation", task_of(run.model, named).fields)
        settings = dataclasses.replace(named, train=text, weights="", epochs="", length_warmup="")
    tokenizer = dataclasses.replace(run.tokenizer, path=str(tokenizer_file(path)))
    return dataclasses.replace(run, data=settings, tokenizer=tokenizer)
