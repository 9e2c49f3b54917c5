"""How many tokens a second the batches give, beside what the quickstart trains at. `python benchmarks/tokens_loader.py`

Training and loading take turns in one process. Loading is what the loop asks for, batches made ahead on a thread; while a
model trains it has only what the step leaves of the cores, so a rate 20 times that of training is asked of it alone.
"""

from jaxformer.cli import keep_memory

keep_memory()  # as train.py does, before JAX is imported

import dataclasses  # noqa: E402
import itertools  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402

import jax  # noqa: E402
from pairing import HERE, print_table, save  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer import data  # noqa: E402
from jaxformer.evaluation import place_batch  # noqa: E402
from jaxformer.objectives import task_of  # noqa: E402
from jaxformer.runs.run import compile_step  # noqa: E402
from jaxformer.runs.setup import Job, make_job  # noqa: E402
from jaxformer.training.state import init_state  # noqa: E402

TIMES = 20  # that of training, which the loader must give
WAYS = {"stream": {}, "documents": {}, "best_fit": {}, "stream, rows lengthened": {"length_warmup": "64; 1000000: 256"}}
MIXED = "documents, mixture of two"


def training(job: Job) -> Callable[[int], float]:
    """Tokens a second of the quickstart's compiled step, over so many steps."""
    advance = compile_step(job, job.run.data.sequence_length, lambda text: None)
    with jax.set_mesh(job.mesh):
        state = init_state(job.specs, job.optimizer, job.mesh, job.run.run.seed)
        batch = place_batch(job.batches[0], job.mesh)

    def rate(steps: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        with jax.set_mesh(job.mesh):
            for _ in range(steps):
                state, _ = advance(state, batch)
            jax.block_until_ready(state)
        return steps * job.tokens_per_step / (time.perf_counter() - begin)

    return rate


def batches_of(run: jf.RunConfig) -> dict[str, data.Batches]:
    """The quickstart's batches, packed in each way, and of a mixture of its text with itself."""
    rows, configs = {}, {}
    for way, changes in WAYS.items():
        configs[way] = dataclasses.replace(run.data, packing=way.partition(",")[0], **changes)
        task = task_of(run.model, configs[way])
        rows[way] = data.prepare(configs[way], run.tokenizer, task, seed=run.run.seed).train
    configs[MIXED] = dataclasses.replace(configs["documents"], weights="0.7 0.3; 1000: 0.5 0.5")
    rows[MIXED] = data.Mixture([("once", rows["documents"]), ("again", rows["documents"])], configs[MIXED])
    return {way: data.Batches(rows[way], configs[way], run.train.batch_size, run.run.seed) for way in rows}


def loading(batches: data.Batches, count: int) -> float:
    """Tokens a second of so many batches, from a step not yet read on."""
    found = batches.iterate(1000)
    next(found)
    begin = time.perf_counter()
    tokens = sum(batch["tokens"].size for batch in itertools.islice(found, count))
    return tokens / (time.perf_counter() - begin)


def loader(rounds: int = 5, steps: int = 5, count: int = 400) -> None:
    """Prints tokens a second of each way to make batches, and how many times training's that is."""
    with tempfile.TemporaryDirectory(prefix="jaxformer-loader-") as scratch:
        fields = {"run.dir": f"{scratch}/run", "data.cache_dir": f"{scratch}/data"}
        run = jf.load_config(HERE.parent / "configs/quickstart.py", [f"{name}={value}" for name, value in fields.items()])
        rate, ways = training(make_job(run, lambda text: None)), batches_of(run)
        rate(2)
        rates: dict[str, list[float]] = {"training": [], **{way: [] for way in ways}}
        for _ in range(rounds):
            rates["training"].append(rate(steps))
            for way, batches in ways.items():
                rates[way].append(loading(batches, count))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    rows = [
        [name, f"{middle[name]:,.0f}", f"{min(found):,.0f} - {max(found):,.0f}", f"{middle[name] / middle['training']:,.0f}"]
        for name, found in rates.items()
    ]
    print_table(["batches", "tokens/s", "range", f"times training, must {TIMES}"], rows)
    save("tokens_loader", {"tokens_per_second": rates, "rounds": rounds})


if __name__ == "__main__":
    loader()
