"""What is looked at in a run beside its figures: that its texts, its padding and its future are
apart, and that its step is the one of one device, of one batch, and of the state that was saved.

In the comments, B is the number of rows, T that of tokens, S that of tokens of a source, and D the
width of the model.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.mesh import batch_devices, place_batch, replicated
from jaxformer.arrays.out_of_memory import OutOfMemory, memory_of
from jaxformer.arrays.params import Params, lookup
from jaxformer.arrays.sharding import constrain
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.config.model import ModelConfig
from jaxformer.layers.embed import WHOLE
from jaxformer.models.inputs import INPUT_NAMES, inputs_of
from jaxformer.models.stack import compute_dtype
from jaxformer.models.transformer import hidden, without_objective
from jaxformer.runs.kernel_check import TOLERANCE, largest
from jaxformer.runs.setup import RunSetup
from jaxformer.tools.verify import RepeatedSteps, Statement, Verdict, quiet
from jaxformer.training.state import TrainState, on_mesh
from jaxformer.training.step import Batch, Loss, Sums, gradients

ROWS = 4  # of the batch in which leaks are looked for
CUTS = 4  # places in each of them behind which the future is looked for
# Kernels compute blocks of so many tokens, at whose edges an index is wrong most easily.
KERNEL_BLOCK = 128
# Leaves with a smaller share of the norm of the whole gradient are compared with this share of it:
# some, such as the bias of keys, have a gradient of rounding alone.
NEGLIGIBLE_SHARE = 1e-3

# A verdict and a sentence; None where a run has nothing that the probe is about.
Found = tuple[Verdict, str] | None


@dataclass
class Evidence:
    """What the probes look at: a run, its newest state, which the last probe donates, and the batch
    of the next step."""

    repeated: RepeatedSteps
    state: TrainState
    batch: dict[str, np.ndarray]

    @property
    def setup(self) -> RunSetup:
        return self.repeated.setup

    def rows(self, wanted: int) -> dict[str, np.ndarray]:
        """Return about the first `wanted` rows of the batch, as many on each device, at least
        one."""
        devices = batch_devices(self.setup.mesh)
        count = max(wanted // devices, 1) * devices
        return {name: array[:count] for name, array in self.batch.items()}


def probed(evidence: Evidence) -> Iterator[Statement]:
    """Yield a statement of each probe that says something of the run."""
    for name, probe in PROBES.items():
        try:
            with memory_of(f"the probe {name}"):
                answer = probe(evidence)
        except OutOfMemory as error:
            answer = "unknown", f"this machine has not enough memory: {str(error).splitlines()[0]}"
        if answer is not None:
            yield Statement(name, *answer)


# Leaks: the gradients of outputs by the embedded inputs are exactly 0 wherever a mask holds.

# Outputs that may not read some inputs: bool [B, T] under "outputs" and "inputs", and of a source
# [B, S] under "source".
ProbeMask = dict[str, np.ndarray]


@dataclass
class Sequences:
    """Some rows of a batch [B, T], with the segments of tokens and of a source, if there is one;
    the sequences of a pair are rows of their own."""

    batch: Batch
    segments: np.ndarray
    source: np.ndarray | None


def _texts_apart(evidence: Evidence) -> Found:
    """Tell whether no text reads another text of its row, nor another row, nor padding."""
    if evidence.setup.model.experts.capacity:
        return "unknown", "the texts of a row share what model.experts.capacity leaves them."
    rows = _sequences(evidence)
    count = sum(len(np.unique(row[row != 0])) for row in rows.segments)
    padding = int((rows.segments == 0).sum())
    # Each text and the padding of each row has a number of its own. For each bit of the numbers:
    # the outputs of the texts that have it and the inputs of all that have it not, and the other
    # way round. So every pair is separated.
    most = int(rows.segments.max())
    if rows.source is not None:
        most = max(most, int(rows.source.max()))
        padding += int((rows.source == 0).sum())

    def numbered(segments: np.ndarray) -> np.ndarray:
        return segments + (most + 1) * np.arange(len(segments))[:, None]

    texts = numbered(rows.segments)
    masks: list[ProbeMask] = []
    for bit in range(int(texts.max()).bit_length()):
        for value in (0, 1):
            chosen = (texts >> bit & 1) == value
            mask = {"outputs": chosen & (rows.segments != 0), "inputs": ~chosen}
            if rows.source is not None:
                mask["source"] = (numbered(rows.source) >> bit & 1) != value
            masks.append(mask)
    return _leaks(evidence, rows, masks, f"{count} texts, {padding} tokens of padding")


def _future_apart(evidence: Evidence) -> Found:
    """Tell whether no token of a decoder reads a later one."""
    if evidence.setup.model.family == "encoder":
        return None
    rows = _sequences(evidence)
    count, length = rows.segments.shape
    rng = np.random.default_rng(length)
    masks: list[ProbeMask] = []
    for attempt in range(CUTS):
        # [B, 1]: the last token that each row may read.
        cuts = rng.integers(0, max(length - 1, 1), (count, 1))
        # The edge of a block is always among them.
        if attempt == 0 and length > KERNEL_BLOCK:
            cuts[:] = KERNEL_BLOCK - 1
        earlier = np.arange(length) <= cuts
        mask = {"outputs": earlier & (rows.segments != 0), "inputs": ~earlier}
        if rows.source is not None:
            mask["source"] = np.zeros(rows.source.shape, bool)
        masks.append(mask)
    return _leaks(evidence, rows, masks, f"{CUTS} places of each row")


def _sequences(evidence: Evidence) -> Sequences:
    batch = {}
    for name, array in evidence.rows(ROWS).items():
        if name in (*INPUT_NAMES, "segment_ids"):
            batch[name] = array.reshape(-1, array.shape[-1])
    segments = batch.get("segment_ids", np.ones_like(batch["tokens"]))
    source = None
    if "source" in batch:
        source = batch.get("source_segment_ids", np.ones_like(batch["source"]))
    return Sequences(batch, segments, source)


def _leaks(evidence: Evidence, rows: Sequences, masks: list[ProbeMask], what: str) -> Found:
    """Return the largest gradient by what the masks forbid, which has to be exactly 0, and by what
    they allow, which must not be, or nothing is shown."""
    setup = evidence.setup
    if setup.model.embedding.kind != "tokens":
        name = setup.model.embedding.kind
        return "unknown", f"the rows of model.embedding.kind={name!r} are not looked up in a table."
    params = without_objective(evidence.state.params)
    program = jax.jit(functools.partial(_gradients_by_inputs, setup.model))
    with on_mesh(setup.mesh):
        placed = place_batch(rows.batch, setup.mesh)
        by_mask = [program(params, placed, place_batch(mask, setup.mesh)) for mask in masks]
    # `largest` makes a NaN infinite.
    leaked, read = np.array(jax.device_get(by_mask)).max(axis=0)  # of [masks, 2]
    count, length = rows.segments.shape
    gradient = "is exactly 0"
    if leaked:
        gradient = f"reaches {leaked:.1e}"
    text = f"the gradient {gradient} ({what}, {count} rows of {length} tokens; by what may be read"
    text += f" it reaches {read:.1e})."
    if leaked or not read:
        return "NO", text
    return "equal", text


def _gradients_by_inputs(
    config: ModelConfig, params: Params, batch: Batch, masks: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return the largest gradient of the outputs, weighted at random, by the inputs that a mask
    forbids, and by all others.

    The tables of tokens are replaced by one that has a row for each token of the batch and of its
    source, [B T + B S, D], whose gradient is that of the inputs, behind every adapter.
    """
    inputs = inputs_of(batch)
    table = params["embed"]["tokens"]
    rows = [lookup(table, inputs.tokens, WHOLE)]
    forbidden = [masks["inputs"]]
    encoder = params.get("encoder", {})
    has_own_table = "tokens" in encoder.get("embed", {})
    if inputs.source is not None:
        source_table = table
        if has_own_table:
            source_table = encoder["embed"]["tokens"]
        rows.append(lookup(source_table, inputs.source, WHOLE))
        forbidden.append(masks["source"])

    def numbered(ids: jax.Array, first: int) -> jax.Array:
        numbers = first + jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
        return constrain(numbers, ("batch", "sequence"))

    ids = dataclasses.replace(inputs, tokens=numbered(inputs.tokens, 0))
    if inputs.source is not None:
        ids = dataclasses.replace(ids, source=numbered(inputs.source, inputs.tokens.size))

    def outputs(rows: list[jax.Array]) -> jax.Array:
        each = jnp.concatenate([array.reshape(-1, array.shape[-1]) for array in rows])
        changed = params | {"embed": params["embed"] | {"tokens": each}}
        if has_own_table:
            embed = encoder["embed"] | {"tokens": each}
            changed |= {"encoder": encoder | {"embed": embed}}
        return hidden(changed, config, ids).x.astype(jnp.float32)  # [B, T, D]

    # A gradient that is exactly 0 proves more than equal outputs: it holds for every change of an
    # input.
    x, back = jax.vjp(outputs, rows)
    weights = jax.random.normal(jax.random.key(0), x.shape)
    weights = constrain(jnp.where(masks["outputs"][..., None], weights, 0), WHOLE)
    (by_inputs,) = back(weights)
    # Both in one program, so that the backward pass is made once.
    leaked = jnp.float32(0)
    read = jnp.float32(0)
    for gradient, mask in zip(by_inputs, forbidden, strict=True):
        leaked = jnp.maximum(leaked, largest(jnp.where(mask[..., None], gradient, 0)))
        read = jnp.maximum(read, largest(jnp.where(mask[..., None], 0, gradient)))
    return leaked, read


