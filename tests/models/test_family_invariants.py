"""The laws of all families: what a token sees, and that packing, padding, caching, loops and
compilation change nothing.

The products come from the tables of settings, so that a row added to a table is under every law.
Calls run without a compiler where they can: the models are so small that compiling each would take
most of the time.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import (
    BASE,
    DOCUMENT,
    DOCUMENTS,
    FAMILIES,
    HINTS,
    LAYOUTS,
    LONGROPE,
    POSITIONS,
    SIZES,
    VARIANTS,
    alone,
    cached,
    config_of,
    fits,
    holding_each_option,
    laid_out,
    meet,
    pairwise,
    params_of,
    where,
)
from products import covering, fewest, slow_but

import jaxformer as jf
from jaxformer.config.settings import choices, with_settings

WRITERS = ("decoder", "encoder_decoder")
# What mixes tokens, so that packing or a cache could change it.
MIXING = ("family", "heads", "window", "scores", "norm_placement", "residual", "kernel")
PAIRS, APART = pairwise()


def small(family, positions, **changes):
    return with_settings(
        jf.ModelConfig(), SIZES | {"family": family, "positions": positions} | changes
    )


def close(found, expected):
    """Equal to 2e-5 of the largest element."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * float(jnp.abs(expected).max()))


@functools.cache
def logits_alone(config):
    return jf.forward(params_of(config), config, **alone(config))


@functools.cache
def logits_laid_out(config, way):
    batch = laid_out(config)
    return (
        cached(config, batch) if way == "cached" else jf.forward(params_of(config), config, **batch)
    )


def assert_documents_are_as_alone(config, way):
    """In every layout."""
    rows = logits_laid_out(config, way)
    assert np.isfinite(rows).all()
    for found, layout in zip(rows, LAYOUTS, strict=True):
        for document, cut in where(layout).items():
            close(found[cut], logits_alone(config)[document])


def assert_documents_are_as_alone_in_every_way(config):
    for way in ("full", "cached") if config.family in WRITERS else ("full",):
        assert_documents_are_as_alone(config, way)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_packing_padding_and_caching_change_nothing(positions, family):
    assert_documents_are_as_alone_in_every_way(small(family, positions))


@pytest.mark.parametrize(
    "choice",
    slow_but(PAIRS, *holding_each_option(PAIRS, MIXING)),
    ids=lambda choice: " ".join(o for f, o in choice.items() if o != BASE[f]),
)
def test_every_pair_of_variants_is_packed_and_cached_as_it_is_alone(choice):
    assert_documents_are_as_alone_in_every_way(config_of(choice))


def test_the_pairs_are_all_there():
    options = [(factor, option) for factor, row in VARIANTS.items() for option in row]
    held = {
        frozenset(pair) for choice in PAIRS for pair in itertools.combinations(choice.items(), 2)
    }
    missing = [
        pair
        for pair in itertools.combinations(options, 2)
        if meet(*pair) and frozenset(pair) not in held | APART
    ]
    assert not missing and len(options) == 74 and len(PAIRS) >= 55
    assert all(not fits(dict(pair)) for pair in APART) and len(APART) == 16


def test_every_activation_is_another_function():
    apart = {True: [], False: []}
    for activation in choices(HINTS["activation"]):
        config = small("decoder", "rope", activation=activation, n_layers=4)
        logits = logits_alone(config)
        assert all(jnp.abs(logits - other).max() > 1e-3 for other in apart[config.gated])
        apart[config.gated].append(logits)


@pytest.mark.parametrize(
    "factor", slow_but([*VARIANTS][1:], *(VARIANTS.keys() - {"family", "positions", "bias"}))
)
def test_every_variant_moves_the_logits(factor):
    """A setting that nothing reads would leave them; a kernel has to, and rms1p, whose scales begin
    at 0 and not at 1. Biases of norms alone need a norm that has one."""
    for option in VARIANTS[factor].keys() - {BASE[factor]}:
        beside = {"norm": "layer"} if (factor, option) == ("bias", "norm") else {}
        config, changed = (
            with_settings(config_of(c), {"rope.original_length": 4})
            for c in (beside, {**beside, factor: option})
        )
        apart = jnp.abs(logits_alone(config) - logits_alone(changed)).max()
        same = factor == "kernel" or option == "rms1p"
        assert apart < 1e-4 if same else apart > 1e-2, option


