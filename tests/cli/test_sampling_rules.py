"""Which rules a text of `jaxformer sample` has: those of the command, before those of the model's
generation_config.json, before the defaults; and that one line says whose they are."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers as tf
from tiny_run import copy, reference

import jaxformer as jf
from jaxformer.cli import main, sample
from jaxformer.runs import closing
from jaxformer.tokenizer.metadata import DRAWING

Capture = pytest.CaptureFixture[str]
FILE = "generation_config.json"
TEMPLATE = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
DRAWN = {"temperature": 0.6, "top_p": 0.9}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = copy(reference(tmp_path_factory)[0], tmp_path_factory.mktemp("rules") / "run")
    (run / "chat_template.jinja").write_text(TEMPLATE)
    return run


def rules_of(
    run_dir: Path, stated: dict[str, Any], command: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The rules with which a command writes, where the file states these."""
    (run_dir / FILE).write_text(json.dumps(stated))
    given: dict[str, Any] = {}

    def writes(*_: Any, **keywords: Any) -> list[np.ndarray]:
        given.update(keywords)
        return [np.array([[5]])]

    monkeypatch.setattr(sample, "stream_tokens", writes)
    monkeypatch.setattr(sample, "refill", lambda *_, **keywords: given.update(keywords) or {})
    assert main(["sample", str(run_dir), "--prompt", "the", *command.split()]) == 0
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: given[name] for name in names if name in given}


# What the file states, the command, the rules, and the line about them.
CASES: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    ({}, "", {"temperature": 0.7, "min_p": 0.05}, "temperature 0.7, min_p 0.05: default"),
    ({}, "--chat", GREEDY, "greedy: default"),
    (
        {},
        "--chat --top_p 0.9",
        {"temperature": 0.7, "top_p": 0.9},
        "temperature 0.7: default; top_p 0.9: command line",
    ),
    (
        {},
        "--chat --temperature 1",
        {"temperature": 1.0, "min_p": 0.05},
        "temperature 1.0: command line; min_p 0.05: default",
    ),
    (
        {},
        "--temperature 0.8 --top_p 0.9 --top_k 0",
        {"temperature": 0.8, "top_p": 0.9, "top_k": 0},
        "temperature 0.8, top_k 0, top_p 0.9: command line",
    ),
    ({}, "--temperature 0 --top_k 5", GREEDY, "greedy: command line"),
    (DRAWN | {"do_sample": True}, "", DRAWN, f"temperature 0.6, top_p 0.9: {FILE}"),
    (DRAWN, "--chat", DRAWN, f"temperature 0.6, top_p 0.9: {FILE}"),
    (
        DRAWN,
        "--min_p 0.05",
        DRAWN | {"min_p": 0.05},
        f"temperature 0.6, top_p 0.9: {FILE}; min_p 0.05: command line",
    ),
    (
        DRAWN | {"do_sample": True, "top_k": 20},
        "--top_k 3 --temperature 0.5",
        {"temperature": 0.5, "top_p": 0.9, "top_k": 3},
        f"temperature 0.5, top_k 3: command line; top_p 0.9: {FILE}",
    ),
    (DRAWN | {"do_sample": False}, "", GREEDY, f"greedy: {FILE}"),
    ({"temperature": 0.0}, "", GREEDY, f"greedy: {FILE}"),
    (
        {"do_sample": False},
        "--temperature 0.8",
        {"temperature": 0.8, "min_p": 0.05},
        "temperature 0.8: command line; min_p 0.05: default",
    ),
    (
        {"do_sample": False},
        "--top_k 4",
        {"temperature": 0.7, "top_k": 4},
        "temperature 0.7: default; top_k 4: command line",
    ),
    # As Gemma 3 states it.
    (
        {"do_sample": True, "top_k": 64, "top_p": 0.95},
        "--chat",
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        f"temperature 1.0, top_k 64, top_p 0.95: {FILE}",
    ),
    (
        {"repetition_penalty": 1.1},
        "--chat",
        GREEDY | {"repetition_penalty": 1.1},
        f"greedy: default; repetition_penalty 1.1: {FILE}",
    ),
    # What the command states is not read from the file.
    ({"top_p": 3, "do_sample": 1}, "--top_p 1 --temperature 0", GREEDY, "greedy: command line"),
]


