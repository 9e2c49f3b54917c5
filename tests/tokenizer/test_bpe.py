"""The BPE trainer: what it makes is what its rule says, whatever the text, its size, and the number
of processes."""

import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.files import ConfigError
from jaxformer.tokenizer import END_OF_TEXT, Tokenizer, bpe, train_bpe_tokenizer, words
from jaxformer.tokenizer.bpe import merge_words, spell, train_bpe, train_on
from jaxformer.tokenizer.byte_level import byte_level_bpe

# As they were published, with GPT-2 and with Llama 3.
PUBLISHED = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
SPECIALS = ("<|endoftext|>", "<|endoftext|><|endoftext|>", "<s>", "aa", "aab")
# What makes ties, what makes runs, what the patterns treat apart, and what takes several bytes.
ALPHABETS = (
    "ab",
    "aab ",
    "abc \n",
    "aé世🙂 ",
    "ab'sS\u2019tlLve 12",
    " \t\r\n\x0b\x1c\x85\xa0\u2028\u3000a.1",
    "x<|endoftext|>",
)
NAMED = st.lists(st.sampled_from([*SPECIALS, "<", "<|end", "|>", "a", " "]), max_size=9).map(
    "".join
)
TEXTS = st.one_of(
    *(st.text(alphabet, max_size=80) for alphabet in ALPHABETS), st.text(max_size=40), NAMED
).filter(bool)

Result = tuple[dict[int, bytes], list[tuple[bytes, bytes]]]


def parted(text: str, specials: Sequence[str], pattern: str) -> list[str]:
    longest_first = sorted(specials, key=len, reverse=True)
    segments = regex.split("|".join(map(regex.escape, longest_first)), text) if specials else [text]
    return [word for segment in segments for word in regex.findall(PUBLISHED[pattern], segment)]


def plain(
    text: str, vocab_size: int, specials: Sequence[str] = (), pattern: str = "gpt2"
) -> Result:
    """The rule, word for word: every merge counts every pair of every word again."""
    corpus = [[bytes([byte]) for byte in word.encode()] for word in parted(text, specials, pattern)]
    vocab = [special.encode() for special in specials] + [bytes([byte]) for byte in range(256)]
    merges = []
    while len(vocab) < vocab_size:
        counts = Counter(pair for word in corpus for pair in pairwise(word))
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        vocab.append(best[0] + best[1])
        corpus = [merged(word, best) for word in corpus]
    return dict(enumerate(vocab)), merges


def merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out, index = [], 0
    while index < len(word):
        matches = tuple(word[index : index + 2]) == pair
        out.append(pair[0] + pair[1] if matches else word[index])
        index += 2 if matches else 1
    return out


def trained(
    folder: Path, text: str, vocab_size: int, specials: Sequence[str] = (), pattern: str = "gpt2"
) -> Result:
    path = folder / "corpus.txt"
    path.write_bytes(text.encode())
    return train_bpe(path, vocab_size, specials, pattern=pattern)


@settings(max_examples=150)
@given(
    TEXTS,
    st.lists(st.sampled_from(SPECIALS), unique=True, max_size=3),
    st.sampled_from([*PUBLISHED]),
)
def test_training_on_any_text_equals_the_plain_implementation(
    text: str, specials: list[str], pattern: str
) -> None:
    vocab_size = 256 + len(specials) + 25
    assert train_on([[text]], vocab_size, specials, pattern=pattern) == plain(
        text, vocab_size, specials, pattern
    )


def test_training_on_prose_equals_the_plain_implementation(tmp_path: Path) -> None:
    """Enough of it that pairs lose counts while they wait in the heap, and words many of their
    tokens."""
    text = Path(words.__file__).read_text(encoding="utf-8")
    assert trained(tmp_path, text, 600) == plain(text, 600)


def test_of_pairs_as_frequent_the_greater_in_the_order_of_byte_strings_is_merged() -> None:
    assert merge_words(*spell({"ab": 2, "ac": 2, "ba": 2, "zz": 1}), 3) == [
        (b"b", b"a"),
        (b"a", b"c"),
        (b"a", b"b"),
    ]
    # "ab" begins "abb" and is the lesser; the two then stand before the same token.
    made = merge_words(*spell({"abbx": 5, "abx": 5, "abb": 3}), 9)
    assert made[:4] == [(b"a", b"b"), (b"ab", b"b"), (b"abb", b"x"), (b"ab", b"x")]


@given(st.lists(st.binary(min_size=1, max_size=4), unique=True))
def test_the_heaps_order_of_tokens_is_that_of_byte_strings_reversed(tokens: list[bytes]) -> None:
    assert sorted(tokens, key=bpe._descending) == sorted(tokens, reverse=True)


def test_a_tokenizer_made_of_texts_is_that_of_the_trainer_for_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["low lower<|endoftext|>newest " * 9, "3 widest"]
    tables = train_on([[text] for text in texts], 290, [END_OF_TEXT, "<s>"], pattern="llama3")
    assert (b"3", b" ") not in tables[1] and tables[0][0] == END_OF_TEXT.encode()
    monkeypatch.setattr(words, "PART_CHARACTERS", 7)
    made = train_bpe_tokenizer(texts, 290, ["<s>"], "llama3")
    assert (
        made.fingerprint()
        == Tokenizer(byte_level_bpe(*tables, [END_OF_TEXT, "<s>"], "llama3")).fingerprint()
    )


def test_line_ends_are_kept_as_the_file_has_them(tmp_path: Path) -> None:
    assert trained(tmp_path, "a\r\nb\r\nc\r\n", 257)[1] == [(b"\r", b"\n")]


