"""A byte-level BPE as one object: from its tables or GPT-2's files, its special tokens, its ids of
a stream."""

import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import transformers
from hard_text import hard_text
from hypothesis import given, settings
from hypothesis import strategies as st
from pretrained_tokenizers import copied, saved, with_names

from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer, encoding, train_bpe, train_bpe_tokenizer, words

END = "<|endoftext|>"
TEXT = (
    f"the cat sat on the mat, the cat's hat{END}\n\n  Grüße, 世界! the 🙂 12345\t\n def f(x):\n   "
    f" return x{END}" * 30
)
HARD = hard_text(250_000)
Vocab = dict[int, bytes]
Merges = list[tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Vocab, Merges]:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(TEXT, encoding="utf-8")
    return train_bpe(path, 400, [END])


def test_ids_are_those_of_the_tables_in_any_order(tables: tuple[Vocab, Merges]) -> None:
    vocab, merges = tables
    moved = {7 * index + 3: entry for index, entry in reversed(vocab.items())}
    first, second = (Tokenizer.from_bpe(table, merges, [END]) for table in (vocab, moved))
    assert second.vocab_size == 7 * (len(vocab) - 1) + 4
    assert (first.end_token, second.end_token) == (0, 3)
    assert [7 * index + 3 for index in first.encode(HARD)] == second.encode(HARD)
    assert b"".join(vocab[index] for index in first.encode(TEXT)) == TEXT.encode()


def test_what_is_encoded_is_decoded(tables: tuple[Vocab, Merges]) -> None:
    tokenizer = Tokenizer.from_bpe(*tables, [END])
    for text in ("", "a", END, f"é{END}{END}🙂 {END}", HARD):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert [tokenizer.decode([index]) for index in tokenizer.encode("\u2603")] == ["\ufffd"] * 3
    assert tokenizer.decode(tokenizer.encode(END), skip_special_tokens=True) == ""


def test_names_of_special_tokens_are_these_unless_the_caller_wants_text(
    tables: tuple[Vocab, Merges],
) -> None:
    tokenizer = Tokenizer.from_bpe(*tables, [END])
    assert tokenizer.encode(f"a{END}").count(0) == 1 and 0 not in tokenizer.encode(
        f"a{END}", special_tokens=False
    )
    assert not [0 for row in tokenizer.encode_arrays([TEXT, END]) if 0 in row]


def test_of_overlapping_special_tokens_the_longest_is_taken(tables: tuple[Vocab, Merges]) -> None:
    names = [END, END * 2, "<|end", "ab", "abc", "bcd"]
    tokenizer = Tokenizer.from_bpe(*tables, names)
    # Those that the vocabulary lacks follow it.
    ids = [0, *range(len(tables[0]), len(tables[0]) + 5)]
    assert tokenizer.encode(END * 3) == [ids[1], ids[0]] and tokenizer.encode(END[:-1]) != [0]
    assert [tokenizer.decode([index]) for index in tokenizer.encode(f"x{END * 2}y{END}<|endx")] == [
        *("x", END * 2, "y", END, "<|end", "x")
    ]
    assert tokenizer.encode("abcd") == [ids[4], *tokenizer.encode("d")]
    long = " ".join(["abcd", END * 3, "<|endabc"] * 3000)  # long enough for every way to encode
    wanted = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str()).encode(long).ids
    assert tokenizer.encode(long) == wanted == [*tokenizer.encode_iterable(iter(long))]


def test_without_special_tokens_everything_but_training_works(tables: tuple[Vocab, Merges]) -> None:
    vocab, merges = tables
    bare = Tokenizer.from_bpe({index - 1: entry for index, entry in vocab.items() if index}, merges)
    assert bare.decode(bare.encode(TEXT)) == TEXT and bare.prefix == [] and not bare.ids()
    with pytest.raises(ConfigError, match="no token that ends a document"):
        _ = bare.end_token
    assert Tokenizer.from_bpe(vocab, merges, None).encode("the") == Tokenizer.from_bpe(
        vocab, merges, [END]
    ).encode("the")


