"""The table and the params of a model in which other leaves replace some weights: which leaves
learn, their initial values, and the way back to plain params."""

import fnmatch
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxformer.adapters.low_rank import LowRank, is_adapted
from jaxformer.adapters.virtual_tokens import first_virtual, has_virtual, without_virtual
from jaxformer.arrays.params import (
    CustomLeaf,
    Params,
    Spec,
    Specs,
    dotted,
    init_params,
    is_custom,
    map_specs,
    rows,
    stack,
)
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


def filled(table: Specs, base: Params, key: jax.Array) -> Params:
    """Return the params of an adapted table: the weights of `base`, and the initial values of an
    adapter, which depend on the key and the path of each leaf alone (those of a prompt also on the
    table of tokens)."""
    if has_virtual(table):
        virtual = first_virtual(table["virtual"], base, key)
        return filled(without_virtual(table), base, key) | {"virtual": virtual}

    def with_adapter(path: Any, entry: Any, weight: Any) -> Any:
        if not isinstance(entry, LowRank):
            return weight
        # `init_params` folds the dotted path of each leaf into the key.
        name = dotted(path)
        factors = {f"{name}.a": entry.a, f"{name}.b": entry.b, f"{name}.scale": entry.scale}
        a, b, scale = init_params(factors, key).values()
        return replace(entry, weight=weight, a=a, b=b, scale=scale)

    def is_row(node: Any) -> bool:
        return isinstance(node, Spec) or is_custom(node)

    params: Params = jax.tree.map_with_path(with_adapter, table, base, is_leaf=is_row)
    return params


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
        return replace(node, weight=False, a=True, b=True, scale=False, key=None)

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


def without_adapters(params: Params) -> Params:
    """Return the params below the adapters, without virtual tokens: those of the base, which are
    not copied."""

    def below(node: Any) -> Any:
        return node.weight if is_adapted(node) else node

    params = without_virtual(params) if has_virtual(params) else params
    base: Params = jax.tree.map(below, params, is_leaf=is_adapted)
    return base


def merge(params: Params) -> Params:
    """Plain params that compute the same: to each adapted weight its product is added in float32,
    and the sum has the dtype of the weight. Quantized weights are dequantized, with an adapter or
    without one."""
    if has_virtual(params):
        raise ConfigError(
            "the virtual tokens of prompt tuning and prefix tuning cannot be merged into weights:"
            " use these params as they are, or the model below them, jf.without_adapters(params)."
        )

    def merged_weight(node: Any) -> Any:
        if not is_adapted(node):
            return node.array() if is_custom(node) else node
        weight = node.weight.array() if is_custom(node.weight) else node.weight
        return (weight.astype(node.scale.dtype) + node.product()).astype(weight.dtype)

    merged: Params = jax.tree.map(merged_weight, params, is_leaf=is_custom)
    return merged
