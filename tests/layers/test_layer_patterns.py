"""Layers that differ by a repeating pattern: each has its own config, and a pattern of other tables
is a row more."""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SIZES, alone, cached, params_of
from products import slow_but

import jaxformer as jf
from jaxformer.arrays.params import check_params, count, rows
from jaxformer.config.settings import with_settings
from jaxformer.layers import pattern
from jaxformer.layers.pattern import layer_configs, repetition_of
from jaxformer.models.cost import count_text, flops_per_token
from jaxformer.models.stack import layers_of, stacked_as
from jaxformer.models.transformer import specs
from jaxformer.models.virtual import PrefixTuning, virtual_specs

forward = jax.jit(jf.forward, static_argnums=1)


@dataclass(frozen=True)
class Patterned(jf.ModelConfig):
    """A model of somebody whose layers differ in the width of their feed-forward: n is narrow, w is
    wide."""

    width_pattern: str = "n"


@pytest.fixture
def widths(monkeypatch):
    letters = {"n": lambda config: {}, "w": lambda config: {"d_ff": 2 * config.d_ff, "bias": "ffn"}}
    monkeypatch.setitem(pattern.LAYER_PATTERNS, "width_pattern", letters)


SCANNED = {"layer_loop": "scan", "remat": "full"}
WIDE = {"n_layers": 3, "width_pattern": "nw", "window": 3, "window_pattern": "wf"}


@functools.partial(jax.jit, static_argnums=1)
def slopes(params, config, batch):
    """The logits, and the gradient of the mean of their squares."""

    def loss(params):
        logits = jf.forward(params, config, **batch)
        return jnp.square(logits).mean(), logits

    gradient, logits = jax.grad(loss, has_aux=True)(params)
    return logits, gradient


def assert_same_gradients(found, expected, least=0.0):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        size = max(float(np.abs(b).max()), least)
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4 * size)


def test_each_layer_has_the_settings_of_its_letter():
    bases = {"window": 3, "window_pattern": "wwf", "rope.window_theta": 5.0}
    bases |= {"rope.scaling": "linear", "rope.factor": 2.0}
    each = layer_configs(with_settings(jf.ModelConfig(), SIZES | bases), 5)
    assert [layer.window for layer in each] == [3, 3, 0, 3, 3] and repetition_of(each) == (0, 3)
    assert [layer.rope.theta for layer in each] == [5.0, 5.0, 10_000.0, 5.0, 5.0]
    assert [layer.rope.scaling for layer in each] == ["none", "none", "linear", "none", "none"]
    assert {layer.rope.window_theta for layer in each} == {0.0}
    assert layer_configs(with_settings(jf.ModelConfig(), SIZES | bases), 5) is each


def test_layers_without_positions_have_no_rope_of_any_kind():
    settings = {"rope.pattern": "pn", "window": 3, "rope.window_theta": 5.0}
    with_positions, without = layer_configs(with_settings(jf.ModelConfig(), SIZES | settings), 2)
    assert (with_positions.positions, with_positions.rope.theta) == ("rope", 5.0)
    assert (without.positions, without.window, without.rope.window_theta) == ("none", 3, 0.0)
    scaled = {"rope.pattern": "np", "rope.scaling": "linear", "rope.factor": 2.0}
    without, with_positions = layer_configs(with_settings(jf.ModelConfig(), SIZES | scaled), 2)
    assert with_positions.rope.scaling == "linear" and without.rope.scaling == "none"


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder_decoder"])
def test_a_model_whose_layers_all_lack_positions_is_one_without_positions(family):
    lacking, none = (
        with_settings(jf.ModelConfig(), SIZES | {"family": family} | more)
        for more in ({"rope.pattern": "n"}, {"positions": "none"})
    )
    batch = alone(none)
    np.testing.assert_array_equal(
        forward(params_of(none), lacking, **batch), forward(params_of(none), none, **batch)
    )


