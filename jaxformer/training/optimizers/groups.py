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


def fits(pattern: str, path: str, spec: Spec) -> bool:
    """Return whether a pattern names a leaf: by its kind, or by a name in its path, or by a pattern
    of fnmatch on its path."""
    return KINDS[pattern](spec) if pattern in KINDS else is_target(path, pattern)


def groups_of(config: OptimizerConfig) -> list[Group]:
    """Return the groups of optimizer.groups."""
    return [
        Group(pattern, numbers.get("lr", 1.0), numbers.get("decay", 1.0))
        for pattern, numbers in parsed_groups(config.groups, GROUP_WORDS)
    ]


def leaf_groups(config: OptimizerConfig, specs: Specs) -> Any:
    """Return the `Group` of every leaf, in the nesting of the table, with a decay of 0 for leaves
    that do not decay. Leaves with a `Spec.sign_rate` are in no group: they move by that rate
    alone."""
    group_of = _group_of_leaves(config, specs)

    def group(path: str, spec: Spec) -> Group:
        found = group_of.get(path, Group())
        return found if decays(config, spec) else replace(found, decay=0.0)

    return map_specs(group, specs)


def decays(config: OptimizerConfig, spec: Spec) -> bool:
    """Return whether optimizer.decay lets a leaf decay."""
    return (config.decay == "all" or spec.is_matrix) and not spec.sign_rate


def _group_of_leaves(config: OptimizerConfig, specs: Specs) -> dict[str, Group]:
    """Return the group of each leaf that is in one, by its path."""
    leaves = {
        path: spec for path, spec in rows(specs).items() if spec.trainable and not spec.sign_rate
    }
    group_of: dict[str, Group] = {}
    for group in groups_of(config):
        paths = [path for path, spec in leaves.items() if fits(group.pattern, path, spec)]
        if not paths:
            setting = "optimizer.groups"
            raise unknown_target(setting, group.pattern, leaves, "leaf that learns", KINDS)
        for path in paths:
            if path in group_of:
                raise ConfigError(
                    f"optimizer.groups: {path} is in two groups, {group_of[path].pattern!r} and"
                    f" {group.pattern!r}: name each leaf by one pattern."
                )
            group_of[path] = group
    return group_of


def decay_groups(config: OptimizerConfig, specs: Specs) -> dict[str, tuple[int, int]]:
    """Return `{"decayed": (tensors, parameters), "not decayed": ...}`, for the start of a run to
    print."""
    counts = {"decayed": (0, 0), "not decayed": (0, 0)}
    groups = jax.tree.leaves(leaf_groups(config, specs))
    for spec, group in zip(jax.tree.leaves(specs), groups, strict=True):
        if spec.trainable:
            name = "decayed" if group.decay else "not decayed"
            tensors, parameters = counts[name]
            counts[name] = (tensors + 1, parameters + math.prod(spec.shape))
    return counts


def group_lines(config: OptimizerConfig, specs: Specs) -> list[str]:
    """Return a line for each group and for all other leaves, for the start of a run to print; none
    without groups."""
    group_of = _group_of_leaves(config, specs)
    if not group_of:
        return []
    # The sizes of the leaves of each group, in the order of the setting.
    sizes: dict[Group, list[int]] = {group: [] for group in [*groups_of(config), Group()]}
    for path, spec in rows(specs).items():
        if spec.trainable:
            sizes[group_of.get(path, Group())].append(math.prod(spec.shape))
    return [
        f"{group.pattern}: {len(leaves)} tensors, {sum(leaves):,} parameters, learning rate x"
        f" {group.rate:g}, weight decay x {group.decay:g}"
        for group, leaves in sizes.items()
    ]
