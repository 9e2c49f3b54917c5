"""The text encoders of diffusion models, by the lines of docs/hugging_face.md."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from pretrained import folder, made, outputs
from pretrained_variants import CLIP, ENCODER, T5, VOCABULARY

import jaxformer as jf

ROOT = Path(__file__).parents[2]
PAGE, TITLE = ROOT / "docs" / "hugging_face.md", "## From FlaxT5EncoderModel"


def rounded(model):
    """The model with its weights rounded to bfloat16, which computes in float32."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16().float())
    return model


def close(found, expected):
    assert found.shape == expected.shape and found.dtype == np.float32
    return np.abs(np.asarray(found) - expected).max() <= 2e-4 * expected.std()


def test_the_lines_of_the_page_give_the_states_of_the_reference():
    section = PAGE.read_text().partition(TITLE)[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    t5, clip = rounded(made(tf.T5EncoderModel, ENCODER)), rounded(made(tf.CLIPTextModel, CLIP))
    for name, model in {"T5_DIRECTORY": t5, "CLIP_DIRECTORY": clip}.items():
        model.save_pretrained(folder("text encoders", name))
        code = code.replace(name, str(folder("text encoders", name)))
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(5, VOCABULARY, (3, 9)), np.ones((3, 9), int)
    mask[1, 6:], eos = 0, CLIP["eos_token_id"]
    clip_tokens = np.where(np.arange(9) < [[8], [3], [5]], tokens, eos)  # padded with EOS
    inputs = {"t5_tokens": tokens, "attention_mask": mask, "clip_tokens": clip_tokens}
    values = inputs | {"eos_token_id": eos}
    exec(code, values)  # the code of the page
    leaves = jax.tree.leaves([values["t5"].params, values["clip"].params])
    assert {leaf.dtype for leaf in leaves} == {np.dtype("bfloat16")}
    expected = outputs(t5, {"input_ids": tokens, "attention_mask": mask}).last_hidden_state.numpy()
    assert close(values["t5_states"][mask == 1], expected[mask == 1])
    expected = outputs(clip, {"input_ids": clip_tokens})
    assert close(values["clip_states"], expected.last_hidden_state.numpy())
    assert close(values["pooled"], expected.pooler_output.numpy())


@pytest.mark.parametrize("padding", [CLIP["eos_token_id"], 1])
def test_the_projection_reads_the_first_eos_of_a_padded_text(padding):
    model = made(tf.CLIPTextModelWithProjection, CLIP)
    model.save_pretrained(folder("text encoders", "projection"))
    loaded, eos = jf.load(folder("text encoders", "projection")), CLIP["eos_token_id"]
    rng, ends, index = np.random.default_rng(1), np.array([[8], [3], [5]]), np.arange(9)
    tokens = np.where(index < ends, rng.integers(5, VOCABULARY, (3, 9)), padding)
    tokens = np.where(index == ends, eos, tokens)
    found = jf.forward(loaded.params, loaded.config, tokens, segment_ids=(index <= ends) * 1)
    assert close(found, outputs(model, {"input_ids": tokens}).text_embeds.numpy())


@pytest.mark.slow
def test_the_files_of_both_stacks_are_read_as_the_encoder_alone():
    both = made(tf.T5ForConditionalGeneration, T5 | {"tie_word_embeddings": False})
    directory = folder("text encoders", "both stacks")
    both.save_pretrained(directory)
    path = directory / "config.json"
    keys = json.loads(path.read_text()) | {"architectures": ["T5EncoderModel"]}
    path.write_text(json.dumps(keys))
    loaded, tokens = jf.load(directory), np.random.default_rng(2).integers(5, VOCABULARY, (2, 7))
    with torch.no_grad():
        expected = both.encoder(torch.from_numpy(tokens)).last_hidden_state.numpy()
    assert close(jf.forward(loaded.params, loaded.config, tokens), expected)
