"""Commands with flags and files that nobody would write on purpose: each ends within 60 s with a
documented status and without a traceback, and touches nothing outside its own directory.

A case is a number; `CASE=25 pytest -n 0 tests/faults/test_fuzz.py -m slow -k 0` runs that one
alone, and prints what it did.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from fuzz_cases import Case, Template, make_case
from tiny_run import contents, finish, fork, line, write_text

import jaxformer

pytestmark = pytest.mark.slow

SECONDS = 60
MEMORY = 12 << 30  # of one command, in bytes: more is a fault, too
SHOWN = 6000
CASES, SIZE = 60, 30
PACKAGE = Path(jaxformer.__file__).parent
STATUSES = {0, 1, 2}
TINY = {
    "data.cache_dir": "cache",
    "model.d_model": 16,
    "model.n_layers": 1,
    "optimizer.decay_steps": 0,
    "optimizer.name": "adamw",
    "optimizer.warmup_steps": 1,
    "run.dir": "run",
    "train.batch_size": 4,
    "train.checkpoint_every": 1,
    "train.eval_every": 0,
    "train.microbatches": 1,
    "train.steps": 2,
}
CONFIG = """from jaxformer.config.config_file import read_config

config = read_config("base.json")
"""


def run(case: Case) -> dict[str, Any]:
    """What a case did: its status (None: it did not end), what it printed, and its seconds."""
    environment = {"HOME": str(case.folder), "TMPDIR": str(case.folder)}
    begin = time.monotonic()
    command = Command(case.arguments, case.folder, environment, MEMORY, merged=True)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(SECONDS)
    status = command.returncode
    if status is None:
        os.killpg(command.pid, signal.SIGKILL)
    printed = command.communicate()[0][-SHOWN:]
    return {"status": status, "printed": printed, "seconds": time.monotonic() - begin}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """A run of two steps, the same as a Hugging Face directory, its text, its cache, and a config
    that makes such a run; the paths in them are relative."""
    folder = tmp_path_factory.mktemp("fuzz") / "template"
    folder.mkdir()
    write_text(folder / "text.txt", documents=30)
    here = Path.cwd()
    try:
        os.chdir(folder)
        finish(fork(line(Path("run"), Path("text.txt"), TINY)))
        from jaxformer.cli import main

        assert main(["convert", "run", "hf"]) == 0
    finally:
        os.chdir(here)
    shutil.rmtree(folder / "run/tensorboard", ignore_errors=True)
    shutil.copy(folder / "run/config.json", folder / "base.json")
    (folder / "tiny.py").write_text(CONFIG)
    return Template(folder)


def problems_of(case: Case, answer: dict) -> list[str]:
    """What a case must not do. A traceback is one that leads through jaxformer: threads of other
    libraries may print theirs, which nobody can prevent."""
    status, printed = answer["status"], answer["printed"]
    # XLA's allocator aborts the process at the limit of MEMORY that these tests set, in a thread of
    # its own, where no code of Python runs any more.
    met_limit = status == -signal.SIGABRT and "std::bad_alloc" in printed
    found = []
    if status is None:
        found.append(f"did not end within {SECONDS} s")
    elif status not in STATUSES and not met_limit:
        found.append(f"exit status {status}")
    if f'File "{PACKAGE}' in printed or "\nfailed: " in f"\n{printed}":
        found.append("an error that nobody foresaw")
    if "\x1b[" in printed and not any("\x1b[" in argument for argument in case.arguments):
        found.append("a control sequence")
    return found


@pytest.mark.fault(
    "60 flags and files made from seeds, in groups: huge numbers, nan, control"
    " characters, deep JSON, truncated and altered files, pipes and directories in place of files",
    kept="One message, no traceback; nothing outside the command's own directory is touched.",
    status="0, 1 or 2",
)
@pytest.mark.parametrize("first", range(0, CASES, SIZE))
def test_whatever_is_given_a_command_ends_with_a_message(
    first: int, template: Template, tmp_path: Path
) -> None:
    asked = os.environ.get("CASE")
    numbers = [int(asked)] if asked else range(first, first + SIZE)
    sibling = tmp_path / "sibling"
    sibling.mkdir()
    write_text(sibling / "theirs.txt")
    before, bad = contents(sibling), []
    for number in numbers:
        case = make_case(number, template, tmp_path / "own" / "case")
        answer = run(case)
        if asked:
            print(case, json.dumps(answer, indent=1).replace("\\n", "\n"))
        problems = problems_of(case, answer)
        if {path.name for path in tmp_path.iterdir()} != {"own", "sibling"}:
            problems.append("a file outside of its directory")
        if contents(sibling) != before or os.listdir(tmp_path / "own") != ["case"]:
            problems.append("a change beside its directory")
        if problems:
            bad.append(f"{case.name}: {case.arguments}: {problems}\n{answer['printed'][-800:]}")
        shutil.rmtree(case.folder)
    assert not bad, "\n\n".join(bad)
