"""Leaves that replace the weights of experts: each expert has factors, blocks and scales of its
own, and rows in groups give what each expert's matrix gives by itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from custom_leaves import low_rank as leaf_of_a_user
from custom_leaves import made
from families import SIZES, alone, params_of
from forced_devices import on_eight_devices
from products import fewest, slow_but
from test_lora import batch_of, forward, learning_leaves, merge, noised

import jaxformer as jf
from jaxformer.adapters.adapted_params import adapt_specs
from jaxformer.adapters.low_rank import LowRank, low_rank
from jaxformer.adapters.quantized import QUANTIZERS
from jaxformer.arrays.params import Spec, contract, dotted, init_params, is_custom, rows
from jaxformer.config.settings import with_settings
from jaxformer.generation.weights import OutputMajor
from jaxformer.layers.grouped import GROUPED_KERNELS, GroupedRows
from jaxformer.layers.linear import fan_in_normal
from jaxformer.models.virtual import PromptedTable

EXPERTS = SIZES | {
    "feed_forward": "experts",
    "experts.n": 4,
    "experts.per_token": 2,
    "experts.d_ff": 12,
    "experts.shared_ff": 8,
    "bias": "all",
    "experts.router_bias": "balanced",
}
SPEC = Spec((4, 6, 5), ("experts", "embed", "mlp"), fan_in_normal, ("embed",))
SIZES_OF_GROUPS = (3, 0, 4, 1)


@functools.cache
def model(**changes):
    config = with_settings(jf.ModelConfig(), EXPERTS | changes)
    return config, params_of(config)


def plain_weight():
    return init_params({"w": SPEC}, jax.random.key(1))["w"]


def adapted_weight(weight, rank=2):
    specs = low_rank(SPEC, rank, 0.7)
    factors = init_params({"a": specs.a, "b": specs.b}, jax.random.key(2))
    b = jax.random.normal(jax.random.key(3), factors["b"].shape)
    return LowRank(weight, factors["a"], b, jnp.float32(0.7), inputs=specs.inputs)


LEAVES = {
    "low rank": lambda: adapted_weight(plain_weight()),
    **{
        f"{kind}{over}": functools.partial(
            lambda make, over: (adapted_weight if over else lambda leaf: leaf)(
                make(plain_weight(), SPEC)
            ),
            quantizer.make,
            over,
        )
        for kind, quantizer in QUANTIZERS.items()
        if kind in ("int8", "nf4_double")
        for over in ("", " below low rank")
    },
    "output major": lambda: OutputMajor(jnp.moveaxis(plain_weight(), 0, -1), 1),
    "prompted": lambda: PromptedTable(plain_weight(), jnp.zeros((1, 6))),
}


def array_of(leaf):
    if isinstance(leaf, LowRank):
        below = leaf.weight.array() if is_custom(leaf.weight) else leaf.weight
        return below + leaf.product()
    return leaf.weight if isinstance(leaf, PromptedTable) else leaf.array()


@pytest.mark.parametrize(
    "name, kernel", fewest(itertools.product(LEAVES, GROUPED_KERNELS), together=1)
)
def test_rows_in_groups_are_those_of_the_array(name, kernel):
    """Also their gradients, for x and for the factors, in which an expert without rows has 0."""
    leaf, groups = LEAVES[name](), GroupedRows(jnp.array(SIZES_OF_GROUPS), kernel)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((sum(SIZES_OF_GROUPS), 6), np.float32)
    dense = np.asarray(array_of(leaf))
    expert = np.repeat(np.arange(4), SIZES_OF_GROUPS)

    def products(x, leaf):
        def product(x, leaf):
            return contract("MD,EDF->MF", x, leaf, groups=groups)

        def of_factors(x, factors):
            return product(x, leaf.replace(**factors) if factors else leaf)

        factors = {"a": leaf.a, "b": leaf.b} if isinstance(leaf, LowRank) else {}
        found, back = jax.vjp(of_factors, x, factors)
        return found, *back(2 * found)

    found, into_x, into_factors = jax.jit(products)(x, leaf)
    expected = np.einsum("md,mdf->mf", x, dense[expert])
    np.testing.assert_allclose(found, expected, atol=2e-6)
    wanted = np.einsum("mf,mdf->md", 2 * expected, dense[expert])
    np.testing.assert_allclose(into_x, wanted, atol=1e-5)
    if not isinstance(leaf, LowRank):
        return
    outer = np.stack(
        [x[expert == e].T @ (2 * expected)[expert == e] for e in range(len(SIZES_OF_GROUPS))]
    )
    wanted = {
        "a": 0.7 * np.einsum("edf,erf->edr", outer, leaf.b),
        "b": 0.7 * np.einsum("edf,edr->erf", outer, leaf.a),
    }
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), into_factors, wanted)
    assert not into_factors["a"][1].any() and not into_factors["b"][1].any()


def test_the_factors_are_those_of_each_expert():
    """Shapes, axes and first values: as those of the matrix of an expert alone."""
    specs, alone_specs = (
        low_rank(SPEC, 3, 1.0),
        low_rank(Spec((6, 5), ("embed", "mlp"), fan_in_normal, ("embed",)), 3, 1.0),
    )
    assert (specs.a.shape, specs.a.axes) == ((4, 6, 3), ("experts", "embed", "rank"))
    assert (specs.b.shape, specs.b.axes) == ((4, 3, 5), ("experts", "rank", "mlp"))
    assert specs.scale.shape == () and specs.inputs == alone_specs.inputs
    assert specs.a.fan_in == alone_specs.a.fan_in and specs.b.fan_out == alone_specs.b.fan_out
    bound = 1 / np.sqrt(6)
    drawn = init_params({"a": specs.a}, jax.random.key(0))["a"]
    assert 0.8 * bound < jnp.abs(drawn).max() <= bound


def test_experts_are_no_layers():
    config, params = model()
    adapted = jf.adapt(params, config, jf.LoRA(rank=2, targets=("experts",)), jax.random.key(1))
    leaf = adapted["blocks"]["experts"]["up"]
    assert leaf.layers == config.n_layers and leaf.a.shape == (2, 4, 16, 2)
    one_layer = jax.tree.map(lambda part: part[0], leaf)
    assert one_layer.layers is None
    np.testing.assert_array_equal(one_layer.product(), leaf.product()[0])


@pytest.mark.parametrize(
    "kind, changes",
    slow_but(
        [("int8", {"n_layers": 2}), ("nf4_double", {"n_layers": 3, "layer_loop": "scan"})],
        ("int8", {"n_layers": 2}),
    ),
)
def test_a_quantized_base_with_an_adapter_is_its_merged_model(kind, changes):
    config, params = model(**changes, **{"experts.dense_layers": 1})
    base = jf.quantize(params, kind)
    lora = jf.LoRA(rank=3, alpha=5.0, targets=("*",))
    adapted = jf.adapt(base, config, lora, jax.random.key(1))
    batch = alone(config)
    unadapted = forward(adapted, config, **batch)
    np.testing.assert_array_equal(unadapted, forward(base, config, **batch))
    adapted = noised(adapted)
    found, wanted = (forward(each, config, **batch) for each in (adapted, merge(adapted)))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(wanted.std()), rtol=0)
    assert jnp.abs(found - unadapted).max() > 0.1 * found.std()


def test_generation_is_that_of_the_merged_model():
    config, params = model(**{"experts.dense_layers": 1})
    lora = jf.LoRA(rank=2, targets=("experts", "attention"))
    base = jf.quantize(params, "int8")
    adapted = noised(jf.adapt(base, config, lora, jax.random.key(1)))
    tokens = alone(config)["tokens"]
    written = jf.generate(adapted, config, tokens, 5, temperature=0)
    logits = forward(merge(adapted), config, np.concatenate([tokens, written], 1)[:, :-1])
    np.testing.assert_array_equal(written, logits[:, -5:].argmax(-1))


def test_only_the_factors_of_a_quantized_base_learn():
    """Those of all experts do, and the balanced bias of the router stays."""
    config, params = model(n_layers=1)
    base = jf.quantize(params, "nf4")
    adapted = noised(
        jf.adapt(base, config, jf.LoRA(targets=("experts",), rank=2), jax.random.key(1))
    )
    mask, optimizer = jf.adapter_mask(adapted), optax.adamw(1e-2, weight_decay=0.1)
    state = jf.init_state(adapted, optimizer, trainable=mask)
    step = jf.make_step(jf.loss_of("causal", config), optimizer, trainable=mask)
    state, _ = step(state, batch_of(config))
    jax.tree.map(np.testing.assert_array_equal, jf.without_adapters(state.params), base)
    pairs = zip(*map(learning_leaves, (state.params, adapted)), strict=True)
    assert all(bool(jnp.any(new != old)) for new, old in pairs)


TARGETS = {
    ("router",): ["router"],
    ("experts",): [*("router", "gate", "up", "down"), *("shared.gate", "shared.up", "shared.down")],
    ("blocks.experts.up", "blocks.experts.down"): ["up", "down"],
    ("shared",): ["shared.gate", "shared.up", "shared.down"],
}


@pytest.mark.parametrize("targets", TARGETS)
def test_targets_name_the_router_the_experts_and_what_is_shared(targets):
    config, params = model()
    adapted = jf.adapt(params, config, jf.LoRA(rank=2, targets=targets), jax.random.key(1))
    leaves = jax.tree.leaves_with_path(adapted, is_leaf=is_custom)
    names = {dotted(path) for path, leaf in leaves if isinstance(leaf, LowRank)}
    assert names == {f"blocks.experts.{name}" for name in TARGETS[targets]}


def test_a_rank_beyond_the_number_of_experts_is_refused_for_the_router():
    config, params = model()
    with pytest.raises(jf.ConfigError, match=r"rank=5 is beyond .*experts\.router.* 4 outputs"):
        jf.adapt(params, config, jf.LoRA(rank=5, targets=("experts",)), jax.random.key(1))
    lora = jf.LoRA(rank=5, targets=("experts",), ranks={"router": 2})
    experts = jf.adapt(params, config, lora, jax.random.key(1))["blocks"]["experts"]
    assert (experts["router"].a.shape[-1], experts["up"].a.shape[-1]) == (2, 5)


def test_dropout_of_experts_differs_by_leaf_layer_and_key():
    config, params = model()
    lora = jf.LoRA(rank=2, targets=("experts",), dropout=0.5)
    adapted = noised(jf.adapt(params, config, lora, jax.random.key(1)))
    losses = jax.jit(jf.loss_of("causal", config))
    batch = batch_of(config)
    values = [
        float(losses(adapted, batch, key)["loss"][0])
        for key in (None, *jax.random.split(jax.random.key(0)))
    ]
    assert len({*values}) == 3
    keyed = jf.keyed(adapted, jax.random.key(0))["blocks"]["experts"]
    keys = np.concatenate([keyed[name].key for name in ("router", "gate", "up", "down")])
    assert len(np.unique(keys, axis=0)) == len(keys) == 4 * config.n_layers


def test_a_leaf_that_knows_nothing_of_groups_replaces_all_weights_but_those_of_experts():
    config, params = model(n_layers=1)
    names = [path for path, spec in rows(jf.specs(config)).items() if spec.is_matrix]
    others = [name for name in names if name.split(".")[-2:-1] != ["experts"]]
    table = adapt_specs(
        jf.specs(config), dict.fromkeys((*others, "blocks.experts.router"), leaf_of_a_user)
    )
    params = init_params(table, jax.random.key(0))
    batch = alone(config)
    found, wanted = (forward(each, config, **batch) for each in (params, made(params)))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * float(wanted.std()), rtol=0)


@pytest.mark.slow
def test_divided_experts_with_an_adapter_equal_those_of_one_device():
    report = on_eight_devices("adapter_devices.py")
    assert len(report["apart"]) == 2
    assert all(difference < 2e-6 for difference in report["apart"].values()), report
    assert report["dropout"] == 0 and np.isfinite(report["loss"])
