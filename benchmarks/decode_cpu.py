"""Greedy decoding of GPT-2 124M on this CPU, batch 1, beside transformers' generate, in turn, from
the same weights.

    python benchmarks/decode_cpu.py [--torch-python /path/to/python-with-torch-and-transformers]

The limit is that of memory: every new token reads every parameter once, so it is the read
bandwidth over the bytes of the parameters. The bandwidth of a shared machine varies from second to
second. Sums of an array of 256 MB measure it after each pair of samples: each sample has a share of
their median, and the share of the fastest sum of the whole run stands beside it.

Then our own tokens a second with float32, int8 and NF4 weights, in 1 row and in 8, also for the
shape of SmolLM2-135M, and the start of `jaxformer sample` with a model of this shape
(`command_start.py`).
"""

import argparse
import os
import statistics
import sys
import tempfile

import numpy as np
from command_start import measure_starts, start_rows
from pairing import (
    Answer,
    Neighbours,
    Worker,
    add_smoke,
    alternate,
    column,
    paired_ratio,
    print_table,
    python_worker,
    ratio_text,
    save,
    verdict,
)
from workloads import DECODED, DECODED_SHAPES, SMOKE_DECODED, SMOLLM2

# first tokens that must agree; later ones may part where two logits are equal but for rounding
SURE = 8
READS = 5  # sums by each worker after each pair
KINDS = ("float32", "int8", "nf4")
BATCHES = (1, 8)
ROUNDS = 5  # in which all kinds of weights decode in turn


def measure(options: argparse.Namespace) -> Answer:
    config = SMOKE_DECODED if options.smoke else DECODED
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=options.prompt)
    prompt = ("--prompt", ",".join(map(str, tokens)))
    shape = {"layers": config.n_layers, "d_model": config.d_model, "heads": config.n_heads}
    shape |= {
        "vocab": config.vocab_size,
        "length": config.max_length,
        "threads": os.cpu_count() or 1,
    }
    flags = [text for name, size in shape.items() for text in (f"--{name}", str(size))]
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "weights.npz")
        small = ["--smoke"] if options.smoke else []
        ours = python_worker(
            "jax", "jax_decode_baseline.py", *prompt, "--save-weights", weights, *small
        )
        baseline = options.torch_python
        baseline = python_worker(
            "transformers",
            "torch_decode_baseline.py",
            *prompt,
            *flags,
            "--weights",
            weights,
            python=baseline,
        )
    workers = [ours, baseline]
    with ours, baseline:
        neighbours = Neighbours(workers)
        command = f"generate {options.new}"
        alternate(workers, command, 1, warmups=0)  # compiles
        whole: list[list[Answer]] = [[], []]
        reads, fastest = [], 0.0  # bytes per second: the median of each pair, the fastest of all
        for _ in range(options.samples):
            for answers, worker in zip(whole, workers, strict=True):
                answers.append(worker.ask(command))
            found = [worker.ask("read") for _ in range(READS) for worker in workers]
            reads.append(statistics.median(column(found, "bytes_per_second")))
            fastest = max(fastest, *column(found, "bytes_per_second"))
        share = neighbours.share()
        first = alternate(workers, "generate 1", options.samples, warmups=1)
    if whole[0][0]["tokens"][:SURE] != whole[1][0]["tokens"][:SURE]:
        raise SystemExit(
            f"the two do not compute the same: {whole[0][0]['tokens'][:SURE]},"
            f" {whole[1][0]['tokens'][:SURE]}"
        )
    seconds = [column(answers, "seconds") for answers in whole]
    starts = [statistics.median(column(answers, "seconds")) for answers in first]
    limits = [read / ours.about["parameter_bytes"] for read in reads]
    highest = fastest / ours.about["parameter_bytes"]
    rates = [
        [(options.new - 1) / (one - start) for one in s]
        for s, start in zip(seconds, starts, strict=True)
    ]
    return {
        "prompt": options.prompt,
        "new": options.new,
        "seconds": seconds,
        "first_token_seconds": starts,
        "tokens_per_second_after_the_first": [statistics.median(side) for side in rates],
        "ratio": paired_ratio(seconds[0], seconds[1]),
        "read_bytes_per_second": reads,
        "fastest_read_bytes_per_second": fastest,
        "limit_tokens_per_second": limits,
        "share_of_limit": [paired_ratio(limits, side) for side in rates],
        "share_of_highest_limit": [statistics.median(side) / highest for side in rates],
        "neighbours": share,
        "versions": ours.about["versions"] | baseline.about["versions"],
    }


