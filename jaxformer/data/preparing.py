"""Tokenizes a run's text beforehand: whole, or a share of it as one of many tasks that know nothing
of one another."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxformer.config import ConfigError, DataConfig, TokenizerConfig
from jaxformer.data.corpus import check_fit, find_named, find_sides, tokenizer_of
from jaxformer.data.ids import IdFiles
from jaxformer.data.sources import Source
from jaxformer.data.splits import Scan, Split
from jaxformer.data.store import MANIFEST, TokenStore
from jaxformer.data.task import Task
from jaxformer.data.texts import SCANS, TOKENIZERS, Prepared, build_part, store_of, write_prepared
from jaxformer.data.vocabulary import given_tokenizer
from jaxformer.settings import Log
from jaxformer.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextSummary:
    """What a tokenized text holds: tokens with the end of each document, bytes of text, the longest
    document in tokens."""

    name: str
    documents: int
    tokens: int
    bytes: int
    longest: int
    skipped: tuple[str, ...]


def prepare_text(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    *,
    output: Path | None = None,
    thorough: bool = False,
    vocab_size: int = 0,
    log: Log = lambda line: None,
) -> list[TextSummary]:
    """Tokenizes all text of a run that is not yet, to its cache or to `output`, which is then a
    source of its own.

    `thorough` reads all that is there, holds it against its checksums, and makes nothing.
    `vocab_size` is the model's, 0 for any. Raises ConfigError for text, or a store, that cannot be
    used.
    """
    _require_text(task)
    cache = Path(os.path.expanduser(data.cache_dir))
    if thorough and output:
        data = replace(data, train=str(output), validation="", weights="", epochs="")
        output = None
    folder = _ready(output) if output else cache / "stores"
    sides = find_sides(data, settings, task, (output or cache) / SCANS, log)
    if output:
        _require_sources(split.source for splits in sides.values() for split in splits)
    tokenizer = tokenizer_of(settings, task, vocab_size, sides, output or cache, log)
    if output:
        _require_own(output, tokenizer, [split.source.spec for split in sides["train"]])
    summary: list[TextSummary] = []
    texts: dict[str, list[tuple[Source, Scan]]] = {side: [] for side in sides}
    for side, splits in sides.items():
        for split in splits:
            if side == "train" or split.side == "all":  # else the text is on both sides
                store = store_of(split.source, split.scan, tokenizer, folder, log, thorough)
                summary.append(_summary(split, store))
                texts[side].append((split.source, split.scan))
    if output:
        write_prepared(output, tokenizer, texts)
    return summary


def prepare_share(
    data: DataConfig,
    settings: TokenizerConfig,
    task: Task,
    share: tuple[int, int],
    *,
    output: Path | None = None,
    vocab_size: int = 0,
    log: Log = lambda line: None,
) -> None:
    """Makes the shards of task `share[0]` of `share[1]`.

    Where the tokenizer is yet to be trained, each task reads all text, and trains it unless another
    was sooner: it is the same.
    """
    _require_text(task)
    cache = Path(os.path.expanduser(data.cache_dir))
    folder = _ready(output) if output else cache / "stores"
    train, held = find_named(data, settings, task)
    if output:
        _require_sources([*train, *held])
    kept = output or cache
    tokenizer = given_tokenizer(settings, task.specials)
    if tokenizer is None:
        log(
            "each task reads all text for the tokenizer: with --tokenizer.path, of one made before,"
            " it reads its own part"
        )
        sides = find_sides(data, settings, task, kept / SCANS, log)
        tokenizer = tokenizer_of(settings, task, vocab_size, sides, kept, log)
    check_fit(task, vocab_size, tokenizer, settings.path)
    if output:
        _require_own(output, tokenizer, [source.spec for source in train])
    for source in [*train, *held]:
        if not isinstance(source, (Prepared, IdFiles)):
            build_part(source, tokenizer, kept / SCANS, folder, share, log)


def _ready(output: Path) -> Path:
    """The directory for tokens, made. Raises ConfigError where it cannot be, or holds what an
    earlier call did not write."""
    new = "name one that is new, or that an earlier call began"
    try:
        output.mkdir(parents=True, exist_ok=True)
        names = sorted(name for name in os.listdir(output) if not name.startswith("."))
    except OSError as error:
        raise ConfigError(
            f"--output {output} is no directory that can be used ({error.strerror or error}):"
            f" {new}."
        ) from None
    if not os.access(output, os.W_OK):
        raise ConfigError(f"--output {output} cannot be written: {new}.")
    if names and not any(
        re.fullmatch(f"[0-9a-f]{{32}}|{SCANS}|{TOKENIZERS}", name) for name in names
    ):
        raise ConfigError(f"--output {output} holds other things ({', '.join(names[:3])}): {new}.")
    return output


def _require_own(output: Path, tokenizer: Tokenizer, specs: list[str]) -> None:
    """Raises ConfigError where a directory was prepared of other text, or with another
    tokenizer."""
    try:
        manifest = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
        before = [entry["spec"] for entry in manifest["train"]]
        other = "with another tokenizer" if manifest["tokenizer"] != tokenizer.fingerprint() else ""
    except (OSError, ValueError, KeyError, TypeError):
        return
    if before != specs:
        other = f"of other text ({'; '.join(before)})"
    if other:
        raise ConfigError(
            f"--output {output} was prepared {other}: name a new directory, so that nothing is"
            " lost."
        )


def _require_sources(sources: Iterable[Source]) -> None:
    for source in sources:
        if isinstance(source, IdFiles):
            raise ConfigError(
                f"--output: {source} holds token ids already: train on it as it is, or name its"
                " text."
            )
        if isinstance(source, Prepared):
            raise ConfigError(
                f"--output: {source.folder}, of {source.setting}, is prepared already: train on it"
                " as it is, or name the text that it was made of."
            )


def _require_text(task: Task) -> None:
    if len(task.fields) > 1:
        raise ConfigError(
            f"data.objective={task.name} reads records, which training encodes by itself in one go:"
            " jaxformer prepare tokenizes text."
        )


def _summary(split: Split, store: TokenStore) -> TextSummary:
    longest = int(np.diff(store.ends(), prepend=0).max(initial=0))
    skipped = tuple(split.scan.skipped.lines())
    return TextSummary(
        str(split.source), store.documents, store.tokens, store.bytes, longest, skipped
    )
