"""Trains GPT-2 124M and a 1.1B Llama on a GPU, in JAX and then with torch.compile, and prints how they compare.

    python benchmarks/train_gpu.py [--torch-python /path/to/python-with-torch] [--batch 64] [--steps 30]

The same mathematics in both: bfloat16 products from float32 master weights, AdamW with decay on matrices, clipping. The
two run one after the other, in processes of their own, twice; 5 steps warm up, and each step is timed to its end.
"""

import argparse
import statistics
import sys

from pairing import Answer, Worker, column, print_table, python_worker, save
from works import WORKS, torch_flags, with_sizes

from jaxformer.config import RunConfig
from jaxformer.models.cost import flops_per_token

WARMUPS = 5
HEADER = ["work", "with", "tokens/s", "spread", "MFU", "causal MFU", "of the ceiling", "peak memory"]


def measure(worker: Worker, steps: int) -> Answer:
    with worker:
        product = worker.ask("product")["flops"]
        for _ in range(WARMUPS):
            worker.ask("step")
        answers = [worker.ask("step") for _ in range(steps)]
        seconds = column(answers, "seconds")
        peak = max(column(answers, "peak_bytes"))
        losses = [answers[0]["loss"], answers[-1]["loss"]]
        return {"about": worker.about, "seconds": seconds, "peak_bytes": peak, "product_flops": product, "losses": losses}


def rounds(work: str, run: RunConfig, options: argparse.Namespace) -> list[Answer]:
    sizes = ("--batch", str(run.train.batch_size), "--microbatches", str(run.train.microbatches))
    flags = [*torch_flags(run), "--device", "cuda", "--bfloat16", "--compile"]
    found = []
    for _ in range(options.rounds):
        found.append(
            {"with": "jaxformer", **measure(python_worker("jax", "jax_peer.py", "--work", work, *sizes), options.steps)}
        )
        if options.torch_python:
            peer = python_worker("torch", "torch_peer.py", *flags, python=options.torch_python)
            found.append({"with": "torch.compile", **measure(peer, options.steps)})
    return found


def row(work: str, run: RunConfig, result: Answer, peak: float, ceiling: float) -> list[str]:
    """Full attention counts the hidden half of the scores as work done; causal does not."""
    length, model = run.data.sequence_length, run.model
    tokens = run.train.batch_size * length
    rate = tokens / statistics.median(result["seconds"])
    low, high = (tokens / f(result["seconds"]) for f in (max, min))
    full = flops_per_token(model, length)
    causal = full - 6 * model.n_layers * length * model.n_heads * model.head_width
    shares = [f"{rate * flops / limit:.1%}" for flops, limit in ((full, peak), (causal, peak), (full, ceiling))]
    memory = f"{result['peak_bytes'] / 2**30:.1f} GiB"
    return [work, result["with"], f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}", *shares, memory]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default="", help="a Python that has PyTorch; empty measures JAX alone")
    parser.add_argument("--works", nargs="+", default=["gpt2_124m_gpu", "llama_1b_gpu"], choices=sorted(WORKS))
    parser.add_argument("--batch", type=int, default=0, help="sequences a step; 0 takes the work's own")
    parser.add_argument("--microbatches", type=int, default=1, help="of JAX's step")
    parser.add_argument("--steps", type=int, default=30, help="timed steps, at least 20")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peak", type=float, default=989.0, help="the GPU's dense bfloat16 TFLOP/s")
    options = parser.parse_args()
    if options.steps < 20:
        sys.exit("--steps must be at least 20, or the median says little")
    results, table = {}, []
    for work in options.works:
        run = with_sizes(WORKS[work], options.batch, options.microbatches)
        results[work] = rounds(work, run, options)
        ceiling = max(result["product_flops"] for result in results[work])
        table += [row(work, run, result, options.peak * 1e12, ceiling) for result in results[work]]
    print_table(HEADER, table)
    print("Ceiling: the best large bfloat16 product of random data seen in this run.")
    save("train_gpu", {"peak_tflops": options.peak, "batch": options.batch, "results": results})


if __name__ == "__main__":
    main()
