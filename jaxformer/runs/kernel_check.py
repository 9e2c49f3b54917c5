"""Kernels of attention and of experts, held against float32 on the devices of a run."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.out_of_memory import OutOfMemory, memory_of
from jaxformer.arrays.sharding import ACTIVATION_RULES, constrain, platform
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Log, with_settings
from jaxformer.config.variants import BIASED_SCORES
from jaxformer.layers import kernels
from jaxformer.layers.biases import is_disentangled, key_distances
from jaxformer.layers.dot_product import plain
from jaxformer.layers.grouped import GroupedRows
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of
from jaxformer.models.stack import compute_dtype
from jaxformer.runs.resolve import Resolved, with_kernel
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.state import on_mesh

# Fewer rows and heads of attention are checked where the float32 scores would exceed this.
REFERENCE_BYTES = 2**30
# Shorter rows are checked where the scores of one would exceed this.
ROW_BYTES = 2**33
# Fewer experts are checked where their weights in float32 would exceed this, and fewer rows where
# the reference, which multiplies all rows by all experts, would add up more products.
WEIGHT_BYTES = 2**31
REFERENCE_PRODUCTS = {"cpu": 2**32, "gpu": 2**40, "tpu": 2**40}
# The largest error of a kernel, relative to the largest element of the reference.
TOLERANCE = {"float32": 2e-4, "bfloat16": 3e-2, "float16": 5e-3}

USE_XLA = "Choose the kernel xla, and report it."
Results = dict[str, jax.Array]
ResolvedRun = TypeVar("ResolvedRun", bound=Resolved)


def with_proven_kernel(resolved: ResolvedRun, log: Log) -> ResolvedRun:
    """The run with kernels that are right on its devices, and the run itself if its kernels are.

    Where "auto" chose a kernel that is wrong there, or that JAX or the compiler refuses, the next
    one that serves the run is checked; one that was asked for by name raises RuntimeError. Logs a
    sentence for each.
    """
    failed: dict[str, dict[str, str]] = {setting: {} for setting in PROOFS}
    for setting, prove in PROOFS.items():
        sentence = None
        while sentence is None:
            try:
                with memory_of(f"the check of model.{setting}"):
                    sentence = prove(resolved)
            # It is a RuntimeError, but says nothing of the kernel: a device with too little memory
            # would pass over kernels that are right.
            except OutOfMemory:
                raise
            # Also what JAX (NotImplementedError) and the compiler (JaxRuntimeError) raise, and an
            # IndexError, with which XLA of jax 0.11.2 ended a deterministic run on an H200.
            except (RuntimeError, IndexError) as error:
                asked = resolved.asked.model
                if attrgetter(setting)(asked) != "auto":
                    raise
                reason = f"its check on this device failed: {str(error).splitlines()[0]}"
                failed[setting][attrgetter(setting)(resolved.model)] = reason
                # The first kernels that serve the run and have not failed.
                auto = with_settings(
                    resolved.model,
                    {
                        "attention.kernel": asked.attention.kernel,
                        "experts.kernel": asked.experts.kernel,
                    },
                )
                length = math.gcd(resolved.length, resolved.source_length)
                run = resolved.run
                model, kernel = with_kernel(
                    auto,
                    run.adapter,
                    length,
                    auto.attention.max_segments,
                    resolved.mesh,
                    *failed.values(),
                )
                run = dataclasses.replace(run, model=model)
                resolved = dataclasses.replace(resolved, run=run, kernel=kernel)
                log(f"Attention: {kernel}.")
        if sentence:
            log(sentence)
    return resolved


def prove_attention(resolved: Resolved) -> str:
    """A sentence about the attention kernel of a run, which is right on its mesh and shapes; empty
    for the reference. Raises RuntimeError for one that is wrong."""
    model = resolved.model
    train = resolved.run.train
    name = model.attention.kernel
    if name == "xla":
        return ""
    lengths = checked_lengths(
        model.n_heads, resolved.mesh.shape, resolved.length, resolved.source_length
    )
    with on_mesh(resolved.mesh):
        errors = check_attention(name, model, train.batch_size // train.n_microbatches, *lengths)
    return (
        f"The attention kernel {name} was checked against float32 on rows of {lengths[0]}:"
        f" {errors}."
    )


def checked_lengths(
    heads: int, sizes: Mapping[str, int], length: int, source_length: int
) -> tuple[int, int]:
    """The lengths of the rows of a check on a mesh of these sizes: those of a run, halved while the
    scores of one row would exceed ROW_BYTES on a device, and a device keeps whole blocks."""
    block = 512 * sizes["context"]
    limit = ROW_BYTES * sizes["context"] * sizes["tensor"]
    while 16 * heads * max(length, source_length) ** 2 > limit:
        if length % block or source_length % block:
            break
        length //= 2
        source_length //= 2
    return length, source_length


def prove_experts(resolved: Resolved) -> str:
    """`prove_attention` of the kernel of experts, on the shapes of a device; empty without experts
    too."""
    model = resolved.model
    train = resolved.run.train
    sizes = resolved.mesh.shape
    name = model.experts.kernel
    if model.feed_forward != "experts" or name == "xla":
        return ""
    experts = model.experts.n
    depth = model.d_model
    width = model.expert_width
    experts //= math.gcd(experts, sizes["expert"])
    width //= math.gcd(width, sizes["tensor"])
    tokens = train.batch_size // train.n_microbatches * resolved.length
    for axis in (*ACTIVATION_RULES["batch"], *ACTIVATION_RULES["sequence"]):
        tokens = -(-tokens // sizes[axis])
    experts = min(experts, max(WEIGHT_BYTES // (4 * depth * width), 2))
    most = REFERENCE_PRODUCTS[platform(resolved.mesh)] // (experts * depth * width)
    rows = min(tokens * model.experts.per_token, max(most, 8 * experts))
    errors = check_experts(name, rows, (experts, depth, width), compute_dtype(model))
    return f"The kernel of experts {name} was checked against float32 on {rows:,} rows: {errors}."


# By the setting that names the kernel.
PROOFS: dict[str, Callable[[Resolved], str]] = {
    "attention.kernel": prove_attention,
    "experts.kernel": prove_experts,
}


def largest(x: jax.Array) -> jax.Array:
    """The largest magnitude, infinite where one is no number, which the maximum of a CPU skips."""
    return jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)))


def with_gradients(function: Callable[..., jax.Array], arrays: Results, cotangent: Any) -> Results:
    """The output of `function(**arrays)`, and for each array its gradient under "dNAME"."""
    out, back = jax.vjp(lambda arrays: function(**arrays), arrays)
    (gradients,) = back(cotangent.astype(out.dtype))
    return {"output": out} | {f"d{name}": gradient for name, gradient in gradients.items()}


def relative_errors(computed: Results, expected: Results) -> Results:
    """The largest errors, each relative to the largest element of the reference."""
    return {
        name: largest(computed[name].astype(jnp.float32) - reference) / largest(reference)
        for name, reference in expected.items()
    }


def in_float32(arrays: Results) -> Results:
    return {name: array.astype(jnp.float32) for name, array in arrays.items()}


def held(what: str, cases: Sequence[Mapping[str, Any]], allowed: float) -> str:
    """The largest errors of all cases as text. Raises RuntimeError where one exceeds `allowed`."""
    worst: dict[str, float] = {}
    for errors in cases:
        for name, error in errors.items():  # np.maximum keeps a NaN
            worst[name] = float(np.maximum(worst.get(name, 0.0), error))
    if not all(error <= allowed for error in worst.values()):  # a NaN fails too
        stated = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
        raise RuntimeError(f"{what}: relative errors {stated}, allowed {allowed:g}. {USE_XLA}")
    forward = worst.pop("output")
    return f"error {forward:.0e} forward, {max(worst.values()):.0e} backward"


def check_attention(
    name: str, config: ModelConfig, rows: int, length: int, source_length: int = 0
) -> str:
    """Compares an attention kernel with float32, forward and backward, for each kind of attention
    of the model, on the current mesh; returns the largest errors as text.

    Rows have `config.max_segments` texts and some padding; 0: one text that fills them. Raises
    RuntimeError where the errors exceed what the rounding of the dtype explains, or where texts
    read each other.
    """
    # (causal, queries, keys, of one sequence)
    kinds = [(config.family != "encoder", length, length, True)]
    if config.family == "encoder_decoder":
        source = source_length or length
        kinds += [(False, source, source, True), (False, length, source, False)]
    dtype = str(compute_dtype(config))
    what = f"attention kernel {name!r} is wrong on this device for {rows} rows of {length} tokens"
    cases = []
    for kind in kinds:
        errors, leak = attention_errors(name, config, rows, *kind)
        if leak > 0:
            raise RuntimeError(
                f"{what}: texts of one row read each other (gradients up to {leak:.1e}). {USE_XLA}"
            )
        cases.append(errors)
    return held(f"{what} in {dtype}", cases, TOLERANCE[dtype])


def attention_errors(
    name: str,
    config: ModelConfig,
    rows: int,
    causal: bool,
    queries: int,
    keys: int,
    is_one_sequence: bool,
) -> tuple[Results, jax.Array]:
    """The errors of the output and of the gradients, and the largest gradient by keys and values of
    the first text that outputs of other texts and of padding have."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape.get(axis, 1) for axis in ACTIVATION_RULES["batch"])
    # 16 bytes for each score [B, N, T, S], and one row for each device that holds different ones.
    fitting = REFERENCE_BYTES // (16 * queries * keys * config.n_heads) * devices
    rows = max(min(rows, fitting) // devices, 1) * devices
    rng = np.random.default_rng(0)
    shapes = {
        "q": (queries, config.n_heads, config.head_width),  # [B, T, N, H]
        "k": (keys, config.kv_heads, config.head_width),  # [B, S, K, H]
        "v": (keys, config.kv_heads, config.value_width),  # [B, S, K, W]
        "cotangent": (queries, config.n_heads, config.value_width),  # [B, T, N, W]
    }
    random = {
        name: rng.standard_normal((rows, *shape), dtype=np.float32).astype(compute_dtype(config))
        for name, shape in shapes.items()
    }
    segments: list[np.ndarray | None] = [None, None]
    if config.attention.max_segments:
        # Texts of equal size, as many as a kernel takes, and an eighth of padding.
        number = min(config.attention.max_segments, kernels.MOST_SEGMENTS)
        for side, length in enumerate((queries, keys)):
            text = np.arange(length) * 8 * number // (7 * length)
            ids = np.where(text < number, text + 1, 0).astype(np.int32)
            segments[side] = np.broadcast_to(ids, (rows, length))

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def errors_of(random: Results, segments: list[jax.Array | None]) -> tuple[Results, jax.Array]:
        # Placed as in a step.
        arrays = {
            name: constrain(array, ("batch", "sequence", "heads", None))
            for name, array in random.items()
        }
        cotangent = arrays.pop("cotangent")
        of_queries = layout_of(arrays["q"][:, :, 0, 0], None, segments[0])
        of_keys = layout_of(arrays["k"][:, :, 0, 0], None, segments[1])
        window = 0
        if is_one_sequence:
            window = config.window
        mask = AttentionMask(
            of_queries,
            of_keys,
            causal,
            window,
            Scoring(),
            is_one_sequence,
            config.attention.max_segments,
        )
        if mask.relative and config.positions in BIASED_SCORES:
            # As large as that of the layers of the model: [B, N, T, S], or one for all rows.
            heads = jnp.arange(config.n_heads)[:, None, None]
            bias = jnp.sin(key_distances(mask)[:, None] + heads)
            if is_disentangled(config):
                bias = jnp.broadcast_to(bias, (rows, *bias.shape[1:]))
            arrays["bias"] = bias
        sinks = None
        if config.attention.sinks:
            sinks = jnp.linspace(-1, 1, config.n_heads)

        def computed(run: kernels.Kernel, arrays: Results, cotangent: jax.Array) -> Results:
            def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: Any = None) -> jax.Array:
                scoring = Scoring(config.score_scale, config.attention.soft_cap, bias, sinks)
                return run(q, k, v, mask._replace(scoring=scoring))

            return with_gradients(attention, arrays, cotangent)

        kernel = functools.partial(kernels.attend, name)
        expected = computed(plain, in_float32(arrays), cotangent.astype(jnp.float32))
        errors = relative_errors(computed(kernel, arrays, cotangent), expected)
        if segments[0] is None or segments[1] is None:
            return errors, jnp.float32(0)
        # Without a cotangent for outputs of the first text, its keys and values have a gradient
        # only where another text, or padding, reads them.
        of_others = (segments[0] != 1)[..., None, None]
        first = (segments[1] == 1)[..., None, None]
        crossed = computed(kernel, arrays, jnp.where(of_others, cotangent, 0))
        leaks = [largest(jnp.where(first, crossed[name], 0)) for name in ("dk", "dv")]
        return errors, jnp.maximum(*leaks).astype(jnp.float32)

    return errors_of(random, segments)  # type: ignore[no-any-return]


