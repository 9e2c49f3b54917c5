"""The quickstart, with a loss or an update that is no number where the environment says: a batch
with the token BAD_TOKEN, or the update of step BAD_UPDATE (counted from 1). After BAD_STEPS bad
steps the next one ends the run."""

import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxformer.config.config_file import read_config
from jaxformer.runs.objectives import OBJECTIVES
from jaxformer.training.optimizers.run_optimizer import OPTIMIZERS

config = read_config(Path(__file__).parents[2] / "configs/quickstart.py")
causal, muon = OBJECTIVES["causal"], OPTIMIZERS["muon"]


@functools.wraps(causal.loss)
def loss(params: Any, model: Any, batch: Any, key: Any, **options: Any) -> Any:
    sums = dict(causal.loss(params, model, batch, key, **options))
    bad = (batch["tokens"] == int(os.environ["BAD_TOKEN"])).any()
    total, weight = sums["loss"]
    return sums | {"loss": (total * jnp.where(bad, jnp.nan, 1), weight)}


def update(settings: Any, specs: Any) -> optax.GradientTransformation:
    def poison(updates: Any, count: jax.Array, params: Any = None) -> tuple[Any, jax.Array]:
        factor = jnp.where(count + 1 == int(os.environ["BAD_UPDATE"]), jnp.inf, 1)
        return jax.tree.map(lambda leaf: leaf * factor, updates), count + 1

    whole = optax.GradientTransformation(lambda params: jnp.int32(0), poison)
    return optax.chain(muon.rule(settings, specs), whole)


if "BAD_TOKEN" in os.environ:
    OBJECTIVES["causal"] = causal._replace(loss=loss)
if "BAD_UPDATE" in os.environ:
    OPTIMIZERS["muon"] = muon._replace(rule=update)
if "BAD_STEPS" in os.environ:
    from jaxformer.runs import states, train_run

    states.BAD_STEPS = train_run.BAD_STEPS = int(os.environ["BAD_STEPS"])
