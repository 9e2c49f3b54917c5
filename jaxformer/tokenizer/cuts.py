"""Where a text may be cut so that the ids of its parts are those of the whole."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer.files import ConfigError
from jaxformer.tokenizer.pieces import ANY_CHARACTER
from jaxformer.tokenizer.words import WORD_PATTERNS

PART_CHARACTERS = 1 << 16  # characters of a part, where the text has a place to cut
MOST_HELD = 1 << 28  # characters of a stream that are held without a place to cut

SPACES = r"(?<=\S)(?=[ \t\r\n])"

# Pre-tokenizers that split a text at every white space, whatever stands around it.
WORD_BY_WORD = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
CHARACTER_BY_CHARACTER = {
    "type": "Split",
    "pattern": {"Regex": ANY_CHARACTER},
    "behavior": "Isolated",
    "invert": False,
}


def pattern_of(spec: dict[str, Any]) -> str | None:
    """Which of `WORD_PATTERNS` a byte-level tokenizer.json splits text by; None for another."""
    words = spec["pre_tokenizer"] or {}
    if words.get("type") == "ByteLevel":
        return "gpt2" if words["use_regex"] and not words["add_prefix_space"] else None
    steps = words.get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"] or not _only_bytes(steps[1]):
        return None
    split = steps[0]
    if split["behavior"] != "Isolated" or split["invert"]:
        return None
    names = {pattern.words: name for name, pattern in WORD_PATTERNS.items()}
    return names.get(split["pattern"].get("Regex"))


def _only_bytes(step: dict[str, Any]) -> bool:
    """Whether a ByteLevel pre-tokenizer writes bytes as characters and does nothing else."""
    return not step["use_regex"] and not step["add_prefix_space"]


@dataclass(frozen=True)
class Cuts:
    """The places between words, by a regular expression; empty where none is known. A name of
    `names` is neither cut nor separated from the text around it."""

    places: str
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: dict[str, Any], names_are_tokens: bool) -> "Cuts":
        """Those of a tokenizer.json; none where it may read more than a word at a time."""
        added = [
            token for token in spec["added_tokens"] if names_are_tokens or not token["special"]
        ]
        return cls(_places(spec, added), tuple(token["content"] for token in added))

    def blocks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The parts of a text that comes in chunks of any size, in the memory of a few parts."""
        held: list[str] = []
        size, enough = 0, 2 * PART_CHARACTERS
        for chunk in chunks:
            held.append(chunk)
            size += len(chunk)
            if size >= enough:
                *parts, rest = self.parts("".join(held))
                yield from parts
                held, size = [rest], len(rest)
                if size > MOST_HELD:
                    raise ConfigError(
                        f"the text has no place to cut it, such as a space, in {size:,} characters:"
                        " give it in parts."
                    )
                # A text without a place to cut is searched again only when it has doubled, so that
                # the time stays linear in its length.
                enough = max(2 * PART_CHARACTERS, 2 * size)
        yield from self.parts("".join(held))

    def parts(self, text: str) -> Iterator[str]:
        """The parts of a text, of about PART_CHARACTERS characters, and more only where there is no
        place to cut."""
        start, reach = 0, PART_CHARACTERS
        while self.places and start + 2 * reach < len(text):
            if cut := self._last(text, start + 1, start + reach):
                yield text[start:cut]
                start, reach = cut, PART_CHARACTERS
            else:
                reach *= 2
        yield text[start:]

    def _last(self, text: str, start: int, stop: int) -> int | None:
        """The last place to cut between `start` and `stop`; None where there is none."""
        import regex

        # (?r) searches from the end. A look-behind sees what is before `pos`, a look-ahead nothing
        # after `endpos`.
        while found := regex.search(f"(?r){self.places}", text, pos=start, endpos=stop):
            if not self._within_a_name(text, found.start()):
                return found.start()
            stop = found.start()
        return None

    def _within_a_name(self, text: str, cut: int) -> bool:
        """Whether a name touches a place, or may touch it where the text goes on after its end."""
        for name in self.names:
            for at in range(max(0, cut - len(name)), cut + 1):
                if name.startswith(text[at : at + len(name)]):
                    return True
        return False


def _places(spec: dict[str, Any], added: Sequence[dict[str, Any]]) -> str:
    """The regular expression for `Cuts.places`."""
    normalizer, words, model = spec["normalizer"], spec["pre_tokenizer"] or {}, spec["model"]
    if normalizer is None and (pattern := pattern_of(spec)):
        return WORD_PATTERNS[pattern].cuts
    kind = words.get("type")
    if kind in WORD_BY_WORD:
        # BERT's normalizer changes a text character by character; a name that is looked for in the
        # normalized text may be spelled otherwise in this one.
        found_as_written = not any(token["normalized"] for token in added)
        bert = normalizer is not None and normalizer["type"] == "BertNormalizer"
        return SPACES if normalizer is None or (bert and found_as_written) else ""
    # Where each character or byte is a token, every place between two of them would do.
    bytes_alone = kind == "ByteLevel" and _only_bytes(words)
    singly = words == CHARACTER_BY_CHARACTER or (
        bytes_alone and model["type"] == "BPE" and not model["merges"]
    )
    return SPACES if singly and normalizer is None else ""