@functools.cache
def reach(config, segments=None, source_segments=None):
    """bool [T, T] and [T, S]: whether the logits at a position depend on each token, and on each of
    the source, by gradient.

    All tokens are distinct and the output layer is untied, so a row of the embedding table belongs
    to one position.
    """
    t = s = 12
    batch = {"tokens": jnp.arange(t)[None]}
    if config.family == "encoder_decoder":
        batch |= {"source": jnp.arange(t, t + s)[None]}
    ids = {"segment_ids": segments, "source_segment_ids": source_segments}
    batch |= {name: jnp.array([row]) for name, row in ids.items() if row is not None}
    params = params_of(config)

    def logits(table):
        return jf.forward(params | {"embed": params["embed"] | {"tokens": table}}, config, **batch)[
            0
        ].sum(-1)

    _, pull = jax.vjp(logits, params["embed"]["tokens"])
    gradients = jax.vmap(lambda seed: pull(seed)[0])(jnp.eye(t))  # [T, V, D]
    moved = np.asarray(jnp.abs(gradients).max(-1) > 0)
    assert not moved[:, t + s :].any()
    return moved[:, :t], moved[:, t : t + s]


@pytest.mark.parametrize(
    "family, positions, pattern",
    [("encoder", "disentangled", "w"), ("encoder_decoder", "t5", ""), ("decoder", "rope", "wf")],
)
def test_a_decoder_sees_what_is_before_it_and_an_encoder_both_sides(family, positions, pattern):
    """A window reaches as far as its layers together."""
    window = {"window": 4, "window_pattern": pattern} if pattern else {}
    config = small(family, positions, **window)
    back = np.arange(12)[:, None] - np.arange(12)[None]
    before = np.ones_like(back, bool) if family == "encoder" else back >= 0
    near = np.abs(back) <= 2 * 3 if pattern == "w" else True
    target, source = reach(config)
    np.testing.assert_array_equal(target, before & near)
    assert family != "encoder_decoder" or source.all()
    if pattern == "wf":
        one = dataclasses.replace(config, n_layers=1)
        np.testing.assert_array_equal(reach(one)[0], before & (np.abs(back) <= 3))


@pytest.mark.parametrize(
    "positions, family, kernel",
    [
        ("alibi", "decoder", "auto"),
        ("disentangled", "encoder", "auto"),
        ("t5", "encoder_decoder", "auto"),
        ("rope", "encoder_decoder", "blocked"),
    ],
)
def test_padding_and_other_segments_are_seen_by_no_token(positions, family, kernel):
    segments, sources = (1,) * 5 + (2,) * 5 + (0,) * 2, (0,) + (1,) * 5 + (2,) * 4 + (0,) * 2
    own, across = (
        np.array(segments)[:, None] == np.array(side)[None] for side in (segments, sources)
    )
    real = np.array(segments) != 0
    of_source = sources if family == "encoder_decoder" else None
    target, source = reach(
        small(family, positions, **{"attention.kernel": kernel}), segments, of_source
    )
    expected = own if family == "encoder" else own & np.tril(own)
    np.testing.assert_array_equal(target[real], expected[real])
    if family == "encoder_decoder":
        np.testing.assert_array_equal(source[real], across[real])


def test_cross_attention_looks_at_every_real_token_of_its_source_and_at_no_other():
    config = small("encoder_decoder", "t5", window=3)
    batch = laid_out(config)
    cross = np.asarray(jf.attention_maps(params_of(config), config, **batch).cross)
    own = batch["segment_ids"][:, :, None] == batch["source_segment_ids"][:, None]
    own &= batch["segment_ids"][:, :, None] != 0
    np.testing.assert_array_equal(cross > 0, np.broadcast_to(own[:, None], cross.shape))


compiled = jax.jit(jf.forward, static_argnums=1)


@pytest.mark.parametrize("positions, family", [("learned", "encoder"), ("t5", "encoder_decoder")])
def test_scan_equals_unrolled_and_jit_equals_no_jit(positions, family):
    """With a window in some layers and not in others. An encoder-decoder has the loops of both
    other families."""
    depth = dict(n_layers=3, n_encoder_layers=2 * (family == "encoder_decoder"))
    config = small(family, positions, window=3, window_pattern="wf", **depth)
    row = laid_out(config, ("packed",))
    params = params_of(config)
    expected = jf.forward(params, config, **row)
    close(compiled(params, config, **row), expected)
    close(compiled(params, dataclasses.replace(config, layer_loop="scan"), **row), expected)


