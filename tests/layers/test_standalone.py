"""Layers by themselves are those of the model, and the cross-entropy of logits is that of its
loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import params_of

import jaxformer as jf
from jaxformer.arrays.params import unstack
from jaxformer.config.settings import with_settings
from jaxformer.layers.norm import norm
from jaxformer.losses.cross_entropy import cross_entropy

SIZES = {"vocab_size": 40, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_length": 16}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"n_kv_heads": 2},
    "gpt2": {"positions": "none", "norm": "layer", "bias": "all", "activation": "gelu"},
    "alibi in a window": {"positions": "alibi", "window": 3, "attention.query_key_norm": "head"},
    "parallel with sinks": {
        "residual": "parallel",
        "attention.sinks": True,
        "attention.value_dim": 4,
    },
    "sandwich": {"norm_placement": "sandwich", "attention.soft_cap": 5.0},
    "encoder": {"family": "encoder", "norm_placement": "post", "head.kind": "none"},
}
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 9))
transformer_block = jax.jit(jf.transformer_block, static_argnums=1)
SEGMENTS = np.array([[1] * 4 + [2] * 5, [1] * 7 + [0] * 2])


def model(case: str) -> tuple[jf.ModelConfig, Any]:
    """A config, and params none of which is 0 or 1."""
    config = with_settings(jf.ModelConfig(), SIZES | CASES[case])  # type: ignore[arg-type]
    return config, jax.tree.map(lambda leaf: leaf / 3, params_of(config))


@pytest.mark.parametrize("case", CASES)
def test_blocks_one_after_the_other_are_the_model(case: str) -> None:
    config, params = model(case)
    run = jax.jit(lambda p: jf.inspect(p, config, TOKENS, ["residual"], segment_ids=SEGMENTS))
    expected = run(params).values
    x = params["embed"]["tokens"][TOKENS]
    for layer, block in enumerate(unstack(params["blocks"])):
        x = transformer_block(block, config, x, segment_ids=SEGMENTS)
        residual = expected[f"{config.family}.{layer}.residual"]
        np.testing.assert_allclose(x, residual, rtol=1e-5, atol=1e-5, err_msg=f"layer {layer}")


@pytest.mark.parametrize("case", ["llama", "gpt2", "alibi in a window"])
def test_a_pre_norm_block_is_its_attention_and_its_feed_forward(case: str) -> None:
    from jaxformer.layers.ffn import ffn

    config, params = model(case)
    block, x = unstack(params["blocks"])[0], jax.random.normal(jax.random.key(2), (2, 9, 32))
    positions = jnp.array([[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9, 10, 12]])
    normed = norm(block["attention_norm"], config, x)
    attended = jf.multi_head_attention(block["attention"], config, normed, positions=positions)
    between = x + attended
    expected = between + ffn(block["ffn"], config, norm(block["ffn_norm"], config, between))
    found = transformer_block(block, config, x, positions=positions)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_cannot_be_computed_alone_is_one_message() -> None:
    config, params = model("llama")
    block, x = unstack(params["blocks"])[0], jnp.zeros((2, 9, 32))
    with pytest.raises(jf.ConfigError, match=r"q: missing, expected \(32, 4, 8\)"):
        jf.multi_head_attention({}, config, x)
    with pytest.raises(jf.ConfigError, match=r"ffn\.up: missing"):
        jf.transformer_block(block | {"ffn": {}}, config, x)
    with pytest.raises(jf.ConfigError, match=r"x has the shape \[2, 9, 8\], .*\.d_model=32: resh"):
        jf.transformer_block(block, config, x[..., :8])
    biased = with_settings(jf.ModelConfig(), SIZES | {"n_kv_heads": 2, "positions": "t5"})  # type: ignore[arg-type]
    with pytest.raises(jf.ConfigError, match=r"positions=t5: .* call jf\.forward"):
        jf.multi_head_attention(block["attention"], biased, x)


LOGITS = 5 * jax.random.normal(jax.random.key(3), (3, 4, 40))
TARGETS = jax.random.randint(jax.random.key(4), (3, 4), 0, 40)
WEIGHTS = jax.random.uniform(jax.random.key(5), (3, 4))


def test_the_cross_entropy_of_logits_and_its_gradient_are_those_of_optax() -> None:
    nats = optax.softmax_cross_entropy_with_integer_labels
    total, weight = jf.softmax_cross_entropy(LOGITS, TARGETS)
    np.testing.assert_allclose(total, nats(LOGITS, TARGETS).sum(), rtol=1e-6)
    assert weight == 12 and total.dtype == weight.dtype == jnp.float32

    def ours(logits: jax.Array) -> jax.Array:
        return jf.softmax_cross_entropy(logits, TARGETS, WEIGHTS)[0]

    def theirs(logits: jax.Array) -> jax.Array:
        return jnp.sum(WEIGHTS * nats(logits, TARGETS))

    np.testing.assert_allclose(ours(1e4 * LOGITS), theirs(1e4 * LOGITS), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(ours)(LOGITS), jax.grad(theirs)(LOGITS), atol=1e-6)
    _, weight = jf.softmax_cross_entropy(LOGITS.astype(jnp.bfloat16), TARGETS, WEIGHTS)
    np.testing.assert_allclose(weight, WEIGHTS.sum(), rtol=1e-6)


def test_targets_of_other_rows_than_those_of_the_logits_are_one_message() -> None:
    for targets, weights in ((TARGETS[0], None), (TARGETS, WEIGHTS[:, :2])):
        with pytest.raises(jf.ConfigError, match=r"logits \[3, 4, 40\] do not fit targets \["):
            jf.softmax_cross_entropy(LOGITS, targets, weights)


@pytest.mark.parametrize("extra", ["label_smoothing", "z_loss", "soft_cap"])
def test_the_cross_entropy_of_logits_has_the_options_of_the_head(extra: str) -> None:
    x, head = (jax.random.normal(jax.random.key(6), shape) for shape in ((3, 4, 8), (40, 8)))
    expected, _ = cross_entropy(x, head, TARGETS, WEIGHTS, **{extra: 0.3})
    logits = jnp.einsum("BTD,VD->BTV", x, head)
    found, _ = jf.softmax_cross_entropy(logits, TARGETS, WEIGHTS, **{extra: 0.3})
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert abs(float(found) - float(jf.softmax_cross_entropy(logits, TARGETS, WEIGHTS)[0])) > 0.1
    with pytest.raises(TypeError, match="smoothing"):
        jf.softmax_cross_entropy(logits, TARGETS, smoothing=0.1)
