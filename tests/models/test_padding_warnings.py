"""Rows that look padded without segment ids are warned of, and no others; ids that no table has are
refused."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from shapes import weights_and_tokens

import jaxformer as jf
from jaxformer.generation.beam import beam_search
from jaxformer.models.inputs import warn_of_padding

LEFT = np.array([[1, 5, 6, 7, 8, 9], [0, 0, 0, 4, 5, 6], [0, 0, 0, 0, 3, 2]])
RIGHT = LEFT[:, ::-1]
UNPADDED = {
    "full rows": LEFT[:1],
    "the same token inside": np.array([[4, 4, 4, 1, 2, 4], [1, 2, 3, 5, 6, 7]]),
    "two at the edge": np.array([[4, 4, 1, 2, 3, 5]]),
    "one token alone": np.zeros((2, 6), int),
}


def batch_of(tokens, **more):
    weights = np.ones(tokens.shape, np.float32)
    batch = {"tokens": tokens, "targets": tokens, "weights": weights} | more
    return jax.tree.map(jnp.asarray, batch)


def causal_loss(tokens, **more):
    params, config, _ = weights_and_tokens("llama")
    return jf.loss_of("causal", config)(params, batch_of(tokens, **more), None)


def greedy(tokens, **more):
    params, config, _ = weights_and_tokens("llama")
    return jf.generate(params, config, tokens, 2, temperature=0, **more)


def searched(tokens, **more):
    params, config, _ = weights_and_tokens("llama")
    return beam_search(params, config, tokens, 2, beams=2, **more)


CALLS = {"loss_of": causal_loss, "generate": greedy, "beam_search": searched}


@pytest.mark.parametrize(
    "call, side, tokens",
    [("loss_of", "left", LEFT), ("generate", "right", RIGHT), ("beam_search", "left", LEFT)],
)
def test_rows_that_look_padded_are_warned_of_and_not_where_segment_ids_are_given(
    call, side, tokens
):
    said = rf"has the token 0 in runs at the {side} of 2 of 3 rows.*give segment_ids"
    with pytest.warns(UserWarning, match=said) as seen:
        CALLS[call](tokens)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[call](tokens, segment_ids=(tokens != 0).astype(np.int32))


@pytest.mark.parametrize("name", UNPADDED)
def test_rows_of_text_are_not_warned_of(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_padding("tokens", UNPADDED[name], None)


def test_padding_behind_the_text_of_a_decoder_without_weight_is_harmless():
    weights = (RIGHT != 0).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        causal_loss(RIGHT, weights=weights)
    with pytest.warns(UserWarning, match="left of 2 of 3 rows"):
        causal_loss(LEFT, weights=(LEFT != 0).astype(np.float32))


def test_nothing_is_said_under_a_transform():
    params, config, _ = weights_and_tokens("llama")
    loss = jf.loss_of("causal", config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(loss)(params, batch_of(LEFT), None)


def test_a_padded_source_is_warned_of():
    sizes = dict(vocab_size=16, d_model=16, n_layers=1, n_heads=2, d_ff=24, max_length=64)
    config = jf.ModelConfig(family="encoder_decoder", **sizes)
    params = jf.init(config, jax.random.key(0))
    with pytest.warns(UserWarning, match="source has the token 0 .*source_segment_ids"):
        jf.generate(params, config, np.ones((3, 1), int), 2, temperature=0, source=LEFT)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tokens": 97}, r"tokens has 97 to 97, and must have 0 to 96"),
        ({"tokens": -100}, r"tokens has -100 to -100"),
        ({"positions": 16}, r"positions has 16 to 16, and must have 0 to 15"),
        ({"token_types": 2}, r"token_types has 2 to 2, and must have 0 to 1"),
    ],
)
def test_ids_that_torch_refuses_are_refused(change, said):
    sizes = dict(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    theirs = transformers.BertModel(
        transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=16)
    )
    batch = {name: np.full((1, 4), value) for name, value in ({"tokens": 1} | change).items()}
    names = {"tokens": "input_ids", "positions": "position_ids", "token_types": "token_type_ids"}
    with pytest.raises((IndexError, RuntimeError)):
        theirs(**{names[name]: torch.tensor(array) for name, array in batch.items()})
    config = jf.ModelConfig(
        vocab_size=97,
        d_model=16,
        n_layers=1,
        n_heads=2,
        max_length=16,
        positions="learned",
        family="encoder",
        embedding=jf.Embedding(token_types=2),
    )
    params = jf.init(config, jax.random.key(0))
    with pytest.raises(jf.ConfigError, match=said):
        jf.forward(params, config, **batch)
