"""Text on which tokenizers part: every character there is, runs of all kinds, mixed line ends,
code, noise."""

import base64
import random
import unicodedata
from collections.abc import Callable

WORDS = [
    *("the", "The", "don't", "I'LL", "we've", "'S", "1234567", "3.14", "x_1", "__init__"),
    *(
        "naïve",
        "Straße",
        "\u0663\u0664\u0665",
        "Ⅷ",
        "½",
        "²",
        "\ufb01",
        "\u017f",
        "'\u017f",
        "Ǆ",
        "İstanbul",
    ),
    *("東京タワー", "안녕하세요", "नमस्ते", "مرحبا", "שָׁלוֹם", "ไทย", "ქართული"),
]
MARKS = [
    "👩\u200d👩\u200d👧",
    "👍🏽",
    "🇩🇪",
    "❤\ufe0f",
    "e\u0301\u0323",
    "\u200d",
    "\ufeff",
    "\u1e9b\u0323",
]
SPACES = " \n\t\r\u00a0\u3000\u2028\x0b\x0c\x85\u200b"
CODE = "\ndef f(x_1, *y):\n\tif x != 0x1F:\r\n        return [a<<b for a in y]  # <|endoftext|>\n"


def characters() -> list[str]:
    """Every code point that stands for something; of the rest some."""
    some = range(0x110000)
    kept = [
        point
        for point in some
        if unicodedata.category(chr(point)) not in ("Cs", "Co", "Cn") or point % 97 == 0
    ]
    return [chr(point) for point in kept if not 0xD800 <= point < 0xE000]


def hard_text(size: int, seed: int = 0) -> str:
    """At least so many characters, the same for a seed."""
    r = random.Random(seed)
    drawn = characters()
    r.shuffle(drawn)
    makers: list[Callable[[], str]] = [
        lambda: " ".join(r.choices(WORDS, k=r.randint(1, 30))),
        lambda: "".join(r.choices(MARKS, k=r.randint(1, 9))),
        lambda: r.choice(f"{SPACES}01aé'-") * r.choice([1, 2, 3, 7, 50, 300]),
        lambda: "".join(r.choices(SPACES, k=r.randint(1, 40))),
        lambda: "".join(r.choices("'sStTrRelLvVdDmM ", k=r.randint(1, 20))),
        lambda: "".join(r.choices(drawn, k=r.randint(1, 30))),
        lambda: "".join(map(chr, r.choices(range(160), k=r.randint(1, 40)))),
        lambda: base64.b64encode(r.randbytes(r.randint(1, 300))).decode(),
        lambda: CODE,
        lambda: (
            r.choice(["!?...---===", "<<<>>>", "\u201c\u201d\u2018\u2019", "$€£", "\x00\x01"])
            * r.randint(1, 20)
        ),
    ]
    made, length = ["".join(drawn)], len(drawn)
    while length < size:
        made.append(r.choice(makers)())
        length += len(made[-1])
    return "".join(made)
