"""Virtual tokens that do not fit a model, a row or a call are refused in one message."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from families import SIZES, alone, laid_out, params_of
from virtual_models import TOKENS, adapted, assert_close, forward, model

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.models.transformer import context_of


def test_learned_positions_end_the_context_behind_virtual_tokens():
    config, params = model("learned"), adapted("learned", "prefix")
    row = np.zeros((1, config.max_length), np.int32)
    most = config.max_length - TOKENS
    assert jf.forward(params, config, row[:, :most]).shape[1] == most
    with pytest.raises(jf.ConfigError, match=f"reach {most} behind {TOKENS} virtual tokens"):
        jf.forward(params, config, row[:, : most + 1])
    with pytest.raises(jf.ConfigError, match="ask for at most 1 new tokens"):
        jf.generate(params, config, row[:, : most - 1], 2, temperature=0)
    assert jf.generate(params, config, row[:, : most - 1], 1, temperature=0).shape == (1, 1)
    assert context_of(params, config) == most
    both = model("encoder-decoder learned")
    prompted = adapted("encoder-decoder learned", "prompt")
    assert [context_of(prompted, both, source) for source in (False, True)] == [32, most]
    assert context_of(adapted("rope", "prompt"), model("rope")) == 32


def test_the_segments_of_a_prompted_source_are_bounded_where_they_are_traced():
    name = "encoder-decoder t5"
    config, params = model(name, **{"attention.max_segments": 0}), adapted(name, "prompt")
    batch = laid_out(config)
    with pytest.raises(jf.ConfigError, match=r"set model\.attention\.max_segments to the most"):
        forward(params, config, **batch)
    real = batch["segment_ids"] != 0
    found = jf.forward(params, config, **batch)[real]
    assert_close(found, forward(params, model(name), **batch)[real])


def bad_virtual(change):
    def bad(params):
        return params | {"virtual": change(params["virtual"])}

    return bad


BAD_PARAMS = {
    "too wide": (
        "prompt",
        bad_virtual(lambda v: {"prompt": v["prompt"][:, :5]}),
        r"virtual\.prompt: \(3, 5\) instead of \(3, 16\)",
    ),
    "a prefix without values": (
        "prefix",
        bad_virtual(lambda v: {"decoder": {"prefix_k": v["decoder"]["prefix_k"]}}),
        r"virtual\.decoder\.prefix_v: missing",
    ),
    "another leaf": (
        "prompt",
        bad_virtual(lambda v: v | {"soft": jnp.ones(3)}),
        "a prompt and a prefix exclude each other",
    ),
    "an encoder's prefix": (
        "prefix",
        bad_virtual(lambda v: {"encoder": v["decoder"]}),
        r"virtual\.encoder\.prefix_k: .* is not in this model",
    ),
    "no rows": ("prompt", bad_virtual(lambda v: {"prompt": v["prompt"][:0]}), r"\(0, 16\) instead"),
    "an array": ("prompt", bad_virtual(lambda v: v["prompt"]), "is not in this model"),
    "a weight too many": ("prompt", lambda p: p | {"more": jnp.ones(3)}, "more: .* is not in this"),
}


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_virtual_tokens_that_do_not_fit_are_refused_by_name(case):
    kind, change, message = BAD_PARAMS[case]
    config = model("rope")
    with pytest.raises(jf.ConfigError, match=message):
        jf.forward(change(adapted("rope", kind)), config, alone(config)["tokens"])


def encoder():
    config = with_settings(jf.ModelConfig(), {**SIZES, "family": "encoder"})
    return params_of(config), config


def prefix_unchecked(tokens):
    """A prefix of any number of tokens, whose type only the tests check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return jf.PrefixTuning(tokens)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


BAD_CALLS = {
    "no tokens": (lambda: jf.PromptTuning(0), "PromptTuning: tokens=0 must be a whole number"),
    "half a token": (lambda: prefix_unchecked(1.5), r"PrefixTuning: tokens=1\.5 must be a whole"),
    "an encoder": (
        lambda: jf.adapt(*encoder(), jf.PromptTuning(2), jax.random.key(0)),
        "for decoders and encoder-decoders",
    ),
    "twice": (
        lambda: jf.adapt(adapted("rope", "prompt"), model("rope"), jf.LoRA(), jax.random.key(0)),
        "have virtual tokens already",
    ),
    "merged": (lambda: jf.merge(adapted("rope", "prompt")), "cannot be merged into weights"),
    "saved": (
        lambda: jf.save_pretrained("nowhere", adapted("rope", "prompt"), model("rope")),
        "no place for virtual tokens",
    ),
    "no adapter": (
        lambda: jf.adapt(params_of(model("rope")), model("rope"), None, jax.random.key(0)),
        r"the adapter is a NoneType: give .* jf\.PromptTuning",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_mistake_with_virtual_tokens_gets_one_message(case):
    call, message = BAD_CALLS[case]
    with pytest.raises(jf.ConfigError, match=message):
        call()
