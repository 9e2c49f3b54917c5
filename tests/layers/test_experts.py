"""The sublayer of experts beside a dense loop over experts, its router beside plain NumPy, and the
messages for settings that cannot be."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import params_of
from shapes import VOCABULARY, forward, model, tokens

import jaxformer as jf
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.train import MeshConfig
from jaxformer.files import ConfigError
from jaxformer.layers.experts import EXPERTS, capacity_of, expert_specs, route
from jaxformer.layers.ffn import ACTIVATIONS
from jaxformer.layers.masks import AttentionMask, layout_of
from jaxformer.layers.output import Aux
from jaxformer.layers.sublayer import Call
from jaxformer.runs.objectives import loss_of
from jaxformer.tools.plan_memory import planned_run

SPARSE = ("loop", "ragged")
# Segments of two rows: packed, and padded.
SEGMENTS = np.array([[1] * 9 + [2] * 10 + [0] * 5, [0] * 4 + [1] * 20], np.int32)
EXPERTS_OF = {"feed_forward": "experts", "experts.n": 5, "experts.per_token": 2, "experts.d_ff": 24}
BIASED = {"bias": "all", "experts.router_bias": "learned", "activation": "gelu"}
SIGMOID = {"experts.router": "sigmoid", "experts.router_bias": "balanced", "experts.scale": 2.5}
LAYERS = {
    "top 2": {},
    "one, biases": BIASED | {"experts.per_token": 1, "experts.renormalize": False},
    "all, sigmoid": SIGMOID | {"experts.per_token": 5},
    "capacity": {"experts.capacity": 0.6},
}
RNG = np.random.default_rng(5)
X, SLOPE = (RNG.standard_normal((*SEGMENTS.shape, 32)).astype(np.float32) for _ in range(2))


def layer(name="top 2", **changes):
    """A config, the params of one layer of experts, its input, and the call of it."""
    config = model("llama", **(EXPERTS_OF | LAYERS[name] | changes))
    params = jax.tree.map(lambda leaf: leaf[0] / 2, params_of(config)["blocks"]["experts"])
    layout = layout_of(np.zeros_like(SEGMENTS), None, SEGMENTS)
    return config, params, X, Call(AttentionMask(layout, layout))


def dense_loop(params, config, x, call):
    """Every expert computes every token, and each token takes what its experts say."""
    routes, _ = route(params, config, x, call.mask)
    act = ACTIVATIONS[config.activation]
    outputs = []
    for e in range(config.experts.n):
        scale = jnp.where(routes.experts == e, routes.weights, 0).sum(-1)
        up = x @ params["up"][e]
        gate = x @ params["gate"][e] if config.gated else None
        if "up_bias" in params:
            up = up + params["up_bias"][e]
        if "gate_bias" in params:
            gate = gate + params["gate_bias"][e]
        hidden = act(up) if gate is None else act(gate) * up
        out = (hidden * scale[..., None]) @ params["down"][e]
        if "down_bias" in params:
            out = out + scale[..., None] * params["down_bias"][e]
        outputs.append(out)
    # In the order of the choices, as the sum of a token's rows is.
    stacked = jnp.stack(outputs, axis=2)  # [B, T, E, D]
    padded = jnp.concatenate([stacked, jnp.zeros_like(stacked[:, :, :1])], axis=2)
    of_choice = jnp.take_along_axis(padded, routes.experts[..., None], axis=2)
    return of_choice.sum(2)


def apply(params, config, x, call):
    return EXPERTS.apply(params, config, x, call).x


def compiled(run, config, call):
    return jax.jit(lambda params, x: run(params, config, x, call))


def slopes(run, config, params, call):
    """The output of a layer, and the gradients of its params and its input."""

    @jax.jit
    def both(params, x):
        out, back = jax.vjp(lambda p, x: run(p, config, x, call), params, x)
        return out, back(SLOPE)

    return both(params, X)


@functools.cache
def expected_slopes(name):
    config, params, _, call = layer(name)
    return slopes(dense_loop, config, params, call)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kernel", [*SPARSE, "xla"])
def test_experts_equal_a_dense_loop_forward_and_backward(name, kernel):
    config, params, _, call = layer(name, **{"experts.kernel": kernel})
    computed, gradients = slopes(apply, config, params, call)
    expected, expected_gradients = expected_slopes(name)
    np.testing.assert_allclose(computed, expected, rtol=1e-5, atol=2e-6)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert np.abs(a - b).max() <= 2e-6 * max(1, np.abs(b).max())


@pytest.mark.fast
def test_rows_of_experts_have_the_bits_of_the_dense_loop():
    config, params, x, call = layer()
    computed, expected = (compiled(run, config, call)(params, x) for run in (apply, dense_loop))
    real = SEGMENTS != 0
    assert np.array_equal(np.asarray(computed)[real], np.asarray(expected)[real])
    assert not np.asarray(computed)[~real].any()


@pytest.mark.parametrize("gated", [False, True])
def test_the_shared_expert_is_added_to_every_token(gated):
    config, params, x, call = layer(**{"experts.shared_ff": 12, "experts.shared_gate": gated})
    alone = {name: leaf for name, leaf in params.items() if "shared" not in name}
    changes = {"experts.shared_ff": 0, "experts.shared_gate": False}
    without = compiled(apply, with_settings(config, changes), call)(alone, x)
    shared = jax.tree.map(np.asarray, params["shared"])
    gate = x @ shared["gate"]
    added = (gate / (1 + np.exp(-gate)) * (x @ shared["up"])) @ shared["down"]
    if gated:
        added = added / (1 + np.exp(-(x @ params["shared_gate"])))
    np.testing.assert_allclose(compiled(apply, config, call)(params, x), without + added, atol=1e-5)


@pytest.mark.parametrize("kernel", ["loop", "xla"])
def test_the_result_of_a_text_does_not_depend_on_its_neighbors(kernel):
    config = model("experts", **{"experts.kernel": kernel})
    params, rows = params_of(config), tokens()
    segments = np.array([[1] * 8 + [2] * 8 + [0] * 8, [0] * 16 + [1] * 8], np.int32)
    packed = np.asarray(forward(params, config, rows, segment_ids=segments))
    pieces = [(0, slice(0, 8)), (0, slice(8, 16)), (1, slice(16, 24))]
    alone = forward(params, config, np.stack([rows[piece] for piece in pieces]))
    np.testing.assert_allclose(np.stack([packed[piece] for piece in pieces]), alone, atol=2e-5)


def test_a_cached_token_goes_to_the_experts_of_the_full_forward():
    config = model("experts in groups after a dense layer", **{"experts.capacity": 0.0})
    params, rows = params_of(config), tokens(3, 8)
    out = jf.generate(params, config, rows, 8, temperature=0)
    logits = forward(params, config, np.concatenate([rows, np.asarray(out)], axis=1)[:, :-1])
    assert np.array_equal(np.argmax(logits[:, 7:], axis=-1), out)


def numpy_route(logits, bias, config):
    """The experts of each token as a set with their weights, by DeepSeek-V3's rule."""
    scores = 1 / (1 + np.exp(-logits))
    chosen = []
    for token, select in zip(scores, scores + bias, strict=True):
        groups = select.reshape(config.experts.groups, -1)
        best = np.sort(groups, axis=1)[:, -2:].sum(1)
        top = np.argsort(-best)[: config.experts.top_groups]
        allowed = np.repeat(np.isin(np.arange(config.experts.groups), top), groups.shape[1])
        experts = np.argsort(-np.where(allowed, select, -np.inf))[: config.experts.per_token]
        weights = token[experts] / token[experts].sum() * config.experts.scale
        chosen.append(dict(zip(experts.tolist(), weights.tolist(), strict=True)))
    return chosen


