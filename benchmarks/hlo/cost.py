"""What one instruction of an optimized HLO program costs: FLOPs of its products, and bytes that it
moves to and from main memory.

Both are counted low rather than high, because bounds are made of them: an operand that is sliced
counts as its slice, an update in place as the update, elementwise arithmetic as free, and arrays in
a TPU's vector memory as nothing.
"""

import math
import re
from dataclasses import replace

import numpy as np

from hlo.program import Computation, Instruction, Program
from jaxformer.models.cost import visible_pairs

# Instructions that move nothing by themselves: those that only name or hand on values, and those
# whose computations are counted in their place.
FREE = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
    *("after-all", "partition-id", "replica-id", "while", "conditional", "call", "async-start"),
}
# Starts whose value says what they move, beside those of collectives; see `synchronous`.
STARTS = ("async-start", "copy-start", "slice-start", "dynamic-slice-start")
SLICES = ("dynamic-slice", "slice", "gather")
SAME_DATA = ("bitcast", "reshape", "copy")
COLLECTIVE = re.compile(
    r"^(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    r"|ragged-all-to-all)(-start)?$"
)
DOT_IN_CALL = re.compile(r"^__cublas\$(?:lt\$matmul|gemm)")
ATTENTION = re.compile(r"^__cudnn\$fmha")
SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# The kernels of `layers/grouped_pallas.py` for GPUs, whose calls have no cost estimate.
GROUPED_PRODUCT = re.compile(r'\bname"?\s*[=:]\s*"grouped_(?:product|outer)"')
SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
MOST_PAIRS = 4_000_000  # pairs of output and kernel position that are counted one by one


def synchronous(computation: Computation, row: Instruction) -> Instruction:
    """An instruction that runs beside others as the one that it starts: `fusion-start`, whose value
    is (operands, results, context), as the `fusion` with the results of its `fusion-done`. Any
    other is returned as it is."""
    opcode = row.opcode.removesuffix("-start")
    if opcode == row.opcode or row.opcode in STARTS or COLLECTIVE.match(row.opcode):
        return row
    ends = (user for user in computation.users[row.name] if user.opcode == f"{opcode}-done")
    done = next(ends, None)
    return replace(row, opcode=opcode, types=done.types if done else row.types)


def product_flops(computation: Computation, row: Instruction) -> int:
    """FLOPs of a matrix product or a convolution, two for each multiplication; 0 for others."""
    if row.opcode == "dot":
        return _contraction(computation, row, row.numbers("lhs_contracting_dims"))
    if row.opcode == "convolution":
        return _convolution(computation, row)
    if row.opcode == "custom-call" and DOT_IN_CALL.match(target_of(row)):
        listed = row.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        return _contraction(computation, row, [int(n) for n in re.findall(r"\d+", listed)])
    return 0


def kernel_flops(computation: Computation, row: Instruction) -> int:
    """FLOPs inside a custom call: those that a Pallas kernel states as its cost estimate, those of
    grouped products, where all rows count as if they were in a group, and those of cuDNN and splash
    attention, where the half that a causal mask hides is not done, and of cuDNN what a window
    hides; 0 for others. What windows of splash attention and the limits of packed texts hide
    besides is not known here."""
    if row.opcode != "custom-call":
        return 0
    if stated := row.attribute(r'"cost_estimate":\{[^}]*"flops":"?(\d+)'):
        return int(stated)
    named = (computation.instructions.get(name) for name in row.operands)
    arrays = [array for operand in named if operand for array in operand.types]
    if GROUPED_PRODUCT.search(row.attributes):  # x [M, A] -> [M, B] or [E, A, B]
        x = next(array.shape for array in arrays if array.dtype in ("bf16", "f32"))
        return 2 * math.prod(x) * row.types[0].shape[-1]
    if ATTENTION.match(target_of(row)):  # [B, T, N, H] and [B, S, K, H]
        shapes = [array.shape for array in arrays if len(array.shape) == 4][:2]
        if len(shapes) < 2:
            return 0
        (batch, length, heads, width), (_, keys, *_) = shapes
        products = 5 if "Backward" in target_of(row) else 2
        divisor = 2 if "CAUSAL" in row.attributes else 1
        window = int(row.attribute(r'"sliding_window_length":\s*"?(\d+)') or 0)
        if 0 < window < length == keys:
            pairs = visible_pairs(length, window)
            return 2 * products * batch * heads * width * pairs
    elif kernel := SPLASH.match(row.name):  # [B, N, T, H] and [B, K, S, H], without B for one row
        floats = [array.shape for array in arrays if array.dtype in ("bf16", "f32")]
        sides = [shape for shape in floats if len(shape) in (3, 4)][:2]
        if len(sides) < 2:
            return 0
        batch = math.prod(sides[0][:-3])
        *_, heads, length, width = sides[0]
        keys = sides[1][-2]
        products = SPLASH_PRODUCTS[kernel[1]]
        # Its mask is an array of the kernel, and taken to be causal.
        divisor = 2
    else:
        return 0
    return 2 * products * batch * heads * length * keys * width // divisor


