"""Seeing inside: the maps are those of the forward pass, intermediates are what a hand computes,
and patching patches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SIZES, alone, laid_out, params_of
from products import slow_but

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.layers.ffn import ffn
from jaxformer.layers.head import head
from jaxformer.layers.norm import norm
from jaxformer.models.families import encode
from jaxformer.models.inputs import inputs_of
from jaxformer.models.stack import layers_of

VARIANTS = {
    "decoder": {"family": "decoder"},
    "encoder": {
        "family": "encoder",
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "post",
    },
    "encoder-decoder": {"family": "encoder_decoder", "positions": "t5", "source_window": 2}
    | {"embedding.source": "separate"},
    "sinks, window": {
        "attention.sinks": True,
        "window": 3,
        "window_pattern": "wf",
        "attention.kernel": "blocked",
    },
    "scanned": {
        "layer_loop": "scan",
        "remat": "full",
        "residual": "parallel",
        "norm_placement": "sandwich",
    },
}
forward = jax.jit(jf.forward, static_argnums=1)
maps_of = jax.jit(jf.attention_maps, static_argnums=1, static_argnames="layers")
inspect = jax.jit(jf.inspect, static_argnums=(1, 3))


@functools.cache
def case(name):
    config = with_settings(jf.ModelConfig(), SIZES | VARIANTS[name])
    return params_of(config), config, laid_out(config)


def stacks(config):
    return [
        name
        for name in ("encoder", "decoder")
        if name == config.family or config.family == "encoder_decoder"
    ]


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder", "scanned"))
def test_the_maps_come_with_the_logits_of_the_forward_pass(name):
    """To the bit, where the forward pass is the same program: unrolled, with plain attention."""
    params, config, batch = case(name)
    found, expected = maps_of(params, config, **batch).logits, forward(params, config, **batch)
    if config.layer_loop != "scan" and config.attention.kernel == "auto":
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder"))
def test_the_weights_of_a_real_query_sum_to_1_and_none_falls_on_what_it_may_not_see(name):
    params, config, batch = case(name)
    maps = maps_of(params, config, **batch)
    segments = {"decoder": batch["segment_ids"]}
    segments["encoder"] = (
        batch["segment_ids" if config.family == "encoder" else "source_segment_ids"]
        if (config.family != "decoder")
        else None
    )
    assert [
        stack for stack in ("encoder", "decoder") if getattr(maps, stack) is not None
    ] == stacks(config)
    for stack in stacks(config):
        ids, weights = segments[stack], np.asarray(getattr(maps, stack))
        assert (
            weights.shape == (2, 4, 4, ids.shape[1], ids.shape[1]) and weights.dtype == np.float32
        )
        own = (ids[:, :, None] == ids[:, None]) & (ids[:, None] != 0)
        own &= np.tril(own) if stack == "decoder" else own
        check_weights(weights, own, ids, config)
        assert (
            (weights[:, np.broadcast_to(own[:, None], weights.shape[1:])] > 0).all()
            or config.window
            or config.source_window
        )
    if config.family == "encoder_decoder":
        ids, sources = batch["segment_ids"], batch["source_segment_ids"]
        check_weights(
            np.asarray(maps.cross),
            (ids[:, :, None] == sources[:, None]) & (sources[:, None] != 0),
            ids,
            config,
        )
    else:
        assert maps.cross is None


def check_weights(weights, own, ids, config):
    assert (weights[:, ~np.broadcast_to(own[:, None], weights.shape[1:])] == 0).all()
    sums = np.moveaxis(weights.sum(-1), 2, -1)[:, ids != 0]
    if config.attention.sinks:
        assert ((sums > 0) & (sums < 1 - 1e-4)).all()
    else:
        np.testing.assert_allclose(sums, 1, atol=1e-6)


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder"))
def test_a_layer_of_the_maps_alone_is_that_layer(name):
    params, config, batch = case(name)
    whole, one = maps_of(params, config, **batch), maps_of(params, config, layers=(1,), **batch)
    for stack in (*stacks(config), *(["cross"] if config.family == "encoder_decoder" else [])):
        np.testing.assert_allclose(getattr(one, stack)[0], getattr(whole, stack)[1], atol=1e-6)


def test_the_weights_are_the_softmax_of_queries_and_keys_of_the_first_layer():
    config = with_settings(
        jf.ModelConfig(), SIZES | {"positions": "none", "n_kv_heads": 0, "norm": "none"}
    )
    params, tokens = params_of(config), alone(config)["tokens"]
    layer = jax.tree.map(lambda p: p[0], params["blocks"]["attention"])
    x = np.asarray(params["embed"]["tokens"])[tokens]
    q, k = (np.einsum("btd,dnh->bnth", x, layer[name]) for name in "qk")
    scores = np.where(
        np.tril(np.ones((6, 6), bool)), np.einsum("bnth,bnsh->bnts", q, k) / 2, -np.inf
    )
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    found = jf.attention_maps(params, config, tokens).decoder[0]
    np.testing.assert_allclose(found, powers / powers.sum(-1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder", "scanned"))
def test_intermediates_add_up_to_what_the_model_computes(name):
    """The last residual through final norm and head is the logits; a residual is the one before and
    its sublayers."""
    params, config, batch = case(name)
    logits, values = inspect(
        params,
        config,
        batch["tokens"],
        ("*_out", "residual"),
        **{k: v for k, v in batch.items() if k != "tokens"},
    )
    inputs = inputs_of(batch)
    last = values[f"{stacks(config)[-1]}.1.residual"]
    if config.norm_placement != "post":
        last = norm(params["final_norm"], config, last)
    np.testing.assert_allclose(
        head(params, config, last, inputs.layout), logits, rtol=1e-4, atol=1e-4
    )
    if config.norm_placement == "pre":
        stack = stacks(config)[-1]
        before, after = (values[f"{stack}.{i}.residual"] for i in (0, 1))
        outs = [
            values[f"{stack}.1.{what}"]
            for what in ("attention_out", "cross_out", "mlp_out")
            if f"{stack}.1.{what}" in values
        ]
        np.testing.assert_allclose(after - before, sum(outs), rtol=1e-3, atol=1e-4)
        layer = layers_of(params["blocks"])[1]
        read = norm(layer["ffn_norm"], config, after - outs[-1])
        np.testing.assert_allclose(ffn(layer["ffn"], config, read), outs[-1], rtol=1e-3, atol=1e-4)
    if config.family == "encoder_decoder":
        encoded = norm(params["encoder"]["final_norm"], config, values["encoder.1.residual"])
        np.testing.assert_allclose(encoded, encode(params, config, inputs).x, rtol=1e-4, atol=1e-4)


NAMES = {
    "decoder": {"attention_weights", "attention_out", "mlp_units", "mlp_out", "residual"},
    "encoder": {"attention_weights", "attention_out", "mlp_units", "mlp_out", "residual"},
    "cross": {"cross_weights", "cross_out"},
}


@pytest.mark.parametrize(
    "name", slow_but(["decoder", "encoder", "encoder-decoder"], "encoder-decoder")
)
def test_a_pattern_keeps_every_name_it_fits(name):
    params, config, batch = case(name)
    expected = {
        f"{stack}.{i}.{what}" for stack in stacks(config) for i in (0, 1) for what in NAMES[stack]
    }
    if config.family == "encoder_decoder":
        expected |= {f"decoder.{i}.{what}" for i in (0, 1) for what in NAMES["cross"]}
    assert set(jf.inspect(params, config, capture=["*"], **batch).values) == expected
    first = stacks(config)[0]
    for capture, kept in {
        "residual": {of for of in expected if of.endswith(".residual")},
        f"{first}.1.*": {of for of in expected if of.startswith(f"{first}.1.")},
        f"{first}.0.mlp_out": {f"{first}.0.mlp_out"},
    }.items():
        assert set(jf.inspect(params, config, capture=[capture], **batch).values) == kept


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder"))
def test_an_intermediate_put_in_its_own_place_changes_nothing(name):
    params, config, batch = case(name)
    logits, values = jf.inspect(params, config, capture=["*"], **batch)
    again = jf.inspect(params, config, replace=values, **batch).logits
    np.testing.assert_allclose(again, logits, atol=1e-5)
    same = jf.inspect(
        params, config, replace={name: lambda value: value for name in values}, **batch
    ).logits
    np.testing.assert_array_equal(same, logits)


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder"))
def test_the_last_residual_of_another_run_gives_that_runs_logits(name):
    params, config, batch = case(name)
    other = dict(batch, tokens=(batch["tokens"] + 3) % 37)
    place = f"{stacks(config)[-1]}.1.residual"
    there = jf.inspect(params, config, capture=[place], **other)
    patched = jf.inspect(params, config, replace={place: there.values[place]}, **batch)
    np.testing.assert_allclose(patched.logits, there.logits, atol=1e-5)
    assert jnp.abs(patched.logits - jf.forward(params, config, **batch)).max() > 1e-2


def test_a_sublayer_silenced_is_a_model_without_it():
    """A function or a number takes the place of an intermediate, and the capture is what was put
    there."""
    params, config, batch = case("decoder")
    silenced = jax.tree.map(lambda leaf: leaf, params)
    silenced["blocks"]["ffn"]["down"] = params["blocks"]["ffn"]["down"].at[1].set(0)
    expected = jf.forward(silenced, config, **batch)
    for nothing in (0.0, lambda value: 0 * value, jnp.zeros(16)):
        found = jf.inspect(
            params, config, capture=["mlp_out"], replace={"decoder.1.mlp_out": nothing}, **batch
        )
        np.testing.assert_allclose(found.logits, expected, atol=1e-5)
        assert (
            not found.values["decoder.1.mlp_out"].any() and found.values["decoder.0.mlp_out"].any()
        )


def test_one_position_can_be_patched_and_only_later_ones_move():
    params, config, _ = case("decoder")
    tokens = alone(config)["tokens"]
    found = jf.inspect(
        params, config, tokens, replace={"decoder.0.residual": lambda x: x.at[:, 3].add(1.0)}
    ).logits
    moved = jnp.abs(found - jf.forward(params, config, tokens)).max((0, 2))
    assert (moved[:3] == 0).all() and (moved[3:] > 1e-3).all()


def test_weights_can_be_replaced_and_the_values_follow_them():
    """Each token made to look at itself alone: a model with a window of 1."""
    params, config, _ = case("decoder")
    tokens = alone(config)["tokens"]
    eye = {f"decoder.{i}.attention_weights": jnp.eye(tokens.shape[1]) for i in (0, 1)}
    narrow = with_settings(jf.ModelConfig(), SIZES | {"window": 1})
    np.testing.assert_allclose(
        jf.inspect(params, config, tokens, replace=eye).logits,
        jf.forward(params, narrow, tokens),
        atol=1e-5,
    )


def test_the_gradient_of_a_logit_to_an_intermediate_is_one_of_a_replaced_array():
    params, config, _ = case("decoder")
    tokens = alone(config)["tokens"]
    place = "decoder.0.residual"
    value = jf.inspect(params, config, tokens, [place]).values[place]
    slope = jax.jit(
        jax.grad(
            lambda x: jf.inspect(params, config, tokens, replace={place: x}).logits[:, 3].sum()
        )
    )(value)
    assert (jnp.abs(slope).max((0, 2))[:4] > 0).all() and (slope[:, 4:] == 0).all()


@pytest.mark.parametrize(
    "capture, replace, said",
    [
        (["decoder.7.mlp_out"], None, r"no 'decoder\.7\.mlp_out'.*decoder\.0\.attention_out"),
        (["cross_out"], None, "no 'cross_out'"),
        (["encoder.*"], None, r"no 'encoder\.\*'"),
        ([], {"mlp_out": 0.0}, "no 'mlp_out'"),
    ],
)
def test_a_name_that_the_model_has_not_is_refused_with_those_it_has(capture, replace, said):
    params, config, batch = case("decoder")
    with pytest.raises(jf.ConfigError, match=said):
        jf.inspect(params, config, capture=capture, replace=replace, **batch)


@pytest.mark.parametrize("layers", [[2], [-1], [0, 5]])
def test_a_layer_that_no_stack_has_is_refused(layers):
    params, config, batch = case("decoder")
    with pytest.raises(jf.ConfigError, match=r"not among 0 \.\. 1"):
        jf.attention_maps(params, config, layers=layers, **batch)


def test_an_encoder_deeper_than_its_decoder_gives_the_maps_of_both():
    config = with_settings(
        jf.ModelConfig(),
        SIZES | {"family": "encoder_decoder", "n_layers": 1, "n_encoder_layers": 3},
    )
    maps = jf.attention_maps(params_of(config), config, **alone(config))
    assert (len(maps.encoder), len(maps.decoder), len(maps.cross)) == (3, 1, 1)
    last = jf.attention_maps(params_of(config), config, layers=[2], **alone(config))
    assert len(last.encoder) == 1 and last.decoder is None and last.cross is None


def test_nothing_asked_for_is_the_ordinary_program():
    params, config, batch = case("scanned")
    found = jax.jit(lambda p: jf.inspect(p, config, **batch).logits).lower(params).as_text()
    assert (
        found.count("while")
        == jax.jit(lambda p: jf.forward(p, config, **batch)).lower(params).as_text().count("while")
        > 0
    )
