"""The arrays of a forward pass that the backward pass reads: what one device holds for a
microbatch.

A layer keeps its input, and those of its points that `model.remat` names (`models/remat.py`);
norms, activation functions and rotations are computed again. Kept points that nothing reads again,
such as the output of the last product, are not stored. On a CPU `remat=none` keeps everything.
"""

import math
from collections import Counter, defaultdict
from typing import NamedTuple

from jaxformer.config.model import BIASED_SCORES, ModelConfig
from jaxformer.layers.block import PLACEMENTS
from jaxformer.layers.blocked import MOST_BLOCKS, QUERY_BLOCK
from jaxformer.layers.pattern import layer_configs
from jaxformer.models.remat import kept_points
from jaxformer.tools.plan.planned import PlannedRun

# A TPU stores the last axis of an array in lanes, so heads of 64 take as much as heads of 128.
LANES_OF_TPU = 128
# Float32 copies of the logits of a tile: a TPU has the logits and their powers at one time.
LOGIT_COPIES = {"tpu": 2}
# Arrays of the scores of one block of queries that blocked attention has at a time.
BLOCK_ARRAYS = 12


class StoredArray(NamedTuple):
    """An array of a layer that its backward pass reads; `name` is that of the point in a block,
    `bytes` those of one device."""

    name: str
    bytes: float


class Streams(NamedTuple):
    """The tokens of a microbatch on one device: rows of `length` queries that attend to `keys`
    tokens each."""

    rows: int
    length: int
    keys: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def block_arrays(planned: PlannedRun, layer: ModelConfig, cross: bool) -> list[StoredArray]:
    """All arrays of a layer that its backward pass reads, stored or computed again."""
    length = planned.length
    if not cross and layer.family == "encoder_decoder":
        length = planned.source_length
    streams = Streams(planned.rows, length, length)
    wide = streams.tokens * layer.d_model * planned.dtype_bytes  # a residual stream
    place = PLACEMENTS[layer.norm_placement]
    sublayers = ["attention", "cross", "ffn"] if cross else ["attention", "ffn"]
    found = [StoredArray("input", wide)]
    for name in sublayers:
        last = name == sublayers[-1]
        if "before" in place or "after" in place:
            # The input of the products after its norm, or the sum before its norm.
            found.append(StoredArray("normed", wide))
        # The output of a sublayer is read again by its norm, and for what the next one reads.
        follows = not last and layer.residual == "sequential"
        if follows or "output" in place or "after" in place:
            found.append(StoredArray("down" if name == "ffn" else "out", wide))
        if follows:
            found.append(StoredArray("residual", wide))
        if name == "ffn":
            found += _ffn_arrays(planned, layer, streams)
        else:
            keys = planned.source_length if name == "cross" else length
            found += _attention_arrays(planned, layer, streams._replace(keys=keys))
        if layer.dropout:  # which elements are kept
            found.append(StoredArray("dropout", streams.tokens * layer.d_model))
    return found


def _attention_arrays(
    planned: PlannedRun, layer: ModelConfig, streams: Streams
) -> list[StoredArray]:
    numbers, keys = planned.dtype_bytes, streams.rows * streams.keys
    heads = layer.n_heads / _split(planned, layer.n_heads)
    kv_heads = layer.kv_heads / _split(planned, layer.kv_heads)
    width, value_width = (_lanes(planned, w) for w in (layer.head_width, layer.value_width))
    q = streams.tokens * heads * width * numbers
    k = keys * kv_heads * width * numbers
    v = keys * kv_heads * value_width * numbers
    out = streams.tokens * heads * value_width * numbers
    found = [StoredArray("q", q), StoredArray("k", k), StoredArray("v", v)]
    if layer.query_key_norm != "none" or layer.positions == "rope":
        found += [StoredArray("changed q", q), StoredArray("changed k", k)]
    scores = streams.tokens * heads * streams.keys
    if layer.attention_kernel == "xla":
        # The weights in float32 and as the factor of the product with the values.
        dropped = 1 + numbers if layer.dropout else 0
        found += [StoredArray("weights", scores * (4 + numbers % 4 + dropped))]
        return [*found, StoredArray("attended", out)]
    # cuDNN has a log-sum-exp for each segment that a row may have.
    sums = max(layer.max_segments, 1) if layer.attention_kernel == "cudnn" else 1
    log_sums = streams.tokens * heads * 4 * sums
    return [*found, StoredArray("attention", out), StoredArray("attention", log_sums)]


