"""The cross-entropy: its tiled form is the dense one, and holds no table of all logits."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from products import fewest
from shapes import products_of, weights_and_tokens

import jaxformer as jf
from jaxformer.adapters.low_rank import LowRank
from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.losses import cross_entropy as cross_entropy_module
from jaxformer.losses.cross_entropy import (
    DIFFERENTIABLE_PASSES,
    cross_entropy,
    ring_sum,
    row_nats,
    top_and_total,
    top_and_total_at_once,
)

B, T, D, V = 3, 10, 8, 23
EXTRAS = {"label_smoothing": 0.2, "z_loss": 1e-3, "soft_cap": 2.0}


def inputs(dtype=jnp.float32, shape=(B, T, D, V)):
    b, t, d, v = shape
    rng = np.random.default_rng(0)
    x, head = rng.standard_normal((b, t, d), "f"), rng.standard_normal((v, d), "f")
    targets, weights = rng.integers(0, v, (b, t)), rng.random((b, t), "f")
    weights[0, 1] = weights[-1] = 0
    return jnp.asarray(x, dtype), *map(jnp.asarray, (head, targets, weights))


def reference(x, head, targets, weights, label_smoothing=0.0, z_loss=0.0, soft_cap=0.0):
    logits = jnp.einsum("btd,vd->btv", x, head)
    logits = soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits
    logp = jax.nn.log_softmax(logits)
    one_hot, vocab = jax.nn.one_hot(targets, head.shape[0]), head.shape[0]
    goal = (1 - label_smoothing) * one_hot + label_smoothing / vocab
    lse = jax.nn.logsumexp(logits, axis=-1)
    nats = -jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
    return (weights * (-(goal * logp).sum(-1) + z_loss * lse**2)).sum(), (weights * nats).sum()


def both(function, *args, **options):
    """(objective, nats), and the gradients of 3 x objective to x and head."""

    def scaled(x, head):
        objective, nats = function(x, head, *args[2:], **options)
        return 3 * objective, (objective, nats)

    grads, sums = jax.jit(jax.grad(scaled, argnums=(0, 1), has_aux=True))(*args[:2])
    return sums, grads


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=str)
def test_every_tile_gives_the_formula_and_its_gradients(extras):
    args = inputs()
    expected, expected_grads = both(reference, *args, **extras)
    for tile in (None, 1, 4):
        sums, grads = both(cross_entropy, *args, tile=tile, **extras)
        np.testing.assert_allclose(sums, expected, rtol=1e-5)
        for grad, wanted in zip(grads, expected_grads, strict=True):
            np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)


tiled = pytest.mark.parametrize("tile", [None, 4])


@tiled
def test_nats_by_row_change_nothing_else(tile):
    args = inputs()
    (objective, nats), grads = both(cross_entropy, *args, tile=tile, **EXTRAS)
    (same, by_row), same_grads = both(cross_entropy, *args, tile=tile, nats_by_row=True, **EXTRAS)
    assert by_row.shape == (B,) and same == objective
    np.testing.assert_allclose(by_row.sum(), nats, rtol=1e-6)
    np.testing.assert_allclose(by_row, row_nats(*args, soft_cap=EXTRAS["soft_cap"]), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, grads, same_grads)


def test_a_bias_is_added_to_the_logits_and_has_its_gradient():
    x, head, targets, weights = inputs()
    bias = np.random.default_rng(9).standard_normal(V, "f")

    def by_column(x, head, bias):
        """The bias as one more column, which every row reads as 1."""
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
        head = jnp.concatenate([head, bias[:, None]], -1)
        return 3 * reference(x, head, targets, weights, **EXTRAS)[0]

    def value_and_gradients(function):
        return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2)))(x, head, bias)

    expected = jax.tree.leaves(value_and_gradients(by_column))
    for tile in (None, 4):

        def ours(x, head, bias, options=EXTRAS | {"tile": tile}):
            return 3 * cross_entropy(x, head, targets, weights, bias=bias, **options)[0]

        found = value_and_gradients(ours)
        for a, b in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@tiled
def test_tokens_of_weight_zero_count_for_nothing_and_nats_carry_no_gradient(tile):
    x, head, targets, weights = inputs()
    step = jax.jit(
        lambda targets: both(cross_entropy, x, head, targets, weights, tile=tile, z_loss=1e-4)
    )
    (objective, _), (d_x, _) = step(targets)
    (same, _), _ = step(jnp.where(weights == 0, 0, targets))
    assert objective == same
    assert not np.any(np.asarray(d_x)[np.asarray(weights) == 0])

    def nats(x, head):
        return cross_entropy(x, head, targets, weights, tile=tile)[1]

    value, grads = jax.jit(jax.value_and_grad(nats, argnums=(0, 1)))(jnp.zeros_like(x), head)
    assert not any(np.any(grad) for grad in grads)
    np.testing.assert_allclose(value / weights.sum(), np.log(V), rtol=1e-6)  # of uniform logits


@tiled
def test_large_logits_stay_finite(tile):
    x, head, targets, weights = inputs()
    sums, grads = both(cross_entropy, 1e4 * x, head, targets, weights, tile=tile, z_loss=1e-4)
    assert all(np.isfinite(a).all() for a in (*sums, *grads))


def test_half_precision_tiles_keep_float32_sums():
    x, head, targets, weights = inputs(jnp.bfloat16)
    exact = x.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32), targets, weights
    expected, expected_grads = both(reference, *exact)
    sums, grads = both(cross_entropy, x, head, targets, weights, tile=4)
    np.testing.assert_allclose(sums, expected, rtol=1e-4)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]
    for grad, wanted in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad.astype(jnp.float32), wanted, rtol=0.05, atol=0.05)


HEADS = {
    "learns": lambda head: head,
    "does not learn": jax.lax.stop_gradient,
    "below an adapter": lambda head: LowRank(
        jax.lax.stop_gradient(head), head[:2].T, head[:, :2].T, jnp.float32(0.5), inputs=(-1,)
    ),
}


@pytest.mark.parametrize(
    "loss, kind, tile",
    fewest(
        itertools.product([lambda *a, **o: cross_entropy(*a, **o)[0], row_nats], HEADS, [None, 4]),
        1,
    ),
)
def test_an_output_layer_of_16_bits_has_no_float32_product(loss, kind, tile):
    """Accelerators compute these several times slower."""
    x, head, targets, weights = inputs(jnp.bfloat16)

    def total(x, head):
        return loss(x, HEADS[kind](head), targets, weights, tile=tile).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))
    dtypes = products_of(jax.make_jaxpr(gradient)(x, head).jaxpr)
    assert dtypes and set(map(frozenset, dtypes)) == {frozenset({"bfloat16"})}
    exact = gradient(x.astype(jnp.float32), head.astype(jnp.bfloat16).astype(jnp.float32))
    for grad, wanted in zip(gradient(x, head), exact, strict=True):
        np.testing.assert_allclose(grad.astype(jnp.float32), wanted, rtol=0.05, atol=0.05)


def test_a_large_vocabulary_is_never_held_whole():
    shape = (2, 1024, 16, 20_000)
    args = inputs(shape=shape)
    step = jax.jit(jax.value_and_grad(lambda *a: cross_entropy(*a)[0], argnums=(0, 1)))
    temporaries = step.lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 4 * 2 * 1024 * 20_000, f"{temporaries / 2**20:.0f} MiB"


def test_few_logits_differentiate_in_forward_mode():
    x, head, targets, weights = inputs()

    @jax.jit
    def objective(x):
        return cross_entropy(x, head, targets, weights)[0]

    _, slope = jax.jvp(objective, (x,), (x,))
    grad = jax.grad(objective)(x)
    np.testing.assert_allclose(slope, jnp.vdot(grad, x), rtol=1e-4)


def test_an_output_layer_that_does_not_learn_has_no_gradient():
    """Neither its product, of tokens and vocabulary, nor its sum over tiles is in the program."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 16))
    head = jax.random.normal(jax.random.key(1), (37, 16))
    targets, weights = jnp.arange(16).reshape(2, 8), jnp.ones((2, 8))

    def objective(x, head):
        return cross_entropy(x, head, targets, weights, tile=4)[0]

    def of_head(program):
        return str(program).count("f32[37,16]")

    alone = jax.make_jaxpr(jax.grad(objective))(x, head)
    both = jax.make_jaxpr(jax.grad(objective, argnums=(0, 1)))(x, head)
    assert of_head(alone) < of_head(both)
    assert "dimension_numbers=(([0], [0])" in str(both)  # tokens are summed over
    assert "dimension_numbers=(([0], [0])" not in str(alone)
    slopes = jax.jit(jax.grad(objective, argnums=(0, 1)))(x, head)
    np.testing.assert_allclose(jax.jit(jax.grad(objective))(x, head), slopes[0], atol=1e-5)


