"""Multi-head latent attention: its formula, the laws that compiled programs could break, what its
cache holds, and what is refused. The other laws are those of all variants
(tests/models/test_family_invariants.py)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import LATENT, SIZES, alone, cached, laid_out, params_of

import jaxformer as jf
from jaxformer.cli.attention import stages_of
from jaxformer.config.settings import with_settings
from jaxformer.layers.block import empty_cache
from jaxformer.layers.latent import absorbs, latent_attention, latent_specs
from jaxformer.layers.masks import AttentionMask, layout_of
from jaxformer.layers.positions import rope
from jaxformer.layers.sublayer import Call
from jaxformer.models.cost import score_flops

forward = jax.jit(jf.forward, static_argnums=1)
CASES = {
    "query rank": {},
    "scores, biases and windows": {
        "attention.sinks": True,
        "attention.soft_cap": 1.0,
        "attention.scale": 0.7,
        "bias": "all",
        "rope.pairing": "interleaved",
        "rope.fraction": 0.5,
        "window": 3,
        "window_pattern": "wf",
    },
    "no query rank, no rotation, blocked": {
        "latent.query_rank": 0,
        "positions": "learned",
        "norm": "rms1p",
        "attention.kernel": "blocked",
    },
}
MOST = "scores, biases and windows"


def model(case="query rank", **changes):
    return with_settings(jf.ModelConfig(), SIZES | LATENT | CASES[case] | changes)


def close(found, expected):
    """Equal to 2e-5 of the largest element."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(jnp.abs(expected).max()))


