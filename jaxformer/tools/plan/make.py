"""The plan of a run: what it needs of each device, what a step costs, and what would fit."""

from dataclasses import dataclass

from jaxformer.tools.plan.bound import Bound, Products, bound, mfu_at_most, products
from jaxformer.tools.plan.changes import Change, smallest_changes
from jaxformer.tools.plan.memory import MemoryPlan, cache_bytes, memory_plan
from jaxformer.tools.plan.planned import PlannedRun


@dataclass(frozen=True)
class Plan:
    """The figures of a run before it starts.

    cache: bytes of the key-value cache of one row of model.max_length tokens, on one device.
    mfu: the most that the bound allows, None where a rate of the device is unknown.
    changes: the smallest changes of settings with which it fits; None where it fits as it is, or
        the device's memory is unknown.
    """

    planned: PlannedRun
    memory: MemoryPlan
    cache: float
    products: Products
    bound: Bound
    mfu: float | None
    changes: list[Change] | None

    def seconds_for(self, tokens: int) -> float | None:
        """The least time for this many tokens; None where a rate of the device is unknown."""
        step = self.bound.seconds
        return None if step is None else step * -(-tokens // self.planned.tokens_per_step)


def make_plan(planned: PlannedRun) -> Plan:
    """The plan of a run. No array is made, and nothing is traced but the optimizer's state."""
    memory = memory_plan(planned)
    least = bound(planned, memory)
    return Plan(
        planned,
        memory,
        cache_bytes(planned),
        products(planned),
        least,
        mfu_at_most(planned, least.seconds),
        smallest_changes(planned) if memory.fits is False else None,
    )
