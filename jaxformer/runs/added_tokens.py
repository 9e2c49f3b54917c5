"""Tokens that a run adds to the model of run.init_from: their ids, and their rows in every
parameter that has one row for each token."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxformer.arrays.mesh import place_array, placement, replicated
from jaxformer.arrays.params import Params, dotted, is_custom, rows
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import TokenizerConfig
from jaxformer.models.transformer import specs as model_specs
from jaxformer.tokenizer import Tokenizer

BLOCK_ROWS = 4096  # rows of which sums are made at once


class NewRows(NamedTuple):
    """The rows of added tokens: `first` to `stop` of `vocab_size`, the mean of those before
    them."""

    first: int
    stop: int
    vocab_size: int

    @property
    def sentence(self) -> str:
        return (
            f"Rows {self.first} to {self.stop - 1} are those of added tokens: the mean of others."
        )


def added_ids(settings: TokenizerConfig, tokenizer: Tokenizer) -> range:
    """The ids of the tokens that the settings of a run add, whose tokenizer may have them or
    not."""
    names = settings.added
    grown = tokenizer.with_special_tokens(names)
    ids = [index for name in names if (index := grown.id_of(name)) is not None]
    return range(min(ids), max(ids) + 1) if ids else range(0)


def new_rows_of(settings: TokenizerConfig, tokenizer: Tokenizer, vocab_size: int) -> NewRows:
    """The rows that the settings of a run add, whose tokenizer may have them or not."""
    ids = added_ids(settings, tokenizer)
    return NewRows(ids.start, ids.stop, vocab_size)


def with_new_rows(
    params: Params, config: ModelConfig, new: NewRows, mesh: Mesh | None = None
) -> Params:
    """The params of a model with the rows of added tokens, in every leaf with an axis "vocab": the
    table of tokens, the output layer where it is another, and its bias.

    Rows that only fill the old table up keep their values, unless an added token takes them. Sums
    are float64 on the host, so that a laptop finds the rows of any mesh. Host memory: one table.
    """
    grown_table = rows(model_specs(dataclasses.replace(config, vocab_size=new.vocab_size)))

    def leaf_of(path: str, leaf: Any) -> Any:
        spec = grown_table.get(path)
        if spec is None or "vocab" not in spec.axes or is_custom(leaf):
            return leaf
        if not leaf.is_fully_addressable:
            # Other processes have parts of it.
            everywhere = replicated(leaf.sharding.mesh)
            leaf = jax.jit(lambda array: array, out_shardings=everywhere)(leaf).addressable_data(0)
        axis = spec.axes.index("vocab")
        table = np.moveaxis(np.asarray(leaf), axis, 0)
        old = table[: new.first]
        # Blocks, so that float64 takes little memory.
        mean = sum(
            old[start : start + BLOCK_ROWS].astype(np.float64).sum(axis=0)
            for start in range(0, len(old), BLOCK_ROWS)
        ) / len(old)
        grown = np.zeros((new.vocab_size, *table.shape[1:]), leaf.dtype)
        grown[: len(table)] = table
        grown[new.first : new.stop] = mean
        grown = np.ascontiguousarray(np.moveaxis(grown, 0, axis))
        return place_array(grown, placement(mesh, spec.shape, spec.axes))

    return jax.tree.map_with_path(  # type: ignore[no-any-return]
        lambda path, leaf: leaf_of(dotted(path), leaf), params, is_leaf=is_custom
    )
