"""The rules of a model's files on the texts that it writes: followed as transformers follows them,
greedily, sampled and by beam search, or refused by name."""

import functools
import json

import numpy as np
import pytest
import torch
import transformers as tf
from pretrained import PAD, inputs, loaded, reference
from pretrained_tokenizers import saved
from products import slow_but
from shapes import weights_and_tokens

import jaxformer as jf
from jaxformer.generation.beam import beam_search
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import PENALTIES, RULES_NOT_TAKEN, RULES_TAKEN

NEW = 16  # tokens of a text
START = 3
VARIED = {"no_repeat_ngram_size": 2}


@functools.cache
def batch(name="marian"):
    rows = inputs(name, seed=4)
    return {name: rows[name] for name in ("input_ids", "attention_mask")}


def theirs(beams, stated, name="marian"):
    """What transformers writes: the new tokens of each row up to an end token."""
    how = tf.GenerationConfig(
        do_sample=False,
        num_beams=beams,
        length_penalty=0.0,
        max_new_tokens=NEW,
        pad_token_id=PAD,
        decoder_start_token_id=START,
        **stated,
    )
    model = reference(name)
    before, model.generation_config = model.generation_config, how
    with torch.no_grad():
        made = model.generate(**{key: torch.from_numpy(rows) for key, rows in batch(name).items()})
    model.generation_config = before
    return cut(made[:, 1:].numpy(), stated.get("eos_token_id"))


def cut(rows, end):
    """Rows of tokens as lists, each up to the first end token and with it."""
    lists = [row.tolist() for row in rows]
    return [row[: row.index(end) + 1] if end in row else row for row in lists]


def ours(beams, stated, folder, name="marian"):
    """The same by the rules of a directory with this generation_config.json and no tokenizer."""
    (folder / "generation_config.json").write_text(json.dumps(stated))
    rules = jf.writing_rules(folder)
    forced = [stated["forced_bos_token_id"]] if "forced_bos_token_id" in stated else []
    prompt = np.tile([START, *forced], (3, 1))
    read = batch(name)
    source = {"source": read["input_ids"], "source_segment_ids": read["attention_mask"]}
    params, config, count = loaded(name).params, loaded(name).config, NEW - len(forced)
    if beams == 1:
        made = jf.generate(params, config, prompt, count, temperature=0, **source, **rules)
    else:
        rules |= {"beams": beams, "length_penalty": 0.0, "keep": 1}
        made = beam_search(params, config, prompt, count, **source, **rules).tokens[:, 0]
    return cut(np.concatenate([prompt[:, 1:], made], axis=1), stated.get("eos_token_id"))


@functools.cache
def cases():
    """Rules that change what is written, by name, each beside one without which this model writes
    one token for ever, as published ones of its family do."""
    free = theirs(1, VARIED)
    common = [int(token) for token in np.argsort(-np.bincount(np.concatenate(free)))[:4]]
    end, first = free[0][2], free[0][0]
    ended = {"eos_token_id": end}
    assert end != first
    found = {
        "bad_words_ids": {"bad_words_ids": [[token] for token in common]},
        "bad words of two tokens": {"bad_words_ids": [[int(free[0][0]), int(free[0][1])]]},
        "repetition_penalty": {"repetition_penalty": 1.7},
        "bad words with the end": ended | {"bad_words_ids": [[end], [common[0]]]},
        "suppress_tokens": {"suppress_tokens": common},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first, free[1][0]]},
        "min_length": ended | {"min_length": 9},
        "min_new_tokens": ended | {"min_new_tokens": 7},
        "forced_eos_token_id": {"eos_token_id": 69, "forced_eos_token_id": 69},
        "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
        "no_repeat_ngram_size 3": {"no_repeat_ngram_size": 3},
        "no_repeat_ngram_size 0": {"no_repeat_ngram_size": 0},
        "all of them": ended
        | {"bad_words_ids": [[common[1]]], "suppress_tokens": [common[2]], "min_length": 5}
        | {"begin_suppress_tokens": [first], "min_new_tokens": 6}
        | {"forced_eos_token_id": end, "forced_bos_token_id": free[2][1]},
    }
    return {name: VARIED | stated for name, stated in found.items()}


