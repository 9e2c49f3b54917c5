"""Checks of a run on its devices: what its mesh splits, and that its kernels are right."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.mesh import AnyMesh, parameter_sharding, undivided
from jaxformer.arrays.out_of_memory import OutOfMemory, memory_of
from jaxformer.arrays.params import Specs, rows
from jaxformer.arrays.sharding import ACTIVATION_RULES, PARAMETERS, constrain
from jaxformer.config.format import human_bytes
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Log
from jaxformer.config.variants import BIASED_SCORES
from jaxformer.files import ConfigError
from jaxformer.layers import kernels
from jaxformer.layers.biases import is_disentangled, key_distances, score_bias
from jaxformer.layers.dot_product import plain
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of
from jaxformer.models.stack import compute_dtype
from jaxformer.runs.expert_check import largest, prove_experts
from jaxformer.runs.resolve import Resolved
from jaxformer.runs.selection import with_kernel
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.state import on_mesh

# The check of a kernel takes fewer rows and heads where its float32 scores would exceed this.
REFERENCE_BYTES = 2**30
# It takes shorter rows where those of one row would exceed this.
ROW_BYTES = 2**33
# The largest error of a kernel, relative to the largest element of the reference.
TOLERANCE = {"float32": 2e-4, "bfloat16": 3e-2, "float16": 5e-3}
# What the check compares: the output, and the gradients of the inputs.
COMPARED = ("output", "dq", "dk", "dv", "dbias")

ResolvedRun = TypeVar("ResolvedRun", bound=Resolved)


def check_split(specs: Specs, mesh: AnyMesh) -> list[str]:
    """A line for each parameter that the mesh should split but cannot, because none of its axes is
    divisible, with its bytes.

    Raises ConfigError where mesh.fsdp or mesh.tensor was given and splits no parameter at all.
    """
    used, undivided_axes = set[str](), dict[str, list[str]]()
    for path, spec in rows(specs).items():
        axes = undivided(mesh, spec.shape, spec.axes)
        if axes:
            undivided_axes[path] = axes
        for entry in parameter_sharding(mesh, spec.shape, spec.axes).spec:
            used |= {entry} if isinstance(entry, str) else {*(entry or ())}
    for name in {axis: None for rule in PARAMETERS.values() for axis in rule}:
        # What divides tokens is of use without dividing parameters.
        if mesh.shape[name] > 1 and name not in (*used, *ACTIVATION_RULES["sequence"]):
            reasons = [f"{path}: {', '.join(axes)}" for path, axes in undivided_axes.items()]
            listed = "\n  ".join(reasons[:8])
            raise ConfigError(
                f"mesh.{name}={mesh.shape[name]} splits no parameter of this model, because it"
                " divides none of their axes; every device would hold all of them:\n"
                f"  {listed}\nChoose a mesh.{name} that divides them, or leave it at 1."
            )
    sizes = {path: human_bytes(4 * math.prod(spec.shape)) for path, spec in rows(specs).items()}
    return [
        f"{path}, {sizes[path]}, is not split along {', '.join(axes)}"
        for path, axes in undivided_axes.items()
    ]


def with_proven_kernel(resolved: ResolvedRun, log: Log) -> ResolvedRun:
    """The run with kernels of attention and of experts that are right on its devices, and the run
    itself if its kernels are.

    Where "auto" chose a kernel that is wrong there, or that JAX or the compiler refuses, the next
    one that serves the run is checked. Logs a sentence for each.

    Raises:
      RuntimeError: for a kernel that is wrong or refused and was asked for by name.
      OutOfMemory: if a device has not enough memory for the check.
    """
    checks = {
        "attention_kernel": ("the check of the attention kernel", prove_kernel),
        "expert_kernel": ("the check of the kernel of experts", prove_experts),
    }
    failed: dict[str, dict[str, str]] = {setting: {} for setting in checks}
    for setting, (step, prove) in checks.items():
        sentence = None
        while sentence is None:
            try:
                with memory_of(step):
                    sentence = prove(resolved)
            except OutOfMemory:
                raise
            # Also what JAX (NotImplementedError) and the compiler (JaxRuntimeError) raise, and an
            # IndexError, with which XLA of jax 0.11.2 ended a deterministic run on an H200.
            except (RuntimeError, IndexError) as error:
                if getattr(resolved.asked.model, setting) != "auto":
                    raise
                reason = f"its check on this device failed: {str(error).splitlines()[0]}"
                failed[setting][getattr(resolved.model, setting)] = reason
                resolved = _with_other_kernels(resolved, *failed.values())
                log(f"Attention: {resolved.kernel}.")
        if sentence:
            log(sentence)
    return resolved


def _with_other_kernels(
    resolved: ResolvedRun, failed: Mapping[str, str], failed_experts: Mapping[str, str]
) -> ResolvedRun:
    """The run with the first kernels that serve it and have not failed."""
    run, asked, mesh = resolved.run, resolved.asked.model, resolved.mesh
    auto = dataclasses.replace(
        resolved.model, attention_kernel=asked.attention_kernel, expert_kernel=asked.expert_kernel
    )
    length = math.gcd(resolved.length, resolved.source_length)
    segments = auto.max_segments
    model, kernel = with_kernel(auto, run.adapter, length, segments, mesh, failed, failed_experts)
    return dataclasses.replace(resolved, run=dataclasses.replace(run, model=model), kernel=kernel)


def prove_kernel(resolved: Resolved) -> str:
    """Checks the kernel that a run takes, on its mesh and its shapes. Returns a sentence about it,
    empty for the reference. Raises RuntimeError if the kernel is wrong."""
    model, train, length = resolved.model, resolved.run.train, resolved.length
    name = model.attention_kernel
    if name == "xla":
        return ""
    rows = train.batch_size // train.n_microbatches
    length, source_length = checked_lengths(
        model.n_heads, resolved.mesh.shape, length, resolved.source_length
    )
    with on_mesh(resolved.mesh):
        errors = check_kernel(name, model, rows, length, source_length)
    return f"The attention kernel {name} was checked against float32 on rows of {length}: {errors}."


def checked_lengths(
    heads: int, sizes: Mapping[str, int], length: int, source_length: int
) -> tuple[int, int]:
    """The lengths of the rows of a check, on a mesh of these sizes: those of a run, halved while
    the scores of one row would exceed ROW_BYTES on a device, and a device keeps whole blocks."""
    context = sizes["context"]
    limit = ROW_BYTES * context * sizes["tensor"]
    while 16 * heads * max(length, source_length) ** 2 > limit:
        if length % (512 * context) or source_length % (512 * context):
            break
        length, source_length = length // 2, source_length // 2
    return length, source_length


def check_kernel(
    name: str, config: ModelConfig, rows: int, length: int, source_length: int = 0
) -> str:
    """Compares the kernel with the reference, forward and backward, for each kind of attention of
    the model, on the current mesh; returns the largest errors as text.

    Rows have `config.max_segments` texts and some padding; 0: one text that fills them. Raises
    RuntimeError where the errors exceed what the rounding of the dtype explains.
    """
    worst, leaked = dict.fromkeys(COMPARED, 0.0), 0.0
    for kind in kinds_of_attention(config, length, source_length or length):
        errors, leak = kernel_errors(name, config, rows, kind)
        # A NaN is kept.
        worst |= {name: float(np.maximum(worst[name], errors[name])) for name in errors}
        leaked = max(leaked, leak)
    dtype = compute_dtype(config)
    if leaked:
        raise RuntimeError(
            f"attention kernel {name!r} is wrong on this device: texts of one row read each other"
            f" (gradients up to {leaked:.1e}). Choose model.attention_kernel=xla, and report it."
        )
    allowed = TOLERANCE[str(dtype)]
    if not all(error <= allowed for error in worst.values()):  # a NaN fails too
        stated = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
        raise RuntimeError(
            f"attention kernel {name!r} is wrong on this device for {rows} rows of {length} tokens"
            f" in {dtype}: relative errors {stated}, allowed {allowed:g}. Choose"
            " model.attention_kernel=xla, and report it."
        )
    forward = worst.pop("output")
    return f"error {forward:.0e} forward, {max(worst.values()):.0e} backward"


class AttentionKind(NamedTuple):
    """An attention of a model: its direction, the lengths of queries and keys, and whether these
    are of one sequence."""

    causal: bool
    queries: int
    keys: int
    relative: bool = True


def kernel_errors(
    name: str, config: ModelConfig, rows: int, kind: AttentionKind
) -> tuple[dict[str, float], float]:
    """The largest errors of a kernel by the names in COMPARED, each relative to the largest element
    of the reference, and the largest gradient by texts that outputs of other texts have; on the
    current mesh, for one kind of attention of the model."""
    dtype, (arrays, segments) = compute_dtype(config), _case(config, rows, kind)
    compare = functools.partial(_errors, name, config, kind)
    compiled = jax.jit(compare, compiler_options=compiler_options())
    errors, leak = compiled([array.astype(dtype) for array in arrays], segments)
    return {name: float(error) for name, error in errors.items()}, float(leak)


def kinds_of_attention(config: ModelConfig, length: int, source_length: int) -> list[AttentionKind]:
    """Those of the model's family, for rows and sources of these lengths."""
    if config.family != "encoder_decoder":
        return [AttentionKind(config.family == "decoder", length, length)]
    encoder = AttentionKind(False, source_length, source_length)
    cross = AttentionKind(False, length, source_length, relative=False)
    return [AttentionKind(True, length, length), encoder, cross]


