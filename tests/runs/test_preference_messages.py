"""Preferences whose prompts and completions are messages: the rows are those of the chat template,
however a record gives its prompt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, write_lines
from corpora import prepare

import jaxformer as jf
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Corpus
from jaxformer.tokenizer import ChatTemplate, Tokenizer, train_bpe_tokenizer

USER = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat?"}]
CHOSEN = [{"role": "assistant", "content": "the cat sat"}]
REJECTED = [{"role": "assistant", "content": "no"}]
HISTORY = [*USER, {"role": "assistant", "content": "which?"}, {"role": "user", "content": "this"}]
# A record with explicit messages, and the same pair as whole conversations.
EXPLICIT = {"prompt": USER, "chosen": CHOSEN, "rejected": REJECTED}
WHOLE = {"chosen": [*USER, *CHOSEN], "rejected": [*USER, *REJECTED]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer that has the special tokens of ChatML, and its template."""
    texts = ["the cat sat on the mat, hello there, one two"] * 4
    made = train_bpe_tokenizer(texts, 300, ("<|im_start|>", "<|im_end|>"))
    made.save(tmp_path / "tokenizer" / "tokenizer.json")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(CHATML)
    return tmp_path


def prepared(folder: Path, records: list[Any], **data: Any) -> Corpus:
    path = write_lines(folder / "pairs.jsonl", records)
    given = {
        "train": str(path),
        "validation_fraction": 0.0,
        "cache_dir": str(folder / "cache"),
        "objective": "dpo",
        "sequence_length": 256,
    }
    settings = DataConfig(**(given | data))
    tokenizer = TokenizerConfig(path=str(folder / "tokenizer"))
    return prepare(RunConfig(data=settings, tokenizer=tokenizer))


