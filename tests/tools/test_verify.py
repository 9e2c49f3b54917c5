"""`jaxformer verify`: a run is what its files say, every alteration of them is caught, and each
probe fails where that which it looks at is broken."""

import dataclasses
import fcntl
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from conftest import CACHE
from tiny_run import PLAIN, contents, line, train_here, write_text

from jaxformer.checkpoints.reading import versions
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cli import main
from jaxformer.cli.verify import verify
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.files import ConfigError
from jaxformer.layers import kernels
from jaxformer.layers.dot_product import plain
from jaxformer.report.metrics import LARGEST_STEP, first_digest, line_digest
from jaxformer.runs.config import looked_at
from jaxformer.runs.loading import load
from jaxformer.runs.run_evaluation import evaluate_run
from jaxformer.tools import probes
from jaxformer.tools.probes import PROBES, Evidence
from jaxformer.tools.verify import RepeatedSteps, Statement, compared, read_run, setup_of_run

Capture = pytest.CaptureFixture[str]
STEPS = 8
CHANGES = PLAIN | {
    "model.d_model": 16,
    "model.dropout": 0.0,  # with which a CPU takes the kernel "blocked"
    "optimizer.decay_steps": STEPS,
    "train.checkpoint_every": 4,
    "train.eval_every": 4,
    "train.log_every": 1,
    "train.steps": STEPS,
}


