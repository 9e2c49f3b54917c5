"""What a Hugging Face head of classes answers, beside the pipeline of transformers."""

import json
import re

import pytest
import torch
import transformers as tf
from pretrained_variants import BERT

import jaxformer as jf
from jaxformer.cli import main

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "the", "film"]
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tf.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def written(place, labels, **stated):
    torch.manual_seed(0)
    config = tf.BertConfig(**BERT | {"vocab_size": len(WORDS), "num_labels": labels})
    model = tf.BertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    model.save_pretrained(place)
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))


@pytest.mark.parametrize(
    "labels, stated",
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"problem_type": "single_label_classification"}),
        (3, {"problem_type": "multi_label_classification"}),
        (1, {"problem_type": "regression"}),
        (1, {"sbert_ce_default_activation_function": IDENTITY, "problem_type": "regression"}),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}),
    ],
)
def test_the_answer_is_that_of_the_pipeline_of_transformers(place, labels, stated, capsys):
    written(place, labels, **stated)
    model = tf.BertForSequenceClassification.from_pretrained(place)
    pipeline = tf.pipeline("text-classification", model, tokenizer=str(place), top_k=None)
    (expected,) = [pipeline({"text": "the film", "text_pair": "good"})]
    assert main(["predict", str(place), "--prompt", "the film", "--pair", "good"]) == 0
    lines = re.findall(r"([-\d.]+)(%?)  (\S+)", capsys.readouterr().out)
    found = {label: float(number) / (100 if sign else 1) for number, sign, label in lines}
    assert found == pytest.approx({e["label"]: e["score"] for e in expected}, abs=6e-4)


def test_two_classes_without_names_have_those_of_transformers(place, tmp_path, capsys):
    written(place, 2)
    assert "id2label" not in json.loads((place / "config.json").read_text())
    pipeline = tf.pipeline("text-classification", str(place))
    texts = ["good", "bad", "the", "film", "the film", "good bad"]
    lines = [f"{text}\t{pipeline(text)[0]['label']}" for text in texts]
    (tmp_path / "text.tsv").write_text("text\tlabel\n" + "\n".join(sorted(lines)[::-1]) + "\n")
    assert main(["evaluate", str(place), "--data.validation", str(tmp_path / "text.tsv")]) == 0
    assert "accuracy 100.00%" in capsys.readouterr().out


def test_a_head_that_is_not_of_one_class_of_several_is_no_run_and_keeps_what_it_says(
    place, tmp_path, capsys
):
    written(place, 3, problem_type="multi_label_classification")
    model = jf.load(place)
    assert model.problem_type == "multi_label_classification"
    (tmp_path / "text.tsv").write_text("good\tLABEL_0\n")
    evaluation = ["evaluate", str(place), "--data.validation", str(tmp_path / "text.tsv")]
    for command in (["convert", str(place), str(tmp_path / "run")], evaluation):
        assert main(command)
        assert "a run learns and measures one class of several" in capsys.readouterr().err
    for stated, said in (
        ({"problem_type": "ranking"}, "problem_type=.ranking., which is none of single_label"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "'torch.nn.Tanh' to the"),
    ):
        written(place, 1, **stated)
        with pytest.raises(jf.ConfigError, match=said):
            jf.load(place)
