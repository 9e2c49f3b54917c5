"""A sublayer from outside the package is one row: it trains, decodes and shards, plan counts it,
and shapes show it."""

import math

import jax
import numpy as np
import own_sublayer
import pytest
from own_sublayer import printed_on_eight_devices

import jaxformer as jf
from jaxformer.arrays.params import rows
from jaxformer.config.run import DataConfig
from jaxformer.config.train import TrainConfig
from jaxformer.layers.block import MIXERS
from jaxformer.models.cost import parameter_count
from jaxformer.tools.model_shapes import formula_of, shapes_of
from jaxformer.tools.plan.plan import make_plan
from jaxformer.tools.plan.planned import planned_run


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "mean", own_sublayer.ROW)


def test_it_trains() -> None:
    losses, params = own_sublayer.losses(60)
    assert losses[-1] < 0.5 * losses[0]
    assert {*params["blocks"]} == {"mean", "mean_norm", "ffn", "ffn_norm"}


def test_cached_decoding_equals_the_full_forward_pass() -> None:
    config = jf.ModelConfig(**own_sublayer.CONFIG)
    params = jf.init(config, jax.random.key(0))
    tokens = own_sublayer.batch(0)["tokens"][:2, :4]
    made = jf.generate(params, config, tokens, max_new_tokens=6, temperature=0.0)
    logits = jf.forward(params, config, np.concatenate([tokens, made], axis=1))
    np.testing.assert_array_equal(made, np.argmax(logits[:, 3:-1], axis=-1))


def test_packed_rows_equal_separate_rows() -> None:
    config = jf.ModelConfig(**own_sublayer.CONFIG)
    params = jf.init(config, jax.random.key(0))
    tokens = own_sublayer.batch(0)["tokens"][:1, :12]
    segments = np.repeat([[1, 2]], 6, axis=1)
    packed = jf.forward(params, config, tokens, segment_ids=segments)
    alone = jf.forward(params, config, tokens[:, 6:])
    np.testing.assert_allclose(packed[:, 6:], alone, atol=1e-5)


def test_plan_and_shapes_read_the_row() -> None:
    model = jf.ModelConfig(**own_sublayer.CONFIG)
    data, train = DataConfig(sequence_length=32), TrainConfig(batch_size=8)
    run = jf.RunConfig(model=model, data=data, train=train)
    planned = planned_run(run, "h100", 2, packed=False)
    plan = make_plan(planned)
    # The scores are 2 N H T products a token and layer, three times for both passes.
    table = rows(jf.specs(model)).values()
    matrices = 6 * sum(
        math.prod(spec.shape) for spec in table if spec.is_matrix and not spec.lookup
    )
    scores = 3 * 2 * 4 * 8 * 32 * 2
    assert plan.products.per_token == matrices + scores
    shown_rows = shapes_of(model, 8, 32)
    (mixer,) = [shown for shown in shown_rows if shown.name == "decoder.0.mean"]
    products = [shown.name for shown in shown_rows if shown.name.startswith("decoder.0.mean.")]
    assert mixer.parameters == 3 * 32 * 32 and mixer.times == 2
    assert {name.rpartition(".")[2] for name in products} >= {"value", "gate", "mix"}
    assert sum(shown.parameters * shown.times for shown in shown_rows) == parameter_count(model)
    assert formula_of(model, "decoder.0.mean")[-1] == "x ← x + mean(norm(x))"


@pytest.mark.slow
def test_a_sharded_step_equals_the_step_of_one_device() -> None:
    (line,) = printed_on_eight_devices("own_sublayer.py")
    numbers = np.array(line.split(), float)
    np.testing.assert_allclose(numbers[3:], numbers[:3], rtol=1e-5)
