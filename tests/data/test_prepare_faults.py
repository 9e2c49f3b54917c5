"""What goes wrong while text is prepared: told in one message before the work where it can be, and
nothing wrong is kept."""

import errno
import json
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from corpora import prepare, prepare_text
from test_prepare import ROOT, quiet, run_of, written

from jaxformer.cli import main
from jaxformer.data import TokenStore, open_or_build, preparing, splits
from jaxformer.data.sources import Piece
from jaxformer.files import ConfigError
from jaxformer.tokenizer import byte_tokenizer


def line(folder: Path, *more: str) -> list[str]:
    """`jaxformer prepare` on a text, by bytes."""
    text = folder / "text"
    train = str(text if text.exists() else written(folder))
    settings = [
        "--data.train",
        train,
        "--data.cache_dir",
        str(folder / "cache"),
        "--tokenizer.kind",
        "bytes",
    ]
    return ["prepare", str(ROOT / "configs" / "quickstart.py"), *settings, *more]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one message of a call that ends with status 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return " ".join(told.split())


def test_files_without_text_are_units_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "GROUP_BYTES", 1)
    text = written(tmp_path, files=2)
    (text / "0a.jsonl").touch()
    (text / "0b.txt").write_text(" \n<|endoftext|>\n")
    run = run_of(tmp_path, str(text))
    summary = prepare_text(run, None, False, quiet)
    said: list[str] = []
    assert summary[0].documents == 60 and prepare_text(run, None, False, said.append) == summary
    assert not any("tokeniz" in told for told in said)
    prepare_text(run, tmp_path / "out", False, quiet)
    shutil.rmtree(text)
    assert (
        prepare_text(run_of(tmp_path, str(tmp_path / "out")), None, True, quiet)[0].documents == 60
    )


def test_a_full_disk_is_one_message_and_the_work_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = line(tmp_path, "--output", str(tmp_path / "out"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        told = refused(capsys, arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        "00000.tokens cannot be written (File too large): make room, or choose another path" in told
    )
    assert not list(tmp_path.rglob("*.tmp")) and main(arguments) == 0


def test_a_copied_store_on_a_disk_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*paths: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    prepare_text(run_of(tmp_path, str(written(tmp_path))), tmp_path / "first", False, quiet)
    shutil.copytree(tmp_path / "first", tmp_path / "second", copy_function=shutil.copyfile)
    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, read_only)
    assert prepare(run_of(tmp_path, str(tmp_path / "second"))).train.documents
    with pytest.raises(
        ConfigError, match=r"00000\.tokens cannot be written \(Read-only file system\)"
    ):
        open_or_build(tmp_path / "third", lambda: [Piece("a", "0", True)], byte_tokenizer())


def test_files_that_change_while_they_are_read_leave_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = written(tmp_path, files=2)
    run, store_of = run_of(tmp_path, str(text)), preparing.StoreFolder.store_of

    def changed_before(*arguments: Any, **named: Any) -> TokenStore:
        with open(text / "1.jsonl", "a") as file:
            file.write(json.dumps({"text": "one more"}) + "\n")
        return store_of(*arguments, **named)

    monkeypatch.setattr(preparing.StoreFolder, "store_of", changed_before)
    with pytest.raises(ConfigError, match="its files changed while they were tokenized"):
        prepare_text(run, None, False, quiet)
    assert not list((tmp_path / "cache" / "stores").iterdir())
    monkeypatch.undo()
    assert prepare_text(run, None, False, quiet)[0].documents == 61


@pytest.mark.parametrize("share", [[], ["--shard", "0/2"]])
def test_a_directory_that_cannot_take_tokens_is_refused_before_any_work(
    share: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text("mine")
    for output, message in (
        (tmp_path / "file", "file cannot be used (File exists): name one that is new"),
        (tmp_path / "file" / "below", "below cannot be used (Not a directory)"),
        (
            tmp_path / "run",
            (
                "run holds other things (tokenizer.json): name one that is new, or that an earlier"
                " call began"
            ),
        ),
        (written(tmp_path), "text holds other things (0.jsonl, 1.jsonl, 2.jsonl)"),
        (" ", "--output is empty: name a directory"),
    ):
        assert message in refused(capsys, line(tmp_path, "--output", str(output), *share))
    assert (
        not (tmp_path / "cache").exists()
        and (tmp_path / "run" / "tokenizer.json").read_text() == "mine"
    )


@pytest.mark.parametrize("share", [[], ["--shard", "0/2"]])
def test_what_is_prepared_is_not_prepared_again(
    share: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(tmp_path, "--output", str(tmp_path / "first"))) == 0
    again = line(
        tmp_path,
        "--data.train",
        f"{tmp_path}/first; {tmp_path}/text",
        "--output",
        str(tmp_path / "second"),
        *share,
    )
    told = refused(capsys, again)
    assert f"{tmp_path}/first, of data.train, holds tokens already: train on it as it is" in told


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (["--data.weights", "1 2"], "data.weights='1 2'"),
        (
            ["--model.vocab_size", "256"],
            "model.vocab_size=256 is less than the tokenizer's 257 entries",
        ),
    ],
)
def test_a_task_refuses_what_the_last_call_would(
    setting: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, line(tmp_path, "--shard", "0/2", *setting))
    assert not (tmp_path / "cache").exists()


def test_a_directory_prepared_without_text_for_validation_is_none(tmp_path: Path) -> None:
    text, out = written(tmp_path), str(tmp_path / "out")
    prepare_text(run_of(tmp_path, f"{text}/0.jsonl"), Path(out), False, quiet)
    with pytest.raises(
        ConfigError, match=r"data\.validation: .*out was prepared without text for validation"
    ):
        prepare(run_of(tmp_path, str(text), validation=out))


def test_a_manifest_beside_text_is_none_of_ours(tmp_path: Path) -> None:
    text = written(tmp_path)
    (text / "manifest.json").write_text('{"version": 2, "files": []}')
    assert prepare_text(run_of(tmp_path, str(text)), None, False, quiet)[0].documents == 180
