"""Groups of leaves by the table of parameters: factors of learning rates and of weight decay."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxformer.arrays.params import Spec, Specs, is_target, map_specs, rows, unknown_target
from jaxformer.config.settings import parsed_groups
from jaxformer.config.train import GROUP_WORDS, OptimizerConfig
from jaxformer.files import ConfigError


@dataclass(frozen=True)
class Group:
    """Leaves that a pattern names, and what their learning rate and weight decay are multiplied
    by."""

    pattern: str = "all others"
    rate: float = 1.0
    decay: float = 1.0


# The kinds of leaves that a group can name. Every leaf is of one of them.
KINDS: dict[str, Callable[[Spec], bool]] = {
    "matrix": lambda spec: spec.is_matrix and not spec.lookup,
    "lookup": lambda spec: spec.lookup,
    "norm": lambda spec: not spec.is_matrix and "norm" in spec.axes,
    "bias": lambda spec: not spec.is_matrix and "norm" not in spec.axes,
}


def leaf_groups(config: OptimizerConfig, specs: Specs) -> Any:
    """Return the `Group` of every leaf by optimizer.groups, in the nesting of the table, with a
    decay of 0 for leaves that do not decay. Leaves with a `Spec.sign_rate` are in no group: they
    move by that rate alone."""
    leaves = dict[str, Spec]()
    for path, spec in rows(specs).items():
        if spec.trainable and not spec.sign_rate:
            leaves[path] = spec
    group_of: dict[str, Group] = {}
    # A pattern that fits nothing, or a leaf of two groups, is a typing error more often than a
    # wish.
    for pattern, numbers in parsed_groups(config.groups, GROUP_WORDS):
        group = Group(pattern, numbers.get("lr", 1.0), numbers.get("decay", 1.0))
        if pattern in KINDS:
            paths = [path for path, spec in leaves.items() if KINDS[pattern](spec)]
        else:
            paths = [path for path in leaves if is_target(path, pattern)]
        if not paths:
            raise unknown_target("optimizer.groups", pattern, leaves, "leaf that learns", KINDS)
        for path in paths:
            if path in group_of:
                raise ConfigError(
                    f"optimizer.groups: {path} is in two groups, {group_of[path].pattern!r} and"
                    f" {pattern!r}: name each leaf by one pattern."
                )
            group_of[path] = group

    def group_at(path: str, spec: Spec) -> Group:
        group = group_of.get(path, Group())
        # Norms and biases keep their size by default: decay would only shrink their scale.
        decays = spec.is_matrix or config.decay == "all"
        if decays and not spec.sign_rate:
            return group
        return replace(group, decay=0.0)

    return map_specs(group_at, specs)


def group_sizes(config: OptimizerConfig, specs: Specs) -> dict[Group, list[int]]:
    """Return the numbers of parameters of the leaves that learn, by their group; the leaves of a
    group that do not decay are one of their own."""
    sizes: dict[Group, list[int]] = {}
    groups = jax.tree.leaves(leaf_groups(config, specs))
    for spec, group in zip(jax.tree.leaves(specs), groups, strict=True):
        if spec.trainable:
            sizes.setdefault(group, []).append(math.prod(spec.shape))
    return sizes
