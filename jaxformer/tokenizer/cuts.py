"""Where a text may be cut so that the ids of its parts, joined, are those of the text."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer.files import ConfigError
from jaxformer.tokenizer.pieces import ANY_CHARACTER
from jaxformer.tokenizer.words import WORD_PATTERNS

PART_CHARACTERS = 1 << 16  # characters of a part, where the text can be cut
LONGEST_UNCUT = 1 << 28  # characters of a stream that are kept in memory without a cut

SPACES = r"(?<=\S)(?=[ \t\r\n])"

# Pre-tokenizers that split a text at every white space, whatever is next to it.
WORD_BY_WORD = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
CHARACTER_BY_CHARACTER = {
    "type": "Split",
    "pattern": {"Regex": ANY_CHARACTER},
    "behavior": "Isolated",
    "invert": False,
}


def pattern_of(spec: dict[str, Any]) -> str | None:
    """The name of the entry of `WORD_PATTERNS` by which a byte-level tokenizer.json splits text;
    None for another pattern."""
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
    """The positions where a text may be cut, as a regular expression; empty where the text must not
    be cut. `names` are names of tokens, which are neither cut nor separated from the text next to
    them."""

    pattern: str
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: dict[str, Any], names_are_tokens: bool) -> "Cuts":
        """The cuts for a tokenizer.json; without a pattern where it may read more than a word at a
        time. `names_are_tokens` says that names of special tokens in a text are these tokens."""
        added = [
            token for token in spec["added_tokens"] if names_are_tokens or not token["special"]
        ]
        return cls(_cut_pattern(spec, added), tuple(token["content"] for token in added))

    def blocks(self, chunks: Iterable[str]) -> Iterator[str]:
        """The parts of a text that comes in chunks of any size, in the memory of a few parts.
        Raises ConfigError for more than LONGEST_UNCUT characters that cannot be cut."""
        pending: list[str] = []
        size, enough = 0, 2 * PART_CHARACTERS
        for chunk in chunks:
            pending.append(chunk)
            size += len(chunk)
            if size >= enough:
                *complete, remainder = self.parts("".join(pending))
                yield from complete
                pending, size = [remainder], len(remainder)
                if size > LONGEST_UNCUT:
                    raise ConfigError(
                        f"the text has no place to cut it, such as a space, in {size:,} characters:"
                        " give it in parts."
                    )
                # Text that cannot be cut is searched again only when it has doubled, so that the
                # time stays linear in its length.
                enough = max(2 * PART_CHARACTERS, 2 * size)
        yield from self.parts("".join(pending))

    def parts(self, text: str) -> Iterator[str]:
        """The parts of a text, of about PART_CHARACTERS characters, and more only where it cannot
        be cut."""
        start, reach = 0, PART_CHARACTERS
        while self.pattern and start + 2 * reach < len(text):
            if cut := self._last(text, start + 1, start + reach):
                yield text[start:cut]
                start, reach = cut, PART_CHARACTERS
            else:
                reach *= 2
        yield text[start:]

    def _last(self, text: str, start: int, stop: int) -> int | None:
        """The last position to cut between `start` and `stop`; None where there is none."""
        import regex  # its start takes 25 ms, and short texts are not cut

        # (?r) searches from the end. A look-behind sees what is before `pos`; a look-ahead does not
        # see what is after `endpos`.
        while match := regex.search(f"(?r){self.pattern}", text, pos=start, endpos=stop):
            if not self._within_a_name(text, match.start()):
                return match.start()
            stop = match.start()
        return None

    def _within_a_name(self, text: str, cut: int) -> bool:
        """Whether a cut is in or next to a name, or may be once more text follows."""
        for name in self.names:
            for start in range(max(0, cut - len(name)), cut + 1):
                if name.startswith(text[start : start + len(name)]):
                    return True
        return False


def _cut_pattern(spec: dict[str, Any], added: Sequence[dict[str, Any]]) -> str:
    """The regular expression for `Cuts.pattern`."""
    normalizer, words, model = spec["normalizer"], spec["pre_tokenizer"] or {}, spec["model"]
    if normalizer is None and (pattern := pattern_of(spec)):
        return WORD_PATTERNS[pattern].cuts
    kind = words.get("type")
    if kind in WORD_BY_WORD:
        # BERT's normalizer changes a text character by character; a name that is searched in the
        # normalized text may have another spelling in this one.
        names_as_written = not any(token["normalized"] for token in added)
        bert = normalizer is not None and normalizer["type"] == "BertNormalizer"
        return SPACES if normalizer is None or (bert and names_as_written) else ""
    # Where each character or byte is a token, a text could be cut between any two of them.
    tokens_are_bytes = (
        kind == "ByteLevel"
        and _only_bytes(words)
        and model["type"] == "BPE"
        and not model["merges"]
    )
    tokens_are_characters = words == CHARACTER_BY_CHARACTER
    return SPACES if (tokens_are_characters or tokens_are_bytes) and normalizer is None else ""
