"""A run may add special tokens to the vocabulary of the model from which it starts: their rows are
made of the old ones, and transformers reads what is written."""

import json
from pathlib import Path

import numpy as np
import pytest
import transformers as tf
from tiny_run import write_text
from warm_starts import leaves, run, settings

import jaxformer as jf
from jaxformer.arrays.params import rows
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.cli import main
from jaxformer.runs.config import load_config
from jaxformer.tools.plan_memory import planned_run

ROOT = Path(__file__).parents[2]
NAMES = ("<|im_start|>", "<|im_end|>")
ADD = {"tokenizer__add_tokens": ",".join(NAMES)}
ONE = {"optimizer__learning_rate": 0.0, "train__steps": 1, "model__n_layers": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("added")
    write_text(folder / "text.txt", documents=30)
    return folder


def started(base, tied):
    head = dict(model__tied_head=tied, model__head__bias=not tied)
    name = "tied" if tied else "untied"
    return run(base, name, data__train=base / "text.txt", **head, **ONE)


@pytest.fixture(scope="module")
def tied(base):
    return started(base, True)


@pytest.fixture(scope="module")
def untied(base):
    return started(base, False)


def grown_from(base, start, name, **changes):
    changes = ADD | ONE | changes
    return run(base, name, data__train=base / "text.txt", run__init_from=start, **changes)


def assert_rows_are_the_mean(before, after, old):
    np.testing.assert_array_equal(after[:old], before[:old])
    mean = before[:old].astype(np.float64).mean(0).astype(np.float32)
    np.testing.assert_array_equal(after[old : old + 2], np.stack([mean, mean]))


def test_new_rows_are_the_mean_of_the_old_and_transformers_reads_them(base, tied, tmp_path):
    grown = grown_from(base, tied, "grown-tied")
    before, after = leaves(tied), leaves(grown)
    old = jf.load(tied).tokenizer.vocab_size
    for path in after.keys() - {"embed.tokens"}:
        np.testing.assert_array_equal(after[path], before[path], err_msg=path)
    table = after["embed.tokens"]
    assert len(table) == old + 2 and "head.weight" not in after
    assert_rows_are_the_mean(before["embed.tokens"], table, old)
    tokenizer = jf.load(grown).tokenizer
    assert [tokenizer.id_of(name) for name in NAMES] == [old, old + 1]
    assert tokenizer.encode(NAMES[0], special_tokens=True)[-1:] == [old]
    # The same command goes on with the run, in which the tokens are no longer new.
    assert grown_from(base, tied, grown.name) == grown
    assert main(["convert", str(grown), str(tmp_path / "hf")]) == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    theirs = tf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert config["vocab_size"] == old + 2
    assert theirs.convert_tokens_to_ids(list(NAMES)) == [old, old + 1]
    assert theirs("a" + NAMES[1], add_special_tokens=False)["input_ids"][-1] == old + 1


@pytest.mark.slow
def test_rows_that_fill_a_table_up_are_taken_first(base):
    padded = run(base, "padded", data__train=base / "text.txt", model__vocab_size=512, **ONE)
    grown = grown_from(base, padded, "grown-padded")
    old = jf.load(padded).tokenizer.vocab_size
    before, after = (leaves(folder)["embed.tokens"] for folder in (padded, grown))
    assert after.shape == before.shape
    assert_rows_are_the_mean(before, after, old)
    np.testing.assert_array_equal(after[old + 2 :], before[old + 2 :])


def test_beside_an_adapter_the_new_rows_alone_learn(base, untied, tmp_path, capsys):
    """The text has none of the tokens: those of an output layer learn, as they are no targets."""
    changes = {"adapter__kind": "lora", "adapter__rank": 2, "model__tied_head": False}
    grown = grown_from(base, untied, "lora", **changes | {"optimizer__learning_rate": 0.1})
    loaded = jf.load(grown)
    merged, old = flat_leaves(jf.merge(loaded.params)), loaded.config.vocab_size - 2
    below = flat_leaves(jf.without_adapters(loaded.params))
    for path, leaf in leaves(untied).items():
        np.testing.assert_array_equal(below[path][: len(leaf)], leaf)
        if path in ("embed.tokens", "head.weight", "head.bias"):
            assert_rows_are_the_mean(leaf, below[path], old)
    for path in ("embed.tokens", "head.weight"):
        np.testing.assert_array_equal(merged[path][:old], below[path][:old])
        same = np.array_equal(merged[path][old:], below[path][old:])
        assert same == (path == "embed.tokens")
    assert main(["convert", str(grown), str(tmp_path / "peft")]) == 2
    assert "add --merge" in capsys.readouterr().err


@pytest.mark.slow
def test_the_new_rows_of_an_adapter_go_on_learning_and_are_merged(base, tied, tmp_path):
    changes = {"adapter__kind": "lora", "optimizer__learning_rate": 0.1}
    tables = []
    for steps in (1, 2):
        grown = grown_from(base, tied, "goes-on", **changes | {"train__steps": steps})
        tables.append(flat_leaves(jf.merge(jf.load(grown).params))["embed.tokens"])
    np.testing.assert_array_equal(tables[0][:-2], tables[1][:-2])
    assert not np.array_equal(tables[0][-2:], tables[1][-2:])
    assert main(["convert", str(grown), str(tmp_path / "hf"), "--merge", "--verify"]) == 0


def test_a_plan_counts_the_new_rows(base, untied):
    changes = ADD | ONE | {"adapter__kind": "lora", "adapter__rank": 2, "model__tied_head": False}
    changes |= {"run__init_from": untied, "data__train": base / "text.txt"}
    run = load_config(ROOT / "configs/quickstart.py", settings(base, "planned", **changes))
    planned = planned_run(run, "cpu")
    assert planned.model.vocab_size == jf.load(untied).config.vocab_size + 2
    learned = {path: spec.shape for path, spec in rows(planned.specs).items() if spec.trainable}
    new_rows = {"embed.tokens.b": (2, run.model.d_model), "head.weight.a": (run.model.d_model, 2)}
    assert {path: shape for path, shape in learned.items() if path in new_rows} == new_rows
    assert all(path in new_rows or path.startswith("blocks.") for path in learned)


def test_mistakes_are_named(base, tied):
    with pytest.raises(jf.ConfigError, match=r"<\|endoftext\|> \(0\) already"):
        grown_from(base, tied, "has", tokenizer__add_tokens="<|endoftext|>,<|new|>")
    with pytest.raises(jf.ConfigError, match=r"set run\.init_from to its directory"):
        run(base, "alone", data__train=base / "text.txt", **ADD)
    with pytest.raises(jf.ConfigError, match="start the adapter from that run"):
        grown_from(base, tied, "both", adapter__kind="lora", adapter__targets="embed")
    with pytest.raises(jf.ConfigError, match=r"<a> twice"):
        grown_from(base, tied, "twice", tokenizer__add_tokens="<a>, <a>")
