"""The tokenizer of a run: given, found in the cache, or made of the text that is for training."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from jaxformer.config.run import TokenizerConfig
from jaxformer.config.settings import Log
from jaxformer.data.cache_files import claimed
from jaxformer.data.sources import fingerprint
from jaxformer.data.sources.documents import PIECE_CHARACTERS
from jaxformer.data.splits import Sides, Split
from jaxformer.data.texts import FORMAT, Prepared, megabytes
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer, byte_tokenizer, character_tokenizer, train_bpe_tokenizer
from jaxformer.tokenizer.metadata import TOKENIZER_FILE

# Where a tokenizer is trained on a part of the text, the most that is taken from one place.
SAMPLE_CHARACTERS = 1 << 12


def given_tokenizer(
    settings: TokenizerConfig, specials: tuple[str, ...], prepared: Path | None = None
) -> Tokenizer | None:
    """The tokenizer of a file, of what was `prepared`, or of bytes; None where it needs text."""
    if settings.path and not os.path.exists(os.path.expanduser(settings.path)):
        raise ConfigError(
            f"tokenizer.path: {settings.path} does not exist: name a tokenizer.json, a directory of"
            " one or of GPT-2's vocab.json and merges.txt, or leave it empty to have one made."
        )
    if settings.path or prepared:
        return Tokenizer.load(settings.path or prepared or "")
    return byte_tokenizer(specials) if settings.kind == "bytes" else None


def make_tokenizer(
    settings: TokenizerConfig, sides: Sides, specials: tuple[str, ...], cache: Path, log: Log
) -> Tokenizer:
    """The tokenizer of a run, made or found: a BPE of text for training, characters of all."""
    train, every = sides["train"], [*sides["train"], *sides["validation"]]
    prepared = [split.source.folder for split in every if isinstance(split.source, Prepared)]
    if prepared and not settings.path and not (prepared[0] / TOKENIZER_FILE).is_file():
        raise ConfigError(
            f"{prepared[0]} has no {TOKENIZER_FILE}, with which it was prepared: copy the directory"
            " again."
        )
    tokenizer = given_tokenizer(settings, specials, *prepared[:1])
    if tokenizer:
        return tokenizer
    summary: tuple[object, ...] = tuple(dict.fromkeys(split.scan.content for split in every))
    if settings.kind == "bpe":
        texts = [split.identity() for split in train]
        summary = (texts, settings.vocab_size, settings.training_bytes, settings.pattern)
    path = cache / f"{fingerprint(FORMAT, settings.kind, *summary, *specials)}.json"
    if not path.exists():
        with claimed(cache, log):
            if not path.exists():
                began = time.perf_counter()
                if settings.kind == "bpe":
                    made = _train_bpe(settings, train, specials, log)
                else:
                    made = _take_characters(every, specials, log)
                seconds = time.perf_counter() - began
                log(f"tokenizer: {made.vocab_size:,} entries, made in {seconds:.1f} s")
                made.save(path)
                return Tokenizer.load(path)
    log(f"tokenizer: reusing {path}")
    return Tokenizer.load(path)


def _train_bpe(
    settings: TokenizerConfig, train: list[Split], specials: tuple[str, ...], log: Log
) -> Tokenizer:
    total, cap = sum(split.bytes for split in train), settings.training_bytes
    names = " and ".join(str(split.source) for split in train)
    log(
        f"tokenizer: training {settings.vocab_size:,} entries of byte-level BPE on"
        f" {megabytes(min(total, cap))} of {names}"
    )
    texts = (
        text for split in train for text in spread(split, round(cap * split.bytes / max(1, total)))
    )
    return train_bpe_tokenizer(texts, settings.vocab_size, specials, settings.pattern)


def _take_characters(every: list[Split], specials: tuple[str, ...], log: Log) -> Tokenizer:
    sources = [*{id(split.source): split.source for split in every}.values()]
    log("tokenizer: taking the characters of " + " and ".join(map(str, sources)))
    texts = (piece.text for source in sources for piece in source.pieces())
    return character_tokenizer(texts, specials)


def spread(split: Split, limit: int) -> Iterator[str]:
    """Pieces of a split's text, evenly over all of it, of at most `limit` bytes together."""
    rate, seen, used = min(1.0, limit / max(1, split.bytes)), 0, 0
    group = PIECE_CHARACTERS * 2 if rate == 1 else SAMPLE_CHARACTERS
    for piece in split.pieces():
        for start in range(0, len(piece.text), group):
            text = piece.text[start : start + group]
            size = len(text.encode())
            seen += size
            # A piece is taken where fewer bytes were than the rate gives up to its end.
            if used + size <= min(limit, seen * rate):
                used += size
                yield text
