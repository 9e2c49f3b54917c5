"""Runs that train virtual tokens: they alone learn and are saved."""

import json

import jax
import numpy as np
import pytest
from tiny_run import PLAIN, line, logged, train_here, write_text

import jaxformer as jf
from jaxformer.checkpoints.reading import read_manifest
from jaxformer.cli import main
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.config_file import check
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, RunSettings
from jaxformer.config.settings import with_settings
from jaxformer.runs.resolve import encoded_length, resolve, run_specs
from jaxformer.runs.setup import make_setup
from jaxformer.runs.states import first_state

pytestmark = pytest.mark.slow

BASE = PLAIN | {"train.steps": 2, "train.eval_every": 0}
VIRTUAL = PLAIN | {
    "adapter.tokens": 3,
    "train.checkpoint_every": 2,
    "train.eval_every": 2,
    "train.steps": 4,
    "run.sample_tokens": 4,
}
KINDS = {"prompt": jf.PromptTuning(3), "prefix": jf.PrefixTuning(3)}
PAIRS = {"data.objective": "seq2seq", "data.packing": "stream"}
T5 = {"model.family": "encoder_decoder", "model.positions": "t5"}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(run directory, text) of a decoder."""
    folder = tmp_path_factory.mktemp("base")
    text = write_text(folder / "text.txt")
    assert train_here(line(folder / "base", text, BASE)) == 0
    return folder / "base", text


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """A run of each kind over that base that nothing interrupts."""
    found = {kind: tmp_path_factory.mktemp("runs") / kind for kind in KINDS}
    for kind, run_dir in found.items():
        assert train_here(tuned(run_dir, base, kind)) == 0
    return found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(run directory, records) of an encoder-decoder whose rows are packed."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"source": f"{n} {n + 1}", "target": f"{n + 2}"} for n in range(60)]
    records = folder / "pairs.jsonl"
    records.write_text("\n".join(map(json.dumps, rows)))
    assert train_here(line(folder / "base", records, BASE | PAIRS | T5)) == 0
    return folder / "base", records


def tuned(run_dir, base, kind, **changes):
    settings = VIRTUAL | {"adapter.kind": kind, "run.init_from": base[0]}
    return line(run_dir, base[1], settings | changes)


@every_kind
def test_a_checkpoint_holds_the_virtual_tokens_alone(base, runs, kind):
    paths = set(read_manifest(runs[kind] / "checkpoints/4")["leaves"])
    names = ["prompt"] if kind == "prompt" else ["decoder.prefix_k", "decoder.prefix_v"]
    params = {path for path in paths if path.startswith("params.")}
    assert params == {f"params.virtual.{name}" for name in names}
    assert not [path for path in paths if "blocks" in path or "embed" in path]
    loaded = jf.load(runs[kind])
    jax.tree.map(
        np.testing.assert_array_equal, jf.without_adapters(loaded.params), jf.load(base[0]).params
    )
    first = jf.load(runs[kind], 2).params["virtual"]
    learned = zip(*map(jax.tree.leaves, (first, loaded.params["virtual"])), strict=True)
    assert all(np.any(np.asarray(a) != np.asarray(b)) for a, b in learned)


@every_kind
def test_virtual_tokens_of_a_run_begin_as_those_of_adapt(base, kind, tmp_path):
    arguments = tuned(tmp_path / "first", base, kind)
    stated = zip(arguments[1::2], arguments[2::2], strict=True)
    run = jf.load_config(arguments[0], [f"{name[2:]}={value}" for name, value in stated])
    state = first_state(make_setup(run, lambda line: None), lambda line: None)
    model = jf.load(base[0])
    wanted = jf.adapt(model.params, model.config, KINDS[kind], jax.random.key(run.run.seed))
    jax.tree.map(np.testing.assert_array_equal, state.params, wanted)


@every_kind
def test_the_commands_read_a_run_of_virtual_tokens(runs, kind, capsys, tmp_path):
    assert main(["evaluate", str(runs[kind])]) == 0
    last = [entry for entry in logged(runs[kind]) if "val_loss" in entry][-1]["val_loss"]
    assert f"{last:.4f}" in capsys.readouterr().out
    asked = ["--prompt", "the cat", "--max_new_tokens", "4"]
    assert main(["sample", str(runs[kind]), *asked]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    page = tmp_path / "page.html"
    assert main(["attention", str(runs[kind]), "--prompt", "the cat", "--output", str(page)]) == 0
    assert "is to the virtual tokens" in capsys.readouterr().out and page.is_file()
    assert main(["convert", str(runs[kind]), str(tmp_path / "hf")]) == 2
    assert "no place for virtual tokens" in capsys.readouterr().err


def test_virtual_tokens_are_not_merged_for_another_run(base, runs, tmp_path, capsys):
    asked = tuned(tmp_path / "over", (runs["prompt"], base[1]), "prefix")
    assert train_here(asked) == 2
    assert "cannot be merged into weights" in capsys.readouterr().err


@every_kind
def test_packed_pairs_train_and_evaluate_with_virtual_tokens(pairs, kind, tmp_path, capsys):
    run_dir = tmp_path / "tuned"
    assert train_here(tuned(run_dir, pairs, kind, **PAIRS)) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run_dir)]) == 0
    last = [entry for entry in logged(run_dir) if "val_loss" in entry][-1]["val_loss"]
    assert f"{last:.4f}" in capsys.readouterr().out
    asked = ["--prompt", "3 4", "--max_new_tokens", "4", "--beams", "2"]
    assert main(["sample", str(run_dir), *asked]) == 0


def a_run(kind, **model):
    return RunConfig(
        run=RunSettings(init_from="base"),
        model=with_settings(
            ModelConfig(),
            {"vocab_size": 5000, "d_model": 32, "n_heads": 2, "max_length": 40, **model},
        ),
        data=DataConfig(sequence_length=32, source_length=36),
        adapter=AdapterConfig(kind=kind, tokens=6),
    )


def test_rows_that_learned_positions_do_not_reach_are_refused():
    both = {"family": "encoder_decoder", "positions": "learned"}
    assert check(a_run("prompt", positions="learned"))  # 32 + 6
    source = r"data\.source_length=36 behind adapter\.tokens=6 .* set it to at most 34"
    for kind in ("prompt", "prefix"):
        with pytest.raises(jf.ConfigError, match=source):
            check(a_run(kind, **both))
    assert check(a_run("prefix"))  # RoPE has no table
    long = a_run("prefix", positions="learned")
    long = RunConfig(**{**vars(long), "data": DataConfig(sequence_length=35)})
    with pytest.raises(jf.ConfigError, match=r"data\.sequence_length=35 behind"):
        check(long)


def source_length(run):
    """Tokens of a row of sources with three segments."""
    return encoded_length(run.model, run.data, run.adapter, 3)


def test_the_kernel_and_the_lengths_of_a_run_know_its_virtual_tokens():
    for kind in ("prompt", "prefix"):
        resolved = resolve(a_run(kind), jf.make_mesh(), 0)
        assert resolved.model.attention.kernel == "blocked"
        assert resolved.kernel.startswith("blocked")
        named = a_run(kind, **{"attention.kernel": "tpu"})
        with pytest.raises(jf.ConfigError, match="'tpu' cannot run here"):
            resolve(named, jf.make_mesh(), 0)
    pairs = a_run("prompt", family="encoder_decoder")
    assert source_length(pairs) == 36 + 3 * 6
    assert source_length(a_run("prefix", family="encoder_decoder")) == 36
    assert source_length(a_run("prompt")) == 0


def test_an_encoder_has_no_virtual_tokens():
    with pytest.raises(jf.ConfigError, match="for decoders and encoder-decoders"):
        run = a_run("prefix", family="encoder")
        run_specs(run.data.objective, run.model, run.adapter)
