"""The two texts of a line of metrics.jsonl: the fingerprint of the state after the step, and the
digest of the line before it."""

import json
from pathlib import Path

import pytest
from tiny_run import PLAIN, copy_until, line, logged, saved, train_here, write_text

from jaxformer.checkpoints.digests import combined
from jaxformer.checkpoints.reading import read_manifest
from jaxformer.config.config_file import read_config
from jaxformer.report.metrics import MetricsLog, first_digest, line_digest, logged_lines
from jaxformer.runs.directory import identity_of

STEPS = 6
CHANGES = PLAIN | {
    "optimizer.decay_steps": STEPS,
    "train.checkpoint_every": 2,
    "train.eval_every": 3,
    "train.log_every": 2,
    "train.steps": STEPS,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run without an interruption, and one that was killed after its first checkpoint."""
    folder = tmp_path_factory.mktemp("chain")
    text = write_text(folder / "text.txt")
    assert train_here(line(folder / "whole", text, CHANGES)) == 0
    killed = copy_until(2, folder / "whole", folder / "killed")
    assert train_here(line(killed, text, CHANGES)) == 0
    return folder / "whole", killed


def test_each_line_has_the_digest_of_the_line_before_it(runs: tuple[Path, Path]) -> None:
    for run_dir in runs:
        raw = (run_dir / "metrics.jsonl").read_bytes().splitlines()
        record = json.loads((run_dir / "data.json").read_bytes())
        seed = read_config(run_dir / "config.json").run.seed
        first = first_digest(identity_of(record, seed))
        befores = [json.loads(text)["before"] for text in raw]
        assert befores == [first, *map(line_digest, raw[:-1])]
        assert all(list(json.loads(text))[-2:] == ["state", "before"] for text in raw)


def test_the_state_of_a_line_is_that_of_the_checkpoint_of_its_step(runs: tuple[Path, Path]) -> None:
    states = {entry["step"]: entry["state"] for entry in logged(runs[0])}
    assert saved(runs[0]) == [2, 4, 6] and set(states) == {1, 2, 3, 4, 6}
    for step in saved(runs[0]):
        leaves = read_manifest(runs[0] / "checkpoints" / str(step))["leaves"]
        assert combined({path: row[2] for path, row in leaves.items()}) == states[step]


def test_a_continued_run_has_the_states_of_the_uninterrupted_one(runs: tuple[Path, Path]) -> None:
    whole, killed = runs
    assert logged(killed) == logged(whole)
    kept = [text.raw for text in logged_lines(whole / "metrics.jsonl") if text.entry["step"] <= 2]
    now = (killed / "metrics.jsonl").read_bytes()
    assert now.startswith(b"\n".join(kept) + b"\n")


def test_a_log_of_another_writer_keeps_the_bytes_of_its_lines(tmp_path: Path) -> None:
    former = b'{"step":1,  "loss":2.5}\n'
    (tmp_path / "metrics.jsonl").write_bytes(former + b'{"step": 2, "loss": 2.0}\n')
    with MetricsLog(tmp_path, resume_step=1) as log:
        log.log(2, {"loss": 2.0})
    first, second = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert first == former
    assert json.loads(second)["before"] == line_digest(former[:-1])
    assert "state" not in json.loads(second)
