"""The vectors of directories of sentence-transformers: what modules.json says is followed or
refused."""

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from pretrained_variants import BERT

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config.model import ModelConfig
from jaxformer.config.records import Head
from jaxformer.runs.config import with_base
from jaxformer.runs.model_files import ModelFiles

NAMES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, with the modules that sentence-transformers writes beside it."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tf.BertModel(tf.BertConfig(**BERT)).save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        dict(idx=index, name=str(index), path=path, type=f"sentence_transformers.models.{kind}")
        for index, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    return folder


def state(place, pooling):
    (place / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def legacy(chosen):
    return {f"pooling_mode_{name}": name == chosen for name in NAMES}


@pytest.mark.parametrize(
    "stated, at",
    [
        (legacy("cls_token"), lambda x: x[:, 0]),
        (legacy("mean_tokens"), lambda x: x.mean(1)),
        (legacy("lasttoken"), lambda x: x[:, -1]),
        ({"pooling_mode": "cls", "include_prompt": True}, lambda x: x[:, 0]),
        ({"pooling_mode": ["lasttoken"]}, lambda x: x[:, -1]),
        ({}, lambda x: x.mean(1)),
    ],
)
def test_the_vector_is_that_of_the_stated_pooling(place, stated, at, tmp_path):
    state(place, stated)
    tokens = np.arange(1, 15).reshape(2, 7)
    with torch.no_grad():
        theirs = at(tf.BertModel.from_pretrained(place)(torch.tensor(tokens)).last_hidden_state)
    theirs = torch.nn.functional.normalize(theirs).numpy()
    model = jf.load(place)
    np.testing.assert_allclose(
        jf.embed(model.params, model.config, tokens), theirs, rtol=1e-4, atol=1e-5
    )
    # A run that starts from it learns such vectors, and what is written says so.
    assert (
        with_base(ModelConfig(head=Head(kind="none")), ModelFiles(place), "base").head.pooling
        == model.config.head.pooling
    )
    jf.save_pretrained(tmp_path / "out", model.params, model.config)
    again = jf.load(tmp_path / "out")
    assert again.config.text_pooling == model.config.text_pooling
    assert (tmp_path / "out" / "modules.json").exists() == (model.config.head.pooling != "mean")


@pytest.mark.parametrize(
    "file, content, said",
    [
        ("1_Pooling/config.json", legacy("max_tokens"), "the pooling max, which is not followed"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "the pooling cls with mean"),
        ("modules.json", [{"type": "st.models.Dense"}], r"models\.Dense', which"),
        ("modules.json", {"type": 3}, "the module '3', which is not followed"),
        ("modules.json", [{"type": "models.Transformer"}], "has no module Pooling"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "has do_lower_case, which is not"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
            "puts the prompt 'query: ' before each text",
        ),
        ("config_sentence_transformers.json", {"truncate_dim": 8}, "truncate_dim=8, which is not"),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "has processing_kwargs"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(place, file, content, said):
    state(place, legacy("cls_token"))
    path = place / file
    before = path.read_text() if path.exists() else None
    path.write_text(json.dumps(content))
    try:
        with pytest.raises(jf.ConfigError, match=said):
            jf.load(place)
    finally:
        path.unlink()
        if before is not None:
            path.write_text(before)


@pytest.mark.parametrize(
    "file, stated, closed",
    [
        ("sentence_bert_config.json", {"max_seq_length": 7}, True),
        ("tokenizer_config.json", {"model_max_length": 7, "truncation_side": "left"}, False),
    ],
)
@pytest.mark.filterwarnings("default:texts are cut")
def test_embed_cuts_and_closes_texts_as_sentence_transformers_does(
    tmp_path, capsys, file, stated, closed
):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmn"]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if closed:
        marks = [("[CLS]", 2), ("[SEP]", 3)]
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=marks
        )
    roles = {"sep_token": "[SEP]", "cls_token": "[CLS]", "pad_token": "[PAD]"}
    tf.PreTrainedTokenizerFast(tokenizer_object=backend, **roles).save_pretrained(tmp_path)
    torch.manual_seed(0)
    theirs = tf.BertModel(tf.BertConfig(**BERT | {"vocab_size": len(words)})).eval()
    theirs.save_pretrained(tmp_path)
    modules = [{"type": "models.Transformer"}, {"type": "models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    state(tmp_path, legacy("lasttoken"))
    path = tmp_path / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | stated))
    text = "a b c d e f g h i j k l"
    tokenizer = tf.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text, truncation=True, max_length=7, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = torch.nn.functional.normalize(theirs(ids).last_hidden_state[0, -1], dim=0)
    assert main(["embed", str(tmp_path), "--prompt", text]) == 0
    printed = capsys.readouterr()
    assert "note: texts are cut to 7 tokens." in printed.err
    vector = json.loads(printed.out)["vector"]
    np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-4, atol=1e-5)
    (key, *_) = stated
    for wrong in ("7", -1, float("nan")):
        path.write_text(json.dumps(before | {key: wrong}))
        assert main(["embed", str(tmp_path), "--prompt", text]) == 2
        assert f"{file} has {key}={wrong}, which must be a number" in capsys.readouterr().err
