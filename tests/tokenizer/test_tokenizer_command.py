"""`jaxformer tokenizer`: what it trains, writes and shows, and what it says of bad input."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxformer.cli import main
from jaxformer.tokenizer import Tokenizer, train_bpe

ROOT = Path(__file__).parents[2]
END = "<|endoftext|>"
TEXT = f"the cat sat on the mat\r\n the cat's hat{END}\n\n  Grüße, 世界! 🙂 12345\t\n" * 50
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_bytes(TEXT.encode())
    return path


def command(*words: object) -> int:
    """The status of `jaxformer tokenizer` with these words."""
    return main(["tokenizer", *map(str, words)])


@pytest.fixture(scope="module")
def trained(corpus: Path) -> Path:
    made = corpus.parent / "made"
    assert command("train", corpus, "--vocab_size", 290, "--output", made) == 0
    return made


def test_a_trained_tokenizer_is_that_of_train_bpe(corpus: Path, trained: Path) -> None:
    wanted = Tokenizer.from_bpe(*train_bpe(corpus, 290, [END]), [END])
    assert (
        Tokenizer.load(trained).fingerprint() == wanted.fingerprint() and wanted.vocab_size == 290
    )


def test_any_source_of_training_text_is_taken(
    corpus: Path, tmp_path: Path, capsys: Capture
) -> None:
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXT.split(END) * 2)
    (tmp_path / "a.jsonl").write_text(lines)
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(TEXT.encode()))
    sources = {
        str(tmp_path / "a.jsonl"): ["--text_field", "body"],
        str(packed): [],
        str(tmp_path / "b*.gz"): [],
    }
    for place, (source, more) in enumerate(sources.items()):
        output = tmp_path / str(place)
        options = ["--vocab_size", 290, "--pattern", "llama3", "--special_tokens", "<a>", END]
        assert command("train", source, *more, *options, "--output", output) == 0
        made = Tokenizer.load(output)
        assert made.vocab_size == 290 and made.encode(f"<a>{END}", special_tokens=True) == [0, 1]
        assert len(made.encode("1234", special_tokens=True)) >= 2
        assert "290 entries, including 32 merges" in capsys.readouterr().out
    assert command("train", packed, "--vocab_size", 9999, "--output", tmp_path / "few") == 0
    assert "(the text has no pairs left for 9,999)" in capsys.readouterr().out


@pytest.mark.parametrize("named", [False, True])
def test_ids_are_written_as_text_or_as_an_array(
    named: bool, corpus: Path, trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    wanted = Tokenizer.load(trained).encode(TEXT, special_tokens=named)
    flag = ["--special_tokens"] * named
    assert command("encode", trained, corpus, *flag) == 0
    said = capsys.readouterr()
    assert [*map(int, said.out.split())] == wanted and said.out.endswith("\n")
    size = len(TEXT.encode())
    told = f"{len(wanted):,} tokens of {size:,} bytes, {size / len(wanted):.3f} bytes per token\n"
    assert said.err == told
    output = tmp_path / "ids.npy"
    assert command("encode", trained, corpus, *flag, "--output", output) == 0
    written = np.load(output)
    assert written.dtype == np.uint16 and written.tolist() == wanted


def test_text_from_a_pipe_is_encoded_as_it_comes(trained: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "jaxformer", "tokenizer", "encode", str(trained)]
    made = subprocess.run(line, input=TEXT.encode(), capture_output=True, cwd=ROOT, check=True)
    assert [*map(int, made.stdout.split())] == Tokenizer.load(trained).encode(TEXT)
    empty = subprocess.run([*line, "-"], input=b"", capture_output=True, cwd=ROOT, check=True)
    assert empty.stdout == b"\n" and empty.stderr == b"0 tokens of 0 bytes\n"


def test_bad_input_is_one_message_and_status_2(
    corpus: Path, trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "bad.txt").write_bytes(("a" + "é" * 700_000).encode() + b"\xff")
    (tmp_path / "empty.txt").write_text("")
    output, new = str(tmp_path / "none" / "ids.npy"), ["--output", str(tmp_path / "new")]
    train = ["train", str(corpus), "--vocab_size"]
    wrong = {
        "vocab_size=100 must be a whole number from 257": [*train, "100", *new],
        "pattern='gpt5' must be one of": [*train, "300", *new, "--pattern", "gpt5"],
        "each once": [*train, "300", *new, "--special_tokens", "<a>", "<a>"],
        "tokenizer.json already exists": [*train, "300", "--output", str(trained)],
        "corpus.txt cannot be written": [*train, "300", "--output", str(corpus)],
        "tokenizer.json cannot be written": [
            *train,
            "300",
            "--output",
            trained / "tokenizer.json/x",
        ],
        "none.txt does not exist": ["train", tmp_path / "none.txt", *train[2:], "300", *new],
        "empty.txt is empty": ["train", tmp_path / "empty.txt", *train[2:], "300", *new],
        "is not UTF-8 text at offset 1400001": ["encode", str(trained), str(tmp_path / "bad.txt")],
        "cannot be written": ["encode", str(trained), str(corpus), "--output", output],
        "cannot be read": ["encode", str(trained), str(tmp_path / "none.txt")],
        "none/tokenizer.json does not exist": ["encode", tmp_path / "none/tokenizer.json", corpus],
    }
    for message, line in wrong.items():
        assert command(*line) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("error:") == 1 and "Traceback" not in said
    assert command("encode", trained, tmp_path / "bad.txt", "--output", tmp_path / "a.npy") == 2
    assert not [*tmp_path.glob("a.npy*")] and not (tmp_path / "new").exists()


def test_without_a_command_the_usage_is_shown(capsys: Capture) -> None:
    assert main(["tokenizer"]) == main(["tokenizer", "paint"]) == 2
    said = capsys.readouterr().err
    assert all(said.count(name) == 2 for name in ("train", "encode"))
    assert main(["tokenizer", "--help"]) == main(["tokenizer", "encode", "--help"]) == 0
    assert "--special_tokens" in capsys.readouterr().out