@pytest.mark.parametrize("pattern", ["gpt2", "llama3"])
def test_the_saved_file_gives_equal_ids_in_the_tokenizers_library_and_in_transformers(
    pattern: str, tables: tuple[Vocab, Merges], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_bpe(*tables, [END, "<|a b|>", "«é»"], pattern)
    tokenizer.save(tmp_path / "made")
    file = str(tmp_path / "made" / "tokenizer.json")
    hf = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    text = HARD[-30_000:] + " <|a b|>«é»".join(TEXT.split("cat"))
    ids = tokenizer.encode(text)
    assert ids == tokenizers.Tokenizer.from_file(file).encode(text).ids == hf(text).input_ids
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "made")(text).input_ids == ids
    loaded = Tokenizer.load(tmp_path / "made")
    # A tokenizer from a file encodes names of special tokens as text.
    assert loaded.encode(text, special_tokens=True) == ids and loaded.encode(text) != ids
    assert loaded.fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vocab, merges: vocab.pop(100), r"lacks 1 of the 256 bytes, the first b'c'"),
        (lambda vocab, merges: vocab.update({900: b"a"}), r"holds b'a' at several ids"),
        (
            lambda vocab, merges: merges.append((b"qq", b"z")),
            r"merge \d+, b'qq' and b'z': one of them or their sum is not in the vocabulary",
        ),
        (lambda vocab, merges: merges.append((b"q", b"z")), r"b'q' and b'z': one of them or"),
    ],
)
def test_tables_that_do_not_fit_are_named(
    change, message: str, tables: tuple[Vocab, Merges]
) -> None:
    vocab, merges = dict(tables[0]), list(tables[1])
    change(vocab, merges)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_bpe(vocab, merges, [END])


def test_special_tokens_and_patterns_that_cannot_be_are_named(tables: tuple[Vocab, Merges]) -> None:
    for names, message in (
        (END, "must be a list of names"),
        (["Ġthe"], "one is written as an entry is"),
    ):
        with pytest.raises(ConfigError, match=message):
            Tokenizer.from_bpe(*tables, names)
    with pytest.raises(ConfigError, match="pattern='gpt5' must be one of gpt2, llama3"):
        Tokenizer.from_bpe(*tables, [END], "gpt5")


# --- from GPT-2's files


def in_two_files(kind: str, folder: Path, **settings: object) -> Path:
    """A tokenizer of transformers as its first models were published: no tokenizer.json."""
    copied(saved(kind), folder, **settings)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("kind", "family", "space"),
    [("gpt2", "GPT2", False), ("bart", "Roberta", True), ("bart", "Bart", False)],
)
def test_gpt2s_files_give_the_ids_of_transformers(
    kind: str, family: str, space: bool, tmp_path: Path
) -> None:
    folder = in_two_files(
        kind, tmp_path, tokenizer_class=f"{family}Tokenizer", add_prefix_space=space
    )
    (folder / "config.json").unlink()
    ours, hf = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert type(hf).__name__.startswith((family, "Roberta"))
    for text in with_names([str(token) for token in hf.all_special_tokens]):
        assert (ids := ours.encode(text, special_tokens=True)) == hf(text).input_ids, repr(text)
        assert (
            ours.encode(text)
            == hf(text, add_special_tokens=False, split_special_tokens=True).input_ids
        ), repr(text)
        assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True)
    assert Tokenizer.load(folder / "vocab.json").fingerprint() == ours.fingerprint()
    ours.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode(HARD, True) == ours.encode(HARD, True)
    assert ours.end_token == hf.eos_token_id and ours.special("mask") == hf.mask_token_id


@pytest.mark.parametrize(("kind", "around"), [("gpt2", (0, 0)), ("bart", (1, 1))])
def test_the_two_files_alone_are_enough(kind: str, around: tuple[int, int], tmp_path: Path) -> None:
    folder = in_two_files(kind, tmp_path)
    for file in {*folder.iterdir()} - {folder / "vocab.json", folder / "merges.txt"}:
        file.unlink()
    alone, complete = Tokenizer.load(folder), Tokenizer.load(saved(kind))
    assert (len(alone.prefix), len(alone.suffix)) == around
    assert alone.encode(HARD) == complete.encode(HARD)
    text = "a <s> b</s>" + END
    assert (
        alone.encode(text, special_tokens=True)
        == complete.encode(text, special_tokens=True)
        != complete.encode(text)
    )


def test_tokens_added_later_are_read_from_their_file(tmp_path: Path) -> None:
    folder = in_two_files("gpt2", tmp_path, tokenizer_class="GPT2Tokenizer", pad_token="<pad>")
    (folder / "config.json").unlink()
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "added_tokens.json").write_text(json.dumps({"<b>": size + 1, "<pad>": size}))
    ours, hf = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    text = "a <b> c<pad>d"
    assert (
        ours.encode(text, special_tokens=True) == hf(text).input_ids and ours.special("pad") == size
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 900}))
    with pytest.raises(
        ConfigError,
        match=r"added_tokens\.json gives '<pad>' the id 900, and the vocabulary beside it \d+:",
    ):
        Tokenizer.load(folder)