def _errors(
    name: str,
    config: ModelConfig,
    kind: AttentionKind,
    arrays: list[jax.Array],
    segments: Sequence[jax.Array | None],
) -> tuple[dict[str, jax.Array], jax.Array]:
    """The errors by the names in COMPARED, each relative to the largest element of the reference,
    and the largest gradient by keys and values of the first text that outputs of other texts and of
    padding have.

    `arrays` and `segments` are those of `_case`; the arrays are placed as in a step. Scores have
    the scale, the cap, the sinks and the bias of the model.
    """
    arrays = [constrain(array, ("batch", "sequence", "heads", None)) for array in arrays]
    queries, keys = (
        layout_of(array[:, :, 0, 0], None, ids)
        for array, ids in zip(arrays[:2], segments, strict=True)
    )
    window = config.window if kind.relative else 0
    mask = AttentionMask(
        queries, keys, kind.causal, window, Scoring(), kind.relative, config.max_segments
    )
    mask = mask._replace(scoring=_scoring(config, mask))
    kernel = functools.partial(kernels.attend, name)
    computed = _with_gradients(kernel, mask, arrays)
    expected = _with_gradients(plain, mask, [array.astype(jnp.float32) for array in arrays])
    errors = {
        array: largest(computed[array].astype(jnp.float32) - b) / largest(b)
        for array, b in expected.items()
    }
    return errors, _leak(kernel, mask, arrays)


