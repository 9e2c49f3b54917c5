"""Variants of a train step on a GPU, each timed in turn with the step as it is; and kernels of
attention, forward and backward.

    python benchmarks/gpu_variants.py [--workload gpt2_124m_gpu] [--variants NAME ...]
    python benchmarks/gpu_variants.py --attention

A variant is a setting of the run or an option of XLA's compiler. A sample is ten calls that follow
one another without waiting; five samples of each side, the sides in turn. Results are written after
each variant. One that XLA or memory refuses is recorded as such. --attention compares cuDNN's
kernel, which training takes, with tokamax's, if that is installed, on the shapes of GPT-2 124M and
of a Llama of 1.1 billion parameters.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax_accelerator_baseline import Commands
from jax_baseline import Trainer
from pairing import Answer, add_smoke, gpu_facts, paired_ratio, print_table, ratio_text, save
from workloads import ACCELERATOR_WORKLOADS

import jaxformer as jf
from jaxformer.config.run import RunConfig

CALLS, SAMPLES = 10, 5
REFUSALS = (jax.errors.JaxRuntimeError, jf.ConfigError, jf.OutOfMemory, NotImplementedError)
# Rows, tokens, heads, key/value heads, width of a head.
SHAPES = {
    "gpt2_124m": (64, 1024, 12, 12, 64),
    "llama_1b": (16, 2048, 32, 4, 64),
    "llama_1b_8k": (4, 8192, 32, 4, 64),
}


@dataclass(frozen=True)
class Variant:
    """Settings of the run by section and field, options of the compiler, and rows in a batch as a
    multiple of the workload's own."""

    settings: dict[str, object] = field(default_factory=dict)
    options: dict[str, str | bool] = field(default_factory=dict)
    rows: float = 1.0


SHORT_LOGITS = {"train.logits_dtype": "bfloat16"}
STORED = {"model.remat": "names", "model.saved": "q,k,v,attention,out,gate,up,down,normed,hidden"}
VARIANTS = {
    "logits in bfloat16": Variant({**SHORT_LOGITS}),
    "inputs of products stored": Variant({**STORED}),
    "deterministic": Variant({"train.deterministic": True}),
    "no command buffers": Variant(options={"xla_gpu_enable_command_buffer": ""}),
    "products without Triton": Variant(options={"xla_gpu_enable_triton_gemm": False}),
    "inputs stored, short logits, no Triton": Variant(
        {**SHORT_LOGITS, **STORED}, {"xla_gpu_enable_triton_gemm": False}
    ),
    "exhaustive tiling": Variant(options={"xla_gpu_exhaustive_tiling_search": True}),
    "half the rows": Variant(rows=0.5),
    "1.5 times the rows": Variant(rows=1.5),
    "layers in a loop": Variant({"model.layer_loop": "scan"}),
    "attention by XLA": Variant({"model.attention.kernel": "xla"}),
    "8-bit products": Variant({"train.products": "fp8"}),
    "8-bit products of cuBLASLt alone": Variant(
        {"train.products": "fp8"}, {"xla_gpu_enable_triton_gemm": False}
    ),
}
# What has no setting yet.
MISSING = ("one product for queries, keys and values",)


def compiled(run: RunConfig, variant: Variant) -> Trainer:
    """The step of a run with the settings, rows and options of a variant."""
    for path, value in variant.settings.items():
        section, name = path.split(".")
        values: dict[str, object] = {name: value}
        run = replace(run, **{section: replace(getattr(run, section), **values)})
    rows = max(1, round(variant.rows * run.train.batch_size))
    trainer = Trainer(replace(run, train=replace(run.train, batch_size=rows)), "")
    with jax.set_mesh(trainer.mesh):
        lowered = trainer.advance.lower(trainer.state, trainer.batch)
        trainer.advance = lowered.compile(compiler_options=variant.options or None)
    return trainer


def steps(trainer: Trainer, count: int) -> float:
    """Seconds of a row of a batch."""
    begin = time.perf_counter()
    with jax.set_mesh(trainer.mesh):
        for _ in range(count):
            trainer.state, metrics = trainer.advance(trainer.state, trainer.batch)
    jax.block_until_ready((trainer.state, metrics))
    return (time.perf_counter() - begin) / count / trainer.run.train.batch_size


