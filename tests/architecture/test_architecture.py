"""What imports what, and that what the documentation names exists."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from jaxformer.config.model import ModelConfig
from jaxformer.interop.architectures import HF_FAMILIES

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "jaxformer").rglob("*.py"))
HEAVY = (
    "flax",
    "optax",
    "orbax",
    "grain",
    "tyro",
    "rich",
    "matplotlib",
    "tokenizers",
    "zstandard",
    "tensorboardX",
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_importing_jaxformer_imports_none_of_the_heavy_libraries() -> None:
    seen = modules_after(
        "import jaxformer, jaxformer.cli, jaxformer.config.config_file, jaxformer.runs.config; "
        "jaxformer.ModelConfig, jaxformer.load_config"
    )
    assert not {name for name in seen if name.partition(".")[0] in (*HEAVY, "jax")}


def test_calling_a_model_imports_neither_checkpoints_nor_data_nor_the_command_line() -> None:
    seen = modules_after("import jaxformer; jaxformer.forward, jaxformer.init")
    # Flax is wanted, and the others come with it and with JAX.
    brought = {"flax", "rich", "zstandard"}
    assert not {name for name in seen if name.partition(".")[0] in {*HEAVY} - brought}
    other = ("jaxformer.data", "jaxformer.training", "jaxformer.runs", "jaxformer.cli")
    assert not {name for name in seen if name.startswith(other)}


def modules_after(code: str) -> list[str]:
    line = f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    found: list[str] = json.loads(
        subprocess.check_output([sys.executable, "-c", line], cwd=ROOT, text=True)
    )
    return found


PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.py"))
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_the_readme_begins_with_the_two_commands() -> None:
    lines = PAGES[0].read_text().splitlines()
    first_screen = "\n".join(lines[:40])
    assert "pip install -e . && python train.py configs/quickstart.py" in first_screen
    assert 'pip install -e ".[test]" && pytest' in first_screen
    extras = (ROOT / "pyproject.toml").read_text()
    assert "\ntest = [" in extras
    assert (ROOT / "configs/quickstart.py").is_file() and (ROOT / "train.py").is_file()


def test_pytest_alone_runs_the_tests_of_the_claims_of_the_readme() -> None:
    # The title of a link to a file of tests is the name of the test.
    claims = re.findall(r'\((tests/[\w/]+\.py) "(\w+)"\)', PAGES[0].read_text())
    assert len(claims) >= 8
    for path, name in claims:
        tree = ast.parse((ROOT / path).read_text())
        found = [node for node in tree.body if isinstance(node, Function) and node.name == name]
        assert found, f"{path} has no {name}"
        marks = [ast.unparse(mark) for mark in found[0].decorator_list]
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks.append(ast.unparse(node.value))
        for mark in marks:
            assert not re.search(r"mark\.(slow|docs|compile|real)\b", mark), (path, name, mark)


def test_badges_and_the_citation_say_what_the_project_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = {path.stem: path.read_text() for path in (ROOT / "docs/badges").iterdir()}
    assert f"{project['requires-python'].removeprefix('>=')}+" in badges["python"]
    (jax,) = [wanted for wanted in project["dependencies"] if wanted.startswith("jax>")]
    first, below = re.fullmatch(r"jax>=([\d.]+),<0\.(\d+)", jax).groups()
    assert f"{first} to 0.{int(below) - 1}" in badges["jax"]
    assert f"{len(HF_FAMILIES)} families" in badges["families"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def pages_linked(path: str) -> set[Path]:
    page = ROOT / path
    return {
        (page.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)", page.read_text())
    }


def test_the_readme_links_to_every_page() -> None:
    linked = pages_linked("README.md")
    # Those in folders of docs/ are found by the navigation of the site, in which each has to be.
    assert {page for page in PAGES[1:] if page.parent in (ROOT, ROOT / "docs")} <= linked


def test_the_list_for_programs_has_every_page() -> None:
    listed = pages_linked("docs/llms.txt")
    assert {page for page in PAGES if page.name != "AGENTS.md"} <= listed  # which leads to the list


@every_page
def test_every_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    named = set(
        re.findall(r"\b(?:jaxformer|configs|tests|benchmarks|examples)/[\w./]*\w", page.read_text())
    )
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS], ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text())
    assert named or page not in TUTORIALS
    assert not [
        f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()
    ]


def test_training_starts_without_what_only_its_end_or_other_commands_need() -> None:
    seen = modules_after(
        "from jaxformer.cli import train; from jaxformer.config.config_file import read_config; "
        "from jaxformer.runs.config import parse_arguments; "
        "parse_arguments(read_config('configs/quickstart.py'), [], 'train.py'); "
        "import jaxformer.runs.train_run"
    )
    later = (
        "generation",
        "interop",
        "tools",
        "adapters.lora",
        "adapters.quantized",
        "runs.loading",
        "report.plot",
        "runs.closing",
        "runs.init_from",
    )
    assert not {name for name in seen if name.startswith(tuple(f"jaxformer.{n}" for n in later))}


def test_loading_a_run_imports_neither_optimizers_nor_the_training_package(tmp_path: Path) -> None:
    make = """
