"""LoRA (arXiv:2106.09685): which weights get a `LowRank` leaf, and of which rank and scale."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from jaxformer.adapters.adapted_params import MakeLeaf, adapt_specs, frozen_specs
from jaxformer.adapters.low_rank import LowRank, low_rank
from jaxformer.arrays.params import Spec, Specs, is_target, rows, unknown_target
from jaxformer.files import ConfigError

ByPattern = tuple[tuple[str, float], ...]
InitialFactors = Literal["zeros", "pissa"]


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
      dora: the norm of each output's weights learns by itself (DoRA, arXiv:2402.09353).
      init: of a and b: "zeros" makes b zero; "pissa" makes them the principal components of the
          weight, which learn in its place (PiSSA, arXiv:2404.02948), by a decomposition of each.
      ranks: (target, rank) for weights with another rank; the first that fits.
      alphas: the same for alpha.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention",)
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    init: InitialFactors = "zeros"
    ranks: ByPattern = ()
    alphas: ByPattern = ()

    def __post_init__(self) -> None:
        # Hashable also where `ranks` or `alphas` is a dict, and `targets` one string or a list.
        for name in ("ranks", "alphas"):
            value = getattr(self, name)
            pairs = value.items() if isinstance(value, Mapping) else value
            object.__setattr__(self, name, tuple((str(target), number) for target, number in pairs))
        names = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", names)
        ranks = [("rank", self.rank), *((f"ranks[{k!r}]", rank) for k, rank in self.ranks)]
        for where, rank in ranks:
            if isinstance(rank, bool) or rank != int(rank) or rank < 1:
                raise ConfigError(f"LoRA: {where}={rank!r} must be a whole number of at least 1.")
        alphas = [("alpha", self.alpha), *((f"alphas[{k!r}]", alpha) for k, alpha in self.alphas)]
        for where, alpha in alphas:
            if not (math.isfinite(alpha) and alpha > 0):
                raise ConfigError(f"LoRA: {where}={alpha!r} must be a number above 0.")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"LoRA: dropout={self.dropout!r} must be at least 0 and below 1.")
        if self.init not in get_args(InitialFactors):
            raise ConfigError(f"LoRA: init={self.init!r} must be one of zeros, pissa.")
        if not self.targets:
            raise ConfigError('LoRA: targets is empty: name weights, as in ("attention", "ffn").')

    def rank_of(self, path: str) -> int:
        """Return the rank of the adapter of a weight."""
        return int(_first_fitting(self.ranks, path, self.rank))

    def scale_of(self, path: str) -> float:
        """Return the factor of a b for a weight."""
        rank = self.rank_of(path)
        alpha = _first_fitting(self.alphas, path, self.alpha)
        if self.rslora:
            return alpha / math.sqrt(rank)
        return alpha / rank


def _first_fitting(by_pattern: ByPattern, path: str, default: float) -> float:
    for target, value in by_pattern:
        if is_target(path, target):
            return value
    return default


def targets_of(specs: Specs, adapter: LoRA) -> list[str]:
    """Return the paths of the weights that an adapter replaces."""
    matrices = {path: spec for path, spec in rows(specs).items() if spec.is_matrix}
    targets_by_field = {
        "targets": adapter.targets,
        "ranks": [target for target, _ in adapter.ranks],
        "alphas": [target for target, _ in adapter.alphas],
    }
    for field, targets in targets_by_field.items():
        for target in targets:
            # A name that fits nothing would leave weights frozen in silence.
            if not any(is_target(path, target) for path in matrices):
                raise unknown_target(f"LoRA: {field}", target, matrices, "matrix")
    paths = [p for p in matrices if any(is_target(p, target) for target in adapter.targets)]
    for path in paths:
        spec = matrices[path]
        is_one_matrix = set(spec.batch) <= {"layers"} and not spec.lookup
        if not is_one_matrix and (adapter.dora or adapter.init == "pissa"):
            raise ConfigError(
                f"LoRA: dora and init='pissa' are for the matrices of linear layers, and {path} is"
                " a table of embeddings or the weights of experts: name other targets, or leave"
                " both out."
            )
        rank = adapter.rank_of(path)
        max_rank = min(spec.fan_in, spec.fan_out)
        if rank > max_rank:
            raise ConfigError(
                f"LoRA: rank={rank} is beyond the width of {path}, whose {spec.fan_in} inputs and"
                f" {spec.fan_out} outputs allow 1 to {max_rank}: choose a smaller rank."
            )
    return paths


def adapted_specs(
    specs: Specs,
    adapter: LoRA,
    weights: Mapping[str, MakeLeaf] | None = None,
    learned: tuple[str, ...] = (),
) -> Specs:
    """Return the table of an adapted model, in which the adapter alone is trainable, and the
    branches named in `learned` (as a new "head").

    `weights` gives, by path, what makes the leaf below the adapter, as a quantized one.
    """
    weights = weights or {}

    def adapted(path: str) -> MakeLeaf:
        def make(spec: Spec) -> LowRank:
            below = weights[path](spec) if path in weights else None
            return low_rank(
                spec,
                adapter.rank_of(path),
                adapter.scale_of(path),
                adapter.dropout,
                below,
                dora=adapter.dora,
                pissa=adapter.init == "pissa",
            )

        return make

    makers = {**weights, **{path: adapted(path) for path in targets_of(specs, adapter)}}
    return adapt_specs(frozen_specs(specs, learned, makers), makers)
