"""Compiles attention alone for TPUs that are not here, with blocks of several sizes, and tables
what the compiler says: whether blocks fit into its vector memory, and how long its schedule is.
Nothing is run. The table `LARGE_FROM` of `jaxformer/layers/pallas.py` follows from it.

    python benchmarks/attention_blocks.py [--devices v5e v6e] [--heads 128]

Needs the extra plan-tpu. Each program is value and gradients of causal splash attention in
bfloat16, of one row and one head. Results are saved after each of them in
results/attention_blocks.json; what that file has is not compiled again.

The length of a kernel's schedule is counted in bundles (of instructions that a core issues
together), a lower bound on its cycles: for each block of scores that is computed (`block`), each
block of queries or keys that is begun and ended (`ends`), and each step of the grid (`step`). From
these follow the bundles of a row of some length, over all kernels.
"""

import argparse
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # compilers of other platforms are asked by name

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from pairing import HERE, Answer, add_smoke, print_table, save

from jaxformer.arrays.mesh import make_mesh
from jaxformer.files import ConfigError
from jaxformer.layers import pallas
from jaxformer.layers.kernels import KERNELS
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of
from jaxformer.tools.plan_compiled import TPU_AXES, parse_target

NAME = "attention_blocks"
LENGTHS = (1024, 2048, 4096, 8192)
SIZES = [(512, 512), (512, 1024), (1024, 512), (1024, 1024), (1024, 2048), (2048, 1024)]
HEADER = ["device", "head", "packed", "queries", "keys", *(f"{n:,}" for n in LENGTHS)]
# Files of the final schedules of kernels, not of fusions.
KERNEL = re.compile(r"\d+-(splash.*)\.\d+-\d+-final_bundles\.txt")
LARGE = 30  # bundles; shorter branches wait for copies
BUNDLE = re.compile(r"^ *0x([0-9a-f]+) +")
SKIPS = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")


def schedule(text: str) -> dict[str, int]:
    """The bundles of a kernel by its final schedule: those of the longest branch, of the other
    innermost branches, and the rest of a step."""
    open_: dict[str, int] = {}
    branches: list[tuple[int, int]] = []
    last = 0
    for line in text.splitlines():
        found = BUNDLE.match(line)
        if not found:
            continue
        last = int(found[1], 16)
        for region in [name for name in open_ if re.search(rf"region {name}\b", line)]:
            if " PF" in line[:20]:
                branches.append((open_.pop(region), last))
        skip = SKIPS.search(line)
        if skip:
            open_[skip[1]] = last + 1
    inner = [
        end - begin
        for begin, end in branches
        if not any(begin <= a and b <= end and (a, b) != (begin, end) for a, b in branches)
    ]
    large = sorted(size for size in inner if size > LARGE)
    if not large:
        raise ValueError("this schedule has no branch of a kernel")
    return {"block": large[-1], "ends": sum(large[:-1]), "step": last - sum(large)}


def bundles(kernel: str, found: dict[str, int], blocks: tuple[int, int], length: int) -> int:
    """The bundles of a kernel for one head of a causal row."""
    queries, keys = (min(size, length) for size in blocks)
    rows, columns = length // queries, length // keys
    seen = sum(j * keys < (i + 1) * queries for i in range(rows) for j in range(columns))
    begun = columns if "dkv" in kernel else rows
    return found["block"] * seen + found["ends"] * begun + found["step"] * rows * columns