@pytest.mark.parametrize("stated, command, expected, line", CASES)
def test_the_rules_are_those_of_the_command_then_of_the_file_and_one_line_says_so(
    stated: dict[str, Any],
    command: str,
    expected: dict[str, Any],
    line: str,
    run_dir: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rules_of(run_dir, stated, command, monkeypatch) == expected
    lines = capsys.readouterr().err.splitlines()
    assert set(line.split("; ")) == set(lines[0].split("; "))
    assert not [other for other in lines[1:] if not other.startswith("note: ")]


def test_prompts_of_a_file_have_the_same_rules(
    run_dir: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("the\na")
    command = f"--prompts {tmp_path / 'prompts.txt'}"
    assert rules_of(run_dir, DRAWN, command, monkeypatch) == DRAWN
    assert f"temperature 0.6, top_p 0.9: {FILE}\n" in capsys.readouterr().err


def test_the_sample_at_the_end_of_a_run_has_the_same_rules(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def writes(params: Any, config: Any, prompt: Any, count: int, **rules: Any) -> np.ndarray:
        given.update(rules, prompt=prompt)
        return np.array([[5]])

    monkeypatch.setattr(closing, "generate", writes)
    for stated, field in ((DRAWN, ""), ({}, "messages")):
        (run_dir / FILE).write_text(json.dumps(stated))
        model = jf.load(run_dir)
        changes = ["run.sample_prompt=the", f"data.messages_field={field}"]
        setup: Any = SimpleNamespace(
            run=jf.load_config(run_dir / "config.json", changes),
            model=model.config,
            corpus=SimpleNamespace(tokenizer=model.tokenizer),
        )
        written = closing._sample(setup, model.params)
        assert model.tokenizer is not None
        if field:
            assert given["prompt"] == [model.tokenizer.encode("the<|endoftext|>", True)]
            assert given["temperature"] == 0 and written.startswith("the => ")
        else:
            assert given["prompt"] == [model.tokenizer.as_prompt(model.tokenizer.encode("the"))]
            assert {name: given[name] for name in DRAWN} == DRAWN and "min_p" not in given
            assert written.startswith("the") and "=>" not in written


def test_tools_of_a_file_are_in_the_prompt(
    run_dir: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(run_dir, tmp_path / "run")
    beside = "{% for t in (tools or []) + (documents or []) %}{{ t.name }}{% endfor %}"
    (run / "chat_template.jinja").write_text(beside + TEMPLATE)
    starts: list[list[int]] = []

    def writes(params: Any, config: Any, prompt: Any, *_: Any, **rules: Any) -> list[np.ndarray]:
        starts.append(prompt[0])
        return [np.array([[5]])]

    monkeypatch.setattr(sample, "stream_tokens", writes)
    tokenizer = jf.load(run).tokenizer
    assert tokenizer is not None
    file = tmp_path / "tools.json"
    command = ["sample", str(run), "--prompt", "the", "--tools", str(file)]
    for content, before in (
        ('[{"name": "a"}]', "a"),
        ('{"documents": [{"name": "cat"}], "tools": [{"name": "a "}]}', "a cat"),
    ):
        file.write_text(content)
        assert main([*command, "--chat", "--system", "a"]) == 0
        assert starts.pop() == tokenizer.encode(f"{before}a<|endoftext|>the<|endoftext|>", True)
    for content, more, message in (
        ("[{}]", "", "--tools are for the chat template: add --chat."),
        ("[", "--chat", f"--tools {file} is not JSON"),
        ('{"tool": []}', "--chat", f"--tools {file} has the keys tool: give a list of functions"),
        ('["a"]', "--chat", "tools beside messages are a list of objects"),
    ):
        file.write_text(content)
        capsys.readouterr()
        assert main([*command, *more.split()]) == 2
        assert message in capsys.readouterr().err


# What the file states or the command says, and words of the message.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "", "temperature is hot, and must be at least 0, and finite"),
    ({"temperature": -1}, "", "temperature is -1, and must be at least 0"),
    ({"temperature": float("nan")}, "", "temperature is nan"),
    ({"temperature": True}, "", "temperature is True"),
    ({"top_k": 1.5}, "", "top_k is 1.5, and must be a whole number, at least 0: correct it"),
    ({"top_p": 0}, "", "top_p is 0, and must be above 0 and at most 1"),
    ({"min_p": [0.1]}, "", "min_p is [0.1], and must be from 0 to 1"),
    ({"do_sample": "yes"}, "", "do_sample is yes, and must be true or false"),
    ({}, "--beams 2 --top_p 0.9", "--beams and --top_p do not go together"),
    ({}, "--beams 2 --temperature 0.5", "--beams and --temperature do not go together"),
    ({}, "--min_p 2", "min_p=2.0 must be from 0 to 1"),
]


def test_a_rule_that_cannot_be_is_refused_by_name(run_dir: Path, capsys: Capture) -> None:
    for stated, command, message in REFUSED:
        (run_dir / FILE).write_text(json.dumps(stated))
        assert main(["sample", str(run_dir), "--prompt", "the", *command.split()]) == 2
        error = " ".join(capsys.readouterr().err.split())
        assert message in error, error
        assert not stated or FILE in error


def test_a_beam_search_has_only_the_penalties_of_the_file(run_dir: Path, capsys: Capture) -> None:
    (run_dir / FILE).write_text(json.dumps(DRAWN | {"repetition_penalty": 1.1}))
    line = ["--prompt", "the", "--beams", "2", "--max_new_tokens", "2", "--temperature", "0"]
    assert main(["sample", str(run_dir), *line]) == 0
    told = capsys.readouterr().err
    assert "beams 2" in told and f"repetition_penalty 1.1: {FILE}" in told and "top_p" not in told


def test_a_converted_model_keeps_the_rules_there_and_back(run_dir: Path, tmp_path: Path) -> None:
    """And `jf.writing_rules` has none of them, so that they are no keyword twice."""
    stated = {"do_sample": False, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.1}
    assert {*stated} == {*DRAWING}
    (run_dir / FILE).write_text(json.dumps(stated))
    places = [run_dir, tmp_path / "hf", tmp_path / "run"]
    for source, target in itertools.pairwise(places):
        assert main(["convert", str(source), str(target)]) == 0
        content = json.loads((target / FILE).read_text())
        assert {key: content.get(key) for key in stated} == stated
        tokenizer = jf.load(target).tokenizer
        assert tokenizer is not None
        assert jf.writing_rules(tokenizer).keys() == {"end_token", "vocab_size"}
    assert tf.GenerationConfig.from_pretrained(places[1]).top_p == 0.9
