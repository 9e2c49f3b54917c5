"""A run and a model directory as each other's settings: what a new run takes and what it decides,
how a directory is read as a run, and how it is written as one."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from pretrained_tokenizers import saved

import jaxformer as jf
from jaxformer.arrays.mesh import MESH_AXES, parameter_sharding
from jaxformer.arrays.params import map_specs
from jaxformer.cli import convert
from jaxformer.cli.arguments import ConvertArguments
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig, RunSettings, TokenizerConfig, to_json
from jaxformer.config.settings import flat, with_settings
from jaxformer.interop import logit_parity
from jaxformer.models.transformer import specs
from jaxformer.runs.config import with_base
from jaxformer.runs.init_from import warm_start
from jaxformer.runs.loading import save_run
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.resolve import with_sizes
from jaxformer.runs.run_evaluation import evaluate_run
from jaxformer.tokenizer import Tokenizer

SMALL = dict(vocab_size=11, d_model=8, n_layers=1, n_heads=2, d_ff=12)
BERT = SMALL | dict(
    family="encoder", norm="layer", norm_placement="post", bias="all", activation="gelu"
)
BERT |= {
    "embedding.norm": True,
    "embedding.token_types": 2,
    "positions": "learned",
    "max_length": 9,
}
# Of every setting of a model another value than its default; those that a new run decides for
# itself stand in OWN.
OTHER = SMALL | {
    "n_kv_heads": 1,
    "head_dim": 6,
    "attention.value_dim": 4,
    "max_length": 77,
    "rope.theta": 3.0,
    "rope.pairing": "interleaved",
    "rope.fraction": 0.5,
    "window": 3,
    "window_pattern": "wf",
    "rope.pattern": "pn",
    "rope.window_theta": 5.0,
    "attention.scale": 0.3,
    "norm": "rms1p",
    "attention.soft_cap": 2.0,
    "attention.sinks": True,
    "attention.query_key_norm": "head",
    "norm_placement": "sandwich",
    "norm_eps": 0.1,
    "residual": "parallel",
    "activation": "geglu",
    "bias": "qkv",
    "embedding.scale": "sqrt",
    "embedding.norm": True,
    "embedding.token_types": 2,
    "tied_head": True,
    "head.scale": "rsqrt",
    "head.soft_cap": 4.0,
    "init": "xavier",
}
OWN = {
    "head.kind": "classes",
    "head.n_classes": 3,
    "head.pooling": "mean",
    "dropout": 0.25,
    "attention.dropout": 0.5,
    "dtype": "bfloat16",
    "layer_loop": "scan",
    "remat": "full",
    "attention.kernel": "xla",
}


def written(place: Path, config: ModelConfig, **more) -> Path:
    """A model directory of this config."""
    jf.save_pretrained(place, jf.init(config, jax.random.key(0)), config, **more)
    return place


def a_run(place: Path, **model) -> Path:
    """A run directory that has not begun to train."""
    place.mkdir()
    (place / "config.json").write_text(
        to_json(RunConfig(model=with_settings(ModelConfig(), model)))
    )
    return place


def based(run: RunConfig) -> RunConfig:
    """A run with what it takes from the model that it starts from."""
    base = run.run.init_from
    origin = ModelFiles(base).or_begun(run.run)
    return dataclasses.replace(
        run,
        model=with_base(run.model, origin, base),
        tokenizer=origin.with_tokenizer(run.tokenizer),
    )


def beginning(place: Path, origin: Path, **model) -> RunConfig:
    return RunConfig(
        run=RunSettings(dir=str(place), init_from=str(origin)),
        model=with_settings(ModelConfig(), model),
    )


def test_a_new_run_takes_every_setting_of_the_model_but_its_own(tmp_path):
    origin = a_run(tmp_path / "old", **OTHER)
    found = based(beginning(tmp_path / "new", origin, **OWN))
    expected = flat(ModelConfig()) | OTHER | OWN
    assert flat(found.model) == expected
    assert found.tokenizer.path == str(origin / "tokenizer.json")


def test_a_tokenizer_that_is_named_is_kept_and_a_run_already_begun_keeps_its_own_model(tmp_path):
    origin = a_run(tmp_path / "old", **SMALL)
    begun = a_run(tmp_path / "begun", **SMALL | dict(d_model=16))
    mine = TokenizerConfig(path="mine.json")
    named = dataclasses.replace(beginning(tmp_path / "new", origin), tokenizer=mine)
    assert based(named).tokenizer == mine
    again = based(beginning(begun, origin))
    assert again.model.d_model == 16 and again.tokenizer.path == str(begun / "tokenizer.json")


def test_a_run_that_is_begun_anew_takes_what_the_model_of_init_from_says(tmp_path):
    origin = a_run(tmp_path / "old", **SMALL)
    begun = a_run(tmp_path / "begun", **SMALL | dict(d_model=16))
    overrides = [f"run.dir={begun}", f"run.init_from={origin}"]
    config = tmp_path / "config.py"
    config.write_text("from jaxformer import RunConfig\nconfig = RunConfig()\n")
    assert jf.load_config(config, overrides).model.d_model == 16
    anew = jf.load_config(config, [*overrides, "run.restart=True"])
    assert anew.model.d_model == SMALL["d_model"]
    assert anew.tokenizer.path == str(origin / "tokenizer.json")


def test_a_head_of_as_many_classes_for_another_purpose_is_new_and_the_pooler_is_warm_start(
    tmp_path,
):
    old = with_settings(
        ModelConfig(), {**BERT, "head.kind": "tags", "head.n_classes": 3, "head.pooler": True}
    )
    origin = written(tmp_path / "old", old, architecture="BertForTokenClassification")
    run = RunConfig(
        run=RunSettings(init_from=str(origin)),
        model=with_settings(old, {"head.kind": "classes", "head.pooler": False}),
    )
    drawn, before = jf.init(run.model, jax.random.key(run.run.seed)), jf.load(origin).params
    start = warm_start(ModelFiles(run.run.init_from), run.model, seed=run.run.seed)
    np.testing.assert_allclose(start.params["head"]["weight"], drawn["head"]["weight"], rtol=1e-6)
    assert np.array_equal(start.params["pooler"]["dense"], before["pooler"]["dense"])
    assert start.sentence.endswith("new: head.weight, head.bias.")
    labels = jf.load(origin).labels
    for order, new in ((labels, []), (labels[::-1], ["head.weight", "head.bias"])):
        same = warm_start(ModelFiles(origin), old, labels=order)
        assert same.new == new
        assert jax.tree.all(jax.tree.map(np.array_equal, same.params, before)) == (new == [])


def test_heads_that_the_new_run_has_not_are_left_behind(tmp_path):
    origin = a_run(tmp_path / "settings", **BERT, **{"head.next_sentence": True})
    assert not based(beginning(tmp_path / "new", origin)).model.head.next_sentence
    old = with_settings(ModelConfig(), {**BERT, "head.next_sentence": True, "tied_head": True})
    place = written(tmp_path / "old", old)
    new = with_settings(
        old, {"head.kind": "tags", "head.n_classes": 2, "head.next_sentence": False}
    )
    run = RunConfig(run=RunSettings(init_from=str(place)), model=new)
    start = warm_start(ModelFiles(run.run.init_from), run.model)
    assert "pooler" not in start.params and "next_sentence" not in start.params
    assert start.new == ["head.weight", "head.bias"]
    assert np.array_equal(start.params["embed"]["tokens"], jf.load(place).params["embed"]["tokens"])


def test_a_model_is_evaluated_by_the_numbers_that_its_own_labels_have(tmp_path):
    tokenizer = Tokenizer.load(saved("bert"))
    sizes = {"vocab_size": tokenizer.vocab_size, "max_length": 32, "head.n_classes": 2}
    config = with_settings(
        ModelConfig(), {**BERT | sizes, "head.kind": "classes", "head.pooler": True}
    )
    params = jf.init(config, jax.random.key(0))
    params["head"]["bias"] = np.array([-9.0, 9.0], np.float32)  # all is "bad"
    jf.save_pretrained(tmp_path / "model", params, config, tokenizer, labels=("good", "bad"))
    (tmp_path / "text.tsv").write_text("text\tlabel\n" + "the cat sat\tbad\n" * 3)
    assert evaluate_run(tmp_path / "model", str(tmp_path / "text.tsv"))["val_accuracy"] == 1


def test_fewer_classes_than_the_data_names_are_refused():
    run = RunConfig(
        model=with_settings(ModelConfig(), {**BERT, "head.kind": "classes", "head.n_classes": 3})
    )
    with pytest.raises(
        jf.ConfigError, match=r"head.n_classes=3 is less than the 4 labels of the data"
    ):
        with_sizes(run.model, 0, ("a", "b", "c", "d"), "the data")
    assert with_sizes(run.model, 0, ("a", "b"), "the data").head.n_classes == 3


T5 = {
    "family": "encoder_decoder",
    "positions": "t5",
    "attention.scale": 1.0,
    "activation": "relu",
    "tied_head": True,
}


@pytest.mark.parametrize(
    "model, length, objective",
    [
        (SMALL | dict(max_length=40), 40, "auto"),
        (SMALL | dict(max_length=4096), 1024, "auto"),
        (SMALL | T5 | dict(max_length=40), 40, "seq2seq"),
    ],
    ids=["short", "long", "of a source"],
)
def test_a_model_directory_is_a_run_of_whole_rows_of_its_own_text(
    model, length, objective, tmp_path
):
    found = ModelFiles(written(tmp_path / "model", with_settings(ModelConfig(), model))).run
    data = found.data
    assert (data.sequence_length, data.objective, data.train) == (length, objective, "")
    assert found.run.dir == str(tmp_path / "model")
    assert found.tokenizer.path == str(tmp_path / "model" / "tokenizer.json")


def test_a_model_directory_written_as_a_run_is_one_of_its_own_place_with_its_labels(tmp_path):
    labels, config = (
        ("bad", "fair", "good"),
        with_settings(ModelConfig(), {**BERT, "head.kind": "classes", "head.n_classes": 3}),
    )
    origin = written(tmp_path / "model", config, labels=labels)
    model, place = jf.load(origin), tmp_path / "run"
    place.mkdir()
    save_run(place, model, ModelFiles(origin))
    again, run = jf.load(place), ModelFiles(place).run
    assert again.labels == model.labels == labels and again.config == model.config == run.model
    assert run.run.dir == run.tokenizer.path == str(place)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, model.params))
    assert json.loads((place / "data.json").read_text()) == {"labels": [*labels]}
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape((1,) * len(MESH_AXES)), MESH_AXES)
    places = map_specs(
        lambda _, spec: parameter_sharding(mesh, spec.shape, spec.axes), specs(model.config)
    )
    for found in (jf.load(path, mesh=mesh, dtype="bfloat16").params for path in (origin, place)):
        assert jax.tree.all(jax.tree.map(lambda leaf, there: leaf.sharding == there, found, places))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(found)} == {"bfloat16"}


@pytest.mark.parametrize(
    "dtype, inward, largest, status",
    [
        ("float32", False, 1e-5, 0),
        ("float32", False, 1.0, 1),
        ("bfloat16", False, 1.0, 0),
        ("bfloat16", True, 1.0, 1),
    ],
)
def test_only_weights_that_were_rounded_may_be_apart(
    dtype, inward, largest, status, monkeypatch, capsys
):
    """What is read is as it lies there, whatever dtype was asked for."""
    monkeypatch.setattr(convert, "compare", lambda *_: logit_parity.Comparison(largest, 1.0))
    asked = ConvertArguments(source=Path("source"), target=Path("target"), dtype=dtype)
    model = jf.Loaded({}, with_settings(ModelConfig(), SMALL), None)
    assert convert._verified(model, asked, asked.source if inward else asked.target) == status
    assert ("NOT EQUAL" in capsys.readouterr().out) == (status == 1)


def test_a_file_where_the_directory_should_be_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(jf.ConfigError, match="is not empty"):
        convert.run(ConvertArguments(source=tmp_path / "model", target=tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_a_model_whose_positions_follow_the_padding_token_is_verified_without_that_token(tmp_path):
    changes = {
        "embedding.token_types": 1,
        "embedding.position_offset": 2,
        "max_length": 40,
        "tied_head": True,
    }
    config = with_settings(ModelConfig(), BERT | changes)
    place = written(tmp_path / "model", config, architecture="RobertaForMaskedLM")
    found = logit_parity.compare(place, jf.load(place).params, config)
    assert found.largest < convert.LARGEST_DIFFERENCE * found.deviation
