"""The data package as the composer calls it: from the settings of a whole run."""

from collections.abc import Callable
from typing import Any, TypeVar

from jaxformer import data
from jaxformer.config.run import RunConfig
from jaxformer.data import corpus
from jaxformer.data.templates import Template
from jaxformer.runs.objectives import row_format, task_of
from jaxformer.tokenizer import Tokenizer

Log = Callable[[str], None]
Kind = TypeVar("Kind", bound=Template)


def quiet(line: str) -> None:
    pass


def prepare(run: RunConfig, log: Log = quiet, labels: tuple[str, ...] = ()) -> data.Corpus:
    task, size = task_of(run.model, run.data), run.model.vocab_size
    options = {"seed": run.run.seed, "vocab_size": size, "log": log}
    options["model_labels"] = data.ModelLabels(labels)
    return data.prepare(run.data, run.tokenizer, task, **options)  # type: ignore[arg-type]


def tokenize(run: RunConfig, log: Log = quiet) -> Any:
    """The store of a run's first text, or its examples, before rows are cut from them."""
    task, size = task_of(run.model, run.data), run.model.vocab_size
    made = corpus.tokenize(run.data, run.tokenizer, task, vocab_size=size, log=log)
    return made.parts["train"][0].store


def cut_rows(
    kind: Callable[..., Any], store: data.TokenStore, run: RunConfig, tokenizer: Tokenizer
) -> Any:
    """The rows that a maker of rows cuts from a store for a run."""
    return kind(store, run.data, row_format(run.model, run.data), tokenizer)


def template_of(kind: type[Kind], run: RunConfig, tokenizer: Tokenizer) -> Kind:
    return kind(row_format(run.model, run.data), tokenizer)
