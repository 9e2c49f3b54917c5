"""Evaluation of a run's checkpoint, or of a Hugging Face model, on text: its loss, and its
translations."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

from jaxformer import data
from jaxformer.config.run import ObjectiveName, RunConfig
from jaxformer.files import ConfigError, located
from jaxformer.interop.gguf_files import is_gguf
from jaxformer.runs.evaluation import (
    Evaluation,
    Watch,
    bytes_of_targets,
    corpus_of,
    make_evaluation,
    own_cache,
    unwatched,
)
from jaxformer.runs.loading import Reading, load, require_exclusive, run_of, text_directory
from jaxformer.runs.objectives import OBJECTIVES, objective_of, task_of
from jaxformer.runs.reference import Reference
from jaxformer.runs.resolve import check_start, keeps_start, preference_options
from jaxformer.runs.translate import translate
from jaxformer.tokenizer.metadata import tokenizer_file


def evaluate_run(
    path: str | Path,
    validation: str = "",
    step: int | None = None,
    objective: ObjectiveName = "auto",
    cache_dir: str | Path = "",
    watch: Watch = unwatched,
    **reading: Unpack[Reading],
) -> Evaluation:
    """Evaluates a run's checkpoint (the newest, or that of `step`) on the text `validation`, or on
    the text that the run held out; with `quantize` and `weights` as `jf.load` takes them.

    A Hugging Face model has held out nothing, and may be evaluated with another `objective` than
    that of its family. A run with "dpo" or "ipo" is compared with its run.init_from. Tokenized text
    is cached in `cache_dir`, by default that of this user (`own_cache`), and never where the run
    says, because a run directory may come from somebody else. `watch` takes the batches and their
    number, and yields the batches, as `ProgressBar.evaluation` does.
    """
    _refuse_gguf(path)
    model = load(path, step, **reading)
    require_exclusive(model, path)
    run = _on_text(run_of(path), located(path), validation, objective, cache_dir)
    corpus = corpus_of(run, model.labels)
    if corpus.validation is None or model.tokenizer is None:
        raise _nothing_held_out(path)
    rows = run.train.batch_size // run.train.n_microbatches
    heldout = data.evaluation_batches(corpus.validation, run.data, rows)
    batches: Iterable[Any] = watch(heldout, len(heldout))
    row = OBJECTIVES[corpus.task.name]
    if keeps_start(row, run.adapter):
        check_start(corpus.task.name, run.adapter, run.run.init_from)
        batches = map(Reference(run.run.init_from, model.config, path), batches)
    config = model.config
    if "virtual" in model.params and not config.max_segments:
        # Each segment may have a prompt.
        segments = corpus.validation.most_segments() or 0
        config = dataclasses.replace(config, max_segments=segments)
    options = preference_options(row, run.train, run.adapter)
    evaluate = make_evaluation(corpus.task.name, config, bytes_of_targets(corpus), options)
    return evaluate(model.params, batches)


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
    search: Mapping[str, Any] = MappingProxyType({}),
    **reading: Unpack[Reading],
) -> Translations:
    """The pairs of `validation`, or those the run held out, each source translated by beam search
    with the keywords `search` of `beam_search`."""
    _refuse_gguf(path)
    run = _on_text(run_of(path), located(path), validation, cache_dir=cache_dir)
    objective = objective_of(run.model, run.data)
    if objective != "seq2seq":
        raise ConfigError(
            f"{path} was trained with data.objective={objective}, but translation needs a model"
            " trained with seq2seq."
        )
    model = load(path, step, **reading)
    records = [piece.record for piece in corpus_of(run).validation_records()]
    if not records or model.tokenizer is None:
        raise _nothing_held_out(path)
    sources, references = ([str(record[side]) for record in records] for side in (0, 1))
    outputs = translate(model.params, model.config, model.tokenizer, sources, **search)
    return Translations(sources, references, outputs)


def _refuse_gguf(path: str | Path) -> None:
    """ConfigError for a GGUF file, whose tokenizer is in no file that text is prepared with."""
    if is_gguf(path):
        raise ConfigError(
            f"{path} is a GGUF file, and text is prepared with a tokenizer.json: jaxformer convert"
            f" {path} DIRECTORY writes a model directory, which can be evaluated."
        )


def _nothing_held_out(path: str | Path) -> ConfigError:
    return ConfigError(f"{path} held out no text: name some with --data.validation PATH.")


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
        settings = dataclasses.replace(named, train=text, weights="")
    file = str(tokenizer_file(text_directory(path)))
    tokenizer = dataclasses.replace(run.tokenizer, path=file, chat_template="")
    return dataclasses.replace(run, data=settings, tokenizer=tokenizer)
