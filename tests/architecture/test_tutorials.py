"""Every notebook of docs/tutorials runs from top to bottom in a fresh kernel, shows a picture, and
opens with a formula and a test that exists.

A notebook takes up to a minute, so these tests are started by `pytest -m docs` alone.
"""

import ast
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
FORMULA = re.compile(r"\$\$.+?\$\$|arXiv:\d{4}\.\d{4,5}", re.DOTALL)
TEST = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")
# A warning names the file that is to blame: one of the package, or a cell of the notebook.
OWN_WARNING = re.compile(r"^.*(?:jaxformer|ipykernel_\d+)\S*\.py:\d+: \w*Warning.*$", re.MULTILINE)
SECONDS = 600  # of a cell


def read(path: Path) -> Any:
    import jupytext  # of the extra "docs", which the other tests do without

    return jupytext.read(path, fmt="py:percent")


def kernel_environment() -> dict[str, str]:
    """That of a reader: the checkout, a CPU, pictures in the notebook, and a compiler that
    optimizes, since the notebooks train. Compiled programs are kept where those of the tests are.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }


def executed(notebook: Any, folder: Path) -> list[Any]:
    """The outputs of all cells, run in order by a new kernel of this Python in `folder`."""
    from nbclient import NotebookClient

    # The name of the kernel in the file, if any, may be that of another environment.
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources)
    client.execute(env=kernel_environment())
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@functools.cache
def names_by_file() -> dict[str, set[str]]:
    """The names of the tests of each file, such as tests/layers/test_layers.py;
    under "" those of all."""
    found: dict[str, set[str]] = {"": set()}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        found[path.relative_to(ROOT).as_posix()] = names
        found[""] |= names
    return found


@pytest.mark.docs
def test_tutorials_are_found() -> None:
    assert len(TUTORIALS) >= 9


@pytest.mark.docs
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_opens_with_a_formula_and_names_tests_that_exist(path: Path) -> None:
    cells = read(path).cells
    opening = cells[0]
    assert opening.cell_type == "markdown" and opening.source.startswith("# ")
    assert FORMULA.search(opening.source)
    assert any(file for file, _ in TEST.findall(opening.source))
    named = TEST.findall("\n".join(cell.source for cell in cells))
    missing = [name for name in named if name[1] not in names_by_file().get(name[0], set())]
    assert missing == []


@pytest.mark.docs
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "path",
    [  # each a group of its own, so that two run at a time
        pytest.param(path, id=path.stem, marks=pytest.mark.xdist_group(f"tutorial {path.stem}"))
        for path in TUTORIALS
    ],
)
def test_a_tutorial_runs_in_a_fresh_kernel_without_a_warning_and_draws(
    path: Path, tmp_path: Path
) -> None:
    outputs = executed(read(path), tmp_path)
    written = "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stderr"
    )
    assert OWN_WARNING.findall(written) == []
    assert any("image/png" in output.get("data", {}) for output in outputs)