def measure_kinds(options: argparse.Namespace) -> list[Answer]:
    """Our tokens a second after the first, of all rows together, by shape, kind of weights and
    rows: medians of samples of all kinds in turn, and the ratio to float32 of the same round."""
    tokens = ",".join(map(str, range(options.prompt)))
    small = ["--smoke"] if options.smoke else []
    answers: list[Answer] = []
    # In small all shapes are one.
    most = 1 if options.smoke else None
    for shape in [*DECODED_SHAPES][:most]:
        with tempfile.TemporaryDirectory() as folder:
            weights = ("--save-weights", os.path.join(folder, "weights.npz"))
            arguments = ("--prompt", tokens, "--shape", shape, *weights, *small)
            with python_worker("jax", "jax_decode_baseline.py", *arguments) as worker:
                for rows in BATCHES[:most]:
                    answers += in_turn(worker, shape, rows, options)
    return answers


def in_turn(worker: Worker, shape: str, rows: int, options: argparse.Namespace) -> list[Answer]:
    """The rows of the table for one number of rows."""
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(1 + min(options.samples, ROUNDS)):
        for kind in KINDS:
            answer = worker.ask(f"stored {kind} {rows} {options.new}")
            # In a smoke test the difference is within the noise of the clock.
            seconds = max(answer["seconds"] - answer["first_token_seconds"], 1e-6)
            if number:  # the first round compiles
                rates[kind].append(rows * (options.new - 1) / seconds)
    return [
        {
            "shape": shape,
            "kind": kind,
            "rows": rows,
            "tokens_per_second_after_the_first": statistics.median(rates[kind]),
            "of_float32": paired_ratio(rates["float32"], rates[kind]),
        }
        for kind in KINDS
    ]


def share_text(share: dict[str, float]) -> str:
    return f"{share['median']:.0%} ({share['low']:.0%} to {share['high']:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, help="a Python with PyTorch and transformers"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens")
    parser.add_argument("--samples", type=int, default=8, help="paired samples")
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        options.prompt, options.new, options.samples = 8, SURE, 1
    result = measure(options)
    rows = []
    for i, name in enumerate(("jaxformer", "transformers")):
        whole, start = statistics.median(result["seconds"][i]), result["first_token_seconds"][i]
        rate, share = result["tokens_per_second_after_the_first"][i], result["share_of_limit"][i]
        highest = result["share_of_highest_limit"][i]
        ratio = ratio_text(result["ratio"]) if i == 0 else "1"
        rows.append([name, f"{whole:.2f} s", ratio, f"{start:.2f} s", f"{rate:.1f}"])
        rows[-1] += [share_text(share), f"{highest:.0%}"]
    header = ["", "end to end", "ratio", "first token", "tokens/s after it", "of the limit"]
    print_table([*header, "of the highest limit"], rows)
    limits, reads = result["limit_tokens_per_second"], result["read_bytes_per_second"]
    print(
        f"Limit {statistics.median(limits):.1f} tokens/s ({min(limits):.1f} to {max(limits):.1f}),"
        f" at {statistics.median(reads) / 1e9:.1f} GB/s read ({min(reads) / 1e9:.1f} to"
        f" {max(reads) / 1e9:.1f}; the fastest"
        f" {result['fastest_read_bytes_per_second'] / 1e9:.1f})."
    )
    print(verdict(result["neighbours"]))
    result["kinds"] = measure_kinds(options)
    rows = [
        [
            answer["shape"],
            answer["kind"],
            str(answer["rows"]),
            f"{answer['tokens_per_second_after_the_first']:.1f}",
            ratio_text(answer["of_float32"]),
        ]
        for answer in result["kinds"]
    ]
    print_table(["ours", "weights", "rows", "tokens/s after the first", "of float32"], rows)
    shape = SMOKE_DECODED if options.smoke else SMOLLM2
    result["starts"] = measure_starts(options.torch_python, shape, min(options.samples, 3))
    print_table(["8 new tokens", "wall", "processor", "samples"], start_rows(result["starts"]))
    save("decode_cpu", result, options.smoke)


if __name__ == "__main__":
    main()