def words_of_parts(text: str, size: int, specials: Sequence[str], pattern: str) -> list[str]:
    """The words of a text that comes in blocks of a size, cut wherever it can be."""
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "PART_CHARACTERS", 2)
        return [
            word
            for segment in words.segments(blocks, specials, pattern)
            for word in words.split_words(segment, pattern)
        ]


@pytest.mark.parametrize("pattern", PUBLISHED)
@settings(max_examples=300)
@given(TEXTS, st.integers(1, 30), st.lists(st.sampled_from(SPECIALS), unique=True, max_size=3))
def test_a_text_cut_into_parts_has_the_words_of_the_whole(
    pattern: str, text: str, size: int, specials: list[str]
) -> None:
    assert words_of_parts(text, size, specials, pattern) == parted(text, specials, pattern)


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_words_of_ascii_are_those_of_the_published_pattern(pattern: str) -> None:
    rng = random.Random(0)
    everything = "".join(map(chr, range(128)))
    for alphabet in (everything, "'sdmtlvreSDMTLVRE ab", " \n\r\t\x0b\x0c\x1c\x1fa1!"):
        text = "".join(rng.choices(alphabet, k=20_000))
        assert words.split_words(text, pattern) == regex.findall(PUBLISHED[pattern], text)


def test_the_number_of_processes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    pieces = rng.choices(
        ["the ", "cat", " sat\n", "Grüße", "<|endoftext|>", "世界 ", "\n\n", " "], k=3000
    )
    path = tmp_path / "corpus.txt"
    path.write_bytes("".join(pieces).encode())
    monkeypatch.setattr(words, "BLOCK_CHARACTERS", 700)
    found = [train_bpe(path, 320, ["<|endoftext|>"], processes=count) for count in (1, 2, 3)]
    assert found[0] == found[1] == found[2] == plain("".join(pieces), 320, ["<|endoftext|>"])


def test_text_is_read_as_it_is_counted() -> None:
    """So memory follows distinct words, not the corpus."""
    blocks_read: list[int] = []

    def blocks() -> Iterator[str]:
        for number in range(20):
            blocks_read.append(number)
            yield "word " * (words.BLOCK_CHARACTERS // 5)

    seen = 0
    for segment in words.segments(blocks(), ["<s>"], "gpt2"):
        seen += len(segment)
        kept = (len(blocks_read) - 1) * words.BLOCK_CHARACTERS - seen
        assert kept < 2 * words.PART_CHARACTERS
    assert seen == 20 * (words.BLOCK_CHARACTERS // 5 * 5)


def test_a_counting_process_imports_neither_numpy_nor_the_package() -> None:
    command = [sys.executable, "-P", "-X", "importtime", words.__file__, "gpt2"]
    done = subprocess.run(command, input=pickle.dumps(["a a"]), capture_output=True, check=True)
    assert pickle.loads(done.stdout) == {"a": 1, " a": 1}
    seen = done.stderr.decode()
    assert "pickle" in seen and "numpy" not in seen and "jaxformer" not in seen


def test_a_counting_process_that_ends_by_itself_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match=r"counts words ended with status 1"):
        train_on([["some text" * 50_000]], 300, processes=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": 257},
            (r"vocab_size=257 must be a whole number from 258 \(256 bytes and 2 special tokens\)"),
        ),
        (
            {"vocab_size": 2_000_000},
            r"vocab_size=2000000 must be a whole number from 258 \(.*\) to 1,114,114",
        ),
        ({"special_tokens": ["<s>", "<a>", "<s>"]}, "each once"),
        ({"special_tokens": ["<s>", ""]}, "a string that is not empty"),
        ({"special_tokens": "<s>"}, r"special_tokens='<s>' must be a list"),
        ({"pattern": "gpt4"}, "pattern='gpt4' must be one of gpt2, llama3"),
        ({"processes": 0}, "processes=0 must be at least 1"),
    ],
)
def test_a_faulty_argument_is_refused_with_what_is_allowed(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("some text")
    arguments: dict[str, object] = {"vocab_size": 300, "special_tokens": ["<s>", "<a>"], **changes}
    with pytest.raises(ConfigError, match=message):
        train_bpe(path, **arguments)  # type: ignore[arg-type]


def test_a_faulty_file_is_refused_with_its_name_and_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bpe, "BLOCK_CHARACTERS", 5)
    path = tmp_path / "corpus.txt"
    with pytest.raises(ConfigError, match=r"corpus\.txt cannot be read \(No such file"):
        train_bpe(path, 300)
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory"):
        train_bpe(tmp_path, 300)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"corpus\.txt is empty"):
        train_bpe(path, 300)
    for content, place, byte in (
        ("aé世界".encode() + b"\xff.", 9, "ff"),
        (b"1234\xe4\xb8", 4, "e4"),  # cut off, at the border of two blocks
        (b"1234\xe4\xb8zzzzzzz", 4, "e4"),
    ):
        path.write_bytes(content)
        with pytest.raises(
            ConfigError, match=rf"corpus\.txt: byte {place} \(0x{byte}\) is not UTF-8"
        ):
            train_bpe(path, 300)
    with pytest.raises(ConfigError, match=r"'\\ud800', half a surrogate pair"):
        train_on([["a\ud800b"]], 300)


def test_one_word_of_a_million_letters_is_learned_in_seconds(tmp_path: Path) -> None:
    letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=1_000_000)
    (tmp_path / "word.txt").write_text("".join(letters))
    began = time.monotonic()
    vocab, merges = train_bpe(tmp_path / "word.txt", 400)
    assert len(merges) == 144 and time.monotonic() - began < 60  # it took hours
    assert len(vocab) == 400
