"""Which part of a text is for training, and which is held out."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxformer.data.documents import Piece, fingerprint, hash_fraction
from jaxformer.data.source import Scan, Source
from jaxformer.data.store import TokenStore

# With fewer documents to hold out than this the choice by hash could miss, so the end of the text
# is held out.
FEWEST_HELD_OUT = 10

SideName = Literal["train", "validation"]


@dataclass(frozen=True)
class Split:
    """One side of a text: all of it, or what is kept for training, or the `fraction` held out for
    validation.

    Documents are chosen by a hash of their name (a path, or their number in their file), so that
    more text moves none of them. Where there are few documents, the last `fraction` of the tokens,
    or of the records, is held out.
    """

    source: Source
    scan: Scan
    side: Literal["all", SideName] = "all"
    fraction: float = 0.0

    @property
    def name(self) -> str:
        if self.side == "validation":
            return self.side
        return self.source.setting.removeprefix("data.")

    @property
    def by_document(self) -> bool:
        # Both sides are to have so many.
        return self.scan.documents * min(self.fraction, 1 - self.fraction) >= FEWEST_HELD_OUT

    @property
    def bytes(self) -> int:
        """Bytes of text on this side; an expectation where documents are chosen by hash."""
        fractions = {"all": 1.0, "train": 1 - self.fraction, "validation": self.fraction}
        return int(self.scan.bytes * fractions[self.side])

    def rule(self) -> str:
        """Return a description of this side, for messages and digests."""
        if self.side == "all":
            return "all text"
        rule = f"the end of the text, {self.fraction:g} of it"
        if self.by_document:
            rule = f"documents chosen by hash, {self.fraction:g} of it"
        if self.side == "train":
            rule = f"without {rule}"
        return rule

    def identity(self) -> str:
        """Return a digest of the text on this side, known without reading it."""
        return fingerprint(self.scan.content, self.rule())

    def of(self, store: TokenStore) -> TokenStore:
        """Return this side of the text's tokens."""
        if self.side == "all":
            return store
        held_out = self.side == "validation"
        # The same documents as `pieces` gives, by the hashes that the store keeps.
        if self.by_document:
            return store.held_out(self.fraction, inverse=not held_out)
        return store.cut(self.fraction, after=held_out)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of this side's documents, in order; where a document is cut, about as
        many bytes as `of` has tokens."""
        pieces = self.source.pieces()
        train_fraction = 1 - self.fraction
        held_out = self.side == "validation"
        if self.side == "all":
            yield from pieces
        elif self.by_document:
            for piece in pieces:
                if (hash_fraction(piece.document) < self.fraction) is held_out:
                    yield piece
        elif self.source.of_records:
            # A record is whole on one side, so its place decides and not its bytes.
            border = round(self.scan.documents * train_fraction)
            if held_out:
                yield from itertools.islice(pieces, border, None)
            else:
                yield from itertools.islice(pieces, border)
        else:
            # A character that the border cuts goes to neither side.
            border = int(self.scan.bytes * train_fraction)
            for piece in pieces:
                raw = piece.text.encode()
                cut = max(0, border)
                side = raw[:cut]
                if held_out:
                    side = raw[cut:]
                if text := side.decode(errors="ignore"):
                    yield piece._replace(text=text)
                border -= len(raw)