@pytest.mark.parametrize("devices, direction", [(2, 1), (5, -1)])
def test_a_ring_gives_each_device_its_columns_of_the_sum(devices, direction):
    x = jax.random.normal(jax.random.key(0), (devices, 6, 4 * devices))
    ring = jax.vmap(lambda x: ring_sum(x, "fsdp", devices, direction), axis_name="fsdp")
    expected = jnp.moveaxis(x.sum(0).reshape(6, devices, 4), 1, 0)
    np.testing.assert_allclose(ring(x), expected, rtol=0, atol=2e-6)


def test_one_pass_over_logits_gives_their_maximum_and_total():
    logits = 30 * jax.random.normal(jax.random.key(0), (5, 1000))
    logits = logits.at[0, :990].set(-jnp.inf).at[1].set(0.0).at[2, 7].set(1e4)
    top, total = jax.jit(top_and_total_at_once)(logits)
    expected_top, expected_total = top_and_total(logits)
    np.testing.assert_array_equal(top, expected_top)
    np.testing.assert_allclose(total, expected_total, rtol=2e-6)


@pytest.mark.parametrize("loss, extras", [(cross_entropy, EXTRAS), (row_nats, {})])
def test_tiles_of_an_accelerator_give_the_sums_and_gradients_of_a_cpu(loss, extras, monkeypatch):
    args = inputs()

    def values_and_program():
        def total(x, head):
            return jnp.square(jnp.stack(loss(x, head, *args[2:], tile=4, **extras))).sum()

        step = jax.value_and_grad(total, argnums=(0, 1))
        return jax.tree.leaves(jax.jit(step)(*args[:2])), str(jax.make_jaxpr(step)(*args[:2]))

    of_cpu, program_of_cpu = values_and_program()
    monkeypatch.setattr(cross_entropy_module, "platform", lambda: "gpu")
    of_gpu, program_of_gpu = values_and_program()
    for value, expected in zip(of_gpu, of_cpu, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6 * abs(expected).max())
    assert "reduce_max" in program_of_cpu and "reduce_max" not in program_of_gpu


