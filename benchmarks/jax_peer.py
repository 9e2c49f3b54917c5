"""Our side of the comparison: a worker that trains a run of works.py by the library's own step, as train.py does.

Each line read is a command (`step`, `product`, `quit`), each line written a JSON object.
"""

import argparse
import json
import resource
import sys
import time
from typing import Any

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
import jaxlib  # noqa: E402
import numpy as np  # noqa: E402
from works import WORKS, with_sizes  # noqa: E402

from jaxformer.config import RunConfig  # noqa: E402
from jaxformer.models import decoder  # noqa: E402
from jaxformer.optim import make_optimizer, make_schedule  # noqa: E402
from jaxformer.runs.device import with_kernel  # noqa: E402
from jaxformer.sharding import make_mesh  # noqa: E402
from jaxformer.training.state import init_state  # noqa: E402
from jaxformer.training.step import make_step  # noqa: E402


class Trainer:
    def __init__(self, run: RunConfig, weights: str) -> None:
        self.run, self.kernel = with_kernel(run)
        self.mesh = make_mesh(run.mesh, run.train.batch_size, run.train.microbatches)
        schedule = make_schedule(run.optimizer, run.train.steps)
        specs = decoder.specs(run.model)
        optimizer = make_optimizer(run.optimizer, schedule, specs)
        self.advance = make_step(self.run, optimizer, schedule, self.mesh)
        self.state = init_state(specs, optimizer, self.mesh, run.run.seed)
        size = (run.train.batch_size, run.data.sequence_length + 1)
        rows = np.random.default_rng(0).integers(run.model.vocab_size, size=size).astype(np.int32)
        ones = np.ones(rows[:, 1:].shape, np.float32)
        self.batch = jax.device_put({"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": ones})
        if weights:
            leaves = jax.tree.leaves_with_path(self.state.params)
            named = {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}
            np.savez(weights, **named)

    def step(self) -> dict[str, Any]:
        begin = time.perf_counter()
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.advance(self.state, self.batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(self.state)
        seconds = time.perf_counter() - begin
        if jax.default_backend() == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        return {"seconds": seconds, "loss": loss, "peak_bytes": peak}

    def product(self) -> dict[str, float]:
        """FLOP/s of a large product of random matrices, the best of five."""
        n = 2048 if jax.default_backend() == "cpu" else 8192
        a, b = (jax.random.normal(jax.random.key(i), (n, n), decoder.compute_dtype(self.run.model)) for i in range(2))
        multiply = jax.jit(jax.numpy.dot)
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            multiply(a, b).block_until_ready()
            times.append(time.perf_counter() - begin)
        return {"flops": 2 * n**3 / min(times[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=sorted(WORKS), required=True)
    parser.add_argument("--batch", type=int, default=0, help="sequences a step; 0 takes the work's own")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--save-weights", default="", help="write the initial values to this .npz")
    options = parser.parse_args()
    trainer = Trainer(with_sizes(WORKS[options.work], options.batch, options.microbatches), options.save_weights)
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    print(json.dumps({"versions": versions, "kernel": trainer.kernel, "device": jax.devices()[0].device_kind}), flush=True)
    commands = {"step": trainer.step, "product": trainer.product}
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        print(json.dumps(commands[line.strip()]()), flush=True)


if __name__ == "__main__":
    main()
