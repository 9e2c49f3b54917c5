"""Conversations as training data: every format gives the same, only the assistant's turns are
learned, and a model that has learned them answers in `sample --chat`."""

import dataclasses
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_templates import (
    CHATML,
    CONVERSATIONS,
    DOCUMENTS,
    FUNCTIONS,
    SMOLLM3,
    WITH_CALLS,
    write_lines,
)
from corpora import prepare
from tiny_run import contents, line, logged, train_here

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.cluster.bounded import BoundedProcess
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Corpus
from jaxformer.data.documents import Record
from jaxformer.data.records import Fields, RecordField
from jaxformer.data.source import find_source
from jaxformer.files import ConfigError
from jaxformer.runs.objectives import with_chats
from jaxformer.tokenizer import ChatTemplate, Tokenizer, train_bpe_tokenizer
from jaxformer.tokenizer.chat import template_fingerprint, with_beside

FIELDS: Fields = (RecordField("data.messages_field", "messages", "messages"),)
RECORDS = [{"id": name, "messages": messages} for name, messages in CONVERSATIONS.items()]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The folder of a tokenizer with the special tokens of ChatML, and its template."""
    texts = ["the cat sat on the mat, hello there, one two"] * 4
    made = train_bpe_tokenizer(texts, 300, ("<|im_start|>", "<|im_end|>"))
    folder = tmp_path / "tokenizer"
    made.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def run_of(folder: Path, path: Path, template: Path | str = "", **data: Any) -> RunConfig:
    given = {
        "train": str(path),
        "validation_fraction": 0.0,
        "cache_dir": str(folder / "cache"),
        "objective": "sft",
        "messages_field": "messages",
        "sequence_length": 64,
    }
    return RunConfig(
        model=ModelConfig(),
        data=DataConfig(**(given | data)),
        tokenizer=TokenizerConfig(path=str(folder / "tokenizer"), chat_template=str(template)),
    )


def read(spec: object) -> list[Record]:
    return [piece.record for piece in find_source(str(spec), "data.train", FIELDS).pieces()]


def test_every_format_gives_the_same_conversations(tmp_path: Path) -> None:
    """In Parquet and Arrow each message has the keys of all, which are null where it has none."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    call = {"role": "assistant", "tool_calls": [{"name": "look"}]}
    asked = [{"role": "user", "content": "?"}, call]
    tools = [{"name": "look"}, {"name": "hear", "parameters": {"a": 1}}]
    # pyarrow takes the columns from the first record.
    records = [record | {"tools": None} for record in RECORDS]
    records += [{"id": "tools", "messages": asked, "tools": tools}]
    write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=2)
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "set"))
    found = read(tmp_path / "a.jsonl")
    conversations = [[json.loads(message) for message in record[0]] for record in found]
    assert conversations[:-1] == [*CONVERSATIONS.values()] and conversations[-1][1] == call
    assert tools in conversations[-1][0].values()
    for spec in (tmp_path / "a.jsonl.gz", tmp_path / "a.parquet", f"datasets:{tmp_path / 'set'}"):
        assert read(spec) == found, spec
    pieces = [*find_source(str(tmp_path / "a.jsonl"), "data.train", FIELDS).pieces()]
    assert pieces[0].text == "the cat sat\non the mat" and pieces[0].location.endswith("line 1")
    assert pieces[-1].text == "?\n"


def segments(corpus: Corpus) -> list[tuple[list[int], list[int], list[float]]]:
    """Tokens, targets and weights of each packed conversation, sorted."""
    found = []
    for row in (corpus.train[index] for index in range(len(corpus.train))):
        for number in range(1, row["segment_ids"].max() + 1):
            at = row["segment_ids"] == number
            found.append(tuple(row[name][at].tolist() for name in ("tokens", "targets", "weights")))
        assert not row["weights"][row["segment_ids"] == 0].any()
    return sorted(found)


