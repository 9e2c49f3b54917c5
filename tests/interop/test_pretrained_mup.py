"""Models in muP are written as architectures that compute their logits, by transformers too."""

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from products import slow_but
from shapes import strong

import jaxformer as jf
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError

SETTINGS = dict(vocab_size=61, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48)
MUP = SETTINGS | dict(max_length=32, parametrization="mup", mup_base="d_model=16 d_ff=12")
TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10)


@pytest.mark.parametrize(
    "changes, architecture, model_type",
    [
        # Granite has the factor of the scores and the divisor of the logits of a tied head.
        ({"tied_head": True}, None, "granite"),
        *slow_but(
            [
                ({"tied_head": True}, "LlamaForCausalLM", "llama"),
                ({"attention.query_key_norm": "head", "head_dim": 8}, None, "qwen3"),
            ]
        ),
        # Heads as wide as in the base, whose scores are those of any model.
        ({"mup_base": "d_model=16 d_ff=12 n_heads=2 n_kv_heads=1 head_dim=16"}, None, "llama"),
    ],
)
def test_transformers_computes_the_logits_of_what_is_written(
    changes, architecture, model_type, tmp_path
):
    config = with_settings(jf.ModelConfig(), MUP | changes)
    if "mup_base" in changes:
        assert config.score_scale == 0
    params = strong(jf.init(config, jax.random.key(0)))
    expected = jf.forward(params, config, TOKENS)
    jf.save_pretrained(tmp_path, params, config, architecture=architecture)
    read = jf.load(tmp_path)
    assert read.config.parametrization == "standard"
    logits = jf.forward(read.params, read.config, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
    theirs = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert theirs.config.model_type == model_type
    with torch.no_grad():
        logits = theirs(torch.tensor(TOKENS).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_what_no_architecture_has_is_refused(tmp_path):
    config = with_settings(jf.ModelConfig(), MUP | {"activation": "relu2", "norm": "none"})
    with pytest.raises(ConfigError, match="no Hugging Face architecture is exactly this model"):
        jf.save_pretrained(tmp_path, jf.init(config, jax.random.key(0)), config)
    assert not any(tmp_path.iterdir())
