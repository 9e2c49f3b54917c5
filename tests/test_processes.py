"""Two processes of one run, joined over loopback: the numbers of one process, one run directory,
one set of records."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import ROOT, finish, launch, line, saved, write_text

from jaxformer.report import read_metrics

CHANGES = {
    "train.steps": 4,
    "train.eval_every": 2,
    "train.checkpoint_every": 2,
    "model.dropout": 0.0,
}


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("localhost", 0))
        return int(held.getsockname()[1])


@pytest.mark.xdist_group("two processes")
def test_two_processes_give_the_losses_and_evaluations_of_one(tmp_path: Path) -> None:
    text, port = write_text(tmp_path / "text.txt"), free_port()
    finish(launch(line(tmp_path / "one", text, CHANGES)))
    command = [sys.executable, str(ROOT / "tests/two_processes.py")]
    both = [
        subprocess.Popen(
            [*command, str(index), "2", str(port), *line(tmp_path / "two", text, CHANGES)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    (first, _), (second, _) = (finish(process) for process in both)
    found, expected = read_metrics(tmp_path / "two"), read_metrics(tmp_path / "one")
    assert [entry["step"] for entry in found] == [entry["step"] for entry in expected]
    for entry, wanted in zip(found, expected, strict=True):
        for name in {"loss", "grad_norm", "val_loss", "val_bits_per_byte", "tokens"} & {*wanted}:
            assert entry[name] == pytest.approx(wanted[name], rel=2e-4), (entry["step"], name)
    assert (
        saved(tmp_path / "two") == saved(tmp_path / "one") and (tmp_path / "two/loss.png").is_file()
    )
    assert "Done in" in first and "Done in" not in second and "step 2/4" not in second
