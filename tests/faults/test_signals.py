"""A signal stops a run within seconds wherever it comes, with what there is to save saved, and the
same command continues it bitwise."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from tiny_run import (
    ROOT,
    STEPS,
    assert_same_run,
    finish,
    fork,
    launch,
    line,
    lines_logged,
    logged,
    reference,
    saved,
    wait_until,
    write_text,
)

pytestmark = pytest.mark.slow

SECONDS = 10  # in which a run stops, of which the machine's other work takes a part
STATUS = {
    number: 128 + number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
}


def stopped(
    process: subprocess.Popen[str] | Command, number: signal.Signals, ready: Callable[[], bool]
) -> str:
    """What a process says on standard error that a signal stopped once `ready`."""
    wait_until(ready, process)
    process.send_signal(number)
    begin = time.monotonic()
    _, error = finish(process, STATUS[number])
    assert time.monotonic() - begin < SECONDS
    assert "Traceback" not in error and number.name in error
    return error


def fault(phase: str, kept: str) -> Any:
    return pytest.mark.fault(f"a signal {phase}", kept=kept, status="128 + signal")


@fault(
    "between steps (SIGTERM 143, SIGINT 130, SIGUSR1 138, SIGHUP 129)",
    "The step in flight is finished and saved. Continued, the run is the uninterrupted one.",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_between_steps(
    number: signal.Signals, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"train.checkpoint_every": 1000})
    error = stopped(fork(arguments), number, lambda: lines_logged(run_dir) >= 3)
    assert "and saved; the same command continues" in error
    (step,) = saved(run_dir)
    assert 3 <= step < STEPS and logged(run_dir)[-1]["step"] == step
    finish(fork(arguments))
    assert_same_run(run_dir, expected)


@fault(
    "in an evaluation",
    "The evaluation is abandoned between two batches and the state is saved. Continued, the run"
    " makes that evaluation and is the uninterrupted one.",
)
def test_a_signal_in_an_evaluation(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = reference(tmp_path_factory)[1]
    held = write_text(tmp_path / "held.txt", documents=800, seed=1)
    changes = {"data.validation": held, "train.eval_every": 12, "train.checkpoint_every": 1000}
    expected, run_dir = tmp_path / "whole", tmp_path / "run"
    finish(fork(line(expected, text, changes)))
    arguments = line(run_dir, text, changes)

    def is_evaluating() -> bool:
        lines = logged(run_dir) if lines_logged(run_dir) else []
        return bool(lines) and lines[-1]["step"] == 12 and "val_loss" not in lines[-1]

    stopped(fork(arguments), signal.SIGTERM, is_evaluating)
    assert is_evaluating() and saved(run_dir) == [12]
    finish(fork(arguments))
    assert_same_run(run_dir, expected)


@fault(
    "while the step is compiled or the first state is made",
    "There is nothing to save. The same command starts again.",
)
def test_a_signal_while_compiling(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"run.compilation_cache": ""})
    process = launch(arguments, JAX_ENABLE_COMPILATION_CACHE="false")
    assert process.stdout is not None
    for printed in process.stdout:
        if "run directory" in printed:  # ends the banner; compiling follows
            break
    error = stopped(process, signal.SIGTERM, lambda: True)
    assert "nothing was to be saved; the same command starts again" in error
    assert not saved(run_dir) and not lines_logged(run_dir)
    finish(fork(line(run_dir, text)))
    assert_same_run(run_dir, expected)


@fault("while libraries are imported", "Nothing was begun. The same command starts again.")
def test_a_signal_while_importing(tmp_path: Path) -> None:
    arguments = line(tmp_path / "run", write_text(tmp_path / "text.txt"))
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    maps = Path(f"/proc/{process.pid}/maps")
    error = stopped(process, signal.SIGINT, lambda: "libjax_common" in maps.read_text())
    assert "interrupted: stopped by SIGINT" in error
    assert not (tmp_path / "run/config.json").exists()


@fault(
    "while a checkpoint is written",
    "The save is finished. Continued, the run is the uninterrupted one.",
)
def test_a_signal_in_a_save(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    arguments = line(run_dir, text, {"train.checkpoint_every": 1})

    def is_saving() -> bool:
        return lines_logged(run_dir) > 4 and any(run_dir.glob("checkpoints/*tmp*"))

    stopped(fork(arguments), signal.SIGTERM, is_saving)
    assert not any(run_dir.glob("checkpoints/*tmp*"))
    assert logged(run_dir)[-1]["step"] == max(saved(run_dir)) < STEPS
    finish(fork(arguments))
    assert_same_run(run_dir, expected)


@fault(
    "while the sample at the end is made", "All steps are saved. The same command makes the sample."
)
def test_a_signal_in_the_sample(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    _, text = reference(tmp_path_factory)
    run_dir = tmp_path / "run"
    changes = {"model.max_length": 30_000, "run.sample_tokens": 29_000, "train.steps": 4}
    arguments = line(run_dir, text, changes)

    def is_saved() -> bool:
        return saved(run_dir) == [4] and not any(run_dir.glob("checkpoints/*tmp*"))

    process = fork(arguments)
    wait_until(is_saved, process)
    time.sleep(0.5)
    error = stopped(process, signal.SIGTERM, lambda: True)
    assert "after the last step, which is saved; the same command shows the sample" in error
    assert saved(run_dir) == [4] and "val_loss" in logged(run_dir)[-1]


@fault(
    "while text is tokenized",
    "What is half written is dropped or continued. The same command goes on.",
)
def test_a_signal_while_data_is_prepared(tmp_path: Path) -> None:
    text, run_dir, cache = tmp_path / "text.txt", tmp_path / "run", tmp_path / "cache"
    text.write_text(write_text(tmp_path / "part.txt", documents=2000).read_text() * 40)
    changes = {"data.cache_dir": cache, "train.steps": 2, "data.validation": tmp_path / "part.txt"}
    arguments = line(run_dir, text, changes | {"train.eval_batches": 2})
    error = stopped(fork(arguments), signal.SIGTERM, lambda: any(cache.glob("stores/**/*.tmp*")))
    assert "the same command" in error
    assert not any(cache.glob("stores/**/*.tmp*"))
    finish(fork(arguments))


@fault("in `jaxformer convert`", "The target is empty or gone, and the same command writes it.")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_a_signal_in_convert(
    number: signal.Signals, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected, _ = reference(tmp_path_factory)
    target = tmp_path / "model"
    slow = (
        "import time; from jaxformer.interop import tensor_files; write = tensor_files.save_file\n"
    )
    slow += "def save(*a): write(*a); time.sleep(60)\n"
    slow += "tensor_files.save_file = save\n"
    run = "import sys; from jaxformer.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["convert", str(expected), str(target)]

    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", slow + run, *arguments],
        cwd=ROOT,
        stdout=pipe,
        stderr=pipe,
        text=True,
    )
    wait_until(lambda: any(target.glob(".unfinished/.model-drafts-*/model.safetensors")), process)
    process.send_signal(number)
    _, error = finish(process, 143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert "Traceback" not in error and target.exists() is (number == signal.SIGKILL)
    finish(Command(arguments))
    assert (target / "config.json").is_file() and not (target / ".unfinished").exists()


@fault("that comes again after a second", "The process ends at once, as by SIGKILL.")
def test_a_second_signal_ends_at_once() -> None:
    code = (
        "import time\n"
        "from jaxformer.cluster.signals import guarded\n"
        "from jaxformer.cluster.signals import current\n"
        "def run():\n"
        "    with current().hold():\n"
        "        print('held', flush=True); time.sleep(2); print('here', flush=True)\n"
        "        time.sleep(60)\n"
        "guarded(run)"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    for _ in range(2):  # as `timeout` sends it to a process and to its group
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.stdout.readline() == "here\n"
    error = stopped(process, signal.SIGTERM, lambda: True)
    assert "stopped at once by a second signal" in error


@fault(
    "in a callback of the garbage collector, where Python drops its exception",
    "It is obeyed once that has ended.",
)
def test_a_signal_whose_exception_python_drops() -> None:
    code = (
        "import gc, os, signal, sys, time\n"
        "from jaxformer.cluster.signals import guarded\n"
        "def collected(*_):\n"
        "    gc.callbacks.remove(collected)\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(1)\n"
        "def run():\n"
        "    gc.callbacks.append(collected); gc.collect()\n"
        "    time.sleep(60)\n"
        "sys.exit(guarded(run))"
    )
    began = time.monotonic()
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 143 and time.monotonic() - began < SECONDS
    assert process.stderr == "interrupted: stopped by SIGTERM\n"
