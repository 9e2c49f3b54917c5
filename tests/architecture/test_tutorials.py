"""Every notebook of docs/tutorials runs from top to bottom in a fresh kernel, and shows a picture.

A notebook takes up to a minute, so these tests are started by `pytest -m docs` alone.
"""

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
# A warning names the file that is to blame: one of the package, or a cell of the notebook.
OWN_WARNING = re.compile(r"^.*(?:jaxformer|ipykernel_\d+)\S*\.py:\d+: \w*Warning.*$", re.MULTILINE)
SECONDS = 600  # of a cell


def read(path: Path) -> Any:
    import jupytext  # of the extra "docs", which the other tests do without

    return jupytext.read(path, fmt="py:percent")


def kernel_environment() -> dict[str, str]:
    """That of a reader: the checkout, a CPU, pictures in the notebook, and a compiler that
    optimizes, since the notebooks train: by the first level, as a step is compiled for a reader
    too, since the third one takes more time than it saves. Compiled programs are kept where those
    of the tests are.
    """
    environment = {**os.environ}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    flags = environment["XLA_FLAGS"]  # tests/conftest.py sets them
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_FLAGS": flags.replace("optimization_level=0", "optimization_level=1"),
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


@pytest.mark.docs
def test_the_notebooks_for_colab_are_the_tutorials_with_a_cell_that_installs() -> None:
    colab = runpy.run_path(str(ROOT / "docs/hooks/colab.py"))
    found = {path.stem: path.read_text("utf-8") for path in colab["NOTEBOOKS"].glob("*.ipynb")}
    assert found == {path.stem: colab["notebook_of"](path) for path in TUTORIALS}, (
        "run python docs/hooks/colab.py"
    )


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
