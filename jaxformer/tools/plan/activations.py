"""The arrays of a forward pass that the backward pass reads: what one device holds for a
microbatch.

A layer keeps its input, unless the host does, and those of its points that `model.remat` names
(`models/remat.py`); norms, activation functions and rotations are computed again. Kept points that
nothing reads again, such as the output of the last product, are not stored. On a CPU `remat=none`
keeps everything.
"""

import math
from collections import Counter, defaultdict
from typing import NamedTuple

import jax.numpy as jnp

from jaxformer.config.model import ModelConfig
from jaxformer.config.rules import names_of
from jaxformer.config.variants import BIASED_SCORES
from jaxformer.layers.biases import has_layer_bias, is_disentangled
from jaxformer.layers.blocked import MOST_BLOCKS, QUERY_BLOCK
from jaxformer.layers.ring import LONGEST_BLOCK
from jaxformer.layers.sublayer import Sizes, StoredArray
from jaxformer.models.cost import Stack, block_arrays, stacks
from jaxformer.models.remat import kept_points
from jaxformer.tools.plan.planned import PlannedRun

# A TPU stores the last axis of an array in lanes, so heads of 64 take as much as heads of 128.
LANES_OF_TPU = 128
# Copies of the logits of a tile: a TPU has the logits and their powers at one time.
LOGIT_COPIES = {"tpu": 2}
# Arrays of scores at a time: of a block of queries in blocked attention, and of a block of queries
# and keys in ring attention.
BLOCK_ARRAYS = 12
RING_ARRAYS = 3
# What model.remat=dots stores besides.
PRODUCTS = ("latent", "q", "k", "v", "out", "gate", "up", "down")


def arrays_of(planned: PlannedRun, layer: ModelConfig, stack: Stack) -> list[StoredArray]:
    """All arrays of a layer that its backward pass reads, stored or computed again."""
    return block_arrays(layer, stack, sizes_of(planned, stack.tokens, stack.tokens))


def sizes_of(planned: PlannedRun, length: int, keys: int) -> Sizes:
    """A microbatch on one device: its tokens of rows of `length`, which attend to `keys` each."""
    return Sizes(
        planned.rows,
        planned.positions(length),
        keys,
        planned.dtype_bytes,
        tensor=planned.size("tensor"),
        lanes=LANES_OF_TPU if planned.device.platform == "tpu" else 1,
        context=planned.context,
        exchange=planned.exchange,
        expert=planned.size("expert"),
    )


def planned_stacks(planned: PlannedRun) -> list[Stack]:
    """The stacks of the planned model, on the lengths of its rows."""
    return stacks(planned.model, planned.length, planned.source_length)


def is_stored(planned: PlannedRun, layer: ModelConfig, name: str) -> bool:
    """Whether an array of a layer is stored for its backward pass, and not computed again there."""
    if layer.remat == "none" and planned.device.platform == "cpu":
        return True
    products = PRODUCTS if layer.remat == "dots" else ()
    if name == "input":
        return name not in names_of(layer.offload)
    return name in (*kept_points(layer), *products)


def recomputed_names(planned: PlannedRun) -> set[str]:
    """The names of the arrays that the backward pass of the last stack computes again."""
    arrays = arrays_of(planned, planned.model, planned_stacks(planned)[-1])
    return {array.name for array in arrays if not is_stored(planned, planned.model, array.name)}


class StackActivations(NamedTuple):
    """Bytes of one device for a stack: what its layers store from the forward to the backward pass,
    what one layer computes again at a time, and what the backward pass of one layer takes
    besides."""

    name: str
    stored: float
    recomputed: float
    working: float


def activations(planned: PlannedRun) -> list[StackActivations]:
    """What each stack of a model stores for one microbatch, in the order of the forward pass."""
    return [_of_stack(planned, stack) for stack in planned_stacks(planned)]


def _of_stack(planned: PlannedRun, stack: Stack) -> StackActivations:
    stored = recomputed = working = 0.0
    for layer, count in Counter(stack.layers).items():
        arrays = arrays_of(planned, layer, stack)
        layer_bytes = sum(array.bytes for array in arrays if is_stored(planned, layer, array.name))
        stored += count * layer_bytes
        recomputed = max(recomputed, sum(array.bytes for array in arrays) - layer_bytes)
        working = max(working, backward_bytes(planned, layer, arrays, stack))
    bias, slope = bias_bytes(planned, stack)
    return StackActivations(stack.name, stored + bias, recomputed, working + slope)


