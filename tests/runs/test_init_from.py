"""A run may begin from another run: the trunk is carried, a head that differs is new, nothing is
dropped in silence."""

import dataclasses
import json
import operator
import random
from pathlib import Path

import numpy as np
import pytest
from tiny_run import write_text
from warm_starts import SMALL, leaves, run

import jaxformer as jf
from jaxformer.runs.config import load_config

pytestmark = pytest.mark.slow

STILL = {"optimizer__learning_rate": 0.0, "train__steps": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adopt")
    write_text(folder / "text.txt")
    rng = random.Random(0)
    rows = [
        (" ".join(rng.choices(["good", "fine"] if k % 2 else ["bad", "poor"], k=6)), "ny"[k % 2])
        for k in range(200)
    ]
    (folder / "labelled.tsv").write_text(
        "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows)
    )
    return folder


@pytest.fixture(scope="module")
def trunk(base) -> Path:
    return run(base, "trunk", data__train=base / "text.txt")


@pytest.fixture(scope="module")
def encoder(base) -> Path:
    changes = {
        "model__family": "encoder",
        "model__head__next_sentence": True,
        "data__packing": "stream",
    }
    return run(
        base, "encoder", data__train=base / "text.txt", model__embedding__token_types=2, **changes
    )


def test_a_run_begins_from_another_runs_parameters_shape_and_tokenizer(base, trunk):
    other = run(base, "other", data__train=base / "text.txt", run__init_from=trunk, **STILL)
    assert jf.load(other).config.d_model == SMALL["model.d_model"]
    assert (other / "tokenizer.json").read_text() == (trunk / "tokenizer.json").read_text()
    found, expected = leaves(other), leaves(trunk)
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_the_trunk_is_carried_and_the_head_is_new(base, family, request):
    origin = request.getfixturevalue({"decoder": "trunk", "encoder": "encoder"}[family])
    changes = {"model__head__kind": "classes", "data__packing": "stream"}
    changes |= {"data__train": base / "labelled.tsv", "run__init_from": origin}
    made = run(base, f"classes-{family}", **changes, **STILL)
    found, before = leaves(made), leaves(origin)
    carried = {
        path for path in found if path in before and np.array_equal(found[path], before[path])
    }
    assert {path for path in found if path not in carried} == {"head.weight", "head.bias"}
    assert found["head.weight"].shape == (2, SMALL["model.d_model"])
    assert ("pooler.dense" in carried) == (family == "encoder")
    assert jf.load(made).labels == ("n", "y")
    assert json.loads((made / "metrics.jsonl").read_text().splitlines()[-1])["val_accuracy"] <= 1


def test_a_classifier_that_is_tuned_again_keeps_its_labels_and_their_order(base, encoder, capsys):
    """The base is {0: y, 1: n}, which is not the order of the alphabet."""
    changes = {"model__head__kind": "classes", "data__packing": "stream", "run__progress": "lines"}
    changes |= STILL
    first = run(base, "yn", data__train=base / "labelled.tsv", run__init_from=encoder, **changes)
    record = json.loads((first / "data.json").read_text())
    (first / "data.json").write_text(json.dumps(record | {"labels": ["y", "n"]}))
    (base / "more.tsv").write_text((base / "labelled.tsv").read_text() + "so so\tm\n" * 20)
    (base / "others.tsv").write_text("text\tlabel\n" + "good\tred\nbad\tblue\n" * 20)
    before = leaves(first)

    capsys.readouterr()
    again = run(base, "same", data__train=base / "labelled.tsv", run__init_from=first, **changes)
    assert "new: none." in capsys.readouterr().out
    assert jf.load(again).labels == ("y", "n")
    for path, leaf in leaves(again).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)

    more = run(base, "more", data__train=base / "more.tsv", run__init_from=first, **changes)
    said = " ".join(capsys.readouterr().out.split())
    assert "new: head.weight, head.bias." in said
    assert jf.load(more).labels == ("y", "n", "m")
    for path, leaf in leaves(more).items():
        if not path.startswith("head"):
            np.testing.assert_array_equal(leaf, before[path], err_msg=path)
    # The same command again goes on with the labels of the run.
    run(base, "more", data__train=base / "more.tsv", run__init_from=first, **changes)
    assert jf.load(more).labels == ("y", "n", "m")

    capsys.readouterr()
    others = run(base, "others", data__train=base / "others.tsv", run__init_from=first, **changes)
    said = " ".join(capsys.readouterr().out.split())
    assert "new: head.weight, head.bias." in said and jf.load(others).labels == ("blue", "red")


