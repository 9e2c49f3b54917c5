"""The table of a model in which other leaves replace some weights, and which leaves learn."""

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxformer.adapters.low_rank import is_adapted
from jaxformer.arrays.params import CustomLeaf, Params, Spec, Specs, dotted, map_specs, rows, stack
from jaxformer.files import ConfigError

MakeLeaf = Callable[[Spec], CustomLeaf | Spec]


def adapt_specs(specs: Specs, changes: Mapping[str, MakeLeaf]) -> Specs:
    """Return the table with some leaves replaced by `{pattern: make}`, as in
    `{"blocks.attention.*": low_rank}`.

    A pattern is one of fnmatch on the dotted path of a leaf; the first that fits is used.
    `make(spec)` returns a pytree node whose leaves are `Spec`s (a `CustomLeaf`), or another `Spec`
    (one that is not trainable). It gets the spec of stacked layers without their axis, and its
    result is stacked again. The initial values, shardings, counts, decay and trainability of the
    new leaves are those of their `Spec`s.
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
        if not spec.is_stacked:
            return make(spec)
        one_layer = make(replace(spec, shape=spec.shape[1:], axes=spec.axes[1:]))
        return stack(one_layer, spec.shape[0])  # type: ignore[arg-type]  # any tree of rows

    return map_specs(changed, specs)


def frozen_specs(
    specs: Specs, learned: tuple[str, ...], except_paths: Collection[str] = ()
) -> Specs:
    """Return the table in which nothing is trainable except the branches named in `learned` and the
    leaves of `except_paths`."""

    def frozen(path: str, spec: Spec) -> Spec:
        learns = path in except_paths or path.partition(".")[0] in learned
        return spec if learns else replace(spec, trainable=False)

    return map_specs(frozen, specs)


def over_base(table: Specs, trained: Params, base: Params) -> Params:
    """Return the params of an adapted table: its frozen weights from `base`; what learns, and the
    constants of the adapters, from `trained`, whose weights are not read."""
    params: Params = {}
    for name, entry in table.items():
        if isinstance(entry, dict):
            params[name] = over_base(entry, trained[name], base.get(name, {}))
        elif is_adapted(entry):
            params[name] = trained[name].replace(weight=base[name])
        else:
            learns = isinstance(entry, Spec) and entry.trainable
            params[name] = trained[name] if learns else base[name]
    return params


def adapter_mask(params: Params) -> Params:
    """Return which leaves of adapted params are those of the adapter, as a tree of bools: the
    `trainable` of `jf.init_state` and `jf.make_step`."""

    def marked(path: Any, node: Any) -> Any:
        if not is_adapted(node):
            return dotted(path[:1]) == "virtual"
        marks = jax.tree.map(lambda _: False, replace(node, weight=False, key=None))
        magnitude = None if node.magnitude is None else True
        return replace(marks, a=True, b=True, magnitude=magnitude)

    mask: Params = jax.tree.map_with_path(marked, params, is_leaf=is_adapted)
    return mask


def base_paths(table: Specs) -> list[str]:
    """Return the dotted paths of the leaves of an adapted table that belong to the base, which
    training the adapter leaves as they are."""
    paths = []
    for path, node in jax.tree.leaves_with_path(table, is_leaf=is_adapted):
        if is_adapted(node):
            # The weight below may be quantized, and then has several rows.
            weight_rows = jax.tree.leaves_with_path({"weight": node.weight})
            paths += [f"{dotted(path)}.{dotted(row_path)}" for row_path, _ in weight_rows]
        elif not node.trainable:
            paths.append(dotted(path))
    return paths
