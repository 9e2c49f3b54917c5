"""Run directories that were altered, mixed up or cannot be written: what is kept, and what the
command says."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from tiny_run import (
    EVERY,
    STEPS,
    assert_same_run,
    contents,
    copy_until,
    finish,
    fork,
    line,
    lines_logged,
    logged,
    saved,
    train_here,
    wait_until,
)

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.files import ConfigError

pytestmark = pytest.mark.slow


@pytest.mark.fault(
    "tokenizer.json of a run altered after training",
    kept="`sample`, `evaluate` and `jf.load` refuse it, and say how to get it back.",
    status="2",
)
def test_an_altered_tokenizer_is_refused(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = whole
    run_dir = copy_until(STEPS, expected, tmp_path / "run")
    path = run_dir / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    for command in (["sample", str(run_dir)], ["evaluate", str(run_dir)]):
        assert main(command) == 2
        assert "is not the one that the run was trained with" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Restore the file: the same train command writes it"):
        jf.load(run_dir)
    assert train_here(line(run_dir, text)) == 0
    assert jf.load(run_dir).tokenizer is not None


@pytest.mark.fault(
    "`checkpoints/` empty or a file beside the metrics of a run",
    kept="The metrics stay. `--run.restart True` begins anew and keeps what is there in"
    " `before-1/`.",
    status="2",
)
@pytest.mark.parametrize("said", ["is empty", "is not a directory"])
def test_a_run_whose_checkpoints_have_gone_does_not_begin_anew(
    said: str, whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = whole
    run_dir = copy_until(STEPS // 2, expected, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    if said == "is empty":
        (run_dir / "checkpoints").mkdir()
    else:
        (run_dir / "checkpoints").touch()
    before = contents(run_dir)
    assert train_here(line(run_dir, text)) == 2
    error = capsys.readouterr().err
    assert said in error and f"up to step {STEPS // 2 + 1}" in error and "--run.restart" in error
    assert contents(run_dir) == before
    if said == "is empty":
        finish(fork(line(run_dir, text, {"run.restart": True})))
        assert_same_run(run_dir, expected)
        kept = contents(run_dir / "before-1")
        del before[".lock"]
        assert kept == before
        assert not jf.load_config(run_dir / "config.json").run.restart


@pytest.mark.fault(
    "disk full while a checkpoint is saved",
    kept="The checkpoints from before. With room again, the run is the uninterrupted one.",
    status="1",
)
def test_a_save_that_fails_ends_the_run_and_keeps_the_last_good_checkpoint(
    whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = tmp_path / "run"
    process = fork(line(run_dir, text))
    wait_until(lambda: bool(saved(run_dir)) and lines_logged(run_dir) > EVERY, process)
    process.send_signal(signal.SIGSTOP)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    process.send_signal(signal.SIGCONT)
    _, error = finish(process, 1)
    # JAX warns as well, where it cannot write a program to its cache, and TensorStore prints a
    # traceback of asyncio for each write that ends after the one that failed.
    (said,) = [text for text in error.splitlines() if text.startswith("error: ")]
    assert said.startswith("error: the checkpoint ") and "File too large" in said
    assert "/jaxformer/runs/" not in error  # no traceback of ours
    kept = saved(run_dir)
    assert kept and max(kept) < STEPS
    out, _ = finish(fork(line(run_dir, text)))
    assert f"from step {max(kept)}" in out
    assert_same_run(run_dir, expected)


@pytest.mark.fault(
    "run.dir below a path with `[`, `*`, `?` or a backslash",
    kept="It is refused before anything is written.",
    status="2",
)
@pytest.mark.parametrize("name", ["a[1]", "b\\c"])
def test_a_path_that_cannot_be_saved_to_is_refused_at_the_start(
    name: str, whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(line(tmp_path / name / "run", whole[1])) == 2
    assert "cannot be read again" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.fault(
    "run.dir with a colon", kept="The run trains, and every command reads it.", status="0"
)
def test_a_run_directory_with_a_colon_can_be_read(whole: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir = tmp_path / "2026-11-21T22:14:run"
    assert train_here(line(run_dir, whole[1], {"train.steps": EVERY})) == 0
    assert main(["sample", str(run_dir), "--max_new_tokens", "2"]) == 0
    assert main(["evaluate", str(run_dir)]) == 0
    assert jf.load_config(run_dir / "config.json").run.dir == str(run_dir)


@pytest.mark.fault(
    "`.lock` of a run directory is a link or a pipe",
    kept="What it leads to is not opened; nothing is changed.",
    status="2",
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_refused(
    kind: str, whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    run_dir.mkdir()
    victim.write_text("mine")
    if kind == "link":
        (run_dir / ".lock").symlink_to(victim)
    else:
        os.mkfifo(run_dir / ".lock")
    assert train_here(line(run_dir, whole[1])) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert victim.read_text() == "mine" and [p.name for p in run_dir.iterdir()] == [".lock"]


@pytest.mark.fault(
    "files of a run directory are links: each of them, to a file",
    kept="The links are replaced by files, which is said. What they led to is not changed.",
    status="0",
)
@pytest.mark.filterwarnings("default:.* was a link")
def test_no_file_of_a_run_is_written_through_a_link(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    assert train_here(line(run_dir, whole[1], {"train.steps": EVERY})) == 0
    written = [path for path in run_dir.iterdir() if path.is_file() and path.name != ".lock"]
    assert {"config.json", "tokenizer.json", "metrics.jsonl"} <= {path.name for path in written}
    for path in written:
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(elsewhere / path.name)
        (elsewhere / path.name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    capsys.readouterr()
    assert train_here(line(run_dir, whole[1], {"train.steps": 2 * EVERY})) == 0
    said = capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    for path in written:
        assert path.is_file() and not path.is_symlink()
        assert f"{path} was a link" in said


@pytest.mark.fault(
    "a directory in a run directory is a link, or holds one",
    kept="Nothing is written there, and nothing is changed. With `--run.restart True` the link is"
    " moved into `before-1/`.",
    status="2; 0 with run.restart",
)
@pytest.mark.parametrize("name", ["checkpoints/4", "profile/plugins"])
def test_no_directory_of_a_run_is_written_through_a_link(
    name: str, whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "run" / name
    elsewhere.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    before = contents(tmp_path / "run")
    arguments = line(tmp_path / "run", whole[1], {"train.steps": EVERY})
    assert train_here(arguments) == 2
    assert f"{link}: a link in a run directory" in capsys.readouterr().err
    (tmp_path / "run/.lock").unlink()
    assert contents(tmp_path / "run") == before and not any(elsewhere.iterdir())
    assert train_here([*arguments, "--run.restart", "True"]) == 0
    assert (tmp_path / "run/before-1" / name).is_symlink() and not any(elsewhere.iterdir())


@pytest.mark.fault(
    "a start that fails before the first step is ready",
    kept="The run directory is not claimed: the corrected command may use it.",
    status="any",
)
def test_a_start_that_fails_leaves_no_directory(
    whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConfigError("the state cannot be made")

    run_dir = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("jaxformer.runs.train_run.first_state", fail)
        assert train_here(line(run_dir, whole[1], {"run.seed": 7})) == 2
        assert not run_dir.exists()
        run_dir.mkdir()
        assert train_here(line(run_dir, whole[1], {"run.seed": 7})) == 2
    assert train_here(line(run_dir, whole[1], {"train.steps": 2})) == 0


@pytest.mark.fault(
    "more steps than planned, where the schedule follows train.steps",
    kept="Nothing is changed; the message has the learning rates and the settings to choose from.",
    status="2",
)
def test_a_schedule_does_not_jump_unasked(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, text = tmp_path / "run", whole[1]
    planned = {"train.steps": 8, "optimizer.decay_steps": 0, "optimizer.final_fraction": 0.1}
    assert train_here(line(run_dir, text, planned)) == 0
    before = contents(run_dir)
    capsys.readouterr()
    longer = planned | {"train.steps": 12}
    assert train_here(line(run_dir, text, longer)) == 2
    error = capsys.readouterr().err
    assert "the learning rate of step 9 is" in error and "--optimizer.decay_steps 8:" in error
    assert "--optimizer.decay_steps 12:" in error
    assert contents(run_dir) == before
    chosen = longer | {"optimizer.decay_steps": 12}
    assert train_here(line(run_dir, text, chosen)) == 0
    assert "The schedule has changed" in capsys.readouterr().out
    rates = [entry["learning_rate"] for entry in logged(run_dir) if "learning_rate" in entry]
    assert rates[8] > rates[7] and rates[8] > rates[9] > rates[11]
