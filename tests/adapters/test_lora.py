"""LoRA: an adapted model is its base until it learns, learns alone, and merges to plain ones."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import SIZES, alone, params_of
from products import fewest

import jaxformer as jf
from jaxformer.adapters.low_rank import LowRank
from jaxformer.arrays.params import dotted, is_custom, rows
from jaxformer.config.settings import with_settings

FAMILIES = {
    "decoder": {"tied_head": True, "window": 3, "window_pattern": "wf"},
    "encoder": {"family": "encoder", "head.kind": "masked", "positions": "learned", "bias": "all"},
    "encoder_decoder": {"family": "encoder_decoder", "positions": "t5"},
    "experts": {
        "feed_forward": "experts",
        "experts.n": 4,
        "experts.per_token": 2,
        "n_layers": 3,
        "experts.dense_layers": 1,
        "experts.shared_ff": 8,
    },
}
EVERYTHING = jf.LoRA(rank=3, alpha=5.0, targets=("*",))
forward = jax.jit(jf.forward, static_argnums=1)
merge = jax.jit(jf.merge)


@functools.cache
def model(family, **changes):
    config = with_settings(jf.ModelConfig(), SIZES | FAMILIES[family] | changes)
    return config, params_of(config)


def noised(params):
    """Params whose adapters are no zeros."""
    rng = np.random.default_rng(1)

    def noise(learns, leaf):
        noise = 0.1 * rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(np.asarray(leaf) + noise) if learns else leaf

    return jax.tree.map(noise, jf.adapter_mask(params), params)


@pytest.mark.parametrize(
    "family, loop", fewest(itertools.product(FAMILIES, ["unroll", "scan"]), together=1)
)
def test_an_adapted_model_is_its_base_until_it_learns_and_then_its_merged_params(family, loop):
    config, params = model(family, layer_loop=loop)
    adapted = jf.adapt(params, config, EVERYTHING, jax.random.key(1))
    base = forward(params, config, **alone(config))
    np.testing.assert_array_equal(forward(adapted, config, **alone(config)), base)
    matrices = {path for path, spec in rows(jf.specs(config)).items() if spec.is_matrix}
    leaves = jax.tree.leaves_with_path(adapted, is_leaf=is_custom)
    assert {dotted(path) for path, leaf in leaves if isinstance(leaf, LowRank)} == matrices
    adapted = noised(adapted)
    merged = merge(adapted)
    assert not any(map(is_custom, jax.tree.leaves(merged, is_leaf=is_custom)))
    found, wanted = (forward(each, config, **alone(config)) for each in (merged, adapted))
    assert jnp.abs(wanted - base).max() > 0.1 * base.std()
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(wanted.std()), rtol=0)


def test_without_adapters_is_the_base_itself():
    config, params = model("decoder")
    below = jf.without_adapters(jf.adapt(params, config, EVERYTHING, jax.random.key(1)))
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (below, params)), strict=True))


def test_an_adapted_weight_is_the_formula():
    """weight + alpha / rank (a b), and alpha / sqrt(rank) rank-stabilized."""
    config, params = model("decoder")
    for rslora, factor in ((False, 6 / 4), (True, 6 / 2)):
        lora = jf.LoRA(rank=4, alpha=6, targets=("blocks.attention.out",), rslora=rslora)
        adapted = noised(jf.adapt(params, config, lora, jax.random.key(1)))
        leaf = adapted["blocks"]["attention"]["out"]  # weight [L, N, H, D]
        wide = np.einsum("lnhr,lrd->lnhd", np.float64(leaf.a), np.float64(leaf.b))
        wanted = np.float64(leaf.weight) + factor * wide
        merged = jf.merge(adapted)["blocks"]["attention"]["out"]
        np.testing.assert_allclose(merged, wanted, atol=1e-6)


BLOCKS = ("attention", "cross", "ffn")


@pytest.mark.parametrize("family, loop", [("decoder", "scan"), ("encoder_decoder", "unroll")])
@pytest.mark.parametrize(
    "lora", [{"dora": True}, {"init": "pissa"}, {"dora": True, "init": "pissa"}]
)
def test_dora_and_pissa_begin_at_the_base_and_learn_as_their_merged_params(family, loop, lora):
    config, params = model(family, layer_loop=loop)
    targets = BLOCKS if family == "encoder_decoder" else ("attention", "ffn")
    adapter = jf.LoRA(rank=3, alpha=5.0, targets=targets, **lora)
    adapted = jf.adapt(params, config, adapter, jax.random.key(1))
    base = forward(params, config, **alone(config))
    near = dict(atol=4e-5 * float(base.std()), rtol=0)
    np.testing.assert_allclose(forward(adapted, config, **alone(config)), base, **near)
    adapted = noised(adapted)
    wanted = forward(adapted, config, **alone(config))
    assert jnp.abs(wanted - base).max() > 0.1 * base.std()
    np.testing.assert_allclose(forward(merge(adapted), config, **alone(config)), wanted, **near)


@pytest.mark.parametrize("name", ["q", "out"])
def test_a_weight_with_magnitudes_is_the_formula(name):
    """magnitude (W + s a b) / |W + s a b|, whose norm gets no gradient (arXiv:2402.09353)."""
    config, params = model("decoder")
    lora = jf.LoRA(rank=4, alpha=6, targets=(f"blocks.attention.{name}",), dora=True)
    adapted = noised(jf.adapt(params, config, lora, jax.random.key(1)))
    leaf = adapted["blocks"]["attention"][name]
    weight = np.float64(leaf.weight) + np.float64(leaf.product())
    norms = np.sqrt(np.square(weight).sum(leaf.inputs))
    gain = np.expand_dims(np.float64(leaf.magnitude) / norms, leaf.inputs)
    merged = jf.merge(adapted)["blocks"]["attention"][name]
    np.testing.assert_allclose(merged, gain * weight, atol=1e-6)
    # The gradient of a is that of the weight times the gain, through the product alone.
    equation = {"q": "BTD,DNH->BTNH", "out": "BTNH,NHD->BTD"}[name]
    one = jax.tree.map(lambda part: part[0], leaf)
    x = jax.random.normal(jax.random.key(2), (2, 3, *(leaf.shape[axis] for axis in leaf.inputs)))
    toward = jax.random.normal(
        jax.random.key(3), one.contract(equation, x, to=None, dtype=None).shape
    )

    def total(a):
        return (one.replace(a=a).contract(equation, x, to=None, dtype=None) * toward).sum()

    outer = np.einsum("bti,bto->io", *(np.float64(part).reshape(2, 3, -1) for part in (x, toward)))
    b = np.float64(one.b).reshape(4, -1)
    wanted = float(one.scale) * (outer * gain[0].reshape(1, -1)) @ b.T
    found = np.asarray(jax.grad(total)(one.a)).reshape(wanted.shape)
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_ranks_and_alphas_go_by_pattern():
    config, params = model("decoder")
    lora = jf.LoRA(
        rank=2,
        alpha=4,
        targets=("attention", "ffn"),
        ranks={"ffn": 5},
        alphas={"blocks.ffn.up": 15, "ffn": 10},
    )
    blocks = jf.adapt(params, config, lora, jax.random.key(1))["blocks"]
    assert blocks["attention"]["q"].a.shape[-1] == 2 and blocks["ffn"]["down"].a.shape[-1] == 5
    scales = {path: blocks[path[0]][path[1]].scale[0] for path in (("attention", "q"),)}
    assert scales == {("attention", "q"): 2.0}
    assert (blocks["ffn"]["up"].scale[0], blocks["ffn"]["down"].scale[0]) == (3.0, 2.0)


def test_only_the_adapter_learns_and_has_moments():
    config, params = model("decoder")
    adapted = jf.adapt(params, config, jf.LoRA(rank=2), jax.random.key(1))
    mask, optimizer = jf.adapter_mask(adapted), optax.adamw(1e-2)
    state = jf.init_state(adapted, optimizer, trainable=mask)
    learned = sum(leaf.size for leaf in jax.tree.leaves(learning_of(adapted)))
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    assert moments == 2 * learned + 1
    batch = batch_of(config)
    step = jf.make_step(jf.loss_of("causal", config), optimizer, trainable=mask)
    for _ in range(2):
        state, _ = step(state, batch)
    jax.tree.map(
        np.testing.assert_array_equal, jf.without_adapters(state.params), params
    )  # bitwise
    changed = [
        bool(jnp.any(a != b))
        for a, b in zip(*map(learning_leaves, (state.params, adapted)), strict=True)
    ]
    assert all(changed)


def batch_of(config):
    tokens = alone(config)["tokens"]
    return {"tokens": tokens, "targets": tokens[:, ::-1], "weights": np.ones(tokens.shape, "f")}


def learning_leaves(params):
    return jax.tree.leaves(learning_of(params))


def learning_of(params):
    return jax.tree.map(lambda keep, leaf: leaf if keep else None, jf.adapter_mask(params), params)


def test_an_adapted_model_generates_as_the_merged():
    config, params = model("decoder")
    adapted = noised(jf.adapt(params, config, EVERYTHING, jax.random.key(1)))
    tokens = alone(config)["tokens"]
    written = jf.generate(adapted, config, tokens, 5, temperature=0)
    logits = forward(merge(adapted), config, np.concatenate([tokens, written], 1)[:, :-1])
    np.testing.assert_array_equal(written, logits[:, -5:].argmax(-1))


def test_dropout_is_of_what_the_adapter_reads_and_differs_by_leaf_and_key():
    config, params = model("decoder")
    lora = jf.LoRA(rank=2, targets=("attention", "embed"), dropout=0.5)
    adapted = noised(jf.adapt(params, config, lora, jax.random.key(1)))
    tokens = alone(config)["tokens"]
    without = forward(adapted, config, tokens)
    first, again, other = (
        forward(jf.keyed(adapted, jax.random.key(key)), config, tokens) for key in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert jnp.any(first != other) and jnp.any(first != without)
    np.testing.assert_array_equal(forward(jf.keyed(adapted, None), config, tokens), without)
    blocks = jf.keyed(adapted, jax.random.key(0))["blocks"]["attention"]
    keys = np.concatenate([blocks[name].key for name in ("q", "k", "v", "out")])
    assert len(np.unique(keys, axis=0)) == len(keys) == 4 * config.n_layers
    # The mean over many keys is what it is without dropout.
    leaf = adapted["blocks"]["attention"]["q"]
    one = jax.tree.map(lambda part: part[0], leaf)
    x = jax.random.normal(jax.random.key(2), (1, 1, config.d_model))
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 4000))

    @jax.jit
    @jax.vmap
    def dropped(key):
        return one.replace(key=key).contract("BTD,DNH->BTNH", x, to=None, dtype=None)

    products = np.asarray(dropped(keys))
    mean, deviation = products.mean(0), products.std(0) / np.sqrt(len(keys))
    plain = one.contract("BTD,DNH->BTNH", x, to=None, dtype=None)
    assert jnp.all(jnp.abs(mean - plain) < 6 * deviation + 1e-6)


BAD = {
    "a target that fits nothing": (
        {"targets": ("atention",)},
        r"'atention' fits no matrix.* attention",
    ),
    "a pattern that fits nothing": ({"targets": ("blocks.*.z",)}, "fits no matrix"),
    "a target that is no matrix": ({"targets": ("final_norm",)}, "fits no matrix"),
    "a rank of 0": ({"rank": 0}, "rank=0 must be a whole number of at least 1"),
    "a rank beyond the width": ({"rank": 17}, r"rank=17 is beyond the width of .* allow 1 to 8"),
    "an alpha of 0": ({"alpha": 0}, "alpha=0 must be a number above 0"),
    "all dropped out": ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
    "magnitudes of a table": ({"targets": ("embed",), "dora": True}, "are for the matrices of"),
    "unknown initial values": ({"init": "svd"}, "init='svd' must be one of zeros, pissa"),
    "no target": ({"targets": ()}, "targets is empty"),
    "a rank for nothing": ({"ranks": {"fnn": 2}}, r"ranks: 'fnn' fits no matrix.* ffn"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_gets_one_message(case):
    changes, message = BAD[case]
    config, params = model("decoder")
    with pytest.raises(jf.ConfigError, match=message):
        jf.adapt(params, config, jf.LoRA(**changes), jax.random.key(0))


def test_params_of_another_model_are_refused():
    _, params = model("decoder")
    other = with_settings(jf.ModelConfig(), SIZES | {"d_model": 32})
    with pytest.raises(jf.ConfigError, match=r"do not fit the config:\n  .*instead of"):
        jf.adapt(params, other, jf.LoRA(), jax.random.key(0))
