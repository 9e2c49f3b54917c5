"""model.exact: the logits of a text have the same bits, whatever is beside it."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import (
    BASE,
    LAYOUTS,
    alone,
    cached,
    config_of,
    holding_each_option,
    laid_out,
    pairwise,
    params_of,
    where,
)
from pretrained import loaded
from pretrained_variants import FAMILY
from products import slow_but
from written import written

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.losses.heads import head_loss
from jaxformer.models.stack import compute_dtype

SIZES = dict(vocab_size=97, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, max_length=256)
EXPERTS = {
    "experts": {
        "feed_forward": "experts",
        "experts.n": 5,
        "bias": "all",
        "experts.router_bias": "learned",
    },
    "experts in groups": {
        "feed_forward": "experts",
        "experts.n": 6,
        "experts.per_token": 3,
        "experts.groups": 3,
        "experts.top_groups": 2,
        "experts.router": "sigmoid",
        "experts.router_bias": "balanced",
        "experts.shared_ff": 12,
        "experts.shared_gate": True,
        "experts.dense_layers": 1,
        "experts.kernel": "xla",
    },
}
RECURRENT = {
    name: {"layer_pattern": pattern, "recurrent.key_heads": 2, "recurrent.chunk": 8}
    for name, pattern in (("delta", "dm"), ("mamba2", "sm"))
}
FAMILIES = {
    "llama": {},
    "gpt2": {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": "all"},
    # So wide that a product with a transposed matrix has other bits.
    "wide": {"d_model": 256, "n_layers": 1},
    "encoder": {"family": "encoder", "norm": "layer", "positions": "alibi"},
    **EXPERTS,
    **RECURRENT,
}
LENGTH = 192  # of a row: three blocks of keys, twelve tiles
LONGEST = 130  # text in a packed row


def exact(choice):
    try:
        return with_settings(config_of(choice), {"exact": True})
    except jf.ConfigError:
        return None


CHOICES = holding_each_option([choice for choice in pairwise()[0] if exact(choice)])
CONFIGS = {
    " ".join(o for f, o in choice.items() if o != BASE[f]): exact(choice) for choice in CHOICES
}
CONFIGS |= {name: with_settings(exact(BASE), settings) for name, settings in EXPERTS.items()}
NAMES = [*CONFIGS]
(MAMBA2,) = [name for name in NAMES if "mamba2" in name.split()]

forward = jax.jit(jf.forward, static_argnums=1)


def bits(array):
    return np.asarray(array).tobytes()


def assert_bits_of_documents(params, config, *sizes):
    """In rows of all layouts, and with a cache in pieces of so many tokens."""
    expected = forward(params, config, **alone(config))
    batch = laid_out(config)
    ways = [forward(params, config, **batch)]
    if config.family != "encoder":
        dtype = compute_dtype(config)
        ways += [cached(config, batch, size, params, compiled=True, dtype=dtype) for size in sizes]
    for rows in ways:
        for found, layout in zip(rows, LAYOUTS, strict=True):
            for document, cut in where(layout).items():
                assert bits(found[cut]) == bits(expected[document]), layout


@pytest.mark.parametrize("name", slow_but(NAMES, NAMES[0], "experts in groups", MAMBA2))
def test_each_kind_of_layer_has_the_bits_of_a_document_alone(name):
    config = CONFIGS[name]
    params = params_of(config)
    assert_bits_of_documents(params, config, 3, 1)
    found = forward(params, config, **alone(config))
    close = jf.forward(params, with_settings(config, {"exact": False}), **alone(config))
    np.testing.assert_allclose(found, close, rtol=0, atol=2e-5 * float(jnp.abs(close).max()))


@pytest.mark.slow
@pytest.mark.xdist_group("exact families")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILY)
def test_each_family_of_hugging_face_has_the_bits_of_a_document_alone(family, dtype):
    model = loaded(FAMILY[family])
    # A scanned stack is compiled in half the time; with a cache layers are unrolled.
    settings = {"exact": True, "dtype": dtype, "layer_loop": "scan"}
    config = with_settings(model.config, settings)
    assert_bits_of_documents(model.params, config, 1)


@functools.cache
def model(name, dtype="float32"):
    config = with_settings(
        jf.ModelConfig(), SIZES | FAMILIES[name] | {"exact": True, "dtype": dtype}
    )
    return params_of(config), config


def packings(rng, rows):
    """Rows of texts of random lengths with padding between them, and (row, start, text) of each."""
    tokens = rng.integers(0, 97, (rows, LENGTH))  # padding is of any tokens
    segments = np.zeros((rows, LENGTH), int)
    texts = []
    for row in range(rows):
        at = rng.integers(0, 20)
        for number in range(1, 9):
            length = int(rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 70, LONGEST]))
            if at + length > LENGTH:
                break
            segments[row, at : at + length] = number
            texts.append((row, at, length))
            at += length + rng.integers(0, 3)
    return tokens, segments, texts


@pytest.mark.parametrize(
    ("rows", "dtype", "name"),
    [
        (4, "float32", "llama"),
        *(
            pytest.param(rows, dtype, name, marks=pytest.mark.slow)
            for rows, dtype, names in (
                (1000, "float32", ("llama", "gpt2", "encoder")),
                (60, "float32", ("experts", *RECURRENT)),
                (4, "bfloat16", ("llama", "gpt2", "encoder", "experts", *RECURRENT)),
            )
            for name in names
        ),
    ],
)
def test_the_bits_of_a_text_do_not_depend_on_how_rows_are_packed(rows, dtype, name):
    params, config = model(name, dtype)
    tokens, segments, texts = packings(np.random.default_rng(0), rows)
    options = None
    if rows == 1000:
        # Optimized, as a user's program is: so many rows take longer than the compiler.
        options = {"xla_backend_optimization_level": 1}
    forward = jax.jit(jf.forward, static_argnums=1, compiler_options=options)
    found = np.asarray(forward(params, config, tokens, segment_ids=segments))
    # Each alone, at the start of a row of its own.
    own = np.zeros((len(texts), LONGEST), int)
    for number, (row, at, length) in enumerate(texts):
        own[number, :length] = tokens[row, at : at + length]
    ids = np.arange(LONGEST) < np.array([length for *_, length in texts])[:, None]
    expected = np.asarray(forward(params, config, own, segment_ids=ids.astype(int)))
    differ = [
        (row, at)
        for number, (row, at, length) in enumerate(texts)
        if bits(found[row, at : at + length]) != bits(expected[number, :length])
    ]
    assert len(texts) > rows and not differ


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_scan_and_lengths_of_rows_change_no_bit(dtype):
    params, config = model("llama", dtype)
    tokens = np.random.default_rng(1).integers(0, 97, (2, 70))
    expected = forward(params, config, tokens)
    scanned = with_settings(config, {"layer_loop": "scan"})
    assert bits(forward(params, scanned, tokens)) == bits(expected)
    assert bits(forward(params, config, tokens[1:, :40])) == bits(expected[1:, :40])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", *RECURRENT])
def test_a_row_has_its_bits_without_other_rows_in_an_optimized_program(name):
    config = with_settings(jf.ModelConfig(), SIZES | FAMILIES[name] | {"exact": True})
    config = with_settings(config, {"d_model": 256})
    params = params_of(config)
    # Tests have other values of these otherwise.
    options = {"xla_backend_optimization_level": 3}
    if "fusion_emitters" in os.environ["XLA_FLAGS"]:
        options["xla_cpu_use_fusion_emitters"] = True
    run = jax.jit(jf.forward, static_argnums=1, compiler_options=options)
    tokens = np.random.default_rng(1).integers(0, 97, (4, 24))
    expected = run(params, config, tokens)
    assert bits(run(params, config, tokens[1:2])) == bits(expected[1:2])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_a_cache_of_a_wider_dtype_than_the_model_is_taken(name):
    params, config = model(name, "bfloat16")
    tokens = np.random.default_rng(1).integers(0, 97, (2, 10)).astype(np.int32)
    batch = {"tokens": tokens, "segment_ids": np.ones_like(tokens)}
    found = np.asarray(cached(config, batch, 5, params, compiled=True), np.float32)
    expected = np.asarray(forward(params, config, tokens), np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_has_the_log_probabilities_of_its_score(dtype):
    """In rows beside others that begin earlier and end later, and by beams."""
    params, config = model("wide", dtype)
    score = jax.jit(jf.score, static_argnums=1)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 97, length).tolist() for length in (3, 20, 1, 9)]
    texts = written(params, config, prompts, [4, 34, 4, 34], rows=3, temperature=0.8)
    for prompt, (tokens, logs) in zip(prompts, texts, strict=True):
        expected = score(params, config, np.array([prompt + tokens])).log_probs[0, -len(tokens) :]
        assert bits(logs) == bits(expected)
    search = {"beams": 3, "length_penalty": 0.0}
    best = jf.beam_search(params, config, np.array(prompts[1:2]), 12, **search)
    text = np.concatenate([prompts[1], best.tokens[0, 0]])[None]
    total = np.float32(0)
    for log_prob in np.asarray(score(params, config, text).log_probs)[0, -12:]:
        total += log_prob
    assert bits(best.scores[0, 0]) == bits(total)


@pytest.mark.parametrize("name", slow_but(["gpt2", *EXPERTS, *RECURRENT], "gpt2"))
def test_gradients_are_those_without_it(name):
    params, config = model(name)
    tokens = np.random.default_rng(1).integers(0, 97, (2, 20))

    def gradients(config):
        def loss(params):
            batch = {"tokens": tokens[:, :-1], "targets": jnp.asarray(tokens[:, 1:])}
            batch["weights"] = jnp.ones(tokens[:, 1:].shape)
            return head_loss(params, config, batch)["loss"][0]

        return jax.jit(jax.grad(loss))(params)

    plain = gradients(with_settings(config, {"exact": False}))
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5 * largest),
        gradients(config),
        plain,
    )


def test_a_model_is_converted_with_it(tmp_path):
    params, config = model("llama")
    jf.save_pretrained(tmp_path, params, config)
    loaded = jf.load(tmp_path)
    tokens = np.arange(20)[None]
    restored = with_settings(loaded.config, {"exact": True})
    assert not loaded.config.exact
    assert bits(forward(loaded.params, restored, tokens)) == bits(forward(params, config, tokens))
