"""The totals of an evaluation over batches: sums and weights are added apart and divided once."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxformer.arrays.mesh import place_batch
from jaxformer.cluster.signals import current
from jaxformer.training.state import mesh_of, on_mesh
from jaxformer.training.step import Batch, Loss, checked_sums

Totals = dict[str, tuple[float, float]]
# The number of batches that are started before the sums of an earlier one are waited for.
AHEAD = 2


def make_totals(sums: Loss) -> Callable[[Any, Iterable[Batch]], Totals]:
    """Return a function of params and batches to the total (sum, weight) of each entry of `sums`,
    added in float64.

    Both are summed on the devices, so that with several processes each counts the rows of all.
    """
    program = jax.jit(lambda params, batch: checked_sums(sums(params, batch, None)))

    def totals(params: Any, batches: Iterable[Batch]) -> Totals:
        mesh = mesh_of(params)
        sums_of_batches: list[Any] = []
        for number, batch in enumerate(batches):
            request = current()
            if request:
                request.heed(number)
            placed = place_batch(batch, mesh)
            with on_mesh(mesh):
                sums_of_batches.append(program(params, placed))
            if len(sums_of_batches) > AHEAD:
                jax.block_until_ready(sums_of_batches[-AHEAD - 1])
        if not sums_of_batches:
            return {}
        result = {}
        for name in sums_of_batches[0]:
            entries = [batch_sums[name] for batch_sums in sums_of_batches]
            result[name] = (
                math.fsum(float(total) for total, _ in entries),
                math.fsum(float(weight) for _, weight in entries),
            )
        return result

    return totals


def make_evaluate(sums: Loss, batches: Iterable[Batch]) -> Callable[[Any], dict[str, float]]:
    """Return the `evaluate` of `fit`: the means of `sums` over held-out batches, {"val_loss": ...,
    ...}.

    `sums` is a loss, or another function (params, batch, None) -> {name: (sum, weight)} with a
    "loss". `batches` is iterated over at each call, so it must be a list or another object that can
    be iterated over repeatedly.
    """
    totals = make_totals(sums)

    def evaluate(params: Any) -> dict[str, float]:
        sums_by_name = totals(params, batches)
        return {
            f"val_{name}": total / (weight or 1) for name, (total, weight) in sums_by_name.items()
        }

    return evaluate
