"""LoRA (arXiv:2106.09685): which weights get a `LowRank` leaf, of which rank and scale, and how
such params become plain ones again."""

import difflib
import fnmatch
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxformer.adapters.low_rank import LowRank, low_rank
from jaxformer.adapters.rows import adapt_specs
from jaxformer.adapters.virtual import first_virtual, has_virtual, without_virtual
from jaxformer.arrays.params import (
    Params,
    Spec,
    Specs,
    dotted,
    init_params,
    is_custom,
    map_specs,
    rows,
)
from jaxformer.files import ConfigError

ByPattern = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class LoRA:
    """An adapter of low rank for some weights: each is replaced by weight + scale (a b).

    Args:
      rank: R of a [I, R] and b [R, O].
      alpha: scale = alpha / rank, or alpha / sqrt(rank) with `rslora`.
      targets: the weights: names in their paths, as "attention", "ffn", "cross", "q" or "embed",
          or patterns of fnmatch on whole paths, as "blocks.attention.[qv]".
      dropout: fraction of the numbers zeroed that `a` reads, in a loss with a key.
      rslora: rank-stabilized scale (arXiv:2312.03732).
      ranks: (target, rank) for weights with another rank; the first that fits.
      alphas: the same for alpha.

    Raises ConfigError for a rank below 1, and for a dropout or an alpha that is not allowed.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention",)
    dropout: float = 0.0
    rslora: bool = False
    ranks: ByPattern = ()
    alphas: ByPattern = ()

    def __post_init__(self) -> None:
        for name in ("ranks", "alphas"):  # hashable, also where a dict is given
            given = getattr(self, name)
            pairs = given.items() if isinstance(given, Mapping) else given
            object.__setattr__(self, name, tuple((str(key), value) for key, value in pairs))
        given = self.targets
        object.__setattr__(self, "targets", (given,) if isinstance(given, str) else tuple(given))
        for where, rank in (("rank", self.rank), *((f"ranks[{k!r}]", r) for k, r in self.ranks)):
            if isinstance(rank, bool) or rank != int(rank) or rank < 1:
                raise ConfigError(f"LoRA: {where}={rank!r} must be a whole number of at least 1.")
        own = [(f"alphas[{target!r}]", alpha) for target, alpha in self.alphas]
        for where, alpha in (("alpha", self.alpha), *own):
            if not (math.isfinite(alpha) and alpha > 0):
                raise ConfigError(f"LoRA: {where}={alpha!r} must be a number above 0.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"LoRA: dropout={self.dropout!r} must be at least 0 and below 1.")
        if not self.targets:
            raise ConfigError('LoRA: targets is empty: name weights, as in ("attention", "ffn").')

    def rank_of(self, path: str) -> int:
        return int(_first(self.ranks, path, self.rank))

    def scale_of(self, path: str) -> float:
        rank = self.rank_of(path)
        return _first(self.alphas, path, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def _first(changes: ByPattern, path: str, default: float) -> float:
    return next((value for target, value in changes if is_target(path, target)), default)


def is_target(path: str, target: str) -> bool:
    """Whether a target names a leaf: by one of the names in its path, or by a pattern."""
    return target in path.split(".") or fnmatch.fnmatchcase(path, target)


def targets_of(specs: Specs, adapter: LoRA) -> list[str]:
    """The paths of the weights that an adapter replaces. Raises ConfigError for a target that fits
    no matrix, and for a rank beyond a matrix's width."""
    matrices = {path: spec for path, spec in rows(specs).items() if spec.is_matrix}
    asked = [
        *(("targets", target) for target in adapter.targets),
        *(("ranks", target) for target, _ in adapter.ranks),
        *(("alphas", target) for target, _ in adapter.alphas),
    ]
    for name, target in asked:
        if not any(is_target(path, target) for path in matrices):
            raise ConfigError(_unknown(name, target, list(matrices)))
    found = [p for p in matrices if any(is_target(p, target) for target in adapter.targets)]
    for path in found:
        spec, rank = matrices[path], adapter.rank_of(path)
        widest = min(spec.fan_in, spec.fan_out)
        if rank > widest:
            raise ConfigError(
                f"LoRA: rank={rank} is beyond the width of {path}, whose {spec.fan_in} inputs and"
                f" {spec.fan_out} outputs allow 1 to {widest}: choose a smaller rank."
            )
    return found


def _unknown(name: str, target: str, paths: list[str]) -> str:
    names = dict.fromkeys(part for path in paths for part in path.split("."))
    near = difflib.get_close_matches(target, [*names, *paths], 3)
    said = f"Did you mean {' or '.join(near)}?" if near else f"The names are {', '.join(names)}."
    return f"LoRA: {name}: {target!r} fits no matrix of this model. {said}"


