"""muP: initial values and rates against the paper's table in plain numbers, the base model as the
standard one, and the standard model of the same function."""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import slow_but
from shapes import forward, made, model

import jaxformer as jf
from jaxformer.arrays.params import map_specs, rows
from jaxformer.config.settings import with_settings
from jaxformer.config.train import OptimizerConfig
from jaxformer.files import ConfigError
from jaxformer.interop.pretrained import standard_form
from jaxformer.models.transformer import specs
from jaxformer.training.optimizers.run_optimizer import make_optimizer, width_factors

SIZES = dict(vocab_size=61, n_layers=2, max_length=32)
BASE = "d_model=32 d_ff=40"
# Four times as wide as the base, in wider heads and in more of them.
WIDER = SIZES | dict(d_model=128, n_heads=4, n_kv_heads=2, d_ff=160)
MORE = SIZES | dict(d_model=128, n_heads=16, n_kv_heads=8, d_ff=160)
MORE_BASE = f"{BASE} n_heads=4 n_kv_heads=2"
EXPERTS = {
    "feed_forward": "experts",
    "experts.n": 4,
    "experts.d_ff": 96,
    "experts.shared_ff": 64,
    "bias": "all",
}
LATENT = {
    "mixer": "latent",
    "n_kv_heads": 0,
    "latent.kv_rank": 16,
    "latent.query_rank": 24,
    "latent.rope_head_dim": 4,
    "head_dim": 16,
}
T5 = {"family": "encoder_decoder", "positions": "t5", "attention.scale": 1.0, "n_encoder_layers": 1}
BERT = {
    "family": "encoder",
    "bias": "all",
    "norm": "layer",
    "positions": "learned",
    "embedding.norm": True,
}
BERT |= {
    "embedding.token_types": 2,
    "head.next_sentence": True,
    "tied_head": True,
    "embedding.width": 24,
}


initial = jax.jit(jf.init, static_argnums=0)


def mup(base=BASE, **settings):
    return with_settings(jf.ModelConfig(), {**settings, "parametrization": "mup", "mup_base": base})


# For each leaf the factor of its initial scale beside the base's and the factor of Adam's rate
# (arXiv:2203.03466, table 3): embeddings 1, 1; hidden matrices 1 / sqrt(m), 1 / m; outputs 1 / m,
# 1 / m, with m the growth of the fan-in.
HIDDEN, OUTPUT, INPUT = (1 / 2, 1 / 4), (1 / 4, 1 / 4), (1, 1)
ATTENTION = {f"blocks.attention.{name}": HIDDEN for name in ("q", "k", "v", "out")}
GATED = {f"blocks.ffn.{name}": HIDDEN for name in ("gate", "up", "down")}
PLAIN = {"embed.tokens": INPUT, "blocks.attention_norm.scale": INPUT, "final_norm.scale": INPUT}
TABLES = {
    "wider heads": (mup(**WIDER), ATTENTION | GATED | PLAIN | {"head.weight": OUTPUT}),
    "more heads": (mup(MORE_BASE, **MORE), ATTENTION | GATED | PLAIN | {"head.weight": OUTPUT}),
    # The keys and values of one head are a narrow output, of the same width in the base.
    "one narrow key": (
        mup(f"{BASE} n_heads=4", **MORE | dict(n_kv_heads=1)),
        PLAIN | {"blocks.attention.k": OUTPUT, "blocks.attention.q": HIDDEN},
    ),
    "tied": (mup(**WIDER, tied_head=True), ATTENTION | GATED | PLAIN),
    "experts": (
        mup(f"{BASE} experts.d_ff=24 experts.shared_ff=16", **WIDER, **EXPERTS),
        {"blocks.experts.router": OUTPUT, "blocks.experts.up": HIDDEN}
        | {"blocks.experts.shared.down": HIDDEN, "blocks.experts.up_bias": INPUT}
        | {"blocks.attention.q_bias": INPUT, "blocks.experts.down_bias": INPUT},
    ),
    # Latents of a fixed rank are narrow: outputs of the stream, and inputs of the heads.
    "fixed ranks": (
        mup(f"{BASE} n_heads=4", **MORE | LATENT),
        {"blocks.latent.kv_down": OUTPUT, "blocks.latent.q_down": OUTPUT, "blocks.latent.k": INPUT}
        | {"blocks.latent.k_rope": OUTPUT, "blocks.latent.out": HIDDEN, "blocks.latent.q": INPUT},
    ),
    "ranks that grow": (
        mup(f"{BASE} n_heads=4 latent.kv_rank=4 latent.query_rank=6", **MORE | LATENT),
        {"blocks.latent.kv_down": HIDDEN, "blocks.latent.q_down": HIDDEN, "blocks.latent.k": HIDDEN}
        | {"blocks.latent.k_rope": OUTPUT, "blocks.latent.q": HIDDEN},
    ),
    "encoder-decoder": (
        mup(**WIDER | T5),
        {"encoder.blocks.ffn.up": HIDDEN, "blocks.cross.k": HIDDEN, "blocks.cross.out": HIDDEN}
        | {"relative_bias": INPUT, "embed.tokens": INPUT, "head.weight": OUTPUT},
    ),
    "encoder": (
        mup(**WIDER | BERT),
        {"embed.projection": INPUT, "embed.positions": INPUT, "embed.types": INPUT}
        | {"head.dense": OUTPUT, "head.bias": INPUT, "pooler.dense": HIDDEN}
        | {"next_sentence.weight": OUTPUT, "blocks.ffn.down": HIDDEN, "embed.tokens": INPUT},
    ),
}


