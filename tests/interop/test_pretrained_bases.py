"""Models without a head: the encoders give their vectors; the others, whose output layer is the
embedding, their logits."""

import copy
import functools
import json
import shutil

import jax
import numpy as np
import pytest
import torch
import transformers as tf
from pretrained import batch_for, each, folder, ours, outputs, perturbed, real, tensors
from pretrained_tokenizers import saved
from pretrained_variants import GPT2, LLAMA, VARIANTS
from products import slow_but
from safetensors.torch import save_file

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config.settings import with_settings
from jaxformer.interop.logit_parity import compare

ENCODERS = {  # the variant of tests/pretrained_variants.py with a head, and options of the class
    "bert": (tf.BertModel, "bert masked", {}),
    "bert without a pooler": (tf.BertModel, "bert masked", {"add_pooling_layer": False}),
    "roberta": (tf.RobertaModel, "roberta masked", {}),
    "electra": (tf.ElectraModel, "electra masked", {}),
    "albert": (tf.AlbertModel, "albert masked", {}),
    "deberta": (tf.DebertaV2Model, "deberta masked", {}),
    "mpnet": (tf.MPNetModel, "mpnet masked", {}),
    "nomic-bert": (tf.NomicBertModel, "nomic-bert masked", {}),
    "modernbert": (tf.ModernBertModel, "modernbert", {}),
    "distilbert": (tf.DistilBertModel, "distilbert masked", {}),
}
# The bases of variants, in which the output layer is the embedding.
WRITERS = {
    "gpt2": tf.GPT2Model,
    "llama": tf.LlamaModel,
    "gemma3": tf.Gemma3TextModel,
    "gpt-neox": tf.GPTNeoXModel,
    "cohere": tf.CohereModel,
    "falcon": tf.FalconModel,
    "mpt": tf.MptModel,
    "gpt-neo": tf.GPTNeoModel,
    "opt": tf.OPTModel,
    "bloom": tf.BloomModel,
    "t5": tf.T5Model,
    "bart": tf.BartModel,
    "pegasus": tf.PegasusModel,
}


def architectures_in(place):
    return json.loads((place / "config.json").read_text())["architectures"]


def config_of(architecture, settings):
    config = architecture.config_class(**copy.deepcopy(settings))
    config._attn_implementation = "eager"
    return config


@functools.cache
def encoder(name):
    architecture, variant, more = ENCODERS[name]
    torch.manual_seed(0)
    model = perturbed(architecture(config_of(architecture, VARIANTS[variant][1]), **more), 1)
    model.save_pretrained(folder(name, "base"))
    return model, folder(name, "base")


@each(ENCODERS, slow=ENCODERS.keys() - {"bert", "modernbert"})
def test_an_encoder_without_a_head_gives_its_vectors_there_and_back(name):
    model, place = encoder(name)
    batch = batch_for(model)
    expected = outputs(model, batch).last_hidden_state.numpy()
    loaded = jf.load(place)
    assert loaded.config.output == "none"
    assert ("pooler" in loaded.params) == (getattr(model, "pooler", None) is not None)
    tokens, rest = ours(batch, loaded.config)
    found = np.asarray(jf.forward(loaded.params, loaded.config, tokens, **rest))
    assert found.dtype == np.float32
    assert np.abs(found - expected)[real(batch)].max() <= 2e-4 * expected[real(batch)].std()
    jf.save_pretrained(folder(name, "again"), loaded.params, loaded.config)
    assert architectures_in(folder(name, "again")) == [type(model).__name__]
    hf, again = tensors(place), tensors(folder(name, "again"))
    assert hf.keys() == again.keys() and all(torch.equal(hf[key], again[key]) for key in hf)


def test_names_with_the_prefix_of_a_head_are_the_base_too():
    _, place = encoder("bert")
    other = folder("bert", "prefixed")
    held = {f"bert.{name}": tensor for name, tensor in tensors(place).items()}
    save_file(held, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_text((place / "config.json").read_text())
    assert jax.tree.all(jax.tree.map(np.array_equal, jf.load(other).params, jf.load(place).params))


@pytest.mark.parametrize("name", slow_but(WRITERS, "gpt2", "gemma3", "t5", "bloom"))
def test_a_base_is_read_as_the_model_whose_output_layer_is_its_embedding(name):
    head, settings = VARIANTS[name]
    torch.manual_seed(0)
    model = perturbed(head(config_of(head, settings | {"tie_word_embeddings": True})), 1)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.zero_()  # which the base has not
    stripped = t5_base(model) if name == "t5" else getattr(model, model.base_model_prefix)
    stripped.save_pretrained(folder(name, "base"))
    assert architectures_in(folder(name, "base")) == [WRITERS[name].__name__]
    model.save_pretrained(folder(name, "model"))
    base, whole = (jf.load(folder(name, each)) for each in ("base", "model"))
    assert base.config == with_settings(whole.config, {"head.bias": False})
    assert base.config.tied_head
    if whole.config.head.bias:
        assert not whole.params.pop("head")["bias"].any()
    jax.tree.map(np.testing.assert_array_equal, base.params, whole.params)


def t5_base(model):
    base, held = tf.T5Model(model.config), model.state_dict()
    del held["lm_head.weight"]
    base.load_state_dict(held)
    return base


def test_verify_compares_a_base_with_the_class_that_it_is_read_as():
    tf.GPT2Model(config_of(tf.GPT2LMHeadModel, GPT2)).save_pretrained(folder("gpt2", "verified"))
    for place in (encoder("bert")[1], folder("gpt2", "verified")):
        loaded = jf.load(place)
        found = compare(place, loaded.params, loaded.config)
        assert found.largest <= 2e-4 * found.deviation


def test_an_output_layer_that_is_not_there_is_named():
    place = folder("llama", "headless")
    tf.LlamaModel(config_of(tf.LlamaForCausalLM, LLAMA)).save_pretrained(place)
    with pytest.raises(jf.ConfigError, match=r"lm_head\.weight: not in model\.safetensors"):
        jf.load(place)


def test_a_model_without_a_head_says_what_it_cannot_do(tmp_path, capsys):
    place = shutil.copytree(encoder("bert")[1], tmp_path / "model")
    shutil.copy(saved("bert") / "tokenizer.json", place)
    loaded = jf.load(place)
    with pytest.raises(jf.ConfigError, match="head 'none' does not write text"):
        jf.generate(loaded.params, loaded.config, [[5, 6]], 3, temperature=0)
    assert main(["sample", str(place), "--prompt", "a"]) == 2
    assert "has the head 'none', which writes no text" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text("a b c")
    assert main(["evaluate", str(place), "--data.validation", str(tmp_path / "text.txt")]) == 2
    assert "data.source_field" in capsys.readouterr().err
