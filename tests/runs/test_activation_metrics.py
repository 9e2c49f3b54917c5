"""Dead units and the entropy of attention are those of `jf.inspect` in NumPy, padding left out."""

import jax
import numpy as np
import pytest
from shapes import model

import jaxformer as jf
from jaxformer.runs.activation_metrics import make_activation_metrics

pytestmark = pytest.mark.fast

PAIRED = {"family": "encoder_decoder", "positions": "t5", "n_encoder_layers": 1}


def batch_of(config):
    """Rows of tokens with padding, and one row that only fills the batch."""
    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(1, 30, (4, 12), dtype=np.int32)}
    batch["segment_ids"] = (np.arange(12) < np.array([[12], [7], [9], [12]])).astype(np.int32)
    batch["weights"] = batch["segment_ids"].astype(np.float32)
    batch["weights"][3] = 0
    if config.family == "encoder_decoder":
        batch["source"] = rng.integers(1, 30, (4, 10), dtype=np.int32)
        batch["source_segment_ids"] = (np.arange(10) < np.array([[6], [10], [8], [10]])).astype(
            np.int32
        )
    return batch


@pytest.mark.parametrize(
    "activation, changes",
    [("swiglu", {}), ("relu", {"layer_loop": "scan"}), ("reglu", PAIRED)],
    ids=["swiglu", "relu", "reglu of an encoder-decoder"],
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_activation_metrics_are_those_of_numpy(activation, changes, microbatches):
    config = model("llama", activation=activation, **changes)
    params, batch = jf.init(config, jax.random.key(0)), batch_of(config)
    # A unit whose gate, or activation, is never above 0, and one that is nearly 0 everywhere.
    name = "gate" if config.gated else "up"
    weights = params["blocks"]["ffn"][name]
    params["blocks"]["ffn"][name] = weights.at[..., 0].set(0).at[..., 1].multiply(1e-6)
    metrics = make_activation_metrics(config, microbatches)(params, batch)
    inputs = {key: array[::microbatches] for key, array in batch.items()}
    has_target = inputs.pop("weights").any(-1)
    values = jf.inspect(params, config, capture=["*"], **inputs).values
    expected = {}
    for full_name, value in values.items():
        layer, _, what = full_name.rpartition(".")
        side = "source_segment_ids" if layer.startswith("encoder") else "segment_ids"
        counts = has_target[:, None] & (inputs[side] != 0)
        value = np.asarray(value)
        if what == "mlp_units":
            largest = np.abs(value[counts]).max(0)
            dead = largest <= (1e-3 if activation == "swiglu" else 0)
            assert dead[0] == layer.startswith("decoder")
            expected[f"dead_units/{layer}"] = dead.mean()
        if what.endswith("_weights"):
            entropy = -(value * np.log(np.maximum(value, 1e-30))).sum(-1).mean(1)
            prefix = "cross_" if what.startswith("cross") else ""
            expected[f"{prefix}attention_entropy/{layer}"] = entropy[counts].mean()
    assert set(metrics) == set(expected)
    for key, number in expected.items():
        np.testing.assert_allclose(metrics[key], number, rtol=1e-4)
