"""What .ci/versions installs, one requirement a line, and which tests need no PyTorch.

    python .ci/requirements.py lowest|newest|tests [--core]

lowest: the packages that pyproject.toml names, at their floors, but those that build the site at
their newest; newest: at their newest, with jax 0.12. --core leaves out PyTorch and what needs it.
tests: the files of tests/ that import none of these, by themselves or by a module of tests/.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
# PyTorch and what needs it.
HEAVY = {"torch", "transformers", "lm_eval", "accelerate", "bitsandbytes", "peft", "trl"}
CHECKS = {"ruff", "mypy", "import-linter"}  # read the code and are never imported
NEWEST = {"jax": "jax>=0.12,<0.13"}


def requirements(pins: str, core: bool) -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["test"], *extras["docs"]]
    lines = [line for line in lines if name_of(line) != project["name"]]  # the extra docs, in test
    if core:
        lines = [line for line in lines if name_of(line) not in HEAVY]
    if pins == "lowest":
        newest = {*map(name_of, extras["docs"])}
        lines = [line for line in lines if name_of(line) not in CHECKS]
        return [line if name_of(line) in newest else at_its_floor(line) for line in lines]
    return [NEWEST.get(name_of(line), line) for line in lines]


def at_its_floor(requirement: str) -> str:
    """`numpy==2.0` of `numpy>=2.0,<3`, which is 2.0.0 alone."""
    return requirement.partition(",")[0].replace(">=", "==", 1)


def name_of(requirement: str) -> str:
    return re.split(r"[<>=\[]", requirement)[0]


def imports(path: Path) -> set[str]:
    """Names of the packages and modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def tests_without_torch() -> list[str]:
    paths = {path.stem: path for path in (ROOT / "tests").rglob("*.py")}
    modules = {name: imports(path) for name, path in paths.items()}
    heavy = set(HEAVY)
    while more := {name for name, used in modules.items() if used & heavy} - heavy:
        heavy |= more
    return sorted(
        str(path.relative_to(ROOT))
        for name, path in paths.items()
        if name.startswith("test_") and name not in heavy
    )


def main() -> None:
    pins, core = sys.argv[1], "--core" in sys.argv
    print("\n".join(tests_without_torch() if pins == "tests" else requirements(pins, core)))


if __name__ == "__main__":
    main()
