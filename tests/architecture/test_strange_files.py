"""Files of strangers that hold other types, giant numbers or deep nesting: one message, whatever
command reads them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from products import fewest

from jaxformer.cli import main
from jaxformer.config.run import RunConfig, to_json
from jaxformer.data import store as store_files
from jaxformer.data.source import find_source, scan
from jaxformer.data.store import TokenStore
from jaxformer.files import ConfigError
from jaxformer.report import MetricsLog, read_metrics
from jaxformer.report.plot import plot_losses
from jaxformer.runs.directory import RunDirectory
from jaxformer.runs.states import read_rollbacks
from jaxformer.runs.train_run import logged_before
from jaxformer.tokenizer import byte_tokenizer
from jaxformer.tokenizer.chat import ChatTemplate

Capture = pytest.CaptureFixture[str]

DIGITS = "9" * 5000
NESTED = "[" * 900 + "]" * 900
TEMPLATES = {
    "digits": "{{ " + DIGITS + " }}",
    "binary digits": "{{ 0b" + "1" * 50_000 + " }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "conditions": "{% if 1 %}" * 2000 + "{% endif %}" * 2000,
    "attributes": "{{ a" + ".b" * 5000 + " }}",
    "sums": "{{ 1" + "+1" * 5000 + " }}",
    "arguments": "{{ f(a=1, a=2) }}",
    "break": "{% break %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_cannot_be_compiled_is_one_message(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ChatTemplate(TEMPLATES[name], byte_tokenizer(), "the template")
    said = str(raised.value)
    assert said.startswith(("the template is no template of Jinja (", "the template is nested too"))
    assert len(said) < 400
    assert said.endswith("set tokenizer.chat_template to another one.")


def a_run(folder: Path, name: str = "loss", text: str = "2.5", step: int = 3) -> Path:
    """A run directory with six lines of metrics, in one of which a name has the JSON `text`."""
    run_dir = folder / "run"
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.json").write_text(to_json(RunConfig()))
    (run_dir / "data.json").write_text(json.dumps({"run_id": "a"}))
    lines = []
    for number in range(1, 7):
        line: dict[str, Any] = {"step": number, "loss": 3 - number / 10, "tokens": number * 100}
        line |= {"seconds": number * 1.0, "val_loss": 3.0, "learning_rate": 1e-3}
        line |= {name: "HERE"} if number == step else {}
        lines.append(json.dumps(line).replace('"HERE"', text) + "\n")
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return run_dir


NO_NUMBERS = ['"text"', "[1]", "true", "null", "{}", "1e999", "NaN", "-Infinity", DIGITS, NESTED]
NUMBERS = ("loss", "val_loss", "tokens", "seconds")
WRONG = [
    *fewest(itertools.product(NUMBERS, NO_NUMBERS), 1),
    *(("step", text) for text in ["null", "-1", "1.5", "1" + "0" * 300]),
    *(("non_finite", text) for text in ["3", '["loss"]', '{"loss": "x"}', '{"loss": [1]}']),
]


@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize(("name", "text"), WRONG)
def test_a_line_of_metrics_of_other_types_is_refused_by_its_number(
    name: str, text: str, step: int, tmp_path: Path
) -> None:
    run_dir = a_run(tmp_path, name, text, step)
    if step == 6 and text == DIGITS:
        assert len(read_metrics(run_dir)) == 5  # as a last line that is being written
        return
    for reads in (
        lambda: read_metrics(run_dir),
        lambda: logged_before(RunDirectory(run_dir), 5),
        lambda: MetricsLog(run_dir, 5),
        lambda: RunDirectory(run_dir).require_checkpoints(),
    ):
        with pytest.raises(ConfigError, match=rf"metrics\.jsonl, line {step}, is not a JSON obj"):
            reads()
    with pytest.raises(ConfigError) as raised:
        read_metrics(run_dir)
    said = str(raised.value)
    assert said.endswith("Correct or delete that line.") and len(said) < len(str(run_dir)) + 300


@pytest.mark.parametrize(("name", "text"), [("loss", '"text"'), ("non_finite", '{"loss": "x"}')])
def test_commands_name_the_line_of_metrics_that_they_cannot_read(
    name: str, text: str, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = a_run(tmp_path, name, text)
    assert main(["compare", str(run_dir)]) == 2
    printed = capsys.readouterr()
    told = " ".join((printed.out + printed.err).split())
    assert "There is no run with a logged loss" in told
    assert told.count("metrics.jsonl, line 3, is not") == 1, told
    assert "fault of jaxformer" not in told


@pytest.mark.parametrize(
    ("name", "step", "text"),
    [
        ("loss", 6, "-1e308"),
        ("val_loss", 6, "1" + "0" * 300),
        ("tokens", 1, "-5"),
        ("learning_rate", 1, "1e-320"),
    ],
)
def test_the_largest_and_smallest_numbers_are_drawn(
    name: str, step: int, text: str, tmp_path: Path
) -> None:
    assert plot_losses(a_run(tmp_path, name, text, step)).is_file()


def test_the_reading_of_one_long_document_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "SECONDS_BETWEEN_NOTES", 0)
    file, said = tmp_path / "long.txt", list[str]()
    with open(file, "wb") as written:
        written.write(b"A beginning.\n" * 2**17)
        written.truncate(2**24)  # a sparse file
    source = find_source(str(file), "data.train")
    scan(source, tmp_path / "cache", said.append)
    notes = [line for line in said if " of 0.02 GB, " in line]
    assert len(notes) > 5 and all(": read 0.0" in line for line in notes), said


KEYS = ("labels", "learned", "base", "base_path")
OTHERS = ("5", "[1]", "true", "null", "{}", "1e999", DIGITS, NESTED)


@pytest.mark.parametrize(("key", "text"), fewest(itertools.product(KEYS, OTHERS), 1))
def test_a_data_json_of_other_types_is_refused(key: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(f'{{"run_id": "a", "{key}": {text}}}')
    said = "is not JSON" if text == DIGITS else f"data.json: {key}="
    with pytest.raises(ConfigError, match=said):
        RunDirectory(tmp_path).record()


@pytest.mark.parametrize(
    ("key", "text"), fewest(itertools.product(("at", "skip"), [*NO_NUMBERS, "-1", "1.5"]), 1)
)
def test_rollbacks_of_other_types_are_refused(key: str, text: str, tmp_path: Path) -> None:
    entry = {"at": 1, "skip": 1, key: "HERE"}
    written = json.dumps({"rollbacks": [entry]}).replace('"HERE"', text)
    (tmp_path / "rollbacks.json").write_text(written)
    with pytest.raises(ConfigError, match=r"rollbacks\.json (holds no list|is not JSON)"):
        read_rollbacks(RunDirectory(tmp_path))


RECORD = ("content", "documents", "bytes", "skipped")
SHARD = ("tokens", "documents", "bytes", "files", "name")


def test_a_data_json_that_lost_its_entries_is_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other text \(train changed\)"):
        RunDirectory(tmp_path).check_data({"train": "a"}, (), {})


@pytest.mark.parametrize(("key", "text"), fewest(itertools.product(RECORD, NO_NUMBERS), 1))
def test_a_scan_of_other_types_is_made_again(key: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    source = find_source(str(tmp_path / "text.txt"), "data.train")
    made = scan(source, tmp_path / "scans")
    (path,) = (tmp_path / "scans").iterdir()
    record = {"content": "other", "documents": 3, "bytes": 4, "skipped": {}}
    path.write_text(json.dumps(record))
    assert scan(source, tmp_path / "scans").content == "other"
    path.write_text(json.dumps(record | {key: "HERE"}).replace('"HERE"', text))
    if (key, text) in {("content", '"text"'), ("skipped", "{}")}:
        return  # which are of the type
    assert scan(source, tmp_path / "scans") == made


@pytest.mark.parametrize(("key", "text"), fewest(itertools.product(SHARD, NO_NUMBERS), 1))
def test_a_store_whose_manifest_has_other_types_is_not_read(
    key: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "00000.tokens").write_bytes(bytes(2))
    files = {"tokens": {"size": 2, "digest": "0"}}
    shard = {"name": "00000", "tokens": 1, "documents": 1, "bytes": 1, "files": files}
    path = tmp_path / "manifest.json"
    made_by = {"dtype": "uint16"}
    path.write_text(json.dumps(made_by | {"shards": [shard]}))
    assert TokenStore.open(tmp_path) is not None
    written = json.dumps(made_by | {"shards": [shard | {key: "HERE"}]})
    path.write_text(written.replace('"HERE"', text))
    if (key, text) in {("files", "{}"), ("name", '"text"')}:
        return  # which are of the type
    assert TokenStore.open(tmp_path) is None
