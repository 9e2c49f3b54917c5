"""Transforms of the table of parameters: other leaves in the place of some, from which all else
follows.

A leaf that is a `CustomLeaf` contracts itself wherever a weight is used; initial values, shardings,
counts, decay and what trains are those of its `Spec`s.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxformer.params import Spec, Specs, map_specs, rows, stack
from jaxformer.settings import ConfigError


def adapt(specs: Specs, changes: Mapping[str, Callable[[Spec], Any]]) -> Specs:
    """The table with other leaves in the place of some: `{pattern: make}`, e.g.
    `{"blocks.attention.*": low_rank}`.

    A pattern is one of fnmatch on the dotted path of a leaf, and the first that fits is taken.
    `make(spec)` returns a pytree node whose leaves are `Spec`s (a `CustomLeaf`), or another `Spec`
    (one that is not trainable). The spec of a leaf of stacked layers is given without the axis of
    the layers, and what is made of it is stacked again. Raises ConfigError for a pattern that fits
    no leaf.
    """
    paths = list(rows(specs))
    for pattern in changes:
        if not fnmatch.filter(paths, pattern):
            raise ConfigError(
                f"adapt: the pattern {pattern!r} fits none of the {len(paths)} leaves, which are "
                f"{', '.join(paths[:8])}, and so on: name a leaf, or several with *."
            )

    def changed(path: str, spec: Spec) -> Any:
        make = next(
            (changes[pattern] for pattern in changes if fnmatch.fnmatchcase(path, pattern)), None
        )
        if make is None:
            return spec
        if spec.axes[:1] != ("layers",):
            return make(spec)
        return stack(make(replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])), spec.shape[0])

    return map_specs(changed, specs)
