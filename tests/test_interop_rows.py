"""The rows of the configs' mapping one by one, on keys alone: what is left out, what is refused, what is written."""

import json

import jax
import pytest
import transformers as tf

import jaxformer as jf
from jaxformer.interop.compare import resolved
from jaxformer.interop.pretrained import ARCHITECTURES, FAMILIES, architecture_of
from jaxformer.interop.theirs import Theirs

CLASSES = {
    "llama": tf.LlamaConfig,
    "mistral": tf.MistralConfig,
    "qwen2": tf.Qwen2Config,
    "qwen3": tf.Qwen3Config,
    "gemma2": tf.Gemma2Config,
    "gemma3_text": tf.Gemma3TextConfig,
    "olmo2": tf.Olmo2Config,
    "gpt2": tf.GPT2Config,
    "gpt_neox": tf.GPTNeoXConfig,
    "bloom": tf.BloomConfig,
    "bert": tf.BertConfig,
    "roberta": tf.RobertaConfig,
    "t5": tf.T5Config,
    "bart": tf.BartConfig,
    "marian": tf.MarianConfig,
}
FAMILY = {family.model_type: family for family in FAMILIES}
NAMES = {"lm_head.weight"}  # as of a T5 that may be untied


def read(kind, **keys):
    """Our config of an architecture's keys, the first of its family's architectures."""
    return FAMILY[kind].read(Theirs(keys, NAMES), next(iter(FAMILY[kind].architectures)))


def stated(kind, **keys):
    """What transformers' config of these keys says, all defaults filled in."""
    return json.loads(CLASSES[kind].from_dict(keys).to_json_string(use_diff=False))


def test_every_family_is_held_against_its_reference():
    assert CLASSES.keys() == FAMILY.keys()


@pytest.mark.parametrize("kind", CLASSES)
def test_an_empty_config_is_the_references_default_config(kind):
    assert resolved(read(kind)) == resolved(read(kind, **stated(kind)))


LAYERS = [  # which layers have a window, by what stood for it before there was layer_types and since
    ("qwen2", dict(use_sliding_window=True, num_hidden_layers=30)),
    ("qwen2", dict(use_sliding_window=True, num_hidden_layers=5, max_window_layers=2)),
    ("qwen3", dict(use_sliding_window=True, num_hidden_layers=30, sliding_window=7)),
    ("qwen3", dict(use_sliding_window=False, num_hidden_layers=30, max_window_layers=2)),
    ("gemma2", dict(num_hidden_layers=5)),
    ("gemma3_text", dict(num_hidden_layers=13)),
    ("gemma3_text", dict(num_hidden_layers=7, sliding_window_pattern=3)),
    ("gemma3_text", dict(num_hidden_layers=3, layer_types=["full_attention", "sliding_attention", "full_attention"])),
]


@pytest.mark.parametrize("kind, keys", LAYERS, ids=str)
def test_the_layers_with_a_window_are_the_references(kind, keys):
    config = read(kind, **keys)
    pattern = (config.window_pattern * config.n_layers)[: config.n_layers] if config.window else "f" * config.n_layers
    assert ["sliding_attention" if letter == "w" else "full_attention" for letter in pattern] == stated(kind, **keys)[
        "layer_types"
    ]


REFUSED = [
    ("marian", dict(decoder_vocab_size=75, vocab_size=71), "decoder_vocab_size=75"),
    ("qwen3", dict(num_hidden_layers=2, layer_types=["full_attention", "chunked_attention"]), "layer_types"),
    ("gemma2", dict(num_hidden_layers=3, layer_types=["full_attention"]), "3 of"),
]


@pytest.mark.parametrize("kind, keys, reason", REFUSED, ids=str)
def test_a_key_that_is_not_computed_is_refused_by_name(kind, keys, reason):
    with pytest.raises(jf.ConfigError, match=reason):
        read(kind, **keys)


def test_dynamic_scaling_stretches_the_length_by_its_factor_and_writes_the_one_before_it():
    keys = dict(max_position_embeddings=96, rope_theta=9.0, rope_scaling=dict(rope_type="dynamic", factor=2.5))
    config = read("llama", **keys)
    assert (config.max_length, config.rope_original_length) == (240, 96)
    written = FAMILY["llama"].write(config, "LlamaForCausalLM")
    assert {key: written[key] for key in keys} == keys
