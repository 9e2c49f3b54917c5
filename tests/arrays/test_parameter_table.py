"""What follows from the table of parameters: products by any equation, who optimizes what, what a
token costs, and what is said of parameters of another model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import SIZES, alone

import jaxformer as jf
from jaxformer.arrays import params
from jaxformer.arrays.params import contract, init_params, rows
from jaxformer.config.settings import with_settings
from jaxformer.config.train import OptimizerConfig
from jaxformer.models.cost import flops_per_token
from jaxformer.models.transformer import specs
from jaxformer.training.optimizers import run_optimizer

pytestmark = pytest.mark.fast

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "equation, x, w",
    [
        ("BTD,DF->TBF", (2, 3, 8), (8, 5)),
        ("BTD,DF->BFT", (2, 3, 8), (8, 5)),
        ("BTD,DNH->BTHN", (2, 3, 8), (8, 4, 5)),
        ("EBD,EDF->EBF", (4, 2, 8), (4, 8, 5)),
        ("EBD,EFD->EBF", (4, 2, 8), (4, 5, 8)),
        ("DTB,DF->TBF", (8, 3, 2), (8, 5)),
        ("BTNH,HND->BTD", (2, 3, 4, 5), (5, 4, 8)),
        ("BTD,DF->BT", (2, 3, 8), (8, 5)),
    ],
)
def test_contract_is_the_einsum_of_its_equation(equation, x, w):
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in (x, w))
    found = contract(equation, jnp.array(a), jnp.array(b))
    np.testing.assert_allclose(found, np.einsum(equation, a, b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "equation, x, w",
    [
        ("BTD,DNH->BTNH", (1, 1, 8), (8, 4, 5)),
        ("BTNH,NHD->BTD", (1, 1, 4, 5), (4, 5, 8)),
        ("BD,VD->BV", (1, 8), (5, 8)),
    ],
)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_gpu_multiplies_one_row_as_two(equation, x, w, dtype, monkeypatch):
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in (x, w))
    a, b = jnp.array(a, jnp.bfloat16), jnp.array(b, jnp.bfloat16)

    def product(a, b):
        return contract(equation, a, b, dtype=dtype)

    def every(a, b):
        total, gradients = jax.value_and_grad(lambda *args: product(*args).sum(), (0, 1))(a, b)
        return product(a, b), total, gradients

    def program():
        return jax.jit(lambda *args: every(*args)).trace(a, b)

    results = []
    for platform in ("tpu", "gpu", "cpu"):
        monkeypatch.setattr(params, "platform", lambda platform=platform: platform)
        lowered = program().lower()
        assert ("optimization_barrier" in lowered.as_text()) == (platform == "gpu")
        results.append(lowered.compile()(a, b))
    of_rounding = {"rtol": 1e-5 if dtype else 1e-2, "atol": 1e-5 if dtype else 1e-2}
    expected, *others = results
    for found in others:
        for one, other in zip(found[:2], expected[:2], strict=True):
            np.testing.assert_allclose(one, other, **of_rounding)
        for one, other in zip(found[2], expected[2], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "equation, x, w",
    [
        ("BTD,DNH->BTNH", (2, 3, 8), (8, 4, 5)),
        ("BTNH,NHD->BTD", (2, 3, 4, 5), (4, 5, 8)),
        ("BTD,VD->BTV", (2, 3, 8), (7, 8)),
        ("EBD,EDF->EBF", (4, 2, 8), (4, 8, 5)),
        ("...TKGH,...SKH->...KGTS", (2, 3, 4, 2, 5), (2, 6, 4, 5)),
    ],
)
def test_a_cpu_rounds_products_of_16_bits_once_forward_and_backward(equation, x, w):
    a, b = (jnp.array(RNG.standard_normal(shape), jnp.bfloat16) for shape in (x, w))
    wide = [array.astype(jnp.float32) for array in (a, b)]

    def every(a, b, multiply):
        y, back = jax.vjp(lambda a, b: multiply(equation, a, b), a, b)
        return y, *back(y)

    program = jax.jit(lambda a, b: every(a, b, params.product)).lower(a, b)
    dots = re.findall(r"dot_general .* : (.*)", program.as_text())
    assert len(dots) == 3
    assert all(re.fullmatch(r"\(.*bf16>, .*bf16>\) -> .*f32>", types) for types in dots)
    y, d_a, d_b = program.compile()(a, b)
    exact, *_ = every(*wide, jnp.einsum)
    # The gradients are those of the rounded result.
    _, back = jax.vjp(lambda a, b: jnp.einsum(equation, a, b), *wide)
    gradients = back(y.astype(jnp.float32))
    for found, expected in zip((y, d_a, d_b), (exact, *gradients), strict=True):
        assert found.dtype == jnp.bfloat16
        # Half of the last bit, and the order of the sums in float32.
        np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8, atol=1e-5)


def test_a_product_of_16_bits_on_a_cpu_has_every_derivative():
    x, w = (jnp.array(RNG.standard_normal(s), jnp.bfloat16) for s in ((2, 3, 8), (8, 5)))
    wide = [array.astype(jnp.float32) for array in (x, w)]

    def cubes(x, w):
        return (contract("BTD,DF->BTF", x, w).astype(jnp.float32) ** 3).mean()

    def hessian_product(x, w):
        return jax.jvp(jax.grad(cubes, argnums=1), (x, w), (x, w))[1]

    def slope(x, w):
        return jax.jvp(cubes, (x, w), (x, w))[1]

    def of_many(x, w):
        return jax.vmap(jax.grad(cubes, argnums=(0, 1)), (0, None))(x[:, None], w)[0]

    for derivative in (slope, hessian_product, of_many):
        found = derivative(x, w).astype(jnp.float32)
        expected = derivative(*wide)
        assert jnp.abs(found - expected).max() < 0.02 * jnp.abs(expected).max()
    # A sum over an axis of one operand, which is no product backward.
    gradient = jax.grad(lambda w: contract("BTD,DF->BT", x, w).astype(jnp.float32).sum())(w)
    assert gradient.shape == w.shape


@pytest.mark.parametrize(
    "equation", ["BTD,DF->BTG", "BTD,DF->BTFF", "BTD,DFG->BTFG", "BTD,TF->BDF", "BTD DF"]
)
def test_an_equation_that_makes_no_sense_is_refused_with_itself(equation):
    said = f"'{equation}' does not fit the shapes [2, 3, 8] and [8, 5]"
    with pytest.raises(ValueError, match=re.escape(said)):
        contract(equation, jnp.ones((2, 3, 8)), jnp.ones((8, 5)))


def taken_by_muon(config):
    """The paths of the leaves that Muon takes."""
    table = specs(config)
    rule = run_optimizer.OPTIMIZERS["muon"].rule(OptimizerConfig(name="muon"), table)
    params = jax.eval_shape(lambda key: init_params(table, key), jax.random.key(0))
    state = jax.eval_shape(rule.init, params).inner_states["muon"].inner_state[0]
    found = jax.tree.leaves_with_path(state.mu)
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found}


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder_decoder"])
def test_muon_takes_the_matrices_of_all_stacks_and_no_others(family):
    config = with_settings(
        jf.ModelConfig(),
        SIZES | {"family": family, "positions": "learned", "bias": "all", "norm": "layer"},
    )
    ends = ("attention", "ffn") if family != "encoder_decoder" else ("attention", "cross", "ffn")
    blocks = {
        f"blocks.{part}.{leaf}"
        for part in ends
        for leaf in (("gate", "up", "down") if part == "ffn" else ["q", "k", "v", "out"])
    }
    expected = set(blocks)
    if family == "encoder_decoder":
        expected |= {f"encoder.{path}" for path in blocks if ".cross." not in path}
    assert taken_by_muon(config) == expected


@pytest.mark.parametrize(
    "letter, mixer, rank, further",
    [("d", "delta", 2, "rate decay_down gate_down"), ("s", "mamba2", 0, "")],
)
def test_muon_takes_the_projections_of_a_recurrent_layer_and_neither_taps_nor_what_a_head_has(
    letter, mixer, rank, further
):
    changes = {"layer_pattern": letter, "recurrent.rank": rank}
    config = with_settings(jf.ModelConfig(), SIZES | changes)
    leaves = f"q k v gate decay out {further}".split()
    taken = {path for path in taken_by_muon(config) if ".ffn." not in path}
    assert taken == {f"blocks.{mixer}.{leaf}" for leaf in leaves}


def test_a_row_says_which_sequence_it_reads_and_which_is_looked_up():
    config = with_settings(
        jf.ModelConfig(),
        SIZES | {"family": "encoder_decoder", "positions": "t5", "embedding.token_types": 2},
    )
    table = rows(specs(config))
    source = {path for path, spec in table.items() if spec.reads == "source"}
    assert source == {p for p in table if p.startswith("encoder.")} | {
        "blocks.cross.k",
        "blocks.cross.v",
    }
    looked_up = {path for path, spec in table.items() if spec.lookup}
    assert looked_up == {
        "embed.tokens",
        "embed.types",
        "encoder.embed.types",
        "relative_bias",
        "encoder.relative_bias",
    }


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_the_cost_of_a_token_is_counted_by_hand(family):
    """Of a decoder, in products: 2 layers of q 256, k and v 128 each, out 256, three of 16 x 24,
    and scores and values of 32 keys by 16 twice; the output layer 37 x 16. An encoder-decoder has a
    second stack, and attention to its output.
    """
    config = with_settings(jf.ModelConfig(), SIZES | {"family": family})
    layer = 256 + 128 + 128 + 256 + 3 * 16 * 24
    scores = 32 * (16 + 16)
    cross = 256 + 128 + 128 + 256 + scores
    stacks = 1 if family == "decoder" else 2
    total = 6 * (stacks * 2 * (layer + scores) + (stacks - 1) * 2 * cross + 37 * 16)
    assert flops_per_token(config, 32) == total


@pytest.mark.parametrize(
    "call", [jf.forward, jax.jit(jf.forward, static_argnums=1)], ids=["plain", "jit"]
)
def test_params_of_another_layout_are_told_leaf_by_leaf(call):
    config = with_settings(jf.ModelConfig(), SIZES)
    params = jf.init(config, jax.random.key(0))
    deeper = with_settings(jf.ModelConfig(), SIZES | {"n_layers": 3})
    del params["blocks"]["ffn"]["gate"]
    with pytest.raises(
        jf.ConfigError, match=r"blocks\.ffn\.gate: missing, expected \(3, 16, 24\)"
    ) as error:
        call(params, deeper, alone(config)["tokens"])
    assert "blocks.ffn.up: (2, 16, 24) instead of (3, 16, 24)" in str(error.value)
    with pytest.raises(jf.ConfigError, match=r"blocks\.ffn\.gate: missing"):
        jf.generate(params, config, [[1, 2]], 3, temperature=0)
    with pytest.raises(jf.ConfigError, match=r"blocks\.ffn\.gate: missing"):
        jax.eval_shape(lambda p: jf.forward(p, config, alone(config)["tokens"]), params)
