"""The attention kernels: each is the plain one where it serves, and steps back, or is refused,
where it does not."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import fewest
from shapes import model, products_of

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh
from jaxformer.config.settings import with_settings
from jaxformer.layers import cudnn, kernels
from jaxformer.layers.blocked import blocked_attention
from jaxformer.layers.grouped import GROUPED_KERNELS
from jaxformer.layers.kernels import KERNELS, Needs, attend, plain
from jaxformer.layers.masks import AttentionMask, Scoring, TokenLayout, layout_of
from jaxformer.runs.kernel_check import check_attention, checked_lengths, with_proven_kernel
from jaxformer.runs.resolve import attention_kernel, resolve_without_data


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.array(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("kernel", ["xla", "blocked"])
def test_a_row_that_may_see_nothing_gives_zero_and_a_finite_gradient(kernel):
    layout = layout_of(jnp.zeros((1, 4), jnp.int32), None, jnp.array([[0, 1, 1, 0]]))

    @jax.jit
    def run(*arrays):
        mask = AttentionMask(layout, layout)
        out, back = jax.vjp(lambda *a: KERNELS[kernel].run(*a, mask), *arrays)
        return out, back(jnp.ones_like(out))

    out, grads = run(*arrays(*[(1, 4, 2, 8)] * 3))
    out = np.asarray(out)
    assert (out[0, [0, 3]] == 0).all() and (out[0, 1:3] != 0).all()
    assert all(np.isfinite(g).all() for g in grads)


MASKS = {
    "causal": (True, False),
    "window": (0, 5),
    "scale": (0.0, 0.3),
    "values": (8, 5),
    "segments": (False, True),
    "ordered": (True, False),
    "keys": (14, 9),
}


def an_attention_mask(causal, window, scale, segments, ordered, keys):
    """Queries of 14 tokens and `keys` keys; unordered ones are numbered in another order and are no
    segment's start."""
    rng = np.random.default_rng(0)
    sides = []
    for length in (14, keys):
        ids = jnp.array([[1] * 5 + [2] * (length - 7) + [0, 0], [3] * length]) if segments else None
        order = (
            None
            if ordered
            else jnp.array(np.stack([rng.permutation(length) for _ in range(2)]), jnp.int32)
        )
        sides.append(layout_of(jnp.zeros((2, length), jnp.int32), order, ids))
    return AttentionMask(*sides, causal=causal, window=window, scoring=Scoring(scale))


