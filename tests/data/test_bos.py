"""data.bos: documents of a text begin with the BOS of the tokenizer, as its template says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import prepare, template_of
from pretrained_tokenizers import change, copied, saved

import jaxformer as jf
from jaxformer import data
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import store as store_files
from jaxformer.data.documents import Piece
from jaxformer.data.templates import SFTTemplate
from jaxformer.files import ConfigError
from jaxformer.runs.objectives import objective_of, task_of
from jaxformer.runs.run_evaluation import evaluate_run
from jaxformer.tokenizer import Tokenizer

TEXTS = ["the cat sat", "on a mat and the dog " * 4, "a", "one more text"]


def run_of(folder: Path, kind: str = "llama3", **settings: Any) -> RunConfig:
    """A run on `TEXTS` with a tokenizer of transformers."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))
    shape: dict[str, Any] = {"sequence_length": 12, "validation_fraction": 0.0}
    chosen = {"train": str(text), "cache_dir": str(folder / "cache")} | shape | settings
    return RunConfig(data=DataConfig(**chosen), tokenizer=TokenizerConfig(path=str(saved(kind))))


def documents_of(tokenizer: Tokenizer, *before: int) -> list[list[int]]:
    return [[*before, *tokenizer.encode(text), tokenizer.end_token] for text in TEXTS]


def rows_of(run: RunConfig) -> list[data.NumpyBatch]:
    rows = prepare(run).train
    return [rows[index] for index in range(len(rows))]


def used(row: data.NumpyBatch) -> int:
    """How many places of a row are before its padding, whose token, 0, is the BOS here."""
    return int(np.flatnonzero(row.get("segment_ids", row["weights"])).max()) + 1


def segments_of(rows: list[data.NumpyBatch]) -> list[list[int]]:
    """The tokens of each segment of each row."""
    places = [(row, row["segment_ids"] == number) for row in rows for number in range(1, 9)]
    return [row["tokens"][chosen].tolist() for row, chosen in places if chosen.any()]


@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
@pytest.mark.parametrize("length", [12, 200])
def test_each_document_begins_with_the_bos_of_the_template_which_is_no_target(
    packing: str, length: int, tmp_path: Path
) -> None:
    run = run_of(tmp_path, packing=packing, sequence_length=length)
    tokenizer = Tokenizer.load(saved("llama3"))
    (bos,) = tokenizer.encode("", special_tokens=True)
    documents = documents_of(tokenizer, bos)
    rows = rows_of(run)
    learned = [int(token) for row in rows for token in row["targets"][row["weights"] > 0]]
    assert sorted(learned) == sorted(token for each in documents for token in each[1:])
    read = [row["tokens"][: used(row)].tolist() for row in rows]
    assert sum(each.count(bos) for each in read) == len(TEXTS)
    if packing == "stream":
        stream = [token for each in documents for token in each]
        rest = [token for row in rows for token in row["tokens"].tolist()]
        assert rest[: len(stream) - 1] == stream[:-1]
        assert learned == [token for each in documents for token in each[1:]]
    elif length > 100:  # each document is one segment, from its BOS on
        ends = {tuple(each) for each in documents} | {tuple(documents[-1][:-1])}
        found = segments_of(rows)
        assert len(found) == len(TEXTS) and all(tuple(each) in ends for each in found)
    else:  # a BOS is where a segment begins
        for row in rows:
            places = np.flatnonzero(row["tokens"][: used(row)] == bos)
            numbers = np.concatenate([[0], row["segment_ids"]])
            assert (np.diff(numbers)[places] != 0).all()


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_never_gives_the_rows_of_before(packing: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, packing=packing, bos="never", sequence_length=8)
    tokenizer = Tokenizer.load(saved("llama3"))
    stream = [token for each in documents_of(tokenizer) for token in each]
    corpus = prepare(run)
    store, rows = corpus.train.store, rows_of(run)
    assert store.read(0, store.tokens).tolist() == stream and store.beginning == ()
    assert all((row["weights"] == (row["targets"] > 0)).all() for row in rows[:-1])
    learned = [int(token) for row in rows for token in row["targets"][row["weights"] > 0]]
    assert sorted(learned) == sorted(stream if packing == "best_fit" else stream[1:])


def test_windows_that_begin_anywhere_do_not_learn_the_bos(tmp_path: Path) -> None:
    rows = prepare(run_of(tmp_path, order="random")).train
    bos = Tokenizer.load(saved("llama3")).prefix[0]
    found = [rows[index] for index in range(rows.numbers)]
    assert any((row["targets"] == bos).any() for row in found)
    assert all((row["weights"] == (row["targets"] != bos)).all() for row in found)


