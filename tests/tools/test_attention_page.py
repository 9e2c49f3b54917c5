"""A page of attention maps holds exactly what it was given, loads nothing from anywhere, and no
token can break it."""

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from jaxformer.files import ConfigError
from jaxformer.tools.attention_page import attention_page, visible

HOSTILE = [
    "</script><b>",
    "<!--",
    "'\"`${1}\\",
    "👩\u200d🚀",
    "\ud800",
    "{{data}}",
    "&lt;",
    "שלום",
    "\u202e",
]
SOURCE, TARGET = ["Der", " Hund", ".\n"], ["<s>", "The", " dog", "."]


def softmax_maps(
    layers: int = 2, heads: int = 3, source: int = len(SOURCE), target: int = len(TARGET)
) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sides = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    scores = {
        kind: np.exp(4 * rng.normal(size=(layers, heads, *shape))) for kind, shape in sides.items()
    }
    scores["decoder"] = np.tril(scores["decoder"])
    return {
        kind: (each / each.sum(-1, keepdims=True)).astype(np.float32)
        for kind, each in scores.items()
    }


def tokens(source: list[str] = SOURCE, target: list[str] = TARGET) -> dict[str, list[str]]:
    return {"source": source, "target": target}


class Page(HTMLParser):
    """What a browser finds in the page: its elements, and the text of its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.data: dict[str, Any] = json.loads(self.texts["data"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        name = self.elements[-1][1].get("id") if self.elements else None
        self.texts[name or ""] = self.texts.get(name or "", "") + data


# the page


def test_the_weights_of_the_page_are_those_given_to_a_hundred_thousandth() -> None:
    maps = softmax_maps()
    for kind, found in Page(attention_page(maps, tokens(), title="t")).data["maps"].items():
        weights = (
            np.frombuffer(base64.b64decode(found["weights"]), "<u2").reshape(found["shape"]) / 65535
        )
        np.testing.assert_allclose(weights, maps[kind], rtol=0, atol=1e-5)
        assert ((weights == 0) == (maps[kind] < 0.5 / 65535)).all()


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_can_change_the_page_around_it(hostile: str) -> None:
    plain = Page(attention_page(softmax_maps(), tokens(), title="t", candidates=[[("x", 0.5)]] * 4))
    strange = [hostile, *TARGET[1:]]
    page = attention_page(
        softmax_maps(), tokens(target=strange), title=hostile, candidates=[[(hostile, 0.5)]] * 4
    )
    found = Page(page)
    assert found.elements == plain.elements
    assert found.data["title"] == hostile
    assert (
        found.data["tokens"]["target"][0] == visible(hostile) == found.data["candidates"][0][0][0]
    )


def test_a_page_asks_for_nothing_from_anywhere() -> None:
    page = attention_page(softmax_maps(), tokens(), title="t")
    addresses = [
        value
        for _, attrs in Page(page).elements
        for name, value in attrs.items()
        if name in ("src", "href")
    ]
    assert addresses == ["data:,"]
    assert not re.findall(
        r"https?:|//\w+\.|url\(|@import|\bimport\b|fetch\(|XMLHttpRequest|WebSocket|sendBeacon",
        page,
    )


def test_white_space_is_seen() -> None:
    assert [visible(text) for text in (" the", "\n", "a\tb", "", "\x00", "Ä")] == [
        "·the",
        "↵",
        "a⇥b",
        "∅",
        "\ufffd",
        "Ä",
    ]


# bad input


@pytest.mark.parametrize(
    ("maps", "words", "said"),
    [
        ({"encoder": np.full((1, 1, 3, 3), np.nan)}, tokens(), "from nan to nan"),
        ({"encoder": np.full((1, 1, 3, 3), -3.5)}, tokens(), "after the softmax"),
        (
            {"decoder": np.broadcast_to(np.float32(0), (30, 20, 300, 300))},
            {"target": ["a"] * 300},
            "54,000,000 weights are too many",
        ),
    ],
)
def test_maps_that_cannot_be_shown_are_refused(
    maps: dict[str, Any], words: dict[str, list[str]], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        attention_page(maps, words, title="t")
    assert said in str(caught.value)


def test_candidates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="not within 0 to 1"):
        attention_page(softmax_maps(), tokens(), title="t", candidates=[[("a", -1.5)]] * 4)