def measure(device: str, head: int, blocks: tuple[int, int], packed: bool, dumps: Path) -> Answer:
    """The schedules of the kernels of a program, which the compiler writes to the directory
    `dumps`, or an "error" in their place."""
    about = {"device": device, "head": head, "blocks": [*blocks], "packed": packed}
    length = 4 * max(blocks)  # the schedule of a block does not depend on it
    try:
        target = parse_target(f"{device}:{'x'.join('1' * TPU_AXES[device])}")
        mesh = make_mesh(devices=target.devices()[:1])
    except ConfigError as error:
        return about | {"error": str(error)}
    for path in dumps.iterdir():  # those of the program before
        path.unlink()
    pallas.blocks_for = lambda *_: pallas.Blocks(*blocks)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec())
        row = jax.ShapeDtypeStruct((1, length, 1, head), jnp.bfloat16, sharding=place)
        sinks = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=place)
        step = jax.jit(jax.value_and_grad(attention_of(packed), argnums=(0, 1, 2, 3)))
        try:
            step.lower(row, row, row, sinks).compile()
        except jax.errors.JaxRuntimeError as error:
            full = re.search(r"memory space vmem.*?%(\w+)", str(error), re.DOTALL)
            if not full:
                raise
            return about | {"error": f"vector memory is full in {full[1]}"}
    written = {path: KERNEL.fullmatch(path.name) for path in dumps.iterdir()}
    kernels = {name[1]: schedule(path.read_text()) for path, name in written.items() if name}
    return about | {"kernels": kernels}


def attention_of(packed: bool) -> Callable[..., jax.Array]:
    """A scalar of causal attention as a function of q, k, v and the sinks of packed rows."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        ids = jnp.ones(q.shape[:2], jnp.int32)
        side = layout_of(ids, None, ids if packed else None)
        scoring = Scoring(soft_cap=30.0, sinks=sinks) if packed else Scoring()
        out = KERNELS["tpu"].run(q, k, v, AttentionMask(side, side, scoring=scoring))
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return attention


def total(result: Answer, length: int) -> int:
    """The bundles of a head of a causal row, over all kernels of a program."""
    queries, keys = result["blocks"]
    kernels = result["kernels"].items()
    return sum(bundles(name, found, (queries, keys), length) for name, found in kernels)


def cells(result: Answer) -> list[str]:
    """A row of the table: bundles of a head of a causal row, by its length."""
    queries, keys = result["blocks"]
    packed = "yes" if result["packed"] else "no"
    about = [result["device"], str(result["head"]), packed]
    about += [str(queries), str(keys)]
    if "error" in result:
        return [*about, result["error"], *[""] * (len(LENGTHS) - 1)]
    return [*about, *(f"{total(result, length):,}" for length in LENGTHS)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", nargs="*", default=["v5e", "v6e", "v5p"], choices=TPU_AXES)
    parser.add_argument("--heads", nargs="*", type=int, default=[64, 128, 256], help="their widths")
    parser.add_argument("--blocks", nargs="*", default=[], help="as 512x1024: queries x keys")
    parser.add_argument("--packed", action="store_true", help="rows with segment ids")
    add_smoke(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as dumps:
        # libtpu reads it when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true"
        if options.smoke:
            print_table(HEADER, [cells(measure("v5e", 128, (128, 128), False, Path(dumps)))])
            save(NAME, {}, smoke=True)
        else:
            compile_all(options, Path(dumps))


def compile_all(options: argparse.Namespace, dumps: Path) -> None:
    """Compiles the programs that are asked for and not saved yet, and prints the table of all."""
    path = HERE / "results" / f"{NAME}.json"
    rows: dict[str, Answer] = json.loads(path.read_text())["rows"] if path.is_file() else {}
    asked = [text.split("x") for text in options.blocks]
    sizes = [(int(queries), int(keys)) for queries, keys in asked] or SIZES
    cases = itertools.product(options.devices, options.heads, sizes)
    for device, head, blocks in cases:
        name = f"{device}_{head}_{blocks[0]}x{blocks[1]}{'_packed' * options.packed}"
        if name not in rows:
            rows[name] = measure(device, head, blocks, options.packed, dumps)
            print(f"{name}: {', '.join(cells(rows[name])[5:])}", flush=True)
            save(NAME, {"rows": rows}, smoke=False)
    print_table(HEADER, [cells(rows[name]) for name in sorted(rows)])


if __name__ == "__main__":
    main()
