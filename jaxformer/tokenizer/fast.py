"""tiktoken's core for tokenizers to which it gives the ids of the tokenizers library, several times
as fast."""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.tokenizer.cuts import pattern_of
from jaxformer.tokenizer.pieces import BYTES
from jaxformer.tokenizer.words import WORD_PATTERNS

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

MOST_CHARACTERS = (
    1 << 18
)  # characters of a text: its regular expressions give up at a million white spaces in a row

# A letter or digit that each version of Unicode from 13 to 17 brought: two libraries that agree on
# all have one table.
NEWEST = (
    "\u08be\U00011950\u0870\U00016ac0\U0001df25\U0001e4f0\U0002ebf0\U000105c0\U00010d40\U00010940"
    "\U00011de0"
)


class Fast:
    """The ids of plain text, and of text in which names of special tokens are these where
    `marks`."""

    def __init__(self, core: "tiktoken.Encoding", names: dict[str, int], marks: bool) -> None:
        self._core, self._names, self.marks = core, names, marks
        longest_first = sorted(names, key=len, reverse=True)
        self._parted = (
            re.compile(f"({'|'.join(map(re.escape, longest_first))})").split if names else None
        )

    @classmethod
    def of(cls, spec: dict[str, Any], backend: "tokenizers.Tokenizer") -> "Fast | None":
        """tiktoken's core for a tokenizer.json; None where it is not installed, or ids could
        differ.

        tiktoken merges what makes a token, BPE the two parts that its one merge names. These are
        the same where each token, taken alone, is merged to itself: as long as a token's borders
        stand, what happens inside does not know of the rest. Entries that no merge makes are in no
        text, so the core has no need of them.
        """
        try:
            import tiktoken
        except ImportError:
            return None
        pattern = pattern_of(spec)
        ranks = _ranks(spec, backend) if pattern else None
        if not ranks or not pattern:
            return None
        # Never met: without a special token the core looks for the empty one, at every byte.
        unused = {"\0 not a token": max(backend.get_vocab().values()) + 1}
        core = tiktoken.Encoding(
            pattern,
            pat_str=WORD_PATTERNS[pattern].words,
            mergeable_ranks=ranks,
            special_tokens=unused,
        )
        added = spec["added_tokens"]
        flags = {
            (token["single_word"], token["lstrip"], token["rstrip"], token["normalized"])
            for token in added
        }
        plain = len(flags) <= 1 and not any(flag for found in flags for flag in found[:3])
        fast = cls(core, {token["content"]: token["id"] for token in added}, plain)
        probe = " ".join(f"{letter}a{letter}1 {letter}." for letter in NEWEST)
        return (
            fast
            if fast.encode(probe, False).tolist()
            == backend.encode(probe, add_special_tokens=False).ids
            else None
        )

    def encode(self, text: str, names_are_tokens: bool) -> np.ndarray:
        """The ids of a text of at most LONGEST characters: uint32."""
        if not names_are_tokens or self._parted is None:
            return self._core.encode_to_numpy(text, disallowed_special=())
        rows = []
        for place, part in enumerate(self._parted(text)):
            rows.append(
                np.array([self._names[part]], np.uint32) if place % 2 else self.encode(part, False)
            )
        return np.concatenate(rows)


def _ranks(spec: dict[str, Any], backend: "tokenizers.Tokenizer") -> dict[bytes, int] | None:
    """The bytes of each token with its id, in the order of merges; None where tiktoken would not
    merge as BPE does."""
    model = spec["model"]
    unlike = (
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    )
    if model["type"] != "BPE" or spec["normalizer"] or any(model.get(name) for name in unlike):
        return None
    if not all(token["special"] for token in spec["added_tokens"]):
        return None  # these are tokens in plain text too
    vocab: dict[str, int] = model["vocab"]
    made = ["".join(pair) for pair in model["merges"]]
    order = [vocab[token] for token in made]
    if (
        order != sorted({*order})
        or not BYTES.keys() <= vocab.keys()
        or not {*"".join(made)} <= BYTES.keys()
    ):
        return None
    merge = backend.model.tokenize
    if any(len(merge(token)) > 1 for token in made):
        return None
    # Words are spelled in BYTES, and only merges make longer tokens, so no text reaches another
    # entry: GPT-2's end-of-text where nothing names it special, which is plain text then. The core
    # lacks it.
    others = vocab.keys() - {*made, *BYTES}
    if any(
        vocab[token] in (piece.id for piece in merge(token))
        for token in others
        if {*token} <= BYTES.keys()
    ):
        return None
    return {
        bytes(BYTES[character] for character in token): vocab[token] for token in (*BYTES, *made)
    }