def _lanes(planned: PlannedRun, width: int) -> int:
    """The width of a head as it is stored."""
    lanes = LANES_OF_TPU if planned.device.platform == "tpu" else 1
    return -(-width // lanes) * lanes


def _ffn_arrays(planned: PlannedRun, layer: ModelConfig, streams: Streams) -> list[StoredArray]:
    split = _split(planned, layer.ff_width)
    hidden = streams.tokens * layer.ff_width / split * planned.dtype_bytes
    names = ("gate", "up", "hidden") if layer.gated else ("up", "hidden")
    return [StoredArray(name, hidden) for name in names]


def _split(planned: PlannedRun, length: int) -> int:
    """Among how many devices an axis is divided by tensor parallelism."""
    size = planned.size("tensor")
    return size if length % size == 0 else 1


def array_names(planned: PlannedRun, layer: ModelConfig) -> frozenset[str]:
    """The names of all arrays that the backward pass of a layer reads."""
    cross = layer.family == "encoder_decoder"
    return frozenset(array.name for array in block_arrays(planned, layer, cross))


def stored_names(planned: PlannedRun, layer: ModelConfig) -> frozenset[str]:
    """The names of the arrays of a layer that are stored; all of them where nothing is computed
    again."""
    if layer.remat == "none" and planned.device.platform == "cpu":
        return array_names(planned, layer)
    kept = {"input", *kept_points(layer)}
    if layer.remat == "dots":
        kept |= {"q", "k", "v", "out", "gate", "up", "down"}
    return frozenset(kept)


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
    model = planned.model
    if model.family == "encoder_decoder":
        encoder = _of_stack(planned, "encoder", model.encoder_layers, cross=False)
        return [encoder, _of_stack(planned, "decoder", model.n_layers, cross=True)]
    return [_of_stack(planned, model.family, model.n_layers, cross=False)]


def _of_stack(planned: PlannedRun, name: str, depth: int, cross: bool) -> StackActivations:
    stored = recomputed = working = 0.0
    for layer, count in Counter(layer_configs(planned.model, depth)).items():
        arrays, names = block_arrays(planned, layer, cross), stored_names(planned, layer)
        kept = sum(array.bytes for array in arrays if array.name in names)
        stored += count * kept
        recomputed = max(recomputed, sum(array.bytes for array in arrays) - kept)
        working = max(working, backward_bytes(planned, layer, arrays, cross))
    bias, slope = bias_bytes(planned, cross)
    return StackActivations(name, stored + bias, recomputed, working + slope)


def backward_bytes(
    planned: PlannedRun, layer: ModelConfig, arrays: list[StoredArray], cross: bool
) -> float:
    """The gradients that are alive at once in the backward pass of a layer: those of the
    feed-forward's arrays, or those of attention, and two residual streams."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for array in arrays:
        sizes[array.name] += array.bytes
    ffn = sizes["gate"] + sizes["up"] + sizes["hidden"]
    attention = sum(sizes[name] for name in ("q", "k", "v", "attention", "attended", "weights"))
    if layer.attention_kernel == "blocked":
        length, keys = stack_lengths(planned, cross)
        attention += BLOCK_ARRAYS * block_scores(planned, layer, length, keys)
    return max(ffn, attention) + 2 * sizes["input"]


def stack_lengths(planned: PlannedRun, cross: bool) -> tuple[int, int]:
    """Tokens of a row of a stack, and the most keys that they attend to."""
    if planned.model.family != "encoder_decoder":
        return planned.length, planned.length
    source = planned.source_length
    return (planned.length, max(planned.length, source)) if cross else (source, source)


def block_scores(planned: PlannedRun, layer: ModelConfig, length: int, keys: int) -> float:
    """Bytes of the scores, float32, of one block of queries in blocked attention."""
    block = min(max(QUERY_BLOCK, -(-length // MOST_BLOCKS)), length)
    heads = layer.n_heads / _split(planned, layer.n_heads)
    return 4 * planned.rows * heads * block * keys


def bias_bytes(planned: PlannedRun, cross: bool) -> tuple[float, float]:
    """Bytes of the biases of scores that a stack has for all its layers and rows, and of their
    gradients."""
    model = planned.model
    if model.positions not in BIASED_SCORES:
        return 0.0, 0.0
    heads = model.n_heads / _split(planned, model.n_heads)
    length, _ = stack_lengths(planned, cross)
    biases = 4 * heads * length**2
    return biases, biases if model.positions == "t5" else 0.0


def edge_bytes(planned: PlannedRun) -> float:
    """What is stored before the first layer and after the last one."""
    model, numbers = planned.model, planned.dtype_bytes
    tokens = planned.rows * planned.length
    wide = tokens * model.d_model * numbers
    # The input and the output of the final norm; of the encoder's too, which all layers read.
    found = 2.0 * wide
    if model.family == "encoder_decoder":
        found += 2 * planned.rows * planned.source_length * model.d_model * numbers
    if model.output == "masked":
        found += 3 * wide  # the dense layer, its activation and its norm
    if model.embedding_norm:
        found += 2 * wide  # the input of the norm, in float32
    return found


def logits_bytes(planned: PlannedRun, tile: int) -> tuple[float, float]:
    """(bytes of the logits of a tile and of their gradient, bytes of all tiles together besides).

    `tile` is the number of positions of each row that are computed at a time. The logits are
    float32, their gradient has the compute dtype; the gradient of the matrix is float32, and the
    matrix itself is gathered.
    """
    model, numbers = planned.model, planned.dtype_bytes
    outputs = model.n_classes if model.output in ("classes", "tags") else model.vocab_size
    if model.output == "none":
        return 0.0, 0.0
    split = _split(planned, outputs)
    positions = 1 if model.output == "classes" else min(tile, planned.length)
    copies = LOGIT_COPIES.get(planned.device.platform, 1)
    logits = planned.rows * positions * outputs / split * (4 * copies + numbers)
    tiles = math.ceil(planned.length / max(positions, 1))
    matrix = outputs / split * model.d_model
    of_x = planned.rows * planned.length * model.d_model * numbers
    gathered = numbers if planned.size("fsdp") > 1 or tiles > 1 else 0
    return logits, matrix * (4 + gathered) + of_x
