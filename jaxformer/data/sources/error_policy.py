"""What is done about input that cannot be used: it stops the run with one message, or it is skipped
and counted by reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxformer.config.run import Malformed, Undecodable
from jaxformer.files import ConfigError

# The first bytes of compressed files.
MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
REPLACEMENT = "\ufffd"
# The longer ones first, of which UTF-32LE begins with that of UTF-16LE.
BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
# Of four bytes in turn, those that are mostly zero in such a text, and those that hardly ever are.
ZERO_BYTES = {
    "UTF-32LE": ((2, 3), (0,)),
    "UTF-32BE": ((0, 1), (3,)),
    "UTF-16LE": ((1, 3), (0, 2)),
    "UTF-16BE": ((0, 2), (1, 3)),
}
# Shares of zero bytes.
MOSTLY, HARDLY = 0.8, 0.1


@dataclass(frozen=True)
class ErrorPolicy:
    """The settings data.undecodable and data.malformed."""

    undecodable: Undecodable = "refuse"
    malformed: Malformed = "refuse"


STRICT = ErrorPolicy()


class Skipped(dict[str, tuple[int, str]]):
    """What one reading skipped: for each reason the number of times, and the first location."""

    def add(self, reason: str, location: str, count: int = 1) -> None:
        earlier_count, first_location = self.get(reason, (0, location))
        self[reason] = (earlier_count + count, first_location)

    def merge(self, later: Mapping[str, Sequence]) -> None:
        """Adds what a later part of the source skipped; JSON gives lists instead of tuples."""
        for reason, (count, location) in later.items():
            self.add(reason, location, count)

    def lines(self) -> list[str]:
        """A line for each reason."""
        return [
            f"{reason}: {count:,}, the first in {location}"
            for reason, (count, location) in self.items()
        ]


class RecordError(Exception):
    """A record that cannot be used: the reason it is counted by, and the message, which follows
    the location; `index` is that of the record among those that are encoded together."""

    def __init__(self, reason: str, message: str, index: int = 0) -> None:
        super().__init__(message)
        self.reason, self.index = reason, index


@dataclass
class ErrorHandler:
    """Applies an error policy during one reading of a source; `location` is the file and the line
    of the record that was read last."""

    policy: ErrorPolicy = STRICT
    skipped: Skipped = field(default_factory=Skipped)
    location: str = ""

    def malformed(self, error: RecordError, location: str) -> None:
        """Raises ConfigError, or counts the record."""
        if self.policy.malformed == "refuse":
            raise ConfigError(f"{location}{error} Or skip such records by data.malformed=skip.")
        self.skipped.add(error.reason, location)

    def blank(self, location: str) -> None:
        """Counts a document without text."""
        self.skipped.add("blank documents", location)

    def decoded(self, raw: bytes, where: str, offset: int) -> str | None:
        """UTF-8 text, None where it is skipped; `offset` is that of its first byte. Raises
        ConfigError."""
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            location = f"{where}, byte {offset + error.start}"
            if self.policy.undecodable == "refuse":
                raise _not_utf8(where, offset + error.start, error) from None
        if self.policy.undecodable == "skip":
            self.skipped.add("records with bytes that are not UTF-8", location)
            return None
        text = raw.decode(errors="replace")
        count = text.count(REPLACEMENT) - raw.count(REPLACEMENT.encode())
        self.skipped.add("bytes that are not UTF-8, replaced by U+FFFD", location, count)
        return text


def wide_encoding(raw: bytes) -> str:
    """The encoding of two or four bytes a character that the beginning of a text is in, by its byte
    order mark or its many zero bytes, which a text in UTF-8 has not; empty for another."""
    for mark, name in BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            return name
    in_turn = [raw[index::4] for index in range(4)]
    shares = [bytes_in_turn.count(0) / max(len(bytes_in_turn), 1) for bytes_in_turn in in_turn]
    for name, (mostly_zero, hardly_zero) in ZERO_BYTES.items():
        is_zero = all(shares[index] >= MOSTLY for index in mostly_zero)
        if is_zero and all(shares[index] <= HARDLY for index in hardly_zero):
            return name
    return ""


def require_content(where: str, beginning: bytes) -> None:
    """Raises ConfigError where the beginning of a file is zero bytes and nothing else."""
    if beginning and not beginning.strip(b"\0"):
        raise ConfigError(
            f"{where} is no text: its first {len(beginning):,} bytes are all zero, as of a file"
            " that was reserved and never written. Make or fetch it again."
        )


def is_wide(where: str, encoding: str) -> ConfigError:
    """The error of a text in an encoding that `wide_encoding` found."""
    return ConfigError(
        f"{where} is not UTF-8 text but {encoding}: convert it by `iconv -f {encoding} -t UTF-8`."
    )


def _not_utf8(where: str, offset: int, error: UnicodeDecodeError) -> ConfigError:
    if not offset - error.start and (encoding := wide_encoding(error.object)):
        return is_wide(where, encoding)
    advice = (
        "Convert it from its encoding, for example by `iconv -f LATIN1 -t UTF-8` if that is"
        " Latin-1, or set data.undecodable=replace or skip."
    )
    packed = [suffix for suffix, magic in MAGIC.items() if error.object.startswith(magic)]
    if packed and offset < 4:
        advice = f"It looks compressed: end its name in {packed[0]}."
    byte = error.object[error.start]
    return ConfigError(
        f"{where} is not UTF-8 text: byte 0x{byte:02x} at offset {offset} ({error.reason})."
        f" {advice}"
    )