def uneven_sizes(rows: int, experts: int) -> np.ndarray:
    """Sizes int32 [E] of groups that grow, the middle one empty, and an eighth of the rows in
    none."""
    shares = np.arange(1, experts + 1)
    if experts > 1:
        shares[experts // 2] = 0
    return ((rows - -(-rows // 8)) * shares // shares.sum()).astype(np.int32)


def check_experts(name: str, rows: int, weights: tuple[int, int, int], dtype: Any) -> str:
    """Compares the products of a kernel of experts with float32, forward and backward, for rows
    [M, D] and weights [E, D, F], and for the way back, [M, F] and [E, F, D]; returns the largest
    errors as text.

    Rows of no group are NaN. The program runs twice, since a compiler may schedule the first run of
    one wrongly. Raises RuntimeError where the errors exceed what the rounding of the dtype
    explains, or where the two runs differ.
    """
    experts, depth, width = weights
    sizes = jnp.asarray(uneven_sizes(rows, experts))
    of_group = (jnp.arange(rows) < sizes.sum())[:, None]
    what = (
        f"expert kernel {name!r} is wrong on this device for {rows} rows of {depth} and {experts}"
        f" experts of {width} in {jnp.dtype(dtype)}"
    )

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def compute(arrays: Results, dy: jax.Array, sizes: jax.Array) -> Results:
        return with_gradients(GroupedRows(sizes, name).product, arrays, dy)

    @jax.jit
    def errors_of(computed: Results, arrays: Results, dy: jax.Array, sizes: jax.Array) -> Results:
        product = GroupedRows(sizes, "xla").product
        with jax.default_matmul_precision("highest"):
            expected = with_gradients(product, in_float32(arrays), dy)
        return relative_errors(computed, expected)

    cases = []
    for a, b in ((depth, width), (width, depth)):
        keys = jax.random.split(jax.random.key(0), 3)
        # A kernel that takes a row of no group into a product of a group, or into the gradient of
        # its weights, gives NaN there. Zeros would hide it.
        x = jnp.where(of_group, jax.random.normal(keys[0], (rows, a), dtype), jnp.nan)
        w = jax.random.normal(keys[1], (experts, a, b), dtype)
        dy = jnp.where(of_group, jax.random.normal(keys[2], (rows, b), dtype), jnp.nan)
        arrays = {"x": x, "w": w}
        first = compute(arrays, dy, sizes)
        second = compute(arrays, dy, sizes)
        if not all(jnp.array_equal(first[key], second[key], equal_nan=True) for key in first):
            raise RuntimeError(f"{what}: two runs of one program differ. {USE_XLA}")
        cases.append(errors_of(first, arrays, dy, sizes))
    allowed = TOLERANCE["bfloat16"]
    # Only a CPU multiplies float32 without rounding by default.
    if jnp.dtype(dtype) == jnp.float32 and platform() == "cpu":
        allowed = TOLERANCE["float32"]
    return held(what, cases, allowed)