def adapted_specs(
    specs: Specs,
    adapter: LoRA,
    weights: Mapping[str, Callable[[Spec], Any]] | None = None,
    learned: tuple[str, ...] = (),
) -> Specs:
    """The table of an adapted model, in which the adapter alone is trainable, and the branches
    named in `learned` (as a new "head").

    `weights` gives, by path, what makes the leaf below the adapter, as a quantized one. Raises
    ConfigError as `targets_of` does.
    """
    weights = weights or {}

    def adapted(path: str) -> Callable[[Spec], Any]:
        def make(spec: Spec) -> Any:
            below = weights[path](spec) if path in weights else None
            return low_rank(
                spec, adapter.rank_of(path), adapter.scale_of(path), adapter.dropout, below
            )

        return make

    makes = {path: adapted(path) for path in targets_of(specs, adapter)}
    others = {path: make for path, make in weights.items() if path not in makes}
    return adapt_specs(frozen_specs(specs, learned, {*makes, *others}), makes | others)


def frozen_specs(specs: Specs, learned: tuple[str, ...], but: Collection[str] = ()) -> Specs:
    """The table in which nothing is trainable but the branches named in `learned`, and the paths of
    `but`."""

    def frozen(path: str, spec: Spec) -> Spec:
        learns = path in but or path.partition(".")[0] in learned
        return spec if learns else replace(spec, trainable=False)

    return map_specs(frozen, specs)


def filled(table: Specs, base: Params, key: jax.Array) -> Params:
    """The params of an adapted table: those of the base where they are, and for the parts of an
    adapter their initial values, which depend on the key and their path alone (a prompt's on the
    table of tokens too)."""
    if has_virtual(table):
        own = first_virtual(table["virtual"], base, key)
        return filled(without_virtual(table), base, key) | {"virtual": own}

    def parts(path: Any, node: Any, below: Any) -> Any:
        if not isinstance(node, LowRank):
            return below
        own = {"a": node.a, "b": node.b, "scale": node.scale}
        named = {f"{dotted(path)}.{name}": spec for name, spec in own.items()}
        made = dict(zip(own, init_params(named, key).values(), strict=True))
        return LowRank(below, **made, inputs=node.inputs, dropout=node.dropout)

    def is_end(node: Any) -> bool:
        return isinstance(node, Spec) or is_custom(node)

    return jax.tree.map_with_path(parts, table, base, is_leaf=is_end)  # type: ignore[no-any-return]


def over_base(table: Specs, parts: Params, base: Params) -> Params:
    """Params of an adapted table: its weights from `base`, and what is trained, with the constants
    of adapters, from `parts`, whose weights are not read."""
    found: Params = {}
    for name, entry in table.items():
        if isinstance(entry, dict):
            found[name] = over_base(entry, parts[name], base.get(name, {}))
        elif is_adapted(entry):
            found[name] = parts[name].replace(weight=base[name])
        else:
            learns = isinstance(entry, Spec) and entry.trainable
            found[name] = parts[name] if learns else base[name]
    return found


def is_adapted(node: Any) -> bool:
    return isinstance(node, LowRank)


def adapter_mask(params: Params) -> Any:
    """Which leaves of adapted params are those of the adapter, as a tree of bools: the `trainable`
    of `jf.init_state` and `jf.make_step`."""

    def marked(path: Any, node: Any) -> Any:
        if not is_adapted(node):
            return dotted(path[:1]) == "virtual"
        own = {"weight": False, "a": True, "b": True, "scale": False}
        return LowRank(**own, inputs=node.inputs, dropout=node.dropout)

    return jax.tree.map_with_path(marked, params, is_leaf=is_adapted)


def base_paths(table: Specs) -> list[str]:
    """The dotted paths of the leaves of an adapted table that belong to the base, which an adapter
    leaves as they are."""
    found = []
    for path, node in jax.tree.leaves_with_path(table, is_leaf=is_adapted):
        if is_adapted(node):  # the rows of its weight, of which a quantized one has several
            below = jax.tree.leaves_with_path({"weight": node.weight})
            found += [f"{dotted(path)}.{dotted(part)}" for part, _ in below]
        elif not node.trainable:
            found.append(dotted(path))
    return found


def without_adapters(params: Params) -> Params:
    """The params below the adapters, without virtual tokens: those of the base, which are not
    copied."""

    def below(node: Any) -> Any:
        return node.weight if is_adapted(node) else node

    params = without_virtual(params) if has_virtual(params) else params
    return jax.tree.map(below, params, is_leaf=is_adapted)  # type: ignore[no-any-return]


def merge(params: Params) -> Params:
    """Plain params, equal in what they compute: each adapted weight with its product added in
    float32, in the dtype of the weight; a quantized one is dequantized first. Raises ConfigError
    for virtual tokens, which no weight can hold."""
    if has_virtual(params):
        raise ConfigError(
            "the virtual tokens of prompt tuning and prefix tuning cannot be merged into weights:"
            " use these params as they are, or the model below them, jf.without_adapters(params)."
        )

    def merged_weight(node: Any) -> Any:
        if not is_adapted(node):
            return node
        weight = node.weight.array() if is_custom(node.weight) else node.weight
        return (weight.astype(node.scale.dtype) + node.product()).astype(weight.dtype)

    return jax.tree.map(merged_weight, params, is_leaf=is_adapted)  # type: ignore[no-any-return]