def target_of(row: Instruction) -> str:
    """The target of a custom call, "" for another instruction."""
    return row.attribute(r'custom_call_target="([^"]*)"') if row.opcode == "custom-call" else ""


def operand_dtypes(computation: Computation, row: Instruction) -> str:
    """The dtypes of a product, as "bf16 x bf16 -> f32"."""
    sides = [computation.operand(row, index) for index in (0, 1)]
    names = " x ".join(side.types[0].dtype if side and side.types else "?" for side in sides)
    return f"{names} -> {row.types[0].dtype}"


def _contraction(computation: Computation, row: Instruction, contracted: list[int]) -> int:
    left = computation.operand(row, 0)
    if left is None or not left.types:
        return 0
    summed = math.prod(left.types[0].shape[axis] for axis in contracted)
    return 2 * math.prod(row.types[0].shape) * summed


def _convolution(computation: Computation, row: Instruction) -> int:
    """As XLA's own cost analysis: products with padding are none. Products of a TPU are written as
    convolutions, with every kind of window."""
    sides = [computation.operand(row, index) for index in (0, 1)]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", row.attributes)
    if not labels or not all(side and side.types for side in sides):
        return 0
    left, right = (side.types[0].shape for side in sides if side)
    out = row.types[0].shape
    of_left, of_right, of_out = labels.groups()
    spatial = sorted(label for label in of_left if label.isdigit())
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", row.attribute(r"window=\{([^}]*)\}")))

    def setting(name: str, axis: int, default: str) -> str:
        return window[name].split("x")[axis] if name in window else default

    pairs = 1
    for axis, label in enumerate(spatial):
        pairs *= _valid_pairs(
            size=left[of_left.index(label)],
            kernel=right[of_right.index(label)],
            out=out[of_out.index(label)],
            stride=int(setting("stride", axis, "1")),
            low=int(setting("pad", axis, "0_0").split("_")[0]),
            dilations=(
                int(setting("lhs_dilate", axis, "1")),
                int(setting("rhs_dilate", axis, "1")),
            ),
        )
    features = out[of_out.index("f")] * right[of_right.index("i")]
    return 2 * pairs * out[of_out.index("b")] * features


def _valid_pairs(
    size: int, kernel: int, out: int, stride: int, low: int, dilations: tuple[int, int]
) -> int:
    """Pairs of output and kernel positions that meet an element of the input, along one axis."""
    of_input, of_kernel = dilations
    if kernel * out > MOST_PAIRS:
        return kernel * out
    position = np.arange(out)[:, None] * stride + np.arange(kernel)[None] * of_kernel - low
    inside = (position >= 0) & (position <= (size - 1) * of_input) & (position % of_input == 0)
    return int(inside.sum())