def texts_of(folder: Path, row: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """The text of each side of a row, and the part of it whose targets are learned, without special
    tokens."""
    tokenizer = Tokenizer.load(folder / "tokenizer")
    found = []
    for tokens, targets, weights, used in zip(*(row[name] for name in row), strict=True):
        whole = [tokens[0], *targets[used > 0]]
        found.append((tokenizer.decode(whole), tokenizer.decode(targets[weights > 0])))
    return found


def test_a_side_is_the_conversation_and_learns_the_last_answer(folder: Path) -> None:
    row = prepared(folder, [EXPLICIT | {"prompt": HISTORY}]).train[0]
    template = ChatTemplate.of(Tokenizer.load(folder / "tokenizer"))
    for side, answer in enumerate((CHOSEN, REJECTED)):
        ids, learned = template.encode([*HISTORY, *answer])
        begin = len(template.encode_prompt(HISTORY))
        last = len(learned) - learned[::-1].index(True)  # after the token that ends the turn
        assert row["tokens"][side, : last - 1].tolist() == ids[: last - 1]
        assert row["targets"][side, : last - 1].tolist() == ids[1:last]
        expected = [0.0] * (begin - 1) + [1.0] * (last - begin)
        assert row["weights"][side].tolist() == expected + [0.0] * (256 - last + 1)
    shown = texts_of(folder, row)
    assert [learned for _, learned in shown] == ["the cat sat", "no"]
    assert "which?" in shown[0][0] and shown[0][0].startswith("system\nbe kind")


@pytest.mark.parametrize(
    "record", [WHOLE, WHOLE | {"prompt": "the cat?"}], ids=["no prompt", "a prompt that is a text"]
)
def test_whole_conversations_are_the_same_pair(folder: Path, record: Any) -> None:
    made, expected = (prepared(folder, [each]).train[0] for each in (record, EXPLICIT))
    assert all(np.array_equal(made[name], expected[name]) for name in expected)


def test_a_file_may_hold_strings_and_messages(folder: Path) -> None:
    strings = {"prompt": "the cat", "chosen": " sat", "rejected": " no"}
    rows = prepared(folder, [strings, EXPLICIT, strings]).train
    tokenizer = Tokenizer.load(folder / "tokenizer")
    learned = sorted(texts_of(folder, rows[index])[0][1] for index in range(3))
    assert learned == [" sat", " sat", "the cat sat"]
    ends = {int(rows[index]["targets"][0][rows[index]["weights"][0] > 0][-1]) for index in range(3)}
    assert ends == {tokenizer.end_token, ChatTemplate.of(tokenizer).end_of_turn(USER)}


def test_a_long_prompt_loses_its_start(folder: Path) -> None:
    long = [USER[0] | {"content": "the cat " * 40}, USER[1]]
    row = prepared(folder, [EXPLICIT | {"prompt": long}], sequence_length=32).train[0]
    (text, learned), (other, _) = texts_of(folder, row)
    assert learned == "the cat sat" and text.endswith(learned)
    assert text.removesuffix("the cat sat") == other.removesuffix("no")
    assert not text.startswith("system")


def test_parquet_gives_the_same(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([WHOLE] * 3), folder / "pairs.parquet")
    made = prepared(folder, [WHOLE], train=str(folder / "pairs.parquet")).train[0]
    expected = prepared(folder, [WHOLE]).train[0]
    assert all(np.array_equal(made[name], expected[name]) for name in expected)


def test_another_template_makes_other_rows(folder: Path) -> None:
    before = prepared(folder, [EXPLICIT]).train
    (folder / "tokenizer" / "chat_template.jinja").write_text(
        CHATML.replace("'<|im_end|>' +", "''+")
    )
    after = prepared(folder, [EXPLICIT]).train
    assert before.fingerprint != after.fingerprint
    assert not np.array_equal(before[0]["targets"], after[0]["targets"])


def test_a_template_that_reads_ahead_is_refused(folder: Path) -> None:
    ahead = "{{ messages[-1].content[:2] if not add_generation_prompt }}" + CHATML
    (folder / "tokenizer" / "chat_template.jinja").write_text(ahead)
    with pytest.raises(jf.ConfigError, match=r"pairs\.jsonl, line 1: .*tokenizer\.chat_template"):
        prepared(folder, [EXPLICIT])


NO_PAIR = r"chosen and rejected are no pair: give three strings; or messages"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (EXPLICIT | {"chosen": "yes"}, NO_PAIR),
        (EXPLICIT | {"chosen": "yes", "rejected": "no"}, NO_PAIR),
        ({"chosen": "yes", "rejected": "no"}, NO_PAIR),
        (EXPLICIT | {"rejected": USER[1:]}, NO_PAIR),
        (EXPLICIT | {"chosen": [CHOSEN[0] | {"content": " "}]}, NO_PAIR),
        (WHOLE | {"rejected": [USER[1], *REJECTED]}, NO_PAIR),
        ({"chosen": CHOSEN, "rejected": REJECTED}, NO_PAIR),
        (EXPLICIT | {"chosen": []}, r"the conversation has no messages"),
        (WHOLE | {"prompt": []}, r"the conversation has no messages"),
        (EXPLICIT | {"chosen": ["yes"]}, r"message 1 has no .role.* but is str \('yes'\)"),
        (EXPLICIT | {"prompt": 3}, r"'prompt' is int: it has to be a string or a list"),
    ],
)
def test_what_is_no_pair_is_one_message(folder: Path, record: Any, message: str) -> None:
    good = json.loads(json.dumps(EXPLICIT))
    with pytest.raises(jf.ConfigError, match=rf"pairs\.jsonl, line 2: .*{message}"):
        prepared(folder, [good, record])
    assert len(prepared(folder, [good, record, good], malformed="skip").train) == 2


def test_a_tokenizer_without_a_template_says_where_one_goes(folder: Path) -> None:
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(jf.ConfigError, match=r"has no chat template, .* tokenizer\.chat_template"):
        prepared(folder, [EXPLICIT])


def test_kto_reads_messages_and_the_second_side_is_the_answer_to_another_prompt(
    folder: Path,
) -> None:
    other = [{"role": "user", "content": "hello there"}]
    records = [
        {"prompt": USER, "completion": CHOSEN, "label": True},
        {"prompt": other, "completion": REJECTED, "label": False},
        {"prompt": HISTORY, "completion": CHOSEN, "label": "1"},
    ]
    rows = prepared(folder, records, objective="kto").train
    for number, (prompt, desirable) in enumerate([(USER, 1), (other, 0), (HISTORY, 1)]):
        row = dict(rows[number])
        assert row.pop("desirable") == desirable
        (_, own), (_, after) = texts_of(folder, row)
        told = [records[index]["completion"][0]["content"] for index in (number, (number + 1) % 3)]
        assert [own, after] == told
        ids = ChatTemplate.of(Tokenizer.load(folder / "tokenizer")).encode_prompt(prompt)
        assert row["tokens"][0, : len(ids)].tolist() == row["tokens"][1, : len(ids)].tolist() == ids
