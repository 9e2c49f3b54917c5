"""Prompt tuning and prefix tuning: virtual tokens are tokens in front of each segment, and learn
alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import DOCUMENT, LAYOUTS, alone, cached, laid_out, params_of, where
from products import fewest, slow_but
from virtual_models import KINDS, MODELS, TOKENS, adapted, assert_close, forward, model

import jaxformer as jf
from jaxformer.layers import kernels
from jaxformer.layers.masks import AttentionMask, TokenLayout
from jaxformer.models.virtual import prefix_of
from jaxformer.runs.resolve import attention_kernel


def gradients(params, config, batch):
    """The gradient of a sum of logits by the virtual tokens."""

    def total(virtual):
        logits = jf.forward(params | {"virtual": virtual}, config, **batch)
        return jnp.sum(logits * jnp.sin(jnp.arange(logits.size).reshape(logits.shape)))

    return jax.jit(jax.grad(total))(params["virtual"])


CASES = fewest(itertools.product(MODELS, KINDS), 1)
QUICK = [case for case in CASES if case[0] in ("learned", "window", "encoder-decoder t5")]
every_model_some_kind = pytest.mark.parametrize("name, kind", slow_but(CASES, *QUICK))
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_model_some_kind
def test_packed_and_padded_rows_equal_separate_rows(name, kind):
    config, params = model(name), adapted(name, kind)
    separate = forward(params, config, **alone(config))
    packed = forward(params, config, **laid_out(config))
    for row, layout in enumerate(LAYOUTS):
        for document, place in where(layout).items():
            assert_close(packed[row, place], separate[document])


@every_model_some_kind
def test_cached_decoding_equals_the_full_forward(name, kind):
    config, params, batch = model(name), adapted(name, kind), laid_out(model(name))
    real = batch["segment_ids"] != 0
    wanted = forward(params, config, **batch)[real]
    found = jax.jit(lambda: cached(config, batch, size=8, params=params))()
    assert_close(found[real], wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind", fewest(itertools.product(["scores", "window", "encoder-decoder t5"], KINDS), 1)
)
def test_a_scan_and_blocked_attention_equal_unrolled_layers_and_plain(name, kind):
    config, params, batch = model(name), adapted(name, kind), laid_out(model(name))
    real, whole = batch["segment_ids"] != 0, alone(config)
    logits, slopes = forward(params, config, **batch)[real], gradients(params, config, whole)
    for change in ({"layer_loop": "scan"}, {"attention.kernel": "blocked"}):
        other = model(name, **change)
        assert_close(forward(params, other, **batch)[real], logits)
        assert_close(gradients(params, other, whole), slopes, 1e-4)


@pytest.mark.parametrize("name", slow_but(["rope", "learned", "t5", "scores"], "learned", "t5"))
def test_a_prompt_in_a_decoder_equals_its_vectors_in_front_of_the_tokens(name):
    """The prompt as further rows of the table of tokens, read as tokens."""
    config, params = model(name), adapted(name, "prompt")
    tokens = alone(config)["tokens"]
    rows = jnp.concatenate([params["embed"]["tokens"], params["virtual"]["prompt"]])
    head = jnp.pad(params["head"]["weight"], ((0, TOKENS), (0, 0)))
    longer = jf.without_adapters(params) | {
        "embed": params["embed"] | {"tokens": rows},
        "head": params["head"] | {"weight": head},
    }
    ids = np.broadcast_to(np.arange(TOKENS) + config.vocab_size, (len(tokens), TOKENS))
    wide = dataclasses.replace(config, vocab_size=config.vocab_size + TOKENS)
    wanted = forward(longer, wide, np.concatenate([ids, tokens], 1))
    assert_close(forward(params, config, tokens), wanted[:, TOKENS:, : config.vocab_size])


@pytest.mark.parametrize(
    "name", slow_but(["sinusoidal", "alibi", "positions in some layers", "window"], "window")
)
def test_a_prompt_in_a_decoder_equals_the_prefix_of_its_keys_and_values(name):
    config, params = model(name), adapted(name, "prompt")
    below = jf.without_adapters(params)
    prefix = {"decoder": prefix_of(below, config, params["virtual"]["prompt"])}
    batch = laid_out(config)
    found = forward(below | {"virtual": prefix}, config, **batch)
    assert_close(found, forward(params, config, **batch))


def test_a_prompt_in_an_encoder_decoder_equals_its_vectors_in_front_of_the_source():
    name = "encoder-decoder learned"
    config, params = model(name), adapted(name, "prompt")
    batch = alone(config)
    table = params["encoder"]["embed"]["tokens"]
    rows = jnp.concatenate([table, params["virtual"]["prompt"]])
    head = jnp.pad(params["head"]["weight"], ((0, TOKENS), (0, 0)))
    target_rows = jnp.pad(params["embed"]["tokens"], ((0, TOKENS), (0, 0)))
    encoder = params["encoder"]
    longer = jf.without_adapters(params) | {
        "embed": params["embed"] | {"tokens": target_rows},
        "encoder": encoder | {"embed": encoder["embed"] | {"tokens": rows}},
        "head": params["head"] | {"weight": head},
    }
    ids = np.broadcast_to(np.arange(TOKENS) + config.vocab_size, (4, TOKENS))
    wide = dataclasses.replace(config, vocab_size=config.vocab_size + TOKENS)
    source = np.concatenate([ids, batch["source"]], 1)
    wanted = forward(longer, wide, batch["tokens"], source=source)[..., : config.vocab_size]
    assert_close(forward(params, config, **batch), wanted)


@every_kind
def test_a_window_never_hides_virtual_tokens(kind):
    config, params = model("window", n_layers=1), adapted("window", kind)
    params = params | {
        "blocks": jax.tree.map(lambda leaf: leaf[:1], params["blocks"]),
        "virtual": jax.tree.map(
            lambda leaf: leaf[:1] if kind == "prefix" else leaf, params["virtual"]
        ),
    }

    def last(virtual):
        logits = jf.forward(params | {"virtual": virtual}, config, alone(config)["tokens"])
        return logits[:, -1, 0].sum()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(last))(params["virtual"])):
        by_token = jnp.abs(leaf).reshape(-1, TOKENS, leaf.size // TOKENS).max(axis=(0, 2))
        assert (by_token > 0).all()


def test_the_window_of_a_decoder_hides_no_part_of_a_prompt_from_another():
    params = adapted("rope", "prompt")
    below, prompt = jf.without_adapters(params), params["virtual"]["prompt"]
    found, wanted = (prefix_of(below, model("rope", window=size), prompt) for size in (1, 0))
    assert_close(found, wanted)


@pytest.mark.parametrize(
    "name, kind",
    slow_but(
        [("window", "prompt"), ("encoder-decoder t5", "prefix")], ("encoder-decoder t5", "prefix")
    ),
)
def test_generation_writes_what_the_forward_pass_finds_likeliest(name, kind):
    config, params = model(name), adapted(name, kind)
    batch = alone(config)
    tokens, source = batch["tokens"], {key: batch[key] for key in batch if key == "source"}
    made = jf.generate(params, config, tokens, 4, temperature=0, **source)
    read = np.concatenate([tokens, made[:, :-1]], 1)
    wanted = forward(params, config, read, **source)[:, DOCUMENT - 1 :].argmax(-1)
    np.testing.assert_array_equal(made, wanted)
    beams = jf.beam_search(params, config, tokens, 4, beams=1, **source).tokens[:, 0]
    np.testing.assert_array_equal(beams, made)


@every_kind
def test_only_virtual_tokens_learn_and_have_moments(kind):
    config, optimizer = model("rope"), optax.adamw(1e-2)
    base = params_of(config)
    params = jf.adapt(base, config, KINDS[kind], jax.random.key(1))
    mask = jf.adapter_mask(params)
    state = jf.init_state(params, optimizer, trainable=mask)
    virtual = sum(leaf.size for leaf in jax.tree.leaves(params["virtual"]))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer)) == 2 * virtual + 1
    tokens = jnp.asarray(alone(config)["tokens"])
    batch = {"tokens": tokens, "targets": tokens[:, ::-1], "weights": jnp.ones(tokens.shape)}
    step = jf.make_step(jf.loss_of("causal", config), optimizer, trainable=mask)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    below = jf.without_adapters(state.params)
    jax.tree.map(np.testing.assert_array_equal, below, base)  # bitwise
    pairs = zip(*(jax.tree.leaves(of["virtual"]) for of in (state.params, params)), strict=True)
    assert all(bool(jnp.any(a != b)) for a, b in pairs)


def test_a_prompt_begins_as_rows_of_tokens_and_a_prefix_small():
    config = model("rope")
    params, key = params_of(config), jax.random.key(1)
    prompt = jf.adapt(params, config, jf.PromptTuning(30), key)["virtual"]["prompt"]
    table = np.asarray(params["embed"]["tokens"])
    ids = [np.flatnonzero((table == row).all(1))[0] for row in np.asarray(prompt)]
    assert len({*ids}) > 10
    again = jf.adapt(params, config, jf.PromptTuning(30), key)
    np.testing.assert_array_equal(prompt, again["virtual"]["prompt"])
    other = jf.adapt(params, config, jf.PromptTuning(30), jax.random.key(2))
    assert np.any(prompt != other["virtual"]["prompt"])
    prefix = jf.adapt(params, config, jf.PrefixTuning(30), key)["virtual"]["decoder"]
    assert prefix["prefix_k"].shape == prefix["prefix_v"].shape == (2, 30, 2, 4)
    assert 0.015 < float(prefix["prefix_k"].std()) < 0.025


def test_virtual_tokens_stand_over_lora():
    config, lora = model("rope"), jf.LoRA(rank=2)
    low = jf.adapt(params_of(config), config, lora, jax.random.key(1))
    both = jf.adapt(low, config, jf.PromptTuning(TOKENS), jax.random.key(2))
    alone_too = jf.adapt(params_of(config), config, jf.PromptTuning(TOKENS), jax.random.key(2))
    batch = alone(config)
    assert_close(forward(both, config, **batch), forward(alone_too, config, **batch))
    mask = jf.adapter_mask(both)
    assert mask["virtual"]["prompt"] and mask["blocks"]["attention"]["q"].a
    assert not mask["embed"]["tokens"]
    jax.tree.map(np.testing.assert_array_equal, jf.without_adapters(both), params_of(config))


def test_attention_maps_show_virtual_tokens_first():
    config, params = model("rope"), adapted("rope", "prefix")
    maps = jf.attention_maps(params, config, alone(config)["tokens"])
    assert maps.decoder.shape == (2, 4, 4, DOCUMENT, TOKENS + DOCUMENT)
    np.testing.assert_allclose(maps.decoder.sum(-1), 1, atol=1e-5)
    assert (maps.decoder[..., :TOKENS] > 0).all()


def test_the_kernel_of_a_run_takes_a_prefix_or_says_why_not():
    config = jf.ModelConfig(d_model=64, n_heads=1)
    case = kernels.Needs.of_run(config, "gpu", "bfloat16", 128, 0, leading=4)
    name, reason = attention_kernel("auto", case)
    assert name == "blocked" and "not cudnn: it has no keys that all segments see" in reason
    assert attention_kernel("auto", case._replace(leading=0))[0] == "cudnn"
    for named in ("cudnn", "tpu"):
        assert "leading" in kernels.KERNELS[named].lacks
    with pytest.raises(jf.ConfigError, match="'cudnn' cannot run here: it has no keys that all"):
        attention_kernel("cudnn", case)
    layout = TokenLayout(jnp.arange(128)[None], ordered=True)
    mask = AttentionMask(layout, layout, leading=4)
    assert not kernels.KERNELS["cudnn"].serves(mask, heads=4)
    assert kernels.KERNELS["blocked"].serves(mask, heads=4)
