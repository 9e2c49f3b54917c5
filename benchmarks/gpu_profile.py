"""Where the time of a train step goes on a GPU, or of a token that is decoded, by kinds of kernels.

    python benchmarks/gpu_profile.py gpt2_124m_gpu [--torch-python PYTHON]
    python benchmarks/gpu_profile.py decode --weights int8

Five steps run under the profiler, one after the other without waiting, after as many without it.
Beside the milliseconds of each kind stands the least time that the compiled program's products and
bytes need. A gap is time in which no kernel ran. With --torch-python, PyTorch's step of the same
model is profiled instead, by its own profiler. The command buffers of XLA hide kernels from a
profiler: gpu_queue.py turns them off by XLA_FLAGS.
"""

import argparse
import math
import os
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hlo.counts import operations
from jax_accelerator_baseline import Commands
from pairing import Answer, add_smoke, gpu_facts, print_table, python_worker, save
from workloads import ACCELERATOR_WORKLOADS, SMOKE_DECODED, TINY_LLAMA, shrunk, torch_flags

import jaxformer as jf
from jaxformer.arrays.hardware import DEVICES, name_of
from jaxformer.layers.block import CROSS, FEED_FORWARDS, MIXERS

STEPS = 5
KINDS = (
    *("products", "attention", "activation", "norms", "loss", "optimizer", "embedding"),
    *("copies", "other"),
)
# The library's scopes (`jax.named_scope`), of which the innermost decides.
OF_SCOPE = {
    **dict.fromkeys([*MIXERS, CROSS], "attention"),
    **dict.fromkeys(FEED_FORWARDS, "activation"),
    "norm": "norms",
    "head": "loss",
    "loss": "loss",
    "optimizer": "optimizer",
    "embed": "embedding",
}
# Kernels of PyTorch by their names, which for those of torch.compile list the operations that were
# put together; the first row that fits decides.
OF_TORCH_NAME = (
    ("copies", r"memcpy|memset|copy_kernel|direct_copy|catarray|aten::copy_"),
    ("attention", r"fmha|flash|sdpa|attention|cudnn_generated"),
    ("optimizer", r"multi_tensor|adam|foreach|lpnorm"),
    ("products", r"gemm|cutlass|nvjet|xmma|cublas|aten::(addmm|mm|bmm)$"),
    ("loss", r"softmax|nll|cross_entropy"),
    ("norms", r"layer_norm|rms_norm|mean_pow|rsqrt"),
    ("activation", r"gelu|silu|sigmoid"),
    ("embedding", r"embedding|index_put|indexing_backward"),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran, with its begin and end in nanoseconds."""

    name: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Instruction:
    """What is known of an instruction of a compiled program: its kind, where it comes from, and the
    least seconds that it needs in a step."""

    kind: str
    origin: str
    seconds: float


def kind_of_instruction(name: str, op_name: str, flops: float) -> str:
    """The kind of an instruction by its name, by JAX's name of its origin such as
    "jit(advance)/transpose(jvp(layer))/attention/dot_general", and by its FLOPs."""
    kind = "other"
    for level in op_name.partition(";")[0].split("/"):
        scope = level.rstrip(")").rpartition("(")[2]
        kind = OF_SCOPE.get(scope, kind)
    if re.search(r"fmha|splash|flash", name + op_name):
        return "attention"
    if flops:
        return "products"
    if re.match(r"(wrapped_)?(input_)?(copy|transpose)", name):
        return "copies"
    return kind


def dumped_instructions(folder: Path) -> dict[str, Instruction]:
    """The instructions outside of fusions of all programs that the compiler wrote into a folder, by
    name, the largest program last, so that its instructions win where two have one name."""
    name = name_of(jax.devices()[0].device_kind)
    device = DEVICES[name or "cpu"]
    peak, bandwidth = device.bfloat16 or math.inf, device.bandwidth or math.inf
    found: dict[str, Instruction] = {}
    texts = sorted(folder.glob("*after_optimizations.txt"), key=lambda path: path.stat().st_size)
    for path in texts:
        for name, operation in operations(path.read_text(), peak, bandwidth).items():
            # A call of cuDNN is told by its target.
            called = f"{name} {operation.target}"
            kind = kind_of_instruction(called, operation.op_name, operation.flops)
            found[name] = Instruction(kind, operation.op_name, operation.seconds)
    return found


def traced_kernels(folder: Path, instructions: Mapping[str, Instruction]) -> list[Kernel]:
    """The kernels in the newest trace that `jax.profiler` wrote into a folder: of the first GPU
    that ran any, or of the CPU's threads."""
    trace = sorted(folder.glob("plugins/profile/*/*.xplane.pb"))[-1]
    planes = list(jax.profiler.ProfileData.from_file(str(trace)).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or [plane for plane in planes if plane.name == "/host:CPU"]:
        lines = list(plane.lines)
        # Other lines of a GPU's plane sum up those of its streams.
        streams = [line for line in lines if line.name.startswith("Stream")]
        kernels = list(_kernels_of(streams or lines, instructions, bool(gpus)))
        if kernels:
            return kernels
    return []


def _kernels_of(
    lines: Iterable[Any], instructions: Mapping[str, Instruction], gpu: bool
) -> Iterator[Kernel]:
    for line in lines:
        for event in line.events:
            name = str(dict(event.stats).get("hlo_op", ""))
            instruction = instructions.get(name)
            if instruction is not None:
                shown = f"{name} ({event.name[:60]}; {instruction.origin[-60:]})"
                yield Kernel(shown, instruction.kind, event.start_ns, event.end_ns)
            elif gpu:  # a CPU's threads have other events too, of Python
                copied = re.search(r"memcpy|memset", event.name, flags=re.IGNORECASE)
                kind = "copies" if copied else "other"
                yield Kernel(event.name, kind, event.start_ns, event.end_ns)


def torch_kernels(events: Iterable[list[Any]]) -> list[Kernel]:
    """The kernels of PyTorch's profiler, from lists of name, begin and end in nanoseconds."""
    kernels = []
    for name, begin, end in events:
        fitting = (kind for kind, pattern in OF_TORCH_NAME if re.search(pattern, name.lower()))
        kernels.append(Kernel(name, next(fitting, "other"), begin, end))
    return kernels


def by_kind(kernels: list[Kernel], units: int) -> Answer:
    """Milliseconds of a unit (a step, or a token) by kind, gaps between kernels, and the ten
    kernels that took longest."""
    if not kernels:
        raise SystemExit("the trace has no kernels: the profiler saw none of the device.")
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    started = dict.fromkeys(KINDS, 0)
    by_name: dict[str, list[Kernel]] = defaultdict(list)
    busy, reached = 0.0, -math.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        spent[kernel.kind] += kernel.end - kernel.begin
        started[kernel.kind] += 1
        by_name[kernel.name].append(kernel)
        # Kernels of several streams may overlap: busy is the length of their union.
        busy += max(kernel.end - max(kernel.begin, reached), 0.0)
        reached = max(reached, kernel.end)
    elapsed = reached - min(kernel.begin for kernel in kernels)
    milliseconds = 1e-6 / units
    longest = [
        {
            "kernel": name,
            "kind": group[0].kind,
            "ms": milliseconds * sum(kernel.end - kernel.begin for kernel in group),
            "count": len(group) / units,
        }
        for name, group in by_name.items()
    ]
    longest.sort(key=lambda row: -float(row["ms"]))  # type: ignore[arg-type]
    return {
        "kinds": {kind: milliseconds * spent[kind] for kind in KINDS},
        "kernels": {kind: started[kind] / units for kind in KINDS},
        "gaps_ms": milliseconds * (elapsed - busy),
        "traced_ms": milliseconds * elapsed,
        "longest": longest[:10],
    }


def profiled(work: Callable[[int], None], units: int, programs: Path, repeats: int) -> Answer:
    """Runs `work`, which does so many units and waits, without a profiler and then with it. The
    compiler writes its programs into the folder `programs`."""
    work(units)  # compiles, and warms up
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work(units)
        samples.append(1e3 * (time.perf_counter() - begin) / units)
    with tempfile.TemporaryDirectory(prefix="jaxformer-trace-") as folder:
        with jax.profiler.trace(folder):
            work(units)
        instructions = dumped_instructions(programs)
        kernels = traced_kernels(Path(folder), instructions)
    counted = dict.fromkeys(KINDS, 0.0)
    for name in {kernel.name.partition(" (")[0] for kernel in kernels}:
        if name in instructions:
            counted[instructions[name].kind] += 1e3 * instructions[name].seconds
    samples_and_median = {"samples_ms": samples, "median_ms": statistics.median(samples)}
    return samples_and_median | by_kind(kernels, units) | {"counted_ms": counted}


def profile_step(name: str, programs: Path, smoke: bool) -> Answer:
    """Our step of a workload."""
    commands = Commands(smoke)
    kernel = commands.load(name, "0", "1")["kernel"]
    trainer = commands.loaded

    def steps(count: int) -> None:
        with jax.set_mesh(trainer.mesh):
            for _ in range(count):
                trainer.state, metrics = trainer.advance(trainer.state, trainer.batch)
        jax.block_until_ready((trainer.state, metrics))

    return {"kernel": kernel} | profiled(steps, 2 if smoke else STEPS, programs, 1 if smoke else 3)


def profile_decoding(weights: str, rows: int, programs: Path, smoke: bool) -> Answer:
    """Greedy decoding of the Llama of decode_gpu.py. Units are new tokens of all rows together."""
    prompt_length, new = (8, 8) if smoke else (128, 64)
    llama = replace(TINY_LLAMA, vocab_size=32_000, max_length=prompt_length + new)
    config = replace(SMOKE_DECODED if smoke else llama, dtype="bfloat16")
    params = jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))
    if weights == "bfloat16":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    else:
        params = jf.quantize(params, weights)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(rows, prompt_length))

    def decode(count: int) -> None:
        np.asarray(jf.generate(params, config, tokens.astype(np.int32), count, temperature=0.0))

    result = profiled(decode, new, programs, 1 if smoke else 3)
    # XLA's text does not say how often the loop over tokens runs, so a count means nothing here.
    del result["counted_ms"]
    return result | {"weights": weights, "rows": rows}


