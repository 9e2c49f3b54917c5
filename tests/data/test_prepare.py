"""Text tokenized beforehand: in one go, by the tasks of a job array, and as a directory that is
trained on in its place; what goes wrong is told before the work where it can be."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from corpora import prepare, prepare_text

from jaxformer.cli import main
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Batches, TokenStore, open_or_build, preparing, splits
from jaxformer.data.sources import Piece
from jaxformer.files import ConfigError
from jaxformer.runs.config import load_config
from jaxformer.runs.resolve import with_sizes
from jaxformer.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[2]
BYTES = TokenizerConfig(kind="bytes")


def quiet(line: str) -> None:
    pass


def written(folder: Path, files: int = 6, documents: int = 30) -> Path:
    """A directory of files of short documents."""
    (folder / "text").mkdir(parents=True)
    for file in range(files):
        texts = [
            f"file {file}, document {index}: {'so ' * (index % 5)}it goes"
            for index in range(documents)
        ]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "text" / f"{file}.jsonl").write_text(lines)
    return folder / "text"


def run_of(
    folder: Path,
    train: str,
    tokenizer: TokenizerConfig = BYTES,
    cache: str = "cache",
    **data: object,
) -> RunConfig:
    settings = DataConfig(train=train, cache_dir=str(folder / cache), sequence_length=16)
    return RunConfig(data=replace(settings, **data), tokenizer=tokenizer)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    """The tokens and documents of every store below a folder."""
    kept = [path for kind in ("tokens", "documents") for path in folder.rglob(f"*.{kind}")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(kept)}


def line(folder: Path, *more: str) -> list[str]:
    """`jaxformer prepare` on a text, by bytes."""
    text = folder / "text"
    train = str(text if text.exists() else written(folder))
    settings = ["--data.train", train, "--data.cache_dir", str(folder / "cache")]
    config = str(ROOT / "configs" / "quickstart.py")
    return ["prepare", config, *settings, "--tokenizer.kind", "bytes", *more]


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one message of a call that ends with status 2."""
    capsys.readouterr()
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return " ".join(told.split())


def test_what_is_prepared_is_found_by_training(tmp_path: Path) -> None:
    run = run_of(tmp_path, str(written(tmp_path)), TokenizerConfig(vocab_size=300))
    summary = prepare_text(run, None, False, quiet)
    said: list[str] = []
    corpus = prepare(run, said.append)
    assert not any("tokenizing" in line or "training" in line or "reading" in line for line in said)
    assert corpus.validation is not None
    assert summary[0].tokens == corpus.train.tokens + corpus.validation.tokens
    assert summary[0].documents == 180


def test_facts_of_a_text_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["ab", "abcdé", "a"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "no record\n")
    settings = ["--data.train", str(path), "--data.malformed", "skip"]
    assert main(line(tmp_path, *settings)) == 0
    told = capsys.readouterr().out
    assert "3 documents, 12 tokens, 1.000 bytes per token, longest document 7 tokens" in told
    assert f"{path}, line 4" in told and ": 1, the first" in told


@pytest.mark.parametrize("train", ["{text}", "{text}/0.jsonl; {text}/1.jsonl"])
def test_a_prepared_directory_is_trained_on_as_its_text_is(train: str, tmp_path: Path) -> None:
    text = written(tmp_path)
    run = run_of(
        tmp_path,
        train.format(text=text),
        TokenizerConfig(vocab_size=300),
        weights="" if ";" not in train else "1 2",
    )
    expected = prepare(run)
    prepare_text(run, tmp_path / "first", False, quiet)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    shutil.rmtree(text)
    shutil.rmtree(tmp_path / "first")
    moved = replace(
        run,
        data=replace(run.data, train=str(tmp_path / "second"), cache_dir=str(tmp_path / "none")),
    )
    found = prepare(moved)
    assert found.tokenizer.fingerprint() == expected.tokenizer.fingerprint()
    for side in ("train", "validation"):
        rows, others = getattr(found, side), getattr(expected, side)
        assert (rows.fingerprint, len(rows)) == (others.fingerprint, len(others))
        made, wanted = (Batches(each, run.data, 4, 0)[3] for each in (rows, others))
        assert all((made[name] == wanted[name]).all() for name in wanted)


def test_files_that_are_prepared_apart_are_found_by_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "GROUP_BYTES", 1)
    text = written(tmp_path)
    for part in ("[135]", "[024]"):
        prepare_text(run_of(tmp_path, f"{text}/{part}.jsonl"))
    said: list[str] = []
    summary = prepare_text(run_of(tmp_path, str(text)), None, False, said.append)
    assert summary[0].documents == 180 and not any("tokenizing" in line for line in said)


