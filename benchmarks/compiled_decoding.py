"""Compiles the loop over new tokens for TPUs and GPUs that are not here, by their real compilers,
and tables the bytes of main memory that a token moves, by the kind of the weights. Nothing is run.

    python benchmarks/compiled_decoding.py [--targets h100:1x1 v5e:1x1] [--table FILE]

Needs the extras plan-tpu and plan-gpu. The model has two layers of Llama 3 8B and a small
vocabulary, so that nearly all bytes are those of weights; one row, which is greedy. --table writes
the table between `<!-- decoding -->` and `<!-- /decoding -->` of a Markdown file.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # compilers of other platforms are asked by name

import jax
import numpy as np
from hlo import count
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pairing import Answer, add_smoke, print_table, save, write_table

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh
from jaxformer.files import ConfigError
from jaxformer.generation.decode import Sampling, _prefill, decode
from jaxformer.generation.weights import prepared
from jaxformer.runs.config import load_config
from jaxformer.tools.plan_compiled import parse_target

CONFIG = Path(__file__).parents[1] / "configs" / "llama3_8b.py"
KINDS = ("bfloat16", "int8", "nf4")
TOKENS, SLOTS = 8, 64  # new tokens of a program, and slots of its cache
HEADER = ["target", "weights", "bytes of the blocks", "bytes a token", "of bfloat16"]


def model(small: bool) -> jf.ModelConfig:
    config = replace(load_config(CONFIG).model, n_layers=2, vocab_size=1024, max_length=SLOTS)
    config = replace(config, layer_loop="unroll")
    return replace(config, d_model=256, d_ff=512, n_heads=4, n_kv_heads=2) if small else config


def measure(config: jf.ModelConfig, mesh: Mesh, kind: str) -> Answer:
    """The bytes of the weights of the blocks, and those that the program moves for each token."""

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec())
            ),
            tree,
        )

    def weights(key: jax.Array) -> Any:
        params = jf.init(config, key)
        return prepared(params if kind == "bfloat16" else jf.quantize(params, kind), config)

    def begun(params: Any, key: jax.Array) -> Any:
        prompt = (np.ones((1, 32), np.int32), np.ones((1, 32), np.int32))
        return _prefill(params, config, SLOTS, prompt, None, key, np.int32(TOKENS))

    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(weights, key)
    stream = jax.eval_shape(begun, params, key)
    rules = Sampling(temperature=0)
    program = decode.lower(placed(params), config, rules, TOKENS, placed(stream)).compile()
    counts = count(program.as_text() or "")
    # The text for a GPU does not say how often a loop runs: it is counted once.
    times = max((loop.trips for loop in counts.loops), default=1) or 1
    leaves = jax.tree.leaves(params["blocks"])
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return {"kind": kind, "block_bytes": size, "bytes_per_token": counts.bytes / times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="*", default=["h100:1x1", "v5e:1x1"])
    parser.add_argument("--table", type=Path, help="a Markdown file that gets the table")
    add_smoke(parser)
    options = parser.parse_args()
    answers, rows = [], []
    for name in ["cpu"] if options.smoke else options.targets:
        try:
            devices = jax.devices()[:1] if options.smoke else parse_target(name).devices()[:1]
        except ConfigError as error:
            print(f"{name}: {error}")
            continue
        mesh = make_mesh(devices=devices)
        with jax.set_mesh(mesh):
            found = [measure(model(options.smoke), mesh, kind) for kind in KINDS]
        for answer in found:
            answers.append({"target": name} | answer)
            mib = [answer[size] / 2**20 for size in ("block_bytes", "bytes_per_token")]
            share = answer["bytes_per_token"] / found[0]["bytes_per_token"]
            cells = [f"{size:,.1f} MiB" for size in mib]
            rows.append([name, answer["kind"], *cells, f"1 / {1 / share:.2f}"])
            print(", ".join(rows[-1]), flush=True)
    print_table(HEADER, rows)
    save("compiled_decoding", {"rows": answers}, options.smoke)
    if options.table:
        write_table(options.table, "decoding", HEADER, rows)


if __name__ == "__main__":
    main()
