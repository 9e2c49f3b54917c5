"""The collectives of a step, by the placements of `sharding.py` and what XLA makes of them.

fsdp and context: each device holds a shard of every matrix. A layer's matrices are gathered in the
compute dtype in the forward and again in the backward pass of every microbatch, and their gradients
are summed and scattered. context: attention exchanges tokens for heads, gathers keys and values, or
passes them around (`layers/exchange.py`, `layers/ring.py`). data: the gradients of the shards are
summed over the replicas, once a step where each replica accumulates its own, else those of the
layers once a microbatch. tensor: heads, feed-forward width and vocabulary are split, so the output
of attention and of the feed-forward, and the gradients of their inputs, are summed, and the table
of tokens is gathered for its look-up.

XLA's compiler for TPUs turns the scatter of a gradient into a loop that sends a shard on while it
multiplies by another: a windowed product (Wang et al. 2023, "Overlap communication with dependent
computation via decomposition"). The product with a gathered matrix, too, where its option is on.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from jaxformer.arrays.params import Spec, rows
from jaxformer.arrays.sharding import PARAMETERS, partition
from jaxformer.layers.dispatch import EXPERT
from jaxformer.layers.embed import added_embeddings, added_specs, embedding_specs
from jaxformer.layers.exchange import CONTEXT
from jaxformer.layers.head import HEADS, is_tied
from jaxformer.losses.cross_entropy import summed_in_ring
from jaxformer.tools.plan.activations import planned_stacks, recomputed_names
from jaxformer.tools.plan.exchanges import attention_exchanges, balance_exchanges, expert_exchanges
from jaxformer.tools.plan.planned import PlannedRun
from jaxformer.training.compiler_options import compiler_options

# A loop over more devices than these sends two shards that it does not use.
UNROLLED = 4
# TPUs on which the compiler scatters the gradients of the layers, and windows none of them.
SCATTERED = ("v5p",)
# The option of XLA that has the weights of a product sent on in pieces.
WINDOWED_WEIGHTS = "xla_tpu_enable_windowed_einsum_for_all_gather"


class Collective(NamedTuple):
    """Collectives of one kind and purpose in a step.

    `bytes` is the size of the array that one device has whole: the result of an all-gather, the
    operand of the others; of all `times` together. `devices` is the size of a group.
    """

    kind: str
    purpose: str
    axis: str
    times: int
    bytes: float
    devices: int

    def sent(self, platform: str) -> float:
        """The bytes that each device sends at least."""
        return sent_bytes(self.kind, self.bytes, self.devices, platform)


def sent_bytes(kind: str, size: float, devices: int, platform: str) -> float:
    """The least bytes that each device of a group sends for a collective of `size` bytes, as in a
    ring (Patarasuk and Yuan 2009); the switches between GPUs can sum, so that each sends its
    operand of an all-reduce once. A collective-permute sends its operand."""
    if kind == "collective-permute":
        return size
    share = (devices - 1) / devices
    if kind != "all-reduce":
        return size * share
    return size if platform == "gpu" else 2 * share * size


def link_bytes(collectives: list[Collective], platform: str) -> float:
    """The least bytes that a device sends in a step."""
    return sum(collective.sent(platform) for collective in collectives)


def collectives_of(planned: PlannedRun) -> list[Collective]:
    """The collectives of a step; those of a few numbers, and of token ids, are left out."""
    collectives: list[Collective] = []
    if planned.shards > 1:
        collectives += [*_of_layers(planned), *_of_shards(planned), *_of_lookups(planned)]
    if planned.context > 1:
        exchanges = [*attention_exchanges(planned), *balance_exchanges(planned)]
        collectives += [_of_microbatches(planned, *one) for one in exchanges]
    if planned.size(EXPERT) > 1:
        collectives += [_of_microbatches(planned, *one) for one in expert_exchanges(planned)]
    if planned.size("data") > 1:
        collectives += _of_data(planned)
    if planned.size("tensor") > 1:
        collectives += _of_tensor(planned)
    return [one for one in collectives if one.bytes]


class _Leaf(NamedTuple):
    """A row of the table of parameters: its path, its number of arrays, the elements that a device
    has after they are gathered, and the axes of the mesh over which they are (empty: none)."""

    path: str
    spec: Spec
    arrays: int
    elements: float
    gathered: tuple[str, ...]

    @property
    def divided(self) -> bool:
        """Whether it has to be gathered."""
        return bool(self.gathered)

    @property
    def of_experts(self) -> bool:
        """Whether it is gathered by `layers/dispatch.py`, and not by the compiler."""
        return "experts" in self.spec.axes

    @property
    def name(self) -> str:
        """That of the array in its layer."""
        return self.path.rpartition(".")[2]

    @property
    def shard(self) -> tuple[str, tuple[int, ...], int]:
        """What tells the zeros of its shape: the stack, the shape, and which axis is divided."""
        return self.path.partition("blocks")[0], self.spec.shape, self.spec.axes.index("embed")


def _leaves(planned: PlannedRun, kind: str) -> list[_Leaf]:
    """The rows of a kind: the matrices of layers ("layers"), the output layer ("head"), the table
    of tokens ("embed"), or all other parameters ("rest")."""
    leaves = []
    for path, spec in rows(planned.specs).items():
        if _kind(path, spec) != kind:
            continue
        gathered: tuple[str, ...] = ()
        if "embed" in spec.axes:
            placed = partition(spec.shape, spec.axes, PARAMETERS, planned.mesh.shape)
            entry = placed[spec.axes.index("embed")]
            gathered = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        count = spec.shape[0] if spec.is_stacked else 1
        leaves.append(_Leaf(path, spec, count, planned.gathered_elements(spec), gathered))
    return leaves


def _kind(path: str, spec: Spec) -> str:
    if spec.is_matrix and spec.is_stacked:
        return "layers"
    if path.endswith("embed.tokens"):
        return "embed"
    return "head" if path == "head.weight" else "rest"


def _of_layers(planned: PlannedRun) -> Iterator[Collective]:
    """The weights of the layers and their gradients, over fsdp and context."""
    leaves = _leaves(planned, "layers")
    experts = [leaf for leaf in leaves if leaf.of_experts and leaf.divided]
    for kind, purpose in (
        ("all-gather", "weights of the experts, forward"),
        ("all-gather", "weights of the experts, backward"),
        ("reduce-scatter", "gradients of the experts"),
    ):
        for axes in dict.fromkeys(leaf.gathered for leaf in experts):
            of_axes = [leaf for leaf in experts if leaf.gathered == axes]
            yield _of_matrices(planned, kind, purpose, of_axes, axes)
    leaves = [leaf for leaf in leaves if not leaf.of_experts]
    divided = [leaf for leaf in leaves if leaf.divided]
    on_tpu = planned.device.platform == "tpu"
    options = compiler_options(planned.mesh, *planned.run.train.stated_options)
    if on_tpu and options.get(WINDOWED_WEIGHTS) != "false":
        yield from _windowed_weights(planned, divided)
    else:
        yield _of_matrices(planned, "all-gather", "weights of the layers, forward", divided)
        # On a TPU the products of flattened rows that remat repeats gather for themselves.
        repeated = _repeated(planned, divided)[1] if on_tpu and planned.context == 1 else []
        backward = [*divided, *repeated]
        yield _of_matrices(planned, "all-gather", "weights of the layers, backward", backward)
    if on_tpu and planned.device_name not in SCATTERED:
        yield from _windowed_gradients(planned, divided)
    else:
        yield _of_matrices(planned, "reduce-scatter", "gradients of the layers", divided)
    replicated = [leaf for leaf in leaves if not leaf.divided]
    yield _of_matrices(planned, "all-reduce", "gradients of the layers", replicated)


def _of_matrices(
    planned: PlannedRun, kind: str, purpose: str, leaves: list[_Leaf], axes: tuple[str, ...] = ()
) -> Collective:
    times = sum(leaf.arrays for leaf in leaves)
    size = sum(leaf.elements for leaf in leaves) * planned.dtype_bytes
    return _of_microbatches(planned, kind, purpose, axes or planned.sharded, times, size)


def _of_microbatches(
    planned: PlannedRun, kind: str, purpose: str, axes: tuple[str, ...], times: int, size: float
) -> Collective:
    """Collectives over axes of the mesh, of which each microbatch has `times`, of `size` bytes in
    all."""
    microbatches, devices = planned.run.train.n_microbatches, planned.size(*axes)
    name = " x ".join(axes)
    return Collective(kind, purpose, name, times * microbatches, size * microbatches, devices)


def _permutes(planned: PlannedRun, purpose: str, leaves: list[_Leaf], sends: int) -> Collective:
    """Shards of matrices that are sent on so many times."""
    one = _of_matrices(planned, "collective-permute", purpose, leaves)
    return one._replace(times=one.times * sends, bytes=one.bytes / planned.shards * sends)


def _repeated(planned: PlannedRun, leaves: list[_Leaf]) -> tuple[list[_Leaf], list[_Leaf]]:
    """The matrices of products that remat repeats: those of the feed-forward, where the product of
    a gradient reads the same gathered matrix, and those of attention, where the two see different
    shapes of it, so that each gathers for itself."""
    again = recomputed_names(planned)
    repeated = [leaf for leaf in leaves if leaf.name in again]
    shared = [leaf for leaf in repeated if "mlp" in leaf.spec.axes]
    return shared, [leaf for leaf in repeated if leaf not in shared]


def _windowed_weights(planned: PlannedRun, leaves: list[_Leaf]) -> Iterator[Collective]:
    """The weights of the layers in windowed products."""
    shared, apart = _repeated(planned, leaves)
    windows = [leaf for leaf in [*leaves, *apart] if leaf not in shared]
    sends = planned.shards + (-1 if planned.shards <= UNROLLED else 1)
    yield _permutes(planned, "weights of the layers, forward", leaves, sends)
    yield _permutes(planned, "weights of the layers, backward", windows, sends)
    yield _of_matrices(planned, "all-gather", "weights of the layers, backward", shared)


def _windowed_gradients(planned: PlannedRun, leaves: list[_Leaf]) -> Iterator[Collective]:
    """The gradients of the layers in windowed products."""
    # Sums travel both ways around. The two begin as zeros, which are sent too, unless another
    # product of the layer has sent zeros of this shape outside of a loop.
    first: list[_Leaf] = []
    repeats: list[_Leaf] = []
    for leaf in leaves:
        sent = any(leaf.shard == earlier.shard for earlier in first)
        has_zeros = planned.shards <= UNROLLED and sent
        (repeats if has_zeros else first).append(leaf)
    yield _permutes(planned, "gradients of the layers", first, planned.shards + 1)
    yield _permutes(planned, "gradients of equal shapes", repeats, planned.shards - 1)


def _of_shards(planned: PlannedRun) -> Iterator[Collective]:
    """The output layer and the parameters outside of layers, over fsdp and context."""
    numbers, tensor = planned.dtype_bytes, planned.size("tensor")

    def one(kind: str, purpose: str, arrays: int, size: float) -> Collective:
        return _of_microbatches(planned, kind, purpose, planned.sharded, arrays, size)

    matrices = _leaves(planned, "embed" if is_tied(planned.model) else "head")
    if matrices and matrices[0].divided:
        elements = matrices[0].elements
        # Each device adds up the gradient of the whole vocabulary.
        table_size = math.prod(matrices[0].spec.shape)
        passes = 2 if planned.of_pairs else 1
        yield one("all-gather", "output layer", passes, passes * elements * numbers)
        purpose, size = "gradient of the output layer", 4 * table_size
        width = planned.model.d_model // planned.shards
        if summed_in_ring(planned.device.platform, planned.shards, width):
            # Half of it goes around in each direction, in pieces of a device.
            times = planned.shards - 1
            yield one("collective-permute", purpose, 2 * times, size / planned.shards * times)
        else:
            yield one("reduce-scatter", purpose, 1, size)
        if tensor > 1 and table_size != elements:
            yield _of_microbatches(planned, "all-gather", purpose, ("tensor",), 1, size)
    leaves = _leaves(planned, "rest")
    dense = [leaf for leaf in leaves if leaf.divided and not leaf.spec.lookup]
    gathered = sum(leaf.elements for leaf in dense) * numbers
    yield one("all-gather", "other matrices, forward and backward", 2 * len(dense), 2 * gathered)
    yield one("reduce-scatter", "gradients of other matrices", len(dense), gathered)
    replicated = sum(leaf.elements for leaf in leaves if not leaf.divided)
    yield one("all-reduce", "gradients of replicated parameters", 1, 4 * replicated)


def _of_lookups(planned: PlannedRun) -> Iterator[Collective]:
    """Each device looks up the tokens of all in its columns of a table, and then the rows are
    exchanged, first over context and then over fsdp; their gradients go back."""
    model = planned.model
    embeddings = rows(embedding_specs(model) | added_specs(model)).values()
    tables = sum(spec.lookup for spec in embeddings)
    tokens = planned.rows * planned.positions(planned.length + planned.source_length)
    # Rows are summed and normed in float32; alone they are exchanged in the compute dtype.
    scaled = model.embedding_scale != "none" or model.embedding_multiplier != 1
    alone = not added_embeddings(model) and not scaled
    changed = model.embedding_norm or model.dropout
    forward = planned.dtype_bytes if alone and not changed else 4
    times, backward = tables, 4 if changed else planned.dtype_bytes
    if planned.device.platform == "tpu":
        # One exchange for all tables, before the conversion.
        times, backward = 1, 4
    for purpose, count, width in (
        ("looked-up rows", tables, forward),
        ("gradients of looked-up rows", times, backward),
    ):
        size, stacks = count * tokens * model.d_model * width, 2 if planned.source_length else 1
        for axis in planned.sharded:
            # Between two exchanges, rows are not yet converted.
            wide = 4 / width if axis == CONTEXT and len(planned.sharded) > 1 else 1
            exchanged = size * wide
            yield _of_microbatches(
                planned, "all-to-all", purpose, (axis,), count * stacks, exchanged
            )


def _of_data(planned: PlannedRun) -> Iterator[Collective]:
    """The gradients of the shards, over the replicas."""
    devices = planned.size("data")
    microbatches = planned.run.train.n_microbatches
    rowwise = planned.objective.rowwise and not planned.model.has_dropout
    rowwise = rowwise and planned.model.feed_forward != "experts"
    # Each replica accumulates its own gradients.
    together = microbatches > 1 and rowwise

    def one(purpose: str, leaves: list[_Leaf], width: int, times: int = 1) -> Collective:
        size = sum(leaf.elements / planned.size(*leaf.gathered) for leaf in leaves) * width
        return Collective("all-reduce", purpose, "data", times * len(leaves), times * size, devices)

    layers = _leaves(planned, "layers")
    if together:
        yield one("gradients of the layers", layers, 4)
    else:
        # As they come out of the loop over layers.
        yield one("gradients of the layers", layers, planned.dtype_bytes, microbatches)
    # The compiler takes the sum of what a loop only adds up out of the loop over microbatches.
    yield one("gradients of other parameters", _leaves(planned, "rest"), 4)
    # Where tensor divides the vocabulary, look-ups read the whole of it, and so it has a gradient
    # besides that of the output layer.
    split = not together and planned.size("tensor") > 1
    table = _leaves(planned, "embed")
    matrices = table if is_tied(planned.model) and split else _leaves(planned, "head")
    yield one("gradient of the output layer", matrices, 4)
    if split:
        table = [leaf._replace(elements=math.prod(leaf.spec.shape)) for leaf in table]
    yield one("gradient of the table of tokens", table, 4)


def _of_tensor(planned: PlannedRun) -> Iterator[Collective]:
    """Sums of what the parts of a layer give, and the vocabulary."""
    model = planned.model
    # A residual stream of one token.
    wide = planned.rows * model.d_model * planned.dtype_bytes
    again = recomputed_names(planned)
    outputs: list[float] = []
    repeated: list[float] = []
    for stack in planned_stacks(planned):
        for layer in stack.layers:
            products = [sublayer.product for sublayer in stack.sublayers(layer).values()]
            output = wide * planned.positions(stack.tokens)
            outputs += [output] * len(products)
            repeated += [output] * sum(name in again for name in products)
            if layer.feed_forward == "experts" and "up" in again:
                # XLA does not see that the sum of the experts is not read again.
                repeated.append(output)
    # All layers of a decoder add to the gradient of the encoder's output before it is summed.
    source = wide * planned.positions(planned.source_length)
    inputs = [*outputs, source] if source else outputs

    def one(kind: str, purpose: str, sizes: list[float]) -> Collective:
        return _of_microbatches(planned, kind, purpose, ("tensor",), len(sizes), sum(sizes))

    yield one("all-reduce", "outputs of the sublayers", outputs)
    yield one("all-reduce", "outputs that remat computes again", repeated)
    yield one("all-reduce", "gradients of their inputs", inputs)
    for table in _leaves(planned, "embed"):
        table_size = math.prod(table.spec.shape)
        if table.elements < table_size:
            shards = planned.shards if table.divided else 1
            yield one("all-gather", "table of tokens", [4 * table_size / shards])
    of_tokens = HEADS[model.output].of_tokens
    if of_tokens and model.vocab_size % planned.size("tensor") == 0:
        of_input = wide * planned.positions(planned.length)
        yield one("all-reduce", "gradient of the output layer's input", [of_input])
