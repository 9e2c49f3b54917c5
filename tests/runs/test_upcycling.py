"""A model with experts begins from a dense one: it computes the same at first, goes on and resumes,
and what cannot be a copy is refused by name."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from products import slow_but
from tiny_run import write_text
from warm_starts import leaves, run

import jaxformer as jf
from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import RunConfig, RunSettings, TokenizerConfig, to_json
from jaxformer.config.settings import with_settings
from jaxformer.runs.init_from import check_base, warm_start
from jaxformer.runs.model_files import ModelFiles

SIZES = dict(vocab_size=29, d_model=16, n_layers=2, n_heads=2, d_ff=24, max_length=32)
FAMILIES = {
    "decoder": {},
    "encoder": dict(bias="all", norm="layer", norm_placement="post", activation="gelu"),
    "encoder_decoder": dict(n_encoder_layers=2, norm_placement="sandwich", bias="ffn"),
}
EXPERTS = {"feed_forward": "experts", "experts.n": 4, "experts.per_token": 2}
# For each family: what else is chosen of its experts.
CHOICES = {
    "decoder": {"experts.router": "sigmoid", "experts.router_bias": "balanced"},
    "encoder": {"experts.pattern": "de", "experts.router_bias": "learned"},
    "encoder_decoder": {"experts.dense_layers": 1},
}
UPCYCLED_TEXT = "Upcycled: the 4 experts of a layer are copies of its dense feed-forward."


def dense(family: str) -> ModelConfig:
    return with_settings(
        ModelConfig(), {**SIZES, "family": family, "dtype": "float32", **FAMILIES[family]}
    )


def moved(config: ModelConfig) -> dict:
    """Params of which no leaf is all zero or one."""
    params, rng = jf.init(config, jax.random.key(0)), np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), params)


def written(folder: Path, config: ModelConfig) -> Path:
    """A run directory with a checkpoint of these params."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save({"params": moved(config)}, 0)
    tokenizer = TokenizerConfig(kind="characters")
    run = RunConfig(run=RunSettings(dir=str(folder)), model=config, tokenizer=tokenizer)
    (folder / "config.json").write_text(to_json(run))
    return folder


def beginning(origin: Path, model: ModelConfig, **sections) -> RunConfig:
    return RunConfig(run=RunSettings(init_from=str(origin)), model=model, **sections)


def logits(params: dict, config: ModelConfig) -> np.ndarray:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, SIZES["vocab_size"], (3, 17))
    segments = np.where(np.arange(17) < np.array([[17], [9], [12]]), 1, 0)
    inputs = {"segment_ids": segments}
    if config.family == "encoder_decoder":
        inputs |= {"source": tokens[:, ::-1], "source_segment_ids": segments[:, ::-1]}
    found = np.asarray(jf.forward(params, config, tokens, **inputs))
    return found[segments != 0]


def checked(run):
    check_base(run.model, run.adapter, ModelFiles(run.run.init_from))


def begun(run, mesh=None):
    return warm_start(ModelFiles(run.run.init_from), run.model, seed=run.run.seed, mesh=mesh)


@pytest.mark.parametrize("family", slow_but(FAMILIES, "decoder", "encoder_decoder"))
def test_the_upcycled_model_computes_at_first_what_the_dense_one_does(family, tmp_path):
    config, choice = dense(family), CHOICES[family]
    model = with_settings(config, {**EXPERTS, **choice})
    run = beginning(written(tmp_path / "base", config), model)
    checked(run)
    start = begun(run)
    np.testing.assert_allclose(
        logits(start.params, model), logits(moved(config), config), rtol=1e-5, atol=1e-5
    )
    drawn = jf.init(model, jax.random.key(run.run.seed))
    routers = {path for path in start.new if ".experts.router" in path}
    assert routers == set(start.new) and routers
    for path in routers:
        value, expected = start.params, drawn
        for name in path.split("."):
            value, expected = value[name], expected[name]
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert UPCYCLED_TEXT in start.sentence


@pytest.mark.slow
def test_a_hugging_face_directory_is_upcycled_onto_a_mesh(tmp_path):
    config = dense("decoder")
    model = with_settings(config, EXPERTS)
    jf.save_pretrained(tmp_path / "base", moved(config), config)
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(MESH_AXES))
    mesh = Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    run = beginning(tmp_path / "base", model)
    start = begun(run, mesh)
    assert jax.tree.leaves(start.params)[0].sharding.mesh == mesh
    expected = logits(moved(config), config)
    np.testing.assert_allclose(logits(start.params, model), expected, rtol=1e-5, atol=1e-5)


REFUSED = [
    ({"experts.d_ff": 12}, {}, r"model\.experts\.d_ff=12 is not 24, the width of .*set it to 24"),
    (
        {"experts.shared_ff": 24},
        {},
        r"model\.experts\.shared_ff=24 adds a new shared expert .* set it to 0",
    ),
    (dict(d_ff=32), {}, r"model\.d_ff=32, but it is 24 in the base"),
    (dict(n_layers=3), {}, r"model\.n_layers=3, but it is 2 in the base"),
    ({}, dict(adapter=AdapterConfig(kind="lora")), "'lora' .* routers .* without an adapter"),
]


def test_experts_that_cannot_be_copies_are_refused_by_name(tmp_path):
    config = dense("decoder")
    origin = written(tmp_path / "base", config)
    for changes, sections, message in REFUSED:
        run = beginning(origin, with_settings(config, EXPERTS | changes), **sections)
        with pytest.raises(jf.ConfigError, match=message):
            checked(run)
        # The weights themselves may have changed since.
        if changes:
            with pytest.raises(jf.ConfigError, match="does not fit this model outside of its head"):
                begun(run)
    base = with_settings(config, EXPERTS)
    origin = written(tmp_path / "experts", base)
    with pytest.raises(jf.ConfigError, match=r"model\.experts\.n=8, but it is 4 in the base"):
        checked(beginning(origin, with_settings(base, {"experts.n": 8})))
    with pytest.raises(jf.ConfigError, match=r"model\.feed_forward='ffn', but it is 'experts'"):
        checked(beginning(origin, config))


UPCYCLED = {
    "model__feed_forward": "experts",
    "model__experts__n": 4,
    "model__experts__router_bias": "balanced",
    "run__progress": "lines",
}


@pytest.mark.slow
def test_a_run_begins_upcycled_goes_on_and_resumes_bitwise(tmp_path, capsys):
    text = write_text(tmp_path / "text.txt")
    origin = run(tmp_path, "dense", data__train=text)
    changes = UPCYCLED | {"data__train": text, "run__init_from": origin}
    capsys.readouterr()
    still = run(tmp_path, "still", **changes, optimizer__learning_rate=0.0)
    said = " ".join(capsys.readouterr().out.split())
    assert UPCYCLED_TEXT in said
    base, upcycled = jf.load(origin), jf.load(still)
    tokens = np.arange(1, 31)[None]
    np.testing.assert_allclose(
        jf.forward(upcycled.params, upcycled.config, tokens),
        jf.forward(base.params, base.config, tokens),
        rtol=1e-5,
        atol=1e-5,
    )

    changes |= {"train__checkpoint_every": 1, "optimizer__decay_steps": 40}
    whole = run(tmp_path, "whole", **changes, train__steps=4)
    for steps in (2, 4):
        parts = run(tmp_path, "parts", **changes, train__steps=steps)
    found = leaves(parts)
    for path, leaf in leaves(whole).items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
    experts = leaves(whole)["blocks.experts.up"]
    assert not np.array_equal(experts[:, 0], experts[:, 1]), "the experts have become different"