@pytest.mark.parametrize(", ".join(MASKS), fewest(itertools.product(*MASKS.values())))
def test_the_blocked_kernel_equals_the_plain_one_on_every_mask(
    causal, window, scale, values, segments, ordered, keys, monkeypatch
):
    monkeypatch.setattr("jaxformer.layers.blocked.QUERY_BLOCK", 8)
    mask = an_attention_mask(causal, window, scale, segments, ordered, keys)
    inputs = arrays((2, 14, 4, 8), (2, keys, 2, 8), (2, keys, 2, values), (2, 14, 4, values))

    @jax.jit
    def both(q, k, v, slope):
        results = []
        for run in (KERNELS["blocked"].run, plain):
            out, back = jax.vjp(lambda *a, run=run: run(*a, mask), q, k, v)
            results.append((out, *back(slope)))
        return results

    for name, a, b in zip(("out", "dq", "dk", "dv"), *both(*inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5, err_msg=name)


def a_wrong_kernel(q, k, v, mask):
    return 1.01 * blocked_attention(q, k, v, mask)


def a_kernel_that_lets_texts_read_each_other(q, k, v, mask):
    whole = mask._replace(queries=layout_of(q[..., 0, 0], None, None))
    return plain(q, k, v, whole._replace(keys=whole.queries))


def a_kernel_whose_gradient_is_no_number(q, k, v, mask):
    return plain(q, jnp.sqrt(k * 0) + k, v, mask)


@pytest.mark.parametrize(
    "wrong, segments, message",
    [
        (a_wrong_kernel, 0, "wrong on this device"),
        (a_kernel_that_lets_texts_read_each_other, 2, "texts of one row read each other"),
        (a_kernel_whose_gradient_is_no_number, 0, "wrong on this device"),
    ],
)
def test_a_wrong_kernel_is_caught_at_the_start(wrong, segments, message, monkeypatch):
    monkeypatch.setitem(KERNELS, "blocked", dataclasses.replace(KERNELS["blocked"], run=wrong))
    with pytest.raises(RuntimeError, match=message):
        check_attention("blocked", model("llama", **{"attention.max_segments": segments}), 2, 32)


@pytest.mark.parametrize("family, positions", [("decoder", "t5"), ("encoder_decoder", "alibi")])
def test_the_check_compares_the_gradient_of_the_bias_on_padded_rows(family, positions, monkeypatch):
    config = model("llama", family=family, positions=positions, **{"attention.max_segments": 1})
    assert "error" in check_attention("blocked", config, 2, 32)
    padded = set()

    @jax.custom_vjp
    def with_wrong_gradient(bias):
        return bias

    with_wrong_gradient.defvjp(lambda bias: (bias, None), lambda _, slope: (1.01 * slope,))

    def run(q, k, v, mask):
        padded.add(mask.keys.segments is not None)
        if mask.scoring.bias is None:
            return blocked_attention(q, k, v, mask)
        scoring = mask.scoring._replace(bias=with_wrong_gradient(mask.scoring.bias))
        return blocked_attention(q, k, v, mask._replace(scoring=scoring))

    monkeypatch.setitem(KERNELS, "blocked", dataclasses.replace(KERNELS["blocked"], run=run))
    with pytest.raises(RuntimeError, match=r"dbias 1.0e-02, .* output \d.\de-0[6-9], allowed"):
        check_attention("blocked", config, 2, 32)
    assert padded == {True}


def a_refused_kernel(q, k, v, mask):
    raise NotImplementedError("Unsupported sequence length.\nMore of it.")


def a_kernel_that_the_compiler_fails_on(q, k, v, mask):
    raise IndexError("absl::container_internal::raw_hash_map<>::at")


@pytest.mark.parametrize(
    "wrong, why",
    [
        (a_wrong_kernel, "wrong on this device"),
        (a_refused_kernel, "Unsupported"),
        (a_kernel_that_the_compiler_fails_on, "raw_hash_map"),
    ],
)
def test_a_run_takes_the_next_kernel_where_that_chosen_fails_its_check(wrong, why, monkeypatch):
    def resolved(kernel):
        changes = {"model": model("llama", **{"attention.kernel": kernel})}
        data = jf.config.DataConfig(sequence_length=32)
        run = jf.RunConfig(**changes, data=data, train=jf.config.TrainConfig(batch_size=2))
        return resolve_without_data(run, make_mesh(devices=jax.devices()[:1]))[0]

    lines = []
    auto = resolved("auto")
    assert auto.model.attention.kernel == "blocked"
    assert with_proven_kernel(auto, lines.append) is auto
    assert len(lines) == 1 and "blocked was checked against float32" in lines[0]
    monkeypatch.setitem(KERNELS, "blocked", dataclasses.replace(KERNELS["blocked"], run=wrong))
    proven = with_proven_kernel(auto, lines.append)
    assert proven.model.attention.kernel == "xla" and proven.asked == auto.asked
    assert proven.model == with_settings(auto.model, {"attention.kernel": "xla"})
    line = lines.pop()
    assert line.startswith("Attention: xla (plain XLA attention); not blocked: its check on this")
    assert why in line and "\n" not in line and len(lines) == 1
    with pytest.raises((RuntimeError, IndexError), match=why):
        with_proven_kernel(resolved("blocked"), lines.append)


def test_cudnn_reads_narrow_values_as_wide_as_its_keys(monkeypatch):
    def one_width(q, k, v, mask):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 8
        return plain(q, k, v, mask)

    monkeypatch.setattr("jaxformer.layers.cudnn.attention_of_one_width", one_width)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 5, 3, width)).astype(np.float32) for width in (8, 8, 6))
    layout = layout_of(jnp.zeros((2, 5), jnp.int32), None, None)
    mask = AttentionMask(layout, layout)

    def loss(run):
        return lambda *arrays: (run(*arrays, mask) ** 2).sum()

    expected = jax.grad(loss(plain), (0, 1, 2))(q, k, v)
    gradients = jax.grad(loss(KERNELS["cudnn"].run), (0, 1, 2))(q, k, v)
    for a, b in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def case(platform="gpu", dtype="bfloat16", length=1024, segments=0, capability=(9, 0), **changes):
    config = model("llama", **({"head_dim": 64} | changes))
    return Needs.of_run(config, platform, dtype, length, segments, capability)


