"""Whether a learning rate found at width 128 holds at 512: the loss of one small task by width and
learning rate, in the standard parametrization and in muP, to docs/reference/parametrization.md and
docs/mup.png (with another --init, docs/mup_INIT.png).

    python benchmarks/mup.py --text tinyshakespeare.txt

All models of a seed read the same bytes, in the same order, and are compared on the same held-out
ones. One program for each width takes every rate and seed.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
import optax
from matplotlib.figure import Figure
from pairing import HERE, add_smoke, print_table, save, write_table
from workloads import words_file

import jaxformer as jf
from jaxformer.arrays.params import init_params
from jaxformer.config.train import OptimizerConfig
from jaxformer.report.plot import STYLE
from jaxformer.runs.objectives import loss_of
from jaxformer.training.optimizers.run_optimizer import make_optimizer

ROOT = HERE.parent
PARAMETRIZATIONS = ("standard", "mup")
BYTES, HELDOUT = 256, 64  # the vocabulary, and rows of the held-out batch
OPTIMIZER = OptimizerConfig(b2=0.95)
# Two-sided 90 % quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
COLORS = ("#7fb2e5", "#2f6db5", "#173a63", "#c8502b", "#7a2d16")
Losses = dict[str, list[float]]  # by "parametrization width rate", one for each seed


def model_of(options: argparse.Namespace, name: str, width: int) -> jf.ModelConfig:
    """The model of a width, whose heads widen with it."""
    base = f"d_model={options.widths[0]} d_ff={2 * options.widths[0]}" if name == "mup" else ""
    return jf.ModelConfig(
        vocab_size=BYTES,
        d_model=width,
        n_layers=options.layers,
        n_heads=4,
        d_ff=2 * width,
        activation="gelu",
        init=options.init,
        max_length=options.length,
        parametrization=name,  # type: ignore[arg-type]
        mup_base=base,
    )


def windows(text: np.ndarray, rows: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of `length` + 1 consecutive bytes from random places: [rows, length + 1] int32."""
    starts = rng.integers(0, len(text) - length - 1, rows)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def batches_of(text: np.ndarray, options: argparse.Namespace, seed: int) -> dict[str, np.ndarray]:
    """The batches of all steps of a seed: [steps, rows, length] each."""
    rng = np.random.default_rng(seed)
    rows = windows(text, options.steps * options.batch, options.length, rng)
    rows = rows.reshape(options.steps, options.batch, -1)
    return as_batch(rows)


