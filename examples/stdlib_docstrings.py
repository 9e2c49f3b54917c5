"""Writes a small task to classify: what is a docstring of Python's standard library about?

python examples/stdlib_docstrings.py

Each line of topics/train.jsonl and topics/validation.jsonl has the first paragraph of a docstring
as its "text", in one line, and one of ten topics as its "label", that of its module. No text is in
both files, and no topic has more than 300 texts.
"""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
FOLDER = Path("topics")
TESTS = {"test", "tests", "idle_test"}
MODULES = {
    "internet": "email http urllib smtplib ftplib imaplib poplib socketserver socket ssl xmlrpc"
    " wsgiref mailbox ipaddress",
    "concurrency": "asyncio threading multiprocessing concurrent queue sched subprocess selectors",
    "testing": "unittest doctest pdb bdb trace timeit cProfile profile pstats tracemalloc",
    "windows": "tkinter turtle idlelib turtledemo",
    "files": "pathlib shutil os posixpath ntpath tempfile glob fnmatch zipfile tarfile gzip bz2"
    " lzma fileinput filecmp shelve dbm",
    "numbers": "_pydecimal fractions statistics random numbers colorsys",
    "dates": "datetime _pydatetime calendar _strptime zoneinfo",
    "language": "ast inspect importlib typing dis tokenize types copy pickle pickletools pkgutil"
    " modulefinder symtable code codeop compileall functools abc",
    "markup": "xml html json csv configparser plistlib tomllib",
    "text": "re string textwrap difflib argparse optparse cmd gettext locale",
}
MOST_TEXTS, FEWEST_WORDS, HELD_OUT = 300, 5, 0.25


def files_of(module: str) -> list[Path]:
    """The files of a module or a package without its tests; none where this Python lacks it."""
    path = LIBRARY / module
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return [file for file in sorted(files) if file.is_file() and not TESTS & {*file.parts}]


def first_paragraphs(file: Path) -> Iterator[str]:
    """The first paragraph of each docstring that has enough words, in one line."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        docstring = ast.get_docstring(node) if isinstance(node, documented) else None
        words = (docstring or "").split("\n\n")[0].split()
        if len(words) >= FEWEST_WORDS:
            yield " ".join(words)


def order(text: str) -> bytes:
    """A place among the texts that depends on nothing else."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def main() -> None:
    topics_of: dict[str, set[str]] = {}
    for topic, modules in MODULES.items():
        for file in (file for module in modules.split() for file in files_of(module)):
            for text in first_paragraphs(file):
                topics_of.setdefault(text, set()).add(topic)
    records: dict[str, list[str]] = {"train": [], "validation": []}
    for topic in MODULES:
        # A text of two topics is of neither.
        texts = sorted((text for text in topics_of if topics_of[text] == {topic}), key=order)
        texts = texts[:MOST_TEXTS]
        held_out = round(HELD_OUT * len(texts))
        for number, text in enumerate(texts):
            side = "validation" if number < held_out else "train"
            records[side].append(json.dumps({"text": text, "label": topic}))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for side, lines in records.items():
        (FOLDER / f"{side}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{FOLDER / side}.jsonl: {len(lines):,} records")


if __name__ == "__main__":
    main()
