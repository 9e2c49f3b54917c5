"""Fenced code blocks of the pages, and what comments say of them.

A comment at the end of the last line above a block says what tests/architecture/test_docs_code.py
does with it:

    <!-- docs-test: skip: REASON -->     it is not run
    <!-- docs-test: file: NAME -->       it is written to a file, which later blocks read
    <!-- docs-test: run -->              its command lines are run, with settings of a tiny model
    <!-- docs-test: run: --train.steps 2 -->      the same, and with these settings
    <!-- docs-test: setup: CODE -->      Python code that runs at this place and is not shown

Without a comment Python is run, all blocks of a page in one namespace, and command lines are read
by the parsers of their commands alone. Anything else needs a comment.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```([\w.-]*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!-- docs-test: (\w+)(?::?\s+(.*?))?\s*-->", re.DOTALL)
COMMANDS = ("", "sh", "bash", "console")  # languages of blocks of command lines
# Programs that read a table of pyproject.toml.
CHECKS = {"ruff": "ruff", "mypy": "mypy", "lint-imports": "importlinter"}
PROGRAMS = ("python", "jaxformer", "pip", "pytest", "bash", "mkdocs", *CHECKS)
ACTIONS = ("skip", "file", "run", "setup")


@dataclass(frozen=True)
class Block:
    """A block of a page: what is done with it, what its comment adds to that, its text, and the
    number of its first line."""

    action: str  # skip, file, run (Python or commands) or parse (commands)
    detail: str
    language: str
    text: str
    line: int


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a page, and the code of its comments as blocks of Python, in order. Raises
    ValueError for a comment that says nothing, and for a block that has no language and no comment
    but is no list of commands."""
    fences = list(FENCE.finditer(text))
    inside = [range(*fence.span()) for fence in fences]
    comments = [
        found for found in COMMENT.finditer(text) if not any(found.start() in i for i in inside)
    ]
    above = {_end_above(text, fence.start()): fence for fence in fences}
    used = set()
    for found in sorted([*fences, *comments], key=lambda found: found.start()):
        line = text.count("\n", 0, found.start()) + 1
        if found.re is FENCE:
            comment = next((c for c in comments if above.get(c.end()) is found), None)
            if comment and comment[1] != "setup":
                used.add(comment.start())
                yield _stated(comment, found, line)
            else:
                yield _unstated(found, line)
        elif found[1] == "setup":
            yield Block("run", "", "python", found[2] or "", line)
        elif found[1] not in ACTIONS or found.end() not in above:
            raise ValueError(f"line {line}: {found[0]!r} is not a comment on a block")


def _end_above(text: str, start: int) -> int:
    """Where the last line above a block ends, blank lines left out."""
    return len(text[:start].rstrip())


def _stated(comment: re.Match[str], fence: re.Match[str], line: int) -> Block:
    action, detail = comment[1], (comment[2] or "").strip()
    if action in ("skip", "file") and not detail:
        raise ValueError(f"line {line}: {comment[0]!r} gives no reason or name")
    return Block(action, detail, fence[1], fence[2], line)


def _unstated(fence: re.Match[str], line: int) -> Block:
    language, text = fence[1], fence[2]
    if language == "python":
        return Block("run", "", language, text, line)
    if language in COMMANDS and all(known(words[0]) for words in command_lines(text)):
        return Block("parse", "", language, text, line)
    raise ValueError(
        f"line {line}: this block is neither Python nor commands of this repository; say in a"
        " comment above why it is not run"
    )


def known(program: str) -> bool:
    """Whether a command line starts a program of this repository or its tools."""
    return program in PROGRAMS or program.startswith(".ci/")


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each command of a block: lines that end in a backslash are joined, comments
    dropped, `a && b` and `a | b` split. A loop gives the commands of its first round."""
    values: dict[str, str] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["for"] and words[2] == "in":
            values[f"${words[1]}"] = words[3].rstrip(";")
        if words[:1] in (["for"], ["done"]):
            continue
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        part: list[str] = []
        for word in [*words, "&&"]:
            if word not in ("&&", "|"):
                part.append(word)
            elif part:
                yield part
                part = []