def by_heads(layer, config, x):
    """The formula of the paper, one head after another: [T, D] -> [T, D]."""

    def normed(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def turned(x):
        return np.asarray(rope(jnp.asarray(x)[None, :, None], jnp.arange(len(x))[None]))[0, :, 0]

    layer = jax.tree.map(np.asarray, layer)
    own = config.head_width - config.latent.rope_head_dim
    latent = normed(x @ layer["kv_down"], layer["kv_down_norm"])
    shared, queries = turned(x @ layer["k_rope"]), normed(x @ layer["q_down"], layer["q_down_norm"])
    causal, out = np.tril(np.ones((len(x), len(x)), bool)), np.zeros_like(x)
    for n in range(config.n_heads):
        q = queries @ layer["q"][:, n]
        scores = q[:, :own] @ (latent @ layer["k"][:, n]).T + turned(q[:, own:]) @ shared.T
        scores = np.where(causal, scores / np.sqrt(config.head_width), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out += weights @ (latent @ layer["v"][:, n]) @ layer["out"][n]
    return out


def test_each_head_has_the_formula_of_the_paper():
    config = model()
    layer = jax.tree.map(lambda leaf: leaf[0], params_of(config)["blocks"]["latent"])
    x = np.random.default_rng(0).standard_normal((1, 7, config.d_model)).astype(np.float32)
    layout = layout_of(jnp.zeros((1, 7), jnp.int32), None, None)
    found = latent_attention(layer, config, jnp.asarray(x), Call(AttentionMask(layout, layout)))
    close(found.x[0], jnp.asarray(by_heads(layer, config, x[0])))


@pytest.mark.parametrize("case", CASES)
def test_cached_decoding_with_absorbed_weights_equals_the_full_forward(case):
    """The cache of larger pieces, which expand the latents, is that of all variants."""
    config = model(case)
    batch = laid_out(config)
    real = batch["segment_ids"] != 0
    expected = forward(params_of(config), config, **batch)
    close(cached(config, batch, 2, compiled=True)[real], expected[real])
    slots = batch["tokens"].shape[1]
    assert [absorbs(config, queries, slots) for queries in (1, 2, 6)] == [True, True, False]


DEEPSEEK = {
    "d_model": 7168,
    "n_layers": 1,
    "n_heads": 128,
    "head_dim": 192,
    "attention.value_dim": 128,
}


def test_few_queries_absorb_the_weights_and_many_expand_the_latents():
    config = with_settings(
        jf.ModelConfig(),
        {"mixer": "latent", "latent.kv_rank": 512, "latent.rope_head_dim": 64, **DEEPSEEK},
    )
    assert absorbs(config, 1, 4096) and absorbs(config, 128, 4096)
    assert not absorbs(config, 1024, 4096) and not absorbs(config, 4096, 4096)


def test_the_cache_has_latents_and_one_rotated_key():
    config = with_settings(
        jf.ModelConfig(),
        {"mixer": "latent", "latent.kv_rank": 512, "latent.rope_head_dim": 64, **DEEPSEEK},
    )
    ordinary = with_settings(jf.ModelConfig(), DEEPSEEK)

    def numbers(config):
        cache = jax.eval_shape(lambda: empty_cache(config, 2, 5, jnp.float32))
        return sum(leaf.size for leaf in jax.tree.leaves(cache.layers)) // (2 * 5)

    assert numbers(config) == 512 + 64
    # 71 times as many numbers of a token.
    assert numbers(ordinary) == 128 * (192 + 128) == 40_960


def test_remat_of_names_keeps_the_latents(monkeypatch):
    """The products of latents with kv_down, q_down and k_rope are computed once where they are
    kept, and twice where they are not."""
    monkeypatch.setattr("jaxformer.models.remat.platform", lambda: "gpu")
    config, found = model(n_layers=1, remat="names"), {}
    params, batch = params_of(config), alone(config)
    for saved in ("none", "latent"):
        kept = dataclasses.replace(config, saved=saved)

        def loss(params, kept=kept):
            return jf.forward(params, kept, **batch).sum()

        found[saved] = str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general")
    assert found["none"] == found["latent"] + 3


def test_generation_and_beams_write_what_the_full_forward_would():
    config = model(MOST)
    params, tokens = params_of(config), alone(config)["tokens"][:2]
    made = jf.generate(params, config, tokens, 4, temperature=0)
    texts, scores = jf.beam_search(params, config, tokens, 4, beams=3, length_penalty=0.0)
    rows = np.concatenate([np.asarray(made)[:, None], texts], axis=1)
    rows = np.concatenate([np.repeat(tokens[:, None], 4, 1), rows], axis=2).reshape(8, -1)
    logs = np.asarray(jax.nn.log_softmax(forward(params, config, rows)[:, 5:-1]))
    np.testing.assert_array_equal(logs[::4].argmax(-1), made)
    logs = np.take_along_axis(logs, rows[:, 6:, None], axis=2)[..., 0].sum(-1)
    np.testing.assert_allclose(scores, logs.reshape(2, 4)[:, 1:], rtol=1e-4)


def test_adapters_of_absorbed_and_quantized_weights_are_those_of_the_full_forward():
    config = model()
    lora = jf.LoRA(rank=2, targets=("latent",))
    base = jf.quantize(params_of(config), "int8")
    params = jf.adapt(base, config, lora, jax.random.key(0))
    leaf = params["blocks"]["latent"]["k"]
    assert leaf.a.shape == (2, 6, 2) and leaf.b.shape == (2, 2, 4, 2)
    mask = jf.adapter_mask(params)
    moved = jax.tree.map(lambda learns, x: x + 0.1 if learns else x, mask, params)
    batch = laid_out(config)
    real = batch["segment_ids"] != 0
    for each in (base, moved):
        expected = forward(each, config, **batch)
        close(cached(config, batch, 1, each, compiled=True)[real], expected[real])
    assert jnp.abs(expected - forward(base, config, **batch)).max() > 1e-2


def test_the_page_of_attention_has_its_maps():
    config = model()
    maps = jf.attention_maps(params_of(config), config, alone(config)["tokens"]).decoder
    assert maps.shape == (2, 4, 4, 6, 6)
    np.testing.assert_allclose(maps.sum(-1), 1, rtol=1e-5)
    kinds = {stage["name"]: stage["kind"] for stage in stages_of(config, 8)}
    assert kinds["decoder.0.latent"] == "decoder" and kinds["decoder.0.ffn"] == ""


def test_its_scores_count_both_widths():
    config = model(n_layers=1)
    assert score_flops(config, 10) == 3 * 2 * 4 * (6 + 3) * 10


def test_biases_are_those_of_the_products_with_the_residual_stream_and_of_the_last():
    names = {name for name in latent_specs(model(MOST)) if name.endswith("bias")}
    assert names == {"q_down_bias", "kv_down_bias", "k_rope_bias", "out_bias"}
    straight = latent_specs(model(MOST, **{"latent.query_rank": 0}))
    assert "q_down" not in straight and straight["q"].shape == (16, 4, 6)


@pytest.mark.parametrize(
    "adapter", [jf.PrefixTuning(3), jf.PromptTuning(3)], ids=["prefix", "prompt"]
)
def test_keys_of_virtual_tokens_are_refused_in_one_message(adapter):
    config = model()
    with pytest.raises(jf.ConfigError, match=r"keys and values of model\.mixer='attention'.*LoRA"):
        jf.adapt(params_of(config), config, adapter, jax.random.key(0))
