"""Tokenizes a run's text beforehand: all of it, into its cache or a directory of its own."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxformer.config.run import DataConfig, TokenizerConfig
from jaxformer.config.settings import Log
from jaxformer.data.cache_files import MANIFEST, WRONG_RECORD
from jaxformer.data.corpus import find_sides, tokenizer_of
from jaxformer.data.sources import Source
from jaxformer.data.sources.records import is_text
from jaxformer.data.splits import Scan, SideName
from jaxformer.data.task import Task
from jaxformer.data.texts import SCANS, Prepared, StoreFolder
from jaxformer.files import ConfigError, located, read_object, store_errors


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
    """Tokenizes all text of a run that is not yet tokenized, to its cache or to `output`, which is
    then a source.

    `thorough` reads all that is there, compares it with its checksums, and makes nothing.
    `vocab_size` is the model's, 0 for any.
    """
    if not is_text(task.fields):
        raise ConfigError(
            f"data.objective={task.name} reads records, which training encodes itself: jaxformer"
            " prepare tokenizes text."
        )
    if thorough and output:
        data = replace(data, train=str(output), validation="", weights="")
        output = None
    cache = output or located(os.path.expanduser(data.cache_dir))
    try:
        with store_errors(cache, "listed"):
            is_free = not output or not output.exists() or (output / SCANS).is_dir()
            is_free = is_free or (cache.is_dir() and not any(cache.iterdir()))
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be read ({error.strerror or error}): name another directory."
        ) from None
    if not is_free:
        raise ConfigError(
            f"--output {output} holds other things: name a directory that is new, or that an"
            " earlier call began."
        )
    sides = find_sides(data, settings, task, cache / SCANS, log)
    tokenizer = tokenizer_of(settings, task, vocab_size, sides, cache, log)
    stores = StoreFolder(
        output or cache / "stores", tokenizer, task.beginning(data.bos, tokenizer), log
    )
    if output:
        _require_same_text(stores, [split.source for side in sides.values() for split in side])
    summary: list[TextSummary] = []
    texts: dict[SideName, list[tuple[Source, Scan]]] = {side: [] for side in sides}
    for side, splits in sides.items():
        for split in splits:
            if side == "validation" and split.side != "all":
                # A text that is on both sides was tokenized for training.
                continue
            store = stores.store_of(split.source, split.scan, make=not thorough)
            if thorough:
                store.verify(copies=False)
            longest = int(np.diff(store.ends(), prepend=0).max(initial=0))
            skipped = tuple(split.scan.skipped.lines())
            name = str(split.source)
            summary.append(
                TextSummary(name, store.documents, store.tokens, store.bytes, longest, skipped)
            )
            texts[side].append((split.source, split.scan))
    if output:
        stores.write_prepared(texts)
    return summary


def _require_same_text(output: StoreFolder, sources: list[Source]) -> None:
    """Refuses what is no text, and a directory that other text, another tokenizer or another
    data.bos made."""
    for source in sources:
        if isinstance(source, Prepared) or source.of_ids:
            raise ConfigError(
                f"--output: {source} holds tokens already: train on it as it is, or name its text."
            )
    try:
        manifest = read_object(output.path / MANIFEST)
        before = {entry["spec"] for entry in [*manifest["train"], *manifest["validation"]]}
        made_by = (manifest["tokenizer"], tuple(manifest.get("beginning", ())))
    except WRONG_RECORD:
        return
    is_there = before <= {source.spec for source in sources}
    if not is_there or made_by != (output.tokenizer.fingerprint(), output.beginning):
        raise ConfigError(
            f"--output {output.path} was prepared of other text ({'; '.join(sorted(before))}), or"
            " with another tokenizer or data.bos: name a new directory, so that nothing is lost."
        )
