"""What a run shows and records: nothing is lost, nothing is said twice, and it costs nothing."""

import contextlib
import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.files import ConfigError
from jaxformer.report import (
    MetricsLog,
    ProgressBar,
    banner,
    human_bytes,
    human_count,
    human_time,
    printable,
    read_metrics,
)
from jaxformer.report.banner import framed, result_lines
from jaxformer.report.plot import plot_losses


def train_line(step: int) -> dict[str, float]:
    loss = np.float32(2 + 6 * math.exp(-step / 50))
    rate = 1e-3 * min(step / 20, 1)
    return {
        "loss": loss,
        "learning_rate": rate,
        "tokens": step * 4096,
        "tokens_per_second": 2000.0,
        "mfu": 0.4,
    }


def log_steps(run_dir: Path, start: int, stop: int) -> None:
    with MetricsLog(run_dir, resume_step=start) as log:
        for step in range(start + 1, stop + 1):
            log.log(step, train_line(step))
            if step % 5 == 0:
                log.log(step, {"val_loss": 2.5, "val_bits_per_byte": 1.5})


# metrics.jsonl


def test_each_line_is_on_disk_before_the_next_step(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(1, {"loss": 2.0})
        line = (tmp_path / "metrics.jsonl").read_text()
        assert line.startswith('{"step": 1, "loss": 2.0, "seconds": ') and line.endswith("}\n")


@given(st.floats(width=32, allow_nan=True, allow_infinity=True))
def test_a_float32_loss_comes_back_bitwise_finite_or_not(tmp_path_factory, loss):
    run_dir = tmp_path_factory.mktemp("run")
    with MetricsLog(run_dir) as log:
        log.log(3, {"loss": np.float32(loss)})
    line = (run_dir / "metrics.jsonl").read_text()
    written = json.loads(line, parse_constant=pytest.fail)["loss"]
    assert (written is None) == (not math.isfinite(loss))
    assert np.array_equal(
        np.float32(read_metrics(run_dir)[0]["loss"]), np.float32(loss), equal_nan=True
    )


def test_seconds_are_wall_time_from_the_beginning_and_go_on_where_a_run_continues(
    tmp_path, monkeypatch
):
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with MetricsLog(tmp_path, began=990.0) as log:  # ten seconds of start-up
        for step in (1, 2, 3):
            clock[0] += 2
            log.log(step, {"loss": 2.0})
        clock[0] += 5  # an evaluation takes its time
        log.log(3, {"val_loss": 2.0})
    assert [line["seconds"] for line in read_metrics(tmp_path)] == [12, 14, 16, 21]
    clock[0] = 77.0  # another process: its clock began elsewhere
    with MetricsLog(tmp_path, resume_step=2, began=70.0) as log:
        clock[0] += 1
        log.log(3, {"loss": 2.0})
    assert [line["seconds"] for line in read_metrics(tmp_path)] == [12, 14, 14 + 8]


def test_a_resumed_log_equals_the_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 5.0)
    log_steps(tmp_path / "whole", 0, 20)
    log_steps(tmp_path / "killed", 0, 17)
    path = tmp_path / "killed" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 18, "lo')
    log_steps(tmp_path / "killed", 10, 20)
    assert path.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_run_that_starts_over_forgets_its_lines(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(0, {"val_loss": 8.0})
    log_steps(tmp_path, 0, 3)
    log_steps(tmp_path, 0, 2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_a_kill_while_the_log_is_rewritten_loses_no_line(tmp_path, monkeypatch):
    log_steps(tmp_path, 0, 6)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        MetricsLog(tmp_path, resume_step=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_finite_scalars_reach_tensorboard_where_it_is_installed(tmp_path, capfd):
    pytest.importorskip("tensorboardX")
    with MetricsLog(tmp_path) as log:
        log.log(1, {"loss": 2.0, "grad_norm": math.nan})
    written = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert b"loss" in written
    assert b"grad_norm" not in written
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_tensorboard_does_not_bring_pytorch_which_can_be_imported_later(tmp_path):
    pytest.importorskip("tensorboardX")
    code = (
        "import sys; from pathlib import Path; from jaxformer.report.metrics import MetricsLog\n"
        "with MetricsLog(Path(sys.argv[1])) as log: log.log(1, {'loss': 2.0})\n"
        "print('torch' in sys.modules, 'tensorboardX' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_without_tensorboard_only_the_lines_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    log_steps(tmp_path, 0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# loss.png


@pytest.mark.parametrize(
    "lines",
    [
        [(step, train_line(step)) for step in range(1, 300)]
        + [(100, {"val_loss": 3.0}), (299, {"val_loss": 2.5})],
        [(1, train_line(1))],
        [(0, {"val_loss": 8.0})],
        [(1, {"loss": math.nan}), (2, {"loss": math.inf})],
        [(step, train_line(step) | {"loss": 1e30 if step == 7 else 2.0}) for step in range(1, 20)],
    ],
    ids=["a run", "one step", "an evaluation alone", "nothing finite", "a spike"],
)
def test_whatever_was_logged_can_be_plotted(tmp_path, lines):
    with MetricsLog(tmp_path) as log:
        for step, values in lines:
            log.log(step, values)
    path = plot_losses(tmp_path)
    assert path == tmp_path / "loss.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in tmp_path.iterdir()} <= {"loss.png", "metrics.jsonl", "tensorboard"}


def test_a_plot_of_nothing_says_what_to_do(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.log(1, {"learning_rate": 0.1})
    with pytest.raises(ConfigError, match=r"train\.log_every"):
        plot_losses(tmp_path)


def test_a_spike_bends_neither_the_smoothed_curve_nor_the_scale():
    from jaxformer.report.plot import limits, smoothed

    loss = np.full(500, 3.0)
    loss[250] = 1e4
    assert np.allclose(smoothed(loss), 3.0)
    assert limits(loss)[1] < 4


# progress


def test_lines_come_at_most_every_two_seconds_except_evaluations_and_the_last(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with ProgressBar(100, mode="lines") as progress:
        for step in range(1, 101):
            clock[0] += 0.125
            progress.update(step, train_line(step) if step % 5 == 0 else None)
            if step == 52:
                progress.update(step, {"val_loss": 2.5, "val_bits_per_byte": 1.5})
    steps = [int(line.split("/")[0].split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [5, 25, 45, 52, 70, 90, 100]


def test_a_line_tells_loss_pace_use_and_time_left(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with ProgressBar(1000, start_step=10, mode="lines") as progress:
        clock[0] = 60.0  # compiling
        progress.update(11)
        clock[0] = 160.0
        progress.update(511, train_line(511))
    line = capsys.readouterr().out.strip()
    assert (
        line
        == "step  511/1000  loss 2.0002  lr 1.00e-03  2,000 tokens/s  MFU 40.0%  1 min 38 s left"
    )


def test_an_evaluation_of_more_than_a_few_seconds_tells_how_far_it_is(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with ProgressBar(0, mode="lines", stream=sys.stderr) as progress:
        for seconds, batches in ((1.0, 4), (2.0, 7)):
            read = []
            for batch in progress.evaluation(iter(range(batches)), batches):
                read.append(batch)
                clock[0] += seconds
            assert read == [*range(batches)] and progress.evaluated is None
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "evaluation 3/7 batches  8.0 s left",
        "evaluation 6/7 batches  2.0 s left",
    ]
    with ProgressBar(1, mode="none") as progress:
        assert [*progress.evaluation(iter("ab"), 2)] == ["a", "b"]


def test_no_terminal_means_lines_and_none_means_silence(capsys):
    for mode in ("auto", "none"):
        with ProgressBar(1, mode=mode) as progress:
            progress.update(1, {"loss": 1.0})
    assert capsys.readouterr().out == "step 1/1  loss 1.0000\n"


def test_text_that_the_output_cannot_encode_is_still_said(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    ProgressBar(1, mode="lines").log("na\u00efve")
    assert raw.getvalue() == b"na?ve\n"


BAR_RUN = """
import sys, time
from jaxformer.report import ProgressBar
with ProgressBar(1000) as progress:
    for step in range(1, 1001):
        progress.update(step, {"loss": 2.5, "tokens_per_second": 2000.0, "mfu": 0.4})
        if step == 20:
            progress.log("checkpoint [bold] written")
        time.sleep(0.02)
"""


def on_a_terminal(code: str, columns: int, seconds: float) -> tuple[str, int]:
    """What a program shows on a terminal of its own, interrupted as by Ctrl-C after some seconds,
    and its exit status."""
    ours, terminal = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24"}

    def handle_interrupts() -> None:
        """Also where these tests run in the background of a shell, which ignores Ctrl-C."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [sys.executable, "-c", code]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    program = subprocess.Popen(command, env=environment, preexec_fn=handle_interrupts, **streams)
    os.close(terminal)
    shown, end = b"", 0.0
    with contextlib.suppress(OSError):  # the read that finds the terminal closed
        while more := os.read(ours, 4096):
            shown += more
            end = end or time.monotonic() + seconds
            if time.monotonic() > end:
                program.send_signal(signal.SIGINT)
                # Sent again, since one that comes while Python is in a destructor is lost.
                end = time.monotonic() + 0.5
    os.close(ours)
    return shown.decode(), program.wait(timeout=60)


def test_a_terminal_shows_a_bar_and_an_interrupt_leaves_it_usable():
    shown, status = on_a_terminal(BAR_RUN, columns=80, seconds=1.2)
    assert status != 0
    for part in (
        "/1000",
        "loss 2.5000",
        "2,000 tokens/s",
        "MFU 40.0%",
        "left",
        "checkpoint [bold] written\r\n",
    ):
        assert part in shown
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert shown.rindex(show) > shown.rindex(hide)
    assert shown.count("MFU") < 4 * 1.2 + 8


EVALUATION_RUN = """
import time
from jaxformer.report import ProgressBar
with ProgressBar(10) as progress:
    progress.update(5, {"loss": 2.5})
    for batch in progress.evaluation(range(4), 4):
        time.sleep(0.4)
    time.sleep(0.4)
"""


@pytest.mark.slow
def test_the_bar_counts_the_batches_of_an_evaluation_and_comes_back():
    shown, status = on_a_terminal(EVALUATION_RUN, columns=80, seconds=60)
    assert status == 0
    assert shown.index("evaluation 1/4") < shown.index("evaluation 3/4")
    assert shown.rindex("step 5/10") > shown.rindex("evaluation")


# banner, sample, numbers


def test_the_banner_aligns_its_columns_and_wraps_inside_them():
    text = banner({"device": "cpu", "parameters": ["12.3M", "word " * 30]}, title="quickstart")
    lines = text.splitlines()
    assert lines[:3] == ["quickstart", "  device      cpu", "  parameters  12.3M"]
    assert all(line.startswith(" " * 14 + "word") and len(line) <= 100 for line in lines[3:])
    assert text.split().count("word") == 30


def test_a_sample_is_framed_and_a_loss_told_however_large():
    assert framed("def f():\n\n    \x1b[2Jpass") == "  | def f():\n  |\n  |     \ufffd[2Jpass"
    losses = (math.log(27), math.nan, math.inf, 1e4)
    texts = [result_lines({"val_loss": loss})["validation loss"] for loss in losses]
    assert [text.partition("perplexity ")[2] for text in texts] == ["27.0)", "nan)", "inf)", "inf)"]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (human_count(0), "0"),
        (human_count(4096), "4,096"),
        (human_count(9_999.9), "10.0k"),
        (human_count(999_960), "1.0M"),
        (human_count(123_600_000), "123.6M"),
        (human_count(1.1e9), "1.1B"),
        (human_count(15e12), "15.0T"),
        (human_count(math.inf), "inf"),
        (human_bytes(812), "812 B"),
        (human_bytes(1024**2 - 1), "1.0 MiB"),
        (human_bytes(1.5 * 1024**3), "1.5 GiB"),
        (human_bytes(3000 * 1024**4), "3,000.0 TiB"),
        (human_time(0.25), "250 ms"),
        (human_time(0.9999), "1.0 s"),
        (human_time(9.97), "10 s"),
        (human_time(59.6), "1 min 00 s"),
        (human_time(80), "1 min 20 s"),
        (human_time(3599.7), "1 h 00 min"),
        (human_time(86_399), "1 d 0 h"),
        (human_time(math.nan), "?"),
    ],
)
def test_numbers_read_as_people_write_them(made, expected):
    assert made == expected


@given(st.text())
def test_printable_text_holds_no_control_character(text):
    assert all(char == "\n" or char.isprintable() for char in printable(text))