def profile_torch(name: str, python: str, smoke: bool) -> Answer:
    """PyTorch's step of a workload, in its own process."""
    run = ACCELERATOR_WORKLOADS[name]
    flags = torch_flags(shrunk(run) if smoke else run)
    flags += ["--device", "cpu", "--torch-mode", "none"] if smoke else []
    steps = 2 if smoke else STEPS
    with python_worker("torch", "torch_gpu_baseline.py", *flags, python=python) as worker:
        samples = [1e3 * worker.ask("step")["seconds"] for _ in range(3 + steps)][3:]
        events = worker.ask(f"profile {steps}")["events"]
        about = {key: worker.about[key] for key in ("device", "versions", "kernel")}
    median = {"samples_ms": samples, "median_ms": statistics.median(samples)}
    return about | median | by_kind(torch_kernels(events), steps)


def tables(result: Answer) -> None:
    """Prints the table of kinds, with gaps, and that of the longest kernels."""
    unit = "ms a token" if "weights" in result else "ms a step"
    counted = result.get("counted_ms", {})
    rows = []
    for kind, spent in result["kinds"].items():
        least = f"{counted[kind]:.3f}" if counted else ""
        rows.append([kind, f"{spent:.3f}", least, f"{result['kernels'][kind]:.1f}"])
    rows.append(["gaps", f"{result['gaps_ms']:.3f}", "", ""])
    rows.append(["traced", f"{result['traced_ms']:.3f}", "", ""])
    rows.append(["without the profiler", f"{result['median_ms']:.3f}", "", ""])
    print_table(["kind", unit, "at least, by the count", "kernels"], rows)
    longest = [
        [row["kernel"][:90], row["kind"], f"{row['ms']:.3f}", f"{row['count']:.1f}"]
        for row in result["longest"]
    ]
    print_table(["kernel", "kind", unit, "times"], longest)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["decode", *ACCELERATOR_WORKLOADS]
    parser.add_argument("work", nargs="?", default="gpt2_124m_gpu", choices=names, metavar="WORK")
    parser.add_argument("--weights", choices=("bfloat16", "int8", "nf4"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=1, help="rows that are decoded together")
    parser.add_argument("--torch-python", default="", help="profile PyTorch of this Python instead")
    add_smoke(parser)
    options = parser.parse_args()
    if options.torch_python:
        result = profile_torch(options.work, options.torch_python, options.smoke)
    else:
        with tempfile.TemporaryDirectory(prefix="jaxformer-programs-") as programs:
            # XLA reads this when its backend starts, which importing JAX does not do.
            flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={programs}"
            os.environ["XLA_FLAGS"] = flags.strip()
            # A program from a cache would not be written.
            jax.config.update("jax_enable_compilation_cache", False)
            result = gpu_facts(parser, options.smoke)
            folder = Path(programs)
            if options.work == "decode":
                result |= profile_decoding(options.weights, options.rows, folder, options.smoke)
            else:
                result |= profile_step(options.work, folder, options.smoke)
    tables(result)
    save(f"profile_{options.work}", {"work": options.work} | result, options.smoke)


if __name__ == "__main__":
    main()
