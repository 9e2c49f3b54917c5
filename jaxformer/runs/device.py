"""The check that the attention kernel of a run is right on its device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import ModelConfig, RunConfig
from jaxformer.layers import kernels
from jaxformer.layers.dot_product import plain
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of
from jaxformer.models.stack import compute_dtype
from jaxformer.training.state import compiler_options

# The check of a kernel takes fewer rows and heads where its float32 scores would exceed this.
REFERENCE_BYTES = 2**30
# The largest error of a kernel, relative to the largest element of the reference.
TOLERANCE = {"float32": 2e-4, "bfloat16": 3e-2, "float16": 5e-3}


def with_rows_of(run: RunConfig, length: int) -> RunConfig:
    """`run` with rows of `length` tokens, and as many tokens per step as before."""
    rows = run.train.batch_size * run.data.sequence_length // length
    data = dataclasses.replace(run.data, sequence_length=length)
    train = dataclasses.replace(run.train, batch_size=rows)
    return dataclasses.replace(run, data=data, train=train)


def prove_kernel(run: RunConfig, packed: bool) -> str:
    """Checks the kernel that `with_kernel` selected on the shapes of the run. Returns a sentence
    about it, empty for the reference. Raises RuntimeError if the kernel is wrong."""
    name = run.model.attention_kernel
    if name == "xla":
        return ""
    rows = max(run.train.batch_size // run.train.microbatches // jax.device_count(), 1)
    length = run.data.sequence_length
    errors = check_kernel(name, run.model, rows, length, packed)
    return f"The attention kernel {name} was checked against float32 on rows of {length}: {errors}."


def check_kernel(name: str, config: ModelConfig, rows: int, length: int, packed: bool) -> str:
    """Compares the kernel with the reference, forward and backward, for every stack of the model;
    returns the largest errors in words.

    Raises RuntimeError where they exceed what the rounding of the dtype explains.
    """
    dtype = compute_dtype(config)
    family = config.family
    sides = {"decoder": (True,), "encoder": (False,), "encoder_decoder": (True, False)}[family]

    def both(kernel: kernels.Kernel, mask: AttentionMask, arrays: list[jax.Array]) -> Any:
        """The output of attention, and the gradients of q, k and v for a random cotangent."""
        out, back = jax.vjp(lambda q, k, v: kernel(q, k, v, mask), *arrays[:3])
        return out, *back(arrays[3].astype(out.dtype))

    def relative_errors(arrays: list[jax.Array], segments: jax.Array | None) -> Any:
        layout = layout_of(jnp.zeros(arrays[0].shape[:2], jnp.int32), None, segments)
        scoring = Scoring(config.attention_scale)
        errors = []
        for causal in sides:
            mask = AttentionMask(layout, layout, causal, config.window, scoring)
            found = both(kernels.KERNELS[name].run, mask, arrays)
            expected = both(plain, mask, [array.astype(jnp.float32) for array in arrays])
            errors.append([relative_error(a, b) for a, b in zip(found, expected, strict=True)])
        return errors

    def relative_error(found: jax.Array, expected: jax.Array) -> jax.Array:
        difference = jnp.abs(found.astype(jnp.float32) - expected)
        return jnp.max(difference) / jnp.max(jnp.abs(expected))

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
    """Random [q, k, v, cotangent], each [B, T, N, H], with as many rows and heads as
    REFERENCE_BYTES allows, and segment ids [B, T] of three texts in each row if packed."""
    groups = config.n_heads // config.kv_heads
    # 16 bytes for each score [B, N, T, T].
    fitting = max(REFERENCE_BYTES // (16 * length * length * groups), 1)
    k_heads = min(config.kv_heads, fitting)
    rows = min(rows, max(fitting // k_heads, 1))
    q_heads, keys, values = k_heads * groups, config.head_width, config.value_width
    rng = np.random.default_rng(0)
    shapes = [(q_heads, keys), (k_heads, keys), (k_heads, values), (q_heads, values)]
    arrays = [rng.standard_normal((rows, length, *shape), dtype=np.float32) for shape in shapes]
    thirds = np.arange(length, dtype=np.int32) * 3 // length + 1
    return arrays, np.broadcast_to(thirds, (rows, length)) if packed else None
