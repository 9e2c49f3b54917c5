"""The gated delta rule (arXiv:2412.06464), a mixer: each head keeps a matrix S of what it has read,
in which a token corrects what stands under its key.

    q, k, v = silu(convolution(x W))          over the last tokens of a text, of each channel
    q, k    = q / |q| / √H,  k / |k|
    a       = exp(-exp(A) softplus(x W_a + c))   the decay of a head, or of each channel of a key
    b       = sigmoid(x W_b)                     the rate at which it learns
    S       = a S + b k (v - kᵀ a S)ᵀ
    delta   = (norm(Sᵀ q) silu(x W_g)) W_O

With a decay of each channel it is Kimi Delta Attention (arXiv:2510.26692), where decay and gate are
made of latents (`recurrent.rank`) and the gate is a sigmoid. It reads tokens in the order of their
rows, whatever their positions, and is causal.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxformer.arrays.exact import by_tiles, is_exact
from jaxformer.arrays.params import Params, Spec, Specs, ones
from jaxformer.config.model import ModelConfig
from jaxformer.layers.exchange import DIVIDED_TOKENS
from jaxformer.layers.linear import linear
from jaxformer.layers.norm import rms_norm
from jaxformer.layers.output import Aux, Output
from jaxformer.layers.recurrence import (
    Recurrence,
    of_latent,
    projection,
    read_texts,
    recurrent_mixer,
    recurrent_specs,
    steps,
)
from jaxformer.layers.sublayer import Call

# Added to the squared length of a query or a key, as in the library of the paper's authors.
SMALLEST_SQUARE = 1e-6
GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


def delta_specs(config: ModelConfig) -> Specs:
    """Return the rows of the recurrence, those of the rate and of the norm, and with a rank those
    of the latents of gate and decay."""
    specs = recurrent_specs(config)
    specs |= {
        "rate": projection(config, (config.recurrent_heads,), ("heads",), quantizable=False),
        "norm": Spec((config.recurrent_value_width,), ("norm",), ones),
    }
    rank = config.recurrent.rank
    if rank:
        for name in ("gate", "decay"):
            spec = specs[name]
            down = replace(spec, shape=(config.d_model, rank), axes=("embed", "latent"))
            specs[f"{name}_down"] = down
            specs[name] = replace(spec, shape=(rank, *spec.shape[1:]))
    return specs


def delta(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    """Read the tokens before each in its text, and with a cache those that were read before:
    [B, T, D] -> [B, T, D]."""
    step = steps(params, config, x)
    if config.recurrent.decay == "head":
        step = step[..., None]
    log_decay = -jnp.exp(params["log_speed"])[:, None] * step
    log_decay, captures = call.request.apply("delta_log_decay", log_decay)
    rate = linear("BTD,DN->BTN", params, "rate", x, point="gate").astype(jnp.float32)
    rate = jax.nn.sigmoid(rate)
    if config.recurrent.negative_eigenvalues:
        # That of the key of a token is a (1 - b).
        rate = 2 * rate
    rate, captured = call.request.apply("delta_rate", rate)
    captures |= captured
    out, cache, aux = read_texts(params, config, x, call, log_decay, rate, _of_length_one)
    gate = of_latent("BTD,DNH->BTNH", params, "gate", x, DIVIDED_TOKENS)
    gate = GATES[config.recurrent.gate](gate.astype(jnp.float32))
    out = rms_norm(out, params["norm"], config.recurrent.norm_eps or config.norm_eps) * gate
    out = linear(
        "BTNH,NHD->BTD", params, "out", out.astype(x.dtype), to=("batch", "sequence", None)
    )
    return Output(out, cache, Aux(captures=captures | aux.captures))


def _of_length_one(tokens: Recurrence) -> Recurrence:
    """Return the tokens with keys of length 1, and queries of length 1 / sqrt(H)."""
    dtype = tokens.v.dtype
    q = _unit(tokens.q) * tokens.q.shape[-1] ** -0.5
    return tokens._replace(q=q.astype(dtype), k=_unit(tokens.k).astype(dtype))


def _unit(x: jax.Array) -> jax.Array:
    """Return queries or keys [B, T, K, H] of length 1, float32."""

    def run(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + SMALLEST_SQUARE)

    x = x.astype(jnp.float32)
    if is_exact():
        # On a mesh the sum would have other bits.
        return by_tiles(run, x, 2)
    return run(x)


def _formula(config: ModelConfig) -> tuple[str, ...]:
    width = config.recurrent.convolution
    down = " W_{}'" if config.recurrent.rank else ""
    twice = "2 " if config.recurrent.negative_eigenvalues else ""
    return (
        f"Q, K, V = silu(convolution of {width} tokens (x W_Q, x W_K, x W_V))",
        "q = q / (|q| √H),  k = k / |k|",
        f"a = exp(-exp(A) softplus(x{down.format('a')} W_a + c)),  b = {twice}sigmoid(x W_b)",
        "S ← a S + b k (v - kᵀ a S)ᵀ",
        f"delta = (norm(Sᵀ q) {config.recurrent.gate}(x{down.format('G')} W_G)) W_O",
    )


GATED_DELTA = recurrent_mixer("delta", delta_specs, delta, _formula)