NAMES = (
    *("bad_words_ids", "bad words with the end", "suppress_tokens", "begin_suppress_tokens"),
    *("bad words of two tokens", "repetition_penalty"),
    *("min_length", "min_new_tokens", "forced_eos_token_id", "no_repeat_ngram_size 1"),
    *("no_repeat_ngram_size 3", "no_repeat_ngram_size 0", "all of them"),
)
CASES = [(name, 1 + 2 * (i % 2)) for i, name in enumerate(NAMES)] + [("all of them", 3)]


@pytest.mark.parametrize("name, beams", slow_but(CASES, ("all of them", 1), ("all of them", 3)))
def test_marian_writes_what_transformers_writes_by_the_rules_of_its_files(name, beams, tmp_path):
    stated = cases()[name]
    expected = theirs(beams, stated)
    end = {key: stated[key] for key in ("eos_token_id",) if key in stated}
    if beams == 1:
        assert expected != theirs(beams, VARIED | end)  # the rule changes what is written
    assert ours(beams, stated, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mbart", "pegasus", "m2m_100"])
def test_beams_of_other_families_write_what_transformers_writes_in_a_forced_language(
    name, tmp_path
):
    stated = VARIED | {"forced_bos_token_id": 33, "eos_token_id": 69}
    expected = theirs(3, stated, name)
    assert all(row[0] == 33 for row in expected) and len({*expected[0]}) >= 3
    assert ours(3, stated, tmp_path, name) == expected


def tokenizer_of(folder, stated, name="generation_config.json"):
    """A tokenizer with this file beside it."""
    text = (saved("bart") / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text)
    (folder / name).write_text(json.dumps(stated))
    return Tokenizer.load(folder)


STATED = {
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "bad_words_ids": [[1], [2], [7], [4, 5]],
    "repetition_penalty": 1.2,
    "suppress_tokens": [5, 7],
    "begin_suppress_tokens": [6],
    "forced_eos_token_id": 2,
    "min_length": 4,
    "min_new_tokens": 3,
    "no_repeat_ngram_size": 3,
    "num_beams": 6,
}
EXPECTED = {
    "suppress_tokens": (5, 7, 1),
    "bad_words": ((4, 5),),
    "repetition_penalty": 1.2,
    "begin_suppress_tokens": (6,),
    "forced_eos_token_id": (2,),
    "min_length": 4,
    "min_new_tokens": 2,  # the forced token is the first of three
    "no_repeat_ngram_size": 3,
}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_tokenizer_gives_the_rules_of_its_files_and_keeps_them_when_it_is_saved(name, tmp_path):
    tokenizer = tokenizer_of(tmp_path, STATED, name)
    rules = jf.writing_rules(tokenizer)
    assert rules == EXPECTED | {"end_token": (2,), "vocab_size": tokenizer.vocab_size}
    assert jf.writing_rules(tmp_path) == EXPECTED | {"end_token": (2,)}
    tokenizer.save(tmp_path / "saved" / "tokenizer.json")
    assert jf.writing_rules(Tokenizer.load(tmp_path / "saved")) == rules
    theirs = tf.GenerationConfig.from_pretrained(tmp_path / "saved")
    assert theirs.eos_token_id == 2 and theirs.bad_words_ids == STATED["bad_words_ids"]


def test_a_generation_config_replaces_the_rules_of_config_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(STATED))
    tokenizer = tokenizer_of(tmp_path, {"eos_token_id": 2})
    assert jf.writing_rules(tokenizer).keys() == {"end_token", "vocab_size"}


