"""Every kind of tokenizer: what goes in comes out, in one file that the tokenizers library
loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.data import documents as documents
from jaxformer.files import ConfigError
from jaxformer.tokenizer import (
    END_OF_TEXT,
    MARKS,
    SENTINELS,
    Tokenizer,
    byte_tokenizer,
    character_tokenizer,
    train_bpe_tokenizer,
)

TEXTS = [
    "the cat sat on the mat, the cat's hat\n\n  def f(x):\n    return x\n",
    "Grüße, 世界! the the 🙂 12345\t\n",
] * 20
BPE = train_bpe_tokenizer(TEXTS, 300)
KINDS = {"bpe": BPE, "bytes": byte_tokenizer(), "characters": character_tokenizer(TEXTS)}


@settings(max_examples=100)
@given(st.text())
def test_byte_level_tokenizers_encode_any_text(text: str) -> None:
    assert KINDS["bytes"].encode(text) == list(text.encode())
    for kind in ("bpe", "bytes"):
        assert KINDS[kind].decode(KINDS[kind].encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_sum_to_the_bytes_of_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    sizes = tokenizer.token_bytes()
    assert (
        sizes.dtype == np.int32
        and sizes.shape == (tokenizer.vocab_size,)
        and sizes[tokenizer.end_token] == 0
    )
    for text in TEXTS[:2]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and sizes[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_a_special_tokens_name_in_the_text_is_text(kind: str) -> None:
    ids = KINDS[kind].encode(f"a{END_OF_TEXT}b")
    assert KINDS[kind].end_token not in ids
    assert KINDS[kind].decode([*ids, KINDS[kind].end_token]) == f"a{END_OF_TEXT}b"


def test_broken_utf8_decodes_to_replacement_characters() -> None:
    tokenizer = KINDS["bytes"]
    assert tokenizer.decode(np.array([104, 195])) == "h\ufffd"
    assert tokenizer.decode([]) == ""


def test_ids_of_each_kind_are_the_documented_ones() -> None:
    assert (BPE.end_token, BPE.vocab_size) == (0, 300)
    assert (KINDS["bytes"].end_token, KINDS["bytes"].vocab_size) == (256, 257)
    letters = character_tokenizer(["hello", "wörld"])
    assert (
        letters.encode("dehlorwö") == list(range(8))
        and letters.end_token == 8
        and letters.vocab_size == 9
    )


def test_special_tokens_follow_the_end_token_and_are_found_by_their_role(tmp_path: Path) -> None:
    made = {"bpe": train_bpe_tokenizer(TEXTS, 300, MARKS), "bytes": byte_tokenizer(MARKS)}
    for tokenizer in (*made.values(), character_tokenizer(TEXTS, MARKS)):
        first = tokenizer.end_token + 1
        assert [tokenizer.special(role) for role in ("cls", "sep", "mask")] == [
            first,
            first + 1,
            first + 2,
        ]
        assert not {first - 1, first, first + 1, first + 2} & {*tokenizer.ordinary().tolist()}
        assert len(tokenizer.ordinary()) == tokenizer.vocab_size - 4 and not tokenizer.sentinels()
        assert not tokenizer.word_edges()[first - 1 : first + 3].any()
        tokenizer.save(tmp_path / "tokenizer.json")
        assert Tokenizer.load(tmp_path).special("mask") == first + 2
    assert not {*made["bpe"].encode("[CLS][MASK]")} & {1, 2, 3} and made["bpe"].vocab_size == 300
    assert BPE.special("cls") is None and byte_tokenizer(SENTINELS).sentinels() == list(
        range(257, 357)
    )
    with pytest.raises(
        ConfigError,
        match=r"vocab_size=300 must be at least 357: .* and 100 tokens that the objective needs",
    ):
        train_bpe_tokenizer(TEXTS, 300, SENTINELS)


def test_a_word_is_letters_and_digits_with_the_space_before_them() -> None:
    edges = KINDS["bytes"].word_edges()
    text = "é_9 a(b\n1"
    inside = edges[KINDS["bytes"].encode(text)]
    begins = [0, *(np.flatnonzero(~(inside[1:, 0] & inside[:-1, 1])) + 1)]
    parts = [KINDS["bytes"].decode(part) for part in np.split(list(text.encode()), begins[1:])]
    assert parts == ["é_9", " ", "a", "(", "b", "\n", "1"]  # of bytes the space is one of its own
    pieces = Tokenizer(
        tokenizers.Tokenizer(
            tokenizers.models.WordPiece({"a": 0, "##b": 1, "[SEP]": 2, "(": 3}, unk_token="[SEP]")
        )
    )
    assert pieces.word_edges()[:2].tolist() == [[False, True], [True, True]]


def test_an_unseen_character_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="no token for 'é': leave"):
        character_tokenizer(["abc"]).encode("abé")


def test_training_is_deterministic() -> None:
    """Whatever the order of sets, which the seed of hashes changes, and the number of threads."""
    program = (
        "from jaxformer.tokenizer import train_bpe_tokenizer as train; import random\n"
        "draw = random.Random(0)\n"
        "words = [''.join(draw.choices('abcde', k=4)) for _ in range(2000)]\n"
        "print(train([' '.join(words[i::7]) for i in range(7)], 600).fingerprint())"
    )
    root = str(Path(__file__).parents[2])
    prints = set()
    for number in ("1", "3"):
        seeds = {"PYTHONPATH": root, "RAYON_NUM_THREADS": number, "PYTHONHASHSEED": number}
        command = [sys.executable, "-c", program]
        prints.add(subprocess.check_output(command, env=os.environ | seeds, text=True))
    assert len(prints) == 1
    first, second = (train_bpe_tokenizer([text], 300).fingerprint() for text in ("abc", "abd"))
    assert first != second


SPACE = st.text(" \n\t\r", min_size=1, max_size=4)
WORDS = st.builds("{}{}{}".format, st.text("ab.!'é", max_size=5), st.sampled_from("a1é"), SPACE)


@settings(max_examples=100)
@given(st.lists(WORDS, min_size=30, max_size=100))
def test_a_document_in_pieces_encodes_as_the_whole(words: list[str]) -> None:
    text = "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_CHARACTERS", 32)
        pieces = list(documents.in_pieces(text))
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece) <= 64 for piece, _ in pieces)
    assert [token for piece, _ in pieces for token in BPE.encode(piece)] == BPE.encode(text)


def test_a_given_file_keeps_its_own_end_token_and_loses_its_padding(tmp_path: Path) -> None:
    name = "<|im_end|>"
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens([name])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {name}", special_tokens=[(name, 3)]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.end_token == 3
    assert tokenizer.encode("a b a") == [0, 1, 0]
    for past in (4, 2**31):
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {name}", special_tokens=[(name, past)]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ConfigError, match=f"adds the id {past}, and its tokens are 4"):
            Tokenizer.load(tmp_path / "tokenizer.json").frame(1)


def test_a_tokenizer_that_cannot_serve_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer.load(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(
        ConfigError, match=r"is not a tokenizer\.json .*: set tokenizer\.path to a tokenizer\.json"
    ):
        Tokenizer.load(broken)
    BPE.save(broken)
    spec = json.loads(broken.read_text())
    spec["added_tokens"] = []
    spec["model"]["vocab"] = {
        token: index for token, index in spec["model"]["vocab"].items() if token != END_OF_TEXT
    }
    broken.write_text(json.dumps(spec))
    endless = Tokenizer.load(broken)
    assert (
        endless.decode(endless.encode("a cat")) == "a cat"
        and endless.ids() == {}
        and endless.fingerprint()
    )
    for name in ("end_token", "end_tokens", "start_token"):
        with pytest.raises(ConfigError, match=r"broken\.json has no token that ends a document"):
            getattr(endless, name)
    with pytest.raises(ConfigError, match="at least 257"):
        train_bpe_tokenizer(["a"], 100)


def test_a_panic_while_encoding_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(path)
    spec = json.loads(path.read_text())
    # The library gives up a match after ten million steps.
    split = {"type": "Split", "pattern": {"Regex": r"((~@)+)+(~@)+$"}, "behavior": "Isolated"}
    spec["pre_tokenizer"]["use_regex"] = False
    steps = [split | {"invert": False}, spec["pre_tokenizer"]]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    path.write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(path)
    for texts in (["~@" * 60 + "!"], ["~@" * 60 + "!", "a"]):
        with pytest.raises(ConfigError, match=r"tokenizer\.json cannot encode this text: its lib"):
            tokenizer.encode_batch(texts)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=rf"{name} is a device, a pipe or a socket"):
        Tokenizer.load(path)


def mistral_files(
    folder: Path, more: int = 0, special: tuple[str, ...] = ("[INST]",), **config: str
) -> Path:
    """A tokenizer.json that splits text by the pattern of Llama 3, with `more` tokens that no merge
    makes, beside a config.json."""
    vocab = {index: bytes([index]) for index in range(256)}
    vocab |= {256 + index: f"more {index}".encode() for index in range(more)}
    Tokenizer.from_bpe(vocab, [], special, "llama3").save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mistrals_wrong_pattern_is_said_with_its_remedy(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    transformers = pytest.importorskip("transformers")
    written = {"model_type": "mistral", "transformers_version": "4.57.2"}
    # transformers mends vocabularies of more than 100,000 tokens, as Mistral's are.
    wrong = mistral_files(tmp_path / "a", 100_000, **written)
    with pytest.warns(UserWarning, match=r"pattern of Llama 3.*fix_mistral_regex=True"):
        Tokenizer.load(wrong)
    recwarn.clear()
    Tokenizer.load(mistral_files(tmp_path / "b", model_type="llama"))
    Tokenizer.load(mistral_files(tmp_path / "c", special=(), model_type="mistral"))
    assert not recwarn.list

    # What the message says to do mends it: the words are then those of Mistral.
    transformers.AutoTokenizer.from_pretrained(str(wrong), fix_mistral_regex=True).save_pretrained(
        str(wrong)
    )
    recwarn.clear()
    mended = Tokenizer.load(wrong)
    assert not [warning for warning in recwarn if "pattern of Llama 3" in str(warning.message)]
    backend = tokenizers.Tokenizer.from_file(str(wrong / "tokenizer.json"))
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("eBay's 123")]
    assert words == ["e", "Bay", "'s", "Ġ", "1", "2", "3"]
    assert mended.decode(mended.encode("eBay's 123")) == "eBay's 123"
