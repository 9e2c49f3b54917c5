"""Whether tokens read what they may not: gradients of outputs by the embedded inputs, which are
exactly 0 wherever a mask holds.

A program gives the largest gradient of the outputs of some tokens, weighted at random, by the
inputs of others. The table of tokens is replaced by one that has a row for each token of the batch,
so that its gradient is that of the inputs, behind every adapter and at the start of every stack.

In the comments, B is the number of rows, T that of tokens, S that of tokens of a source, and D the
width of the embeddings.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.mesh import place_batch
from jaxformer.arrays.params import Params, lookup
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.layers.embed import WHOLE, Inputs
from jaxformer.models.inputs import INPUT_NAMES, inputs_of
from jaxformer.models.transformer import hidden, without_objective
from jaxformer.runs.expert_check import largest
from jaxformer.tools.certificate.evidence import Evidence, Measured
from jaxformer.training.state import on_mesh
from jaxformer.training.step import Batch

ROWS = 4  # of the batch that is looked at
CUTS = 4  # tries of "future tokens", each at another place in every row
# Kernels compute blocks of so many tokens, at whose edges an index is wrong most easily.
KERNEL_BLOCK = 128


class Probe(NamedTuple):
    """Outputs that may not read some inputs: `outputs` and `inputs` bool [B, T], `source` bool
    [B, S] or None."""

    outputs: np.ndarray
    inputs: np.ndarray
    source: np.ndarray | None


def no_table(evidence: Evidence) -> str:
    """Why the inputs of a model cannot be differentiated; empty if they can."""
    embedding = evidence.setup.model.embedding
    if embedding == "tokens":
        return ""
    return f"the rows of model.embedding={embedding!r} are not looked up in a table of tokens"


def no_segments(evidence: Evidence) -> str:
    if "segment_ids" not in evidence.batch and "source_segment_ids" not in evidence.batch:
        return "the rows of this run have no segments: each is one text without padding"
    return no_table(evidence)


def no_direction(evidence: Evidence) -> str:
    if evidence.setup.model.family == "encoder":
        return "an encoder reads the tokens on both sides"
    return no_table(evidence)


def texts_apart(evidence: Evidence) -> Measured:
    """No text reads another text of its row, nor another row."""
    batch = _sequences(evidence)
    counted = sum(len(np.unique(row[row != 0])) for row in _segments(batch, "tokens"))
    return _measured(evidence, batch, _apart(batch), f"{counted} texts in {_size(batch)}")


def padding_apart(evidence: Evidence) -> Measured:
    """No text reads padding."""
    batch = _sequences(evidence)
    segments, source = _segments(batch, "tokens"), _source_segments(batch)
    padded = int((segments == 0).sum()) + (0 if source is None else int((source == 0).sum()))
    if not padded:
        return Measured(None, f"there is no padding in {_size(batch)}")
    to_padding = None if source is None else source == 0
    probe = Probe(segments != 0, segments == 0, to_padding)
    return _measured(
        evidence, batch, iter([probe]), f"{padded} tokens of padding in {_size(batch)}"
    )


def future_apart(evidence: Evidence) -> Measured:
    """No token reads a later one."""
    batch = _sequences(evidence)
    return _measured(evidence, batch, _before(batch), f"{CUTS} places in each of {_size(batch)}")


def _sequences(evidence: Evidence) -> Batch:
    """The arrays that the model reads of some rows, [rows, T] each: the sequences of a pair are
    rows of their own."""
    batch = evidence.rows(ROWS)
    names = (*INPUT_NAMES, "segment_ids")
    return {
        name: array.reshape(-1, array.shape[-1]) for name, array in batch.items() if name in names
    }


def _segments(batch: Batch, name: str) -> np.ndarray:
    """The segments of tokens or of a source, 1 where rows have none."""
    ids = "segment_ids" if name == "tokens" else "source_segment_ids"
    return np.asarray(batch.get(ids, np.ones_like(batch[name])))


def _source_segments(batch: Batch) -> np.ndarray | None:
    return _segments(batch, "source") if "source" in batch else None


def _size(batch: Batch) -> str:
    rows, length = batch["tokens"].shape
    return f"{rows} rows of {length} tokens"


def _apart(batch: Batch) -> Iterator[Probe]:
    """Probes that together separate every pair of texts: for each bit of the numbers of segments,
    and of rows, the outputs of the texts that have it and the inputs of those that have it not, and
    the other way round."""
    segments, source = _segments(batch, "tokens"), _source_segments(batch)
    texts, source_texts = segments != 0, None if source is None else source != 0
    rows = np.arange(len(segments))[:, None]
    numbers = [
        (segments, source),
        (rows + 0 * segments, None if source is None else rows + 0 * source),
    ]
    for of_tokens, of_source in numbers:
        highest = int(of_tokens.max())
        for bit, value in itertools.product(range(highest.bit_length()), (0, 1)):
            chosen = (of_tokens >> bit & 1) == value
            outside = None
            if of_source is not None and source_texts is not None:
                outside = source_texts & ((of_source >> bit & 1) != value)
            yield Probe(chosen & texts, ~chosen & texts, outside)


def _before(batch: Batch) -> Iterator[Probe]:
    """Outputs up to a place and inputs after it, another place in each row: at random, and first
    at the edge of a block."""
    segments = _segments(batch, "tokens")
    rows, length = segments.shape
    rng = np.random.default_rng(length)
    source = None if "source" not in batch else np.zeros(batch["source"].shape, bool)
    for attempt in range(CUTS):
        cuts = rng.integers(0, max(length - 1, 1), (rows, 1))
        if attempt == 0 and length > KERNEL_BLOCK:
            cuts[:] = KERNEL_BLOCK - 1
        earlier = np.arange(length) <= cuts
        yield Probe(earlier & (segments != 0), ~earlier, source)


def _measured(evidence: Evidence, batch: Batch, probes: Iterator[Probe], what: str) -> Measured:
    """The largest gradient of all probes. It has to be exactly 0, and that by the inputs that may
    be read must not be, or nothing is shown."""
    setup = evidence.setup
    params = without_objective(evidence.state.params)
    program = _program(setup.model)
    leaked, read = 0.0, 0.0
    with on_mesh(setup.mesh):
        placed = place_batch(batch, setup.mesh)
        for probe in probes:
            masks = {name: mask for name, mask in probe._asdict().items() if mask is not None}
            numbers = jax.device_get(program(params, placed, place_batch(masks, setup.mesh)))
            # A NaN is kept, as infinity.
            leaked, read = max(leaked, float(numbers[0])), max(read, float(numbers[1]))
    if not read:
        text = f"No output reads any input, for {what}, so that nothing is shown."
        return Measured(False, text, leaked, 0.0)
    gradient = "is exactly 0" if not leaked else f"reaches {leaked:.1e}"
    text = f"The gradient {gradient}, for {what} (by what may be read it reaches {read:.1e})."
    return Measured(not leaked, text, min(leaked, np.finfo(np.float32).max.item()), 0.0)


@functools.lru_cache(maxsize=1)
def _program(config: ModelConfig) -> Any:
    """Compiled once for all probes of a run."""
    return jax.jit(functools.partial(_gradients, config))


def _gradients(
    config: ModelConfig, params: Params, batch: Batch, masks: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The largest gradient of the outputs by the inputs that a probe forbids, and by all others."""
    inputs = inputs_of(batch)
    tables = _tables(params, config)
    rows = [lookup(tables[0], inputs.tokens, WHOLE)]
    if inputs.source is not None:
        rows.append(lookup(tables[-1], inputs.source, WHOLE))

    def outputs(rows: list[jax.Array]) -> jax.Array:
        changed, ids = _by_row(params, inputs, rows)
        return hidden(changed, config, ids).x.astype(jnp.float32)  # [B, T, D]

    x, back = jax.vjp(outputs, rows)
    weights = jax.random.normal(jax.random.key(0), x.shape)
    weights = constrain(jnp.where(masks["outputs"][..., None], weights, 0), WHOLE)
    (gradients,) = back(weights)
    forbidden = [masks["inputs"], *([masks["source"]] if inputs.source is not None else [])]
    pairs = list(zip(gradients, forbidden, strict=True))
    leaked = [largest(jnp.where(mask[..., None], g, 0)) for g, mask in pairs]
    read = [largest(jnp.where(mask[..., None], 0, g)) for g, mask in pairs]
    return jnp.stack(leaked).max(), jnp.stack(read).max()


