"""A sublayer from outside the package: a gated mean over the window, as a row of `MIXERS`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxformer as jf
from jaxformer.arrays.params import Spec
from jaxformer.layers.cache import Slots
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.masks import visible
from jaxformer.layers.output import Aux, Output
from jaxformer.layers.sublayer import StoredArray, Sublayer

SIZES = dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4, d_ff=48, max_length=32, window=5)
CONFIG = dict(SIZES, mixer="mean")


def specs(config):
    make = INITIALIZERS[config.init](config)
    shape, axes = (config.d_model, config.n_heads, config.head_width), ("heads", "head_dim")
    into = Spec(shape, ("embed", *axes), make.weight, inputs=("embed",))
    back = Spec((*shape[1:], config.d_model), (*axes, "embed"), make.residual, inputs=axes)
    return {"value": into, "gate": into, "mix": back}


def apply(params, config, x, call):
    """sigmoid(x gate) * mean of x value over the tokens that are seen: [B, T, D] -> [B, T, D]."""
    values = linear("BTD,DNH->BTNH", params, "value", x)
    gate = jax.nn.sigmoid(linear("BTD,DNH->BTNH", params, "gate", x))
    cache = call.cache
    if cache is not None:
        cache, values = cache.write(values)
    seen = visible(call.mask._replace(window=config.window)).astype(x.dtype)  # [B, T, S]
    count = jnp.maximum(seen.sum(-1), 1)[..., None, None]
    mean = jnp.einsum("bts,bsnh->btnh", jnp.broadcast_to(seen, (len(x), *seen.shape[1:])), values)
    return Output(linear("BTNH,NHD->BTD", params, "mix", gate * mean / count), cache, Aux())


def stored(config, sizes):
    one = sizes.tokens * sizes.share(config.n_heads) * config.head_width * sizes.number
    return [StoredArray(name, one) for name in ("value", "gate", "mean")]


def scores(config, keys):
    return 2 * config.n_heads * config.head_width * keys


ROW = Sublayer(
    specs=specs,
    apply=apply,
    product="mix",
    stored=stored,
    gradients=("value", "gate", "mean"),
    formula=lambda config: (
        "mean = (sigmoid(x W_gate) ⊙ mean over the window of x W_value) W_mix",
    ),
    scores=scores,
    start=lambda config, batch, slots, dtype: Slots.empty(
        batch, slots, config.n_heads, config.head_width, dtype
    ),
    capture="mean_out",
)


def batch(step):
    """Rows in which each token follows from the one before."""
    start = np.random.default_rng(step).integers(0, 61, (8, 1))
    rows = ((start + 7 * np.arange(25)) % 61).astype(np.int32)
    weights = np.ones((8, 24), np.float32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


class Batches:
    """The batch of each step, by a function of it."""

    def __init__(self, batch_of):
        self.batch_of = batch_of

    def __getitem__(self, step):
        return self.batch_of(step)


def trained(config, batch_of, steps, mesh=None):
    """The loss of each step, and the final params."""
    seen, optimizer = [], optax.adamw(1e-2)
    state = jf.init_state(jf.specs(config), optimizer, mesh=mesh)
    step = jf.make_step(jf.loss_of("causal", config), optimizer, microbatches=2)

    def keep(number, state, metrics):
        seen.append(float(metrics["loss"]))

    state = jf.fit(step, state, Batches(batch_of), steps=steps, hooks=[keep])
    return seen, state.params


def losses(steps, mesh=None):
    return trained(jf.ModelConfig(**CONFIG), batch, steps, mesh)
