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
from jaxformer.tools.plan.planned import planned_run

ROOT = Path(__file__).parents[2]
NAMES = ("<|im_start|>", "<|im_end|>")
ADD = {"tokenizer__add_tokens": ",".join(NAMES)}
ONE = {"optimizer__learning_rate": 0.0, "train__steps": 1, "model__n_layers": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("added")
    write_text(folder / "text.txt", documents=30)
    return folder


@pytest.fixture(scope="module", params=["tied", "untied"])
def start(base, request):
    tied = request.param == "tied"
    return run(
        base,
        request.param,
        data__train=base / "text.txt",
        model__tied_head=tied,
        model__head_bias=not tied,
        **ONE,
    )


def grown_from(base, start, name, **changes):
    changes = ADD | ONE | changes
    return run(base, name, data__train=base / "text.txt", run__init_from=start, **changes)


def test_new_rows_are_the_mean_of_the_old_and_transformers_reads_them(base, start, tmp_path):
    grown = grown_from(base, start, f"grown-{start.name}")
    before, after = leaves(start), leaves(grown)
    old = jf.load(start).tokenizer.vocab_size
    tables = [path for path in before if path in ("embed.tokens", "head.weight", "head.bias")]
    assert len(tables) == (1 if start.name == "tied" else 3)
    for path, leaf in after.items():
        if path not in tables:
            np.testing.assert_array_equal(leaf, before[path], err_msg=path)
            continue
        assert leaf.shape == (old + 2, *before[path].shape[1:])
        np.testing.assert_array_equal(leaf[:old], before[path])
        mean = before[path].astype(np.float64).mean(0).astype(np.float32)
        np.testing.assert_array_equal(leaf[old:], np.stack([mean, mean]))
    tokenizer = jf.load(grown).tokenizer
    assert [tokenizer.id_of(name) for name in NAMES] == [old, old + 1]
    assert tokenizer.encode(NAMES[0], special_tokens=True)[-1:] == [old]
    # The same command goes on with the run, in which the tokens are no longer new.
    assert grown_from(base, start, grown.name) == grown
    if start.name == "untied":
        return  # no architecture of transformers has this bias
    assert main(["convert", str(grown), str(tmp_path / "hf"), "--verify"]) == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    theirs = tf.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert config["vocab_size"] == old + 2
    assert theirs.convert_tokens_to_ids(list(NAMES)) == [old, old + 1]
    assert theirs("a" + NAMES[1], add_special_tokens=False)["input_ids"][-1] == old + 1


def test_rows_that_fill_a_table_up_are_taken_first(base):
    padded = run(base, "padded", data__train=base / "text.txt", model__vocab_size=512, **ONE)
    grown = grown_from(base, padded, "grown-padded")
    old = jf.load(padded).tokenizer.vocab_size
    before, after = (leaves(folder)["embed.tokens"] for folder in (padded, grown))
    assert after.shape == before.shape
    mean = before[:old].astype(np.float64).mean(0).astype(np.float32)
    np.testing.assert_array_equal(after[old : old + 2], np.stack([mean, mean]))
    np.testing.assert_array_equal(after[old + 2 :], before[old + 2 :])


def test_beside_an_adapter_the_new_rows_alone_learn(base, start, tmp_path, capsys):
    """The text has none of the tokens: those of an output layer learn, as they are no targets."""
    name, tied = f"lora-{start.name}", start.name == "tied"
    changes = {"adapter__kind": "lora", "adapter__rank": 2}
    changes |= {"optimizer__learning_rate": 0.1, "train__steps": 2, "model__tied_head": tied}
    grown = grown_from(base, start, name, **changes)
    loaded = jf.load(grown)
    below = flat_leaves(jf.without_adapters(loaded.params))
    for path, leaf in leaves(start).items():
        np.testing.assert_array_equal(below[path][: len(leaf)], leaf)
    merged, old = flat_leaves(jf.merge(loaded.params)), loaded.config.vocab_size - 2
    output = "embed.tokens" if tied else "head.weight"
    for path in {"embed.tokens", output}:
        np.testing.assert_array_equal(merged[path][:old], below[path][:old])
        assert np.array_equal(merged[path][old:], below[path][old:]) != (path == output)
    # The run goes on, and a directory of transformers holds what it computes.
    grown_from(base, start, name, **changes | {"train__steps": 4})
    again = flat_leaves(jf.merge(jf.load(grown).params))
    assert not np.array_equal(again[output][old:], merged[output][old:])
    assert main(["convert", str(grown), str(tmp_path / "peft")]) == 2
    assert "add --merge" in capsys.readouterr().err
    if tied:
        assert main(["convert", str(grown), str(tmp_path / "hf"), "--merge", "--verify"]) == 0


def test_a_plan_counts_the_new_rows(base, start):
    tied = start.name == "tied"
    changes = ADD | ONE | {"adapter__kind": "lora", "adapter__rank": 2, "model__tied_head": tied}
    changes |= {"run__init_from": start, "data__train": base / "text.txt"}
    run = load_config(ROOT / "configs/quickstart.py", settings(base, "planned", **changes))
    planned = planned_run(run, "cpu")
    assert planned.model.vocab_size == jf.load(start).config.vocab_size + 2
    learned = {path: spec.shape for path, spec in rows(planned.specs).items() if spec.trainable}
    new_rows = {"embed.tokens.b": (2, run.model.d_model)}
    if not tied:
        new_rows["head.weight.a"] = (run.model.d_model, 2)
    assert {path: shape for path, shape in learned.items() if path in new_rows} == new_rows
    assert all(path in new_rows or path.startswith("blocks.") for path in learned)


def test_mistakes_are_named(base, start):
    with pytest.raises(jf.ConfigError, match=r"<\|endoftext\|> \(0\) already"):
        grown_from(base, start, "has", tokenizer__add_tokens="<|endoftext|>,<|new|>")
    with pytest.raises(jf.ConfigError, match=r"set run\.init_from to its directory"):
        run(base, "alone", data__train=base / "text.txt", **ADD)
    with pytest.raises(jf.ConfigError, match="start the adapter from that run"):
        grown_from(base, start, "lora", adapter__kind="lora", adapter__targets="embed")
    with pytest.raises(jf.ConfigError, match=r"<a> twice"):
        grown_from(base, start, "twice", tokenizer__add_tokens="<a>, <a>")
