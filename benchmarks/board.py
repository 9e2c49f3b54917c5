"""How many steps each optimizer needs to reach one validation loss, beside a tuned AdamW; to
docs/results/board.md.

    python benchmarks/board.py [--task 10m] [--recipes muon lion] [--seeds 5]
    python benchmarks/board.py --time          # the time of a step of each row, on a quiet machine
    python benchmarks/board.py --page          # the page again, from the JSON

Every run is that of one train.py command line, whose text is its key in results/board.json. That
is written after each run, so the same command continues a board that was stopped.
"""

import argparse
import contextlib
import json
import math
import platform
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from ablations import arguments  # noqa: E402
from board_page import BASELINE, page  # noqa: E402
from board_rules import LONGEST_RUNG, next_exponent, next_rung, rung_steps, steps_to_reach  # noqa: E402
from pairing import RESULTS, Answer, add_smoke, column, cpu_model, paired_ratio, save  # noqa: E402
from workloads import CONFIGS, SMOKE_FIELDS, words_file  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.config.settings import Log  # noqa: E402
from jaxformer.files import write_text  # noqa: E402
from jaxformer.runs.evaluation import bytes_of_targets, make_evaluation  # noqa: E402
from jaxformer.runs.setup import RunSetup, make_setup  # noqa: E402
from jaxformer.training.optimizers.run_optimizer import make_optimizer  # noqa: E402
from jaxformer.training.optimizers.schedules import make_schedule  # noqa: E402

ROOT = Path(__file__).parent.parent
BOARD = RESULTS / "board.json"
PAGE = ROOT / "docs/results/board.md"
Settings = dict[str, object]
ENTRIES = ("val_loss", "val_bits_per_byte")
TRIALS = 5  # learning rates that are tried for each row
TUNING_RUNG = 2  # the horizon of these trials
TUNING_SEEDS = (1000, 1001)  # none of the seeds of the result
QUIET: Log = lambda line: None  # noqa: E731


@dataclass(frozen=True)
class Task:
    """What is trained: settings beside configs/quickstart.py, the validation loss to reach, in nats
    per token, and the steps of rung 0."""

    settings: Settings
    target: float
    base_steps: int


@dataclass(frozen=True)
class Recipe:
    """A row: settings beside those of the task, and the learning rate at which its trials
    begin."""

    center: float
    settings: Settings = field(default_factory=dict)


BASE: Settings = {
    "data.sequence_length": 128,
    "data.validation_fraction": 0.02,
    "train.batch_size": 8,
    "train.eval_every": 0,
    "train.checkpoint_every": 0,
    "run.sample_tokens": 0,
    "optimizer.warmup_steps": 20,
}
TASKS = {
    "quickstart": Task(BASE, 4.4, 200),
    "10m": Task(BASE | {"model.d_model": 384, "model.n_layers": 5, "model.n_heads": 6}, 4.4, 200),
}
RECIPES = {
    BASELINE: Recipe(2e-3, {"optimizer.name": "adamw"}),
    "muon": Recipe(6e-3, {"optimizer.name": "muon"}),
    "normuon": Recipe(6e-3, {"optimizer.name": "normuon"}),
    # The vocabulary of 4,096 is longer than that, so that the embedding has one factor: with two a
    # run took 119 s instead of 18.
    "soap": Recipe(3e-3, {"optimizer.name": "soap", "optimizer.soap_max_side": 1024}),
    "sophia": Recipe(1e-3, {"optimizer.name": "sophia"}),
    "lion": Recipe(4e-4, {"optimizer.name": "lion"}),
    "adamw, b2 0.99": Recipe(2e-3, {"optimizer.name": "adamw", "optimizer.b2": 0.99}),
    "adamw, cautious": Recipe(2e-3, {"optimizer.name": "adamw", "optimizer.cautious": True}),
    "adamw, wsd": Recipe(2e-3, {"optimizer.name": "adamw", "optimizer.schedule": "wsd"}),
    "muon, wsd": Recipe(6e-3, {"optimizer.name": "muon", "optimizer.schedule": "wsd"}),
    "muon, cautious": Recipe(6e-3, {"optimizer.name": "muon", "optimizer.cautious": True}),
    "muon by heads": Recipe(6e-3, {"optimizer.name": "muon", "optimizer.muon_unit": "head"}),
    "schedule-free adamw": Recipe(
        4e-3, {"optimizer.name": "schedule_free", "optimizer.schedule": "constant"}
    ),
    "adafactor": Recipe(4e-3, {"optimizer.name": "adafactor"}),
}


