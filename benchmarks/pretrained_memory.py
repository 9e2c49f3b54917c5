"""Host memory of reading and writing a Hugging Face directory. `python
benchmarks/pretrained_memory.py`

Llamas of about 2 GB and one of 8 GB are made on the spot, then read by `jf.load` and written by
`jf.save_pretrained`, in processes of their own. Every few milliseconds the resident memory is
taken, anonymous and file pages both, less what the process had after a tiny computation, and less
the bytes of the arrays where their device is the CPU: in reading those of the leaves that are
placed (a large one is, from the time that it is begun), in writing all that live. The largest of
these is the excess. Reading may reach one shard of the files, writing the largest leaf on the host
plus 1 GiB. The kernel's own high-water mark, less the whole model, stands beside it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pairing import Answer, add_smoke, print_table, save

MIB = 1 << 20
ALLOWED = 1 << 30  # beyond the largest leaf
SAMPLE_SECONDS = 0.002
# Of the files.
SHARD_BYTES = {"layers": 500 * MIB, "vocabulary": 500 * MIB, "eight_gb": 1 << 30}
SHARD_BYTES["smoke"] = 500 * MIB
PACKAGES = ("jax", "jaxlib", "numpy", "safetensors")
# Where most of the weights lie: in the layers' stacked matrices, or in one table that is not
# stacked.
SHAPES = {
    "layers": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 8,
        "vocab_size": 32_000,
    },
    "vocabulary": {
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
        "vocab_size": 120_000,
    },
    "eight_gb": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 16,
        "vocab_size": 32_000,
    },
}
SMOKE = {
    "smoke": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
}
# What is done, the dtype in the files that are read or written, that of the params, and the devices
# over which these are sharded.
CASES = (
    ("load", "float32", "float32", 1),
    ("load", "bfloat16", "float32", 1),
    ("load", "bfloat16", "bfloat16", 1),
    ("save", "float32", "float32", 1),
    ("save", "bfloat16", "float32", 1),
)
OF_LARGE = (("load", "bfloat16", "bfloat16", 1), ("load", "bfloat16", "bfloat16", 2))
CASES_OF = {"layers": CASES, "vocabulary": CASES, "eight_gb": OF_LARGE, "smoke": OF_LARGE}
HEADER = [
    "model",
    "what",
    "files",
    "params",
    "devices",
    "model MiB",
    "largest leaf",
    "bound",
    "excess",
    "high-water mark",
    "seconds",
]


def make_model(folder: Path, shape: str, dtype: str) -> None:
    """A directory with random weights in shards, one tensor in memory at a time."""
    import ml_dtypes  # noqa: F401  (numpy learns bfloat16)
    import numpy as np

    from jaxformer.interop.tensor_files import write_tensors

    sizes = (SHAPES | SMOKE)[shape]
    width, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}{name}.weight": (width,)
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{at}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{at}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (width, inner)
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}
    random = np.random.default_rng(0)
    table = {name: (shape, np.dtype(dtype)) for name, shape in shapes.items()}
    write_tensors(
        folder,
        table,
        lambda name: random.standard_normal(shapes[name], np.float32),
        SHARD_BYTES[shape],
    )
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 256}
    config = (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
        | sizes
        | heads
    )
    (folder / "config.json").write_text(
        json.dumps(config | {"rms_norm_eps": 1e-5, "rope_theta": 10000.0})
    )


def status(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def resident() -> int:
    return status("RssAnon") + status("RssFile")


class Watch:
    """Takes this process's memory on a thread while the block runs, less what it had when this was
    made, and less the bytes of arrays that `live` counts."""

    def __init__(self, live: Callable[[], int]) -> None:
        self._live = live
        self._before = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.excess = self.samples = 0

    def __enter__(self) -> "Watch":
        Path("/proc/self/clear_refs").write_text(
            "5", encoding="ascii"
        )  # the high-water mark begins anew
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.high_water = status("VmHWM") - self._before - self._live()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            # Before the memory: an array that comes to life between the two counts as excess.
            live = self._live()
            self.excess = max(self.excess, resident() - self._before - live)
            self.samples += 1


def live_bytes() -> int:
    import jax

    arrays = jax.live_arrays() if jax.default_backend() == "cpu" else []
    return sum(array.nbytes for array in arrays)


def count_placed() -> Callable[[], int]:
    """A function that says how many bytes of leaves are placed on the CPU's devices."""
    import jax

    from jaxformer.interop import pretrained

    place, placed = pretrained._placed, 0

    def counted(read: Any, spec: Any, sharding: Any, dtype: str) -> Any:
        nonlocal placed
        size = math.prod(spec.shape) * jax.numpy.dtype(dtype).itemsize
        is_large = size > pretrained.HOST_BYTES
        placed += size * is_large
        leaf = place(read, spec, sharding, dtype)
        placed += size * (not is_large)
        return leaf

    pretrained._placed = counted
    return lambda: placed if jax.default_backend() == "cpu" else 0


