"""Command lines and files that nobody would write on purpose, made from a seed."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.config.run import RunConfig, flat

HUGE = [10**9, 2**31 - 1, 2**31, 2**32, 2**63, 10**18, 10**30, -1, -(2**63), 0]
NUMBERS = [*map(str, HUGE), "nan", "inf", "-inf", "1e308", "1e-320", "-0.0", "1e400", "0x10"]
TEXTS = [
    "",
    " ",
    "-",
    "--",
    "..",
    "/",
    "/dev/null",
    "/dev/zero",
    "no/such/file",
    "a" * 300,
    "é" * 90,
    "\u202e\u0661\U0001f600",
    "\x1b[31mred\x1b[0m\x07",
    "a\nb\rc\td",
    "[" * 3000,
    "{" * 50 + "}" * 50,
    "${HOME}",
    "%s%n",
    "0.5 0.5; 3",
    "::",
    "*",
    "[ab",
    "()",
    "\\",
    "None",
    "True",
]
VALUES = [*NUMBERS, *TEXTS]
# Values in JSON files.
ODD: list[Any] = [
    *(-1, 0, 1.5, 10**6, 2**31, 2**63, 10**18, 10**400),
    *(float("nan"), float("inf"), True, None, "", "x" * 300, "\x1b[2J", "\ud800", "²", "\0"),
    *([], {}, [1], {"a": 1}, [[[]]], ["a", None], {"0": {"0": {}}}),
]


@dataclass(frozen=True)
class Case:
    """A command line and the directory that holds all that it names."""

    name: str
    arguments: list[str]
    folder: Path


@dataclass(frozen=True)
class Template:
    """What cases are made of: a run, a Hugging Face directory, a text, and a config of a run of
    two steps."""

    folder: Path

    def copy(self, target: Path) -> None:
        shutil.copytree(self.folder, target)


# What a command line reads: the flags with which it may go wrong, and what comes before them.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "train": (["train", "tiny.py", "--run.dir", "new"], []),
    "plan": (["plan", "tiny.py"], ["device", "devices", "compile"]),
    "prepare": (["prepare", "tiny.py"], []),
    "sample": (
        ["sample", "run", "--prompt", "the cat", "--max_new_tokens", "4"],
        *[["prompt", "max_new_tokens", "min_p", "temperature", "top_k", "top_p", "beams"]],
    ),
    "sample more": (
        ["sample", "hf", "--prompt", "a", "--max_new_tokens", "2"],
        ["length_penalty", "seed", "step", "beams"],
    ),
    "evaluate": (
        ["evaluate", "run", "--data.cache_dir", "cache"],
        ["data.validation", "data.objective", "beams", "length_penalty", "output", "step"],
    ),
    "convert": (["convert", "run", "other"], ["dtype", "architecture", "step"]),
    "attention": (
        ["attention", "run", "--prompt", "the cat"],
        ["prompt", "pair", "target", "beams", "layers", "output", "step"],
    ),
    "tokenizer train": (
        ["tokenizer", "train", "text.txt", "--vocab_size", "300", "--output", "made"],
        ["vocab_size", "output", "special_tokens", "pattern", "text_field"],
    ),
    "tokenizer encode": (["tokenizer", "encode", "run", "text.txt"], ["output"]),
}
# What reads which directory or file.
READERS = {
    "run": [
        ["sample", "run", "--prompt", "a", "--max_new_tokens", "2"],
        ["evaluate", "run", "--data.cache_dir", "cache"],
        ["convert", "run", "other"],
        ["attention", "run", "--prompt", "a cat"],
        ["tokenizer", "encode", "run", "text.txt"],
        ["train", "tiny.py", "--run.dir", "run"],
        ["plan", "run/config.json"],
    ],
    "hf": [
        ["sample", "hf", "--prompt", "a", "--max_new_tokens", "2"],
        ["evaluate", "hf", "--data.validation", "text.txt", "--data.cache_dir", "cache"],
        ["convert", "hf", "other"],
        ["tokenizer", "encode", "hf", "text.txt"],
        ["train", "tiny.py", "--run.dir", "new", "--run.init_from", "hf"],
    ],
    "cache": [["train", "tiny.py", "--run.dir", "new"], ["prepare", "tiny.py"]],
    "text.txt": [
        ["train", "tiny.py", "--run.dir", "new"],
        ["prepare", "tiny.py"],
        ["tokenizer", "train", "text.txt", "--vocab_size", "300", "--output", "made"],
        ["tokenizer", "encode", "run", "text.txt"],
        ["evaluate", "run", "--data.validation", "text.txt", "--data.cache_dir", "cache"],
    ],
    "tiny.py": [["train", "tiny.py", "--run.dir", "new"], ["plan", "tiny.py"]],
}


def make_case(seed: int, template: Template, folder: Path) -> Case:
    """The case of a seed, whose files are in `folder`, which is made."""
    rng = random.Random(seed)
    template.copy(folder)
    made = _flags(rng) if rng.random() < 0.5 else _files(rng, folder)
    return Case(f"{seed}: {made[0]}", made[1], folder)


def _flags(rng: random.Random) -> tuple[str, list[str]]:
    command = rng.choice([*COMMANDS, "train", "train", "plan"])
    arguments, flags = COMMANDS[command]
    arguments = [*arguments]
    if command in ("train", "plan", "prepare"):
        flags = [*flags, *flat(RunConfig())]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        arguments += [f"--{rng.choice(flags)}", rng.choice(VALUES)]
    if rng.random() < 0.1:  # a positional argument as well
        arguments[rng.randrange(len(arguments))] = rng.choice(VALUES)
    return f"flags of {command}", arguments


def _files(rng: random.Random, folder: Path) -> tuple[str, list[str]]:
    what = rng.choice(["run", "run", "run", "hf", "hf", "hf", "cache", "text.txt", "tiny.py"])
    place = folder / what
    files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
    # Names at the top are as likely as all below, most of which are parts of checkpoints.
    top = [path for path in files if path.parent == place and path.suffix == ".json"]
    path = rng.choice(top if top and rng.random() < 0.6 else files)
    change = rng.choice(JSON_CHANGES if path.suffix == ".json" else CHANGES)
    if change is _a_pipe and "checkpoints" in path.parts:  # which TensorStore waits for
        change = _removed
    change(path, rng)
    arguments = rng.choice(READERS[what])
    return f"{change.__name__[1:]} of {path.relative_to(folder)}", arguments


def _cut(path: Path, rng: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: rng.randrange(len(raw) + 1)])


def _flipped(path: Path, rng: random.Random) -> None:
    raw = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice([1, 1, 5, 50])):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(raw))


def _replaced(path: Path, rng: random.Random) -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    objects = b'{"a":' * 200_000 + b"1" + b"}" * 200_000
    path.write_bytes(
        rng.choice(
            [b"", b"\0" * 100, b"\xff\xfe", b"{}", b"[]", b"null", b"1e400", deep, objects, b'{"']
        )
    )


def _removed(path: Path, rng: random.Random) -> None:
    path.unlink()


def _a_directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _a_link_to_itself(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _a_pipe(path: Path, rng: random.Random) -> None:
    import os

    path.unlink()
    os.mkfifo(path)


def _values(path: Path, rng: random.Random) -> None:
    """One to three values anywhere in a JSON file become others."""
    found = json.loads(path.read_text())
    for _ in range(rng.choice([1, 1, 2, 3])):
        holder, key = rng.choice(list(_places(found)) or [(found, "new")])
        holder[key] = copy.deepcopy(rng.choice(ODD))
    path.write_text(json.dumps(found))


def _keys(path: Path, rng: random.Random) -> None:
    """A key of a JSON file is dropped, or another added."""
    found = json.loads(path.read_text())
    places = [(holder, key) for holder, key in _places(found) if isinstance(holder, dict)]
    if places and rng.random() < 0.6:
        holder, key = rng.choice(places)
        holder.pop(key, None)
    elif isinstance(found, dict):
        found[rng.choice(["x", "\x1b[1m", "model_type", "layer_types", ""])] = copy.deepcopy(
            rng.choice(ODD)
        )
    path.write_text(json.dumps(found))


def _places(found: Any, depth: int = 0) -> Any:
    """Where the values of a JSON object stand, those of the top most often."""
    entries = found.items() if isinstance(found, dict) else enumerate(found)
    for key, value in list(entries)[:40]:
        yield found, key
        if isinstance(value, (dict, list)) and depth < 4:
            yield from _places(value, depth + 1)


Change = Callable[[Path, random.Random], None]
CHANGES: list[Change] = [_cut, _flipped, _flipped, _replaced, _removed, _a_directory]
CHANGES += [_a_link_to_itself, _a_pipe]
JSON_CHANGES: list[Change] = [*CHANGES, *[_values] * 8, *[_keys] * 3]
