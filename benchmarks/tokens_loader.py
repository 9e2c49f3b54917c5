"""How many tokens a second the batches give, beside what the quickstart trains at. `python
benchmarks/tokens.py loader`

Training and loading take turns in one process. Loading is what the loop asks for, batches made
ahead on a thread; while a model trains it has only what the step leaves of the cores, so a rate 20
times that of training is asked of it alone.
"""

from jaxformer.cli import keep_memory

keep_memory()  # as train.py does, before JAX is imported

import dataclasses  # noqa: E402
import itertools  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
from pairing import HERE, print_table, save  # noqa: E402
from steps import Ready, ready  # noqa: E402
from workloads import SMOKE_FIELDS, words_file  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer import data  # noqa: E402
from jaxformer.data.mixture import Mixture  # noqa: E402
from jaxformer.runs.objectives import task_of  # noqa: E402

TIMES = 20  # that of training, which the loader must give
WAYS = ("stream", "documents", "best_fit")
MIXED = "documents, mixture of two"


def training(run: jf.RunConfig) -> Callable[[int], float]:
    """Tokens a second of the run's compiled step on one batch, over so many steps."""
    bare: Ready = ready(run)
    state, batch = bare.state(), bare.batch(0)

    def rate(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        with jax.set_mesh(bare.mesh):
            for _ in range(steps):
                state, _ = bare.step(state, batch)
            jax.block_until_ready(state)
        return steps * bare.tokens_per_step / (time.perf_counter() - begin)

    return rate


def batches_of(run: jf.RunConfig) -> dict[str, data.Batches]:
    """The quickstart's batches, packed in each way, and of a mixture of its text with itself."""
    rows: dict[str, Any] = {}
    configs: dict[str, Any] = {}
    for way in WAYS:
        packing: Any = way
        configs[way] = dataclasses.replace(run.data, packing=packing)
        task = task_of(run.model, configs[way])
        rows[way] = data.prepare(configs[way], run.tokenizer, task, seed=run.run.seed).train
    configs[MIXED] = dataclasses.replace(configs["documents"], weights="0.7 0.3; 1000: 0.5 0.5")
    rows[MIXED] = Mixture(
        [("once", rows["documents"]), ("again", rows["documents"])], configs[MIXED]
    )
    return {
        way: data.Batches(rows[way], configs[way], run.train.batch_size, run.run.seed)
        for way in rows
    }


def loading(batches: data.Batches, count: int) -> float:
    """Tokens a second of so many batches, from a step not yet read on."""
    found = batches.iterate(1000)
    next(found)
    begin = time.perf_counter()
    tokens = sum(batch["tokens"].size for batch in itertools.islice(found, count))
    return tokens / (time.perf_counter() - begin)


def loader(smoke: bool = False) -> None:
    """Prints tokens a second of each way to make batches, and how many times training's that is."""
    rounds, steps, count = (1, 1, 5) if smoke else (5, 5, 400)
    with tempfile.TemporaryDirectory(prefix="jaxformer-loader-") as scratch:
        fields: dict[str, object] = {
            "run.dir": f"{scratch}/run",
            "data.cache_dir": f"{scratch}/data",
        }
        if smoke:
            fields |= SMOKE_FIELDS | {"data.train": words_file(Path(scratch))}
        changes = [f"{name}={value}" for name, value in fields.items()]
        run = jf.load_config(HERE.parent / "configs/quickstart.py", changes)
        rate, ways = training(run), batches_of(run)
        rate(2)
        rates: dict[str, list[float]] = {"training": [], **{way: [] for way in ways}}
        for _ in range(rounds):
            rates["training"].append(rate(steps))
            for way, batches in ways.items():
                rates[way].append(loading(batches, count))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    rows = [
        [
            name,
            f"{middle[name]:,.0f}",
            f"{min(found):,.0f} - {max(found):,.0f}",
            f"{middle[name] / middle['training']:,.0f}",
        ]
        for name, found in rates.items()
    ]
    print_table(["batches", "tokens/s", "range", f"times training, must {TIMES}"], rows)
    save("tokens_loader", {"tokens_per_second": rates, "rounds": rounds}, smoke)