import sys, jax, jaxformer as jf
from pathlib import Path
from jaxformer.config.run import RunConfig
from jaxformer.config.run import to_json
config = jf.ModelConfig(vocab_size=8, d_model=8, n_heads=2, n_layers=1)
with jf.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save({"params": jf.init(config, jax.random.key(0))}, 0)
(Path(sys.argv[1]) / "config.json").write_text(to_json(RunConfig(model=config)))
"""
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=ROOT, check=True)
    seen = modules_after(f"import jaxformer; jaxformer.load({str(tmp_path)!r})")
    kinds = (
        "jaxformer.training",
        "jaxformer.runs.train_run",
        "jaxformer.runs.setup",
        "jaxformer.runs.resolve",
        "jaxformer.data",
        "jaxformer.losses",
    )
    assert "jaxformer.runs.loading" in seen
    assert not {name for name in seen if name.startswith(kinds)}


def test_nothing_below_the_composer_takes_the_settings_of_a_run() -> None:
    """Data, tokenizers and reports take no settings of a model either, but the values they need."""
    found = []
    for path in FILES:
        folder = path.relative_to(ROOT / "jaxformer").parts[0]
        names = [] if folder in ("config", "runs", "tools", "cli") else ["RunConfig"]
        if folder in ("data", "tokenizer", "report"):
            names += ["ModelConfig", "jaxformer.config.model"]
        text = path.read_text()
        found += [f"{path}: {name}" for name in names if name in text]
    assert not found


def test_every_module_can_be_imported_under_its_own_name() -> None:
    """No package shares a name with a public function, so `import jaxformer.training.state as s`
    works."""
    import importlib

    import jaxformer

    public = {name for name in jaxformer.__all__ if callable(getattr(jaxformer, name))}
    inside = (ROOT / "jaxformer").iterdir()
    packages = {path.stem for path in inside if path.is_dir() or path.suffix == ".py"}
    assert not public & packages
    for path in FILES:
        parts = [
            part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"
        ]
        if parts[-1] != "__main__":
            importlib.import_module(".".join(parts))


# Settings of which 0 or "auto" means a value that follows from others, and the property that is it.
FOLLOWING = {
    "n_kv_heads": "kv_heads",
    "head_dim": "head_width",
    "attention.value_dim": "value_width",
    "d_ff": "ff_width",
    "n_encoder_layers": "encoder_layers",
    "head.kind": "output",
    "head.pooling": "pooled",
    "bias": "biased",
    "rope.attention_factor": "rope_scale",
}


def test_a_setting_that_follows_from_others_is_resolved_in_the_config_alone() -> None:
    """Everywhere else its property is read: 0 heads or "auto" never reach a layer."""
    raw = []
    for path in FILES:
        if path.relative_to(ROOT / "jaxformer").parts[0] == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or node.attr not in FOLLOWING:
                continue
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in ("config", "model", "layer", "base_model", "model_config"):
                raw.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not raw
    assert all(isinstance(getattr(ModelConfig, name), property) for name in FOLLOWING.values())


# What each Hugging Face family, or each command, has under the same name.
CONVENTIONS = {"COMMON", "FIELDS", "LAYER", "ROWS", "SIZES", "USAGE", "__all__"}


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
