"""What a stranger wrote is computed in a process with bounds, which leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxformer.cluster.bounded import BoundedProcess, OutOfBounds


def answer(question: Any) -> Any:
    """What the processes of these tests do."""
    action, value = question
    if action == "loop":
        while True:
            pass
    if action == "sleep":
        time.sleep(value)
    if action == "fill":
        return len(f"{1:0{value}d}")
    if action == "exit":
        os._exit(value)
    if action == "nest":
        return answer(question)
    if action == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if action == "path":
        return sys.path
    if action == "process":
        return os.getpid()
    return value


@pytest.fixture
def bounded():
    process = BoundedProcess(__name__, "answer", seconds=1.0)
    yield process
    process.close()


def test_answers_are_those_of_the_function(bounded: BoundedProcess) -> None:
    for value in (None, "\ud800é\n", [1, {"a": 2.5}], "x" * (1 << 22)):  # more than a pipe holds
        assert bounded.ask(["echo", value]) == value
    first = bounded.ask(["process", None])
    assert bounded.ask(["terminate", 5]) == 5  # a signal to the job does not end it
    assert bounded.ask(["process", None]) == first != os.getpid()


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (["loop", 0], "takes more than 1 s"),
        (["sleep", 30], "takes more than 1 s"),
        (["fill", 2 * 10**9], "takes more than 1 GiB of memory"),
        (["nest", 0], "is nested too deeply"),
        (["exit", 7], "ends the process"),
        ([1, 2, 3], r"fails \(ValueError: too many values to unpack"),
    ],
)
def test_a_question_beyond_the_bounds_is_refused_and_the_next_is_answered(
    bounded: BoundedProcess, question: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded.ask(["echo", 5])
    monkeypatch.setattr("jaxformer.cluster.bounded.WAITING", 2)
    with pytest.raises(OutOfBounds, match=said):
        bounded.ask(question)
    monkeypatch.undo()
    assert bounded.ask(["echo", 5]) == 5


PARENT = """
from jaxformer.cluster.bounded import BoundedProcess
process = BoundedProcess("test_bounded", "answer", 2.0)
print(process.ask(["process", 1]), flush=True)
process.ask(["loop", 0])
"""


@pytest.mark.slow
def test_nothing_is_left_when_the_process_that_asks_is_killed() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", PARENT]
    environment = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        parent.kill()
    ends = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_the_working_directory_is_not_on_the_path_of_the_process(monkeypatch, tmp_path):
    """In `python -c` and in a notebook it is on that of this one, as an empty entry."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(entry for entry in sys.path if entry)])
    process = BoundedProcess(__name__, "answer", seconds=1.0)
    try:
        paths = process.ask(("path", None))
    finally:
        process.close()
    assert paths and not {"", str(tmp_path)} & {*paths}
