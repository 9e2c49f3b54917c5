"""Groups of leaves by the table of parameters: factors of learning rates and of weight decay."""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxformer.arrays.params import Spec, Specs, is_target, map_specs
from jaxformer.config.optimizer import Group, OptimizerConfig, parsed_groups
from jaxformer.files import ConfigError


@dataclass(frozen=True)
class Factors:
    """What the learning rate and the weight decay of a leaf are multiplied by."""

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
    """Whether a pattern names a leaf: by its kind, or by a name in its path, or by a pattern of
    fnmatch on its path."""
    return KINDS[pattern](spec) if pattern in KINDS else is_target(path, pattern)


def leaf_factors(config: OptimizerConfig, specs: Specs) -> Any:
    """The `Factors` of every leaf, in the nesting of the table: those of its group.

    The decay is 0 for leaves that do not decay. Leaves with a `Spec.sign_rate` are in no group:
    they move by that rate alone.
    """
    groups = parsed_groups(config.groups)
    group_of = _group_of_leaves(groups, specs)

    def factors(path: str, spec: Spec) -> Factors:
        group = group_of.get(path, Group(""))
        return Factors(group.rate, group.decay if decays(config, spec) else 0.0)

    return map_specs(factors, specs)


def decays(config: OptimizerConfig, spec: Spec) -> bool:
    """Whether optimizer.decay lets a leaf decay."""
    return (config.decay == "all" or spec.is_matrix) and not spec.sign_rate


def _group_of_leaves(groups: list[Group], specs: Specs) -> dict[str, Group]:
    """The group of each leaf that is in one, by its path."""
    leaves: dict[str, Spec] = {}
    map_specs(lambda path, spec: leaves.update({path: spec}), specs)
    leaves = {p: spec for p, spec in leaves.items() if spec.trainable and not spec.sign_rate}
    group_of: dict[str, Group] = {}
    for group in groups:
        paths = [path for path, spec in leaves.items() if fits(group.pattern, path, spec)]
        if not paths:
            raise _no_such_leaf(group.pattern, list(leaves))
        for path in paths:
            if path in group_of:
                raise ConfigError(
                    f"optimizer.groups: {path} is in two groups, {group_of[path].pattern!r} and"
                    f" {group.pattern!r}: name each leaf by one pattern. {_patterns(list(leaves))}"
                )
            group_of[path] = group
    return group_of


def _no_such_leaf(pattern: str, paths: list[str]) -> ConfigError:
    near = difflib.get_close_matches(pattern, [*KINDS, *_names(paths)], 3)
    advice = f"Did you mean {' or '.join(near)}? " if near else ""
    return ConfigError(
        f"optimizer.groups: {pattern!r} fits no leaf of this model that learns. {advice}"
        f"{_patterns(paths)}"
    )


def _patterns(paths: list[str]) -> str:
    """A sentence with all that a pattern may be."""
    return (
        f"The kinds are {', '.join(KINDS)}; the names in paths are {', '.join(_names(paths))};"
        " a pattern fits whole paths, as in 'blocks.attention.[qv]'."
    )


def _names(paths: list[str]) -> list[str]:
    return list(dict.fromkeys(name for path in paths for name in path.split(".")))


def group_lines(config: OptimizerConfig, specs: Specs) -> list[str]:
    """A line for each group and for all other leaves, for the start of a run to print; none without
    groups."""
    groups = parsed_groups(config.groups)
    if not groups:
        return []
    # Tensors and parameters, in the order of the setting.
    sizes = dict.fromkeys([*(group.pattern for group in groups), "all others"], (0, 0))
    group_of = _group_of_leaves(groups, specs)

    def add(path: str, spec: Spec) -> None:
        if spec.trainable:
            name = group_of[path].pattern if path in group_of else "all others"
            tensors, parameters = sizes[name]
            sizes[name] = tensors + 1, parameters + math.prod(spec.shape)

    map_specs(add, specs)
    factor_of = {group.pattern: group for group in groups}
    return [
        f"{name}: {tensors} tensors, {parameters:,} parameters, learning rate x {group.rate:g},"
        f" weight decay x {group.decay:g}"
        for name, (tensors, parameters) in sizes.items()
        for group in [factor_of.get(name, Group(name))]
    ]