class Programs:
    """The compiled step of a recipe at one learning rate, for each horizon and seed.

    The optimizer is that of the run, whose schedule is read from a table in its state, so that
    another horizon is no other program.
    """

    def __init__(self, setup: RunSetup, longest_steps: int) -> None:
        config, specs = setup.run.optimizer, setup.specs
        self.longest_steps = longest_steps

        def with_rates(rates: jax.Array) -> optax.GradientTransformation:
            return make_optimizer(config, lambda step: rates[step], specs)

        self.optimizer = optax.inject_hyperparams(with_rates)(rates=jnp.zeros(longest_steps))
        pieces = setup.run.train.n_microbatches
        self.step = jf.make_step(setup.loss, self.optimizer, microbatches=pieces)
        self._start = jax.jit(self._first_state)

    def _first_state(self, params: Any, rates: jax.Array) -> jf.TrainState:
        moments = self.optimizer.init(params)
        moments = moments._replace(hyperparams={"rates": rates})
        return jf.TrainState(jnp.int32(0), params, moments)

    def first_state(self, setup: RunSetup) -> jf.TrainState:
        """The state before the first step of the run of a setup."""
        run = setup.run
        schedule = make_schedule(run.optimizer, run.train.steps)
        rates = jax.jit(jax.vmap(schedule))(jnp.arange(self.longest_steps))
        state = jf.init_state(setup.specs, optax.identity(), mesh=setup.mesh, seed=run.run.seed)
        # Through host memory, because a step donates its state.
        return self._start(jax.tree.map(np.asarray, state.params), rates)


