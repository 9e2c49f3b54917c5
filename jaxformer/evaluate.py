"""Evaluation: a model's loss on held-out text, per token and per byte."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import ModelConfig
from jaxformer.params import Params
from jaxformer.sharding import batch_sharding
from jaxformer.train.step import Batch, loss_sums

Evaluation = dict[str, float]


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This process's rows of a batch as global arrays on the mesh."""
    where = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(where, rows) for name, rows in batch.items()}


def make_evaluate(
    config: ModelConfig, mesh: Mesh, token_bytes: np.ndarray
) -> Callable[[Params, Iterable[Batch]], Evaluation]:
    """A function of params and batches to `val_loss` (nats a token) and `val_bits_per_byte`.

    `token_bytes` [V] counts the UTF-8 bytes each token stands for; bits are those of all tokens, the end of a text counted in.
    """

    @jax.jit
    def nats_of(params: Params, batch: Batch) -> jax.Array:
        return loss_sums(params, config, batch)[1]

    def evaluate(params: Params, batches: Iterable[Batch]) -> Evaluation:
        sums: list[Any] = []
        tokens = length = 0.0
        with jax.set_mesh(mesh):
            for batch in batches:
                sums.append(nats_of(params, place_batch(batch, mesh)))
                tokens += float(batch["weights"].sum())
                length += float((token_bytes[batch["targets"]] * batch["weights"]).sum())
                if len(sums) > 2:
                    sums[-3].block_until_ready()  # a few batches ahead, not all of them
        nats = math.fsum(float(s) for s in sums)
        return {"val_loss": nats / max(tokens, 1), "val_bits_per_byte": nats / math.log(2) / max(length, 1)}

    return evaluate
