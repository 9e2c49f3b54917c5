"""Whether a resumed run on a GPU is bitwise the uninterrupted one, by which option of XLA, and what
ends with an error under it.

    python benchmarks/gpu_deterministic.py

Each case is a process of its own: a run that is stopped and continued, as it is, with
the flag of deterministic operations, and with one other flag of XLA at a time; and small programs
under that flag, from the smallest on, of which the first that fails is the one to report. The
end of the text that a failed case printed, its traceback, is kept.
"""

import argparse
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
from device_checks import resumes
from pairing import Answer, add_smoke, gpu_facts, print_table, save

FLAG = "--xla_gpu_deterministic_ops=true"
LIMIT = 60  # seconds a case


def attention() -> jax.Array:
    """The gradient of cuDNN's attention; of XLA's on a CPU."""
    fused = jax.default_backend() == "gpu"

    def mean(x: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(
            x, x, x, is_causal=True, implementation="cudnn" if fused else "xla"
        )
        return out.astype(jnp.float32).mean()

    return jax.jit(jax.grad(mean))(jnp.ones((2, 128, 4, 64), jnp.bfloat16))


def product() -> jax.Array:
    return jax.jit(jnp.dot)(jnp.ones((512, 512), jnp.bfloat16), jnp.ones((512, 512), jnp.bfloat16))


def total() -> jax.Array:
    return jax.jit(jnp.sum)(jnp.ones((512, 4096)))


def table_gradient() -> jax.Array:
    """The gradient of a lookup, which is a scatter that adds."""
    ids = jnp.arange(4096) % 100
    return jax.jit(jax.grad(lambda table: table[ids].sum()))(jnp.ones((512, 64)))


PROGRAMS = {
    "sum": total,
    "product": product,
    "gradient of a lookup": table_gradient,
    "attention": attention,
}
# A run that is continued: the settings beside those of the check, and flags of XLA.
RUNS: dict[str, tuple[dict[str, object], str]] = {
    "flag: deterministic operations": ({}, FLAG),
    "train.deterministic": ({"train.deterministic": True}, ""),
    "as it is": ({}, ""),
    "flag: deterministic operations, attention by XLA": ({"model.attention.kernel": "xla"}, FLAG),
    "flag: no autotuning": ({}, "--xla_gpu_autotune_level=0"),
    "flag: no nondeterministic kernels": ({}, "--xla_gpu_exclude_nondeterministic_ops=true"),
    "flag: no command buffers": ({}, "--xla_gpu_enable_command_buffer="),
}


def run_case(name: str, smoke: bool) -> Answer:
    """A case, in this process."""
    if name in PROGRAMS:
        jax.block_until_ready(PROGRAMS[name]())
        return {"ran": True}
    return resumes(smoke, RUNS[name][0])


def started(name: str, smoke: bool) -> Answer:
    """A case in a process of its own, with the end of what it printed where it failed."""
    flags = FLAG if name in PROGRAMS else RUNS[name][1]
    command = [sys.executable, __file__, "--case", name, *(["--smoke"] if smoke else [])]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not ended after {LIMIT} s"}
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-4000:], "status": done.returncode}
    found: Answer = json.loads(done.stdout.splitlines()[-1])
    return found


def verdict(result: Answer) -> str:
    if "failed" in result:
        last = result["failed"].strip().splitlines()
        return f"failed: {last[-1][:80]}" if last else f"failed with {result['status']}"
    if "bitwise" not in result:
        return "ran"
    if result["bitwise"]:
        return "bitwise"
    return f"NOT bitwise: {result['largest_parameter_gap']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[*RUNS, *PROGRAMS], help="this one, in this process")
    add_smoke(parser)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, options.smoke)))
        return
    # This process only asks which device there is, and leaves its memory to the cases.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    result = gpu_facts(parser, options.smoke) | {"cases": {}}
    first = "flag: deterministic operations"
    rest = [name for name in RUNS if name != first]
    names = [first, *PROGRAMS, *rest]
    for name in [first, "product"] if options.smoke else names:
        result["cases"][name] = started(name, options.smoke)
        print(f"{name}: {verdict(result['cases'][name])}", flush=True)
        save("gpu_deterministic", result, options.smoke)
    rows = [[name, verdict(found)] for name, found in result["cases"].items()]
    print_table(["case", "result"], rows)


if __name__ == "__main__":
    main()
