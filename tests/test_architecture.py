"""The house stays small: bounded functions and files, light imports, and a README that tells the truth."""

import ast
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jaxformer").rglob("*.py"))
HEAVY = ("flax", "optax", "orbax", "grain", "tyro", "rich", "matplotlib", "tokenizers", "zstandard", "tensorboardX")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold code: neither blank nor a comment alone."""
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    with path.open("rb") as file:
        spans = [t for t in tokenize.tokenize(file.readline) if t.type not in nothing and t.type != tokenize.ENDMARKER]
    return {number for span in spans for number in range(span.start[0], span.end[0] + 1)}


def docstring_lines(node: Function) -> range:
    first = node.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return range(first.lineno, (first.end_lineno or first.lineno) + 1) if is_text else range(0)


def test_the_tail_is_bounded() -> None:
    """No file of 300 lines, no function of more than 50 lines of code, no more than 8 arguments."""
    found = []
    for path in FILES:
        length, code = len(path.read_text().splitlines()), code_lines(path)
        found += [f"{path}: {length} lines"] * (length >= 300)
        for node in functions(path):
            lines = set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) & code - set(docstring_lines(node))
            arguments = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            found += [f"{path}:{node.lineno} {node.name}: {len(lines)} lines of code"] * (len(lines) > 50)
            found += [f"{path}:{node.lineno} {node.name}: {arguments} arguments"] * (arguments > 8)
    assert not found, "\n".join(found)


def test_data_tokenizer_and_report_know_neither_a_run_nor_a_model() -> None:
    """They take the values that they need: no settings of a whole run, none of a model."""
    found = []
    for package in ("data", "tokenizer", "report"):
        for path in sorted((ROOT / "jaxformer" / package).rglob("*.py")):
            names = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    names |= {node.module, *(alias.name for alias in node.names)}
                elif isinstance(node, ast.Import):
                    names |= {alias.name for alias in node.names}
                elif isinstance(node, ast.Name | ast.Attribute):
                    names.add(node.id if isinstance(node, ast.Name) else node.attr)
            known = names & {"RunConfig", "ModelConfig", "config_model", "jaxformer.config_model"}
            found += [f"{path}: {name}" for name in sorted(known)]
    assert not found, "\n".join(found)


def test_no_file_is_named_after_nothing() -> None:
    assert not {path.stem for path in FILES} & {"utils", "util", "common", "helpers", "core", "manager", "misc"}


def test_importing_jaxformer_imports_none_of_the_heavy_libraries() -> None:
    seen = modules_after(
        "import jaxformer, jaxformer.cli, jaxformer.config_file, jaxformer.runs.config; "
        "jaxformer.ModelConfig, jaxformer.load_config"
    )
    assert not {name for name in seen if name.partition(".")[0] in (*HEAVY, "jax")}


def test_calling_a_model_imports_neither_checkpoints_nor_data_nor_the_command_line() -> None:
    seen = modules_after("import jaxformer; jaxformer.forward, jaxformer.init")
    brought = {"flax", "rich", "zstandard"}  # Flax is wanted, and the others come with it and with JAX
    assert not {name for name in seen if name.partition(".")[0] in {*HEAVY} - brought}
    assert not {
        name for name in seen if name.startswith(("jaxformer.data", "jaxformer.training", "jaxformer.runs", "jaxformer.cli"))
    }


def modules_after(code: str) -> list[str]:
    line = f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    found: list[str] = json.loads(subprocess.check_output([sys.executable, "-c", line], cwd=ROOT, text=True))
    return found


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_the_readme_begins_with_the_two_commands(readme: str) -> None:
    first_screen = "\n".join(readme.splitlines()[:40])
    assert "pip install -e . && python train.py configs/quickstart.py" in first_screen
    assert 'pip install -e ".[test]" && pytest' in first_screen
    extras = (ROOT / "pyproject.toml").read_text()
    assert "\ntest = [" in extras and (ROOT / "configs/quickstart.py").is_file() and (ROOT / "train.py").is_file()


def test_every_file_and_folder_that_the_readme_names_exists(readme: str) -> None:
    named = set(re.findall(r"\b(?:jaxformer|configs|tests|benchmarks)/[\w./]*\w", readme))
    assert {"configs/quickstart.py"} < named
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing


def test_every_image_and_page_that_the_readme_links_to_exists(readme: str) -> None:
    linked = re.findall(r"\]\(([^)#]+)\)", readme)
    missing = [link for link in linked if not link.startswith("http") and not (ROOT / link).exists()]
    assert not missing


def test_every_command_that_the_readme_gives_is_one(readme: str) -> None:
    from jaxformer.cli import COMMANDS

    given = set(re.findall(r"^\s*(?:\$ )?jaxformer (\w+)", readme, flags=re.MULTILINE))
    assert given <= set(COMMANDS)