def test_only_what_changed_is_tokenized_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "GROUP_BYTES", 1)
    text = written(tmp_path)
    run = run_of(tmp_path, str(text))
    first = prepare_text(run, None, False, quiet)
    before = contents(tmp_path / "cache")
    with open(text / "3.jsonl", "a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    again = prepare_text(run, None, False, quiet)
    after = contents(tmp_path / "cache")
    assert again[0].documents == first[0].documents + 1
    assert before.items() <= after.items() and len(after) == len(before) + 2


def shard_gone(folder: Path) -> None:
    next(folder.rglob("*.tokens")).unlink()


def shard_altered(folder: Path) -> None:
    path = next(folder.rglob("*.tokens"))
    path.write_bytes(path.read_bytes()[1:])


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def other_format(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": ', '"format": 1'))


def other_tokenizer(folder: Path) -> None:
    byte_tokenizer(["<|mine|>"]).save(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shard_gone, (r"data\.train: .*/out/\w+ is not complete: copy the directory again")),
        (
            shard_altered,
            (
                r"00000\.tokens was altered since it was written \(it has [\d,]+ bytes of [\d,]+\):"
                r" restore it, or remove it"
            ),
        ),
        (
            no_tokenizer,
            r"out has no tokenizer\.json, with which it was prepared: copy the directory again",
        ),
        (
            other_format,
            r"manifest\.json is not what `jaxformer prepare --output` of this version writes",
        ),
        (
            other_tokenizer,
            (r"out was made by another tokenizer than the run's, or .*: prepare all texts with"),
        ),
    ],
)
def test_a_prepared_directory_that_cannot_be_used_is_one_message(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    prepare_text(run_of(tmp_path, str(written(tmp_path))), tmp_path / "out", False, quiet)
    damage(tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        prepare(run_of(tmp_path, str(tmp_path / "out"), TokenizerConfig()))


def test_verifying_reads_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = line(tmp_path)
    assert "1 of 1 parts are not prepared" in refused(capsys, [*arguments, "--verify"])
    assert main(arguments) == 0 and main([*arguments, "--verify"]) == 0
    path = next(tmp_path.rglob("*.tokens"))
    time = path.stat().st_mtime_ns
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    os.utime(path, ns=(time, time))
    assert main(arguments) == 0
    assert f"{path} was altered" in refused(capsys, [*arguments, "--verify"])


# Arguments, in which {} is a folder with a prepared directory, a file and a run, and the words of
# the message.
REFUSED = [
    (["--data.weights", "1 2"], "data.weights='1 2'"),
    (["--data.objective", "sft"], "reads records"),
    (["--data.train", "none.txt"], "none.txt"),
    (["--data.train", " ; "], "data.train names no source"),
    (["--outpt", "x"], "outpt"),
    (["--output", "{}/file"], "file holds other things: name a directory that is new"),
    (["--output", "{}/file/below"], "below/scans cannot be made (Not a directory)"),
    (["--output", "{}/run"], "run holds other things: name a directory that is new"),
    (["--output", " "], "--output is empty: name a directory"),
    (["--data.train", "{}/first; {}/text", "--output", "{}/new"], "holds tokens already"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_a_line_that_cannot_work_is_one_message(
    case: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[case]
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.json").write_text("mine")
    if "{}/new" in arguments:
        assert main(line(tmp_path, "--output", f"{tmp_path}/first")) == 0
    named = [argument.replace("{}", str(tmp_path)) for argument in arguments]
    assert message in refused(capsys, line(tmp_path, *named))
    assert not (tmp_path / "cache").exists() or "{}/new" in arguments
    assert (tmp_path / "run" / "tokenizer.json").read_text() == "mine"


def test_a_model_has_the_vocabulary_of_what_was_prepared(tmp_path: Path) -> None:
    """Whatever tokenizer.vocab_size says, which is of a tokenizer that is trained."""
    size = 300
    text = " ".join(f"{number:b}x{number:o}" for number in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    run = run_of(tmp_path, str(tmp_path / "a.txt"), TokenizerConfig(vocab_size=size))
    prepare_text(run, tmp_path / "out", False, quiet)
    config = load_config(ROOT / "configs" / "quickstart.py", [f"data.train={tmp_path / 'out'}"])
    assert config.model.vocab_size == 0 and config.tokenizer.vocab_size == 4096
    corpus = prepare(config)
    model = with_sizes(config.model, corpus.tokenizer.vocab_size, corpus.labels, "the data")
    assert model.vocab_size == size


def test_a_directory_of_other_text_or_of_another_tokenizer_is_not_taken_over(
    tmp_path: Path,
) -> None:
    text, out = written(tmp_path), tmp_path / "out"
    prepare_text(run_of(tmp_path, str(text)), out, False, quiet)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "other.txt").write_text("other")
    for run, message in (
        (
            run_of(tmp_path, str(tmp_path / "other.txt")),
            r"out was prepared of other text \(.*/text\), or .*: name a new directory",
        ),
        (
            run_of(tmp_path, str(text), TokenizerConfig(vocab_size=300)),
            "or with another tokenizer or data.bos: name a new",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare_text(run, out, False, quiet)
    assert (
        before.items()
        <= {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}.items()
    )
    assert prepare_text(run_of(tmp_path, str(text)), out, False, quiet)[0].documents == 180


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