ENCODER = {"family": "encoder"}


@pytest.mark.parametrize(
    "case, expected, why",
    [
        (case(), "cudnn", ""),
        (case(segments=1), "cudnn", ""),
        (case(segments=9), "cudnn", ""),
        (case(segments=9, capability=(8, 0)), "blocked", "compute capability 9.0"),
        (case(segments=1, capability=(8, 0)), "cudnn", ""),
        (case(segments=65), "blocked", "at most 64 texts"),
        (case(window=8), "cudnn", ""),
        (case(window=8, **ENCODER), "blocked", "to both sides"),
        (case(**{"attention.value_dim": 32}), "cudnn", ""),
        (case(**{"attention.value_dim": 96}), "blocked", "values are at most as wide as its keys"),
        (case(dtype="float32"), "blocked", "16 bits"),
        (case(head_dim=300), "blocked", "head width"),
        (case(positions="alibi"), "cudnn", ""),
        (case(positions="t5", segments=1), "cudnn", ""),
        (case(positions="t5", segments=2), "blocked", "bias of the scores of packed rows"),
        (case(positions="t5", window=8), "blocked", "no window beside a bias"),
        (case(positions="alibi", length=1023), "blocked", "even lengths"),
        (case(length=1023), "cudnn", ""),
        (case(**{"attention.soft_cap": 30.0}), "blocked", "soft-cap"),
        (case(**{"attention.sinks": True}), "blocked", "sinks"),
        (case(dropout=0.1), "blocked", "not cudnn: it has no dropout"),
        (case(dropout=0.1, **{"attention.dropout": 0.0}), "cudnn", ""),
        (case(**{"attention.dropout": 0.1}), "blocked", "and model.attention.dropout is not 0"),
        (case("tpu"), "tpu", ""),
        (case("tpu", segments=99), "tpu", ""),
        (case("tpu", length=100), "tpu", ""),
        (case("tpu", window=8, **ENCODER), "tpu", ""),
        (case("tpu", **{"attention.value_dim": 32, "attention.soft_cap": 30.0}), "tpu", ""),
        (case("tpu", **{"attention.sinks": True}), "tpu", ""),
        (case("tpu", positions="t5"), "blocked", "not tpu: it has no bias of the scores"),
        (case("tpu", dropout=0.1), "blocked", "not tpu: it has no dropout"),
        (case("cpu"), "blocked", ""),
        (case("cpu", window=8, **{"attention.value_dim": 32}), "blocked", ""),
        (case("cpu", dropout=0.1), "xla", "not blocked: on a CPU the dropout"),
        (case("cpu", dropout=0.1, **{"attention.dropout": 0.0}), "blocked", ""),
        (case("metal"), "xla", ""),
    ],
)
def test_the_kernel_is_the_fastest_that_serves_the_case_and_the_sentence_says_why(
    case, expected, why
):
    name, sentence = attention_kernel("auto", case)
    assert name == expected and sentence.startswith(expected) and why in sentence


