"""The gated delta rule and Mamba-2 beside their recurrences, token by token in float64; what
another text of a row, the length of chunks and a long text change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer as jf
from jaxformer.layers.block import MIXERS
from jaxformer.layers.masks import AttentionMask, layout_of
from jaxformer.layers.recurrence import Recurrence, recur
from jaxformer.layers.sublayer import Call
from jaxformer.models.transformer import specs

SIZES = dict(vocab_size=61, d_model=24, n_layers=1, n_heads=4, d_ff=32, max_length=256)
CONFIGS = {
    "head": ("delta", jf.Recurrent(key_heads=2, key_dim=5, value_dim=7, chunk=16)),
    "channel": (
        "delta",
        jf.Recurrent(key_dim=5, value_dim=6, convolution=3, decay="channel", chunk=16),
    ),
    "latents": (
        "delta",
        jf.Recurrent(
            key_dim=5,
            value_dim=6,
            convolution=3,
            decay="channel",
            chunk=16,
            rank=3,
            gate="sigmoid",
            negative_eigenvalues=True,
            norm_eps=0.1,
        ),
    ),
    "mamba2": ("mamba2", jf.Recurrent(key_heads=2, key_dim=5, value_dim=7, chunk=16)),
}
EACH = pytest.mark.parametrize("kind", CONFIGS)


def model(kind="head", **changes):
    mixer, record = CONFIGS[kind]
    record = dataclasses.replace(record, **changes)
    return jf.ModelConfig(**SIZES, mixer=mixer, positions="none", recurrent=record)


@functools.cache
def layer(kind):
    """The parameters of one layer, larger than the initial ones, and its input [2, 40, D]."""
    config = model(kind)
    rng = np.random.default_rng(0)
    params = jf.init(config, jax.random.key(1))["blocks"][config.mixer]
    params = jax.tree.map(lambda leaf: np.float32(leaf[0]), params)
    biases = [name for name in params if name.endswith(("_taps_bias", "_down"))]
    for name in ("q", "k", "v", "gate", "decay", "rate", "out", "skip", *biases):
        if name in params:
            params[name] = rng.standard_normal(params[name].shape).astype(np.float32) / 3
    params["step_bias"] = params["step_bias"] + 2
    x = rng.standard_normal((2, 40, 24)).astype(np.float32)
    return jax.tree.map(jnp.asarray, (params, x))


def applied(config, params, x, segments=None):
    mask = AttentionMask(*[layout_of(x[..., 0], None, segments)] * 2)
    return MIXERS[config.mixer].apply(params, config, x, Call(mask)).x


def one_by_one(config, params, x):
    """The formulas of the layer, a token after the other, for one text in each row."""
    taps = config.recurrent.convolution

    def convolved(name):
        y = jnp.einsum("btd,dnh->btnh", x, params[name])
        y = jnp.pad(y, [(0, 0), (taps - 1, 0), (0, 0), (0, 0)])
        w = params[f"{name}_taps"]
        y = sum(y[:, i : i + x.shape[1]] * w[..., i] for i in range(taps))
        return jax.nn.silu(y + params.get(f"{name}_taps_bias", 0))

    def unit(a):
        return a / jnp.sqrt(jnp.square(a).sum(-1, keepdims=True) + 1e-6)

    def scanned(token, *read):
        read = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), read)
        state = jnp.zeros((*v.shape[:1], v.shape[2], q.shape[3], v.shape[3]))
        return jnp.moveaxis(jax.lax.scan(token, state, read)[1], 0, 1)

    def delta_token(state, read):
        q, k, v, decay, rate = read
        state = decay[..., None] * state
        error = v - jnp.einsum("bnhw,bnh->bnw", state, k)
        state = state + jnp.einsum("bn,bnh,bnw->bnhw", rate, k, error)
        return state, jnp.einsum("bnhw,bnh->bnw", state, q)

    def mamba2_token(state, read):
        q, k, v, step = read
        decay = jnp.exp(-jnp.exp(params["log_speed"]) * step)
        state = decay[..., None, None] * state + jnp.einsum("bn,bnh,bnw->bnhw", step, k, v)
        return state, jnp.einsum("bnhw,bnh->bnw", state, q)

    def normed(a):
        eps = config.recurrent.norm_eps or config.norm_eps
        return a / jnp.sqrt(jnp.square(a).mean(-1, keepdims=True) + eps)

    def latent(name):
        return x @ params[f"{name}_down"] if config.recurrent.rank else x

    v = convolved("v")
    group = v.shape[2] // params["q"].shape[1]
    q, k = (jnp.repeat(convolved(name), group, axis=2) for name in "qk")
    gate = jnp.einsum("btd,dnh->btnh", latent("gate"), params["gate"])
    gate = getattr(jax.nn, config.recurrent.gate)(gate)
    if config.mixer == "mamba2":
        step = jax.nn.softplus(jnp.einsum("btd,dn->btn", x, params["decay"]) + params["step_bias"])
        out = scanned(mamba2_token, q, k, v, step) + params["skip"][:, None] * v
        groups = (*x.shape[:2], params["q"].shape[1], -1)
        out = normed((out * gate).reshape(groups)).reshape(out.shape) * params["norm"]
        return jnp.einsum("btnh,nhd->btd", out, params["out"])
    equation = "btd,dnh->btnh" if params["decay"].ndim == 3 else "btd,dn->btn"
    step = jnp.einsum(equation, latent("decay"), params["decay"]) + params["step_bias"]
    step = jax.nn.softplus(step)
    if step.ndim == 3:
        step = step[..., None]
    decay = jnp.exp(-jnp.exp(params["log_speed"])[:, None] * step)
    rate = jax.nn.sigmoid(jnp.einsum("btd,dn->btn", x, params["rate"]))
    rate = rate * (2 if config.recurrent.negative_eigenvalues else 1)
    out = scanned(delta_token, unit(q), unit(k), v, decay, rate) / np.sqrt(q.shape[3])
    return jnp.einsum("btnh,nhd->btd", normed(out) * params["norm"] * gate, params["out"])


@EACH
def test_outputs_and_gradients_are_those_of_the_recurrence_in_float64(kind, monkeypatch):
    config = model(kind)
    params, x = layer(kind)

    def value(run, params, x):
        return jnp.square(run(config, params, x)).mean()

    def derived(run):
        return jax.value_and_grad(functools.partial(value, run), (0, 1))

    found = jax.jit(derived(applied))(params, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))
        exact = derived(one_by_one)(*wide)
        # What the layer computes in float32 whatever its inputs are.
        monkeypatch.setattr(jnp, "float32", jnp.float64)
        found_wide = jax.jit(derived(applied))(*wide)
        monkeypatch.undo()
        exact, found_wide = jax.tree.map(np.asarray, (exact, found_wide))

    def close(tolerance, found, expected):
        apart = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert apart < tolerance, apart

    # The recurrence in float32 is up to 3.4e-6 away, where terms cancel.
    jax.tree.map(functools.partial(close, 1e-5), found, exact)
    jax.tree.map(functools.partial(close, 1e-12), found_wide, exact)


@pytest.mark.parametrize("kind", ["head", "mamba2"])
def test_products_in_16_bits_are_within_their_rounding(kind):
    """The state, the decays and the solution of a chunk are float32 all the same."""
    config = model(kind)
    params, x = layer(kind)

    def gradient(dtype):
        def value(x):
            return jnp.square(applied(config, params, x.astype(dtype)).astype(jnp.float32)).mean()

        return jax.jit(jax.grad(value))(x)

    exact = gradient(jnp.float32)
    found = gradient(jnp.bfloat16)
    assert 1e-4 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.05


@EACH
def test_the_length_of_chunks_changes_nothing(kind):
    params, x = layer(kind)
    expected = applied(model(kind), params, x)
    for chunk in (1, 7, 64):
        found = applied(model(kind, chunk=chunk), params, x)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@EACH
def test_a_token_depends_on_those_before_it_in_its_text_alone(kind):
    """By gradient, and exactly 0 for all others: texts of 9, 14 and 12 tokens, and padding before,
    between and behind them."""
    params, x = layer(kind)
    segments = np.repeat([0, 1, 2, 0, 3, 0], [1, 9, 14, 1, 12, 3])[None]
    x = x[:1]

    @jax.jit
    def moved(x):
        out, pull = jax.vjp(lambda x: applied(model(kind), params, x, segments)[0], x)
        # [T, T]: of each output, how much it moves with each token.
        seeds = jnp.eye(len(out))[..., None] * jnp.ones(out.shape[-1])
        return jnp.abs(jax.vmap(lambda seed: pull(seed)[0][0])(seeds)).max(-1)

    same = (segments[0][:, None] == segments[0]) & (segments[0] != 0)
    real = segments[0] != 0
    found = np.asarray(moved(x))
    np.testing.assert_array_equal(found[real] > 0, np.tril(same)[real])


def test_equal_keys_without_decay_are_solved_exactly():
    """A chunk of one key that is corrected fully each time: the state has the last value."""
    t = 64
    keys = jnp.ones((1, t, 1, 1))
    values = jnp.asarray(np.random.default_rng(0).standard_normal((1, t, 1, 3)), jnp.float32)
    still = jnp.zeros((1, t, 1, 1))
    tokens = Recurrence(keys, keys, values, still, jnp.ones((1, t, 1)), jnp.zeros((1, t), bool))
    out, state = recur(tokens, jnp.zeros((1, 1, 1, 3)), t)
    np.testing.assert_allclose(out, values, atol=1e-5)
    np.testing.assert_allclose(state[0, 0, 0], values[0, -1, 0], atol=1e-5)


@pytest.mark.parametrize("corrected", [True, False])
def test_a_state_after_100_000_tokens_is_that_of_the_parallel_form(corrected):
    t, n, h, w = 100_000, 2, 8, 8
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, t, n, h)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((1, t, n, w)).astype(np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_decay = -rng.uniform(1e-5, 0.01, (1, t, n, 1)).astype(np.float32)
    rate = rng.uniform(0, 1, (1, t, n)).astype(np.float32) if corrected else None
    tokens = Recurrence(q, k, v, log_decay, rate, np.zeros((1, t), bool))
    start = jnp.zeros((1, n, h, w))

    @jax.jit
    def decoded(tokens, state):
        def step(state, token):
            token = jax.tree.map(lambda a: a[:, None], token)
            out, state = recur(token, state, 64)
            return state, out[:, 0]

        state, out = jax.lax.scan(
            step, state, jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tokens)
        )
        return jnp.moveaxis(out, 0, 1), state

    out, state = decoded(tokens, start)
    chunked, parallel = jax.jit(recur, static_argnums=2)(tokens, start, 64)
    assert np.isfinite(state).all()
    np.testing.assert_allclose(state, parallel, atol=1e-4)
    np.testing.assert_allclose(out, chunked, atol=1e-4)


@pytest.mark.parametrize("letter", "ds")
def test_attention_is_shown_of_the_layers_that_have_it(letter):
    config = jf.ModelConfig(**SIZES | {"n_layers": 3}, layer_pattern=f"{letter}{letter}m")
    params = jf.init(config, jax.random.key(0))
    tokens = np.arange(6)[None]
    with pytest.raises(jf.ConfigError, match=r"layers=\[0, 1\] have a state.*layers=\[2\]"):
        jf.attention_maps(params, config, tokens)
    assert jf.attention_maps(params, config, tokens, layers=[2]).decoder.shape == (1, 1, 4, 6, 6)


@pytest.mark.parametrize("letter, mixer, gate", [("d", "delta", "rate"), ("s", "mamba2", "step")])
def test_a_rate_that_is_replaced_is_the_one_that_is_used(letter, mixer, gate):
    config = jf.ModelConfig(**SIZES, layer_pattern=letter)
    params = jf.init(config, jax.random.key(0))
    # Steps so long that the state shows in the logits.
    params["blocks"][mixer]["step_bias"] += 5
    tokens = np.arange(6)[None]
    name = f"decoder.0.{mixer}_state"
    replace = {f"decoder.0.{mixer}_{gate}": 0.0}
    still = jf.inspect(params, config, tokens, capture=(f"{mixer}_state",), replace=replace)
    assert not still.values[name].any()
    assert jnp.abs(still.logits - jf.forward(params, config, tokens)).max() > 1e-4


@pytest.mark.parametrize("letter, mixer", [("d", "delta"), ("s", "mamba2")])
def test_widths_of_a_recurrent_layer_follow_those_of_a_base(letter, mixer):
    base = "d_model=12 n_heads=2 n_kv_heads=1 recurrent.key_heads=1"
    config = jf.ModelConfig(
        **SIZES | {"n_layers": 2, "n_kv_heads": 2},
        layer_pattern=f"{letter}m",
        recurrent=jf.Recurrent(key_heads=2),
        parametrization="mup",
        mup_base=base,
    )
    blocks = specs(config)["blocks"]
    assert blocks["0"][mixer]["q"].growth == (2, 2)
    assert blocks["0"][mixer]["out"].growth == (2, 2)
    assert blocks["1"]["attention"]["k"].growth == (2, 2)


def test_a_table_has_a_layer_for_each_letter():
    config = jf.ModelConfig(**SIZES | {"n_layers": 5}, layer_pattern="ddms")
    blocks = specs(config)["blocks"]
    mixers = [next(name for name in blocks[str(i)] if name in MIXERS) for i in range(4)]
    assert mixers == ["delta", "delta", "attention", "mamba2"]
    assert blocks["0"]["delta"]["q"].shape[0] == 2
