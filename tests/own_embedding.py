"""An embedding from outside the package, as a row of `EMBEDDINGS`: a narrow table of tokens and a
matrix to the width of the model (ALBERT, arXiv:1909.11942), and two numbers of each token that are
an input of their own.
"""

import jax.numpy as jnp
import numpy as np
from own_sublayer import SIZES, batch, trained

import jaxformer as jf
from jaxformer.arrays.params import Spec, lookup
from jaxformer.config.settings import with_settings
from jaxformer.layers.embed import WHOLE, EmbeddingKind
from jaxformer.layers.linear import INITIALIZERS, linear

WIDTH = 8
CONFIG = {**SIZES, "embedding.kind": "narrow", "positions": "learned", "init": "fan_in"}


def specs(config):
    make, d = INITIALIZERS[config.init](config), config.d_model
    table = Spec(
        (config.vocab_size, WIDTH), ("vocab", "narrow"), make.embedding, ("vocab",), lookup=True
    )
    return {
        "narrow": table,
        "widen": Spec((WIDTH, d), ("narrow", "embed"), make.weight, inputs=("narrow",)),
        "features": Spec((2, d), ("features", "embed"), make.weight, inputs=("features",)),
    }


def apply(params, config, inputs):
    x = linear("BTW,WD->BTD", params, "widen", lookup(params["narrow"], inputs.tokens, WHOLE))
    if "features" not in inputs.arrays:
        return x
    features = inputs.arrays["features"].astype(jnp.float32)  # [B, T, 2]
    return x + linear("BTW,WD->BTD", params, "features", features)


ROW = EmbeddingKind(
    specs=specs,
    apply=apply,
    formula=lambda config: "E[token] W_widen + features W_features",
    reads=("features",),
)


def batch_with_features(step):
    """The rows of `own_sublayer`; a feature says which tokens are odd."""
    rows = batch(step)
    odd = rows["tokens"] % 2
    return rows | {"features": np.stack([odd, 1 - odd], axis=-1).astype(np.float32)}


def losses(steps, mesh=None):
    return trained(with_settings(jf.ModelConfig(), CONFIG), batch_with_features, steps, mesh)
