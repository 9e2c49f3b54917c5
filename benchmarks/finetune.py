"""Fine-tunes a Llama of 1.1 billion parameters, made on the spot, on this CPU: all of it, by LoRA,
by LoRA over an NF4 base (QLoRA), and by a prompt; LoRA beside transformers and peft in turn.

    python benchmarks/finetune.py [--samples 4] [--length 256]

Each method runs in a process of its own. "Above the base" is the largest memory of the process in
its steps, less the bytes of the model below. Layers are scanned, but in the comparison with peft:
unrolled ones are a little faster and keep a copy of each weight from the forward pass of a CPU to
the backward pass. A step that needs more memory than the machine has is not run: its memory is that
of the compiler's account.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from pairing import (
    Answer,
    Neighbours,
    add_smoke,
    alternate,
    column,
    cpu_model,
    paired_ratio,
    print_table,
    python_worker,
    ratio_text,
    save,
    verdict,
)

from jaxformer.interop.tensor_files import write_tensors

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}
SMOKE_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
METHODS = ("full", "lora", "qlora", "prompt")
LOSS_TOLERANCE = 2e-3  # nats, of the first step from the same weights
MOST_BYTES = 0.6  # of a weight of a quantized matrix
HEADER = ["method", "trained", "optimizer", "base", "above the base", "s/step", "tokens/s"]


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """A directory with random weights, one tensor in memory at a time."""
    width, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    narrow = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocab, width),
    }
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (width,)
        for name, outputs in {"q": width, "k": narrow, "v": narrow, "o": width}.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = (outputs, width)
        for name in ("gate", "up"):
            shapes[f"{at}mlp.{name}_proj.weight"] = (inner, width)
        shapes[f"{at}mlp.down_proj.weight"] = (width, inner)
    random = np.random.default_rng(0)

    def values(name: str) -> np.ndarray:
        if len(shapes[name]) == 1:
            return np.ones(shapes[name], np.float32)
        return np.float32(0.02) * random.standard_normal(shapes[name], np.float32)

    table = {name: (shape, np.dtype("float32")) for name, shape in shapes.items()}
    write_tensors(folder, table, values, 500 << 20)
    config: dict[str, Any] = sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(folder: str, method: str, options: argparse.Namespace) -> Answer:
    """One method alone."""
    shape = ("--model", folder, "--length", str(options.length), "--batch", str(options.batch))
    with python_worker(method, "jax_finetune_baseline.py", *shape, "--method", method) as worker:
        about = worker.about | {"method": method}
        needed = worker.about["needed_bytes"]
        if needed > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            above = needed - about["base_bytes"]
            return about | {"seconds": None, "above_base": above, "neighbours": 0.0}
        neighbours = Neighbours([worker])
        answers = alternate([worker], "step", options.samples, warmups=1)[0]
        return about | {
            "seconds": column(answers, "seconds"),
            "above_base": max(column(answers, "above_base")),
            "neighbours": neighbours.share(),
        }


def beside_peft(folder: str, options: argparse.Namespace) -> Answer:
    """LoRA here, with unrolled layers, and there in turn, from the same weights on the same
    tokens."""
    shape = ("--model", folder, "--length", str(options.length), "--batch", str(options.batch))
    own = (*shape, "--method", "lora", "--layer-loop", "unroll")
    ours = python_worker("lora", "jax_finetune_baseline.py", *own)
    theirs = python_worker("peft", "peft_baseline.py", *shape, "--threads", str(os.cpu_count()))
    with ours, theirs:
        first = alternate([ours, theirs], "step", samples=1, warmups=0)
        losses = [answers[0]["loss"] for answers in first]
        if not abs(losses[0] - losses[1]) < LOSS_TOLERANCE:
            raise SystemExit(f"the two do not compute the same: losses {losses}")
        neighbours = Neighbours([ours, theirs])
        steps = alternate([ours, theirs], "step", options.samples, warmups=1)
        seconds = [column(answers, "seconds") for answers in steps]
        return {
            "versions": ours.about["versions"] | theirs.about["versions"],
            "seconds": seconds,
            "ratio": paired_ratio(*seconds),
            "above_base": [max(column(answers, "above_base")) for answers in steps],
            "learned": [worker.about["learned"] for worker in (ours, theirs)],
            "neighbours": neighbours.share(),
        }


def row(result: Answer, tokens: int) -> list[str]:
    speed = ["does not fit", ""]
    if result["seconds"]:
        seconds, ends = statistics.median(result["seconds"]), sorted(result["seconds"])
        speed = [f"{seconds:.2f} ({ends[0]:.2f} to {ends[-1]:.2f})", f"{tokens / seconds:,.1f}"]
    return [
        result["method"],
        f"{result['learned']:,}",
        f"{result['optimizer_bytes'] / 1e6:,.1f} MB",
        f"{result['base_bytes'] / 1e9:.2f} GB",
        f"{result['above_base'] / 1e9:.2f} GB",
        *speed,
    ]


def check_base(result: Answer) -> float:
    """Bytes of a weight of a quantized base's matrices. Ends the program where they are too
    many."""
    matrices = result["matrices"]
    share = float(matrices["bytes"] / matrices["weights"])
    if share >= MOST_BYTES:
        raise SystemExit(f"the NF4 base takes {share:.3f} bytes a weight, not below {MOST_BYTES}.")
    return share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--samples", type=int, default=4, help="steps of each, after a first one")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        options.samples, options.length = 1, 32
    tokens = options.batch * options.length
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), SMOKE_SIZES if options.smoke else SIZES)
        results = []
        for method in options.methods:
            results.append(measure(folder, method, options))
            print_table(HEADER, [row(results[-1], tokens)])
        pair = beside_peft(folder, options)
    print(f"\n{cpu_model()}, {os.cpu_count()} cores; {pair['versions']}\n")
    print_table(HEADER, [row(result, tokens) for result in results])
    for result in results:
        if result["method"] == "qlora":
            print(f"The NF4 base takes {check_base(result):.3f} bytes a weight of its matrices.")
    ratio = ratio_text(pair["ratio"])
    print(f"LoRA's tokens/s, layers unrolled, over peft's: {ratio} of {options.samples} pairs.")
    memory = [f"{size / 1e9:.2f} GB" for size in pair["above_base"]]
    print(f"Memory above the base: {memory[0]} here, {memory[1]} with peft.")
    print(verdict(max(entry["neighbours"] for entry in (*results, pair))))
    save("finetune", {"results": results, "beside_peft": pair, "tokens": tokens}, options.smoke)


if __name__ == "__main__":
    main()