def _leak(kernel: kernels.Kernel, mask: AttentionMask, arrays: list[jax.Array]) -> jax.Array:
    ids = (mask.queries.segments, mask.keys.segments)
    if ids[0] is None or ids[1] is None:
        return jnp.float32(0)
    of_other_texts, first = (ids[0] != 1)[..., None, None], (ids[1] == 1)[..., None, None]
    only = [*arrays[:3], jnp.where(of_other_texts, arrays[3], 0)]
    computed = _with_gradients(kernel, mask, only)
    leaks = [largest(jnp.where(first, computed[name], 0)) for name in ("dk", "dv")]
    return jnp.maximum(*leaks).astype(jnp.float32)


def _with_gradients(
    kernel: kernels.Kernel, mask: AttentionMask, arrays: list[jax.Array]
) -> dict[str, jax.Array]:
    """The output of attention, and the gradients of q, k, v and the bias for the cotangent
    arrays[3], by the names in COMPARED; without a bias, none of it."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> jax.Array:
        return kernel(q, k, v, mask._replace(scoring=mask.scoring._replace(bias=bias)))

    out, back = jax.vjp(attention, *arrays[:3], mask.scoring.bias)
    computed = zip(COMPARED, (out, *back(arrays[3].astype(out.dtype))), strict=True)
    return {name: array for name, array in computed if array is not None}


def _scoring(config: ModelConfig, mask: AttentionMask) -> Scoring:
    heads = config.n_heads
    sinks = jnp.linspace(-1, 1, heads) if config.attention_sinks else None
    table = None
    if config.positions == "t5":
        table = jnp.sin(jnp.arange(config.relative_buckets * heads)).reshape(-1, heads)
    biased = mask.relative and config.positions in BIASED_SCORES
    bias = None
    if biased and is_disentangled(config):
        # One of this shape: that of a layer depends on its queries and keys.
        angles = key_distances(mask)[:, None] + jnp.arange(heads)[:, None, None]
        shape = (len(mask.queries.positions), *angles.shape[1:])
        bias = jnp.broadcast_to(jnp.sin(angles), shape)
    elif biased:
        bias = score_bias(table, config, mask)
    return Scoring(config.score_scale, config.attention_soft_cap, bias, sinks)


def _case(
    config: ModelConfig, rows: int, kind: AttentionKind
) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """Random [q, k, v, cotangent], each [B, T, N, H], and the segments [B, T] of queries and of
    keys. There are as many rows as REFERENCE_BYTES allows, but one for each device that holds
    different ones."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in ACTIVATION_RULES["batch"])
    # 16 bytes for each score [B, N, T, S].
    fitting = REFERENCE_BYTES // (16 * kind.queries * kind.keys * config.n_heads) * devices
    rows = max(min(rows, fitting) // devices, 1) * devices
    q_shape = (rows, kind.queries, config.n_heads, config.head_width)
    k_shape = (rows, kind.keys, config.kv_heads, config.head_width)
    v_shape = (*k_shape[:3], config.value_width)
    out_shape = (*q_shape[:3], config.value_width)
    rng = np.random.default_rng(0)
    shapes = (q_shape, k_shape, v_shape, out_shape)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    lengths = (kind.queries, kind.keys)
    return arrays, [_segments(rows, length, config.max_segments) for length in lengths]


def _segments(rows: int, length: int, segments: int) -> np.ndarray | None:
    """Segment ids [B, T] of texts of equal size, as many as MOST_SEGMENTS allows, and an eighth of
    padding; None for one text that fills the row."""
    if not segments:
        return None
    number = min(segments, kernels.MOST_SEGMENTS)
    text_index = np.arange(length) * 8 * number // (7 * length)
    one = np.where(text_index < number, text_index + 1, 0).astype(np.int32)
    return np.broadcast_to(one, (rows, length))
