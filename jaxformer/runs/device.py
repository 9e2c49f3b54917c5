"""What the device can do: its best speed, and the attention kernel that serves a run on it."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, RunConfig
from jaxformer.layers import kernels
from jaxformer.layers.dot_product import plain
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of
from jaxformer.models.stack import compute_dtype
from jaxformer.training.state import compiler_options

PEAK_TFLOPS = {  # dense bfloat16 products, by a part of the device's name, longest first
    "H200": 989.0,
    "H100": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "TPU v6 lite": 918.0,
    "TPU v5 lite": 197.0,
    "TPU v5": 459.0,
    "TPU v4": 275.0,
}
REFERENCE_BYTES = (
    2**30
)  # the check's float32 scores stay under this, by taking fewer rows and heads
TOLERANCE = {
    "float32": 2e-4,
    "bfloat16": 3e-2,
    "float16": 5e-3,
}  # of the largest element of the reference


def peak_flops(dtype: str) -> float:
    """FLOP/s of one device at its best: the maker's figure, or on a CPU that of a large product
    measured now."""
    kind = jax.devices()[0].device_kind
    for name, tflops in PEAK_TFLOPS.items():
        if name in kind:
            return tflops * 1e12 * (0.5 if dtype == "float32" else 1.0)
    n = 1024
    a = jax.device_put(np.ones((n, n), dtype))
    product = jax.jit(jnp.dot)
    product(a, a).block_until_ready()
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        product(a, a).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 2 * n**3 / min(times) / (jax.device_count() if jax.default_backend() == "cpu" else 1)


def with_rows_of(run: RunConfig, length: int) -> RunConfig:
    """`run` as it is while its rows are cut to `length` tokens: as many more of them."""
    rows = run.train.batch_size * run.data.sequence_length // length
    data = dataclasses.replace(run.data, sequence_length=length)
    return dataclasses.replace(
        run, data=data, train=dataclasses.replace(run.train, batch_size=rows)
    )


def with_kernel(run: RunConfig, packed: bool) -> tuple[RunConfig, str]:
    """`run` with its attention kernel chosen, and a sentence about it; `prove_kernel` checks it.

    `packed` says that rows come with segment ids. Raises ConfigError if a kernel asked for by name
    cannot serve the run.
    """
    config = run.model
    length = math.gcd(run.data.sequence_length, run.data.source_length)
    case = kernels.Case(jax.default_backend(), str(compute_dtype(config)), length, packed, config)
    name, reason = kernels.choose(config.attention_kernel, case)
    model = dataclasses.replace(config, attention_kernel=name)  # type: ignore[arg-type]
    return dataclasses.replace(run, model=model), reason


def prove_kernel(run: RunConfig, packed: bool) -> str:
    """Checks the kernel that `with_kernel` chose on the run's own shapes; a sentence about it,
    empty for the reference.

    Raises RuntimeError if the kernel does not compute attention.
    """
    name = run.model.attention_kernel
    if name == "xla":
        return ""
    rows = max(run.train.batch_size // run.train.microbatches // jax.device_count(), 1)
    length = run.data.sequence_length
    errors = check_kernel(name, run.model, rows, length, packed)
    return f"The attention kernel {name} was checked against float32 on rows of {length}: {errors}."


def check_kernel(name: str, config: ModelConfig, rows: int, length: int, packed: bool) -> str:
    """Runs the kernel forward and backward beside the reference, for every stack of the model; the
    largest errors in words.

    Raises RuntimeError where they are larger than the dtype's rounding explains.
    """
    dtype = compute_dtype(config)
    sides = {"decoder": (True,), "encoder": (False,), "encoder_decoder": (True, False)}[
        config.family
    ]

    def both(
        kernel: kernels.Kernel, mask: AttentionMask, arrays: list[jax.Array]
    ) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(lambda q, k, v: kernel(q, k, v, mask), *arrays[:3])
        return out, *back(arrays[3].astype(out.dtype))

    def relative_errors(
        arrays: list[jax.Array], segments: jax.Array | None
    ) -> list[list[jax.Array]]:
        layout = layout_of(jnp.zeros(arrays[0].shape[:2], jnp.int32), None, segments)
        errors = []
        for causal in sides:
            scoring = Scoring(config.attention_scale)
            mask = AttentionMask(layout, layout, causal, config.window, scoring)
            found = both(kernels.KERNELS[name].run, mask, arrays)
            expected = both(plain, mask, [a.astype(jnp.float32) for a in arrays])
            pairs = zip(found, expected, strict=True)
            errors.append(
                [
                    jnp.max(jnp.abs(a.astype(jnp.float32) - b)) / jnp.max(jnp.abs(b))
                    for a, b in pairs
                ]
            )
        return errors

    arrays, segments = _case(config, rows, length, packed)
    compiled = jax.jit(relative_errors, compiler_options=compiler_options())
    errors = np.max(np.array(compiled([a.astype(dtype) for a in arrays], segments)), axis=0)
    allowed = TOLERANCE[str(dtype)]
    if not max(errors) <= allowed:  # a NaN fails too
        raise RuntimeError(
            f"attention kernel {name!r} is wrong on this device for {rows} rows of {length} tokens"
            f" in {dtype}: relative errors (output, dq, dk, dv) = {[f'{e:.1e}' for e in errors]},"
            f" allowed {allowed:g}. Set model.attention_kernel=xla, and report it."
        )
    return f"error {errors[0]:.0e} forward, {max(errors[1:]):.0e} backward"


def _case(
    config: ModelConfig, rows: int, length: int, packed: bool
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Random [q, k, v, cotangent] and the segments, if packed, of the run's length, with as many
    rows and heads as fit."""
    groups = config.n_heads // config.kv_heads
    fitting = max(REFERENCE_BYTES // (16 * length * length * groups), 1)
    k_heads = min(config.kv_heads, fitting)
    rows = min(rows, max(fitting // k_heads, 1))
    rng = np.random.default_rng(0)
    keys, values = config.head_width, config.value_width
    arrays = [
        rng.standard_normal((rows, length, heads, width), dtype=np.float32)
        for heads, width in (
            (k_heads * groups, keys),
            (k_heads, keys),
            (k_heads, values),
            (k_heads * groups, values),
        )
    ]
    thirds = np.arange(length, dtype=np.int32) * 3 // length + 1
    return arrays, np.broadcast_to(thirds, (rows, length)) if packed else None
