"""All code of the pages runs: Python as it stands, and command lines with settings of a tiny model
where their page asks for it; all other command lines are read by the parsers of their commands.
`page_blocks.py` says how."""

import re
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from page_blocks import CHECKS, PAGES, ROOT, Block, blocks_of, command_lines
from tiny_run import SETTINGS, write_text

import jaxformer as jf
from jaxformer.cli import COMMANDS, main
from jaxformer.cli.arguments import parse, parse_with_config
from jaxformer.cli.plan import PlanArguments
from jaxformer.config.config_file import settings_in
from jaxformer.config.run import to_json

pytestmark = pytest.mark.docs

# Settings of a tiny run, each in force where a command line of a page does not state it.
TINY = {
    "data.cache_dir": SETTINGS["data.cache_dir"],
    "data.sequence_length": 32,
    "data.train": "tiny.txt",
    "model.d_model": 32,
    "model.n_heads": 2,
    "model.n_layers": 2,
    "optimizer.warmup_steps": 1,
    "run.compilation_cache": SETTINGS["run.compilation_cache"],
    "run.progress": "lines",
    "run.sample_tokens": 4,
    "tokenizer.vocab_size": 300,
    "train.batch_size": 8,
    "train.checkpoint_every": 1,
    "train.eval_batches": 1,
    "train.eval_every": 0,
    "train.log_every": 1,
    "train.steps": 2,
}
PLACEHOLDERS = {"CONFIG": "configs/quickstart.py"}
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
every_page = pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=pytest.mark.xdist_group(f"code of {page.relative_to(ROOT)}"),
        )
        for page in PAGES
        if "```" in page.read_text()
    ],
)


@every_page
def test_all_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configs", "docs", "launch", "benchmarks", "examples", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_text(tmp_path / "tiny.txt")
    monkeypatch.chdir(tmp_path)
    namespace = {
        "__name__": "page",
        "begun": begun,
        "command": run_line,
        "tiny_config": tiny_config,
    }
    for block in blocks_of(page.read_text(encoding="utf-8")):
        do(block, page, namespace)


COMMAND = re.compile(r"`((?:python|jaxformer) [^`]*)`")


@pytest.mark.parametrize(
    "line", COMMAND.findall("\n".join(re.findall(r"^\|.*", README, flags=re.MULTILINE)))
)
def test_a_command_in_a_table_of_the_readme_is_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configs", "examples", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "RUN", "OTHER", "runs/quickstart"):
        begun("configs/quickstart.py", name)
    (words,) = command_lines(line)
    check_line([PLACEHOLDERS.get(word, word) for word in words], line)


def do(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    """Raises what the code raises, and AssertionError where a command fails."""
    place = f"{page.relative_to(ROOT)}:{block.line}"
    if block.action == "file":
        Path(block.detail).write_text(block.text, encoding="utf-8")
    elif block.action != "skip" and block.language == "python":
        lines = "\n" * block.line  # so that a traceback has the line of the page
        exec(compile(lines + block.text, str(page), "exec"), namespace)
    elif block.action != "skip":
        for words in command_lines(block.text):
            words = [PLACEHOLDERS.get(word, word) for word in words]
            if block.action == "run" and (command := command_of(words)):
                run_command(command, [*words[2:]], place, block.detail.split())
            else:
                check_line(words, place)


def run_line(line: str) -> None:
    """A command line of hidden set-up, with settings of a tiny model."""
    (words,) = command_lines(line)
    run_command(str(command_of(words)), [*words[2:]], line, [])


def tiny_config(path: str, overrides: Sequence[str] = ()) -> jf.RunConfig:
    """`jf.load_config` with the settings of a tiny run where `overrides` state none."""
    tiny = TINY | {"run.dir": "runs/tiny"}
    return jf.load_config(path, [*(f"{name}={tiny[name]}" for name in tiny), *overrides])


def begun(config: str, run_dir: str) -> None:
    """The run directory of a config before its first step: enough to read the settings of command
    lines that start from it."""
    Path(run_dir).mkdir(parents=True)
    (Path(run_dir) / "config.json").write_text(to_json(jf.load_config(config)))


def command_of(words: Sequence[str]) -> str | None:
    """The command of `jaxformer` that a line runs, if it is one."""
    if words[:2] == ["python", "train.py"]:
        return "train"
    return words[1] if words[0] == "jaxformer" else None


def run_command(command: str, arguments: list[str], place: str, added: list[str]) -> None:
    """Runs a command. One that reads a config has the settings of a tiny run where the line states
    none of its own; those `added` by the page come last."""
    tiny: dict[str, Any] = {}
    for text in {word for word in arguments if word.endswith(".txt")}:
        if not Path(text).exists():  # a text of the reader's own
            write_text(Path(text))
    if command in ("train", "doctor", "prepare"):
        tiny = {name: TINY[name] for name in TINY.keys() - settings_in([*arguments, *added])}
        if base := settings_in(arguments).get("run.init_from"):
            assert Path(base).exists(), f"{place}: {base} is not there"
        if base or ":classifier" in arguments[0]:  # whose model and tokenizer these are
            tiny = {n: v for n, v in tiny.items() if not n.startswith(("model.", "tokenizer."))}
    flags = [part for name, value in tiny.items() for part in (f"--{name}", str(value))]
    status = main([command, *arguments, *flags, *added])
    assert status == 0, f"{place}: jaxformer {command} {' '.join(arguments)} ended with {status}"


def check_line(words: Sequence[str], place: str) -> None:
    """Reads a command line as its program would, and runs nothing."""
    if command := command_of(words):
        assert command in COMMANDS, place
        parse_command(command, [*words[2:]], place)
    elif words[0] == "pip":
        named = {
            extra for found in re.findall(r"\[([\w,-]+)\]", words[-1]) for extra in found.split(",")
        }
        assert named <= set(PROJECT["project"]["optional-dependencies"]), place
    elif words[0] == "mkdocs":
        assert words[1] in ("build", "serve"), place
    elif words[0] in CHECKS:
        assert CHECKS[words[0]] in PROJECT["tool"], place
    elif words[0] == "pytest":
        markers = {m.partition(":")[0] for m in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
        asked = {mark for a, mark in pairwise(words) if a == "-m"}
        assert {name for mark in asked for name in re.findall(r"\w+", mark)} <= {
            *markers,
            "or",
            "not",
        }
    else:
        script = ROOT / (words[1] if words[0] in ("bash", "python") else words[0])
        assert script.is_file(), f"{place}: {script} does not exist"
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        unread = [flag for flag in flags if f'"{flag}"' not in script.read_text()]
        assert script.suffix != ".py" or not unread, f"{place}: {script} does not read {unread}"


def parse_command(command: str, arguments: list[str], place: str) -> None:
    """Reads the arguments of a command, and does not run it."""
    try:
        if command == "plan":
            parse_with_config(PlanArguments, "jaxformer plan", arguments, weights=False)
        else:
            parse(command, arguments)
    except SystemExit as stop:
        assert stop.code == 0, f"{place}: jaxformer {command} {' '.join(arguments)}"
