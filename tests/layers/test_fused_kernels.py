"""The kernels on masks of every kind, forward and backward, beside float32 mathematics. Those of
Pallas are interpreted on a CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import slow_but

from jaxformer.layers import blocked, pallas
from jaxformer.layers.dot_product import attention_weights, plain, weighted_values
from jaxformer.layers.kernels import KERNELS
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of

T, H = 100, 8  # no multiple of 128, so that splash attention pads
KINDS = {  # causal, keys, queries and keys of one sequence
    "decoder": (True, T, True),
    "encoder": (False, T, True),
    "cross": (False, 72, False),
}
SCORINGS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "soft-cap": {"soft_cap": 1.5},
    "sinks": {"sinks": jnp.array([0.5, -1.0, 0.0, 2.0])},
    "bias": {"bias": 1},
    "bias of each row": {"bias": 2},
}


def segments_of(length, rows, rng):
    """Rows of three texts and padding, and rows of one padded text."""
    cuts = np.sort(rng.choice(np.arange(1, length), (rows, 3)), axis=1)
    ids = (np.arange(length)[None, :, None] >= cuts[:, None]).sum(-1) + 1
    ids = np.where(ids == 4, 0, ids)
    ids[-1] = np.arange(length) < length - 7
    return jnp.array(ids, jnp.int32)


def the_case(kind, packed, window, kv_heads, scoring, lengths=None):
    causal, keys, relative = KINDS[kind]
    rows, keys = (T, keys) if lengths is None else lengths[kind]
    rng = np.random.default_rng(0)
    shapes = [(2, rows, 4, H), (2, keys, kv_heads, H), (2, keys, kv_heads, H), (2, rows, 4, H)]
    arrays = [jnp.array(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    sides = [
        layout_of(jnp.zeros((2, n), jnp.int32), None, segments_of(n, 2, rng) if packed else None)
        for n in (rows, keys)
    ]
    if relative:
        sides[1] = sides[0]
    options = dict(SCORINGS[scoring])
    if "bias" in options:
        shape = (options["bias"], 4, rows, keys)
        options["bias"] = jnp.array(rng.standard_normal(shape), jnp.float32)
    mask = AttentionMask(*sides, causal, window if relative else 0, Scoring(**options), relative, 3)
    return arrays, mask


def outputs(run, arrays, mask):
    """The output, and the gradients of q, k, v, the bias and the sinks."""

    def attention(q, k, v, bias, sinks):
        scoring = mask.scoring._replace(bias=bias, sinks=sinks)
        return run(q, k, v, mask._replace(scoring=scoring))

    inputs = (*arrays[:3], mask.scoring.bias, mask.scoring.sinks)

    @jax.jit
    def both(*inputs):
        out, back = jax.vjp(attention, *inputs)
        return out, *back(arrays[3])

    return [a for a in both(*inputs) if a is not None]


def assert_same(kernel, arrays, mask, reference=plain):
    found = outputs(KERNELS[kernel].run, arrays, mask)
    expected = outputs(reference, arrays, mask)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-5 * float(np.abs(b).max()) + 1e-6)


# Of each kind packed and not, with a window and without, and each number of heads.
SPLASHED = [
    ("decoder", 1, 20, 2),
    ("encoder", 0, 20, 4),
    ("cross", 1, 0, 1),
    ("decoder", 0, 0, 4),
    ("encoder", 1, 20, 1),
    ("cross", 0, 0, 2),
]


@pytest.mark.parametrize("kind, packed, window, kv_heads", slow_but(SPLASHED, *SPLASHED[:2]))
def test_splash_attention_is_plain_attention(kind, packed, window, kv_heads):
    assert_same("tpu", *the_case(kind, packed, window, kv_heads, "plain"))


LONG = {"decoder": (256, 256), "encoder": (256, 256), "cross": (256, 128)}


@pytest.mark.slow
@pytest.mark.parametrize("scoring, packed", [("scale", False), ("soft-cap", True), ("sinks", True)])
def test_splash_attention_scores_as_plain_attention_does_over_several_blocks(
    scoring, packed, monkeypatch
):
    monkeypatch.setattr(pallas, "blocks_for", lambda *_: pallas.Blocks(128, 128))
    assert_same("tpu", *the_case("decoder", packed, 150, 2, scoring, LONG))


# Each kind and each scoring.
BLOCKED = [
    ("decoder", "plain", True),
    ("encoder", "scale", False),
    ("cross", "soft-cap", True),
    ("decoder", "sinks", False),
    ("encoder", "bias", True),
    ("cross", "bias of each row", False),
]


@pytest.mark.parametrize("kind, scoring, packed", BLOCKED)
def test_blocked_attention_scores_as_plain_attention_does(kind, scoring, packed):
    assert_same("blocked", *the_case(kind, packed, 20, 2, scoring))


@pytest.mark.parametrize(
    "length, dtype, tolerance",
    [(1, "float32", 1e-5), (4, "float32", 1e-5), (37, "float32", 1e-5), (14, "bfloat16", 0.05)],
)
def test_blocked_attention_is_plain_attention_of_any_length_and_dtype(
    length, dtype, tolerance, monkeypatch
):
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 4)
    monkeypatch.setattr(blocked, "MOST_BLOCKS", 4)
    lengths = {"decoder": (length, length)}
    arrays, mask = the_case("decoder", False, 0, 2, "plain", lengths)
    arrays = [array.astype(dtype) for array in arrays]
    found = outputs(KERNELS["blocked"].run, arrays, mask)
    expected = outputs(plain, [array.astype(jnp.float32) for array in arrays], mask)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(np.float32(a), b, rtol=tolerance, atol=tolerance)
    q, k, *others = arrays  # and scores that are large stay finite
    large = outputs(KERNELS["blocked"].run, [1000 * q, 1000 * k, *others], mask)
    assert all(np.isfinite(a).all() for a in large)


@pytest.mark.slow
def test_blocked_attention_needs_less_than_half_the_memory_of_plain_attention():
    shapes = [jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)] * 3
    layout = layout_of(jnp.zeros((1, 1024), jnp.int32), None, None)

    def temporaries(kernel, mask):
        """Of the gradient, in bytes."""

        def total(q, k, v):
            return jnp.square(KERNELS[kernel].run(q, k, v, mask)).sum()

        step = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        return step.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    mask = AttentionMask(layout, layout)
    assert temporaries("blocked", mask) < temporaries("xla", mask) / 2
    # A CPU has the random bits of several blocks at a time; on an H100 they take no memory.
    dropping = with_dropout(mask)
    assert temporaries("blocked", dropping) < 0.75 * temporaries("xla", dropping)


RATE = 0.3


def with_dropout(mask, seed=0):
    return mask._replace(dropout=(RATE, jax.random.key(seed)))


def kept_weights(arrays, mask):
    """bool [B, N, T, S]: the weights that are not dropped, seen through values that are a unit
    matrix."""
    q, k = arrays[:2]
    length, heads = k.shape[1], k.shape[2]
    unit = np.broadcast_to(np.eye(length)[:, None], (len(k), length, heads, length))
    unit = jnp.asarray(unit, jnp.float32)
    found = jax.jit(lambda q, k, unit: KERNELS["blocked"].run(q, k, unit, mask))(q, k, unit)
    return np.swapaxes(np.asarray(found) > 0, 1, 2)


@pytest.mark.parametrize(
    "case",
    [
        ("decoder", True, 20, 2, "bias of each row"),
        pytest.param(("cross", True, 0, 2, "sinks"), marks=pytest.mark.slow),
    ],
    ids=lambda case: " ".join(map(str, case)),
)
def test_blocked_attention_drops_the_same_weights_forward_and_backward(case, monkeypatch):
    """With the weights that are dropped in the forward pass known, so are its gradients."""
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 40)
    arrays, mask = the_case(*case)
    mask = with_dropout(mask)
    kept = kept_weights(arrays, mask)

    def reference(q, k, v, mask):
        weights = attention_weights(q, k, mask)
        return weighted_values(jnp.where(kept, weights / (1 - RATE), 0), v)

    seen = jax.jit(lambda q, k: attention_weights(q, k, mask))(*arrays[:2]) > 0
    assert not (kept & ~seen).any()
    assert abs(float(kept.sum() / seen.sum()) - (1 - RATE)) < 0.02
    assert_same("blocked", arrays, mask, reference)


def test_the_dropout_of_blocked_attention_follows_its_key(monkeypatch):
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 25)
    arrays, mask = the_case("encoder", False, 0, 2, "plain")
    first, again, other = (kept_weights(arrays, with_dropout(mask, seed)) for seed in (0, 0, 1))
    assert (first == again).all()
    assert abs(float((first == other).mean()) - (RATE**2 + (1 - RATE) ** 2)) < 0.02
    parts = first.reshape(2, 4, 4, 25, T)  # rows, heads, blocks of queries
    parts = parts.reshape(32, 25 * T)
    for a, b in itertools.combinations(parts, 2):
        assert abs(float((a == b).mean()) - (RATE**2 + (1 - RATE) ** 2)) < 0.05