def backward_bytes(
    planned: PlannedRun, layer: ModelConfig, arrays: list[StoredArray], stack: Stack
) -> float:
    """The gradients that are alive at once in the backward pass of a layer: those of the arrays of
    one sublayer, and two residual streams."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for array in arrays:
        sizes[array.name] += array.bytes
    largest = 0.0
    for sublayer in stack.sublayers(layer).values():
        gradients = sum(sizes[name] for name in sublayer.gradients)
        if "attention" in sublayer.gradients:
            gradients += scores_bytes(planned, layer, stack)
        largest = max(largest, gradients)
    return largest + 2 * sizes["input"]


def scores_bytes(planned: PlannedRun, layer: ModelConfig, stack: Stack) -> float:
    """Bytes of the scores, float32, that blocked and ring attention have at a time; 0 for other
    kernels."""
    keys = max(stack.tokens, stack.source)
    heads = sizes_of(planned, stack.tokens, keys).share(layer.n_heads)
    if layer.attention_kernel == "ring":
        block = min(LONGEST_BLOCK, planned.positions(keys))
        return RING_ARRAYS * 4 * planned.rows * heads * block**2
    if layer.attention_kernel != "blocked":
        return 0.0
    block = min(max(QUERY_BLOCK, -(-stack.tokens // MOST_BLOCKS)), stack.tokens)
    # Blocked attention has all tokens of some heads.
    return BLOCK_ARRAYS * 4 * planned.rows * heads / planned.context * block * keys


def bias_bytes(planned: PlannedRun, stack: Stack) -> tuple[float, float]:
    """Bytes of the biases of scores that a stack has for all its rows, and of their gradients: one
    for all layers, or one for each."""
    model = planned.model
    if model.positions not in BIASED_SCORES:
        return 0.0, 0.0
    heads = sizes_of(planned, stack.tokens, stack.tokens).share(model.n_heads) / planned.context
    biases = 4 * heads * stack.tokens**2
    biases *= len(stack.layers) if has_layer_bias(model) else 1
    biases *= planned.rows if is_disentangled(model) else 1
    return biases, 0.0 if model.positions == "alibi" else biases


def edge_bytes(planned: PlannedRun) -> float:
    """What is stored before the first layer and after the last one."""
    model, numbers = planned.model, planned.dtype_bytes
    tokens = planned.rows * planned.positions(planned.length)
    wide = tokens * model.d_model * numbers
    # The input and the output of the final norm; of the encoder's too, which all layers read.
    total = 2.0 * wide
    if model.family == "encoder_decoder":
        source = planned.positions(planned.source_length)
        total += 2 * planned.rows * source * model.d_model * numbers
    if model.output == "masked":
        # The dense layer, its activation and its norm.
        total += 3 * wide
    if model.embedding_norm:
        # The input of the norm, in float32.
        total += 2 * wide
    return total


def logits_bytes(planned: PlannedRun, tile: int) -> tuple[float, float]:
    """(bytes of the logits of a tile and of their gradient, bytes of all tiles together besides).

    `tile` is the number of positions of a device in each row that are computed at a time. The
    logits have train.logits_dtype, their gradient has the compute dtype; the gradient of the matrix
    is float32, and the matrix itself is gathered.
    """
    model, numbers = planned.model, planned.dtype_bytes
    outputs = model.n_classes if model.output in ("classes", "tags") else model.vocab_size
    if model.output == "none":
        return 0.0, 0.0
    share = sizes_of(planned, planned.length, planned.length).share(outputs)
    length = planned.positions(planned.length)
    positions = 1 if model.output == "classes" else min(tile, length)
    copies = LOGIT_COPIES.get(planned.device.platform, 1)
    stored = jnp.dtype(planned.run.train.logits_dtype).itemsize
    logits = planned.rows * positions * share * (stored * copies + numbers)
    tiles = math.ceil(length / max(positions, 1))
    matrix = share * model.d_model
    of_x = planned.rows * length * model.d_model * numbers
    gathered = numbers if planned.shards > 1 or tiles > 1 else 0
    return logits, matrix * (4 + gathered) + of_x
