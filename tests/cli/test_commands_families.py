"""The commands on runs of every family and head: what they print is what the functions give."""

import itertools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from family_runs import LABELS, PAIRS, RUNS, TOKENIZER, page_data, printed, write_run
from shapes import forward

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.generation.beam import beam_search
from jaxformer.runs.prompting import text_of, tokens_of
from jaxformer.runs.run_evaluation import translate
from jaxformer.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories of untrained models."""
    return {name: write_run(tmp_path_factory.mktemp("runs") / "run", name) for name in RUNS}


def shares(path: Path, row: list[int], **inputs: Any) -> np.ndarray:
    model = jf.load(path)
    return np.asarray(
        jax.nn.softmax(forward(model.params, model.config, np.array([row]), **inputs)[0], axis=-1)
    )


def special(role: str) -> int:
    token = TOKENIZER.special(role)
    assert token is not None
    return token


def leading(text: str) -> list[tuple[str, float]]:
    """The lines "  12.3%  name"."""
    return [
        (name, float(share))
        for share, name in re.findall(r"^ *([\d.]+)%  (.+)$", text, re.MULTILINE)
    ]


def test_an_encoder_decoder_reads_the_prompt_as_its_source_and_writes_its_target(runs, capsys):
    model, end, prompt = jf.load(runs["encoder_decoder"]), TOKENIZER.end_token, "a dog by the river"
    source = [[*TOKENIZER.encode(prompt), end]]
    rules = {"end_token": end, "vocab_size": TOKENIZER.vocab_size}
    wanted = jf.generate(
        model.params, model.config, [[end]], 20, source=source, temperature=0, **rules
    )
    unclosed = jf.generate(
        model.params, model.config, [[end]], 20, source=[source[0][:-1]], temperature=0, **rules
    )
    assert wanted.tolist() != unclosed.tolist()
    line = ["sample", runs["encoder_decoder"], "--prompt", prompt, "--max_new_tokens", 20]
    assert printed(capsys, *line, "--temperature", 0) == TOKENIZER.decode(wanted[0]) + "\n"
    found = beam_search(
        model.params, model.config, [[end]], 20, source=source, beams=4, length_penalty=1.0, **rules
    )
    assert (
        printed(capsys, *line, "--beams", 4, "--length_penalty", 1)
        == text_of(TOKENIZER, found.tokens[0, 0].tolist()) + "\n"
    )


def test_a_decoder_continues_a_prompt_by_the_best_of_its_beams(runs, capsys):
    model, prompt = jf.load(runs["decoder"]), "the cat"
    rules = {"end_token": TOKENIZER.end_token, "vocab_size": TOKENIZER.vocab_size}
    found = beam_search(
        model.params, model.config, [TOKENIZER.encode(prompt)], 12, beams=3, **rules
    )
    out = printed(
        capsys, "sample", runs["decoder"], "--prompt", prompt, "--beams", 3, "--max_new_tokens", 12
    )
    assert out == prompt + text_of(TOKENIZER, found.tokens[0, 0].tolist()) + "\n"


def test_hidden_tokens_are_told_with_their_probabilities(runs, capsys):
    out = printed(
        capsys, "predict", runs["masked"], "--prompt", "the [MASK] sees a [MASK]", "--pair", "a dog"
    )
    before, between, pair = (TOKENIZER.encode(text) for text in ("the", " sees a", "a dog"))
    cls, sep, mask = map(special, ("cls", "sep", "mask"))
    first = [cls, *before, mask, *between, mask, sep]
    row, types = [*first, *pair, sep], np.array([[0] * len(first) + [1] * (len(pair) + 1)])
    told = re.split(r"^\[MASK\] \d\n", out, flags=re.MULTILINE)[1:]
    for text, at in zip(told, np.flatnonzero(np.array(row) == mask), strict=True):
        wanted = shares(runs["masked"], row, token_types=types)[at][: TOKENIZER.vocab_size]
        best = np.argsort(-wanted)[:5]
        assert [name for name, _ in leading(text)] == [
            repr(TOKENIZER.shown(token)) for token in best.tolist()
        ]
        np.testing.assert_allclose(
            [share for _, share in leading(text)], wanted[best] * 100, atol=0.051
        )


@pytest.mark.parametrize("name", ["classes", "decoder classes"])
def test_a_text_is_told_its_classes_with_their_probabilities(runs, name, capsys):
    text = TOKENIZER.encode("a small cat")
    row = (
        [special("cls"), *text, special("sep")]
        if name == "classes"
        else [*text, TOKENIZER.end_token]
    )
    wanted = shares(runs[name], row)
    found = dict(leading(printed(capsys, "predict", runs[name], "--prompt", "a small cat")))
    np.testing.assert_allclose([found[label] for label in LABELS], wanted * 100, atol=0.051)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_each_word_is_told_its_tag(runs, capsys):
    words = ["the", "riverdog", "sees"]
    pieces = [TOKENIZER.encode(" " * (place > 0) + word) for place, word in enumerate(words)]
    assert len(pieces[1]) > 1
    first = np.cumsum([1, *map(len, pieces)])[:-1]
    tags = shares(runs["tags"], [special("cls"), *itertools.chain(*pieces), special("sep")])[
        first
    ].argmax(-1)
    out = printed(capsys, "predict", runs["tags"], "--prompt", " ".join(words))
    assert [line.split() for line in out.splitlines()] == [
        [w, LABELS[t]] for w, t in zip(words, tags, strict=True)
    ]


def test_a_word_of_which_the_tokenizer_makes_nothing_has_no_tag(tmp_path, capsys):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pattern = tokenizers.Regex("\\s*\u200b")
    backend.normalizer = tokenizers.normalizers.Replace(pattern, "")
    made = write_run(tmp_path / "run", "tags", Tokenizer(backend))
    out = printed(capsys, "predict", made, "--prompt", "the \u200b river")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["the", "\\u200b", "river"]
    assert lines[1].endswith("(the tokenizer makes no token of it)")
    assert all(line.split()[1] in LABELS for line in (lines[0], lines[2]))


def test_names_of_special_tokens_in_a_prompt_stand_for_them():
    sentinel = TOKENIZER.sentinels()
    ids = tokens_of(TOKENIZER, "the <extra_id_0> dog <extra_id_1>")
    assert ids == [*TOKENIZER.encode("the"), sentinel[0], *TOKENIZER.encode(" dog"), sentinel[1]]
    assert (
        text_of(
            TOKENIZER, [sentinel[0], *TOKENIZER.encode(" cat"), sentinel[1], TOKENIZER.end_token]
        )
        == "<extra_id_0> cat<extra_id_1>"
    )
    assert tokens_of(TOKENIZER, "<extra_id_7>") == TOKENIZER.encode("<extra_id_7>")


def test_evaluating_pairs_with_beams_gives_the_bleu_of_the_translations(runs, tmp_path, capsys):
    sacrebleu = pytest.importorskip("sacrebleu")
    written = tmp_path / "out.txt"
    out = printed(capsys, "evaluate", runs["encoder_decoder"], "--beams", 2, "--output", written)
    model = jf.load(runs["encoder_decoder"])
    sources, references = zip(*PAIRS, strict=True)
    outputs = translate(model.params, model.config, TOKENIZER, sources, beams=2)
    assert written.read_text().splitlines() == [" ".join(text.split()) for text in outputs]
    score = sacrebleu.corpus_bleu(outputs, [list(references)]).score
    assert (
        f"BLEU {score:.2f} of {len(PAIRS)} texts" in out
        and "nrefs:1|case:mixed" in out
        and "nats per target" in out
    )
    line = ("--beams", 3, "--output", written, "--length_penalty", 3)
    printed(capsys, "evaluate", runs["encoder_decoder"], *line)
    others = translate(model.params, model.config, TOKENIZER, sources, beams=3, length_penalty=3)
    assert others != outputs
    assert written.read_text().splitlines() == [" ".join(text.split()) for text in others]


def test_the_page_of_an_encoder_decoder_holds_its_maps_and_what_it_expected(runs, tmp_path, capsys):
    page = tmp_path / "page.html"
    run = runs["encoder_decoder"]
    line = ["attention", run, "--prompt", "the cat", "--output", page]
    printed(capsys, *line, "--target", "a dog")
    model, end = jf.load(run), TOKENIZER.end_token
    source, tokens = [*TOKENIZER.encode("the cat"), end], [end, *TOKENIZER.encode("a dog")]
    maps = jf.attention_maps(
        model.params, model.config, np.array([tokens]), source=np.array([source])
    )
    data = page_data(page)
    assert set(data["maps"]) == {"encoder", "decoder", "cross"}
    for kind, entry in data["maps"].items():
        np.testing.assert_allclose(entry["weights"], getattr(maps, kind)[:, 0], atol=1e-4)
    assert data["tokens"]["target"] == [
        "<|endoftext|>",
        *(t.replace(" ", "·") for t in map(TOKENIZER.shown, tokens[1:])),
    ]
    wanted = np.asarray(jax.nn.softmax(maps.logits[0], axis=-1))
    for step, row in zip(data["candidates"], wanted, strict=True):
        np.testing.assert_allclose([share for _, share in step], np.sort(row)[:-6:-1], atol=1e-5)


def test_without_a_target_the_page_shows_what_the_model_writes(runs, tmp_path, capsys):
    """By beams, that is a test of tests/tools/test_walkthrough.py."""
    page, run, end = tmp_path / "page.html", runs["encoder_decoder"], TOKENIZER.end_token
    printed(capsys, "attention", run, "--prompt", "a dog", "--output", page)
    model = jf.load(run)
    rules = {"end_token": end, "vocab_size": TOKENIZER.vocab_size, "temperature": 0}
    source = [[*TOKENIZER.encode("a dog"), end]]
    made = jf.generate(model.params, model.config, [[end]], 63, source=source, **rules)[0].tolist()
    wanted = [end, *(made[: made.index(end)] if end in made else made)]
    assert len(page_data(page)["tokens"]["target"]) == len(wanted)


@pytest.mark.parametrize(
    ("name", "kind", "axis"),
    [
        ("decoder", "decoder", "target"),
        ("masked", "encoder", "source"),
        ("classes", "encoder", "source"),
        ("tags", "encoder", "source"),
    ],
)
def test_the_page_of_one_stack_holds_its_maps(runs, tmp_path, name, kind, axis, capsys):
    page, prompt = tmp_path / "page.html", "the [MASK] sees" if name == "masked" else "the cat sees"
    printed(capsys, "attention", runs[name], "--prompt", prompt, "--output", page, "--layers", 0)
    data = page_data(page)
    assert set(data["maps"]) == {kind} and set(data["tokens"]) == {axis}
    count = len(data["tokens"][axis])
    assert data["maps"][kind]["weights"].shape == (1, 2, count, count)
    np.testing.assert_allclose(data["maps"][kind]["weights"].sum(-1), 1, atol=1e-3)
    assert len(data["candidates"]) == (0 if name == "classes" else count)
    assert ("[MASK]" in data["tokens"][axis]) == (name == "masked")


REFUSED: dict[str, tuple[str, list[str], list[str]]] = {
    "nothing to read": ("sample", ["encoder_decoder"], ["--prompt"]),
    "a source that is too long": (
        "sample",
        ["encoder_decoder", "--prompt", "zq" * 40],
        ["81 tokens", "64", "shorten"],
    ),
    "nothing hidden": ("predict", ["masked", "--prompt", "the cat"], ["[MASK]"]),
    "an encoder that should write": (
        "sample",
        ["masked", "--prompt", "a", "--beams", "3"],
        ["'masked'", "jaxformer predict"],
    ),
    "a decoder that should predict": (
        "predict",
        ["decoder", "--prompt", "a"],
        ["'language'", "jaxformer sample"],
    ),
    "a second text for a decoder": (
        "predict",
        ["decoder classes", "--prompt", "a", "--pair", "b"],
        ["--pair", "'decoder'"],
    ),
    "an empty text to classify": ("predict", ["classes", "--prompt", ""], ["empty"]),
    "a text to classify that is too long": (
        "predict",
        ["classes", "--prompt", "zq" * 40],
        ["82 tokens", "32"],
    ),
    "no words to tag": ("predict", ["tags", "--prompt", " "], ["empty"]),
    "beams below none": ("sample", ["decoder", "--prompt", "a", "--beams", "-1"], ["beams=-1"]),
    "a file for no translations": ("evaluate", ["encoder_decoder", "--output", "x"], ["--beams"]),
    "a translation by what is no translator": (
        "evaluate",
        ["masked", "--beams", "2"],
        ["data.objective=mlm", "seq2seq"],
    ),
    "a page that is too long": (
        "attention",
        ["decoder", "--prompt", "zq" * 200],
        ["400 tokens", "64"],
    ),
    "a target for a decoder": (
        "attention",
        ["decoder", "--prompt", "a", "--target", "b"],
        ["--target", "'decoder'"],
    ),
    "a layer that is not there": (
        "attention",
        ["decoder", "--prompt", "a", "--layers", "7"],
        ["layers=[7]", "0 .. 1"],
    ),
    "a page in no directory": (
        "attention",
        ["decoder", "--prompt", "a", "--output", "no/x.html"],
        ["no/x.html", "directory"],
    ),
    "a page of nothing": ("attention", ["decoder", "--prompt", ""], ["empty"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_said_in_words(runs, case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, (name, *more), parts = REFUSED[case]
    assert main([command, str(runs[name]), *more]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert not [part for part in parts if part not in error], error
    assert not list(tmp_path.iterdir())


def test_a_token_alone_is_shown_by_its_text_its_name_or_its_bytes():
    shown = [TOKENIZER.shown(token) for token in TOKENIZER.encode("the é")]
    assert shown[0] == "the" and shown[-2:] == ["\\xc3", "\\xa9"]
    assert (
        TOKENIZER.shown(TOKENIZER.end_token) == "<|endoftext|>"
        and TOKENIZER.shown(9999) == "<9999>"
    )
    assert isinstance(TOKENIZER, Tokenizer)
