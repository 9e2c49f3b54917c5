"""The notebooks of docs/tutorials as .ipynb files, which Colab and GitHub open.

`python docs/hooks/colab.py` writes notebooks/*.ipynb again, without outputs and with a cell that
installs the library where it is missing. tests/architecture/test_tutorials.py fails where the two
differ.
"""

from pathlib import Path

import jupytext
import nbformat

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
INSTALL = """\
# Installs jaxformer where it is missing. In a clone of the repository nothing has to be changed;
# in Colab, write the address of the repository: https://github.com/OWNER/NAME
REPOSITORY = ""

import importlib.util
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("jaxformer") is None:
    above = [Path.cwd(), *Path.cwd().parents]
    clone = next((place for place in above if (place / "jaxformer/__init__.py").is_file()), None)
    if not (clone or REPOSITORY):
        raise SystemExit("Write the address of the repository into REPOSITORY, and run this again.")
    source = str(clone) if clone else f"git+{REPOSITORY}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source, "matplotlib"], check=True)
"""


def notebook_of(tutorial: Path) -> str:
    """Return a tutorial as the text of an .ipynb file, the same for the same tutorial."""
    notebook = jupytext.read(tutorial, fmt="py:percent")
    notebook.cells.insert(1, nbformat.v4.new_code_cell(INSTALL))
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # else one is drawn at random
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    NOTEBOOKS.mkdir(exist_ok=True)
    for tutorial in sorted((ROOT / "docs/tutorials").glob("*.py")):
        target = NOTEBOOKS / f"{tutorial.stem}.ipynb"
        target.write_text(notebook_of(tutorial), encoding="utf-8")
