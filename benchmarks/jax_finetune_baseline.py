"""Our side of benchmarks/finetune.py: a worker that fine-tunes a model on random tokens."""

import argparse
import ctypes
import dataclasses
import time
from pathlib import Path
from typing import Any

from serving import serve

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jaxformer as jf  # noqa: E402
from jaxformer.training.state import learning  # noqa: E402

RATE = 1e-4


def high_water() -> int:
    """The most memory that this process had, in bytes, since `begin_anew` (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def begin_anew() -> None:
    """Gives free memory back to the system, as that of the compiler, and begins to count anew."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def size_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class Trainer:
    """Full fine-tuning, or an adapter over the model, by the library's own step."""

    def __init__(self, options: argparse.Namespace) -> None:
        loaded = jf.load(options.model, quantize="nf4" if options.method == "qlora" else None)
        config = dataclasses.replace(loaded.config, layer_loop=options.layer_loop)
        params, key = loaded.params, jax.random.key(0)
        self.base_bytes, self.base = size_of(params), parts_of_blocks(params)
        trainable: Any = None
        if options.method in ("lora", "qlora"):
            lora = jf.LoRA(rank=options.rank, alpha=2.0 * options.rank, targets=("attention",))
            params = jf.adapt(params, config, lora, key)
        elif options.method == "prompt":
            params = jf.adapt(params, config, jf.PromptTuning(tokens=options.tokens), key)
        if options.method != "full":
            trainable = jf.adapter_mask(params)
        optimizer = optax.adamw(RATE)
        self.state = jf.init_state(params, optimizer, trainable=trainable)
        del params, loaded
        # What does not learn is None in the tree that the optimizer sees.
        learned = learning(self.state.params, self.state.frozen)
        self.learned, moments = size_of(learned) // 4, size_of(self.state.optimizer)
        # AdamW has two moments of each number that learns, and one counter.
        if moments != 8 * self.learned + 4:
            raise SystemExit(
                f"{options.method}: {moments} bytes of optimizer state for {self.learned} numbers"
            )
        self.moments = moments
        rng = np.random.default_rng(0)
        rows = rng.integers(0, config.vocab_size, (options.batch, options.length + 1))
        rows = rows.astype(np.int32)
        weights = np.ones((options.batch, options.length), np.float32)
        self.batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}
        step = jf.make_step(jf.loss_of("causal", config), optimizer, trainable=trainable)
        self.step_of = step.lower(self.state, self.batch).compile()
        memory: Any = self.step_of.memory_analysis()
        self.needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        begin_anew()

    def step(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.state, metrics = self.step_of(self.state, self.batch)
        loss = float(metrics["loss"])
        jax.block_until_ready(self.state)
        return {
            "seconds": time.perf_counter() - begin,
            "loss": loss,
            "above_base": high_water() - self.base_bytes,
        }


def parts_of_blocks(params: Any) -> dict[str, float]:
    """Bytes and weights of the matrices of the blocks, which a quantized base holds in few bits."""
    total, weights = 0, 0
    for sublayer in ("attention", "ffn"):
        for leaf in params["blocks"][sublayer].values():
            if len(leaf.shape) > 2:
                total += size_of(leaf)
                weights += int(np.prod(leaf.shape))
    return {"bytes": total, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    methods = ("full", "lora", "qlora", "prompt")
    parser.add_argument("--method", choices=methods, required=True)
    parser.add_argument("--layer-loop", choices=("scan", "unroll"), default="scan")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=20, help="virtual tokens of a prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    trainer = Trainer(parser.parse_args())
    about = {
        "versions": {"jax": jax.__version__},
        "base_bytes": trainer.base_bytes,
        "matrices": trainer.base,
        "learned": trainer.learned,
        "optimizer_bytes": trainer.moments,
        "needed_bytes": trainer.needed,
    }
    serve(about, {"step": trainer.step})


if __name__ == "__main__":
    main()
