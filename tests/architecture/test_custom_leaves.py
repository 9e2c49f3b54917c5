"""A leaf that is no array is used wherever a weight is, and is the array that it stands for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_leaves import LowRank, low_rank, made
from families import SIZES, alone
from jax.sharding import PartitionSpec

import jaxformer as jf
from jaxformer.adapters.adapted_params import adapt_specs
from jaxformer.arrays.params import check_params, count, init_params, rows
from jaxformer.arrays.sharding import PARAMETERS, partition
from jaxformer.config.settings import with_settings
from jaxformer.losses import cross_entropy as losses
from jaxformer.losses.heads import head_loss
from jaxformer.models.transformer import specs

MODELS = {
    "tied decoder": {"tied_head": True, "window": 3, "window_pattern": "wf"},
    "encoder-decoder": {
        "family": "encoder_decoder",
        "positions": "learned",
        "bias": "all",
        "head.bias": True,
    },
}
forward = jax.jit(jf.forward, static_argnums=1)


@functools.cache
def case(name):
    """(table, params, config, batch): every matrix of the model is such a leaf."""
    config = with_settings(jf.ModelConfig(), SIZES | MODELS[name])
    matrices = [path for path, spec in rows(specs(config)).items() if spec.is_matrix]
    table = adapt_specs(specs(config), dict.fromkeys(matrices, low_rank))
    return table, init_params(table, jax.random.key(0)), config, alone(config)


def test_the_table_has_the_leafs_own_rows():
    plain = rows(specs(case("tied decoder")[2]))
    table, params, config, _ = case("tied decoder")
    found = rows(table)
    leaf = params["blocks"]["attention"]["out"]
    assert isinstance(leaf, LowRank) and leaf.shape == plain["blocks.attention.out"].shape
    assert found["blocks.attention.out.a"].shape == (2, 4, 4, 2) and leaf.a.shape == (2, 4, 4, 2)
    assert found["blocks.attention.out.b"].axes == ("layers", "rank", "embed")
    assert {spec.trainable for path, spec in found.items() if path.endswith(".weight")} == {False}
    assert all(spec.trainable for path, spec in found.items() if not path.endswith(".weight"))
    assert count(table) == sum(part.size for part in jax.tree.leaves(params)) > count(specs(config))
    parts = jax.tree.map(lambda part: (part.shape, part.dtype), params)
    assert jax.tree.map(lambda spec: (spec.shape, jnp.dtype(spec.dtype)), table) == parts
    spec, sizes = found["blocks.ffn.up.a"], {"data": 1, "fsdp": 2, "tensor": 2}
    assert partition(spec.shape, spec.axes, PARAMETERS, sizes) == PartitionSpec(None, "fsdp", None)
    check_params(table, params)
    check_params(specs(config), params)


def test_a_pattern_changes_the_leaves_that_it_fits_and_no_others():
    config = with_settings(jf.ModelConfig(), SIZES)
    table = adapt_specs(specs(config), {"blocks.attention.[qv]": low_rank, "*": lambda spec: spec})
    changed = {path.rpartition(".")[0] for path in rows(table).keys() - rows(specs(config)).keys()}
    assert changed == {"blocks.attention.q", "blocks.attention.v"}
    with pytest.raises(
        jf.ConfigError, match=r"'blocks\.atention\.\*' fits none of the .* embed\.tokens"
    ):
        adapt_specs(specs(config), {"blocks.atention.*": low_rank})


@pytest.mark.parametrize(
    ("name", "loop"), [("tied decoder", "unroll"), ("encoder-decoder", "scan")]
)
def test_the_logits_are_those_of_the_arrays(name, loop):
    _, params, config, batch = case(name)
    config = with_settings(jf.ModelConfig(), SIZES | MODELS[name] | {"layer_loop": loop})
    np.testing.assert_allclose(
        forward(params, config, **batch), forward(made(params), config, **batch), atol=1e-4
    )


@pytest.mark.parametrize("tiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_the_arrays(tiled, monkeypatch):
    _, params, config, batch = case("tied decoder")
    targets = jnp.asarray(batch["tokens"][:, ::-1])
    batch = batch | {"targets": targets, "weights": jnp.ones(targets.shape)}
    if tiled:
        monkeypatch.setattr(losses, "DENSE_LOGITS", 0)
        monkeypatch.setitem(losses.TILE_ROWS, "cpu", 8)

    def objective(params):
        return head_loss(params, config, batch, label_smoothing=0.1)["loss"][0]

    value, grads = jax.jit(jax.value_and_grad(objective))(params)
    expected, wanted = jax.jit(jax.value_and_grad(lambda p: objective(made(p))))(params)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for (path, a), b in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(
            a, b, atol=1e-4 * max(float(jnp.abs(b).max()), 1e-2), err_msg=str(path)
        )


def test_a_model_directory_refuses_it_by_name(tmp_path):
    _, params, config, _ = case("tied decoder")
    with pytest.raises(jf.ConfigError, match=r"blocks\.attention\.k is a LowRank\. Merge each"):
        jf.save_pretrained(tmp_path / "model", params, config)
