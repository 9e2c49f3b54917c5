"""The door of the command line: errors that nobody foresaw, and what strangers wrote, in a line."""

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jaxformer.cli import compare, main
from jaxformer.config.format import escaped
from jaxformer.files import ConfigError
from jaxformer.report import ProgressBar

Capture = pytest.CaptureFixture[str]
RED = "\x1b[31mred\x1b[0m\x07\u202e"


class PanicException(BaseException):
    """As pyo3 names a panic of Rust."""


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit status of a command that raises an error."""

    def run(arguments: object) -> int:
        raise error

    monkeypatch.setattr(compare, "run", run)
    return main(["compare", "folder"])


@pytest.mark.parametrize("error", [KeyError("q"), PanicException("called `unwrap`\non a None")])
def test_an_unforeseen_error_ends_with_its_traceback_and_one_line(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert failing(monkeypatch, error) == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last)") and "raise error" in told
    assert told.splitlines()[-1].startswith(f"failed: {type(error).__name__}: ")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "a\x1b[2J"),
            2,
            r"error: a\x1b[2J: File",
        ),
        (
            OSError(errno.EDQUOT, "Quota exceeded", "out.txt"),
            2,
            "error: out.txt: Quota exceeded: make room",
        ),
        (MemoryError("no room"), 1, "out of memory: no room."),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GB"), 1, "out of memory: RESOURCE_EXHAUSTED: 9 GB."),
    ],
)
def test_errors_of_files_and_memory_are_no_faults(
    error: Exception, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert failing(monkeypatch, error) == status
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_below_standard_output_is_told(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text\n" * 9)
    train = ["tokenizer", "train", "text.txt", "--vocab_size", "258", "--output", "made"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "jaxformer", *train],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output, or a file: No space left on device")
    assert done.stderr.count("\n") == 1


def test_what_strangers_wrote_does_not_reach_the_terminal_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert failing(monkeypatch, ConfigError(f"the label {RED} is new")) == 2
    shown = r"\x1b[31mred\x1b[0m\x07\u202e"
    assert capsys.readouterr().err == f"error: the label {shown} is new\n"
    with ProgressBar(4, mode="lines") as bar:
        bar.log(f"a name: {RED}")
    assert capsys.readouterr().out == f"a name: {shown}\n"
    main(["plan"])  # which sets how warnings are shown
    capsys.readouterr()
    warnings.showwarning(f"keys {RED}", UserWarning, "file.py", 1)
    assert capsys.readouterr().err == f"note: keys {shown}\n"
    assert escaped("naïve 中 😀\nline\ttab \udcff") == "naïve 中 😀\nline\\ttab \\udcff"
