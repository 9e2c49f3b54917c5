"""A run that trains an adapter: the model below it, which its checkpoints do not hold."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.adapters.adapted_params import filled, over_base
from jaxformer.arrays.mesh import place_array
from jaxformer.arrays.params import Params, Specs
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.files import ConfigError, located, read_object
from jaxformer.runs.init_from import WarmStart
from jaxformer.training.state import TrainState, merged, split_frozen


class Base(NamedTuple):
    """The model below an adapter: its parameters on the mesh, and the branches among them (a new
    head) that learn with the adapter. `record` is what data.json says of it."""

    params: Params
    learned: tuple[str, ...]
    record: dict[str, Any]
    sentence: str

    def first_params(self, specs: Specs, target: TrainState, seed: int) -> Params:
        """The params of the adapted model before the first step, placed as those of the state
        `target`. Those of the base that learn are copied, because a step donates its state."""
        params = jax.tree.map(
            lambda leaf, target_leaf: place_array(leaf, target_leaf.sharding),
            filled(specs, self.params, jax.random.key(seed)),
            target.params,
        )
        learned, still = split_frozen(params, target.frozen)
        return merged(jax.tree.map(jnp.copy, learned), still, target.frozen)

    def below(self, specs: Specs, target: TrainState) -> TrainState:
        """`target`, a state as shapes, with the arrays of the base in place of its leaves."""
        return replace(target, params=over_base(specs, target.params, self.params))


def base_below(start: WarmStart, init_from: str, run_dir: str) -> Base:
    """The model of run.init_from, below the adapter of a run. Raises ConfigError if it is not the
    one that the run directory was begun with."""
    learned = tuple(dict.fromkeys(path.partition(".")[0] for path in start.new))
    base_params = {name: branch for name, branch in start.params.items() if name not in learned}
    base_fingerprint = fingerprint(flat_leaves(base_params))
    path = located(run_dir) / "data.json"
    before = read_object(path).get("base") if path.is_file() else None
    if before not in (None, base_fingerprint):
        raise ConfigError(
            f"run.init_from={init_from!r} is not the model that the adapter in"
            f" {run_dir} was begun with: its fingerprint is {base_fingerprint}, and data.json"
            f" has {before}. Restore that model there, or choose another run.dir."
        )
    base_path = str(located(init_from).absolute())
    record = {"base": base_fingerprint, "base_path": base_path, "learned": list(learned)}
    return Base(start.params, learned, record, start.sentence(init_from))
