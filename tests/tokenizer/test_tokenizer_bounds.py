"""A tokenizer.json of a stranger neither explodes nor hangs nor panics."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer, bounds, byte_tokenizer
from jaxformer.tokenizer.bpe import train_bpe
from jaxformer.tokenizer.encoding import Cuts

# Pre-tokenizers of published models, which are not refused: Qwen2's and DeepSeek's.
PUBLISHED = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]


def written(folder: Path, **changes: Any) -> Path:
    """The byte tokenizer's file with other values of some keys."""
    path = folder / "tokenizer.json"
    byte_tokenizer().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


def replaced(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [split | {"invert": False}, levels | {"use_regex": False}]
    return {"type": "Sequence", "pretokenizers": steps}


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_what_makes_a_text_many_times_longer_is_refused(part: str, tmp_path: Path) -> None:
    key = f"{part}s"
    few, many = ({"type": "Sequence", key: [replaced("a", "aa")] * n} for n in (3, 40))
    assert len(Tokenizer.load(written(tmp_path, **{part: few})).encode("a")) >= 1
    with pytest.raises(ConfigError, match=rf"tokenizer\.json: its {part} can make 1\.1e\+12"):
        Tokenizer.load(written(tmp_path, **{part: many}))


@pytest.mark.parametrize("pattern", ["(?:x|x)*$", "(q+q+)+y|q"])
def test_a_pattern_that_gives_up_on_a_short_text_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer\.json: .*{re.escape(repr(pattern))}"):
        Tokenizer.load(written(tmp_path, pre_tokenizer=split_by(pattern)))


def test_a_pattern_that_takes_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "TRIAL_SECONDS", 0.001)  # less than the process needs to start
    with pytest.raises(ConfigError, match=r"takes more than 0\.001 s"):
        Tokenizer.load(written(tmp_path, pre_tokenizer=split_by("b+|c")))


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_of_published_models_are_read(pattern: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(written(tmp_path, pre_tokenizer=split_by(pattern)))
    assert tokenizer.decode(tokenizer.encode("It's 42 naïve\n")) == "It's 42 naïve\n"


def test_a_panic_while_encoding_names_the_file(tmp_path: Path) -> None:
    # Only a text of many `~` and `@` in turn makes this one take its ten million steps.
    pattern = r"((~@)+)+(~@)+$"
    path = written(tmp_path, pre_tokenizer=split_by(pattern))
    tokenizer = Tokenizer.load(path)
    for texts in (["~@" * 60 + "!"], ["~@" * 60 + "!", "a"]):
        with pytest.raises(ConfigError, match=r"tokenizer\.json cannot encode this text: its lib"):
            [*map(tokenizer.encode, texts)]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name} is a device, a pipe or a socket"):
        Tokenizer.load(path)


def test_a_stream_without_a_place_to_cut_is_not_held_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jaxformer.tokenizer.encoding.LONGEST_UNCUT", 1 << 20)
    cuts, read = Cuts(r"(?<=\S)(?=\s)"), 0

    def endless():
        nonlocal read
        while True:
            read += 1 << 16
            yield "\0" * (1 << 16)

    with pytest.raises(ConfigError, match="no place to cut it, such as a space"):
        [*cuts.blocks(endless())]
    assert read < 1 << 22


def test_one_word_of_a_million_letters_is_learned_in_seconds(tmp_path: Path) -> None:
    import random

    letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000)
    (tmp_path / "word.txt").write_text("".join(letters))
    began = time.monotonic()
    vocab, merges = train_bpe(tmp_path / "word.txt", 400)
    assert len(merges) == 144 and time.monotonic() - began < 60  # it took hours
    assert len(vocab) == 400
