"""Steps that are not finite: left out, up to a limit."""

from collections.abc import Mapping
from typing import Any

from jaxformer.training.loop import diverged
from jaxformer.training.state import TrainState


class SkipSteps:
    """A hook of `fit` with which training goes on after a step that is not finite, whose update
    `make_step` has left out.

    state = jf.fit(step, state, batches, steps=100, hooks=[jf.SkipSteps(limit=10)])

    `skipped` counts these steps, from its initial value on. Raises Diverged at the first one beyond
    `limit`.
    """

    def __init__(self, limit: int = 10, skipped: int = 0) -> None:
        self.limit, self.skipped = limit, skipped

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> None:
        """Does nothing: only steps that are not finite matter."""

    def skips(self, step: int, state: TrainState, metrics: Mapping[str, Any]) -> bool:
        """Counts a step that is not finite."""
        if self.skipped >= self.limit:
            raise diverged(
                step,
                state,
                metrics,
                f", and {self.skipped} steps were skipped before, which is the limit",
            )
        self.skipped += 1
        return True
