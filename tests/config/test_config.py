"""Configs: every file loads as what it says it is, and a setting has one name, one meaning and one
sentence."""

import ast
import dataclasses
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer as jf
import jaxformer.config as config
from jaxformer.cli import main
from jaxformer.config.config_file import read_config
from jaxformer.config.run import RunConfig, flat, from_json, to_json
from jaxformer.config.settings import Section
from jaxformer.models.cost import parameter_count
from jaxformer.runs.config import parse_arguments
from jaxformer.training.optimizers.schedules import make_schedule

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
PARAMETERS = {
    "gpt2_124m": 124_475_904,
    "llama_1b": 1_100_048_384,
    "llama3_8b": 8_030_261_248,
    "bert_base": 110_106_428,
    "t5_small": 60_506_624,
}


def test_the_six_configs_are_there() -> None:
    names = {"gpt2_124m", "llama3_8b", "llama_1b", "quickstart", "shakespeare_char", "tinystories"}
    assert names <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_file_loads_as_a_hashable_value_that_json_gives_back(
    path: Path, tmp_path: Path
) -> None:
    config = jf.load_config(path)
    assert isinstance(config, RunConfig) and hash(config) == hash(jf.load_config(path))
    assert from_json(to_json(config), "here") == config
    (tmp_path / "config.json").write_text(to_json(config))
    assert jf.load_config(tmp_path / "config.json") == config


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_model_has_its_published_number_of_parameters(name: str) -> None:
    assert parameter_count(jf.load_config(ROOT / f"configs/{name}.py").model) == PARAMETERS[name]


def test_the_base_transformers_learning_rate_is_the_papers() -> None:
    """d_model^-0.5 min(step^-0.5, step warmup^-1.5) (arXiv:1706.03762), counted from step 1."""
    config = read_config(ROOT / "configs/transformer_base.py")
    schedule, warmup = (
        make_schedule(config.optimizer, config.train.steps),
        config.optimizer.warmup_steps,
    )
    for step in (1, 1000, 3999, 4000, 8000, 100_000):
        expected = config.model.d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        np.testing.assert_allclose(float(schedule(step - 1)), expected, rtol=1e-3)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_a_file_names_is_one(path: Path) -> None:
    named = [
        line.partition(" = ")[0]
        for line in path.read_text().splitlines()
        if " = replace(" in line and line[0] != " "
    ]
    for name in named:
        assert isinstance(read_config(f"{path}:{name}"), RunConfig)


SIZES = {  # of configs, as overrides that change nothing
    "tinystories.py": "model.vocab_size=10000 model.d_model=512 model.d_ff=1344 model.n_layers=4"
    " model.n_heads=16 model.rope.theta=10000 data.sequence_length=256",
    "shakespeare_char.py": "model.n_layers=4 model.n_heads=4 model.d_model=128"
    " data.sequence_length=64 train.batch_size=12 train.steps=2000",
    "shakespeare_char.py:gpu": "model.n_layers=6 model.n_heads=6 model.d_model=384"
    " data.sequence_length=256 train.batch_size=64 train.steps=5000",
}


def test_tinystories_and_shakespeare_are_of_the_sizes_asked_for() -> None:
    for name, sizes in SIZES.items():
        path = f"{ROOT}/configs/{name}"
        assert jf.load_config(path, sizes.split()) == jf.load_config(path)
    run = jf.load_config(ROOT / "configs/tinystories.py")
    assert run.train.steps * run.train.batch_size * run.data.sequence_length == 327_680_000


def test_the_small_hybrid_is_the_quickstart_with_recurrent_layers() -> None:
    changes = ["model.layer_pattern=dddm", "run.dir=runs/hybrid_small"]
    quickstart = jf.load_config(ROOT / "configs/quickstart.py", changes)
    assert jf.load_config(ROOT / "configs/hybrid_small.py") == quickstart


def test_a_config_is_a_static_argument_and_equal_configs_share_a_compilation() -> None:
    traced = []

    def width(x: jax.Array, config: jf.ModelConfig) -> jax.Array:
        traced.append(config)
        return x * config.d_model

    jitted = jax.jit(width, static_argnums=1)
    assert [
        float(jitted(1.0, jf.ModelConfig(vocab_size=9, d_model=d, n_heads=2))) for d in (32, 32, 64)
    ] == [32, 32, 64]
    assert len(traced) == 2


def test_a_shorter_run_has_a_shorter_warm_up_unless_the_line_states_one() -> None:
    path = ROOT / "configs/quickstart.py"  # 40 of 600 steps
    with pytest.warns(UserWarning, match=r"warmup_steps=40 of the config .* is 2 here"):
        assert jf.load_config(path, ["train.steps=30"]).optimizer.warmup_steps == 2
    assert jf.load_config(path, ["train.steps=40"]).optimizer.warmup_steps == 40
    beginning = jf.load_config(path, ["train.steps=30", "optimizer.decay_steps=600"])
    assert beginning.optimizer.warmup_steps == 40
    with pytest.raises(jf.ConfigError, match=r"warmup_steps=31 is longer than the run"):
        jf.load_config(path, ["train.steps=30", "optimizer.warmup_steps=31"])