def work(case: tuple[str, str, str, str], source: Path, target: Path, devices: int) -> Answer:
    """One case, in a process of its own."""
    import jax
    import jax.numpy as jnp

    import jaxformer as jf

    shape, what, files, dtype = case
    jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()
    mesh = None if devices == 1 else jf.make_mesh(data=1, fsdp=devices)
    watch = Watch(live_bytes if what == "save" else count_placed())
    loaded: Any = None
    if what == "save":
        loaded = jf.load(source, dtype=dtype)
        jax.block_until_ready(loaded.params)
    begin = time.perf_counter()
    with watch:
        if what == "save":
            jf.save_pretrained(
                target, loaded.params, loaded.config, dtype=files, shard_bytes=SHARD_BYTES[shape]
            )
        else:
            loaded = jf.load(source, dtype=dtype, mesh=mesh)
            jax.block_until_ready(loaded.params)
    leaves = [leaf.nbytes for leaf in jax.tree.leaves(loaded.params)]
    return {
        "seconds": time.perf_counter() - begin,
        "excess": watch.excess,
        "high_water": watch.high_water,
        "samples": watch.samples,
        "model": sum(leaves),
        "largest_leaf": max(leaves),
        "device": jax.devices()[0].device_kind,
    }


def measure(options: argparse.Namespace) -> list[Answer]:
    found = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory(
            prefix="jaxformer-pretrained-", dir=options.scratch
        ) as folder:
            for what, files, dtype, devices in CASES_OF[shape]:
                source = Path(folder) / (files if what == "load" else "float32")
                if not source.is_dir():
                    make_model(source, shape, source.name)
                case = (shape, what, files, dtype)
                command = [sys.executable, __file__, "--work", *case, str(source)]
                flags = f"--xla_force_host_platform_device_count={devices}"
                answer = subprocess.run(
                    [*command, str(Path(folder) / "saved"), str(devices)],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"},
                ).stdout
                names = ("shape", "what", "files", "params")
                row = dict(zip(names, case, strict=True)) | {"devices": devices}
                found.append(row | json.loads(answer.splitlines()[-1]))
    return found


def table_row(answer: Answer) -> list[str]:
    leaf = answer["largest_leaf"]
    bound = leaf + ALLOWED if answer["what"] == "save" else SHARD_BYTES[answer["shape"]]
    verdict = "" if answer["excess"] <= bound else " OVER"
    sizes = [f"{size / MIB:,.0f}" for size in (answer["model"], leaf, bound)]
    measured = [
        f"{answer['excess'] / MIB:,.0f}{verdict}",
        f"{answer['high_water'] / MIB:,.0f}",
        f"{answer['seconds']:.1f}",
    ]
    names = ("shape", "what", "files", "params", "devices")
    return [*(str(answer[name]) for name in names), *sizes, *measured]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scratch", help="where the models are made: room for 10 GB (default: the system's place)"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    add_smoke(parser)
    parser.add_argument("--work", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        *case, source, target, devices = options.work
        print(json.dumps(work(tuple(case), Path(source), Path(target), int(devices))))
        return
    if options.smoke:
        options.shapes = [*SMOKE]
    found = measure(options)
    print_table(HEADER, [table_row(answer) for answer in found])
    versions = {name: version(name) for name in PACKAGES}
    print(
        "MiB of host memory, ",
        found[0]["device"],
        ", ",
        ", ".join(f"{k} {v}" for k, v in versions.items()),
        sep="",
    )
    result = {"versions": versions, "sizes": SHAPES, "shard_bytes": SHARD_BYTES, "cases": found}
    save("pretrained_memory", result, options.smoke)


if __name__ == "__main__":
    main()
