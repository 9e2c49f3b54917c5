"""What is done about input that cannot be used: it stops the run with one message, or it is skipped
and counted by reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxformer.config import ConfigError, Malformed, Undecodable

MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}  # the first bytes of compressed files
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class ErrorPolicy:
    """The settings data.undecodable and data.malformed."""

    undecodable: Undecodable = "refuse"
    malformed: Malformed = "refuse"


STRICT = ErrorPolicy()


class Skipped(dict[str, tuple[int, str]]):
    """What one reading skipped: for each reason the number of times, and the first place."""

    def add(self, reason: str, place: str, count: int = 1) -> None:
        before, first = self.get(reason, (0, place))
        self[reason] = (before + count, first)

    def merge(self, later: Mapping[str, Sequence]) -> None:
        """Adds what a later part of the source skipped; JSON gives lists instead of tuples."""
        for reason, (count, place) in later.items():
            self.add(reason, place, count)

    def lines(self) -> list[str]:
        """A line for each reason."""
        return [
            f"{reason}: {count:,}, the first in {place}" for reason, (count, place) in self.items()
        ]


class RecordError(Exception):
    """A record that cannot be used: the reason it is counted by, and the message, which follows
    the place; `index` is that of the record among those that are encoded together."""

    def __init__(self, reason: str, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.reason, self.index = reason, index


@dataclass
class ErrorHandler:
    """Applies an error policy during one reading of a source; `place` is that of the record that
    was read last."""

    policy: ErrorPolicy = STRICT
    skipped: Skipped = field(default_factory=Skipped)
    place: str = ""

    def malformed(self, record_error: RecordError, place: str) -> None:
        """Raises ConfigError, or counts the record."""
        if self.policy.malformed == "refuse":
            raise ConfigError(f"{place}{record_error} Or skip such records by data.malformed=skip.")
        self.skipped.add(record_error.reason, place)

    def blank(self, place: str) -> None:
        """Counts a document without text."""
        self.skipped.add("blank documents", place)

    def decoded(self, raw: bytes, where: str, offset: int) -> str | None:
        """UTF-8 text, None where it is skipped; `offset` is that of its first byte. Raises
        ConfigError."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            place = f"{where}, byte {offset + error.start}"
            if self.policy.undecodable == "refuse":
                raise _not_utf8(where, offset + error.start, error) from None
        if self.policy.undecodable == "skip":
            self.skipped.add("records with bytes that are not UTF-8", place)
            return None
        text = raw.decode(errors="replace")
        count = text.count(REPLACEMENT) - raw.count(REPLACEMENT.encode())
        self.skipped.add("bytes that are not UTF-8, replaced by U+FFFD", place, count)
        return text


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> ConfigError:
    advice = (
        "Convert it, for example by `iconv -f LATIN1 -t UTF-8`, or set data.undecodable=replace or"
        " skip."
    )
    packed = [suffix for suffix, magic in MAGIC.items() if error.object.startswith(magic)]
    if packed and offset < 4:
        advice = f"It looks compressed: end its name in {packed[0]}."
    byte = error.object[error.start]
    return ConfigError(
        f"{where} is not UTF-8 text: byte 0x{byte:02x} at offset {offset} ({error.reason})."
        f" {advice}"
    )
