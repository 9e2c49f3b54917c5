"""A sublayer and an embedding from outside the package are one row each: they train, decode and
shard, plan counts them, and shapes show them."""

import math

import jax
import numpy as np
import own_embedding
import own_sublayer
import pytest
from forced_devices import on_eight_devices

import jaxformer as jf
from jaxformer.arrays.params import rows
from jaxformer.config.run import DataConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.train import MeshConfig, TrainConfig
from jaxformer.layers.block import MIXERS
from jaxformer.layers.embed import EMBEDDINGS
from jaxformer.models.cost import parameter_count, score_flops
from jaxformer.tools.model_shapes import formula_of, shapes_of
from jaxformer.tools.plan import make_plan
from jaxformer.tools.plan_memory import PlannedRun, planned_run

every_part = pytest.mark.parametrize("own", [own_sublayer, own_embedding], ids=lambda m: m.__name__)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "mean", own_sublayer.ROW)
    monkeypatch.setitem(EMBEDDINGS, "narrow", own_embedding.ROW)


def model(own, **changes: object) -> tuple[jf.ModelConfig, dict]:
    config = with_settings(jf.ModelConfig(), own.CONFIG | changes)
    return config, jf.init(config, jax.random.key(0))


def plan_of(config: jf.ModelConfig, devices: int, **mesh: int) -> PlannedRun:
    data, train = DataConfig(sequence_length=32), TrainConfig(batch_size=8)
    run = jf.RunConfig(model=config, data=data, train=train, mesh=MeshConfig(**mesh))
    return planned_run(run, "h100", devices, packed=False)


@every_part
def test_it_trains(own) -> None:
    losses, params = own.losses(60)
    assert losses[-1] < 0.5 * losses[0]
    if own is own_sublayer:
        assert {*params["blocks"]} == {"mean", "mean_norm", "ffn", "ffn_norm"}
    else:
        assert {*params["embed"]} == {"narrow", "widen", "features", "positions"}
        start = model(own)[1]["embed"]["features"]
        assert np.abs(params["embed"]["features"] - start).max() > 0.01


@every_part
def test_cached_decoding_equals_the_full_forward_pass(own) -> None:
    config, params = model(own)
    tokens = own.batch(0)["tokens"][:2, :4]
    made = jf.generate(params, config, tokens, max_new_tokens=6, temperature=0.0)
    logits = jf.forward(params, config, np.concatenate([tokens, made], axis=1))
    np.testing.assert_array_equal(made, np.argmax(logits[:, 3:-1], axis=-1))


@every_part
def test_packed_rows_equal_separate_rows(own) -> None:
    config, params = model(own)
    tokens = own.batch(0)["tokens"][:1, :12]
    arrays = {}
    if own is own_embedding:
        arrays["features"] = own.batch_with_features(0)["features"][:1, :12]
    segments = np.repeat([[1, 2]], 6, axis=1)
    packed = jf.forward(params, config, tokens, segment_ids=segments, **arrays)
    second = {name: array[:, 6:] for name, array in arrays.items()}
    alone = jf.forward(params, config, tokens[:, 6:], **second)
    np.testing.assert_allclose(packed[:, 6:], alone, atol=1e-5)


def test_forward_takes_what_it_reads_and_refuses_what_nothing_reads() -> None:
    config, params = model(own_embedding)
    batch = own_embedding.batch_with_features(0)
    tokens, features = batch["tokens"], batch["features"]
    with_features = jf.forward(params, config, tokens, features=features)
    assert np.abs(with_features - jf.forward(params, config, tokens)).max() > 0.01
    with pytest.raises(jf.ConfigError, match=r"patches is no input .*'narrow'.* features\."):
        jf.forward(params, config, tokens, patches=features)
    plain = jf.ModelConfig(**own_embedding.SIZES)
    with pytest.raises(jf.ConfigError, match=r"features is no input .*'tokens'"):
        jf.forward(jf.init(plain, jax.random.key(0)), plain, tokens, features=features)


@every_part
def test_plan_and_shapes_read_the_row(own) -> None:
    config, _ = model(own)
    products = {
        path: 6 * math.prod(spec.shape)
        for path, spec in rows(jf.specs(config)).items()
        if spec.is_matrix and not spec.lookup
    }
    shown_rows = shapes_of(config, 8, 32)
    assert sum(shown.parameters * shown.times for shown in shown_rows) == parameter_count(config)
    by_name = {shown.name: shown for shown in shown_rows}
    if own is own_sublayer:
        # The scores are 2 N H T products a token and layer, three times for both passes.
        scores = 3 * 2 * 4 * 8 * 32 * 2
        mixer = by_name["decoder.0.mean"]
        assert mixer.parameters == 3 * 32 * 32 and mixer.times == 2
        assert {f"decoder.0.mean.{name}" for name in ("value", "gate", "mix")} <= by_name.keys()
        assert formula_of(config, "decoder.0.mean")[-1] == "x ← x + mean(norm(x))"
    else:
        scores = score_flops(config, 32)
        assert {"embed.widen", "embed.features"} <= products.keys()
        assert "embed.narrow" not in products
        assert by_name["embed"].parameters == 61 * 8 + 8 * 32 + 2 * 32 + 32 * 32
        assert by_name["embed.widen"].makes == ((8, 32, 32),)
        expected = "x = E[token] W_widen + features W_features + P[position]"
        assert formula_of(config, "embed") == (expected,)
    found = make_plan(plan_of(config, 2)).products.per_token
    assert found == sum(products.values()) + scores
    # Tensor parallelism needs no table of tokens.
    assert make_plan(plan_of(config, 4, data=1, fsdp=2, tensor=2)).products.per_token == found


def test_both_stacks_of_an_encoder_decoder_read_it() -> None:
    config, params = model(own_embedding, family="encoder_decoder")
    assert "narrow" in params["embed"] and {*params["encoder"]["embed"]} == {"positions"}
    tokens = own_embedding.batch(0)["tokens"][:1, :6]
    logits = jf.forward(params, config, tokens, source=tokens)
    assert logits.shape == (1, 6, config.vocab_size)


def test_a_tied_head_needs_a_table_of_tokens() -> None:
    with pytest.raises(jf.ConfigError, match=r"tied_head=True .* model\.embedding\.kind='narrow'"):
        model(own_embedding, tied_head=True)


def test_a_prompt_needs_a_table_of_tokens() -> None:
    config, params = model(own_embedding)
    with pytest.raises(
        jf.ConfigError, match=r"model\.embedding\.kind=narrow has not: choose prefix"
    ):
        jf.adapt(params, config, jf.PromptTuning(tokens=2), jax.random.key(1))


@pytest.mark.slow
def test_sharded_steps_equal_the_steps_of_one_device() -> None:
    report = on_eight_devices("own_parts_devices.py")
    assert report.pop("shard") == [61, 16]  # fsdp divides the width of an objective's matrix
    for losses in report.values():
        np.testing.assert_allclose(losses["mesh"], losses["one"], rtol=1e-5)
    assert len(report) == 3
