"""What a save costs a run, what its digests cost a save, and what the chain of metrics.jsonl costs.
`python benchmarks/checkpoints.py`
With `--bucket s3://bucket/folder` also what a save there costs beside one on the disk.

The state of a config is saved with and without digests, in turns, each until it is on the disk. A
step waits for the part of a save that copies the state; its share is of the steps between two saves
(`train.checkpoint_every`), whose time is measured on random tokens. The steps between two lines of
metrics.jsonl (`train.log_every`) are made with and without the digests of the state after the last
of them, in turns.
"""

from jaxformer.cli import keep_memory

keep_memory()  # as train.py does, before JAX is imported

import argparse  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from dataclasses import replace  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from pairing import HERE, add_smoke, cpu_model, print_table, save  # noqa: E402
from steps import Ready, ready_on_random_tokens  # noqa: E402
from workloads import SMOKE_FIELDS  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.checkpoints import reading as checkpoint_reading  # noqa: E402
from jaxformer.checkpoints.digests import as_texts, combined  # noqa: E402
from jaxformer.checkpoints.reading import versions  # noqa: E402
from jaxformer.config.run import RunConfig  # noqa: E402

DIGESTS = checkpoint_reading.digests


def no_digests(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {path: np.zeros(2, np.uint32) for path in leaves}


def save_seconds(state: Any, folder: str, digests: bool) -> tuple[float, float]:
    """Seconds that the caller waits for a save, and until it is on the disk."""
    checkpoint_reading.digests = DIGESTS
    with jf.Checkpoints(folder, keep=1) as checkpoints:
        step = max(checkpoints.steps(), default=0)
        checkpoints.save(state, step + 1)  # makes Orbax's manager, and is read back
        checkpoints.wait()
        checkpoint_reading.digests = DIGESTS if digests else no_digests  # type: ignore[assignment]
        begin = time.perf_counter()
        checkpoints.save(state, step + 2)
        blocked = time.perf_counter() - begin
        checkpoints.wait()
        return blocked, time.perf_counter() - begin


def bucket_seconds(state: Any, bucket: str, disk: str, pairs: int) -> dict[str, float]:
    """The medians of `save_seconds` in a bucket, and of its ratio to a save on the disk, in pairs
    of turns."""
    taken: list[tuple[float, float, float]] = []
    for pair in range(pairs + 1):  # the first is a warm-up
        seconds = {}
        for folder in (bucket, disk) if pair % 2 else (disk, bucket):
            seconds[folder] = save_seconds(state, folder, digests=True)
        taken.append((*seconds[bucket], seconds[bucket][1] / seconds[disk][1]))
    blocked, saved, ratio = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    return {"bucket_blocked": blocked, "bucket_save": saved, "bucket_save_ratio": ratio}


def step_seconds(bare: Ready, steps: int) -> tuple[Any, float]:
    """The state after some steps, and the median time of one."""
    state, batch, taken = bare.state(), bare.batch(0), []
    with jax.set_mesh(bare.mesh):
        for _ in range(steps + 1):  # the first compiles
            begin = time.perf_counter()
            state, _ = jax.block_until_ready(bare.step(state, batch))
            taken.append(time.perf_counter() - begin)
    return state, statistics.median(taken[1:])


def chain_seconds(bare: Ready, state: Any, every: int, digests: bool) -> tuple[Any, float]:
    """The state after the steps between two lines of metrics.jsonl, and their seconds, with the
    digests of the state after the last of them, as a run starts and reads them, or without."""
    batch = bare.batch(0)
    begin = time.perf_counter()
    with jax.set_mesh(bare.mesh):
        for _ in range(every):
            state, _ = bare.step(state, batch)
        sums = DIGESTS(checkpoint_reading.flat_leaves(state)) if digests else {}
        jax.block_until_ready((state, sums))
    combined(as_texts(sums))
    return state, time.perf_counter() - begin


def chain_shares(bare: Ready, state: Any, run: RunConfig, pairs: int) -> list[float]:
    """What the digests add to the steps between two lines, as shares of these steps, by pair."""
    shares = []
    for pair in range(pairs + 1):  # the first is a warm-up
        seconds = {}
        for on in (True, False) if pair % 2 else (False, True):
            state, seconds[on] = chain_seconds(bare, state, run.train.log_every, on)
        shares.append(seconds[True] / seconds[False] - 1)
    return shares[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps whose time is measured")
    parser.add_argument("--config", default=str(HERE.parent / "configs/quickstart.py"))
    parser.add_argument("--bucket", default="", help="the URL of a folder to save to as well")
    add_smoke(parser)
    options = parser.parse_args()
    fields: dict[str, object] = {}
    if options.smoke:
        options.pairs, options.steps, fields = 1, 1, SMOKE_FIELDS
    run = jf.load_config(options.config, [f"{name}={value}" for name, value in fields.items()])
    model = replace(run.model, vocab_size=run.model.vocab_size or run.tokenizer.vocab_size)
    run = replace(run, model=model)
    load = os.getloadavg()[0]
    bare = ready_on_random_tokens(run)[0]
    state, step = step_seconds(bare, options.steps)
    leaves = checkpoint_reading.flat_leaves(state)
    size = sum(leaf.nbytes for leaf in leaves.values())
    begin = time.perf_counter()
    jax.block_until_ready(DIGESTS(leaves))
    first = time.perf_counter() - begin
    digest: list[float] = []
    blocked: dict[bool, list[float]] = {True: [], False: []}
    whole: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="jaxformer-checkpoints-") as scratch:
        for pair in range(options.pairs + 1):  # the first is a warm-up
            begin = time.perf_counter()
            jax.block_until_ready(DIGESTS(leaves))
            taken = time.perf_counter() - begin
            for on in (True, False) if pair % 2 else (False, True):
                waited, seconds = save_seconds(state, scratch, on)
                if pair:
                    blocked[on].append(waited)
                    whole[on].append(seconds)
            digest += [taken] * bool(pair)
        bucket = (
            bucket_seconds(state, options.bucket, scratch, options.pairs) if options.bucket else {}
        )
    chain = chain_shares(bare, state, run, options.pairs)  # which donates the state
    every = run.train.checkpoint_every
    found = {
        "bytes": size,
        "first_digests": first,
        "digests": statistics.median(digest),
        "save": statistics.median(whole[True]),
        "save_without_digests": statistics.median(whole[False]),
        "blocked": statistics.median(blocked[True]),
        "step": step,
        "checkpoint_every": every,
        "blocked_share": statistics.median(blocked[True]) / (every * step),
        "digest_share": statistics.median(digest) / statistics.median(whole[True]),
        "log_every": run.train.log_every,
        "chain_share": statistics.median(chain),
        "chain_digests_share": statistics.median(digest) / (run.train.log_every * step),
        "load_before": load,
        **bucket,
    }
    rows = [[name, f"{value:.4g}"] for name, value in found.items()]
    print_table(["measure (seconds, bytes, shares)", options.config.rsplit("/", 1)[-1]], rows)
    print(
        f"blocked: {found['blocked_share']:.3%} of {every} steps, must be under 2 %; digests:"
        f" {found['digest_share']:.1%} of a save, must be under 5 %; chain:"
        f" {found['chain_digests_share']:.2%} of {run.train.log_every} steps, must be under 2 %"
        f" ({found['chain_share']:.2%} in pairs); medians of {options.pairs} pairs; {versions()},"
        f" {cpu_model()}"
    )
    save("checkpoints", found, options.smoke)


if __name__ == "__main__":
    main()
