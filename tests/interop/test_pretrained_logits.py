"""A model that transformers saved computes here what it computes there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers as tf
from pretrained import (
    QUICK,
    assert_close,
    each,
    expected_logits,
    folder,
    forward,
    inputs,
    loaded,
    logits,
    made,
    our_logits,
    ours,
    outputs,
    reference,
)
from pretrained_variants import FAMILY, FURTHER_VARIANTS, LENGTH, PAD, ROOM, VARIANTS

import jaxformer as jf
from jaxformer.layers.head import output_layer, pooled
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden


@each(VARIANTS, slow=FURTHER_VARIANTS)
def test_logits_are_the_references_with_padded_rows(name):
    batch = inputs(name)
    assert_close(our_logits(loaded(name), batch), expected_logits(name), batch)


@each(["bert pre-training"])
def test_the_next_sentence_is_told_as_the_reference_tells_it(name):
    batch, model = inputs(name), loaded(name)
    rows = {
        word: batch[word][:2] for word in ("input_ids", "attention_mask", "token_type_ids")
    }  # no padding on the left
    read = inputs_of(
        {
            "tokens": rows["input_ids"],
            "segment_ids": rows["attention_mask"],
            "token_types": rows["token_type_ids"],
        }
    )

    def told(params):
        x = hidden(params, model.config, read).x
        one = pooled(params, model.config, x, read.layout)
        layer = output_layer(params, model.config, one, "next_sentence")
        return (jnp.einsum("BTD,VD->BTV", layer.rows, layer.matrix) + layer.bias)[:, 0]

    expected = outputs(reference(name), rows).seq_relationship_logits.numpy()
    found = np.asarray(jax.jit(told, compiler_options=QUICK)(model.params))
    assert np.abs(found - expected).max() < 2e-4 * expected.std()


@each(["albert pre-training, two groups", "umt5"])
def test_a_scan_over_layers_gives_the_logits_of_the_references(name):
    batch, model = inputs(name), loaded(name)
    tokens, rest = ours(batch, model.config)
    config = dataclasses.replace(model.config, layer_loop="scan")
    found = np.asarray(forward(model.params, config, tokens, **rest))
    assert_close(found, expected_logits(name), batch)


PACKED = ["modernbert", "deberta masked", "mpnet masked", "clip", "gpt-oss yarn", "umt5 encoder"]


@each(PACKED, slow=PACKED[3:])
def test_packed_rows_give_the_references_logits_of_each_text(name):
    """Two texts in one row; experts have the rows of both."""
    rng, size = np.random.default_rng(4), LENGTH // 2
    tokens = rng.integers(5, 71, (2, size))
    expected = logits(reference(name), {"input_ids": tokens})
    model, segments = loaded(name), np.repeat([[1, 2]], size, 1)
    row = tokens.reshape(1, -1)
    found = np.asarray(forward(model.params, model.config, row, segment_ids=segments))
    batch = {"attention_mask": np.ones_like(tokens)}
    assert_close(found.reshape(expected.shape), expected, batch)


@each(["mixtral"])
def test_the_balance_loss_of_one_layer_is_the_references_with_its_weight(name):
    """transformers takes the means over all layers at once, so that only one layer is the same."""
    architecture, settings = VARIANTS[name]
    hf = made(architecture, settings | dict(num_hidden_layers=1, router_aux_loss_coef=0.3), seed=4)
    hf.save_pretrained(folder(name, "of one layer"))
    model, tokens = jf.load(folder(name, "of one layer")), inputs(name)["input_ids"]
    rows = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.ones(tokens.shape)}
    with torch.no_grad():
        theirs = hf(**rows, output_router_logits=True)

    def balance(params):
        return hidden(params, model.config, inputs_of({"tokens": tokens})).aux.losses["router_loss"]

    loss, weight = jax.jit(balance, compiler_options=QUICK)(model.params)
    np.testing.assert_allclose(loss / weight, 0.3 * float(theirs.aux_loss), rtol=1e-5)
    jf.save_pretrained(folder(name, "again"), model.params, model.config)
    again = jf.load(folder(name, "again")).config
    assert again.experts.balance_loss == pytest.approx(model.config.experts.balance_loss, rel=1e-9)
    assert again.experts.z_loss == model.config.experts.z_loss == 0


def prompts(name):
    """Three prompts padded on the left for a decoder; sources padded on the right and one start
    token each otherwise."""
    batch, config = inputs(name, seed=1), reference(name).config
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    if config.is_encoder_decoder:
        start = np.full((3, 1), config.decoder_start_token_id)
        return {"input_ids": tokens, "attention_mask": mask}, (
            start,
            {"source": tokens, "source_segment_ids": mask},
        )
    mask = np.ones_like(mask)
    mask[1, :5], mask[2, :2] = 0, 0
    tokens = np.where(mask, np.where(tokens == PAD, 9, tokens), PAD)
    return {"input_ids": tokens, "attention_mask": mask}, (tokens, {"segment_ids": mask})


# Families that write, and variants whose cache is another.
WRITING = [name for name in FAMILY.values() if VARIANTS[name][0].can_generate()]
WRITING += ["llama dynamic within", "qwen2 window above layer 1", "gemma3 by its own pattern"]
WRITING += ["deepseek-v3 yarn", "t5 v1.1", "t5gemma untied, deep encoder, bias"]
WRITING.remove("t5gemma")  # which writes one token over and over
NEW_TOKENS = 32


@each(WRITING, slow={*WRITING} - {"gemma3 by its own pattern", "bart"})
def test_greedy_tokens_are_those_of_the_references_generate(name):
    model, (hf, (prompt, rest)) = reference(name), prompts(name)
    assert LENGTH + NEW_TOKENS <= ROOM
    # Where T5's decoder has more layers than its encoder, transformers' cache is too short.
    how = tf.GenerationConfig(
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=PAD,
        use_cache=model.config.model_type not in ("t5", "mt5", "umt5"),
    )
    how.decoder_start_token_id = getattr(model.config, "decoder_start_token_id", None)
    before, model.generation_config = model.generation_config, how
    with torch.no_grad():
        expected = model.generate(
            **{word: torch.from_numpy(rows) for word, rows in hf.items()}
        ).numpy()
    model.generation_config = before
    greedy = functools.partial(
        jf.generate,
        config=loaded(name).config,
        prompt=prompt,
        max_new_tokens=NEW_TOKENS,
        temperature=0,
        **rest,
    )
    found = jax.jit(greedy, compiler_options=QUICK)(loaded(name).params)
    assert expected.shape[1] == prompt.shape[1] + NEW_TOKENS
    assert len(np.unique(expected[:, -NEW_TOKENS:])) > 2
    np.testing.assert_array_equal(found, expected[:, -NEW_TOKENS:])
