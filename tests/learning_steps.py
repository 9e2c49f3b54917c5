"""The step of a small run, its batch and its loss, as the composer makes them."""

import numpy as np
from shapes import LENGTH, model, tokens

from jaxformer.config.run import RunConfig
from jaxformer.config.train import OptimizerConfig, TrainConfig
from jaxformer.runs.objectives import loss_of
from jaxformer.training.step import make_step


def a_run(name="llama", rows_at_once=8, train=None, optimizer=None, **model_changes) -> RunConfig:
    return RunConfig(
        model=model(name, **model_changes),
        train=TrainConfig(**({"batch_size": rows_at_once, "steps": 60} | (train or {}))),
        optimizer=OptimizerConfig(**({"warmup_steps": 5} | (optimizer or {}))),
    )


def a_batch(count=8, seed=0, uneven=True):
    """Rows whose weights differ much, one of them all zero."""
    text = tokens(count, LENGTH + 1, seed)
    weights = np.random.default_rng(seed).integers(0, 2, (count, LENGTH)).astype(np.float32)
    weights *= np.linspace(0, 1, count, dtype=np.float32)[:, None] > 0.1
    return {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "weights": weights if uneven else np.ones_like(weights),
    }


def loss_for(run):
    return loss_of(
        "causal", run.model, label_smoothing=run.train.label_smoothing, z_loss=run.train.z_loss
    )


def step_of(run, optimizer, schedule):
    """The step as the composer makes it, for any of the objectives whose loss is the head's."""
    schedules = {"learning_rate": schedule}
    pieces = run.train.n_microbatches
    return make_step(
        loss_for(run),
        optimizer,
        microbatches=pieces,
        seed=run.run.seed,
        schedules=schedules,
        rowwise=not run.model.dropout,
    )
