"""What stands around one text, or around two that are read together: special tokens and types."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxformer.files import ConfigError

if TYPE_CHECKING:
    import tokenizers


class Slot(NamedTuple):
    """A special token, or None for the place of the next text, and the type of its tokens."""

    token: int | None
    kind: int


class Frame(NamedTuple):
    """The special tokens around one text or two, and the places of the texts, in order."""

    slots: tuple[Slot, ...]

    @property
    def added(self) -> int:
        """The number of special tokens."""
        return sum(slot.token is not None for slot in self.slots)

    def fill(self, texts: Sequence[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the texts in their places and of the special tokens, and the type of each:
        both int32 [tokens]."""
        left = iter(texts)
        pieces = [
            np.asarray(next(left) if slot.token is None else [slot.token], np.int32)
            for slot in self.slots
        ]
        kinds = np.array([slot.kind for slot in self.slots], np.int32)
        return np.concatenate(pieces), np.repeat(kinds, [len(piece) for piece in pieces])

    @classmethod
    def of(
        cls, backend: "tokenizers.Tokenizer", name: str, texts: int, origin: str
    ) -> "Frame | None":
        """That of the post-processor of a tokenizer.json for one text or two; None where it adds
        nothing. `name` is a text that the backend can encode.

        Raises ConfigError where the texts are not in their order, or one is there twice.
        """
        if not backend.num_special_tokens_to_add(texts == 2):
            return None
        found = backend.encode(name, name if texts == 2 else None)
        slots: list[Slot] = []
        before = None  # the number of the text of the token before
        marked = zip(found.ids, found.sequence_ids, found.type_ids, strict=True)
        for token, text, kind in marked:
            if text is None:
                slots.append(Slot(token, kind))
            elif text != before:
                slots.append(Slot(None, kind))
            before = text
        order = [text for text in found.sequence_ids if text is not None]
        places = sum(slot.token is None for slot in slots)
        if places != texts or order != sorted(order):
            raise ConfigError(
                f"{origin}: its post_processor does not put each of {texts} texts once and in their"
                " order: mend its template."
            )
        return cls(tuple(slots))


def closed(start: list[int], stop: list[int], texts: int) -> Frame:
    """The frame where a tokenizer has no template: `start`, and each text with `stop` after it,
    whose tokens have the number of their text as type."""
    slots = [Slot(token, 0) for token in start]
    for kind in range(texts):
        slots += [Slot(None, kind), *(Slot(token, kind) for token in stop)]
    return Frame(tuple(slots))