@functools.cache
def value_and_gradient(config):
    row = laid_out(config, ("packed",))
    return jax.jit(jax.value_and_grad(lambda p: jnp.square(jf.forward(p, config, **row)).mean()))(
        params_of(config)
    )


@pytest.mark.parametrize(
    "family, loop, remat",
    fewest(itertools.product(FAMILIES, ["unroll", "scan"], ["dots", "full"]), 1),
)
def test_remat_changes_no_value_and_no_gradient(family, loop, remat):
    positions = {"decoder": "alibi", "encoder": "rope", "encoder_decoder": "t5"}[family]
    config = small(family, positions, layer_loop=loop)
    changed = dataclasses.replace(config, remat=remat)
    jax.tree.map(close, value_and_gradient(changed), value_and_gradient(config))


STRETCHING = {"dynamic": {"rope.scaling": "dynamic"}, "longrope": LONGROPE}


@pytest.mark.parametrize(
    "family, original, scaling",
    covering(fewest(itertools.product(WRITERS, (DOCUMENT, 4), STRETCHING)), 1),
)
def test_scaling_by_length_is_cached_as_it_is_whole_up_to_its_original_length_alone(
    family, original, scaling
):
    equal = original == DOCUMENT
    changes = STRETCHING[scaling] | {"rope.factor": 4.0, "rope.original_length": original}
    config = small(family, "rope", **changes)
    found, expected = cached(config, alone(config), size=3), logits_alone(config)
    assert (float(jnp.abs(found - expected).max()) < 1e-4) is equal


@pytest.mark.parametrize("family, scaling", fewest(itertools.product(WRITERS, STRETCHING), 1))
def test_padding_is_no_length_that_stretches_rope(family, scaling):
    changes = STRETCHING[scaling] | {"rope.factor": 4.0, "rope.original_length": 4}
    config = small(family, "rope", **changes)
    assert_documents_are_as_alone(config, "full")


def test_generation_from_padded_sources_and_prompts_equals_that_from_each_alone():
    """The prompts are padded on the left, the sources on the right."""
    config = small("encoder_decoder", "t5")
    params, lengths = params_of(config), {"tokens": (6, 3), "source": (2, 5)}
    given, real = {}, {}
    for name, ends in lengths.items():
        turn = -1 if name == "tokens" else 1
        real[name] = (np.arange(max(ends)) < np.array(ends)[:, None])[:, ::turn]
        given[name] = DOCUMENTS[name][:2, : max(ends)]
    sides = {"segment_ids": "tokens", "source_segment_ids": "source"}
    ids = {name: real[side].astype(int) for name, side in sides.items()} | {"temperature": 0}
    together = jf.generate(params, config, given["tokens"], 6, source=given["source"], **ids)
    for i, row in enumerate(together):
        tokens, source = (given[name][i : i + 1, real[name][i]] for name in given)
        np.testing.assert_array_equal(
            row, jf.generate(params, config, tokens, 6, temperature=0, source=source)[0]
        )


@pytest.mark.parametrize("positions", slow_but(POSITIONS, "rope", "learned", "t5"))
def test_positions_given_are_those_that_count_and_relative_schemes_know_distances_alone(positions):
    config = small("decoder", positions)
    counted = np.broadcast_to(np.arange(DOCUMENT), (4, DOCUMENT))
    found, later = (
        jf.forward(params_of(config), config, **alone(config), positions=counted + n)
        for n in (0, 3)
    )
    close(found, logits_alone(config))
    apart = float(jnp.abs(later - found).max())
    assert apart > 1e-2 if positions in ("learned", "sinusoidal") else apart < 1e-4


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_types_given_are_those_that_count_and_none_given_are_zeros(family):
    config = small(family, "rope", **{"embedding.token_types": 2})
    batch = alone(config)
    of = []
    for types in (0, 1):
        batch["token_types"] = np.full((4, DOCUMENT), types)
        of.append(jf.forward(params_of(config), config, **batch))
    mixed = jnp.abs(logits_alone(config) - of[0]).max()
    assert min(mixed, jnp.abs(of[0] - of[1]).max()) > 1e-2
    del batch["token_types"]
    close(jf.forward(params_of(config), config, **batch), of[0])
