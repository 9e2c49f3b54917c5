"""One name, one thing, and the names of the field: what the code calls things."""

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "jaxformer").rglob("*.py"))
# What each Hugging Face family, or each command, has under the same name.
CONVENTIONS = {"COMMON", "FIELDS", "LAYER", "ROWS", "SIZES", "USAGE", "__all__"}
# Words of earlier versions, and the field's word for each.
REPLACED = {
    "Places": "TokenLayout",
    "View": "AttentionMask",
    "Page": "LayerCache",
    "adopt": "init_from",
    "Job": "RunSetup",
    "job": "setup",
    "facts": "summary",
    "say": "log",
    "Pairs": "PairTemplate",
    "Answers": "SFTTemplate",
    "Tags": "TagTemplate",
    "Survey": "Scan",
    "survey": "scan",
    "Judge": "ErrorHandler",
    "judge": "handler",
    "Fault": "RecordError",
    "Theirs": "HFConfig",
    "theirs": "hf",
    "Only": "FixedKey",
    "Again": "AliasKey",
    "Twice": "SharedSizes",
    "Inert": "IgnoredKeys",
    "Divided": "DivisibleHeads",
    "room": "capacity",
    "rooms": "open_rows",
    "door": "entry point",
    "law": "invariant",
}


def defined(path: Path) -> set[str]:
    """Names of the classes, constants and type aliases that a module defines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found - CONVENTIONS


def test_a_name_stands_for_one_thing() -> None:
    where = defaultdict(list)
    for path in FILES:
        for name in defined(path):
            where[name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_names_are_those_of_the_field() -> None:
    found = []
    for path in FILES:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME and token.string in REPLACED:
                where = f"{path.relative_to(ROOT)}:{token.start[0]}"
                found.append(f"{where}: {token.string} is called {REPLACED[token.string]}")
    assert not found, "\n".join(found)
