"""Where a text may be cut so that the ids of its parts are those of the whole."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer.tokenizer.pieces import ANY_CHARACTER
from jaxformer.tokenizer.words import WORD_PATTERNS

PART_CHARACTERS = 1 << 16  # characters of a part, where the text has a place to cut

SPACES = r"(?<=\S)(?=[ \t\r\n])"

# Pre-tokenizers that part a text at every white space whatever stands around it, and normalizers
# that see no further.
WORD_BY_WORD = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
CHARACTER_BY_CHARACTER = {
    "type": "Split",
    "pattern": {"Regex": ANY_CHARACTER},
    "behavior": "Isolated",
    "invert": False,
}


def pattern_of(spec: dict[str, Any]) -> str | None:
    """Which of `WORD_PATTERNS` the words of a byte-level tokenizer.json are; None where they are
    others."""
    words = spec["pre_tokenizer"] or {}
    if words.get("type") == "ByteLevel":
        return "gpt2" if words["use_regex"] and not words["add_prefix_space"] else None
    steps = words.get("pretokenizers", [])
    if (
        [step["type"] for step in steps] != ["Split", "ByteLevel"]
        or steps[1]["use_regex"]
        or steps[1]["add_prefix_space"]
    ):
        return None
    kind = (steps[0]["behavior"], steps[0]["invert"])
    named = {pattern.words: name for name, pattern in WORD_PATTERNS.items()}
    return named.get(steps[0]["pattern"].get("Regex")) if kind == ("Isolated", False) else None


@dataclass(frozen=True)
class Cuts:
    """The places between words, by a regular expression; empty where none is known. `names` are not
    cut, nor cut off."""

    places: str
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: dict[str, Any], names_are_tokens: bool) -> "Cuts":
        """Those of a tokenizer.json; none where it is not known to read its words one by one."""
        added = [
            token for token in spec["added_tokens"] if names_are_tokens or not token["special"]
        ]
        return cls(_places(spec, added), tuple(token["content"] for token in added))

    def blocks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The parts of a text that comes in chunks of any size, in the memory of a few."""
        held: list[str] = []
        size, enough = 0, 2 * PART_CHARACTERS
        for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            if size >= enough:
                *parts, rest = self.parts("".join(held))
                yield from parts
                held, size = [rest], len(rest)
                enough = max(2 * PART_CHARACTERS, 2 * size)
        yield from self.parts("".join(held))

    def parts(self, text: str) -> Iterator[str]:
        """The parts of a text, each of about BLOCK characters; more only where there is no place to
        cut."""
        start, reach = 0, PART_CHARACTERS
        while self.places and start + 2 * reach < len(text):
            if cut := self._last(text, start + 1, start + reach):
                yield text[start:cut]
                start, reach = cut, PART_CHARACTERS
            else:
                reach *= 2
        yield text[start:]

    def _last(self, text: str, start: int, stop: int) -> int | None:
        """The last place in a part of a text."""
        import regex

        while found := regex.search(f"(?r){self.places}", text, pos=start, endpos=stop):
            if not self._within_a_name(text, found.start()):
                return found.start()
            stop = found.start()
        return None

    def _within_a_name(self, text: str, cut: int) -> bool:
        """Whether a name may touch a place, one that is cut short by the end of the text
        included."""
        for name in self.names:
            size = len(name)
            if any(
                name.startswith(text[at : at + size]) for at in range(max(0, cut - size), cut + 1)
            ):
                return True
        return False


def _places(spec: dict[str, Any], added: Sequence[dict[str, Any]]) -> str:
    normalizer, words, model = spec["normalizer"], spec["pre_tokenizer"] or {}, spec["model"]
    if normalizer is None and (pattern := pattern_of(spec)):
        return WORD_PATTERNS[pattern].cuts
    alone = (
        words.get("type") == "ByteLevel"
        and not words["use_regex"]
        and not words["add_prefix_space"]
    )
    singly = words == CHARACTER_BY_CHARACTER or (
        alone and model["type"] == "BPE" and not model["merges"]
    )
    by_word = words.get("type") in WORD_BY_WORD
    lowered = normalizer is not None and any(token["normalized"] for token in added)
    known = normalizer is None or (
        by_word and normalizer["type"] == "BertNormalizer" and not lowered
    )
    return SPACES if known and (singly or by_word) else ""