def test_a_trunk_is_fine_tuned_to_tell_classes(base, encoder):
    changes = {
        "model__head__kind": "classes",
        "data__packing": "stream",
        "train__steps": 40,
        "optimizer__learning_rate": 3e-3,
    }
    made = run(base, "tuned", data__train=base / "labelled.tsv", run__init_from=encoder, **changes)
    assert json.loads((made / "metrics.jsonl").read_text().splitlines()[-1])["val_accuracy"] > 0.95


def test_a_setting_that_the_parameters_have_the_shape_for_takes_effect(base, trunk):
    """Context extension: a longer context and stretched positions are not dropped in silence."""
    asked = {
        "model__max_length": 192,
        "model__rope__scaling": "yarn",
        "model__rope__factor": 4.0,
        "model__norm_eps": 1e-6,
    }
    changes = asked | STILL | {"data__train": base / "text.txt", "run__init_from": trunk}
    other = run(base, "longer", **changes)
    found = jf.load(other).config
    for name, value in asked.items():
        setting = name.removeprefix("model__").replace("__", ".")
        assert operator.attrgetter(setting)(found) == value
    for path, leaf in leaves(other).items():
        np.testing.assert_array_equal(leaf, leaves(trunk)[path], err_msg=path)


def test_a_config_that_states_no_model_takes_the_bases_and_one_that_does_is_asked_for(base, trunk):
    config = Path(__file__).parents[2] / "configs"
    asked = [f"run.init_from={trunk}", f"run.dir={base / 'never'}", "data.sequence_length=16"]
    there = jf.load_config(trunk / "config.json").model
    found = load_config(config / "finetune.py", asked).model
    assert found == dataclasses.replace(there, dropout=0.0)
    found = load_config(config / "finetune.py", [*asked, "model.max_length=2048"]).model
    assert found.max_length == 2048
    assert load_config(config / "quickstart.py", asked).model.d_model == 128


def test_what_the_command_line_states_stands_above_the_config_file(base, trunk):
    """The file's 3 heads do not share the base's 2 key-value heads, which does not matter where
    the line says 4."""
    grouped = base / "grouped"
    grouped.mkdir()
    there = json.loads((trunk / "config.json").read_text())
    there["model"] |= {"n_heads": 4, "n_kv_heads": 2}
    (grouped / "config.json").write_text(json.dumps(there))
    (grouped / "tokenizer.json").write_bytes((trunk / "tokenizer.json").read_bytes())
    file = base / "three_heads.py"
    file.write_text(
        "from jaxformer import ModelConfig, RunConfig\n"
        "config = RunConfig(model=ModelConfig(n_heads=3))\n"
    )
    asked = [f"run.init_from={grouped}", f"run.dir={base / 'never'}", "data.sequence_length=16"]
    with pytest.raises(jf.ConfigError, match="n_heads=3"):
        load_config(file, asked)
    assert load_config(file, [*asked, "model.n_heads=4"]).model.n_heads == 4


def test_settings_that_the_parameters_have_no_shape_for_are_refused_by_name(base, trunk):
    asked = {"model__d_model": 64, "model__positions": "learned", "model__norm_eps": 1e-6}
    with pytest.raises(jf.ConfigError) as refused:
        run(base, "refused", data__train=base / "text.txt", run__init_from=trunk, **asked)
    message = str(refused.value)
    assert (
        "model.d_model=64, but it is 32 in the base" in message
        and "model.positions='learned', but it is 'rope' in the base" in message
    )
    assert "so embed.tokens is (300, 64) here, and (300, 32) in the base" in message
    assert "norm_eps" not in message and "configs/finetune.py" in message
    assert not (base / "refused").exists()


def test_one_label_is_nothing_to_learn(base):
    text = base / "one.tsv"
    text.write_text("text\tlabel\n" + "".join(f"good {k}\ty\n" for k in range(60)))
    with pytest.raises(jf.ConfigError, match="the data has 1 label"):
        run(base, "one", data__train=text, model__family="encoder", model__head__kind="classes")
