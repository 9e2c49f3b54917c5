"""A mixer with a recurrent state from outside the package, the gated delta rule (arXiv:2412.06464),
as a row of `MIXERS`. What it keeps of a text does not grow with it."""

import jax
import jax.numpy as jnp

from jaxformer.arrays.params import Spec
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.masks import segment_ids
from jaxformer.layers.output import Aux, Output
from jaxformer.layers.sublayer import StoredArray, Sublayer

SIZES = dict(vocab_size=61, d_model=32, n_layers=2, n_heads=4, d_ff=48, max_length=64)
CONFIG = dict(SIZES, mixer="delta", positions="none")


def specs(config):
    make = INITIALIZERS[config.init](config)
    n, axes = config.n_heads, ("heads", "head_dim")
    shape = (config.d_model, n, config.head_width)
    into = Spec(shape, ("embed", *axes), make.weight, inputs=("embed",))
    gate = Spec(shape[:2], ("embed", "heads"), make.weight, inputs=("embed",))
    back = Spec((*shape[1:], config.d_model), (*axes, "embed"), make.residual, inputs=axes)
    return {"q": into, "k": into, "v": into, "decay": gate, "rate": gate, "mix": back}


def start(config, batch, slots, dtype):
    """The state of a text without tokens [B, N, H, W]."""
    return jnp.zeros((batch, config.n_heads, config.head_width, config.head_width))


def apply(params, config, x, call):
    """S_t = a_t S_t-1 + b_t k_t (v_t - a_t S_t-1^T k_t)^T,  o_t = S_t^T q_t: [B, T, D] twice."""
    q, k, v = (linear("BTD,DNH->BTNH", params, name, x) for name in ("q", "k", "v"))
    k = k / jnp.sqrt(jnp.square(k).sum(-1, keepdims=True) + 1e-6)
    decay, rate = (
        jax.nn.sigmoid(linear("BTD,DN->BTN", params, name, x)) for name in ("decay", "rate")
    )
    cache, segments = call.cache, segment_ids(call.mask)[0]
    state = start(config, len(x), 0, x.dtype) if cache is None else cache.kept
    # A segment begins without a state, and padding leaves it as it is.
    begins = (call.mask.queries.positions == 0)[..., None]
    decay = jnp.where(begins, 0.0, decay)
    real = (segments != 0)[..., None]
    decay, rate = jnp.where(real, decay, 1.0), jnp.where(real, rate, 0.0)

    def step(state, token):
        q, k, v, decay, rate = token
        state = state * decay[..., None, None]
        error = v - jnp.einsum("bnhw,bnh->bnw", state, k)
        state = state + jnp.einsum("bn,bnh,bnw->bnhw", rate, k, error)
        return state, jnp.einsum("bnhw,bnh->bnw", state, q)

    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (q, k, v, decay, rate))
    state, out = jax.lax.scan(step, state, tokens)
    cache = None if cache is None else cache._replace(kept=state)
    return Output(linear("BTNH,NHD->BTD", params, "mix", jnp.moveaxis(out, 0, 1)), cache, Aux())


def stored(config, sizes):
    one = sizes.tokens * sizes.share(config.n_heads) * config.head_width * sizes.number
    states = StoredArray("states", one * config.head_width)
    return [states, *(StoredArray(name, one) for name in ("q", "k", "v"))]


ROW = Sublayer(
    specs=specs,
    apply=apply,
    product="mix",
    stored=stored,
    gradients=("q", "k", "v"),
    formula=lambda config: ("S ← a S + b k (v - a Sᵀ k)ᵀ,  delta = Sᵀ q W_mix",),
    scores=lambda config, keys: 6 * config.n_heads * config.head_width**2,
    start=start,
    capture="delta_out",
)