def test_only_a_vocabulary_that_no_mesh_splits_is_read_in_one_pass():
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")

    def passes_on(**sizes):
        shape = tuple(sizes.get(name, 1) for name in MESH_AXES)
        kinds = (AxisType.Auto,) * len(shape)
        mesh = AbstractMesh(shape, MESH_AXES, axis_types=kinds, abstract_device=gpu)
        with jax.sharding.use_abstract_mesh(mesh):
            return cross_entropy_module._passes()

    assert passes_on(fsdp=4).totals is top_and_total_at_once
    assert passes_on(tensor=2) == DIFFERENTIABLE_PASSES


@pytest.mark.parametrize(
    "kind, tile, dtype", [("learns", None, jnp.float32), ("below an adapter", 4, jnp.bfloat16)]
)
def test_logits_of_bfloat16_are_rounded_and_nothing_else(dtype, tile, kind):
    """What follows them is that of the same logits in float32, up to the rounding of gradients."""
    x, head, targets, weights = inputs(dtype)
    learned = HEADS[kind](head)
    logits = cross_entropy_module.logits_of_rows(x, learned, None, jnp.bfloat16)
    np.testing.assert_array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
    options = {"z_loss": 1e-3, "tile": tile, "logits_dtype": "bfloat16"}
    compiled = jax.jit(cross_entropy, static_argnames=("z_loss", "tile", "logits_dtype"))
    sums = compiled(x, learned, targets, weights, **options)
    # A product with the identity gives the logits themselves.
    same = compiled(logits, jnp.eye(V), targets, weights, z_loss=1e-3, tile=tile)
    # A compiled program may add the two products of an adapter before it rounds.
    np.testing.assert_allclose(sums, same, rtol=1e-3 if kind == "below an adapter" else 1e-5)

    def objective(x, **options):
        return cross_entropy(x, learned, targets, weights, tile=tile, **options)[0]

    slopes = jax.jit(jax.grad(objective), static_argnames="logits_dtype")
    rounded, exact = slopes(x, logits_dtype="bfloat16"), slopes(x)
    assert rounded.dtype == dtype
    np.testing.assert_allclose(*(a.astype(jnp.float32) for a in (rounded, exact)), atol=0.08)
    assert np.any(rounded != exact)


def test_a_loss_refuses_rows_beyond_the_learned_positions():
    params, config, _ = weights_and_tokens("gpt2")
    tokens = np.ones((1, 65), int)
    batch = {"tokens": tokens, "targets": tokens, "weights": np.ones((1, 65), np.float32)}
    with pytest.raises(jf.ConfigError, match=r"tokens has rows of 65, .*max_length=64 reach 64"):
        jf.loss_of("causal", config)(params, batch, None)