class Board:
    """The runs of one task, those in the JSON and new ones."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.task = options, TASKS[options.task]
        self.all_tasks: dict[str, Answer] = {}
        if BOARD.is_file() and not options.smoke:
            self.all_tasks = json.loads(BOARD.read_text(encoding="utf-8"))["tasks"]
        self.results = self.all_tasks.setdefault(options.task, {"runs": {}, "times": {}})
        self.results |= {"target": self.task.target, "base_steps": self.task.base_steps}
        self.results["settings"] = self.task.settings
        self._programs: dict[str, Programs] = {}
        self._evaluations: dict[Any, Any] = {}

    def settings(self, recipe: Recipe, rate: float, steps: int, seed: int) -> Settings:
        """What a run has beside configs/quickstart.py."""
        settings = self.task.settings | recipe.settings
        settings |= {"optimizer.learning_rate": float(f"{rate:.3g}")}
        settings |= {"train.steps": steps, "run.seed": seed}
        if self.options.smoke:
            settings |= SMOKE_FIELDS | {"data.train": self.options.text}
            settings |= {"data.cache_dir": self.options.folder / "data"}
        return settings

    def setup(self, recipe: Recipe, rate: float, steps: int, seed: int) -> RunSetup:
        settings = self.settings(recipe, rate, steps, seed)
        settings |= {"run.dir": Path(self.options.folder, "no-run")}
        overrides = [f"{name}={value}" for name, value in settings.items()]
        return make_setup(jf.load_config(CONFIGS / "quickstart.py", overrides), QUIET)

    def programs(self, recipe: Recipe, rate: float, setup: RunSetup) -> Programs:
        key = shlex.join(arguments(self.settings(recipe, rate, 1, 0)))
        if key not in self._programs:
            longest_steps = rung_steps(self.task.base_steps, LONGEST_RUNG)
            # One recipe at one rate at a time, so that memory does not grow.
            self._programs = {key: Programs(setup, longest_steps)}
        return self._programs[key]

    def evaluate(self, setup: RunSetup, params: Any) -> Mapping[str, float]:
        """The evaluation at the end of a run: over all held-out rows."""
        if setup.model not in self._evaluations:
            token_bytes = bytes_of_targets(setup.corpus)
            self._evaluations[setup.model] = make_evaluation(
                setup.task.name, setup.model, token_bytes, setup.loss_options
            )
        evaluation = self._evaluations[setup.model]
        return evaluation(params, map(setup.placed, setup.heldout or ()))  # type: ignore[no-any-return]

    def loss(self, name: str, rate: float, steps: int, seed: int) -> float:
        """The final validation loss of a run, infinite where it diverged; trained unless the JSON
        has it."""
        recipe = RECIPES[name]
        line = shlex.join(arguments(self.settings(recipe, rate, steps, seed)))
        if line not in self.results["runs"]:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            numbers = self._trained(recipe, rate, steps, seed)
            about = {"recipe": name, "rate": float(f"{rate:.3g}"), "steps": steps, "seed": seed}
            about["seconds"] = round(time.perf_counter() - begin, 1)
            about["cpu_seconds"] = round(time.process_time() - cpu_begin, 1)
            self.results["runs"][line] = about | numbers
            print(f"{time.strftime('%H:%M')} {about | numbers}", flush=True)
            self.save()
        loss = self.results["runs"][line]["val_loss"]
        return math.inf if loss is None else float(loss)

    def _trained(self, recipe: Recipe, rate: float, steps: int, seed: int) -> Answer:
        setup = self.setup(recipe, rate, steps, seed)
        programs = self.programs(recipe, rate, setup)
        numbers: dict[str, float] = {}

        def evaluate(params: Any) -> Mapping[str, float]:
            numbers.update(self.evaluate(setup, params))
            return numbers

        with contextlib.suppress(jf.Diverged):
            state = programs.first_state(setup)
            jf.fit(programs.step, state, setup.batches, steps=steps, evaluate=evaluate)
        entries = {entry: numbers.get(entry, math.inf) for entry in ENTRIES}
        return {entry: x if math.isfinite(x) else None for entry, x in entries.items()}

    def tuned(self, name: str) -> Answer:
        """The best learning rate of the trials of a row, and the losses of each.

        Losses of short runs with high rates differ by chance: the two best are tried with a second
        seed too, and the lower mean of both wins.
        """
        center, losses = RECIPES[name].center, dict[float, float]()
        steps = rung_steps(self.task.base_steps, TUNING_RUNG)
        for _ in range(self.options.trials):
            exponent = next_exponent(losses)
            losses[exponent] = self.loss(name, center * 2**exponent, steps, TUNING_SEEDS[0])
        trials = {exponent: [loss] for exponent, loss in sorted(losses.items())}
        finalists = sorted(losses, key=lambda exponent: losses[exponent])[:2]
        for exponent in finalists:
            loss = self.loss(name, center * 2**exponent, steps, TUNING_SEEDS[1])
            trials[exponent].append(loss)
        best = min(finalists, key=lambda exponent: sum(trials[exponent]))
        return {
            "rate": float(f"{center * 2**best:.3g}"),
            "is_at_the_edge": best in (min(losses), max(losses)),
            "trials": {
                f"{center * 2**exponent:.3g}": [loss if loss < math.inf else None for loss in tried]
                for exponent, tried in trials.items()
            },
        }

    def measure(self, name: str) -> None:
        """Tunes a row, and runs the ladder of each seed."""
        row = self.results.setdefault("rows", {}).setdefault(name, {})
        row |= {"settings": RECIPES[name].settings, "tuning": self.tuned(name), "steps": []}
        rung_of_the_last = TUNING_RUNG
        for seed in range(self.options.seeds):
            losses: dict[int, float] = {}
            while (rung := next_rung(losses, self.task.target, rung_of_the_last)) is not None:
                steps = rung_steps(self.task.base_steps, rung)
                losses[rung] = self.loss(name, row["tuning"]["rate"], steps, seed)
            by_steps = {rung_steps(self.task.base_steps, rung): losses[rung] for rung in losses}
            steps_needed = steps_to_reach(by_steps, self.task.target)
            row["steps"].append(steps_needed if math.isfinite(steps_needed) else None)
            rung_of_the_last = min(losses, key=lambda rung: abs(losses[rung] - self.task.target))
            print(f"{name}, seed {seed}: {row['steps'][-1]} steps", flush=True)
            self.save()

    def measure_times(self, samples: int) -> None:
        """The seconds of a step of each row with its learning rate, in turn."""
        names = [name for name in RECIPES if self.results.get("rows", {}).get(name)]
        steps, states, batches = {}, {}, {}
        for name in names:
            rate = self.results["rows"][name]["tuning"]["rate"]
            setup = self.setup(RECIPES[name], rate, self.task.base_steps, 0)
            programs = self.programs(RECIPES[name], rate, setup)
            steps[name], states[name] = programs.step, programs.first_state(setup)
            batches[name] = jax.block_until_ready(setup.placed(setup.batches[0]))
        times = {name: list[Answer]() for name in names}
        for turn in range(2 + samples):
            for name in names:
                begin, cpu_begin = time.perf_counter(), time.process_time()
                states[name], _ = steps[name](states[name], batches[name])
                jax.block_until_ready(states[name])
                taken = {"seconds": time.perf_counter() - begin}
                taken["cpu_seconds"] = time.process_time() - cpu_begin
                # The first turns compile.
                times[name] += [taken] if turn > 1 else []
        for name in names:
            entry = self.results["times"].setdefault(name, {})
            for unit in ("seconds", "cpu_seconds"):
                values = column(times[name], unit)
                # The mean, because some rules do more in each tenth step.
                entry[unit] = statistics.fmean(values)
                entry[f"ratio_of_{unit}"] = paired_ratio(column(times[BASELINE], unit), values)
        self.save()

    def save(self) -> None:
        """Writes the JSON and the page."""
        device = jax.devices()[0]
        self.results["machine"] = {
            "device": cpu_model() if device.platform == "cpu" else device.device_kind,
            "python": platform.python_version(),
            **{package: version(package) for package in ("jax", "jaxlib", "optax")},
        }
        save("board", {"tasks": self.all_tasks}, self.options.smoke)
        if not self.options.smoke:
            write_text(PAGE, page(json.loads(BOARD.read_text(encoding="utf-8"))))


def measure(options: argparse.Namespace) -> None:
    board = Board(options)
    if options.page:
        write_text(PAGE, page(json.loads(BOARD.read_text(encoding="utf-8"))))
        return
    if options.time:
        board.measure_times(options.samples)
        return
    for name in options.recipes:
        board.measure(name)
    if options.smoke:
        board.measure_times(options.samples)
        print(page({"tasks": board.all_tasks}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=[*TASKS], default="quickstart")
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... of each row")
    parser.add_argument("--time", action="store_true", help="measure the time of steps alone")
    parser.add_argument("--samples", type=int, default=20, help="timed steps of each row")
    parser.add_argument("--page", action="store_true", help="write the page again, from the JSON")
    add_smoke(parser)
    options = parser.parse_args()
    options.trials = TRIALS
    with tempfile.TemporaryDirectory(prefix="jaxformer-board-") as folder:
        options.folder = Path(folder)
        if options.smoke:
            options.text, options.recipes = words_file(options.folder), [BASELINE, "muon"]
            options.seeds, options.samples, options.trials = 1, 1, 2
            TASKS[options.task] = replace(TASKS[options.task], base_steps=2)
        measure(options)


if __name__ == "__main__":
    main()
