"""tiktoken encodes where the ids are those of the
tokenizers library, and nowhere else."""

import json
import random

import numpy as np
import pytest
import tiktoken
import tokenizers
from hard_text import characters, hard_text
from pretrained_tokenizers import TEXTS, saved
from products import slow_but

from jaxformer.files import ConfigError
from jaxformer.tokenizer import SENTINELS, Tokenizer, byte_tokenizer, encoding, train_bpe_tokenizer
from jaxformer.tokenizer.encoding import MOST_CHARACTERS, Fast
from jaxformer.tokenizer.words import WORD_PATTERNS

HARD = hard_text(250_000)
CORPUS = [
    *TEXTS,
    HARD[-60_000:],
    "the cat sat on the mat and the dog barked at the moon  \n\n" * 20,
]
MADE = {pattern: train_bpe_tokenizer(CORPUS, 1500, (), pattern) for pattern in WORD_PATTERNS}


def library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer in the tokenizers library alone."""
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.encode_special_tokens = True
    return backend


def fast_of(tokenizer: Tokenizer | tokenizers.Tokenizer) -> Fast | None:
    backend = tokenizer._backend if isinstance(tokenizer, Tokenizer) else tokenizer
    return Fast.of(json.loads(backend.to_str()), backend)


def plain(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return [
        encoding.ids
        for encoding in library(tokenizer).encode_batch_fast([*texts], add_special_tokens=False)
    ]


@pytest.mark.parametrize("pattern", WORD_PATTERNS)
def test_hard_text_has_the_ids_of_tiktoken_and_of_the_tokenizers_library(pattern: str) -> None:
    made = MADE[pattern]
    assert fast_of(made)
    ids = made.encode(HARD)
    ranks = {
        made._spelling.raw(token): index
        for token, index in made._vocab.items()
        if index != made.end_token
    }
    baseline = tiktoken.Encoding(
        "own", pat_str=WORD_PATTERNS[pattern].words, mergeable_ranks=ranks, special_tokens={}
    )
    assert [ids] == plain(made, HARD) and ids == baseline.encode_ordinary(HARD)
    assert made.decode(ids) == HARD
    pieces = [
        HARD[start : start + size] for size in (10, 999, 30_000) for start in range(0, 60_000, size)
    ]
    assert made.encode_batch(pieces) == plain(made, *pieces)
    arrays = made.encode_arrays(pieces)
    assert all(row.dtype == np.uint32 for row in arrays) and [
        row.tolist() for row in arrays
    ] == made.encode_batch(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", WORD_PATTERNS)
def test_every_character_is_split_alike(pattern: str) -> None:
    made, texts = MADE[pattern], all_characters()
    assert made.encode_batch(texts) == plain(made, *texts)


def test_a_random_vocabulary_is_merged_alike_or_left_to_the_library() -> None:
    """Merges of few letters, in any order, with which tiktoken often would not do what BPE does."""
    fast_count = 0
    for seed in range(24):
        r = random.Random(seed)
        vocab, merges = {index: bytes([index]) for index in range(256)}, []
        entries = [b"a", b"b", b"c"]
        for _ in range(12):
            first, second = r.choice(entries), r.choice(entries)
            if first + second not in entries:
                merges.append((first, second))
                entries.append(first + second)
                vocab[len(vocab)] = first + second
        tokenizer = Tokenizer.from_bpe(vocab, merges)
        text = " ".join("".join(r.choices("abc", k=r.randint(1, 30))) for _ in range(1500))
        assert [tokenizer.encode(text)] == plain(tokenizer, text)
        fast_count += fast_of(tokenizer) is not None
    assert 0 < fast_count < 24


def changed(
    change: dict[str, object], part: str = "model", base: Tokenizer = MADE["gpt2"]
) -> tokenizers.Tokenizer:
    spec = json.loads(base._backend.to_str())
    spec[part] = (spec[part] or {}) | change
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def test_what_tiktoken_cannot_do_is_left_to_the_library() -> None:
    spec = json.loads(MADE["gpt2"]._backend.to_str())
    vocab, merges = spec["model"]["vocab"], spec["model"]["merges"]
    last, twice = "".join(merges[-1]), {index: bytes([index]) for index in range(256)}
    twice |= {256: b"ab", 257: b"bc", 258: b"abc"}
    refused = {
        "dropout": changed({"dropout": 0.5}),
        "ignore_merges": changed({"ignore_merges": True}),
        "byte_fallback": changed({"byte_fallback": True}),
        "normalizer": changed({"type": "NFC"}, "normalizer"),
        "a space before": changed({"add_prefix_space": True}, "pre_tokenizer"),
        "no words": changed({"use_regex": False}, "pre_tokenizer"),
        "ids in another order": changed(
            {"vocab": vocab | {last: 257, "".join(merges[0]): vocab[last]}}
        ),
        "two merges of one entry": (
            Tokenizer.from_bpe(
                twice, [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")]
            )._backend
        ),
        "sentencepiece": Tokenizer.load(saved("t5"))._backend,
        "byte fallback": Tokenizer.load(saved("llama2"))._backend,
        "no merges": byte_tokenizer()._backend,
    }
    assert {name for name, backend in refused.items() if fast_of(backend)} == set()
    ordinary = changed({})
    ordinary.add_tokens(["cat"])
    assert fast_of(ordinary) is None and fast_of(changed({}))
    text = "the cat sat  " * 4000
    assert Tokenizer(ordinary).encode(text) == ordinary.encode(text).ids


def test_entries_that_no_merge_makes_change_no_id() -> None:
    """GPT-2's tables, in which nothing says that <|endoftext|> is a special token."""
    vocab = json.loads(MADE["gpt2"]._backend.to_str())["model"]["vocab"]
    unreached = ["<|endoftext|>", "ĠĠĠqqq", "Ġcat Ġ", "\u20ac", "of the"]
    more = {name: 2000 + 7 * index for index, name in enumerate(unreached)}
    backend = changed(
        {"vocab": {name: vocab[name] for name in vocab if name != unreached[0]} | more}
    )
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = []
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))
    assert fast_of(tokenizer)
    text = HARD[-60_000:] + " <|endoftext|>   qqq cat  of the\u20ac <|endoftext|><|endoftext|>" * 50
    texts = [text[start : start + size] for size in (7, 20_000) for start in range(0, 60_000, size)]
    assert tokenizer.encode_batch([text, *texts]) == plain(tokenizer, text, *texts)
    assert tokenizer.encode(text, special_tokens=True) == plain(tokenizer, text)[0]
    assert not {*more.values()} & {*tokenizer.encode(text)}


