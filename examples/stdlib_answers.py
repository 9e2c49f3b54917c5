"""Writes a small chat to fine-tune on: what does a function of Python's standard library do?

    python examples/stdlib_answers.py

Each line of answers/train.jsonl and answers/validation.jsonl has "messages": a question about a
public function, and the first sentence of its docstring as the answer. The functions of a fifth of
the modules are for validation.
"""

import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
FOLDER = Path("answers")
LONGEST, HELD_OUT = 160, 0.2  # characters of an answer, and the fraction of modules


def modules() -> dict[str, Path]:
    """The files of public modules and packages by name."""
    files = [*LIBRARY.glob("*.py"), *LIBRARY.glob("*/__init__.py")]
    names = {path.parent.name if path.stem == "__init__" else path.stem: path for path in files}
    return {name: names[name] for name in sorted(names) if name.isidentifier() and name[0] != "_"}


def first_sentence(docstring: str) -> str:
    """Of the first paragraph, in one line; empty where it is none or too long."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence, period, _ = paragraph.partition(". ")
    sentence = sentence + period.strip()
    fits = sentence[:1].isupper() and sentence.endswith(".") and len(sentence) <= LONGEST
    return sentence if fits else ""


def questions(name: str, path: Path) -> Iterator[dict[str, list[dict[str, str]]]]:
    """The records of a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            answer = first_sentence(ast.get_docstring(node) or "")
            if answer:
                question = f"What does {name}.{node.name} do in Python?"
                yield {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": answer},
                    ]
                }


def held_out(name: str) -> bool:
    """Whether a module is for validation, by a hash of its name."""
    return hashlib.blake2b(name.encode(), digest_size=8).digest()[0] < 256 * HELD_OUT


def main() -> None:
    sides: dict[str, list[str]] = {"train": [], "validation": []}
    for name, path in modules().items():
        side = "validation" if held_out(name) else "train"
        sides[side] += [json.dumps(record) for record in questions(name, path)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for side, lines in sides.items():
        (FOLDER / f"{side}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{FOLDER / side}.jsonl: {len(lines):,} conversations")


if __name__ == "__main__":
    main()
