"""Short runs of a small model as one program each: a scan over their steps, and the evaluation.

Where a step takes milliseconds, what a command does around it takes longer. The program of a model
and its optimizer is compiled once for all its learning rates and seeds, and the data of a seed is
read once for all models. The loss is that of the train.py line of the same settings, which
`difference_from_a_run` measures, up to the rounding of two programs.
"""

import functools
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from pairing import Answer  # noqa: E402
from seeded import Settings  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer import RunConfig, data  # noqa: E402
from jaxformer.arrays.params import init_params  # noqa: E402
from jaxformer.runs.objectives import loss_of  # noqa: E402
from jaxformer.runs.setup import RunSetup, make_setup  # noqa: E402
from jaxformer.training.compiler_options import compiler_options  # noqa: E402
from jaxformer.training.optimizers.run_optimizer import make_optimizer  # noqa: E402
from jaxformer.training.optimizers.schedules import make_schedule  # noqa: E402
from jaxformer.training.state import on_mesh  # noqa: E402

EVALUATED_ROWS = 128  # of a batch of held-out rows


def setup_of(config: Path, settings: Settings) -> RunSetup:
    """A run of these settings, ready to start."""
    with tempfile.TemporaryDirectory(prefix="jaxformer-scanned-") as folder:
        lines = [f"{name}={value}" for name, value in settings.items()]
        run = jf.load_config(config, [*lines, f"run.dir={Path(folder, 'run')}"])
        return make_setup(run, lambda line: None)


class Scanned:
    """Runs of a config, whose settings name their rate, their seed and their steps."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self._programs: dict[Any, Any] = {}
        self._data: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, settings: Settings) -> Answer:
        """The validation loss (None where it diverged), the number of parameters, the time."""
        begin = time.monotonic()
        shared = settings | {"optimizer.learning_rate": 1.0, "run.seed": 0}
        key = tuple(map(str, shared.items()))
        if key not in self._programs:
            setup = setup_of(self.config, shared)
            self._programs[key] = setup, program_of(setup)
        setup, program = self._programs[key]
        seed = int(str(settings["run.seed"]))
        batches, heldout = self.data_of(setup.run, seed, settings)
        rates = rates_of(setup.run, float(str(settings["optimizer.learning_rate"])))
        with on_mesh(setup.mesh):
            result = jax.device_get(program(jax.random.key(seed), batches, rates, heldout))
        loss = float(np.sum(result["nats"], dtype=np.float64) / np.sum(result["targets"]))
        sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(setup.target.params)]
        finite = math.isfinite(loss) and bool(np.isfinite(result["losses"]).all())
        return {
            "loss": loss if finite else None,
            "parameters": sum(sizes),
            "seconds": time.monotonic() - begin,
        }

    def data_of(self, run: RunConfig, seed: int, settings: Settings) -> tuple[Any, Any]:
        """The batches of all steps and those of the held-out text, stacked."""
        key = run.data, run.tokenizer, run.train.batch_size, run.train.steps, seed
        if key not in self._data:
            setup = setup_of(self.config, settings | {"run.seed": seed})
            batches = [setup.batches[step] for step in range(run.train.steps)]
            assert setup.corpus.validation is not None, "the ablations hold out a part of the text"
            heldout = data.evaluation_batches(setup.corpus.validation, run.data, EVALUATED_ROWS)
            self._data[key] = stacked(batches), stacked([*heldout])
        return self._data[key]


def stacked(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)


def rates_of(run: RunConfig, rate: float) -> Any:
    """The learning rate of each step, float32 [steps]."""
    schedule = make_schedule(replace(run.optimizer, learning_rate=rate), run.train.steps)
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(run.train.steps)), np.float32)


def program_of(setup: RunSetup) -> Any:
    """A function of (key, batches, rates, heldout) to the losses of all steps, and the sums of nats
    and of targets of each held-out batch."""
    loss = setup.loss
    evaluated = loss_of(setup.task.name, setup.model, **setup.loss_options)

    @functools.partial(jax.jit, compiler_options=compiler_options(setup.mesh))
    def program(key: Any, batches: Any, rates: Any, heldout: Any) -> dict[str, Any]:
        optimizer = make_optimizer(setup.run.optimizer, lambda step: rates[step], setup.specs)

        def mean_loss(params: Any, batch: Any) -> Any:
            total, weight = loss(params, batch, None)["loss"]
            return total / weight

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            params, moments = state
            value, grads = jax.value_and_grad(mean_loss)(params, batch)
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        params = init_params(setup.specs, key)
        (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)

        def sums(batch: Any) -> Any:
            entries = evaluated(params, batch, None)
            return entries.get("nats", entries["loss"])

        nats, targets = jax.lax.map(sums, heldout)
        return {"losses": losses, "nats": nats, "targets": targets}

    return program


def difference_from_a_run(config: Path, settings: Settings) -> float:
    """By how much the loss differs from that of `jf.train` with the same settings."""
    with tempfile.TemporaryDirectory(prefix="jaxformer-scanned-") as folder:
        quiet: Settings = {"run.dir": str(Path(folder, "run")), "run.progress": "none"}
        lines = [f"{name}={value}" for name, value in (settings | quiet).items()]
        result = jf.train(jf.load_config(config, lines))
    return abs(float(result.metrics[-1]["val_loss"]) - Scanned(config)(settings)["loss"])