def test_overrides_in_python_are_those_of_the_command_line() -> None:
    path = ROOT / "configs/quickstart.py"
    given = {
        "model.n_layers": "3",
        "optimizer.learning_rate": "2e-4",
        "model.tied_head": "False",
        "data.train": "a b.txt",
    }
    line = [part for name, value in given.items() for part in (f"--{name}", value)]
    found = jf.load_config(path, [f"{name}={value}" for name, value in given.items()])
    assert found == parse_arguments(read_config(path), line, program="train.py")
    assert (found.model.n_layers, found.optimizer.learning_rate, found.model.tied_head) == (
        3,
        2e-4,
        False,
    )
    assert (
        found.data.train == "a b.txt"
        and jf.load_config(path, ["data.train=a=b"]).data.train == "a=b"
    )


def test_the_defaults_of_the_file_hold_where_nothing_overrides_them() -> None:
    path = ROOT / "configs/quickstart.py"
    plain, changed = flat(jf.load_config(path)), flat(jf.load_config(path, ["run.seed=7"]))
    assert {name for name in plain if plain[name] != changed[name]} == {"run.seed"}
    assert plain["optimizer.name"] == "muon" and plain["model.vocab_size"] == 4096


def test_every_field_is_read_somewhere() -> None:
    """A setting that nothing reads is a promise that nothing keeps."""
    from jaxformer.arrays.mesh import MESH_AXES
    from jaxformer.config.variants import SECOND_HEADS
    from jaxformer.data.task import FIELD_SETTINGS
    from jaxformer.layers.pattern import LAYER_PATTERNS, LEADING_LAYERS
    from jaxformer.runs.resolve import PAIR_SETTINGS

    modules = ("run.py", "model.py", "records.py", "train.py")
    inside = [ROOT / "jaxformer/config" / name for name in modules]
    properties = [
        node
        for path in inside
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(getattr(d, "id", "") == "property" for d in node.decorator_list)
    ]
    outside = [path for path in (ROOT / "jaxformer").rglob("*.py") if path not in inside]
    read = {name for path in outside for name in attributes(ast.parse(path.read_text()))}
    read |= {name for node in properties if node.name in read for name in attributes(node)}
    read |= {row.setting for row in FIELD_SETTINGS.values()} | {
        *SECOND_HEADS,
        *MESH_AXES,
        *PAIR_SETTINGS,
    }
    read |= {name.rpartition(".")[2] for name in (*LAYER_PATTERNS, *LEADING_LAYERS)}
    unread = [name for name in flat(RunConfig()) if name.rpartition(".")[2] not in read]
    assert not unread


def attributes(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_help_lists_every_field_with_its_type_its_default_and_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["train", str(ROOT / "configs/quickstart.py"), "--help"]) == 0
    shown = capsys.readouterr().out
    told = " ".join(re.sub(r"[│╭╮╰╯─|]|-{3,}", " ", shown).split())
    told = re.sub(r"\{\S+(, ?\S+)+\}", lambda wrapped: wrapped[0].replace(" ", ""), told)
    entries = {
        entry.partition(" ")[0]: entry.partition(" ")[2]
        for entry in re.split(r" --(?=[a-z]+\.)", told)
    }
    for name, value in flat(read_config(ROOT / "configs/quickstart.py")).items():
        kind, _, rest = entries[name].partition(" ")
        sentence, _, default = rest.partition(" (default: ")
        assert kind in ("INT", "FLOAT", "STR") or re.fullmatch(r"\{\S+\}", kind), (name, kind)
        assert len(sentence) > 5 and sentence.endswith("."), (name, sentence)
        assert default.partition(")")[0] in (str(value), repr(value)), (name, default)


def test_a_section_knows_its_own_name() -> None:
    for entry in dataclasses.fields(RunConfig):
        section = entry.default_factory()  # type: ignore[misc]
        assert isinstance(section, Section) and section.section == entry.name


def test_every_section_of_a_run_is_imported_from_the_package_of_settings() -> None:
    sections = {type(getattr(RunConfig(), field.name)) for field in dataclasses.fields(RunConfig)}
    assert {getattr(config, section.__name__) for section in sections} == sections
    records = {type(value) for value in vars(config.ModelConfig()).values() if is_dataclass(value)}
    names = {section.__name__ for section in sections | records}
    assert {*config.__all__} == names | {"RunConfig", "with_settings"}


def test_importing_settings_imports_no_jax() -> None:
    code = "from jaxformer.config import *; import sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
