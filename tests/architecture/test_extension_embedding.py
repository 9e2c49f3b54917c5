"""An embedding from outside the package is one row: it trains, decodes and shards, plan counts it,
and shapes show it."""

import math

import jax
import numpy as np
import own_embedding
import pytest
from own_sublayer import printed_on_eight_devices

import jaxformer as jf
from jaxformer.arrays.params import rows
from jaxformer.config.run import DataConfig
from jaxformer.config.train import MeshConfig, TrainConfig
from jaxformer.layers.embed import EMBEDDINGS
from jaxformer.models.cost import parameter_count, score_flops
from jaxformer.tools.model_shapes import formula_of, shapes_of
from jaxformer.tools.plan.plan import make_plan
from jaxformer.tools.plan.planned import planned_run


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMBEDDINGS, "narrow", own_embedding.ROW)


def model(**changes: object) -> tuple[jf.ModelConfig, dict]:
    config = jf.ModelConfig(**(own_embedding.CONFIG | changes))
    return config, jf.init(config, jax.random.key(0))


def test_it_trains_on_the_array_that_it_reads() -> None:
    losses, params = own_embedding.losses(60)
    assert losses[-1] < 0.5 * losses[0]
    assert {*params["embed"]} == {"narrow", "widen", "features", "positions"}
    start = jf.init(jf.ModelConfig(**own_embedding.CONFIG), jax.random.key(0))
    assert np.abs(params["embed"]["features"] - start["embed"]["features"]).max() > 0.01


def test_forward_takes_what_it_reads_and_refuses_what_nothing_reads() -> None:
    config, params = model()
    batch = own_embedding.batch_with_features(0)
    tokens, features = batch["tokens"], batch["features"]
    with_features = jf.forward(params, config, tokens, features=features)
    assert np.abs(with_features - jf.forward(params, config, tokens)).max() > 0.01
    with pytest.raises(jf.ConfigError, match=r"patches is no input .*'narrow'.* features\."):
        jf.forward(params, config, tokens, patches=features)
    plain = jf.ModelConfig(**own_embedding.SIZES)
    with pytest.raises(jf.ConfigError, match=r"features is no input .*'tokens'"):
        jf.forward(jf.init(plain, jax.random.key(0)), plain, tokens, features=features)


def test_cached_decoding_equals_the_full_forward_pass() -> None:
    config, params = model()
    tokens = own_embedding.batch(0)["tokens"][:2, :4]
    made = jf.generate(params, config, tokens, max_new_tokens=6, temperature=0.0)
    logits = jf.forward(params, config, np.concatenate([tokens, made], axis=1))
    np.testing.assert_array_equal(made, np.argmax(logits[:, 3:-1], axis=-1))


def test_packed_rows_equal_separate_rows() -> None:
    config, params = model()
    batch = own_embedding.batch_with_features(0)
    tokens, features = batch["tokens"][:1, :12], batch["features"][:1, :12]
    segments = np.repeat([[1, 2]], 6, axis=1)
    packed = jf.forward(params, config, tokens, segment_ids=segments, features=features)
    alone = jf.forward(params, config, tokens[:, 6:], features=features[:, 6:])
    np.testing.assert_allclose(packed[:, 6:], alone, atol=1e-5)


def test_both_stacks_of_an_encoder_decoder_read_it() -> None:
    config, params = model(family="encoder_decoder")
    assert "narrow" in params["embed"] and {*params["encoder"]["embed"]} == {"positions"}
    tokens = own_embedding.batch(0)["tokens"][:1, :6]
    logits = jf.forward(params, config, tokens, source=tokens)
    assert logits.shape == (1, 6, config.vocab_size)


def test_a_tied_head_needs_a_table_of_tokens() -> None:
    with pytest.raises(jf.ConfigError, match=r"tied_head=True .* model\.embedding='narrow'"):
        model(tied_head=True)


def test_a_prompt_needs_a_table_of_tokens() -> None:
    config, params = model()
    with pytest.raises(jf.ConfigError, match=r"model\.embedding=narrow has not: choose prefix"):
        jf.adapt(params, config, jf.PromptTuning(tokens=2), jax.random.key(1))


def test_plan_and_shapes_read_the_row() -> None:
    config, _ = model()
    data, train = DataConfig(sequence_length=32), TrainConfig(batch_size=8)
    run = jf.RunConfig(model=config, data=data, train=train)
    planned = planned_run(run, "h100", 2, packed=False)
    table = rows(jf.specs(config))
    matrices = {
        path: 6 * math.prod(spec.shape)
        for path, spec in table.items()
        if spec.is_matrix and not spec.lookup
    }
    assert {"embed.widen", "embed.features"} <= matrices.keys() and "embed.narrow" not in matrices
    expected = sum(matrices.values()) + score_flops(config, 32)
    assert make_plan(planned).products.per_token == expected
    shown_rows = shapes_of(config, 8, 32)
    by_name = {shown.name: shown for shown in shown_rows}
    assert by_name["embed"].parameters == 61 * 8 + 8 * 32 + 2 * 32 + 32 * 32
    assert by_name["embed.widen"].makes == ((8, 32, 32),)
    assert sum(shown.parameters * shown.times for shown in shown_rows) == parameter_count(config)
    expected_text = "x = E[token] W_widen + features W_features + P[position]"
    assert formula_of(config, "embed") == (expected_text,)


@pytest.mark.slow
def test_a_plan_of_a_mesh_with_tensor_parallelism_needs_no_table_of_tokens() -> None:
    config, _ = model()
    data, train = DataConfig(sequence_length=32), TrainConfig(batch_size=8)
    mesh = MeshConfig(data=1, fsdp=2, tensor=2)
    run = jf.RunConfig(model=config, data=data, train=train, mesh=mesh)
    assert make_plan(planned_run(run, "h100", 4, packed=False)).products.per_token > 0


@pytest.mark.slow
def test_a_sharded_step_equals_the_step_of_one_device() -> None:
    (line,) = printed_on_eight_devices("own_embedding.py")
    numbers = np.array(line.split(), float)
    np.testing.assert_allclose(numbers[3:], numbers[:3], rtol=1e-5)