@pytest.mark.fast
def test_groups_and_a_balanced_bias_select_experts_and_leave_their_weights():
    groups = {"experts.n": 12, "experts.per_token": 4, "experts.groups": 4, "experts.top_groups": 2}
    config = model("llama", **EXPERTS_OF | SIGMOID | groups)
    rng = np.random.default_rng(0)
    params = {
        "router": rng.standard_normal((32, 12)).astype(np.float32) / 4,
        "router_bias": rng.standard_normal(12).astype(np.float32),
    }
    x = rng.standard_normal((1, 40, 32)).astype(np.float32)
    layout = layout_of(jnp.zeros((1, 40), jnp.int32), None, None)
    mask = AttentionMask(layout, layout)
    routes, _ = jax.jit(lambda params, x: route(params, config, x, mask))(params, x)
    expected = numpy_route(x[0] @ params["router"], params["router_bias"], config)
    for token, (experts, weights) in enumerate(
        zip(routes.experts[0], routes.weights[0], strict=True)
    ):
        computed = dict(zip(experts.tolist(), weights.tolist(), strict=True))
        assert computed == pytest.approx(expected[token], rel=1e-4)


@pytest.mark.fast
def test_softmax_weights_are_those_of_the_top_logits_where_renormalized():
    config, params, x, call = layer()
    routes, _ = route(params, config, x, call.mask)
    logits = np.asarray(x @ params["router"])
    top = np.sort(logits, axis=-1)[..., -2:]
    softmax = np.exp(top) / np.exp(top).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.sort(routes.weights, axis=-1), softmax, rtol=1e-4)
    raw, _ = route(params, with_settings(config, {"experts.renormalize": False}), x, call.mask)
    of_all = np.sort(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), axis=-1)[..., -2:]
    np.testing.assert_allclose(np.sort(raw.weights, axis=-1), of_all, rtol=1e-4)


