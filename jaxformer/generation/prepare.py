"""The weights as the decode loop reads them, computed once for given params."""

import functools
import weakref
from typing import Any

import jax

from jaxformer.config import ModelConfig
from jaxformer.models.stack import compute_dtype, layers_of
from jaxformer.params import Params, is_custom


def prepared(params: Params, config: ModelConfig) -> Params:
    """The weights layer by layer, in the dtype of the products; a custom leaf as its `astype` gives
    it.

    The last result is kept for the next call with the same arrays, until one of these is freed.
    Under a transform of JAX nothing is kept.
    """
    return _LAST.weights(params, config)


class _Last:
    """The weights that were prepared last, and weak references to the arrays they were made of."""

    _sources: list[Any]
    _made_of: Any
    _weights: Params | None

    def __init__(self) -> None:
        self._forget()

    def weights(self, params: Params, config: ModelConfig) -> Params:
        leaves, treedef = jax.tree.flatten(params)
        if not all(isinstance(a, jax.Array) and not isinstance(a, jax.core.Tracer) for a in leaves):
            return _prepare(params, config)
        weights = self._weights
        if (
            weights is not None
            and self._made_of == (treedef, config)
            and all(source() is leaf for source, leaf in zip(self._sources, leaves, strict=True))
        ):
            return weights
        self._forget()  # before new ones are made, so that there are never two
        weights = _prepare(params, config)
        self._sources = [weakref.ref(leaf, self._forget) for leaf in leaves]
        self._made_of, self._weights = (treedef, config), weights
        return weights

    def _forget(self, _: Any = None) -> None:
        self._sources, self._made_of, self._weights = [], None, None


_LAST = _Last()


@functools.partial(jax.jit, static_argnums=1)
def _prepare(params: Params, config: ModelConfig) -> Params:
    dtype = compute_dtype(config)
    cast = jax.tree.map(lambda w: w.astype(dtype), params, is_leaf=is_custom)
    if "virtual" in params:
        from jaxformer.models.virtual import for_decoding

        cast |= {"virtual": for_decoding(params, config)}
    return cast | {"blocks": layers_of(cast["blocks"])}