@pytest.mark.parametrize("changes", [{}, {"window": 3}, {"window_pattern": "wf"}], ids=str)
def test_layers_that_do_not_differ_have_a_period_of_1(changes):
    assert repetition_of(layer_configs(with_settings(jf.ModelConfig(), SIZES | changes), 4)) == (
        0,
        1,
    )


def test_layers_of_equal_tables_are_one_stack_whatever_their_windows():
    plain, windows = (
        with_settings(jf.ModelConfig(), SIZES | more)
        for more in ({}, {"window": 3, "window_pattern": "wf"})
    )
    assert {p: (s.shape, s.axes) for p, s in rows(specs(plain)).items()} == {
        p: (s.shape, s.axes) for p, s in rows(specs(windows)).items()
    }


def test_layers_of_different_tables_are_a_stack_for_each_position(widths):
    config = with_settings(Patterned(), SIZES | WIDE)
    table = rows(specs(config))
    shapes = [table[f"blocks.{position}.ffn.up"].shape for position in (0, 1)]
    assert shapes == [(2, 16, 24), (1, 16, 48)]
    assert "blocks.1.ffn.up_bias" in table and "blocks.0.ffn.up_bias" not in table
    params = jf.init(config, jax.random.key(0))
    check_params(specs(config), params)
    assert count(specs(config)) == sum(leaf.size for leaf in jax.tree.leaves(params))
    layers = layers_of(params["blocks"])
    assert [layer["ffn"]["up"].shape for layer in layers] == [(16, 24), (16, 48), (16, 24)]
    np.testing.assert_array_equal(layers[2]["ffn"]["up"], params["blocks"]["0"]["ffn"]["up"][1])


@pytest.mark.parametrize("family", slow_but(["decoder", "encoder_decoder"], "decoder"))
def test_layers_of_different_tables_are_the_same_in_a_scan_and_under_a_cache(family, widths):
    """Two whole periods of two layers and one layer more, in a scan; the gradient too."""
    depth = {"family": family, "n_layers": 5 if family == "decoder" else 3}
    config = with_settings(Patterned(), SIZES | WIDE | depth)
    params, batch = params_of(config), alone(config)
    expected, gradient = slopes(params, config, batch)
    scanned, again = slopes(params, with_settings(config, SCANNED), batch)
    np.testing.assert_allclose(scanned, expected, atol=1e-4)
    np.testing.assert_allclose(cached(config, batch, compiled=True), expected, atol=1e-4)
    assert_same_gradients(again, gradient, 1e-3)


def test_leading_layers_may_differ_from_the_pattern_without_unstacking_it(widths):
    """Layers of other tables before a pattern: the pattern stays stacked, a scan and a cache give
    the same logits, and gradients agree."""
    changes = {"n_layers": 6, "width_pattern": "wwnnnn", "window": 0, "window_pattern": "w"}
    config = with_settings(Patterned(), SIZES | WIDE | changes)
    assert repetition_of(layer_configs(config, 6)) == (2, 1)
    params, batch = params_of(config), alone(config)
    sizes = [params["blocks"][p]["ffn"]["up"].shape for p in ("0", "1", "2")]
    assert sizes == [(1, 16, 48), (1, 16, 48), (4, 16, 24)] and len(params["blocks"]) == 3
    found = [layer["ffn"]["up"].shape[1] for layer in layers_of(params["blocks"])]
    assert found == [48, 48, 24, 24, 24, 24]
    expected = forward(params, config, **batch)
    scanned = with_settings(config, SCANNED)
    np.testing.assert_allclose(forward(params, scanned, **batch), expected, atol=1e-4)
    np.testing.assert_allclose(cached(config, batch, compiled=True), expected, atol=1e-4)
    stacked = stacked_as(params["blocks"], layers_of(params["blocks"]))
    jax.tree.map(np.testing.assert_array_equal, stacked, params["blocks"])


LOOPS = {"scan": {"layer_loop": "scan"}, "scan, remat": SCANNED, "remat": {"remat": "full"}}


