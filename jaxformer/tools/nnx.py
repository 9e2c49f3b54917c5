"""A model for Flax code: an `nnx.Module` around the pure functions, with `nnx.Param` parameters."""

from typing import Any

import jax
from flax import nnx

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.models.transformer import check_model, forward, init


class Transformer(nnx.Module):
    """`jf.forward` as a module: `Transformer(config, rngs=nnx.Rngs(0))(tokens)` -> logits.

    `params`, where given, are those of `jf.init` or `jf.load`; ConfigError where they do not fit
    the config. nnx.jit, nnx.grad, nnx.Optimizer and nnx.split see each leaf as an `nnx.Param` in
    the nesting of the plain params.
    """

    def __init__(
        self, config: ModelConfig, params: Params | None = None, *, rngs: nnx.Rngs | None = None
    ) -> None:
        if params is None:
            params = init(config, (rngs or nnx.Rngs(0)).params())
        check_model(params, config)
        self.config = config
        self.weights = nnx.data(jax.tree.map(nnx.Param, params))

    @property
    def params(self) -> Params:
        """The parameters as `jf.forward` takes them: plain nested dicts of arrays."""
        return jax.tree.map(
            lambda leaf: leaf[...], self.weights, is_leaf=lambda leaf: isinstance(leaf, nnx.Param)
        )  # type: ignore[no-any-return]

    def __call__(self, tokens: Any, **inputs: Any) -> jax.Array:
        """Return the logits; `inputs` are the keywords of `jf.forward`."""
        return forward(self.params, self.config, tokens, **inputs)
