"""Stop strings: found across the borders of tokens, in all tokens and in a
stream."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from shapes import weights_and_tokens

import jaxformer as jf
from jaxformer.cli import sample
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.stop_strings import StopStrings


class Letters:
    """A tokenizer of short words over two letters, and an id without a text."""

    texts = (b"", b"a", b"b", b"ab", b"ba", b"aa", b"bb", b"aba", b"abab", b"\xc3", b"\xa9")
    vocab_size = len(texts)

    def raw(self, token):
        return self.texts[token]


def decoded(tokens):
    return b"".join(Letters.texts[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("stops", [("abba",), ("aab", "bbb"), ("baab", "aa"), ("é",)], ids=str)
def test_a_text_stops_with_the_token_that_completes_a_stop_string(stops):
    rows = np.random.default_rng(0).integers(0, len(Letters.texts), (200, 12)).tolist()
    finder, stopped = StopStrings(stops, Letters()), 0
    for row in rows:
        has = [any(stop in decoded(row[:count]) for stop in stops) for count in range(1, 13)]
        assert finder.length(row) == (has.index(True) + 1 if any(has) else 0)
        stopped += any(has)
    assert 20 < stopped < 200


def test_stop_strings_that_are_none_or_lack_a_tokenizer_have_one_message():
    params, config, prompt = weights_and_tokens("llama")
    with pytest.raises(jf.ConfigError, match=r"stop_strings='end' must be a tuple of texts"):
        jf.generate(params, config, prompt, 4, temperature=0, stop_strings="end")
    with pytest.raises(jf.ConfigError, match=r"stop_strings=\['aa'\].*give tokenizer="):
        jf.generate(params, config, prompt, 4, temperature=0, stop_strings=["aa"])


def test_a_text_that_is_shown_as_it_grows_is_cut_where_the_text_is(monkeypatch, capsys):
    ids = [*"one two\nthree \n\nfour é".encode()]
    model = SimpleNamespace(
        text_after=lambda start, made: bytes(made).decode(errors="replace"),
        before_end=lambda made: made,
        context=lambda: 99,
    )
    for size in range(1, len(ids) + 1):
        pieces = [np.array([ids[first : first + size]]) for first in range(0, len(ids), size)]
        monkeypatch.setattr(sample, "_pieces", lambda *_, pieces=pieces: pieces)
        for stops, text in ((("\n\n", "thr!", "o\n\n"), "one two\nthree "), (("four!",), None)):
            text = text or bytes(ids).decode()
            args = SimpleNamespace(stop_strings=stops, max_new_tokens=9)
            assert sample._print_growing(model, args, {}, [], []) == text
            assert capsys.readouterr().out == text + "\n"


class Named:
    """A tokenizer in which id i is the text <i>."""

    vocab_size = 61

    def raw(self, token):
        return f"<{token}>".encode()


@functools.cache
def free():
    params, config, prompt = weights_and_tokens("llama")
    return np.asarray(jf.generate(params, config, prompt, 12, temperature=0))


def test_generation_and_streams_stop_there():
    params, config, prompt = weights_and_tokens("llama")
    first, second = free()[0, 4:6].tolist()
    rules = {"stop_strings": (f"<{first}><{second}>",), "tokenizer": Named(), "temperature": 0}
    made = np.asarray(jf.generate(params, config, prompt, 12, **rules))
    lengths = []
    for row, expected in zip(made, free(), strict=True):
        ends = [i + 2 for i in range(11) if tuple(expected[i : i + 2]) == (first, second)]
        lengths.append(min(ends, default=12))
        np.testing.assert_array_equal(row[: lengths[-1]], expected[: lengths[-1]])
        assert not row[lengths[-1] :].any()
    assert lengths[0] <= 6
    made = made[0, : lengths[0]]
    rules["key"] = jax.random.key(0)
    pieces = [*stream_tokens(params, config, prompt[:1], 12, chunk=4, **rules)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1)[0, : lengths[0]], made)
    assert len(pieces) == -(-lengths[0] // 4)