REFUSED = [
    ({"bad_words_ids": 3}, "bad_words_ids is 3, and must be a list of lists"),
    ({"bad_words_ids": [[]]}, "must be a list of lists"),
    ({"bad_words_ids": [["a"]]}, "bad_words_ids is .*must be token ids"),
    ({"suppress_tokens": ["a"]}, "suppress_tokens is .*must be token ids"),
    ({"min_length": "long"}, "min_length is long, and must be a whole number"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
    ({"forced_eos_token_id": 1.5}, "forced_eos_token_id is 1.5"),
    ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0, and must be a number above 0"),
]


@pytest.mark.parametrize("stated, said", REFUSED, ids=[str(stated) for stated, _ in REFUSED])
def test_a_rule_that_is_not_followed_is_refused_by_its_name_when_a_text_is_written(
    stated, said, tmp_path
):
    tokenizer = tokenizer_of(tmp_path, stated)  # it can be loaded, for training
    with pytest.raises(jf.ConfigError, match=said) as told:
        jf.writing_rules(tokenizer)
    assert "generation_config.json" in str(told.value)


def test_a_penalty_that_is_not_applied_is_said(tmp_path):
    tokenizer = tokenizer_of(tmp_path, {"encoder_repetition_penalty": 1.2})
    with pytest.warns(UserWarning, match=r"encoder_repetition_penalty=1\.2"):
        jf.writing_rules(tokenizer)


def test_a_padded_row_keeps_the_rules_as_it_would_alone():
    params, config, prompt = weights_and_tokens("llama")
    rules = {"no_repeat_ngram_size": 1, "min_length": 9, "end_token": (*range(40),)}
    rules |= {"temperature": 0, "max_new_tokens": 6}
    short, pad = prompt[1:, :6], ((0, 0), (5, 0))
    rows = np.concatenate([prompt[:1, :11], np.pad(short, pad)])
    real = np.concatenate([np.ones((1, 11), int), np.pad(np.ones_like(short), pad)])
    both = jf.generate(params, config, rows, segment_ids=real, **rules)
    np.testing.assert_array_equal(both[1:], jf.generate(params, config, short, **rules))
    assert not {*np.asarray(both[1, :3]).tolist()} & {*range(40), *short[0].tolist()}


# What the caller of `jf.generate` or of a command says.
OF_THE_CALL = """
do_sample temperature top_k top_p min_p num_beams num_beam_groups length_penalty early_stopping
max_length max_new_tokens num_return_sequences
"""
# Of the same text: ids that the tokenizer takes, caches, outputs, and helpers that are not used.
WITHOUT_EFFECT = """
bos_token_id eos_token_id pad_token_id decoder_start_token_id forced_bos_token_id
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
cache_config cache_implementation compile_config continuous_batching_config disable_compile
is_assistant low_memory max_cache_len max_matching_ngram_size num_assistant_tokens
num_assistant_tokens_schedule output_attentions output_hidden_states output_logits output_scores
prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits
return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache use_mtp
_from_model_config
"""


def test_each_key_of_transformers_is_followed_refused_or_of_no_effect_on_the_rules():
    lists = [*RULES_TAKEN, *RULES_NOT_TAKEN, *PENALTIES]
    lists += [*OF_THE_CALL.split(), *WITHOUT_EFFECT.split()]
    assert len({*lists}) == len(lists)
    assert {*vars(tf.GenerationConfig())} <= {*lists}


@pytest.mark.parametrize("key", RULES_NOT_TAKEN)
def test_a_rule_that_is_not_followed_is_refused_by_name(key, tmp_path):
    tokenizer = tokenizer_of(tmp_path, {key: ["x"]})
    with pytest.raises(jf.ConfigError, match=f"{key} has .*, which is not followed here"):
        jf.writing_rules(tokenizer)
    assert "end_token" in jf.writing_rules(tokenizer_of(tmp_path, {key: None}))
