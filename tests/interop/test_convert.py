"""A Hugging Face directory is a model like a run's: commands, fine-tuning and conversion take one
for the other."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_run import write_text
from warm_starts import leaves, run

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.interop import logit_parity

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("convert")]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    write_text(folder / "text.txt")
    lines = ["source\ttarget"] + [f"the cat {k}\ta dog {k}" for k in range(60)]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n")
    rows = [("good fine" if k % 2 else "bad poor", "ny"[k % 2]) for k in range(120)]
    (folder / "labelled.tsv").write_text(
        "text\tlabel\n" + "".join(f"{text} {k}\t{label}\n" for k, (text, label) in enumerate(rows))
    )
    return folder


BERT = dict(
    model__family="encoder", model__norm="layer", model__norm_placement="post", model__bias="all"
)
BERT |= dict(model__embedding__norm=True, model__positions="learned", model__activation="gelu")
BERT |= dict(model__embedding__token_types=2)
T5 = dict(model__family="encoder_decoder", model__positions="t5", model__attention__scale=1.0)
WHOLE = dict(
    model__max_length=32, data__packing="stream"
)  # rows as those in which a directory is evaluated
KINDS = {
    "decoder": (dict(data__train="text.txt", **WHOLE), "LlamaForCausalLM"),
    "masked": (
        dict(data__train="text.txt", model__tied_head=True, **WHOLE, **BERT),
        "BertForMaskedLM",
    ),
    "classes": (
        dict(data__train="labelled.tsv", model__head__kind="classes", **BERT),
        "BertForSequenceClassification",
    ),
    "pairs": (
        dict(data__train="pairs.tsv", data__objective="seq2seq", **T5),
        "T5ForConditionalGeneration",
    ),
}


def told(*arguments: object, status: int = 0) -> str:
    """What a command prints, to both streams, when it ends as it should."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        found = main([str(argument) for argument in arguments])
    assert found == status, out.getvalue()
    return out.getvalue()


def made(base: Path, kind: str) -> tuple[Path, Path]:
    """(run, model directory) of a kind, each made once."""
    settings, _ = KINDS[kind]
    here, there = base / kind, base / f"{kind}_there"
    if not here.exists():
        run(base, kind, **settings | {"data__train": base / settings["data__train"]})
    if not there.exists():
        told("convert", here, there)
    return here, there


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_the_same_model_tokenizer_and_labels(base, kind):
    here, there = made(base, kind)
    assert json.loads((there / "config.json").read_text())["architectures"] == [KINDS[kind][1]]
    assert "a run of" in told("convert", there, base / f"{kind}_back")
    first, second, last = (jf.load(path) for path in (here, there, base / f"{kind}_back"))
    for other in (second, last):
        assert leaves_equal(first.params, other.params) and other.labels == first.labels
        assert other.tokenizer.fingerprint() == first.tokenizer.fingerprint()
        assert other.tokenizer.end_token == first.tokenizer.end_token
        assert other.tokenizer.start_token == first.tokenizer.start_token
    assert last.config == second.config
    assert len(first.labels) == (2 if kind == "classes" else 0)