@pytest.mark.fast
def test_capacity_keeps_first_choices_in_the_order_of_tokens_and_counts_what_it_drops():
    config, params, x, call = layer(**{"experts.capacity": 0.5})
    free, _ = route(params, config, x, call.mask, capped=False)
    kept, aux = route(params, config, x, call.mask)
    capacity = capacity_of(config, x.shape[1])
    assert capacity == 4
    dropped = 0
    for row in range(2):
        loads = dict.fromkeys(range(5), 0)
        for choice, token in itertools.product(range(2), range(x.shape[1])):
            expert = int(free.experts[row, token, choice])
            if expert == 5:  # padding
                continue
            loads[expert] += 1
            expected = expert if loads[expert] <= capacity else 5
            dropped += expected == 5
            assert int(kept.experts[row, token, choice]) == expected
    pairs = 2 * (SEGMENTS != 0).sum()
    assert float(aux.metrics["expert_dropped"][0]) == pytest.approx(dropped / pairs)
    assert dropped


def sums_of(aux: Aux):
    return {name: float(total / weight) for name, (total, weight) in aux.metrics.items()}


@pytest.mark.fast
def test_the_metrics_of_the_router_are_those_of_plain_numpy():
    config, params, x, call = layer(**{"experts.z_loss": 0.2})
    routes, aux = route(params, config, x, call.mask)
    real, k, number = SEGMENTS != 0, 2, 5
    logits = np.asarray(x @ params["router"], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    routed = (np.asarray(routes.experts)[..., None] == np.arange(number)).any(2)
    load = routed[real].mean(0) * number / k
    balance = (load * p[real].mean(0)).sum()
    z = (np.log(np.exp(logits).sum(-1)) ** 2)[real].mean()
    metrics = sums_of(aux)
    assert [metrics[f"expert_load_{e}"] for e in range(number)] == pytest.approx(load.tolist())
    assert metrics["expert_load_max"] == pytest.approx(load.max())
    assert metrics["router_balance"] == pytest.approx(balance, rel=1e-5)
    assert metrics["router_z"] == pytest.approx(z, rel=1e-4)
    entropy = -(p * np.log(p)).sum(-1)[real].mean()
    assert metrics["router_entropy"] == pytest.approx(entropy, rel=1e-4)
    loss, weight = aux.losses["router_loss"]
    expected = 0.01 * balance + 0.2 * z
    assert float(loss / weight) == pytest.approx(expected, rel=1e-4)


def test_the_loss_has_the_sums_of_the_router_and_nats_beside_it():
    config = model("experts")
    text = tokens(4, 25)
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:]}
    batch["weights"] = np.ones((4, 24), np.float32)
    sums = jax.jit(loss_of("causal", config))(params_of(config), batch, None)
    means = {name: float(total / weight) for name, (total, weight) in sums.items()}
    assert means["loss"] == pytest.approx(means["nats"] + means["router_loss"], rel=1e-6)
    loads = [means[f"expert_load_{e}"] for e in range(config.experts.n)]
    assert np.mean(loads) == pytest.approx(1)


