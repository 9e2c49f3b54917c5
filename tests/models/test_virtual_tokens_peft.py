"""Virtual tokens compute here what peft's compute on the models of transformers."""

import copy

import jax.numpy as jnp
import numpy as np
import peft
import torch
from pretrained import assert_close, each, inputs, loaded, logits, our_logits, reference

import jaxformer as jf
from jaxformer.config.settings import with_settings

TOKENS = 4
DECODERS = ["gpt2", "llama", "qwen3", "bloom"]
ENCODER_DECODERS = ["t5", "bart"]


def rows_of(name):
    """Two rows, the second padded on the right; peft counts the positions itself."""
    batch = {word: rows[:2] for word, rows in inputs(name).items()}
    batch.pop("position_ids", None)
    return batch


def tuned(name, kind, **settings):
    """peft's model over that of transformers, and the table [P, ...] of its virtual tokens."""
    base = reference(name)
    task = "SEQ_2_SEQ_LM" if base.config.is_encoder_decoder else "CAUSAL_LM"
    config = kind(task_type=task, num_virtual_tokens=TOKENS, **settings)
    model = peft.get_peft_model(copy.deepcopy(base), config).eval()
    table = model.prompt_encoder["default"].embedding.weight
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        table.copy_(0.7 * torch.randn(table.shape, generator=generator))
    return model, table.detach().numpy()[:TOKENS]


def assert_same(name, model, virtual):
    """The logits with these virtual tokens are those of peft's model, and not those without."""
    batch, below = rows_of(name), loaded(name)
    wanted = logits(model, batch)[:, -our_logits(below, batch).shape[1] :]
    assert np.abs(our_logits(below, batch) - wanted).max() > 0.05 * wanted.std()
    config = with_settings(below.config, {"attention.max_segments": 1})
    found = jf.Loaded(below.params | {"virtual": virtual}, config, None)
    assert_close(our_logits(found, batch), wanted, batch)


@each([*DECODERS, *ENCODER_DECODERS], slow={*DECODERS, *ENCODER_DECODERS} - {"llama", "t5"})
def test_a_prompt_is_that_of_peft(name):
    model, table = tuned(name, peft.PromptTuningConfig)
    scale = (
        loaded(name).config.d_model ** 0.5 if loaded(name).config.embedding.scale == "sqrt" else 1
    )
    assert_same(name, model, {"prompt": jnp.asarray(table) / scale})


@each([*DECODERS, *ENCODER_DECODERS], slow={*DECODERS, *ENCODER_DECODERS} - {"gpt2", "bart"})
def test_a_prefix_is_that_of_peft(name):
    """peft's table [P, 2 L K H] has for each layer its keys and then its values. In an
    encoder-decoder the encoder has none; peft repeats the table there, and each layer of the
    decoder takes every second pair."""
    layers, _, heads, width = loaded(name).params["blocks"]["attention"]["k"].shape
    sizes = dict(num_layers=layers, num_attention_heads=heads, token_dim=heads * width)
    sizes = sizes if name in ENCODER_DECODERS else {}  # which peft takes from the encoder
    model, table = tuned(name, peft.PrefixTuningConfig, **sizes)
    split = table.reshape(TOKENS, layers, 2, heads, width).transpose(2, 1, 0, 3, 4)
    if name in ENCODER_DECODERS:
        split = split[:, [2 * layer % layers for layer in range(layers)]]
    prefix = {"prefix_k": jnp.asarray(split[0]), "prefix_v": jnp.asarray(split[1])}
    assert_same(name, model, {"decoder": prefix})
