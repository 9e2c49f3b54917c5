"""Evaluation of a run's checkpoint, or of a Hugging Face model, on text: its loss, and its
translations with their BLEU."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

import numpy as np

from jaxformer import data
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import ObjectiveName, RunConfig
from jaxformer.config.settings import with_settings
from jaxformer.data.task import Task
from jaxformer.files import ConfigError
from jaxformer.generation.beam import beam_search
from jaxformer.generation.prompts import full_batch, padded, rounded
from jaxformer.models.transformer import context_of
from jaxformer.runs.config import looked_at
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.evaluation import (
    Evaluation,
    Watch,
    bytes_of_targets,
    make_evaluation,
    unwatched,
)
from jaxformer.runs.init_from import Reference
from jaxformer.runs.loading import Loaded, Reading, load, require_exclusive
from jaxformer.runs.model_files import ModelFiles, writing_rules
from jaxformer.runs.objectives import OBJECTIVES, objective_of, task_of, with_chats
from jaxformer.runs.resolve import check_start, keeps_start, preference_options
from jaxformer.tokenizer import Tokenizer


def evaluate_run(
    path: str | Path,
    validation: str = "",
    step: int | None = None,
    objective: ObjectiveName = "auto",
    cache_dir: str | Path = "",
    watch: Watch = unwatched,
    train: str = "",
    init_from: str = "",
    **reading: Unpack[Reading],
) -> Evaluation:
    """Evaluates a run's checkpoint (the newest, or that of `step`) on the text `validation`, or on
    the text that the run held out; with `quantize` and `weights` as `jf.load` takes them.

    A Hugging Face model has held out nothing, and may be evaluated with another `objective` than
    that of its family. A run with "dpo" or "ipo" is compared with its run.init_from. Tokenized text
    is cached in `cache_dir`, by default that of this user (`own_cache`), and never where the run
    says, because a run directory may come from somebody else; for the same reason what the run has
    at a URL or on the hub has to be named, as `validation`, `train` or `init_from`. `watch` takes
    the batches and their number, and yields the batches, as `ProgressBar.evaluation` does.
    """
    files = ModelFiles(path)
    run = _on_text(files, validation, train, init_from, objective, cache_dir)
    task = task_of(run.model, run.data)
    model, corpus = _loaded(files, run, task, step, init_from, reading)
    assert corpus.validation is not None  # `_loaded` refuses a run without
    # As many rows as training computes at a time, which fit its devices.
    rows = run.train.batch_size // run.train.n_microbatches
    heldout = data.evaluation_batches(corpus.validation, run.data, rows)
    batches: Iterable[Any] = watch(heldout, len(heldout))
    row = OBJECTIVES[task.name]
    if keeps_start(row, run):
        check_start(task.name, run)
        record = RunDirectory(files.path).reference
        reference = Reference(ModelFiles(run.run.init_from), model.config, record)
        batches = map(reference, batches)
    config = model.config
    if "virtual" in model.params and not config.attention.max_segments:
        # Each segment may have a prompt.
        segments = corpus.validation.most_segments() or 0
        config = with_settings(config, {"attention.max_segments": segments})
    options = preference_options(row, run.train, run.adapter)
    evaluate = make_evaluation(task.name, config, bytes_of_targets(corpus), options)
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
    train: str = "",
    init_from: str = "",
    search: Mapping[str, Any] = MappingProxyType({}),
    **reading: Unpack[Reading],
) -> Translations:
    """The pairs of `validation`, or those the run held out, each source translated by beam search
    with the keywords `search` of `beam_search`."""
    files = ModelFiles(path)
    run = _on_text(files, validation, train, init_from, cache_dir=cache_dir)
    task = task_of(run.model, run.data)
    if task.name != "seq2seq":
        raise ConfigError(
            f"{path} was trained with data.objective={task.name}, but translation needs a model"
            " trained with seq2seq."
        )
    model, corpus = _loaded(files, run, task, step, init_from, reading)
    sources = list[str]()
    references = list[str]()
    for piece in corpus.validation_records():
        source, reference = piece.record
        sources.append(str(source))
        references.append(str(reference))
    assert model.tokenizer is not None  # `_loaded` refuses a model without
    outputs = translate(model.params, model.config, model.tokenizer, sources, **search)
    return Translations(sources, references, outputs)


def _loaded(
    files: ModelFiles,
    run: RunConfig,
    task: Task,
    step: int | None,
    init_from: str,
    reading: Reading,
) -> tuple[Loaded, data.Corpus]:
    """The model and the text that it is evaluated on."""
    # Of a run with an adapter run.init_from is the model below it, and of others the reference.
    base = None
    if files.has_adapter:
        base = init_from or None
    model = load(files, step, base=base, **reading)
    require_exclusive(model, files.path)
    corpus = data.prepare(
        run.data,
        run.tokenizer,
        task,
        seed=run.run.seed,
        vocab_size=run.model.vocab_size,
        model_labels=data.ModelLabels(model.labels),
    )
    if corpus.validation is None or model.tokenizer is None:
        raise _nothing_held_out(files.path)
    return model, corpus


def _nothing_held_out(path: str | Path) -> ConfigError:
    return ConfigError(f"{path} held out no text: name some with --data.validation PATH.")


def _on_text(
    files: ModelFiles,
    validation: str,
    train: str,
    init_from: str,
    objective: ObjectiveName = "auto",
    cache_dir: str | Path = "",
) -> RunConfig:
    """The settings of a model as it is looked at, without its training text where the text to
    evaluate on is separate."""
    run = files.run
    is_trained = bool(run.data.train)
    if validation or run.data.validation:
        train = train or run.data.train  # which is not read
    row = OBJECTIVES[objective_of(run.model, run.data)]
    base: str | None = init_from
    if run.adapter.kind == "none" and not keeps_start(row, run):
        if init_from:
            raise ConfigError(
                f"{files} is evaluated without the model that it began with: leave out"
                " --run.init_from."
            )
        base = None
    run = looked_at(files, cache_dir, train, validation, base)
    text = run.data.validation
    if objective != "auto" and is_trained:
        trained = objective_of(run.model, run.data)
        raise ConfigError(
            f"{files} is evaluated with the objective of its training, data.objective={trained}:"
            " leave out --data.objective."
        )
    if not text and not (run.data.train and run.data.validation_fraction):
        raise _nothing_held_out(files.path)
    settings = run.data
    if objective != "auto":
        settings = dataclasses.replace(settings, objective=objective)
    if text and not is_trained:
        settings = with_chats(run.model, settings, "validation")
    if text:
        data.find_texts(settings, "data.validation", task_of(run.model, settings).fields)
        # Rows to train on are not read, whatever their order: no thread makes their tokens.
        settings = dataclasses.replace(settings, train=text, weights="", order="epochs")
    return dataclasses.replace(run, data=settings)


def translate(
    params: Params,
    config: ModelConfig,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    batch_size: int = 32,
    **search: Any,
) -> list[str]:
    """What an encoder-decoder writes for each text by beam search, in batches of texts of similar
    length.

    Sources and the start of targets are those of the objective `pairs`. A source that exceeds
    model.max_length is cut, with a warning. A target has at most 3/2 as many tokens as the longest
    source of its batch (rounded up), and ten more. `search` are keywords of `beam_search`, which
    replace those that the model's files say.
    """
    start = tokenizer.as_target([])
    target_context = context_of(params, config)
    context = context_of(params, config, source=True)
    encoded = tokenizer.encode_batch(texts)
    source_limit = context - len(tokenizer.as_source([]))
    cut = sum(len(ids) > source_limit for ids in encoded)
    if cut:
        warnings.warn(
            f"{cut} of {len(texts)} texts are cut to the model.max_length={context} of this model.",
            stacklevel=2,
        )
    rules = {"keep": 1} | writing_rules(tokenizer) | search
    sources = [tokenizer.as_source(ids[:source_limit]) for ids in encoded]
    targets = [""] * len(texts)
    size = min(batch_size, len(texts))
    # Texts of a batch that are about as long waste little padding.
    order = sorted(range(len(texts)), key=lambda index: len(sources[index]))
    for first in range(0, len(texts), size or 1):
        batch = order[first : first + size]
        source, segment_ids = padded(full_batch([sources[index] for index in batch], size))
        # Rounded up twice, so that few programs compile.
        target_length = min(rounded(rounded(source.shape[1]) * 3 // 2 + 11), target_context)
        best = beam_search(
            params,
            config,
            np.tile(start, (size, 1)),
            target_length - len(start),
            source=source,
            source_segment_ids=segment_ids,
            **rules,
        )
        for index, tokens in zip(batch, np.asarray(best.tokens[:, 0]), strict=False):
            targets[index] = tokenizer.decode(tokens)
    return targets


def bleu_metric(tokenizer: str = "13a") -> Any:
    """sacrebleu's BLEU (Papineni et al. 2002, arXiv:1804.08771), with `corpus_score` and
    `get_signature`.

    `tokenizer` is the name of one of sacrebleu's, which split texts into what BLEU counts: 13a
    takes what stands between spaces for a word; zh, ja-mecab, ko-mecab and char are for scripts
    without spaces.
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError:
        raise ConfigError(
            'BLEU needs sacrebleu, which is not installed: pip install "jaxformer[translation]".'
        ) from None
    if tokenizer not in BLEU.TOKENIZERS:
        raise ConfigError(
            f"there is no BLEU tokenizer {tokenizer!r}: choose one of"
            f" {', '.join(sorted(BLEU.TOKENIZERS))}."
        )
    try:
        return BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError, OSError) as error:  # of its package, or of its model
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the BLEU tokenizer {tokenizer!r} cannot be used here ({reason}): install what it"
            " needs, or choose another, such as char."
        ) from error