class Runs(NamedTuple):
    """A finished run and its text."""

    run: Path
    text: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("verify")
    made = Runs(folder / "run", write_text(folder / "text.txt"))
    assert train_here(line(made.run, made.text, CHANGES)) == 0
    return made


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another seed and text."""
    folder = tmp_path_factory.mktemp("foreign")
    changes = CHANGES | {"run.seed": 7, "tokenizer.vocab_size": 290}
    text = write_text(folder / "other.txt", seed=1)
    assert train_here(line(folder / "run", text, changes)) == 0
    return folder / "run"


def statements(run_dir: Path, **options: Any) -> list[Statement]:
    return list(verify(run_dir, cache_dir=f"{CACHE}/data", **options))


def refused(run_dir: Path, **options: Any) -> str:
    """The first statement that something is not as it was; empty where there is none."""
    found = verify(run_dir, cache_dir=f"{CACHE}/data", **options)
    return next((f"{one.subject}: {one.text}" for one in found if one.verdict == "NO"), "")


def test_a_run_is_verified_by_a_relative_path_and_nothing_in_it_changes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(runs.run)
    monkeypatch.chdir(runs.run.parent)
    found = {one.subject: one for one in statements(Path("run"))}
    rounded = {name for name, one in found.items() if one.verdict == "equal to rounding"}
    assert rounded == {"kernels", "accumulation"}
    unknown = {name for name, one in found.items() if one.verdict == "unknown"}
    assert unknown == {"tokenizer_config.json"} and "step 8" in found
    assert {"metrics.jsonl", "checkpoint 4", "checkpoint 8", "data"} <= {*found}
    assert sum(name.startswith("step ") for name in found) == 5
    assert contents(runs.run) == before
    assert {*PROBES} - {*found} == {"one device"}
    figures = next(one.text for name, one in found.items() if name.startswith("step "))
    assert "equal to the bit: grad_norm, learning_rate, loss, state" in figures


# Alterations: each changes a copy of the run.

Alteration = Callable[[Path, random.Random], None]


def lines_of(run_dir: Path) -> list[bytes]:
    return (run_dir / "metrics.jsonl").read_bytes().splitlines()


def write_lines(run_dir: Path, lines: list[bytes]) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b"".join(text + b"\n" for text in lines))


def changed_line(raw: bytes, rng: random.Random) -> bytes:
    """A line with another number, without which the others stay."""
    entry = json.loads(raw)
    name = rng.choice([key for key, value in entry.items() if isinstance(value, float)])
    entry[name] *= 1 + rng.choice([-1, 1]) * 10.0 ** -rng.randint(1, 6)
    return json.dumps(entry).encode()


def a_figure(run_dir: Path, rng: random.Random) -> None:
    lines = lines_of(run_dir)
    index = rng.randrange(len(lines) - 1)  # no line is chained to the last one
    write_lines(run_dir, [*lines[:index], changed_line(lines[index], rng), *lines[index + 1 :]])


def a_removed_line(run_dir: Path, rng: random.Random) -> None:
    lines = lines_of(run_dir)
    del lines[rng.randrange(len(lines))]
    write_lines(run_dir, lines)


def a_byte_of_a_checkpoint(run_dir: Path, rng: random.Random) -> None:
    path = checkpoint_file(run_dir, rng)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randint(1, 255)
    path.write_bytes(content)


def checkpoint_file(run_dir: Path, rng: random.Random) -> Path:
    """A file of a checkpoint of which something reads the content."""
    folder = run_dir / "checkpoints" / rng.choice(["4", "8"])
    names = json.loads((folder / "files.json").read_text())["files"]
    return folder / rng.choice(["files.json", *names])


def another_tokenizer(run_dir: Path, rng: random.Random) -> None:
    path = run_dir / "tokenizer.json"
    content = json.loads(path.read_text())
    merges = content["model"]["merges"]
    a, b = rng.sample(range(len(merges)), 2)
    merges[a], merges[b] = merges[b], merges[a]
    path.write_text(json.dumps(content))


ALTERATIONS: list[Alteration] = [
    a_figure,
    a_removed_line,
    a_byte_of_a_checkpoint,
    another_tokenizer,
]


def rechain(run_dir: Path, lines: list[bytes]) -> None:
    """Writes lines as a chain, as a forger may who knows how it is made."""
    before, written = first_digest(read_run(run_dir).identity), []
    for raw in lines:
        written.append(json.dumps(json.loads(raw) | {"before": before}).encode())
        before = line_digest(written[-1])
    write_lines(run_dir, written)


@pytest.mark.parametrize("alteration", ALTERATIONS, ids=lambda alteration: alteration.__name__)
def test_an_alteration_of_files_is_caught(
    alteration: Alteration, runs: Runs, tmp_path: Path
) -> None:
    for seed in range(3):
        run_dir = copied(runs, tmp_path / str(seed))
        alteration(run_dir, random.Random(seed))
        assert contents(run_dir) != contents(runs.run)
        assert refused_or_no_run(run_dir)


@pytest.mark.slow
def test_what_is_of_another_run_is_caught(runs: Runs, foreign: Path, tmp_path: Path) -> None:
    """A checkpoint, and each entry of data.json."""
    run_dir = copied(runs, tmp_path)
    record, other = (json.loads((at / "data.json").read_text()) for at in (run_dir, foreign))
    for name in record:
        changed = record | {name: other[name]}
        (run_dir / "data.json").write_text(json.dumps(changed, indent=2) + "\n")
        if changed != record:
            assert refused_or_no_run(run_dir), name
    (run_dir / "data.json").write_text((runs.run / "data.json").read_text())
    for step in ("4", "8"):
        place = run_dir / "checkpoints" / step
        shutil.rmtree(place)
        shutil.copytree(foreign / "checkpoints" / step, place)
        assert refused_or_no_run(run_dir), step
        shutil.rmtree(place)
        shutil.copytree(runs.run / "checkpoints" / step, place)
    assert not refused_or_no_run(run_dir)


def refused_or_no_run(run_dir: Path) -> str:
    """What is said of a run whose files are not its own."""
    try:
        return refused(run_dir, steps=0)
    except ConfigError as error:  # files that are no run any more
        return str(error)


def copied(runs: Runs, folder: Path) -> Path:
    run_dir = folder / "copy"
    shutil.copytree(runs.run, run_dir)
    return run_dir


# What remains where the chain is made anew.


def test_a_figure_in_a_new_chain_is_caught_by_doing_its_step_again(
    runs: Runs, tmp_path: Path
) -> None:
    """A forger changes it and makes the chain anew. A state that is equal to the bit leaves no
    rounding."""
    run_dir = copied(runs, tmp_path)
    lines = [json.loads(raw) for raw in lines_of(run_dir)]
    for entry in lines:
        if entry["step"] == 3 and "loss" in entry:
            entry["loss"] *= 1 + 1e-6
    rechain(run_dir, [json.dumps(entry).encode() for entry in lines])
    assert refused(run_dir, steps=0) == ""
    assert "not equal: loss " in refused(run_dir, steps=STEPS)


def test_figures_are_equal_or_rounded_or_not() -> None:
    logged = {"loss": 2.0, "odd": float("nan"), "state": "a"}
    now = dict(logged)
    assert compared(now, logged, 1e-3)[0] == "equal"
    assert compared(now | {"loss": 2.0001, "state": "b"}, logged, 1e-3)[0] == "equal to rounding"
    assert compared(now | {"state": "b"}, logged, 1e-3)[0] == "equal to rounding"
    assert compared(now | {"state": "b"}, logged, 1e-3, exact=True)[0] == "NO"
    assert compared(now | {"loss": 2.0001}, logged, 1e-3)[0] == "NO"
    assert compared(now | {"loss": 2.1, "state": "b"}, logged, 1e-3)[0] == "NO"
    assert compared(now | {"loss": float("nan"), "state": "b"}, logged, 1e-3)[0] == "NO"


def test_another_state_is_no_rounding_on_the_machine_of_the_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = RepeatedSteps(setup_of_run(runs.run, cache_dir=f"{CACHE}/data"))
    again.logged[8] = again.logged[8] | {"state": "0" * 16}
    (statement,) = again.statements([8])
    assert statement.verdict == "NO" and "state, another one" in statement.text
    monkeypatch.setenv("XLA_FLAGS", "--another_flag")
    versions.cache_clear()
    (statement,) = again.statements([8])
    assert statement.verdict == "equal to rounding"
    monkeypatch.undo()
    versions.cache_clear()


@pytest.mark.parametrize("place", ["http://127.0.0.1:9/text.txt", "datasets:somebody/texts"])
def test_text_that_a_stranger_names_on_a_network_is_read_where_it_is_named_again(
    place: str, runs: Runs, tmp_path: Path
) -> None:
    run_dir = copied(runs, tmp_path)
    config = json.loads((run_dir / "config.json").read_text())
    config["data"]["train"] = place
    config["train"] |= {"eval_tasks": "/nowhere.yaml", "eval_tasks_every": 4}
    config["run"]["compilation_cache"] = str(tmp_path / "theirs")
    (run_dir / "config.json").write_text(json.dumps(config))
    said = f"add --data.train '{place}'"
    found = {one.subject: one.text for one in statements(run_dir)}
    assert said in found["steps done again"]
    with pytest.raises(ConfigError, match=re.escape(said)):
        evaluate_run(run_dir)
    assert not refused(run_dir, train=str(runs.text), steps=1)
    assert not (tmp_path / "theirs").exists()


def test_a_data_set_of_this_machine_is_read_as_its_run_names_it(tmp_path: Path) -> None:
    """Its name may have a split behind the directory."""
    (tmp_path / "saved").mkdir()
    for place in (f"datasets:{tmp_path}/saved", f"datasets:{tmp_path}/saved:train"):
        run = RunConfig(data=DataConfig(train=place))
        files: Any = SimpleNamespace(run=run, tokenizer=tmp_path / "tokenizer.json")
        assert looked_at(files).data.train == place


def test_a_model_that_a_stranger_names_at_a_url_is_read_where_it_is_named_again(
    runs: Runs, tmp_path: Path
) -> None:
    run_dir, place = copied(runs, tmp_path), "http://127.0.0.1:9/model"
    config = json.loads((run_dir / "config.json").read_text())
    config["run"]["init_from"] = place
    (run_dir / "config.json").write_text(json.dumps(config))
    said = f"add --run.init_from '{place}'"
    assert said in {one.subject: one.text for one in statements(run_dir)}["steps done again"]
    evaluate_run(run_dir)  # which does without it
    with pytest.raises(ConfigError, match="is evaluated without the model that it began with"):
        evaluate_run(run_dir, init_from=str(runs.run))
    config["adapter"]["kind"] = "lora"
    (run_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=re.escape(said)):
        evaluate_run(run_dir)
    with pytest.raises(ConfigError, match="nowhere: put it there"):
        evaluate_run(run_dir, init_from="nowhere")
    data = json.loads((run_dir / "data.json").read_text()) | {"base_path": place}
    (run_dir / "data.json").write_text(json.dumps(data))
    config["run"]["init_from"] = "nowhere"
    (run_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="is not at nowhere: put it there"):
        load(run_dir)


def test_a_pipe_in_a_checkpoint_is_an_altered_file(runs: Runs, tmp_path: Path) -> None:
    run_dir = copied(runs, tmp_path)
    file = next((run_dir / "checkpoints" / "8").rglob("d/*"))
    file.unlink()
    os.mkfifo(file)
    assert "checkpoint 8: files are not as they were saved" in refused(run_dir, steps=0)


# Probes, each on the sound run and on a broken one.

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def sound(runs: Runs) -> Evidence:
    """With some padding."""
    again = RepeatedSteps(setup_of_run(runs.run, cache_dir=f"{CACHE}/data"))
    state = again.newest(LARGEST_STEP)
    batch = dict(again.batches[int(state.step)])
    segments = batch["segment_ids"].copy()
    segments[:, -5:] = 0
    batch |= {"segment_ids": segments, "weights": batch["weights"] * (segments != 0)}
    return Evidence(again, state, batch)


def with_kernel(patch: pytest.MonkeyPatch, run: Any) -> None:
    row = dataclasses.replace(kernels.KERNELS["blocked"], run=run)
    patch.setitem(kernels.KERNELS, "blocked", row)


def without_segments(patch: pytest.MonkeyPatch) -> None:
    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        index = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
        queries, keys = (
            side.replace(segments=jnp.minimum(side.segments, 1), positions=index)
            for side in (mask.queries, mask.keys)
        )
        return plain(q, k, v, mask._replace(queries=queries, keys=keys))

    with_kernel(patch, run)


def with_padding_read(patch: pytest.MonkeyPatch) -> None:
    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        is_padding = mask.keys.segments == 0
        read = mask.keys.replace(
            segments=jnp.where(is_padding, 1, mask.keys.segments),
            positions=jnp.where(is_padding, 0, mask.keys.positions),
        )
        return plain(q, k, v, mask._replace(keys=read))

    with_kernel(patch, run)


def with_next_token(patch: pytest.MonkeyPatch) -> None:
    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        queries = mask.queries.replace(positions=mask.queries.positions + 1)
        return plain(q, k, v, mask._replace(queries=queries))

    with_kernel(patch, run)


def with_half_a_batch(patch: pytest.MonkeyPatch) -> None:
    exact = probes.gradients

    def run(loss: Any, state: Any, batch: Any, key: Any, pieces: int, *rest: Any) -> Any:
        if pieces > 1:
            batch = jax.tree.map(lambda array: array[: len(array) // 2], batch)
        return exact(loss, state, batch, key, 1, *rest)

    patch.setattr(probes, "gradients", run)


def with_lost_moments(patch: pytest.MonkeyPatch) -> None:
    exact = Checkpoints.restore

    def restore(self: Checkpoints, target: Any, log: Any) -> Any:
        state = exact(self, target, log)
        assert state is not None
        return state.replace(optimizer=jax.tree.map(jnp.zeros_like, state.optimizer))

    patch.setattr(Checkpoints, "restore", restore)


# The mesh against one device is in test_verify_kinds.py.
BROKEN: list[tuple[str, Break]] = [
    ("texts apart", without_segments),
    ("texts apart", with_padding_read),
    ("future apart", with_next_token),
    ("accumulation", with_half_a_batch),
    ("resumed step", with_lost_moments),
]


@pytest.mark.parametrize("name, fault", BROKEN)
def test_a_probe_holds_for_a_sound_run_and_not_for_a_broken_one(
    name: str, fault: Break, sound: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict() -> str:
        state = sound.repeated.newest(LARGEST_STEP)  # which a probe may donate
        found = PROBES[name](dataclasses.replace(sound, state=state))
        assert found is not None
        return found[0]

    assert verdict() == ("equal to rounding" if name == "accumulation" else "equal")
    fault(monkeypatch)
    assert verdict() == "NO"


def test_every_probe_is_broken_once() -> None:
    assert {*(name for name, _ in BROKEN), "one device"} == {*PROBES}


def test_a_wrong_kernel_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel(monkeypatch, lambda q, k, v, mask: 1.01 * plain(q, k, v, mask))
    assert "kernels: attention kernel 'blocked' is wrong" in refused(runs.run)


# The command.


def test_other_text_is_refused_and_missing_text_leaves_the_steps_open(
    runs: Runs, capsys: Capture
) -> None:
    content = runs.text.read_text()
    try:
        runs.text.write_text(content.replace("cat", "cow", 1))
        assert refused(runs.run).startswith("data: ") and "other text" in refused(runs.run)
        runs.text.unlink()
        assert main(["verify", str(runs.run), "--data.cache_dir", f"{CACHE}/data"]) == 0
    finally:
        runs.text.write_text(content)
    out = capsys.readouterr().out
    assert "unknown            steps done again: none, since the run cannot be set up" in out
    assert "Not known: who computed the run" in out


def test_the_command_ends_with_status_1_where_something_was_altered(
    runs: Runs, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = copied(runs, tmp_path)
    a_figure(run_dir, random.Random(0))
    assert main(["verify", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "NO                 metrics.jsonl: lines that do not follow" in out
    assert "steps done again: none: files are not those of the run." in out


def test_a_folder_without_a_chain_has_one_message(
    runs: Runs, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    run_dir = copied(runs, tmp_path)
    with (run_dir / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["verify", str(run_dir)]) == 2
    assert "is still being written by a run" in capsys.readouterr().err
    write_lines(run_dir, [b'{"step": 1, "loss": 2.0}'])
    assert main(["verify", str(run_dir)]) == 2
    assert "none with `before`" in capsys.readouterr().err
    assert main(["verify", str(runs.run), "--steps", "-1"]) == 2
    assert main(["verify", str(runs.run), "--mesh.fsdp", "3"]) == 2
    assert "mesh.fsdp=3" in capsys.readouterr().err