# The step: its gradient and its state.


def _accumulation(evidence: Evidence) -> Found:
    """Tell whether a batch in two microbatches has the gradient of the batch in one."""
    setup = evidence.setup
    devices = batch_devices(setup.mesh)
    # As many rows as a microbatch of the run, which fit its memory, but two on each device.
    size = setup.run.train.batch_size // setup.run.train.n_microbatches
    rows = evidence.rows(max(size // devices // 2 * 2, 2) * devices)
    count = len(next(iter(rows.values())))
    # Rows that are compared with each other are another problem in pieces.
    if not setup.objective.rowwise or count < 2 * devices:
        return None
    batch = setup.placed(rows)
    return _equal_to_rounding(
        evidence,
        _gradient(evidence, batch, 2),
        _gradient(evidence, batch, 1),
        f"{count} rows in 2 microbatches and in 1",
    )


def _one_device(evidence: Evidence) -> Found:
    """Tell whether the mesh computes the gradient that one of its devices does."""
    setup = evidence.setup
    if setup.mesh.size == 1:
        return None
    everywhere = replicated(setup.mesh)

    def on_one(tree: Any) -> Any:
        with on_mesh(setup.mesh):
            gathered = jax.jit(lambda leaves: leaves, out_shardings=everywhere)(tree)
        return jax.tree.map(lambda leaf: leaf.addressable_data(0), gathered)

    batch = setup.placed(evidence.rows(1))
    # Both gradients on one device, or the norms of their difference would be computed by the mesh
    # that is examined.
    divided = on_one(_gradient(evidence, batch, 1))
    params = on_one(evidence.state.params)
    lone = TrainState(jnp.int32(0), params, None, evidence.state.frozen)
    key = jax.random.key(0)
    loss = _comparable(setup.loss)
    alone = jax.jit(lambda batch: gradients(loss, lone, batch, key, 1)[0])(on_one(batch))
    sizes = ", ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items() if size > 1)
    return _equal_to_rounding(evidence, divided, alone, f"the mesh ({sizes}) and one device")


def _comparable(loss: Loss) -> Loss:
    """Return the loss without dropout and without that of the router, which is one of all rows of a
    microbatch: what is a sum over rows."""

    def alone(params: Any, batch: Batch, key: jax.Array | None) -> Sums:
        sums = loss(params, batch, None)
        total, weight = sums["loss"]
        if "router_loss" in sums:
            router, count = sums["router_loss"]
            total = total - weight * router / count
        return {"loss": (total, weight)}

    return alone


def _gradient(evidence: Evidence, batch: Batch, pieces: int) -> Any:
    """Return the gradient of the mean loss of a batch on the mesh, in so many microbatches."""
    setup = evidence.setup
    loss = _comparable(setup.loss)

    def compute(state: TrainState, batch: Batch) -> Any:
        return gradients(loss, state, batch, jax.random.key(0), pieces, setup.is_rowwise)[0]

    with on_mesh(setup.mesh):
        return jax.jit(compute)(evidence.state, batch)


def _equal_to_rounding(evidence: Evidence, a: Any, b: Any, what: str) -> Found:
    """Tell whether the leaves of two gradients differ by no more than rounding explains."""

    @jax.jit
    def norms(a: Any, b: Any) -> dict[str, tuple[jax.Array, jax.Array]]:
        def norm(leaf: jax.Array) -> jax.Array:
            return jnp.linalg.norm(leaf.astype(jnp.float32).reshape(-1))

        first = flat_leaves(a)
        second = flat_leaves(b)
        return {path: (norm(first[path] - leaf), norm(leaf)) for path, leaf in second.items()}

    # Only norms leave the device.
    differences = np.array(list(jax.device_get(norms(a, b)).values()))  # [leaves, 2]
    least = max(NEGLIGIBLE_SHARE * float(np.linalg.norm(differences[:, 1])), 1e-30)
    figure = float((differences[:, 0] / np.maximum(differences[:, 1], least)).max())
    setup = evidence.setup
    with on_mesh(setup.mesh):
        bound = TOLERANCE[str(compute_dtype(setup.model))]
    text = f"{what}: the gradients of leaves differ by {figure:.1e} of their norm, at most"
    text += f" {bound:g} is rounding."
    # A gradient of 0 shows nothing.
    if not figure <= bound or not differences.any():  # nan too
        return "NO", text
    if figure:
        return "equal to rounding", text
    return "equal", text


def _resumed_step(evidence: Evidence) -> Found:
    """Tell whether the next step is, to the bit, that of the state after it was saved and read."""
    repeated = evidence.repeated
    setup = evidence.setup
    number = int(evidence.state.step)
    with (
        tempfile.TemporaryDirectory(prefix="jaxformer-verify-") as scratch,
        Checkpoints(scratch, run=setup.identity, without=setup.unsaved) as checkpoints,
    ):
        checkpoints.save(evidence.state, number)
        checkpoints.wait()
        # After the save: a step donates the state.
        expected = repeated.figures_of(*repeated.advance(evidence.state))
        restored = checkpoints.restore(setup.target_over_base, quiet)
        assert restored is not None  # it was saved
        found = repeated.figures_of(*repeated.advance(restored))
    differing = []
    for name, value in expected.items():
        if repr(found[name]) != repr(value):  # nan too
            differing.append(f"{name} {found[name]!r}, not {value!r}")
    if differing:
        return "NO", f"step {number + 1} from the state read back: {', '.join(differing)}."
    text = f"step {number + 1} from the state after step {number} and from that state read back:"
    return "equal", f"{text} every figure and the new state."


# In this order. The last one donates the state.
PROBES: dict[str, Callable[[Evidence], Found]] = {
    "texts apart": _texts_apart,
    "future apart": _future_apart,
    "accumulation": _accumulation,
    "one device": _one_device,
    "resumed step": _resumed_step,
}