INITS = [("wider heads", init) for init in ("fan_in", "truncated_normal", "xavier")]
CASES = [*((name, "gpt2") for name in TABLES), *INITS]


@pytest.mark.parametrize(
    "name, init", slow_but(CASES, CASES[0], ("experts", "gpt2"), ("encoder-decoder", "gpt2"))
)
def test_scales_and_rates_are_those_of_the_papers_table(name, init):
    config, expected = TABLES[name]
    config = dataclasses.replace(config, init=init)
    table, base = rows(specs(config)), rows(specs(config.base_model))
    rates = rows_of(width_factors(OptimizerConfig(), specs(config)))
    for path, (scale, rate) in expected.items():
        assert rates[path] == rate, path
        start, start_of_base = (
            np.asarray(spec.init(jax.random.key(3), spec)) for spec in (table[path], base[path])
        )
        assert start.shape == table[path].shape
        if start_of_base.std():
            measured = start.std() / start_of_base.std()
            assert math.isclose(measured, scale, rel_tol=0.12), (path, measured)
        else:
            np.testing.assert_array_equal(start, start_of_base.flat[0])


def rows_of(tree):
    return {jax.tree_util.keystr(p, simple=True, separator="."): v for p, v in leaves(tree)}


def leaves(tree):
    return jax.tree.leaves_with_path(tree)


@pytest.mark.parametrize(
    "name, changes", [("llama", T5), ("gpt2", {"family": "encoder", "init": "xavier"})]
)
def test_the_base_model_is_the_standard_one_bit_for_bit(name, changes):
    standard = model(name, n_layers=1, **changes)
    base = dataclasses.replace(standard, parametrization="mup", mup_base="d_model=32")
    params, same = (initial(config, jax.random.key(0)) for config in (standard, base))
    jax.tree.map(np.testing.assert_array_equal, params, same)
    tokens = jnp.arange(12).reshape(2, 6)
    source = {"source": tokens} if standard.family == "encoder_decoder" else {}

    def loss(params, config):
        return jnp.square(jf.forward(params, config, tokens, **source)).mean()

    def stepped(params, config):
        rule = make_optimizer(OptimizerConfig(), lambda step: 0.01, specs(config))
        return rule.update(jax.grad(loss)(params, config), rule.init(params), params)

    step = jax.jit(stepped, static_argnums=1)
    # The state has the same nesting, so a run of either continues from the checkpoint of the other.
    jax.tree.map(np.testing.assert_array_equal, step(params, standard), step(params, base))


def test_the_standard_parametrization_is_the_default_and_scales_nothing():
    config = model("llama")
    assert config.parametrization == "standard" and config.base_model is config
    assert all(s.base_fans is None and s.growth == (1, 1) for s in rows(specs(config)).values())
    assert config.score_scale == 0


def test_scores_fall_as_one_over_the_width_of_a_head():
    wide = mup(**WIDER)
    # 1 / sqrt(8) in the base, whose heads are 8 wide; here they are 32 wide.
    assert wide.score_scale == pytest.approx(8**-0.5 / 4)
    assert with_settings(wide, {"attention.scale": 0.5}).score_scale == 0.5 / 4
    assert mup(MORE_BASE, **MORE).score_scale == 0


def test_the_logits_of_a_tied_head_are_divided_by_the_growth_of_the_width():
    tied = mup(**WIDER, tied_head=True, **{"head.divisor": 2.0})
    params, tokens = initial(tied, jax.random.key(0)), np.arange(8)[None]
    # The heads are the same, so that the divisor alone differs.
    undivided = with_settings(
        tied, {"parametrization": "standard", "mup_base": "", "attention.scale": tied.score_scale}
    )
    expected = forward(params, undivided, tokens) / 4
    np.testing.assert_allclose(forward(params, tied, tokens), expected, rtol=1e-5, atol=1e-6)


SETTINGS = [
    {"attention.query_key_norm": "layer", "norm": "layer", "tied_head": True, "bias": "all"},
    LATENT | {"n_heads": 16, "head_dim": 12, "latent.query_rank": 0},
    T5 | {"tied_head": True},
    {"family": "encoder", "positions": "disentangled", "tied_head": True, "bias": "all"},
]