def captured(family):
    """A model of three layers with windows, and all its intermediates with two of them replaced,
    unrolled."""
    depth = {"n_layers": 3, "n_encoder_layers": 0, "family": family}
    config = with_settings(jf.ModelConfig(), SIZES | depth | {"window": 3, "window_pattern": "wf"})
    stack = "encoder" if family == "encoder" else "decoder"
    replace = {f"{stack}.2.mlp_out": 0.5, f"{stack}.1.attention_weights": lambda w: w[..., ::-1]}
    return config, replace, run(config, replace)


def run(config, replace):
    @jax.jit
    def call(params, batch):
        return jf.inspect(params, config, capture=["*"], replace=replace, **batch)

    same = dataclasses.replace(config, layer_loop="unroll", remat="none")
    return call(params_of(same), alone(config))


@pytest.mark.parametrize(
    "loop, family", [("scan", "decoder"), ("remat", "encoder"), ("scan, remat", "encoder_decoder")]
)
def test_captures_and_replacements_are_the_same_however_layers_are_run(loop, family):
    config, replace, expected = captured(family)
    found = run(with_settings(config, LOOPS[loop]), replace)
    assert found.values.keys() == expected.values.keys()
    np.testing.assert_allclose(found.logits, expected.logits, atol=2e-4)
    for name, value in expected.values.items():
        np.testing.assert_allclose(found.values[name], value, atol=2e-4, err_msg=name)


def test_a_scan_stays_a_scan_under_a_request():
    config = with_settings(jf.ModelConfig(), SIZES | {"layer_loop": "scan"})
    batch = alone(config)
    call = jax.jit(lambda p: jf.inspect(p, config, capture=["decoder.1.mlp_out"], **batch))
    assert call.lower(params_of(config)).as_text().count("stablehlo.while") == 1


GROUPS = {"n_layers": 6, "layer_groups": 2}
DEPTH_3 = {"window": 3, "window_pattern": "wwf"}


@pytest.mark.parametrize(
    "family, more", slow_but([("encoder", {}), ("decoder", DEPTH_3)], ("decoder", DEPTH_3))
)
def test_layers_of_a_group_are_layers_with_equal_parameters(family, more):
    """In a scan and under a cache too; a gradient is the sum of those of the group's layers, and
    every layer costs what it costs with parameters of its own."""
    config = with_settings(jf.ModelConfig(), SIZES | GROUPS | more | {"family": family})
    unshared = dataclasses.replace(config, layer_groups=0)
    params, batch = params_of(config), alone(config)
    repeated = jax.tree.map(lambda leaf: np.repeat(leaf, 3, axis=0), params["blocks"])
    expected, gradient = slopes(params | {"blocks": repeated}, unshared, batch)
    sums = jax.tree.map(
        lambda leaf: np.reshape(leaf, (2, 3, *leaf.shape[1:])).sum(1), gradient["blocks"]
    )
    for other in (config, with_settings(config, SCANNED)):
        logits, shared = slopes(params, other, batch)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        assert_same_gradients(shared["blocks"], sums)
    if family == "decoder":
        np.testing.assert_allclose(cached(config, batch, compiled=True), expected, atol=1e-4)
    assert 3 * count(specs(config)["blocks"]) == count(specs(unshared)["blocks"])
    assert flops_per_token(config, 32) == flops_per_token(unshared, 32)
    own = count_text(specs(unshared)).partition(" ")[0]
    assert count_text(specs(config)).endswith(f"{own} for a token")


def test_what_needs_parameters_of_each_layer_is_refused_where_they_are_shared(widths):
    with pytest.raises(jf.ConfigError, match="a pattern or first layers differ"):
        specs(with_settings(Patterned(), SIZES | GROUPS | {"width_pattern": "nw"}))
    config = with_settings(jf.ModelConfig(), SIZES | GROUPS)
    with pytest.raises(jf.ConfigError, match=r"with model\.layer_groups=2 layers share them"):
        virtual_specs(specs(config), config, PrefixTuning(3))