def test_a_document_in_several_shards_has_one_bos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "SHARD_CHARACTERS", 6)
    tokenizer = Tokenizer.load(saved("llama3"))
    pieces = [Piece("the cat ", "0", False)] * 3
    pieces += [Piece("sat", "0", True), Piece("a", "1", True)]
    (bos,) = tokenizer.prefix
    made = data.open_or_build(tmp_path, lambda: pieces, tokenizer, beginning=(bos,))
    text = tokenizer.encode("the cat ") * 3 + tokenizer.encode("sat")
    end = tokenizer.end_token
    expected = [bos, *text, end, bos, *tokenizer.encode("a"), end]
    assert made.read(0, 99).tolist() == expected
    again = data.TokenStore.open(tmp_path)
    assert again is not None and again.beginning == (bos,)
    assert again.is_text(0, 99).tolist() == [
        place not in (0, expected.index(bos, 1)) and place < len(expected) for place in range(99)
    ]


def test_auto_is_never_without_a_template_and_always_takes_the_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved("gpt2"))
    bos_token = tokenizer.special("bos")
    assert bos_token is not None and not tokenizer.prefix
    for bos, before in (("auto", []), ("never", []), ("always", [bos_token])):
        store = prepare(run_of(tmp_path, "gpt2", bos=bos)).train.store
        expected = [token for each in documents_of(tokenizer, *before) for token in each]
        assert store.read(0, store.tokens).tolist() == expected


def test_a_text_begins_as_a_prompt_and_a_record_do(tmp_path: Path) -> None:
    for kind in ("llama3", "llama2", "gpt2"):
        tokenizer, run = Tokenizer.load(saved(kind)), run_of(tmp_path, kind)
        template = template_of(SFTTemplate, run, tokenizer)
        (parts,) = template.encode([("a", "b")], {})
        row = template.arrays(*(np.array(part) for part in parts))
        before = tokenizer.as_prompt([])
        assert task_of(run.model, run.data).beginning("auto", tokenizer) == tuple(before)
        assert row["tokens"][: len(before)].tolist() == before


def test_always_without_a_bos_or_where_rows_are_no_text_is_one_message(tmp_path: Path) -> None:
    run = run_of(tmp_path, bos="always")
    (tmp_path / "t").mkdir()
    jf.tokenizer.byte_tokenizer().save(tmp_path / "t" / "mine.json")
    none = replace(run, tokenizer=TokenizerConfig(path=str(tmp_path / "t" / "mine.json")))
    with pytest.raises(ConfigError, match=r"data\.bos=always, and .*mine.json has no BOS: name it"):
        prepare(none)
    for bos in ("always", "never"):
        with pytest.raises(ConfigError, match=rf"data\.bos={bos} says .*=sft, .*: set it to auto"):
            objective_of(run.model, DataConfig(objective="sft", bos=bos))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["llama3", "llama2", "llama2 without a token of the space"])
def test_a_base_is_evaluated_as_its_texts_are_scored_by_hand(kind: str, tmp_path: Path) -> None:
    """Bits are those of each UTF-8 byte of the text, however a space is spelled."""
    folder = copied(saved(kind.split()[0]), tmp_path / "tokenizer")
    if " " in kind:
        # The mark of a space is spelled in three bytes, as all that the vocabulary lacks.
        spec = json.loads((folder / "tokenizer.json").read_text())
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        vocab = {name: index for index, name in enumerate(["<unk>", "<s>", "</s>", *names, "a"])}
        spec["model"] |= {"vocab": vocab, "merges": []}
        kept = [entry for entry in spec["added_tokens"] if entry["id"] < 3]
        (folder / "tokenizer.json").write_text(json.dumps(spec | {"added_tokens": kept}))
        change(folder / "tokenizer_config.json", {"added_tokens_decoder": {}})
    tokenizer = Tokenizer.load(folder)
    run = run_of(tmp_path)
    config = jf.ModelConfig(
        vocab_size=tokenizer.vocab_size, d_model=16, n_heads=2, n_layers=1, max_length=128
    )
    params = jf.init(config, jax.random.key(0))
    jf.save_pretrained(tmp_path / "base", params, config, tokenizer=tokenizer)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": TEXTS[1]}) + "\n")
    found = evaluate_run(
        tmp_path / "base", str(tmp_path / "one.jsonl"), cache_dir=run.data.cache_dir
    )
    ids = [*tokenizer.encode(TEXTS[1], special_tokens=True), tokenizer.end_token]
    logits = jf.forward(params, config, jnp.array([ids[:-1]]))
    scores = jax.nn.log_softmax(logits[0])[jnp.arange(len(ids) - 1), jnp.array(ids[1:])]
    assert found["val_loss"] == pytest.approx(-float(scores.mean()), rel=1e-5)
    nats = -float(scores.sum())
    bits = nats / np.log(2) / len(TEXTS[1].encode())
    assert found["val_bits_per_byte"] == pytest.approx(bits, rel=1e-5)
