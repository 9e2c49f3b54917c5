"""Evaluation: a model's loss on held-out text, per token and per byte."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer import data
from jaxformer.checkpoint import load
from jaxformer.config import ConfigError, ModelConfig, RunConfig
from jaxformer.config_file import read_config
from jaxformer.params import Params
from jaxformer.sharding import MESH_AXES, batch_sharding
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

    `token_bytes` [V] counts the UTF-8 bytes each token stands for. Bits are those of all tokens, ends of text counted in.
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


def evaluate_run(path: str | Path, validation: str = "", step: int | None = None) -> Evaluation:
    """Evaluates a run's checkpoint (the newest, or that of `step`) on the text `validation`, or on what the run held out.

    Raises ConfigError if `path` is no run that can be read, or there is no text to evaluate on.
    """
    model = load(path, step)
    run = _on_text(read_config(Path(path) / "config.json"), Path(path), validation)
    store = data.prepare(run).validation
    if store is None or model.tokenizer is None:
        raise ConfigError(f"{path} held out no text: name some, as in --data.validation PATH.")
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1, 1), MESH_AXES)
    rows = run.train.batch_size // run.train.microbatches
    evaluate = make_evaluate(model.config, mesh, model.tokenizer.token_bytes())
    return evaluate(model.params, data.evaluation_batches(store, run.data, rows))


def _on_text(run: RunConfig, path: Path, validation: str) -> RunConfig:
    """`run` with the tokenizer it was trained with, reading only the text to evaluate on where that stands apart."""
    text = validation or run.data.validation
    if text:
        data.find_source(text, "data.validation", run.data.text_field)
    texts = dataclasses.replace(run.data, train=text, validation=text) if text else run.data
    return dataclasses.replace(
        run, data=texts, tokenizer=dataclasses.replace(run.tokenizer, path=str(path / "tokenizer.json"))
    )