def as_batch(rows: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays that the loss reads, of rows [..., length + 1]."""
    tokens = rows[..., :-1]
    return {"tokens": tokens, "targets": rows[..., 1:], "weights": np.ones_like(tokens, np.float32)}


def make_trainer(config: jf.ModelConfig, steps: int) -> Any:
    """train(seed, rate, batches, heldout) -> the held-out loss after all steps, nats per byte: a
    linear warm-up over a tenth of the steps, then a linear decay to zero."""
    table, loss = jf.specs(config), loss_of("causal", config)
    warmup = max(steps // 10, 1)
    shape = optax.join_schedules(
        [
            optax.linear_schedule(0.0, 1.0, warmup),
            optax.linear_schedule(1.0, 0.0, steps - warmup + 1),
        ],
        [warmup],
    )

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        total, weight = loss(params, batch, None)["loss"]
        return total / weight

    @jax.jit
    def train(seed: jax.Array, rate: jax.Array, batches: Any, heldout: Any) -> jax.Array:
        optimizer = make_optimizer(OPTIMIZER, lambda step: rate * shape(step + 1), table)
        params = init_params(table, jax.random.key(seed))

        def advance(carry: Any, batch: Any) -> tuple[Any, None]:
            params, moments = carry
            updates, moments = optimizer.update(jax.grad(mean_loss)(params, batch), moments, params)
            return (optax.apply_updates(params, updates), moments), None

        (params, _), _ = jax.lax.scan(advance, (params, optimizer.init(params)), batches)
        return mean_loss(params, heldout)

    return train


def measure(options: argparse.Namespace, partial: Path) -> Losses:
    """The losses of all models, seed after seed; what a run before has left in `partial` is not
    computed again."""
    text = np.frombuffer(Path(options.text).read_bytes(), np.uint8)
    cut = int(0.9 * len(text))
    heldout = as_batch(windows(text[cut:], HELDOUT, options.length, np.random.default_rng(0)))
    losses: Losses = json.loads(partial.read_text()) if partial.exists() else {}
    # At the base width the two are one program (tests/models/test_parametrization.py).
    wider = {"standard": options.widths, "mup": options.widths[1:]}
    trainers = {
        (name, width): make_trainer(model_of(options, name, width), options.steps)
        for name in PARAMETRIZATIONS
        for width in wider[name]
    }
    for seed in range(options.seeds):
        batches = batches_of(text[:cut], options, seed)
        for (name, width), train in trainers.items():
            begin = time.time()
            for rate in options.rates:
                of_model = losses.setdefault(key_of(name, width, rate), [])
                if len(of_model) <= seed:
                    of_model.append(float(train(seed, rate, batches, heldout)))
            partial.write_text(json.dumps(losses))
            shown = ", ".join(
                f"{losses[key_of(name, width, rate)][seed]:.3f}" for rate in options.rates
            )
            print(f"seed {seed}, {name} {width}: {shown} ({time.time() - begin:.0f} s)", flush=True)
    base = options.widths[0]
    same = {
        key_of("mup", base, rate): losses[key_of("standard", base, rate)] for rate in options.rates
    }
    return {key: values[: options.seeds] for key, values in (losses | same).items()}


def key_of(name: str, width: int, rate: float) -> str:
    return f"{name} {width} {rate:g}"


def name_of(options: argparse.Namespace) -> str:
    """The name of the results, of the plot and of the table in the page."""
    return "mup" if options.init == "gpt2" else f"mup_{options.init}"


def interval(values: list[float]) -> tuple[float, float]:
    """The mean and half the width of its 90 % interval by Student's t; 0 for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return mean, 0.0
    error = statistics.stdev(values) / math.sqrt(len(values))
    return mean, STUDENT[min(len(values) - 2, len(STUDENT) - 1)] * error


def shown(values: list[float], is_best: bool) -> str:
    mean, half = interval(values)
    text = f"{mean:.3f} ± {half:.3f}" if math.isfinite(mean) else "diverged"
    return f"**{text}**" if is_best else text


def best_rate(options: argparse.Namespace, losses: Losses, name: str, width: int) -> float:
    """The rate with the smallest mean loss; a mean that is not finite counts as infinite."""

    def mean(rate: float) -> float:
        value = statistics.fmean(losses[key_of(name, width, rate)])
        return value if math.isfinite(value) else math.inf

    return min(options.rates, key=mean)


def table_of(options: argparse.Namespace, losses: Losses) -> tuple[list[str], list[list[str]]]:
    header = ["parametrization", "width", *(f"{rate:.2g}" for rate in options.rates)]
    table = []
    for name in PARAMETRIZATIONS:
        for width in options.widths:
            best = best_rate(options, losses, name, width)
            cells = [
                shown(losses[key_of(name, width, rate)], rate == best) for rate in options.rates
            ]
            table.append([name, str(width), *cells])
    return header, table


def transfers(options: argparse.Namespace, losses: Losses) -> dict[str, Any]:
    """What it costs at the largest width to use the best rate of the smallest one instead of its
    own: the difference of the held-out losses, paired by seed, with its 90 % interval."""
    first, last = options.widths[0], options.widths[-1]
    costs = {}
    for name in PARAMETRIZATIONS:
        rate, own = (best_rate(options, losses, name, width) for width in (first, last))
        pairs = zip(losses[key_of(name, last, rate)], losses[key_of(name, last, own)], strict=True)
        mean, half = interval([a - b for a, b in pairs])
        costs[name] = {"rate": rate, "own_rate": own, "cost": mean, "half": half}
    return costs


def sentence(options: argparse.Namespace, costs: dict[str, Any]) -> str:
    first, last = options.widths[0], options.widths[-1]
    lines = [
        f"{name}: the best rate at width {first} is {row['rate']:.2g} and at {last}"
        f" {row['own_rate']:.2g}; to use the former at {last} costs"
        f" {row['cost']:.3f} ± {row['half']:.3f} nats"
        for name, row in costs.items()
    ]
    return (
        f"Held-out loss, nats per byte of {Path(options.text).name}, after {options.steps} steps of"
        f" {options.batch} rows of {options.length} bytes, by learning rate: the mean of"
        f" {options.seeds} seeds and its 90 % interval (Student's t); the best of a row in bold."
        f" {options.layers} layers, 4 heads that widen with the model, AdamW,"
        f" model.init={options.init}, with jax {version('jax')} on a CPU. {'; '.join(lines)}."
    )


def draw(options: argparse.Namespace, losses: Losses, path: Path) -> None:
    """Held-out loss over the learning rate, a curve for each width, a panel for each
    parametrization."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), dpi=160, facecolor="white")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, name in zip(panels, PARAMETRIZATIONS, strict=True):
            for color, width in zip(COLORS, options.widths, strict=False):
                points = [interval(losses[key_of(name, width, rate)]) for rate in options.rates]
                means, halves = zip(*points, strict=True)
                panel.errorbar(
                    options.rates, means, halves, color=color, marker="o", label=f"width {width}"
                )
                best = best_rate(options, losses, name, width)
                panel.axvline(best, color=color, linestyle=":", linewidth=0.9)
            panel.set_xscale("log", base=2)
            panel.set_title(name)
            panel.set_xlabel("learning rate")
        panels[0].set_ylabel("held-out loss, nats per byte")
        panels[0].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="a file of text to learn")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0**k for k in range(-10, -5)])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--init", default="gpt2", help="model.init of all models")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--partial", type=Path, help="a file that keeps losses between runs")
    add_smoke(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jaxformer-mup-") as folder:
        if options.smoke:
            options.text, options.widths, options.rates = words_file(Path(folder)), [16, 32], [1e-3]
            options.seeds, options.layers, options.steps = 2, 1, 3
        if not options.text:
            parser.error("--text is needed: a file of text to learn, as tinyshakespeare.txt")
        losses = measure(options, options.partial or Path(folder, "losses.json"))
        costs = transfers(options, losses)
        header, table = table_of(options, losses)
        print_table(header, table)
        print(sentence(options, costs))
        plots = Path(folder) if options.smoke else ROOT / "docs"
        draw(options, losses, plots / f"{name_of(options)}.png")
    shape = ("init", "widths", "rates", "seeds", "layers", "steps", "batch", "length")
    result = {
        "text": Path(options.text).name,
        **{name: getattr(options, name) for name in shape},
        "versions": {name: version(name) for name in ("jax", "jaxlib", "optax", "numpy")},
        "transfer": costs,
        "losses": losses,
    }
    save(name_of(options), result, options.smoke)
    if not options.smoke:
        page = ROOT / "docs/reference/parametrization.md"
        write_table(page, name_of(options), header, table, sentence(options, costs))


if __name__ == "__main__":
    main()
