"""The arrays of a forward pass that the backward pass reads: what one device stores for a
microbatch.

The model of a block. In the backward pass, norms and activation functions are recomputed from
their inputs, so that what is stored are these inputs, and the inputs of matrix products. A fused
attention kernel stores its inputs, its output and the log-sum-exp of each row of scores, and the
plain one the attention weights. `model.remat` stores less (`STORED`) and recomputes the rest.
"""

import math
from collections import Counter
from typing import NamedTuple

from jaxformer.config import ModelConfig
from jaxformer.layers.block import PLACEMENTS
from jaxformer.layers.pattern import layer_configs
from jaxformer.plan.planned import PlannedRun


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


# The points that each policy of model.remat keeps; "none" keeps all.
STORED = {
    "full": frozenset({"input"}),
    "dots": frozenset({"input", "q", "k", "v", "projected", "up", "gate", "down"}),
}


def block_arrays(planned: PlannedRun, layer: ModelConfig, cross: bool) -> list[StoredArray]:
    """What a block of the tokens stores without remat."""
    streams = Streams(planned.rows, planned.length, planned.length)
    if not cross and layer.family == "encoder_decoder":
        streams = Streams(planned.rows, planned.source_length, planned.source_length)
    return _block_arrays(planned, layer, streams, cross)


def _block_arrays(
    planned: PlannedRun, layer: ModelConfig, streams: Streams, cross: bool
) -> list[StoredArray]:
    wide = streams.tokens * layer.d_model * planned.dtype_bytes  # a residual stream
    place, sublayers = PLACEMENTS[layer.norm_placement], 3 if cross else 2
    found = [StoredArray("input", wide)]
    if layer.residual == "sequential":
        # The stream between the sublayers: the input of the next norm, or its output.
        found += [StoredArray("residual", wide)] * (sublayers - 1)
    if place & {"before", "after", "output"}:
        # The outputs of norms before products, or the inputs of norms on outputs or sums.
        found += [StoredArray("normed", wide)] * (sublayers * len(place))
    found += _attention_arrays(planned, layer, streams, "")
    if cross:
        to_source = streams._replace(keys=planned.source_length)
        found += _attention_arrays(planned, layer, to_source, "cross_")
    found += _ffn_arrays(planned, layer, streams)
    if layer.dropout:
        # Which elements were kept, of each sublayer's output.
        found += [StoredArray("dropout", streams.tokens * layer.d_model)] * sublayers
    return found


def _attention_arrays(
    planned: PlannedRun, layer: ModelConfig, streams: Streams, prefix: str
) -> list[StoredArray]:
    numbers, keys = planned.dtype_bytes, streams.rows * streams.keys
    heads = layer.n_heads / _split(planned, layer.n_heads)
    kv_heads = layer.kv_heads / _split(planned, layer.kv_heads)
    q = streams.tokens * heads * layer.head_width * numbers
    k = keys * kv_heads * layer.head_width * numbers
    v = keys * kv_heads * layer.value_width * numbers
    out = streams.tokens * heads * layer.value_width * numbers
    found = [StoredArray(prefix + "q", q), StoredArray(prefix + "k", k)]
    found += [StoredArray(prefix + "v", v), StoredArray(prefix + "attended", out)]
    if layer.query_key_norm != "none":  # the inputs of these norms
        found += [StoredArray(prefix + "q_unnormed", q), StoredArray(prefix + "k_unnormed", k)]
    scores = streams.tokens * heads * streams.keys
    if layer.dropout:
        # The weights in float32, which of them were kept, and what is multiplied by the values.
        found.append(StoredArray(prefix + "weights", scores * (4 + 1 + numbers)))
    elif layer.attention_kernel == "xla":
        # The weights in float32, and as the factor of the product with the values.
        found.append(StoredArray(prefix + "weights", scores * (4 + numbers % 4)))
    else:
        found.append(StoredArray(prefix + "log_sum", streams.tokens * heads * 4))
    return found


def _ffn_arrays(planned: PlannedRun, layer: ModelConfig, streams: Streams) -> list[StoredArray]:
    split = _split(planned, layer.ff_width)
    hidden = streams.tokens * layer.ff_width / split * planned.dtype_bytes
    names = ("gate", "up", "hidden") if layer.gated else ("up", "hidden")
    return [StoredArray(name, hidden) for name in names]


def _split(planned: PlannedRun, length: int) -> int:
    """Among how many devices an axis is divided by tensor parallelism."""
    size = planned.size("tensor")
    return size if length % size == 0 else 1


def _kept(model: ModelConfig, arrays: list[StoredArray]) -> float:
    if model.remat == "none":
        return sum(array.bytes for array in arrays)
    names = STORED.get(model.remat) or frozenset({"input", *getattr(model, "saved", ())})
    return sum(array.bytes for array in arrays if array.name in names)


class Activations(NamedTuple):
    """Bytes of one device: what the layers store from the forward to the backward pass, what one
    layer recomputes at a time, and what the backward pass of one layer takes besides."""

    stored: float
    recomputed: float
    working: float


def activations(planned: PlannedRun) -> Activations:
    """What the stacks of a model store for one microbatch."""
    model = planned.model
    stacks = [(model.n_layers, model.family == "encoder_decoder")]
    if model.family == "encoder_decoder":
        stacks.append((model.encoder_layers, False))
    stored = recomputed = working = 0.0
    for depth, cross in stacks:
        for layer, count in Counter(layer_configs(model, depth)).items():
            arrays = block_arrays(planned, layer, cross)
            kept = _kept(layer, arrays)
            stored += count * kept
            recomputed = max(recomputed, sum(array.bytes for array in arrays) - kept)
            working = max(working, backward_bytes(arrays))
    return Activations(stored + edge_bytes(planned), recomputed, working)


def backward_bytes(arrays: list[StoredArray]) -> float:
    """The gradients that are alive at once in the backward pass of a block: those of the
    feed-forward's arrays and of two residual streams, or those of attention."""
    sizes: dict[str, float] = {}
    for array in arrays:
        sizes[array.name] = sizes.get(array.name, 0) + array.bytes
    ffn = sum(sizes.get(name, 0) for name in ("gate", "up", "hidden"))
    attention = sum(sizes.get(name, 0) for name in ("q", "k", "v", "attended", "weights"))
    return max(ffn, attention) + 2 * sizes["input"]


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
    logits = planned.rows * positions * outputs / split * (4 + numbers)
    tiles = math.ceil(planned.length / max(positions, 1))
    matrix = outputs / split * model.d_model
    of_x = planned.rows * planned.length * model.d_model * numbers
    gathered = numbers if planned.size("fsdp") > 1 or tiles > 1 else 0
    return logits, matrix * (4 + gathered) + of_x