def attention_calls(
    shape: tuple[int, ...], attention: Callable[..., Any]
) -> Callable[[int], float]:
    """Seconds of a forward and a backward pass of a kernel, once compiled."""
    batch, length, heads, kv_heads, width = shape
    arrays = [
        jax.random.normal(jax.random.key(i), (batch, length, count, width), jnp.bfloat16)
        for i, count in enumerate((heads, kv_heads, kv_heads))
    ]

    def mean(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v, is_causal=True).astype(jnp.float32).mean()

    program = jax.jit(jax.grad(mean, argnums=(0, 1, 2)))
    jax.block_until_ready(program(*arrays))

    def calls(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            gradients = program(*arrays)
        jax.block_until_ready(gradients)
        return (time.perf_counter() - begin) / count

    return calls


def beside(
    default: Callable[[int], float], make: Callable[[], Callable[[int], float]], smoke: bool
) -> Answer:
    """Seconds of the default and of a variant, in turn; or why the variant has none."""
    count, samples = (1, 1) if smoke else (CALLS, SAMPLES)
    try:
        variant = make()
        pairs = []
        for _ in range(samples + 1):  # the first pair warms up
            pairs.append((default(count), variant(count)))
    except REFUSALS as error:
        return {"refused": str(error)[:1000]}
    theirs = [pair[0] for pair in pairs[1:]]
    ours = [pair[1] for pair in pairs[1:]]
    return {"default_seconds": theirs, "seconds": ours, "ratio": paired_ratio(ours, theirs)}


def measured_steps(options: argparse.Namespace, facts: Answer) -> Answer:
    run = Commands(options.smoke).run_of(options.workload, 0, 1)
    trainer = compiled(run, Variant())
    result: Answer = {**facts, "workload": options.workload, "missing": [*MISSING], "variants": {}}

    def steps_of(variant: Variant) -> Callable[[int], float]:
        return partial(steps, compiled(run, variant))

    for name in options.variants:
        variant = partial(steps_of, VARIANTS[name])
        result["variants"][name] = beside(partial(steps, trainer), variant, options.smoke)
        save("gpu_variants", result, options.smoke)
    return result


def measured_attention(options: argparse.Namespace, facts: Answer) -> Answer:
    kernel = partial(
        jax.nn.dot_product_attention, implementation="xla" if options.smoke else "cudnn"
    )

    def tokamax_kernel(shape: tuple[int, ...]) -> Callable[[int], float]:
        if importlib.util.find_spec("tokamax") is None:
            raise NotImplementedError("not installed: pip install tokamax")
        import tokamax  # type: ignore[import-not-found]

        return attention_calls(shape, tokamax.dot_product_attention)

    result: Answer = {**facts, "missing": [], "variants": {}}
    for name, shape in SHAPES.items():
        sizes = (2, 64, 4, 2, 16) if options.smoke else shape
        default = attention_calls(sizes, kernel)
        found = beside(default, partial(tokamax_kernel, sizes), options.smoke)
        if "refused" in found:
            found["default_seconds"] = [default(1 if options.smoke else CALLS)]
        result["variants"][f"tokamax, {name}"] = found
        save("gpu_attention", result, options.smoke)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*ACCELERATOR_WORKLOADS]
    parser.add_argument("--workload", default="gpt2_124m_gpu", choices=names, metavar="NAME")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS], choices=VARIANTS)
    parser.add_argument("--attention", action="store_true", help="kernels of attention instead")
    add_smoke(parser)
    options = parser.parse_args()
    if options.smoke:
        options.variants = ["logits in bfloat16", "products without Triton", "8-bit products"]
    measure = measured_attention if options.attention else measured_steps
    result = measure(options, gpu_facts(parser, options.smoke))
    rows = []
    for name, found in result["variants"].items():
        medians = [
            f"{1e3 * statistics.median(found[side]):.3f}" if side in found else ""
            for side in ("default_seconds", "seconds")
        ]
        refused = f"refused: {found.get('refused', '')[:60]}"
        rows.append([name, *medians, ratio_text(found["ratio"]) if "ratio" in found else refused])
    rows += [[name, "", "", "no setting yet"] for name in result["missing"]]
    print_table(["variant", "default, ms", "variant, ms", "times as fast"], rows)


if __name__ == "__main__":
    main()
