"""`jaxformer serve` beside offline `refill`: the tokens per second of 32 requests at a time, and
the time to the first token of one request beside that of `jaxformer sample`.

A model of the shape of SmolLM2-135M with random weights (`--layers` makes it shorter). The server
is a process of its own; the sides take turns, and the ratio is the median of the pairs.

    python benchmarks/serve_cpu.py [--layers 30] [--samples 3] [--smoke]
"""

import argparse
import asyncio
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
from pairing import cpu_model, print_table

import jaxformer as jf
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.refill import refill
from jaxformer.tokenizer import byte_tokenizer

REQUESTS, ROWS = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    sizes: dict[str, Any] = {"vocab_size": 49152, "d_model": 576, "d_ff": 1536, "n_heads": 9}
    sizes |= {"n_kv_heads": 3, "n_layers": options.layers, "max_length": 2048}
    if options.smoke:
        sizes |= {"vocab_size": 512, "d_model": 32, "d_ff": 64, "n_heads": 2, "n_kv_heads": 1}
        sizes |= {"n_layers": 1}
        options.samples = 1
        options.tokens = 4
    config = jf.ModelConfig(positions="rope", **sizes)
    params = jf.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, length).tolist() for length in rng.integers(16, 96, REQUESTS)]
    with tempfile.TemporaryDirectory() as folder:
        jf.save_pretrained(Path(folder, "model"), params, config)
        byte_tokenizer().save(Path(folder, "model", "tokenizer.json"))
        model = jf.load(Path(folder, "model"))
        rules = jf.writing_rules(Path(folder, "model")) | {"temperature": 0.0, "end_token": ()}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jaxformer", "serve", f"{folder}/model"]
        command += ["--port", str(port), "--rows", str(ROWS)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            print(process.stdout.readline().strip(), file=sys.stderr)
            url = f"http://127.0.0.1:{port}/v1/completions"

            def offline() -> int:
                texts = refill(model.params, config, prompts, options.tokens, rows=ROWS, **rules)
                return sum(len(tokens) for _, tokens in texts)

            def online() -> int:
                return asyncio.run(_requests(url, prompts, options.tokens))

            def first_of_sample() -> int:
                loop = replace(config, layer_loop="scan")  # as `sample` takes it for short texts
                how = {"key": jax.random.key(0)} | rules
                next(iter(stream_tokens(model.params, loop, prompts[:1], 32, **how)))
                return 1

            numbers = itertools.count()

            def first_of_server() -> int:
                # With scores each token is an event, also one without a character.
                # The server keeps the last prompt that it read, so each is another one.
                prompt = [next(numbers) % 256, *prompts[0][1:]]
                body = {"prompt": prompt, "max_tokens": 32, "logprobs": 0, "stream": True}
                body["temperature"] = 0
                with httpx.stream("POST", url, json=body, timeout=None) as answer:
                    next(answer.iter_lines())
                return 1

            print(f"{cpu_model()}, {os.cpu_count()} cores, jax {jax.__version__}")
            _compare("tokens per second", online, offline, options.samples, False)
            _compare(
                "seconds to the first", first_of_server, first_of_sample, options.samples, True
            )
        finally:
            process.terminate()
            process.wait()


def _compare(
    name: str, served: Callable[[], int], offline: Callable[[], int], samples: int, as_seconds: bool
) -> None:
    """Print the medians of both, and that of the ratio of each pair; the first pair compiles."""
    rows = []
    for sample in range(samples + 1):
        row = []
        for run in (served, offline):
            begin = time.perf_counter()
            count = run()
            taken = time.perf_counter() - begin
            row.append(taken / count if as_seconds else count / taken)
        print(sample, name, row, file=sys.stderr)
        rows.append(row)
    pairs = rows[1:]
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    ratio = statistics.median(one / other for one, other in pairs)
    row_of_table = [name, *(f"{median:.4g}" for median in medians), f"{ratio:.2f}"]
    print_table(["measured", "served", "offline", "median ratio of pairs"], [row_of_table])


async def _requests(url: str, prompts: list[list[int]], tokens: int) -> int:
    """Return the number of tokens of all prompts at a time; the end token ends no text of random
    weights before its length in most cases."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:

        async def ask(prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            answer = (await client.post(url, json=body)).json()
            return int(answer["usage"]["completion_tokens"])

        return sum(await asyncio.gather(*map(ask, prompts)))


if __name__ == "__main__":
    main()
