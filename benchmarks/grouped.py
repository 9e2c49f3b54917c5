"""The grouped products of one layer of experts, forward and backward: on this CPU the kernels in
turn, and for devices that are not here what their compilers make of each kernel.

    python benchmarks/grouped.py [--rounds 5] [--rows 2048 --width 512 --hidden 1408 --experts 8]
    python benchmarks/grouped.py --compile h100:1x1 v5e:1x1 [--kernels gpu loop ragged]

The layer is SwiGLU, down(silu(gate x) * up x), with the gradients of its rows and of its three
matrices. On a CPU every round times each kernel once, A B C A B C, in float32, and a ratio is that
of two times of one round. The groups are uneven, one of them is empty, and all rows are in one.

Compiled programs are of 16,384 tokens with 2 of 8 experts of 2,048 x 5,632, in bfloat16, whose
sparse work is 6.80 TFLOP; that needs the extras plan-tpu and plan-gpu, and nothing is run. A kernel
of Pallas counts the products of rows with the matrix of their group; beside these it computes at
most a tile of rows for each group. What a loop over blocks counts is known where its trips are.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hlo import Counts, count
from pairing import Answer, add_smoke, cpu_model, paired_ratio, print_table, ratio_text, save

os.environ["JAX_PLATFORMS"] = "cpu"  # compilers of other platforms are asked by name

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.arrays.mesh import make_mesh
from jaxformer.layers.grouped import GROUPED_KERNELS, GroupedRows
from jaxformer.layers.kernels import Needs, missing
from jaxformer.tools.plan_compiled import parse_target

NAME = "grouped"


class ExpertShape(NamedTuple):
    """Rows [M, D], and matrices [E, D, F]."""

    rows: int
    depth: int
    width: int
    experts: int


COMPILED = ExpertShape(rows=2 * 16_384, depth=2_048, width=5_632, experts=8)
TIMED = ("loop", "ragged", "xla")


def sparse_flops(shape: ExpertShape) -> int:
    """FLOPs of a forward and a backward pass of the layer, each row times its expert alone."""
    return 3 * 3 * 2 * shape.rows * shape.depth * shape.width


def loss(
    kernel: str, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array
) -> jax.Array:
    groups = GroupedRows(sizes, kernel)
    hidden = jax.nn.silu(groups.product(x, gate)) * groups.product(x, up)
    return jnp.sum(groups.product(hidden, down).astype(jnp.float32) ** 2)


def shapes_of(shape: ExpertShape) -> list[tuple[int, ...]]:
    """Those of x, gate, up and down."""
    rows, depth, width, experts = shape
    into = (experts, depth, width)
    return [(rows, depth), into, into, (experts, width, depth)]


def compiled_counts(target: str, kernel: str, shape: ExpertShape = COMPILED) -> Counts:
    """What the program of the layer's forward and backward pass does on one device of a target."""
    mesh = make_mesh(devices=parse_target(target).devices()[:1])
    with jax.set_mesh(mesh):
        on_device = NamedSharding(mesh, PartitionSpec())
        arrays = [
            jax.ShapeDtypeStruct(one, jnp.bfloat16, sharding=on_device) for one in shapes_of(shape)
        ]
        sizes = jax.ShapeDtypeStruct((shape.experts,), jnp.int32, sharding=on_device)
        step = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)
        program = step.lower(kernel, *arrays, sizes).compile().as_text() or ""
        return count(program)


def compile_table(targets: Sequence[str], asked: Sequence[str]) -> None:
    rows = []
    for target in targets:
        platform = parse_target(target).platform
        needs = Needs(platform)
        able = [name for name in GROUPED_KERNELS if not missing(GROUPED_KERNELS[name].lacks, needs)]
        for kernel in asked or able:
            counts = compiled_counts(target, kernel)
            ratio = counts.flops / sparse_flops(COMPILED)
            trips = [loop.trips for loop in counts.loops if not loop.trips]
            flops = f"{counts.flops / 1e12:.2f}" + (" and a loop of unknown trips" if trips else "")
            rows.append([target, kernel, flops, f"{ratio:.3f}", f"{counts.bytes / 2**30:.1f}"])
            print(f"{target} {kernel}: {flops} TFLOP", flush=True)
    print(f"Sparse work: {sparse_flops(COMPILED) / 1e12:.2f} TFLOP; jax {jax.__version__}")
    print_table(["device", "kernel", "TFLOP", "of the sparse work", "GiB moved"], rows)


def arrays_of(shape: ExpertShape) -> list[jax.Array]:
    """x, gate, up, down and the sizes of the groups, in float32."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal(one, dtype=np.float32) / np.sqrt(one[-2]))
        for one in shapes_of(shape)
    ]
    shares = np.arange(shape.experts) / np.arange(shape.experts).sum()
    sizes = np.floor(shape.rows * shares).astype(np.int32)
    sizes[-1] += shape.rows - sizes.sum()
    return [*arrays, jnp.asarray(sizes)]


def measure(shape: ExpertShape, rounds: int) -> Answer:
    """Seconds of each kernel in each round, after one round that is dropped."""
    arrays = arrays_of(shape)
    step = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    for _ in range(rounds + 1):
        for name in TIMED:
            begin = time.perf_counter()
            jax.block_until_ready(step(name, *arrays))
            seconds[name].append(time.perf_counter() - begin)
    return {"shape": shape._asdict(), "seconds": {name: s[1:] for name, s in seconds.items()}}


def print_times(result: Answer, shape: ExpertShape) -> None:
    print(f"jax {jax.__version__}, numpy {np.__version__}, {cpu_model()}, {os.cpu_count()} cores")
    ours = result["seconds"]["loop"]
    rows = []
    for name, seconds in result["seconds"].items():
        median = statistics.median(seconds)
        rate = sparse_flops(shape) / median / 1e9
        slower = ratio_text(paired_ratio(ours, seconds))
        rows.append([name, f"{1e3 * median:.1f}", f"{rate:.1f}", slower])
    print_table(["kernel", "ms", "GFLOP/s of the sparse work", "times the loop"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_smoke(parser)
    parser.add_argument("--compile", nargs="+", default=[], metavar="TARGET")
    parser.add_argument("--kernels", nargs="+", default=[], metavar="KERNEL")
    parser.add_argument("--rounds", type=int, default=5)
    for name, size in (("rows", 2048), ("width", 512), ("hidden", 1408), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    if options.compile:
        compile_table(options.compile, options.kernels)
        return
    shape = ExpertShape(options.rows, options.width, options.hidden, options.experts)
    if options.smoke:
        shape, options.rounds = ExpertShape(64, 16, 24, 4), 2
    result = measure(shape, options.rounds)
    print_times(result, shape)
    save(NAME, {"jax": jax.__version__, **result}, options.smoke)


if __name__ == "__main__":
    main()