@pytest.mark.parametrize(
    "asked, case, why",
    [
        ("cudnn", case("cpu"), "needs an NVIDIA GPU"),
        ("tpu", case("cpu"), "needs a TPU"),
        ("cudnn", case(segments=99), "at most 64 texts"),
        ("tpu", case("tpu", positions="alibi"), "bias of the scores"),
        ("cudnn", case(positions="alibi", segments=9), "packed rows"),
        ("tpu", case("tpu", dropout=0.5), "dropout"),
        ("tpu", case("tpu", **{"attention.dropout": 0.5}), "model.attention.dropout is not 0"),
    ],
)
def test_a_kernel_asked_for_by_name_is_refused_where_it_cannot_run(asked, case, why):
    assert attention_kernel("xla", case)[0] == "xla"
    with pytest.raises(jf.ConfigError, match=rf"{asked}.*{why}"):
        attention_kernel(asked, case)


def test_packed_rows_are_refused_in_a_version_of_jax_whose_entry_is_not_known(monkeypatch):
    cudnn._entry.cache_clear()
    monkeypatch.setattr(jax, "__version_info__", (0, 14, 0))
    name, sentence = attention_kernel("auto", case(segments=9))
    cudnn._entry.cache_clear()
    assert name == "blocked" and "known in versions 0.10 to 0.12" in sentence


ORDERED = layout_of(jnp.zeros((1, 128), jnp.int32), None, None)
SEGMENTS = layout_of(jnp.zeros((1, 128), jnp.int32), None, jnp.ones((1, 128), jnp.int32))
CACHED = TokenLayout(ORDERED.positions, SEGMENTS.segments)
SHORT = layout_of(jnp.zeros((1, 64), jnp.int32), None, None)
ODD = layout_of(jnp.zeros((1, 127), jnp.int32), None, None)
BIASED = Scoring(bias=jnp.ones((1, 2, 128, 128)))
ALL = {"cudnn", "tpu", "blocked"}
CALLS = {  # a call that a kernel may meet, and the kernels that serve it
    "a row": (AttentionMask(ORDERED, ORDERED), ALL),
    "both ways": (AttentionMask(ORDERED, ORDERED, causal=False), ALL),
    "packed rows": (AttentionMask(SEGMENTS, SEGMENTS), ALL - {"cudnn"}),
    "packed rows of a bound": (AttentionMask(SEGMENTS, SEGMENTS, max_segments=8), ALL),
    "a padded source": (AttentionMask(ORDERED, SEGMENTS, causal=False, max_segments=1), ALL),
    "a short row": (AttentionMask(SHORT, SHORT), ALL),
    "a cache": (AttentionMask(ORDERED, CACHED, max_segments=1), {"blocked"}),
    "positions": (AttentionMask(CACHED, CACHED, max_segments=1), {"blocked"}),
    "a window": (AttentionMask(ORDERED, ORDERED, window=8), ALL),
    "a window to both sides": (
        AttentionMask(ORDERED, ORDERED, causal=False, window=8),
        {"tpu", "blocked"},
    ),
    "positions of a window to both sides": (
        AttentionMask(CACHED, CACHED, causal=False, window=8, max_segments=1),
        {"blocked"},
    ),
    "a bias": (AttentionMask(ORDERED, ORDERED, scoring=BIASED), ALL - {"tpu"}),
    "a bias of padded rows": (
        AttentionMask(SEGMENTS, SEGMENTS, scoring=BIASED, max_segments=1),
        ALL - {"tpu"},
    ),
    "a bias of packed rows": (
        AttentionMask(SEGMENTS, SEGMENTS, scoring=BIASED, max_segments=2),
        {"blocked"},
    ),
    "a bias and a window": (AttentionMask(ORDERED, ORDERED, window=8, scoring=BIASED), {"blocked"}),
    "a bias of an odd number of keys": (
        AttentionMask(ORDERED, ODD, causal=False, scoring=BIASED),
        {"blocked"},
    ),
    "a soft-cap": (
        AttentionMask(ORDERED, ORDERED, scoring=Scoring(soft_cap=2.0)),
        {"tpu", "blocked"},
    ),
    "dropout": (AttentionMask(ORDERED, ORDERED, dropout=(0.1, jax.random.key(0))), {"blocked"}),
    "a rate without a key": (AttentionMask(ORDERED, ORDERED, dropout=(0.1, None)), ALL),
    "sinks": (
        AttentionMask(ORDERED, ORDERED, scoring=Scoring(sinks=jnp.zeros(2))),
        {"tpu", "blocked"},
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "xla"])
def test_a_call_that_a_kernel_cannot_serve_goes_the_plain_way(kernel, call, monkeypatch):
    """A kernel chosen for the batches of a run also meets the cache and the padding of its
    samples."""
    mask, served = CALLS[call]
    fused = dataclasses.replace(KERNELS[kernel], run=lambda *_: jnp.ones(()))
    monkeypatch.setitem(KERNELS, kernel, fused)
    reference = dataclasses.replace(KERNELS["xla"], run=lambda *_: jnp.zeros(()))
    monkeypatch.setitem(KERNELS, "xla", reference)
    assert attend(kernel, *arrays(*[(1, 128, 2, 8)] * 3), mask) == (kernel in served)


