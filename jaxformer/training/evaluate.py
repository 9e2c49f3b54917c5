"""Evaluation over held-out batches: sums and weights are added separately and divided once."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxformer.arrays.mesh import place_batch
from jaxformer.cluster.signals import current
from jaxformer.training.state import mesh_of, on_mesh
from jaxformer.training.step import Batch, Loss, checked_sums

Totals = dict[str, tuple[float, float]]
AHEAD = 2  # batches that are computed while the sums of one are waited for


def make_totals(sums: Loss) -> Callable[[Any, Iterable[Batch]], Totals]:
    """A function of params and batches to the total (sum, weight) of each entry of `sums`, added in
    float64.

    Both are summed on the devices, so that with several processes each counts the rows of all.
    """
    program = jax.jit(lambda params, batch: checked_sums(sums(params, batch, None)))

    def totals(params: Any, batches: Iterable[Batch]) -> Totals:
        mesh, found = mesh_of(params), []
        for number, batch in enumerate(batches):
            if request := current():
                request.heed(number)
            placed = place_batch(batch, mesh)
            with on_mesh(mesh):
                found.append(program(params, placed))
            if len(found) > AHEAD:
                jax.block_until_ready(found[-AHEAD - 1])
        result = {}
        for name in found[0] if found else ():
            each = [one[name] for one in found]
            result[name] = (
                math.fsum(float(total) for total, _ in each),
                math.fsum(float(weight) for _, weight in each),
            )
        return result

    return totals


def make_evaluate(sums: Loss, batches: Iterable[Batch]) -> Callable[[Any], dict[str, float]]:
    """The `evaluate` of `fit`: the means of `sums` over held-out batches, {"val_loss": ..., ...}.

    `sums` is a loss, or another function (params, batch, None) -> {name: (sum, weight)} with a
    "loss"; `batches` is read anew at each call, so give a list or another object that can be.
    """
    totals = make_totals(sums)

    def evaluate(params: Any) -> dict[str, float]:
        found = totals(params, batches).items()
        return {f"val_{name}": total / (weight or 1) for name, (total, weight) in found}

    return evaluate