def test_a_core_of_another_version_of_unicode_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    older = WORD_PATTERNS["gpt2"].words.replace(
        r" ?\p{L}+", rf" ?(?:(?!{encoding.NEWEST[0]})\p{{L}})+"
    )
    monkeypatch.setitem(encoding.WORD_PATTERNS, "gpt2", WORD_PATTERNS["gpt2"]._replace(words=older))
    assert fast_of(MADE["gpt2"]) is None and fast_of(MADE["llama3"])


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "bart"])
def test_published_layouts_are_taken_with_and_without_their_templates(kind: str) -> None:
    tokenizer = Tokenizer.load(saved(kind))
    assert fast_of(tokenizer)
    names = [
        tokenizer.shown(index)
        for index in sorted({*range(tokenizer.vocab_size)} - {*tokenizer.ordinary().tolist()})
    ]
    text = HARD[-60_000:] + " ".join(f"a {name}b{name} {name}{name}" for name in names * 50)
    assert [tokenizer.encode(text)] == plain(tokenizer, text)
    marking = library(tokenizer)
    marking.encode_special_tokens = False
    assert tokenizer.encode(text, special_tokens=True) == marking.encode(text).ids


@pytest.mark.parametrize("pattern", slow_but([*WORD_PATTERNS], "gpt2"))
@pytest.mark.parametrize(
    ("size", "runs"),
    [
        (MOST_CHARACTERS, " \u3000a!1"),
        pytest.param(MOST_CHARACTERS + 1, " \n", marks=pytest.mark.slow),
        (1_100_000, " "),
    ],
)
def test_long_runs_neither_fail_nor_differ(
    size: int, runs: str, pattern: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """tiktoken's regular expressions give up at a million white spaces in a row."""
    made = MADE[pattern]
    for run in runs:
        text = (run * size)[: size - 1] + "x"
        assert [made.encode(text)] == plain(made, text), run
    assert not capfd.readouterr().err


def test_half_a_character_is_one_clear_error_on_either_path() -> None:
    for text in ("a\ud800b", "a\ud800b" * 30_000):
        with pytest.raises(
            ConfigError, match=r"'\\ud800' \(U\+D800\), half of a surrogate pair of UTF-16"
        ):
            MADE["gpt2"].encode(text)


def all_characters() -> list[str]:
    """Every character between others, in parts of about 100,000."""
    text = " ".join(f"a{one}1{one} {one}'{one}" for one in characters())
    found, start = [], 0
    while start < len(text):
        stop = text.find(" a", start + 100_000) % (len(text) + 1)
        found.append(text[start:stop])
        start = stop
    return found


def test_special_tokens_of_an_objective_stay_text_on_the_fast_path() -> None:
    tokenizer = train_bpe_tokenizer(CORPUS, 1500, SENTINELS)
    text = "the <extra_id_0> cat <extra_id_12>\n" * 2000
    assert fast_of(tokenizer) and [tokenizer.encode(text)] == plain(tokenizer, text)
    ids = tokenizer.encode(text, special_tokens=True)
    assert ids.count(tokenizer.sentinels()[0]) == ids.count(tokenizer.sentinels()[12]) == 2000


def test_one_text_alone_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that finds no memory to begin in is waited for without end."""
    monkeypatch.setattr(encoding, "ThreadPool", None)
    assert MADE["gpt2"].decode(MADE["gpt2"].encode(HARD)) == HARD
    assert [*MADE["gpt2"].encode_iterable([HARD])] == MADE["gpt2"].encode(HARD)
