"""Transforms of the table of parameters that replace some of its leaves.

A `CustomLeaf` contracts itself wherever a weight is used; its initial values, shardings, counts,
decay and trainability are those of its `Spec`s.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxformer.arrays.params import Spec, Specs, map_specs, rows, stack
from jaxformer.files import ConfigError


def adapt_specs(specs: Specs, changes: Mapping[str, Callable[[Spec], Any]]) -> Specs:
    """The table with some leaves replaced by `{pattern: make}`, as in
    `{"blocks.attention.*": low_rank}`.

    A pattern is one of fnmatch on the dotted path of a leaf; the first that fits is used.
    `make(spec)` returns a pytree node whose leaves are `Spec`s (a `CustomLeaf`), or another `Spec`
    (one that is not trainable). It gets the spec of stacked layers without their axis, and its
    result is stacked again. Raises ConfigError for a pattern that fits no leaf.
    """
    paths = list(rows(specs))
    for pattern in changes:
        if not fnmatch.filter(paths, pattern):
            raise ConfigError(
                f"adapt_specs: the pattern {pattern!r} fits none of the {len(paths)} leaves, which "
                f"are {', '.join(paths[:8])}, and so on: name a leaf, or several with *."
            )

    def changed(path: str, spec: Spec) -> Any:
        fitting = [make for pattern, make in changes.items() if fnmatch.fnmatchcase(path, pattern)]
        if not fitting:
            return spec
        make = fitting[0]
        if spec.axes[:1] != ("layers",):
            return make(spec)
        return stack(make(replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])), spec.shape[0])

    return map_specs(changed, specs)
