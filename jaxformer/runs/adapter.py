"""A run that trains an adapter: the model below it, which its checkpoints do not hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxformer.adapters.adapted_params import filled, over_base
from jaxformer.arrays.mesh import place_array
from jaxformer.arrays.params import Params, Specs
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError, read_object
from jaxformer.runs.init_from import warm_start
from jaxformer.training.state import TrainState, merged, split_frozen


class Base(NamedTuple):
    """The model below an adapter: its parameters on the mesh, and the branches among them (a new
    head) that learn with the adapter. `record` is what data.json says of it."""

    params: Params
    learned: tuple[str, ...]
    record: dict[str, Any]
    sentence: str


def read_base(run: RunConfig, mesh: Mesh, labels: tuple[str, ...]) -> Base:
    """The model of run.init_from, below the adapter of a run. Raises ConfigError if it is not the
    one that the run directory was begun with."""
    start = warm_start(run, mesh, labels)
    learned = tuple(dict.fromkeys(path.partition(".")[0] for path in start.new))
    kept = {name: part for name, part in start.params.items() if name not in learned}
    found = fingerprint(flat_leaves(kept))
    path = Path(run.run.dir) / "data.json"
    before = read_object(path).get("base") if path.is_file() else None
    if before not in (None, found):
        raise ConfigError(
            f"run.init_from={run.run.init_from!r} is not the model that the adapter in"
            f" {run.run.dir} was begun with: its fingerprint is {found}, and data.json has"
            f" {before}. Restore that model there, or choose another run.dir."
        )
    place = str(Path(run.run.init_from).absolute())
    record = {"base": found, "base_path": place, "learned": list(learned)}
    return Base(start.params, learned, record, start.sentence(run.run.init_from))


def first_params(table: Specs, base: Params, target: TrainState, seed: int) -> Params:
    """The params of an adapted model before the first step, placed as the state `target` says;
    those of the base that learn are copied, since a step takes them."""
    params = jax.tree.map(
        lambda leaf, wanted: place_array(leaf, wanted.sharding),
        filled(table, base, jax.random.key(seed)),
        target.params,
    )
    learned, still = split_frozen(params, target.frozen)
    return merged(jax.tree.map(jnp.copy, learned), still, target.frozen)


def with_base(table: Specs, target: TrainState, base: Params) -> TrainState:
    """A state as shapes, but for the leaves of the base, which are its arrays."""
    return replace(target, params=over_base(table, target.params, base))
