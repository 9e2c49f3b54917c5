"""The reference of the objectives "dpo" and "ipo": the model that a run starts from, frozen, which
scores every batch before the step reads it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.arrays.mesh import AnyMesh, batch_sharding, place_batch
from jaxformer.arrays.params import Params
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.config.model import ModelConfig
from jaxformer.data.batches import BatchesByStep
from jaxformer.files import ConfigError, read_object, write_text
from jaxformer.losses.pairs import REFERENCE_ARRAYS, reference_log_probs
from jaxformer.models.transformer import check_model
from jaxformer.runs.directory import OtherData
from jaxformer.runs.loading import load_base
from jaxformer.runs.model_files import ModelFiles
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.state import on_mesh


def with_reference(batch: dict[str, Any], pairs: int, mesh: AnyMesh) -> dict[str, Any]:
    """A batch of pairs with the log-probabilities of the reference as shapes."""
    scores = jax.ShapeDtypeStruct((pairs,), jnp.float32, sharding=batch_sharding(mesh))
    return batch | dict.fromkeys(REFERENCE_ARRAYS, scores)


class Reference:
    """Scores batches with the params of run.init_from, which are read when they are first needed
    and stored once on the devices, placed as those of the run. They are in no checkpoint.

    Args:
      start: the model of run.init_from.
      config: the model of the run.
      record: the file in the run directory with the fingerprint of these params, which is compared
        where it is there.
      mesh: the devices; None: this machine's first one.
    """

    def __init__(
        self, start: ModelFiles, config: ModelConfig, record: Path, mesh: Mesh | None = None
    ) -> None:
        self._start, self._config, self._mesh = start, config, mesh
        self._record = record
        self._loaded: tuple[Params, str] | None = None

        def score(params: Params, batch: Any) -> dict[str, jax.Array]:
            return reference_log_probs(params, config, batch)

        shardings = None if mesh is None else dict.fromkeys(REFERENCE_ARRAYS, batch_sharding(mesh))
        options = compiler_options(mesh)
        self._score = jax.jit(score, out_shardings=shardings, compiler_options=options)

    def load(self) -> tuple[Params, str]:
        """The params, which are read once, and their fingerprint. Raises ConfigError where they
        cannot be read, do not fit the model of the run, or are not those that it began with."""
        if self._loaded is not None:
            return self._loaded
        try:
            params = load_base(self._start, self._mesh).params
            check_model(params, self._config)
        except ConfigError as error:
            raise ConfigError(
                f"run.init_from={str(self._start)!r}, with which data.objective compares the model,"
                f" cannot be used: {error}"
            ) from error
        # All processes compute it together.
        now = fingerprint(flat_leaves(params))
        if self._record.is_file():
            before = read_object(self._record, "restore it").get("fingerprint")
            if before != now:
                raise OtherData(
                    f"run.init_from={str(self._start)!r} is not the model that this run began with:"
                    f" its fingerprint is {now}, and {self._record} has {before}. Restore it"
                    " (further training of a run directory gives it a newer checkpoint), or choose"
                    " another run.dir."
                )
        self._loaded = params, now
        return self._loaded

    def keep(self) -> None:
        """Writes the fingerprint of the params into the run directory, where it has none yet."""
        _, now = self.load()
        if jax.process_index() == 0 and not self._record.is_file():
            text = json.dumps({"fingerprint": now}) + "\n"
            write_text(self._record, text, follow=False)

    def __call__(self, batch: Any) -> Any:
        """A batch of pairs on the devices, with the log-probabilities of its completions."""
        params, placed = self.load()[0], place_batch(batch, self._mesh)
        with on_mesh(self._mesh):
            return {**placed, **self._score(params, placed)}


class ScoredBatches:
    """`batches[step]` is that of the step, scored by a reference."""

    def __init__(self, reference: Reference, batches: BatchesByStep) -> None:
        self._reference, self._batches = reference, batches

    def __getitem__(self, step: int) -> Any:
        return self._reference(self._batches[step])

    def iterate(self, start: int = 0) -> Iterator[Any]:
        """The scored batches from step `start` on, the data prepared ahead."""
        return map(self._reference, self._batches.iterate(start))
