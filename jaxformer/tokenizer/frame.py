"""The special tokens around one text, or around two that are read together, and the token types."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers

from jaxformer.files import ConfigError


class Slot(NamedTuple):
    """A special token, or None where the next text goes, and the token type."""

    token: int | None
    kind: int


class Frame(NamedTuple):
    """The special tokens and the texts, one or two, in their order."""

    slots: tuple[Slot, ...]

    @property
    def added(self) -> int:
        """The number of special tokens."""
        return sum(slot.token is not None for slot in self.slots)

    def fill(self, texts: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the special tokens and of the texts between them, and the type of each token:
        both int32 [tokens]."""
        remaining = iter(texts)
        pieces = [
            np.asarray(next(remaining) if slot.token is None else [slot.token], np.int32)
            for slot in self.slots
        ]
        kinds = np.array([slot.kind for slot in self.slots], np.int32)
        return np.concatenate(pieces), np.repeat(kinds, [len(piece) for piece in pieces])

    @classmethod
    def of(
        cls, backend: tokenizers.Tokenizer, name: str, texts: int, origin: str
    ) -> "Frame | None":
        """The frame that the post-processor of a tokenizer.json puts around one text or two; None
        where it adds nothing. `name` is a text that the backend can encode."""
        if not backend.num_special_tokens_to_add(texts == 2):
            return None
        encoding = backend.encode(name, name if texts == 2 else None)
        slots: list[Slot] = []
        previous = None  # the index of the text of the previous token
        for token, text, kind in zip(
            encoding.ids, encoding.sequence_ids, encoding.type_ids, strict=True
        ):
            if text is None:
                slots.append(Slot(token, kind))
            elif text != previous:
                slots.append(Slot(None, kind))
            previous = text
        order = [text for text in encoding.sequence_ids if text is not None]
        text_slots = sum(slot.token is None for slot in slots)
        if text_slots != texts or order != sorted(order):
            raise ConfigError(
                f"{origin}: its post_processor does not put each of {texts} texts once and in their"
                " order: mend its template."
            )
        return cls(tuple(slots))


def closed(start: list[int], stop: list[int], texts: int) -> Frame:
    """The frame for a tokenizer without a template: `start`, then each text with `stop` after it.
    The type of a token is the index of its text."""
    slots = [Slot(token, 0) for token in start]
    for kind in range(texts):
        slots += [Slot(None, kind), *(Slot(token, kind) for token in stop)]
    return Frame(tuple(slots))