@pytest.mark.parametrize("settings", slow_but(SETTINGS, SETTINGS[0], SETTINGS[2]))
def test_the_standard_form_computes_the_same_logits(settings):
    base = f"{BASE} head_dim=6" if "mixer" in settings else BASE
    config = mup(base, **WIDER | dict(n_kv_heads=0, n_layers=1) | settings)
    params = made(config)
    tokens = jnp.arange(12).reshape(2, 6)
    source = {"source": tokens} if config.family == "encoder_decoder" else {}
    same, standard = standard_form(params, config)
    assert standard.parametrization == "standard"
    expected = forward(params, config, tokens, **source)
    logits = forward(same, standard, tokens, **source)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(mup_base=""), "must be widths of the model that learning rates are found at"),
        (dict(mup_base="n_heads=4"), "must be widths of the model"),
        (dict(mup_base="d_model=32 n_layers=2"), "must be widths of the model"),
        (dict(mup_base="d_model=0"), "must be widths of the model"),
        (dict(mup_base="d_model=30"), "is no model: model.d_model=30 is not divisible"),
        (dict(parametrization="standard"), "needs model.parametrization='mup'"),
        ({"embedding.scale": "sqrt"}, "model.embedding.multiplier"),
        ({"head.scale": "rsqrt"}, "model.head.divisor"),
    ],
)
def test_a_base_that_cannot_be_is_refused(change, message):
    settings = dict(parametrization="mup", mup_base=BASE) | WIDER | change
    with pytest.raises(ConfigError, match=message):
        with_settings(jf.ModelConfig(), settings)


def test_a_base_with_other_parameters_is_refused():
    config = mup(f"{BASE} embedding.width=32", **WIDER, **{"embedding.width": 16})
    with pytest.raises(ConfigError, match=r"differ in embed\.projection, embed\.projection_bias"):
        specs(config)


@pytest.mark.parametrize("name", ["sgd", "adafactor", "soap"])
def test_a_rule_without_a_factor_of_the_width_is_refused(name):
    with pytest.raises(ConfigError, match=f"optimizer.name='{name}' has no rule by which .*adamw"):
        make_optimizer(OptimizerConfig(name=name), lambda step: 0.1, specs(mup(**WIDER)))


def updated(optimizer, table, gradient=1.0):
    """The update of one step of rate 1 where all gradients are random numbers of this size."""

    def draw(path, spec):
        noise = np.random.default_rng(zlib.crc32(path.encode())).standard_normal(spec.shape, "f")
        return np.float32(gradient) * noise

    rule = make_optimizer(optimizer, lambda step: 1.0, table)
    params = map_specs(lambda _, spec: np.ones(spec.shape, np.float32), table)
    update = jax.jit(lambda gradients: rule.update(gradients, rule.init(params), params)[0])
    return rows_of(update(map_specs(draw, table)))


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_first_step_has_the_factor_of_each_leaf_and_the_decay_has_none(name):
    table = specs(mup(**WIDER))
    plain = OptimizerConfig(name=name, clip_norm=0.0, weight_decay=0.0, eps=1e-12)
    rates = rows_of(width_factors(plain, table))
    for path, update in updated(plain, table).items():
        # The first direction of both is the sign of the gradient.
        np.testing.assert_allclose(np.abs(update), rates[path], rtol=1e-2, err_msg=path)
    decayed = dataclasses.replace(plain, weight_decay=0.25)
    for path, update in updated(decayed, table).items():
        decay = 0.25 if rows(table)[path].is_matrix else 0
        np.testing.assert_allclose(np.abs(update + decay), rates[path], rtol=1e-2, err_msg=path)


def test_muons_directions_have_a_spectral_norm_that_grows_as_the_root_of_out_over_in():
    wide = mup(**WIDER | dict(n_kv_heads=0))
    plain = OptimizerConfig(name="muon", clip_norm=0.0, weight_decay=0.0)
    updates, of_base = (
        updated(plain, specs(config))
        for config in (wide, dataclasses.replace(wide, d_model=32, d_ff=40))
    )
    for path, shape in {
        "ffn.up": (-2, -1),
        "ffn.down": (-2, -1),
        "attention.q": (128, 128),
    }.items():
        new, old = (u[f"blocks.{path}"][0] for u in (updates, of_base))
        if "attention" in path:
            new, old = new.reshape(shape), old.reshape(32, 32)
        a, b = (np.linalg.norm(np.asarray(x), 2) for x in (new, old))
        # Five steps of Newton and Schulz leave singular values between about 0.7 and 1.2.
        assert a / b == pytest.approx(1, abs=0.3), path


def test_eps_falls_with_the_width_as_gradients_do():
    wide = mup(**WIDER)
    plain = OptimizerConfig(clip_norm=0.0, weight_decay=0.0, eps=1.0)
    narrow = dataclasses.replace(wide, d_model=32, d_ff=40)
    updates, of_base = (
        updated(plain, specs(c), gradient=g) for c, g in ((wide, 0.025), (narrow, 0.1))
    )
    for path in ("embed.tokens", "blocks.attention.q"):
        new, old = (np.abs(u[path]).mean() for u in (updates, of_base))
        factor = 0.25 if "attention" in path else 1
        assert new / old == pytest.approx(factor, rel=0.1), path