def _tables(params: Params, config: ModelConfig) -> list[Any]:
    """The tables in which tokens, and those of a source, are looked up."""
    tokens = params["embed"]["tokens"]
    if config.source_embedding == "separate" and config.family == "encoder_decoder":
        return [tokens, params["encoder"]["embed"]["tokens"]]
    return [tokens]


def _by_row(params: Params, inputs: Inputs, rows: list[jax.Array]) -> tuple[Params, Inputs]:
    """The params and inputs in which each token is a row of the table of its own, [B T, D]."""

    def numbered(ids: jax.Array, first: int) -> jax.Array:
        numbers = first + jnp.arange(ids.size, dtype=jnp.int32).reshape(ids.shape)
        return constrain(numbers, ("batch", "sequence"))

    tables = [array.reshape(-1, array.shape[-1]) for array in rows]
    ids = dataclasses.replace(inputs, tokens=numbered(inputs.tokens, 0))
    if inputs.source is None:
        return _with_table(params, tables[0]), ids
    if "tokens" in params["encoder"].get("embed", {}):
        encoder = _with_table(params["encoder"], tables[1])
        ids = dataclasses.replace(ids, source=numbered(inputs.source, 0))
        return _with_table(params, tables[0]) | {"encoder": encoder}, ids
    ids = dataclasses.replace(ids, source=numbered(inputs.source, len(tables[0])))
    return _with_table(params, jnp.concatenate(tables)), ids


def _with_table(params: Params, table: jax.Array) -> Params:
    return params | {"embed": params["embed"] | {"tokens": table}}
