"""What a stranger wrote is computed in a process with bounds, which leaves nothing behind."""

import json
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
    if action == "power":
        return str(10**value)[:1]
    if action == "sleep":
        time.sleep(value)
    if action == "fill":
        return len(f"{1:0{value}d}")
    if action == "exit":
        os._exit(value)
    if action == "nest":
        return answer(question)
    if action == "modules":
        return [name for name in ("jax", "numpy") if name in sys.modules]
    return value


@pytest.fixture
def bounded():
    process = BoundedProcess(__name__, "answer", seconds=1.0)
    yield process
    process.close()


def has_ended(pid: int) -> bool:
    """Within 20 s; a process that nobody has waited for yet counts as ended."""
    for _ in range(400):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("value", [None, "\ud800é\n", [1, {"a": 2.5}]])
def test_answers_are_those_of_the_function(bounded: BoundedProcess, value: Any) -> None:
    assert bounded.ask(["echo", value]) == value
    first = bounded.pid
    assert bounded.ask(["modules", None]) == [] and bounded.pid == first
    long = "x" * (1 << 22)  # more than a pipe holds
    assert bounded.ask(["echo", long]) == long


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (["loop", 0], "takes more than 1 s of a core"),
        (["power", 10**8], "takes more than 1 s of a core"),
        (["fill", 2 * 10**9], "takes more than 1 GiB of memory"),
        (["nest", 0], "is nested too deeply"),
        (["exit", 7], r"ends the process that computes it \(status 7\)"),
        ([1, 2, 3], r"fails \(ValueError: too many values to unpack"),
    ],
)
def test_a_question_beyond_the_bounds_is_refused_and_the_next_is_answered(
    bounded: BoundedProcess, question: Any, said: str
) -> None:
    with pytest.raises(OutOfBounds, match=said):
        bounded.ask(question)
    assert bounded.ask(["echo", 5]) == 5


def test_what_takes_no_time_of_a_core_is_waited_for_and_then_stopped(
    bounded: BoundedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bounded.ask(["sleep", 1.5]) == 1.5  # as on a machine that is busy
    monkeypatch.setattr("jaxformer.cluster.bounded.WAITING", 0.5)
    with pytest.raises(OutOfBounds, match=r"takes more than 0\.5 s"):
        bounded.ask(["sleep", 30])
    monkeypatch.undo()
    assert bounded.ask(["echo", 5]) == 5


def test_a_process_that_somebody_ended_is_started_again(bounded: BoundedProcess) -> None:
    bounded.ask(["echo", 1])
    assert bounded.pid is not None
    os.kill(bounded.pid, signal.SIGKILL)
    assert bounded.ask(["echo", 2]) == 2


def test_signals_of_the_terminal_do_not_end_it(bounded: BoundedProcess) -> None:
    bounded.ask(["echo", 1])
    first = bounded.pid
    assert first is not None and os.getsid(first) == first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(first, number)
    assert bounded.ask(["echo", 2]) == 2 and bounded.pid == first


PARENT = """
import os, sys, time
from jaxformer.cluster.bounded import BoundedProcess
process = BoundedProcess("test_bounded", "answer", 2.0)
process.ask(["echo", 1])
print(process.pid, flush=True)
if sys.argv[1] == "fork" and os.fork() == 0:
    assert process.pid is None and process.ask(["echo", 2]) == 2
    print(process.pid, flush=True)
    os._exit(0)
if sys.argv[1] == "computing":
    process.ask(["loop", 0])
if sys.argv[1] == "waiting":
    time.sleep(100)
if sys.argv[1] == "fork":
    os.wait()
    assert process.ask(["echo", 3]) == 3
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("ends", None),
        ("fork", None),
        *((what, n) for what in ("waiting", "computing") for n in (signal.SIGTERM, signal.SIGKILL)),
    ],
)
def test_nothing_is_left_when_the_process_that_asks_ends(what: str, number: int | None) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline()) for _ in range(2 if what == "fork" else 1)]
    if number is not None:
        time.sleep(0.5)
        parent.send_signal(number)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == (0 if number is None else -number) and said == ""
    assert [pid for pid in pids if not has_ended(pid)] == []


def test_questions_of_several_threads_get_their_own_answers(bounded: BoundedProcess) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda value: bounded.ask(["echo", value]), range(200))]
    assert json.dumps(answers) == json.dumps([*range(200)])