def leaves_equal(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_verify_prints_that_both_sides_agree(base, kind):
    here, _ = made(base, kind)
    said = told("convert", here, base / f"{kind}_verified", "--verify")
    assert "both models agree" in said and "largest logit difference" in said


def test_verify_tells_sides_that_are_not_equal(base, monkeypatch, capsys):
    _, there = made(base, "decoder")
    model = jf.load(there)
    moved = jax.tree.map(lambda leaf: leaf * 1.01, model.params)
    found = logit_parity.compare(there, moved, model.config)
    assert found.largest > 1e-3 * found.deviation
    monkeypatch.setattr(
        "jaxformer.cli.convert.load", lambda path, step, **_: jf.Loaded(moved, model.config, None)
    )
    assert main(["convert", str(there), str(base / "moved"), "--verify"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_verify_without_transformers_says_what_to_install(base, monkeypatch):
    here, _ = made(base, "decoder")
    monkeypatch.setattr(logit_parity, "find_spec", lambda name: None)
    said = told("convert", here, base / "never", "--verify", status=2)
    assert "pip install torch transformers" in said
    assert not (base / "never").exists()


COMMANDS = {  # which uses the model, and options of `evaluate` on its own text
    "decoder": (["sample", "--prompt", "the cat", "--max_new_tokens", 5], []),
    "masked": (["predict", "--prompt", "the [MASK] sees"], []),
    "classes": (["predict", "--prompt", "good fine"], []),
    "pairs": (["sample", "--prompt", "the cat 3", "--beams", 2], ["--beams", 2]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_commands_say_of_a_directory_what_they_say_of_the_run(base, kind):
    here, there = made(base, kind)
    use, more = COMMANDS[kind]
    text = base / KINDS[kind][0]["data__train"]
    for name, *options in (use, ["evaluate", "--data.validation", text, *more]):
        options += ["--seed", 0] if name == "sample" else []
        said = [told(name, path, *options) for path in (here, there)]
        assert said[0] == said[1] and (said[0].strip() or name == "sample")
    page = base / f"{kind}.html"
    assert "attention of" in told("attention", there, "--prompt", "the cat", "--output", page)
    assert page.stat().st_size > 1000


def test_a_directory_has_no_text_of_its_own_and_no_steps(base):
    _, there = made(base, "decoder")
    assert "name some with --data.validation" in told("evaluate", there, status=2)
    assert "which has no steps" in told("sample", there, "--step", 3, status=2)


def test_a_run_is_evaluated_on_what_it_learnt_alone(base):
    here, there = made(base, "pairs")
    text = base / "text.txt"
    options = ("--data.validation", text, "--data.objective", "prefix")
    assert "leave out --data.objective" in told("evaluate", here, *options, status=2)
    assert "loss" in told("evaluate", there, *options)


@pytest.mark.parametrize("kind", ["decoder", "classes"])
def test_fine_tuning_begins_with_the_tensors_of_a_directory(base, kind):
    """At a learning rate of 0 one step leaves them as they are; the config and the tokenizer are
    the directory's."""
    _, there = made(base, kind)
    still = dict(optimizer__learning_rate=0.0, train__steps=1, run__init_from=there)
    head = dict(model__head__kind="classes") if kind == "classes" else {}
    still |= dict(data__train=base / KINDS[kind][0]["data__train"])
    tuned = run(base, f"{kind}_tuned", **still, **head)
    ours, hf = leaves(tuned), leaves(there)
    assert ours.keys() == hf.keys() and all(np.array_equal(ours[path], hf[path]) for path in hf)
    assert jf.load(tuned).tokenizer.fingerprint() == jf.load(there).tokenizer.fingerprint()
    run(base, f"{kind}_tuned", **still | {"train__steps": 2}, **head)


REFUSED = [
    (["--architecture", "GPT5LMHeadModel"], "is not one of LlamaForCausalLM"),
    (["--architecture", "GPT2LMHeadModel"], "model.positions='rope' (there 'learned')"),
    (["--step", "7"], "has no checkpoint of step 7"),
]


@pytest.mark.parametrize("options, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_converted_is_refused_and_nothing_written(base, options, reason):
    here, _ = made(base, "decoder")
    assert reason in told("convert", here, base / "refused", *options, status=2)
    assert not (base / "refused").exists()


def test_a_directory_with_something_in_it_is_left_alone(base, tmp_path):
    here, there = made(base, "decoder")
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in told("convert", here, tmp_path, status=2)
    assert "is not empty" in told("convert", there, here, status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    model = jf.load(there)
    copied = shutil.copytree(here, tmp_path / "run")
    with pytest.raises(jf.ConfigError, match="of something else"):
        jf.save_pretrained(copied, model.params, model.config)
