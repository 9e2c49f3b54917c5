"""Directories as their authors published them load without a warning, are the same models, and go
back to transformers."""

import json
import warnings

import pytest
import torch
import transformers as tf
from pretrained import assert_close, batch_for, each, logits, perturbed, with_eos_of
from pretrained_tokenizers import change, saved
from published import CASES
from safetensors.torch import load_file, save_file

import jaxformer as jf
from jaxformer.tokenizer import Tokenizer


def published(name, place):
    """The directory, made of a random model of that config."""
    hub, tensors = CASES[name]
    (place / "config.json").write_text(json.dumps(hub))
    kind = getattr(tf, hub["architectures"][0])
    torch.manual_seed(3)
    perturbed(kind(kind.config_class.from_pretrained(place)), seed=5).save_pretrained(place)
    held = tensors(load_file(place / "model.safetensors"))
    save_file({key: w.contiguous() for key, w in held.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(hub))
    return place


def theirs_of(place):
    """transformers' model of a directory; of a BART without a head the one that writes."""
    named = json.loads((place / "config.json").read_text())["architectures"][0]
    kind = getattr(tf, named.replace("BartModel", "BartForConditionalGeneration"))
    return kind.from_pretrained(
        place, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


# With the strangest files, of those that are most published.
USUAL = {"llama-2-7b-hf", "gpt-oss-20b", "bloom-560m", "bert-base-uncased", "t5-base"}
USUAL |= {"bart-large-cnn"}


@each(CASES, slow=CASES.keys() - USUAL)
def test_a_published_directory_is_read_in_silence_and_written_for_transformers(name, tmp_path):
    """What is written computes in transformers what the published one does there; that both compute
    it here, test_pretrained_logits.py says of their families."""
    place = published(name, tmp_path)
    hf = theirs_of(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = jf.load(place)
    if model.labels and "id2label" in CASES[name][0]:
        assert model.labels == tuple(CASES[name][0]["id2label"].values())
    jf.save_pretrained(tmp_path / "out", model.params, model.config, labels=model.labels)
    again = with_eos_of(theirs_of(tmp_path / "out"), hf)
    batch = batch_for(hf, seed=7)
    assert_close(logits(again, batch), logits(hf, batch), batch)


@pytest.mark.parametrize(
    ("kind", "family", "settings"),
    [
        ("gpt2", "gpt2", {"model_max_length": 1024}),
        ("bert", "bert", {"do_lower_case": True, "model_max_length": 512}),
        ("bart", "roberta", {"model_max_length": 512}),
        ("bart", "bart", {"model_max_length": 1024}),
    ],
    ids=["gpt2", "bert", "roberta", "bart"],
)
def test_roles_that_the_class_of_a_tokenizer_tells_are_in_what_is_saved(
    kind, family, settings, tmp_path
):
    """Their tokenizer_config.json names no special token."""
    (tmp_path / "tokenizer.json").write_text((saved(kind) / "tokenizer.json").read_text())
    change(tmp_path / "tokenizer_config.json", settings)
    ids = {"bos_token_id": 0, "eos_token_id": 0} if kind == "gpt2" else {}
    change(tmp_path / "config.json", {"model_type": family} | ids)
    named = tf.AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    Tokenizer.load(tmp_path).save(tmp_path / "out" / "tokenizer.json")
    again = tf.AutoTokenizer.from_pretrained(tmp_path / "out").special_tokens_map
    roles = {f"{role}_token" for role in ("eos", "pad", "cls", "sep", "mask")} & {*named}
    assert {role: again.get(role) for role in roles} == {role: named[role] for role in roles}