def test_files_of_another_tokenizer_or_damaged_ones_are_refused(tmp_path: Path) -> None:
    folder = in_two_files("gpt2", tmp_path, tokenizer_class="Qwen2Tokenizer")
    with pytest.raises(
        ConfigError, match=r"does not exist, but merges\.txt, vocab\.json: .*save_pretrained"
    ):
        Tokenizer.load(folder)
    in_two_files("gpt2", tmp_path, tokenizer_class="GPT2Tokenizer")
    vocab = json.loads((folder / "vocab.json").read_text())
    # CLIP marks the ends of words so.
    (folder / "vocab.json").write_text(json.dumps(vocab | {"a</w>": len(vocab)}))
    with pytest.raises(ConfigError, match=r"does not exist, but merges\.txt, vocab\.json"):
        Tokenizer.load(folder)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    (folder / "merges.txt").write_text(
        "\n".join([*lines[:5], "only", *lines[5:]]), encoding="utf-8"
    )
    with pytest.raises(
        ConfigError, match=r"merges\.txt holds no merges .*invalid at line 5.*: restore the two"
    ):
        Tokenizer.load(folder)
    (folder / "vocab.json").write_text('{"a": "b"}')
    with pytest.raises(ConfigError, match=r"vocab\.json must be an object from tokens to ids"):
        Tokenizer.load(folder)


# --- streams


def uncut(words: tokenizers.pre_tokenizers.PreTokenizer) -> Tokenizer:
    """One that reads a text as a whole: it begins it with a space, or merges across spaces."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = words
    backend.train_from_iterator(
        [TEXT], tokenizers.trainers.BpeTrainer(vocab_size=900, show_progress=False)
    )
    return Tokenizer(backend)


def streaming() -> dict[str, Tokenizer]:
    whole_words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = {
        "metaspace": uncut(tokenizers.pre_tokenizers.Metaspace()),
        "one word": uncut(whole_words),
    }
    kinds = ("gpt2", "llama3", "bert")
    return STREAMED | made | {kind: Tokenizer.load(saved(kind)) for kind in kinds}


STREAMED = {
    "bpe": train_bpe_tokenizer([TEXT], 400),
    "threes": train_bpe_tokenizer([TEXT], 400, (), "llama3"),
}


@pytest.mark.parametrize("special", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_stream_has_the_ids_of_the_whole_text(
    special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every tokenizer, in chunks of all sizes, with parts so small that there are many cuts."""
    closed = "".join(HARD[-3000:].split())  # without a space to cut at
    text = HARD[-5_000:] + TEXT[:2000] + closed
    whole = {name: tokenizer.encode(text, special) for name, tokenizer in streaming().items()}
    for module in (encoding, words):
        monkeypatch.setattr(module, "PART_CHARACTERS", 64)
    for name, tokenizer in streaming().items():
        for size in (1, 7, 1000):
            chunks = (text[start : start + size] for start in range(0, len(text), size))
            assert [*tokenizer.encode_iterable(chunks, special)] == whole[name], (name, size)
        assert [*tokenizer.encode_iterable(io.StringIO(text, newline=""), special)] == whole[
            name
        ], name
        assert tokenizer.encode(text, special) == whole[name], name


def test_a_stream_of_bytes_is_refused_and_an_empty_one_is_empty() -> None:
    for wrong in (io.BytesIO(b"the cat"), [b"the"]):
        with pytest.raises(ConfigError, match="is bytes, not str: open the file as text"):
            [*STREAMED["bpe"].encode_iterable(wrong)]
    for empty in (io.StringIO(), [], [""]):
        assert [*STREAMED["bpe"].encode_iterable(empty)] == []


NAMES = [END, "a b", "b c d", " x", "END", "1 ", "\n"]


@settings(max_examples=40)
@given(
    st.lists(
        st.sampled_from(
            ["a", "b", " ", "\n", "c d", "x", "END", "1", "é", "!", "'s", "\r", *NAMES]
        ),
        max_size=60,
    )
)
def test_special_tokens_that_lie_where_a_text_is_cut(pieces: list[str]) -> None:
    for flags in ({}, {"lstrip": True, "rstrip": True}, {"single_word": True}):
        backend = tokenizers.Tokenizer.from_str(
            STREAMED["threes" if flags else "bpe"]._backend.to_str()
        )
        backend.add_special_tokens(
            [tokenizers.AddedToken(name, normalized=False, special=True, **flags) for name in NAMES]
        )
        text, tokenizer = "".join(pieces), Tokenizer(backend)
        wanted = tokenizer.encode(text, special_tokens=True)
        with pytest.MonkeyPatch.context() as patch:
            for module in (encoding, words):
                patch.setattr(module, "PART_CHARACTERS", 2)
            assert [*tokenizer.encode_iterable(iter(text), special_tokens=True)] == wanted
            assert tokenizer.encode(text, special_tokens=True) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("letter", [" a", "字。", "x1"])
def test_a_stream_takes_the_memory_of_a_few_blocks(letter: str) -> None:
    """Of one line of 6 million characters, with spaces or without."""
    tokenizer = STREAMED["bpe"]
    [*tokenizer.encode_iterable([letter * 400_000])]

    def chunks() -> Iterator[str]:
        for _ in range(24):
            yield letter * (125_000 * 2 // len(letter))

    tracemalloc.start()
    count = sum(1 for _ in tokenizer.encode_iterable(chunks()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 1_000_000 and peak < 16e6
