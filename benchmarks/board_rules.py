"""The rules of the board: which learning rates are tried, which horizons are run until the steps
that a seed needs lie between two of them, and what a row may claim."""

import math
from collections.abc import Mapping

from intervals import Interval, is_apart

FACTOR = 0.85  # between the steps of neighboring rungs
LONGEST_RUNG, SHORTEST_RUNG = -4, 10
LEAST_SEEDS = 5  # whose smallest and largest number enclose the median with 94 %


def rung_steps(base_steps: int, rung: int) -> int:
    """The horizon of a rung: the steps of a whole run, at whose end its schedule ends."""
    return round(base_steps * FACTOR**rung)


def next_exponent(losses: Mapping[float, float]) -> float:
    """The learning rate to try next, as x of center * 2^x, from the losses of those tried.

    First the center, its double and its half. Then a step of 2 beyond the best, where that is the
    highest or the lowest one; else the middle of the wider gap beside it, or, of equal gaps, of
    that towards the lower loss. A run that diverged has an infinite loss.
    """
    for exponent in (0.0, 1.0, -1.0):
        if exponent not in losses:
            return exponent
    best = min(losses, key=lambda exponent: losses[exponent])
    if best == max(losses):
        return best + 1
    if best == min(losses):
        return best - 1
    above = min(exponent for exponent in losses if exponent > best)
    below = max(exponent for exponent in losses if exponent < best)
    if above - best == best - below:
        neighbor = above if losses[above] < losses[below] else below
    else:
        neighbor = above if above - best > best - below else below
    return (best + neighbor) / 2


def next_rung(losses: Mapping[int, float], target: float, first: int) -> int | None:
    """The rung that a seed runs next, from the losses of its rungs so far; None at the end.

    It begins with `first` and goes one rung shorter while the target is reached, or one longer
    while it is not, until one rung reaches it and its neighbor does not, or the ladder ends.
    """
    if not losses:
        return min(max(first, LONGEST_RUNG), SHORTEST_RUNG)
    reached = {loss <= target for loss in losses.values()}
    if len(reached) == 2:
        return None
    rung = max(losses) + 1 if True in reached else min(losses) - 1
    return rung if LONGEST_RUNG <= rung <= SHORTEST_RUNG else None


def steps_to_reach(losses: Mapping[int, float], target: float) -> float:
    """The horizon whose final loss is the target, from the final losses by steps: interpolated
    between two neighbors, the loss as linear in the logarithm of the steps.

    Infinite where the longest horizon does not reach it, and the steps of the shortest one where
    that reaches it. Of several crossings the longest counts.
    """
    longer: int | None = None
    for steps in sorted(losses, reverse=True):
        if losses[steps] > target:
            if longer is None:
                return math.inf
            if losses[steps] == math.inf:
                return longer
            share = (target - losses[longer]) / (losses[steps] - losses[longer])
            return math.exp((1 - share) * math.log(longer) + share * math.log(steps))
        longer = steps
    return math.inf if longer is None else longer


def verdict(interval: Interval, baseline: Interval, seeds: int) -> str:
    """What a row may claim: "faster" or "slower" only if its interval lies apart from that of the
    baseline."""
    if seeds < LEAST_SEEDS:
        return "too few seeds"
    if not is_apart(interval, baseline["low"]) or not is_apart(interval, baseline["high"]):
        return "not told apart"
    if not is_apart(baseline, interval["low"]):
        return "not told apart"
    return "faster" if interval["high"] < baseline["low"] else "slower"