def test_a_kernel_lacks_features_that_are_known(monkeypatch):
    monkeypatch.setattr(kernels, "lacks_packed_rows", lambda: "of another version")
    everything = Needs(
        capability=(7, 0),
        dtype="float32",
        head_width=300,
        lengths=(1, 1),
        exchanges=("gather", "none"),
        context=2,
        segments=math.inf,
        causal=False,
        window=1,
        leading=1,
        dropout=True,
        bias=True,
        soft_cap=True,
        sinks=True,
        positions=True,
        wide_values=True,
    )
    known = {
        name
        for platform in ("gpu", "tpu")
        for name, _ in kernels.features(everything._replace(platform=platform))
    }
    rows = [table[name] for table in (KERNELS, GROUPED_KERNELS) for name in table]
    assert known == frozenset.union(*(row.lacks for row in rows))


def test_plain_attention_in_16_bits_has_no_float32_product_forward_or_backward():
    q, k, v = (a.astype(jnp.bfloat16) for a in arrays(*[(1, 16, 2, 8)] * 3))
    layout = layout_of(jnp.zeros((1, 16), jnp.int32), None, None)

    def total(q, k, v):
        return plain(q, k, v, AttentionMask(layout, layout)).astype(jnp.float32).sum()

    gradient = jax.grad(total, argnums=(0, 1, 2))
    assert products_of(jax.make_jaxpr(gradient)(q, k, v).jaxpr) == [{"bfloat16"}] * 6
    expected = gradient(*(a.astype(jnp.float32) for a in (q, k, v)))
    for a, b in zip(gradient(q, k, v), expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05)
    _, pushed = jax.jvp(total, (q, k, v), (q, k, v))
    assert np.isfinite(pushed)


@pytest.mark.parametrize(
    "heads, sizes, lengths, expected",
    [
        (32, {"context": 1, "tensor": 1}, (4096, 0), (4096, 0)),
        (32, {"context": 1, "tensor": 1}, (32_768, 0), (4096, 0)),
        (32, {"context": 16, "tensor": 1}, (131_072, 0), (16_384, 0)),
        (32, {"context": 8, "tensor": 1}, (524_288, 262_144), (8192, 4096)),
        (32, {"context": 1, "tensor": 1}, (9000, 0), (9000, 0)),
    ],
)
def test_a_kernel_is_checked_on_rows_whose_scores_fit(heads, sizes, lengths, expected):
    assert checked_lengths(heads, sizes, *lengths) == expected
