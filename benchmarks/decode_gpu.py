"""Greedy decoding of a 1.1B Llama on a GPU with bfloat16, int8 and NF4 weights, in 1 row and in 8,
beside the time that reading the weights takes.

    python benchmarks/decode_gpu.py [--rounds 5]

The limit is that of memory: every new token reads the weights once, all rows together, so it is the
bandwidth over the bytes of the weights that the loop reads. Sums of an array of 4 GiB measure the
bandwidth in each round. Rates are those after the first token: the time of all tokens less that of
one, each measured once in each round, the kinds of weights in turn.
"""

import argparse
import statistics
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from pairing import Answer, add_smoke, paired_ratio, print_table, save
from workloads import SMOKE_DECODED, TINY_LLAMA

import jaxformer as jf
from jaxformer.arrays.params import Params
from jaxformer.generation.weights import prepared

NAME = "decode_gpu"
KINDS = ("bfloat16", "int8", "nf4")
HEADER = ("weights", "rows", "GB of weights", "first token", "tokens/s", "limit", "of the limit")


def seconds(params: Params, config: jf.ModelConfig, prompt: np.ndarray, new: int) -> float:
    begin = time.perf_counter()
    np.asarray(jf.generate(params, config, prompt, new, temperature=0.0))
    return time.perf_counter() - begin


def bytes_read(params: Params, config: jf.ModelConfig) -> int:
    """Those of the weights that a token reads: of the embedding table, its row alone, unless the
    head is the same table."""
    weights = prepared(params, config)
    if not config.tied_head:
        weights = {name: branch for name, branch in weights.items() if name != "embed"}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


def bandwidth(array: jax.Array) -> float:
    """Bytes per second of sums of an array, the best of five."""
    total, times = jax.jit(jnp.sum), list[float]()
    for _ in range(6):
        begin = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - begin)
    return array.nbytes / min(times[1:])


def measure(options: argparse.Namespace) -> Answer:
    llama = replace(TINY_LLAMA, vocab_size=32_000, max_length=options.prompt + options.new)
    config = replace(SMOKE_DECODED if options.smoke else llama, dtype="bfloat16")
    master = jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))
    weights = {kind: jf.quantize(master, kind) for kind in KINDS[1:]}
    weights["bfloat16"] = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), master)
    del master
    array = jnp.ones(2**20 if options.smoke else 2**30)  # float32
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(1, options.prompt))
    rows: list[Answer] = []
    for batch in options.batches:
        prompt = np.repeat(tokens.astype(np.int32), batch, axis=0)
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        limits: list[float] = []
        for _ in range(options.rounds + 1):
            limits.append(bandwidth(array))
            for kind in KINDS:
                # The weights of a kind are prepared, and its programs compiled.
                seconds(weights[kind], config, prompt, 1)
                counts = (1, options.new)
                taken = [seconds(weights[kind], config, prompt, count) for count in counts]
                times[kind].append((taken[0], taken[1]))
        for kind in KINDS:
            size = bytes_read(weights[kind], config)
            pairs = times[kind][1:]  # the first round compiles
            limit = [read / size for read in limits[1:]]  # steps per second
            steps = [(options.new - 1) / (whole - first) for first, whole in pairs]
            row: Answer = {"kind": kind, "batch": batch, "bytes": size}
            row["first_token_seconds"] = [first for first, _ in pairs]
            row["tokens_per_second"] = [batch * rate for rate in steps]
            row["limit_tokens_per_second"] = [batch * rate for rate in limit]
            row["share_of_limit"] = paired_ratio(limit, steps)
            rows.append(row)
            print(row, flush=True)
    device = jax.devices()[0].device_kind
    result: Answer = {"device": device, "prompt": options.prompt, "new": options.new}
    return result | {"versions": {"jax": jax.__version__}, "results": rows}


def cells(row: Answer) -> list[str]:
    medians = [
        statistics.median(row[column])
        for column in ("first_token_seconds", "tokens_per_second", "limit_tokens_per_second")
    ]
    return [
        row["kind"],
        str(row["batch"]),
        f"{row['bytes'] / 1e9:.2f}",
        f"{1e3 * medians[0]:.1f} ms",
        f"{medians[1]:,.0f}",
        f"{medians[2]:,.0f}",
        "{median:.0%} ({low:.0%} to {high:.0%})".format(**row["share_of_limit"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        options.prompt, options.new, options.batches, options.rounds = 8, 8, [1, 2], 1
    elif jax.default_backend() != "gpu":
        parser.error("jax sees no GPU here; --smoke proves the code without one")
    result = measure(options)
    print(f"jax {jax.__version__} on {result['device']}")
    print_table(HEADER, [cells(row) for row in result["results"]])
    save(NAME, result, options.smoke)


if __name__ == "__main__":
    main()
