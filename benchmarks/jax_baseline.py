"""Our side of the comparison: a worker that trains a run of workloads.py by the library's own step,
as train.py does."""

import argparse
import resource
import time
from typing import Any

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
import jaxlib  # noqa: E402
import numpy as np  # noqa: E402
from serving import serve  # noqa: E402
from steps import ready_on_random_tokens  # noqa: E402
from workloads import WORKLOADS, shrunk, with_sizes  # noqa: E402

from jaxformer.config.run import RunConfig  # noqa: E402
from jaxformer.config.settings import with_settings  # noqa: E402
from jaxformer.models.stack import compute_dtype  # noqa: E402


class Trainer:
    """Trains a run a step at a time on random tokens; `weights` is a file for the initial
    values."""

    def __init__(self, run: RunConfig, weights: str) -> None:
        ready, self.kernel = ready_on_random_tokens(run)
        self.run, self.mesh, self.batch = run, ready.mesh, ready.batch(0)
        self.advance, self.state = ready.step, ready.state()
        if weights:
            save_arrays(weights, self.state.params)

    def step(self) -> dict[str, Any]:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.advance(self.state, self.batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(self.state)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        if jax.default_backend() == "cpu":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        else:
            peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        return times | {"loss": loss, "peak_bytes": peak}

    def product(self, size: int = 0) -> dict[str, float]:
        """FLOP/s of a large product of random matrices, the best of five. An accelerator computes
        several, since the host starts the next one meanwhile."""
        n, count = (2048, 1) if jax.default_backend() == "cpu" else (8192, 20)
        n = size or n
        a, b = (
            jax.random.normal(jax.random.key(i), (n, n), compute_dtype(self.run.model))
            for i in range(2)
        )
        multiply = jax.jit(jax.numpy.dot)
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            for _ in range(count):
                product = multiply(a, b)
            product.block_until_ready()
            times.append((time.perf_counter() - begin) / count)
        return {"flops": 2 * n**3 / min(times[1:])}


def save_arrays(path: str, params: Any) -> None:
    """Writes params as an .npz of dotted paths."""
    leaves = jax.tree.leaves_with_path(params)
    named = {
        jax.tree_util.keystr(place, simple=True, separator="."): leaf for place, leaf in leaves
    }
    np.savez(path, allow_pickle=False, **{name: np.asarray(leaf) for name, leaf in named.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument(
        "--batch", type=int, default=0, help="sequences a step; 0 takes the workload's own"
    )
    parser.add_argument("--microbatches", type=int, default=0, help="0 selects them as a run does")
    parser.add_argument("--save-weights", default="", help="write the initial values to this .npz")
    parser.add_argument("--smoke", action="store_true", help="the workload shrunk")
    parser.add_argument("--dtype", default="auto", help="model.dtype")
    options = parser.parse_args()
    run = shrunk(WORKLOADS[options.workload]) if options.smoke else WORKLOADS[options.workload]
    run = with_sizes(run, options.batch, options.microbatches)
    run = with_settings(run, {"model.dtype": options.dtype})
    trainer = Trainer(run, options.save_weights)
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    device = jax.devices()[0].device_kind
    about = {"versions": versions, "kernel": trainer.kernel, "device": device}
    serve(about, {"step": trainer.step, "product": trainer.product})


if __name__ == "__main__":
    main()
