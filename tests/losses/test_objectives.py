"""Objectives on plain text, by count: BERT's masks and next sentences, T5's spans, prefixes."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from corpora import cut_rows

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.config.settings import with_settings
from jaxformer.data import NumpyBatch, TokenStore, open_or_build
from jaxformer.data.documents import Piece
from jaxformer.data.masking import MaskedRows
from jaxformer.data.spans import PrefixRows, SpanRows, hidden_counts, random_parts, raw_length
from jaxformer.data.store import Shard
from jaxformer.files import ConfigError
from jaxformer.tokenizer import (
    END_OF_TEXT,
    MARKS,
    SENTINELS,
    Tokenizer,
    byte_tokenizer,
    train_bpe_tokenizer,
)

ROWS = 10_000
PLACES = 60_000  # tokens of a store in which token p is at place p


def _numbers() -> Tokenizer:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(PLACES)}, unk_token="w0")
    )
    backend.add_special_tokens([END_OF_TEXT, *MARKS, *SENTINELS])
    return Tokenizer(backend)


NUMBERS = _numbers()
END, CLS, SEP, MASK, *EXTRA = range(PLACES, PLACES + 104)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("store")
    numbers = np.arange(PLACES, dtype=np.uint16)
    return TokenStore(
        [Shard(folder / "ids", PLACES, 0, 0, {}, {"tokens": lambda: numbers})],
        numbers.dtype,
        "places",
    )


def run_of(family: str, model: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    settings: Any = {"family": family, **(model or {})}
    return RunConfig(model=with_settings(ModelConfig(), settings), data=DataConfig(**data))


def drawn(rows: Any, count: int = ROWS) -> list[NumpyBatch]:
    """10,000 rows, each as if in another epoch."""
    return [rows.row(index % len(rows), np.random.default_rng(index)) for index in range(count)]


def test_masks_have_the_rates_of_bert(places: TokenStore) -> None:
    rows = cut_rows(MaskedRows, places, run_of("encoder", sequence_length=64), NUMBERS)
    ordinary = chosen = 0
    fates: Counter[str] = Counter()
    for row in drawn(rows):
        tokens, targets, told = row["tokens"], row["targets"], row["weights"] > 0
        real = row["segment_ids"] > 0
        text = real & (targets < PLACES)
        assert targets[0] == CLS and targets[real][-1] == SEP and text.sum() + 2 == real.sum()
        assert told.any() and not told[~text].any() and (tokens == targets)[~told].all()
        assert (np.diff(targets[real][1:-1]) == 1).all()
        ordinary += int(text.sum())
        chosen += int(told.sum())
        masked, same = tokens[told] == MASK, tokens[told] == targets[told]
        assert (tokens[told][~masked] < PLACES).all()
        fates["masked"] += int(masked.sum())
        fates["same"] += int(same.sum())
        fates["other"] += int((~masked & ~same).sum())
    assert abs(chosen / ordinary - 0.15) < 0.003
    rates = {name: count / chosen for name, count in fates.items()}
    assert rates == pytest.approx({"masked": 0.8, "same": 0.1, "other": 0.1}, abs=0.01)


def test_half_of_the_second_texts_follow_and_half_are_from_elsewhere(places: TokenStore) -> None:
    run = run_of(
        "encoder", {"head.next_sentence": True, "embedding.token_types": 2}, sequence_length=40
    )
    follow, cuts = 0, set()
    for row in drawn(cut_rows(MaskedRows, places, run, NUMBERS)):
        real = row["targets"][row["segment_ids"] == 1]
        cls, first_end, second_end = np.flatnonzero(real >= PLACES)
        assert cls == 0 and second_end == len(real) - 1
        assert real[[cls, first_end, second_end]].tolist() == [CLS, SEP, SEP]
        first, second = real[1:first_end], real[first_end + 1 : -1]
        assert len(first) and (np.diff(first) == 1).all()
        assert len(second) and (np.diff(second) == 1).all()
        follows = second[0] == first[-1] + 1
        assert row["next_sentence"].tolist() == [follows]
        assert row["next_sentence_weights"].tolist() == [round(0.15 * 40)]
        assert follows or not {*second.tolist()} & {*range(first[0], first[0] + 37)}
        types = [0] * (first_end + 1) + [1] * (len(second) + 1)
        assert row["token_types"][: len(real)].tolist() == types
        follow += int(follows)
        cuts.add(int(first_end))
    assert abs(follow / ROWS - 0.5) < 0.01 and cuts == set(range(2, 38))


WORDS = (
    "the cat_9 satisfactorily understood(über) miscellaneous\n    x = self.foo # a comment, though"
)
BPE = train_bpe_tokenizer([WORDS.replace("_9", "") * 3], 330, MARKS)


def masked_words(folder: Path, tokenizer: Tokenizer) -> Any:
    """Rows of 200 documents of WORDS, masked by words."""
    documents = [Piece(WORDS + "\n", str(index), True) for index in range(200)]
    made = open_or_build(folder, lambda: documents, tokenizer)
    run = run_of("encoder", sequence_length=64, mask_units="words")
    return cut_rows(MaskedRows, made, run, tokenizer)


def test_whole_words_are_told_whole(tmp_path: Path) -> None:
    rows = masked_words(tmp_path, BPE)
    edges = BPE.word_edges()
    inside = edges[BPE.encode(WORDS)]
    begins = np.flatnonzero(~(inside[1:, 0] & inside[:-1, 1])) + 1
    words = [BPE.decode(part) for part in np.split(BPE.encode(WORDS), begins)]
    assert {" cat_9", " satisfactorily", "über", " miscellaneous", ".", "foo"} <= {*words}
    assert len(words) < len(inside)
    ordinary = chosen = 0
    parted: set[tuple[int, int]] = set()
    for row in drawn(rows, 5000):
        targets, told = row["targets"], row["weights"] > 0
        together = edges[targets[1:], 0] & edges[targets[:-1], 1]
        assert (told[1:] == told[:-1])[together].all()
        places = np.flatnonzero(told[1:] != told[:-1])
        parted |= {(int(targets[place]), int(targets[place + 1])) for place in places}
        # Padding is 0, and that is the end token.
        ordinary += int(np.isin(targets, BPE.ordinary()).sum())
        chosen += int(told.sum())
    assert abs(chosen / ordinary - 0.15) < 0.003
    ids = BPE.encode(WORDS)
    assert {(ids[begin - 1], ids[begin]) for begin in begins.tolist()} <= parted


def test_words_are_chosen_and_masked_whole_however_long_they_are(tmp_path: Path) -> None:
    spelled = train_bpe_tokenizer([WORDS], 275, MARKS)  # of up to 13 tokens a word
    rows = masked_words(tmp_path, spelled)
    edges, mask = spelled.word_edges(), spelled.special("mask")
    words: Counter[int] = Counter()  # by their numbers of tokens
    chosen: Counter[int] = Counter()
    fates: Counter[tuple[bool, str]] = Counter()  # by whether a word has several tokens
    for row in drawn(rows, 5000):
        text = np.flatnonzero(np.isin(row["targets"], spelled.ordinary()))
        targets = row["targets"][text]
        joined = edges[targets[1:], 0] & edges[targets[:-1], 1]
        for word in np.split(text, np.flatnonzero(~joined) + 1):
            words[len(word)] += 1
            told = row["weights"][word] > 0
            assert told.all() or not told.any()
            if not told.any():
                continue
            chosen[len(word)] += 1
            masked = row["tokens"][word] == mask
            same = (row["tokens"][word] == row["targets"][word]).all()
            assert masked.all() or not masked.any()
            fate = "masked" if masked.all() else "same" if same else "other"
            fates[len(word) > 1, fate] += 1
    often = {length: number for length, number in words.items() if number > 2500}
    assert len(often) > 5 and max(often) > 8
    for length, number in often.items():
        assert chosen[length] / number == pytest.approx(0.15, abs=0.02), length
    for several in (False, True):
        number = sum(count for (kind, _), count in fates.items() if kind == several)
        assert fates[several, "masked"] / number == pytest.approx(0.8, abs=0.01)
        # Another token is by chance the same.
        assert fates[several, "same"] / number == pytest.approx(0.1, abs=0.01)


def test_masked_documents_are_kept_apart(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MARKS)
    documents = [Piece("abc", "0", True), Piece("defg", "1", True)]
    made = open_or_build(tmp_path, lambda: documents, tokenizer)
    run = run_of("encoder", sequence_length=12, packing="documents")
    row = cut_rows(MaskedRows, made, run, tokenizer)[0]
    assert row["targets"].tolist() == [257, *b"abc", 256, *b"defg", 256, 258, 0]
    assert row["segment_ids"].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 0]


def test_spans_are_those_of_t5(places: TokenStore) -> None:
    assert raw_length(512, 0.15, 3.0) == 568 and hidden_counts(568, 0.15, 3.0) == (85, 28)
    assert hidden_counts(33, 0.15, 3.0) == (5, 2) and hidden_counts(2, 0.15, 3.0) == (1, 1)
    run = run_of("encoder_decoder", sequence_length=114, source_length=512)
    rows = cut_rows(SpanRows, places, run, NUMBERS)
    spans: list[int] = []
    for row in drawn(rows, 1000):
        source, targets = row["source"], row["targets"]
        real_source, real = source[row["source_segment_ids"] == 1], targets[row["segment_ids"] == 1]
        assert row["tokens"][: len(real)].tolist() == [END, *real[:-1]]
        assert row["weights"].sum() == len(real) and real_source[-1] == real[-1] == END
        assert real_source[0] < PLACES and real[0] == EXTRA[0]
        marks = np.flatnonzero(real[:-1] >= PLACES)
        parts = np.split(real[:-1], marks[1:])
        assert [part[0] for part in parts] == EXTRA[: len(parts)]
        assert real_source[real_source > MASK].tolist() == EXTRA[: len(parts)]
        hidden = dict(zip(EXTRA, (part[1:].tolist() for part in parts), strict=False))
        kept = np.flatnonzero(real_source[:-1] >= PLACES)
        assert (np.diff(kept) > 1).all()  # something is kept between two spans
        whole = [token for item in real_source[:-1].tolist() for token in hidden.get(item, [item])]
        assert whole == list(range(whole[0], whole[0] + len(whole)))
        if len(whole) == 568:
            assert len(real_source) == 512 and len(real) == 114
            spans += [len(part) - 1 for part in parts]
        else:
            assert len(whole) == PLACES % 568
            assert len(whole) - len(real_source) + 1 + 2 * len(parts) == len(real) - 1
    assert min(spans) == 1 and abs(np.mean(spans) - 85 / 28) < 1e-9
    assert sum(spans) / (len(spans) / 28 * 568) == 85 / 568
    assert len({spans[i] for i in range(1000)}) > 8


def test_each_way_to_part_a_text_is_as_likely() -> None:
    rng = np.random.default_rng(0)
    ways = Counter(tuple(random_parts(5, 3, rng).tolist()) for _ in range(12_000))
    assert len(ways) == 6 and {sum(way) for way in ways} == {5}
    assert all(abs(count - 2000) < 200 for count in ways.values())
    assert random_parts(1, 1, rng).tolist() == [1]


def test_spans_without_room_are_one_message(places: TokenStore) -> None:
    run = run_of("encoder_decoder", sequence_length=113, source_length=512)
    said = r"sequence_length=113 has no room .* 85 tokens in 28 spans .* at least 114"
    with pytest.raises(ConfigError, match=said):
        cut_rows(SpanRows, places, run, NUMBERS)
    run = run_of("encoder_decoder", sequence_length=114, source_length=512)
    said = r"hides 28 spans .* has 27 sentinels .* raise data\.span_length"
    with pytest.raises(ConfigError, match=said):
        cut_rows(SpanRows, places, run, byte_tokenizer(SENTINELS[:27]))
    dense = run_of("encoder_decoder", noise_density=0.9, sequence_length=999, source_length=64)
    assert cut_rows(SpanRows, places, dense, NUMBERS)[0]


def test_a_prefix_and_what_follows_are_the_text(places: TokenStore) -> None:
    run = run_of("encoder_decoder", sequence_length=30, source_length=20)
    rows = cut_rows(PrefixRows, places, run, NUMBERS)
    cuts = Counter[int]()
    for row in drawn(rows):
        source = row["source"][row["source_segment_ids"] == 1]
        targets = row["targets"][row["weights"] > 0]
        text = [*source[:-1], *targets]
        assert source[-1] == END and text == list(range(text[0], text[0] + len(text)))
        assert row["tokens"][: len(targets)].tolist() == [END, *targets[:-1]]
        cuts[len(source)] += 1
    assert set(cuts) == set(range(2, 21)) and min(cuts.values()) > 400
