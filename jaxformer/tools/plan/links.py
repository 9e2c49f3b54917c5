"""The bytes that a device sends over its links, which a plan and a compiled program share."""

from typing import NamedTuple


class Collective(NamedTuple):
    """Collectives of one kind and purpose in a step.

    `bytes` is the size of the array that one device has whole: the result of an all-gather, the
    operand of the others; of all `times` together. `devices` is the size of a group.
    """

    kind: str
    purpose: str
    axis: str
    times: int
    bytes: float
    devices: int

    def sent(self, platform: str) -> float:
        """The bytes that each device sends at least."""
        return sent_bytes(self.kind, self.bytes, self.devices, platform)


def sent_bytes(kind: str, size: float, devices: int, platform: str) -> float:
    """The least bytes that each device of a group sends for a collective of `size` bytes, as in a
    ring (Patarasuk and Yuan 2009); the switches between GPUs can sum, so that each sends its
    operand of an all-reduce once. A collective-permute sends its operand."""
    if kind == "collective-permute":
        return size
    share = (devices - 1) / devices
    if kind != "all-reduce":
        return size * share
    return size if platform == "gpu" else 2 * share * size


def link_bytes(collectives: list[Collective], platform: str) -> float:
    """The least bytes that a device sends in a step."""
    return sum(collective.sent(platform) for collective in collectives)
