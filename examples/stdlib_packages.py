"""Writes a small task to classify: which package of Python's standard library is a piece of code
from?

python examples/stdlib_packages.py && python train.py configs/bert_tiny.py:classifier

Each line of train.jsonl and validation.jsonl has a "text", 10 to 40 lines of a module without those
that name its package, and the package as its "label". A fifth of each package's files is for
validation.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
FOLDER = Path("packages")
TESTS = {"test", "tests", "idle_test"}
# Tables and texts rather than code, which would be told apart at a glance, and what is installed.
NO_CODE = {"encodings", "pydoc_data", "site-packages", "dist-packages"}
PACKAGES, FEWEST_FILES, HELD_OUT = 12, 7, 0.2
FEWEST_LINES, MOST_LINES = 10, 40


def packages() -> dict[str, list[Path]]:
    """The files of the largest packages that have enough of them to hold some out."""
    files: dict[str, list[Path]] = {}
    for folder in LIBRARY.iterdir():
        if folder.is_dir() and folder.name not in NO_CODE | TESTS:
            paths = [
                path
                for path in folder.rglob("*.py")
                if not TESTS & {*path.relative_to(LIBRARY).parts}
            ]
            if len(paths) >= FEWEST_FILES:
                files[folder.name] = paths
    sizes = {name: sum(path.stat().st_size for path in paths) for name, paths in files.items()}
    largest = sorted(files, key=lambda name: sizes[name], reverse=True)[:PACKAGES]
    return {name: files[name] for name in sorted(largest)}


def held_out(paths: list[Path]) -> set[Path]:
    """The files for validation: the first ones in the order of a hash of their names."""
    names = {path: path.relative_to(LIBRARY).as_posix().encode() for path in paths}
    order = sorted(paths, key=lambda path: hashlib.blake2b(names[path], digest_size=8).digest())
    return {*order[: round(HELD_OUT * len(order))]}


def snippets(path: Path, package: str) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if package.lower() not in line.lower()]
    start = number = 0
    while len(lines) - start >= FEWEST_LINES:
        stop = start + FEWEST_LINES + 7 * number % (MOST_LINES - FEWEST_LINES + 1)
        yield "".join(lines[start:stop])
        start, number = stop, number + 1


def main() -> None:
    records: dict[str, list[str]] = {"train": [], "validation": []}
    for package, paths in packages().items():
        validation = held_out(paths)
        for path in sorted(paths, key=Path.as_posix):
            side = "validation" if path in validation else "train"
            records[side] += [
                json.dumps({"text": text, "label": package}) for text in snippets(path, package)
            ]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for side, lines in records.items():
        (FOLDER / f"{side}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{FOLDER / side}.jsonl: {len(lines):,} records")


if __name__ == "__main__":
    main()