def test_forward_mode_and_vmap():
    config, params, x, call = layer(**{"experts.kernel": "xla"})

    def tangent(run):
        layer_of = compiled(run, config, call)
        return jax.jvp(lambda x: layer_of(params, x), (x,), (SLOPE,))[1]

    np.testing.assert_allclose(tangent(apply), tangent(dense_loop), atol=1e-5)
    config = model("experts", n_layers=1)
    params, rows = params_of(config), tokens(3)
    each = jax.jit(jax.vmap(lambda row: jf.forward(params, config, row[None])[0]))(rows)
    np.testing.assert_allclose(each, forward(params, config, rows), atol=1e-5)


def test_a_capacity_below_one_token_is_refused_with_the_least_that_works():
    config = model("experts", **{"experts.capacity": 0.01})
    with pytest.raises(ConfigError) as refusal:
        jax.eval_shape(lambda params: jf.forward(params, config, tokens()), params_of(config))
    assert str(refusal.value) == (
        "model.experts.capacity=0.01 lets an expert take 0.12 tokens of a row of 24, below 1: the"
        " mean is 12 tokens, so set it to 0.0833 or more, or to 0, which drops none."
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    "expert, changes, message",
    [
        (4, {}, "mesh.expert=4 does not divide model.experts.n=6: choose one of 1, 2, 3, 6."),
        (2, {"feed_forward": "ffn", "experts.n": 0}, "mesh.expert=2 divides experts, and this"),
    ],
)
def test_a_mesh_that_does_not_divide_the_experts_is_refused(expert, changes, message):
    config = model("llama", **(EXPERTS_OF | {"experts.n": 6} | changes))
    run = RunConfig(model=config, mesh=MeshConfig(data=1, expert=expert))
    with pytest.raises(ConfigError) as refusal:
        planned_run(run, "cpu", expert)
    assert message in str(refusal.value)


@pytest.mark.fast
def test_experts_are_counted_as_far_as_tokens_use_them():
    from jaxformer.models.cost import count_text, flops_per_token, parameter_count

    config = model("llama", **EXPERTS_OF)
    dense = model("llama", d_ff=48)
    router = 2 * config.d_model * config.experts.n
    assert flops_per_token(config, 24) == flops_per_token(dense, 24) + 6 * router
    assert count_text(jf.specs(dense)).endswith("k parameters")
    assert count_text(jf.specs(config)).endswith("k parameters, 19.7k for a token")
    experts = 2 * 3 * 5 * 32 * 24
    assert parameter_count(config) == parameter_count(dense) - 2 * 3 * 32 * 48 + experts + router


@pytest.mark.fast
def test_a_pattern_and_leading_layers_say_which_layers_have_experts():
    from jaxformer.layers.pattern import layer_configs

    config = model(
        "llama",
        **(EXPERTS_OF | {"experts.dense_layers": 1, "experts.pattern": "ed", "n_layers": 5}),
    )
    kinds = [one.feed_forward for one in layer_configs(config, 5)]
    assert kinds == ["ffn", "ffn", "experts", "ffn", "experts"]
    assert set(expert_specs(config)) == {"router", "gate", "up", "down"}
    logits = jax.eval_shape(lambda params: jf.forward(params, config, tokens()), params_of(config))
    assert logits.shape[-1] == VOCABULARY