def moved_bytes(program: Program, computation: Computation, row: Instruction) -> int:
    """Bytes that an instruction outside of fusions reads from main memory and writes to it.
    Collectives are counted elsewhere and here as 0."""
    if (
        row.opcode in FREE
        or COLLECTIVE.match(row.opcode)
        or row.opcode.endswith(("-update", "-done"))
    ):
        return 0
    if row.opcode in SLICES:
        return 2 * _main(row)
    if row.opcode == "dynamic-update-slice":
        return 2 * _main(computation.operand(row, 1))
    if row.opcode == "scatter":
        # In place: indices and updates are read, and as much as the updates is read and written.
        return 3 * _main(computation.operand(row, 2)) + _main(computation.operand(row, 1))
    if row.opcode in ("slice-start", "dynamic-slice-start"):
        # The value is (operand and indices, slice, context).
        slice_array = next(array for array in row.types[1:] if array.shape)
        return slice_array.bytes + slice_array.main_bytes
    if row.opcode == "copy-start":
        # The value is (copy, original, context).
        return sum(array.main_bytes for array in row.types[:2])
    if target_of(row) == "AllocateBuffer":
        return 0
    called = row.called("calls") if row.opcode == "fusion" else []
    if called:
        return _fusion_bytes(program, computation, row, program.computations[called[0]])
    read = (computation.instructions.get(name) for name in dict.fromkeys(row.operands))
    return _main(row) + sum(map(_main, read))


def _main(row: Instruction | None) -> int:
    return sum(array.main_bytes for array in row.types) if row else 0


def _all(row: Instruction | None) -> int:
    return sum(array.bytes for array in row.types) if row else 0


def _fusion_bytes(
    program: Program, computation: Computation, row: Instruction, body: Computation
) -> int:
    read = 0
    for number, parameter in body.parameters.items():
        if _main(computation.operand(row, number)):
            read += _read_bytes(program, body, parameter)
    outputs = [body.root]
    if body.root.opcode == "tuple":
        outputs = [body.instructions[name] for name in body.root.operands]
    written = 0
    for number, output in enumerate(outputs):
        in_main = len(row.types) != len(outputs) or row.types[number].space == 0
        written += _written_bytes(body, output) if in_main else 0
    return read + written


def _written_bytes(body: Computation, output: Instruction) -> int:
    """Bytes that a fusion writes for one of its values."""
    source = output
    while source.opcode in SAME_DATA and (before := body.operand(source, 0)):
        source = before
    if "AsyncCollective" in target_of(source):
        return 0
    if source.opcode == "parameter" or COLLECTIVE.match(source.opcode):
        return 0 if output.opcode != "copy" else _all(output)
    if source.opcode == "dynamic-update-slice":
        return _all(body.operand(source, 1))
    if source.opcode == "scatter":
        return 2 * _all(body.operand(source, 2))
    return _all(output)


def _read_bytes(program: Program, body: Computation, value: Instruction, depth: int = 0) -> int:
    """Bytes that a fused computation reads of a value: what is sliced of it, nothing where it is
    updated in place, else all."""
    total, all_bytes = 0, _all(value)
    for user in body.users[value.name]:
        places = [index for index, name in enumerate(user.operands) if name == value.name]
        if user.opcode in SLICES and places == [0]:
            total += _all(user)
        elif user.opcode in ("dynamic-update-slice", "scatter") and places == [0]:
            continue
        elif user.opcode == "tuple" or COLLECTIVE.match(user.opcode) or "Async" in target_of(user):
            # Read by a collective that runs behind this fusion.
            continue
        elif (user.opcode in SAME_DATA or _is_sliced(body, user)) and depth < 8:
            total += _read_bytes(program, body, user, depth + 1)
        elif user.opcode == "fusion" and depth < 8:
            inner = program.computations[user.called("calls")[0]]
            for index in places:
                total += _read_bytes(program, inner, inner.parameters[index], depth + 1)
        else:
            return all_bytes
    return min(total, all_bytes)


def _is_sliced(body: Computation, value: Instruction) -> bool:
    """Whether a value is a conversion of which only slices are read, and so converted."""
    users = body.users[value.name]
    return (
        value.opcode == "convert" and bool(users) and all(user.opcode in SLICES for user in users)
    )