def test_rows_hold_what_the_template_gives_and_learn_the_assistants_turns(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    template = ChatTemplate.of(Tokenizer.load(tokenizer))
    expected = []
    for messages in CONVERSATIONS.values():
        ids, learned = template.encode(messages)
        expected.append((ids[:-1], ids[1:], [float(value) for value in learned[1:]]))
    corpora = [
        prepare(run_of(tmp_path, path, packing=packing, sequence_length=256))
        for packing in ("stream", "documents", "best_fit")
    ]
    assert all(segments(corpus) == sorted(expected) for corpus in corpora)
    row = corpora[0].train[0]
    assert len(corpora[0].train) == 1 and row["segment_ids"].max() == 3  # packed together
    text = template.tokenizer.decode(row["targets"][row["weights"] > 0])
    assert "on the mat" in text and "Grüße 🙂" in text and "cat" not in text and "user" not in text


GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HEADED = "{% for m in messages %}<|im_start|>{{ m.role }}\nTURN{% endfor %}"
BLOCK = "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"
ENDS = {
    "chatml": (CHATML, True),
    "the next role": (GLM, False),
    "its end outside of the block": (HEADED.replace("TURN", BLOCK), False),
    "its end in the block": (
        HEADED.replace("TURN", "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"),
        True,
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_turn_whose_end_is_not_learned_is_said_before_training(
    case: str, tokenizer: Path, tmp_path: Path
) -> None:
    text, learned = ENDS[case]
    (tokenizer / "chat_template.jinja").write_text(text)
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    said: list[str] = []
    prepare(run_of(tmp_path, path), said.append)
    warned = [line for line in said if line.startswith("warning: ")]
    assert len(warned) == (not learned)
    if not learned:
        assert "chat_template.jinja writes no special token" in warned[0]
        assert "tokenizer.chat_template" in warned[0]
        packed = next(place for place, line in enumerate(said) if "packed in" in line)
        assert said.index(warned[0]) < packed


USER, SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
FAULTS: dict[str, tuple[Any, str]] = {
    "no turn": (
        {"messages": [USER]},
        r"a\.jsonl, line 2: messages .*: no message has the role 'assistant' .* Or skip",
    ),
    "no list": (
        {"messages": "hello"},
        r"line 2: messages .*: str \('hello'\) is no conversation: give a list",
    ),
    "no role": (
        {"messages": [{"speaker": "human", "value": "a"}]},
        r"line 2: .*: message 1 has no .role",
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]},
        r"line 2: .*: message 1 has the content list .*only text is read",
    ),
    "no field": (
        {"conversations": [USER, SAID]},
        r"line 2: no field 'messages': .*'conversations'; set data\.messages_field",
    ),
    "half a character": ({"messages": [USER, SAID | {"content": "\ud800"}]}, r"half a surrogate"),
}


def test_a_prompt_beside_an_answer_of_another_kind_is_refused(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": [USER], "completion": "b"}])
    with pytest.raises(ConfigError, match=r"line 1: prompt\+completion of several kinds: give"):
        prepare(run_of(tmp_path, path, messages_field="prompt+completion"))


@pytest.mark.parametrize("case", FAULTS)
def test_a_bad_record_is_one_message_with_its_line(
    case: str, tokenizer: Path, tmp_path: Path
) -> None:
    record, message = FAULTS[case]
    path = write_lines(tmp_path / "a.jsonl", [RECORDS[0], record])
    with pytest.raises(ConfigError, match=message):
        prepare(run_of(tmp_path, path))
    assert len(segments(prepare(run_of(tmp_path, path, malformed="skip")))) == 1


def test_a_template_without_end_stops_the_run_and_skips_no_record(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = BoundedProcess("jaxformer.tokenizer.chat_environment", "answer", seconds=0.5)
    monkeypatch.setattr("jaxformer.tokenizer.chat.RENDERER", renderer)
    endless = tmp_path / "endless.jinja"
    endless.write_text(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + CHATML
    )
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    said = r"chat_template=.*endless\.jinja takes more than 0\.5 s.*, where \d+ messages"
    with pytest.raises(ConfigError, match=said):
        prepare(run_of(tmp_path, path, endless, malformed="skip"))
    renderer.close()


def test_what_the_template_refuses_is_named_with_its_line(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [RECORDS[0], {"messages": [USER, USER, SAID]}])
    path.write_text("\n" + path.read_text())
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text(
        "{% if messages | length == 3 %}{{ raise_exception('roles must alternate.') }}{% endif %}"
        + CHATML
    )
    told = r"a\.jsonl, line 3: conversations .*refuses the messages: roles must alternate\."
    with pytest.raises(ConfigError, match=told):
        prepare(run_of(tmp_path, path, refusing))
    refusing.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match=r"refusing\.jinja is no template of Jinja \(line 1: "):
        prepare(run_of(tmp_path, path, refusing))
    (tokenizer / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"has no chat template, .* tokenizer\.chat_template set"):
        prepare(run_of(tmp_path, path))


def test_settings_that_do_not_fit_conversations_are_refused(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(ConfigError, match=r"data\.objective=causal does not read: .*objective=sft"):
        prepare(run_of(tmp_path, path, objective="causal"))
    with pytest.raises(ConfigError, match=r"line 1: no field .*data\.messages_field"):
        prepare(run_of(tmp_path, path, objective="sft", messages_field=""))


def turns(*texts: str, system: str = "") -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"messages": [{"role": "system", "content": system}] * bool(system) + said}


def share(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[each["role"]], "value": each["content"]} for each in messages]


def renamed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {"system": "developer", "user": "user", "assistant": "model"}
    return [each | {"role": names[each["role"]]} for each in messages]


TOLD = turns("cat\n\non a mat", "sat")["messages"]
IN_TEXT = {"source_field": "prompt", "target_field": "completion"}
FORMS: dict[str, tuple[Any, dict[str, str]]] = {
    "messages": (lambda chat: {"messages": chat}, {"messages_field": "messages"}),
    "other roles": (lambda chat: {"messages": renamed(chat)}, {"messages_field": "messages"}),
    "ShareGPT": (
        lambda chat: {"conversations": share(chat), "system": ""},
        {"messages_field": "conversations"},
    ),
    "TRL": (
        lambda chat: {"prompt": chat[:-1], "completion": chat[-1:]},
        {"messages_field": "prompt+completion"},
    ),
    "Alpaca": (
        lambda chat: {"instruction": "cat", "input": "on a mat", "output": "sat"},
        {"messages_field": "instruction+input+output"},
    ),
    "TRL of texts": (lambda chat: {"prompt": "cat", "completion": " sat"}, IN_TEXT),
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_record_brings_its_tools_and_documents(
    suffix: str, tokenizer: Path, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tokenizer / "chat_template.jinja").write_text(SMOLLM3)
    beside = {"tools": FUNCTIONS, "documents": DOCUMENTS}
    record = {"messages": WITH_CALLS} | beside
    path = write_lines(tmp_path / "a.jsonl", [record])
    if suffix == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist([record]), path)
    template = ChatTemplate.of(Tokenizer.load(tokenizer))
    ids, learned = template.encode([with_beside(WITH_CALLS[0], beside), *WITH_CALLS[1:]])
    found = segments(prepare(run_of(tmp_path, path, sequence_length=2048)))
    assert found == [(ids[:-1], ids[1:], [float(value) for value in learned[1:]])]
    assert "Grüße" in template.tokenizer.decode(ids) and 0 < sum(learned) < len(ids)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_a_chat_of_any_form_is_recognized(
    form: str, suffix: str, tokenizer: Path, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write, expected = FORMS[form]
    chats = [TOLD] if form == "Alpaca" else [turns("cat", "sat", system="S")["messages"], TOLD]
    records = [write(chat) for chat in chats]
    path = write_lines(tmp_path / "a.jsonl", records)
    if suffix == "parquet":
        path = tmp_path / "a.parquet"
        pq.write_table(pa.Table.from_pylist(records), path)
    said: list[str] = []
    run = run_of(tmp_path, path, objective="auto", messages_field="", validation_fraction=0)
    run = dataclasses.replace(run, data=with_chats(run.model, run.data, log=said.append))
    assert {name: getattr(run.data, name) for name in expected} == expected
    fields = ", ".join(f"data.{name}={value}" for name, value in expected.items())
    assert said == [f"data.train={path}: records are read as data.objective=sft, {fields}"]
    found = prepare(run, said.append)
    if form != "TRL of texts":
        messages = write_lines(tmp_path / "b.jsonl", [{"messages": chat} for chat in chats])
        assert segments(found) == segments(prepare(run_of(tmp_path, messages)))
    mapped = [line.split(": ", 1)[1] for line in said if ": role " in line]
    where = f"the first in {path}, {'line' if suffix == 'jsonl' else 'row'} 1"
    names = {"ShareGPT": [("human", "user"), ("gpt", "assistant")]}
    names["other roles"] = [("developer", "system"), ("model", "assistant")]
    counts = {"developer": 1}
    assert mapped == [
        f"role {name!r}, read as {role!r}: {counts.get(name, 2)}, {where}"
        for name, role in names.get(form, [])
    ]


@pytest.mark.parametrize(
    "record",
    [
        {"text": "a text wins", "messages": TOLD},
        {"prompt": "a", "chosen": "b", "rejected": "c", "messages": TOLD},
        {"question": "a", "answer": "b"},
        [],
    ],
)
def test_other_records_are_what_they_were(record: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path, tmp_path / "a.jsonl", objective="auto", messages_field="")
    assert with_chats(run.model, run.data) == run.data  # there is no such file
    write_lines(tmp_path / "a.jsonl", [record])
    assert with_chats(run.model, run.data) == run.data
    encoder = dataclasses.replace(run.model, family="encoder")
    write_lines(tmp_path / "a.jsonl", [{"messages": TOLD}])
    assert with_chats(encoder, run.data) == run.data


LEARNED = [turns("go", "one", "go", "two"), turns("go", "loud", system="S")]


by_heart = pytest.mark.xdist_group("chat")  # one process makes the run for all of them


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that has learned a few conversations by heart, and its command."""
    folder = tmp_path_factory.mktemp("trained")
    records = [{"conversations": share(record["messages"])} for record in LEARNED * 8]
    path = write_lines(folder / "chats.jsonl", records)
    (folder / "chatml.jinja").write_text(CHATML)
    made = train_bpe_tokenizer(["one two loud go"] * 4, 262, ("<|im_start|>", "<|im_end|>"))
    made.save(folder / "made" / "tokenizer.json")
    changes = {
        "data.sequence_length": 64,
        "model.max_length": 96,
        "model.dropout": 0.0,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 0.01,
        "optimizer.decay_steps": 60,
        "tokenizer.path": folder / "made",
        "tokenizer.chat_template": folder / "chatml.jinja",
        "train.steps": 60,
        "train.checkpoint_every": 3,
        "train.keep_checkpoints": 1,
        "train.microbatches": 1,
    }
    command = line(folder / "run", path, changes)
    assert train_here([*command, "--train.steps", "3"]) == 0
    assert train_here(command) == 0  # the same run goes on
    return folder / "run", command


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["sample", *map(str, arguments), "--temperature", "0"]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@by_heart
def test_a_run_of_conversations_answers_and_ends_its_turn(
    trained: tuple[Path, list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, _ = trained
    assert [entry["step"] for entry in logged(run_dir) if "loss" in entry][-1] == 60
    assert asked(capsys, run_dir, "--chat", "--prompt", "go") == "one\n"
    assert asked(capsys, run_dir, "--chat", "--prompt", "go", "--system", "S") == "loud\n"
    assert asked(capsys, run_dir, "--chat", "--prompt", "go", "--beams", "2") == "one\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("go\n\ngo\n"))
    assert asked(capsys, run_dir, "--chat") == "one\ntwo\n"  # a conversation keeps its turns


@pytest.mark.slow
@by_heart
def test_the_run_directory_keeps_the_template_for_whatever_is_made_of_it(
    trained: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = trained
    assert (run_dir / "chat_template.jinja").read_text() == CHATML
    (run_dir.parent / "chatml.jinja").rename(run_dir.parent / "moved.jinja")
    try:
        assert main(["evaluate", str(run_dir)]) == 0  # by the run's own template
    finally:
        (run_dir.parent / "moved.jinja").rename(run_dir.parent / "chatml.jinja")
    assert main(["convert", str(run_dir), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    capsys.readouterr()
    own = template_fingerprint(jf.load(run_dir).tokenizer)
    for folder in (tmp_path / "hf", tmp_path / "back"):
        assert template_fingerprint(Tokenizer.load(folder)) == own
        assert asked(capsys, folder, "--chat", "--prompt", "go") == "one\n"


@pytest.mark.slow
@by_heart
def test_a_run_is_not_continued_with_another_template(
    trained: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, command = trained
    template = run_dir.parent / "chatml.jinja"
    before = contents(run_dir)
    template.write_text(CHATML + "{# another #}")
    try:
        assert train_here(command) == 2
        said = "was begun with other text (train, validation, chat_template changed"
        assert said in capsys.readouterr().err
        assert contents(run_dir) == before
    finally:
        template.write_text(CHATML)
