"""Mamba-2 (arXiv:2405.21060), a mixer: each head keeps a matrix S of what it has read, which decays
with the length of a step that a token chooses.

    C, B, X = silu(convolution(u W) + b)    over the last tokens of a text, of each channel
    Δ       = softplus(u W_Δ + c)
    S       = exp(-exp(A) Δ) S + B (Δ X)ᵀ
    mamba2  = norm((Sᵀ C + D X) silu(u W_Z)) W_O

In the dual form it is attention without a softmax, whose queries are C, keys B and values X: the
parameters have these names. A group of heads has one C and B, and its norm is over all its heads.
It reads tokens in the order of their rows, whatever their positions, and is causal.
"""

import jax
import jax.numpy as jnp

from jaxformer.arrays.exact import by_tiles, is_exact
from jaxformer.arrays.params import Params, Spec, Specs, ones, zeros
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.layers.exchange import DIVIDED_TOKENS
from jaxformer.layers.linear import linear
from jaxformer.layers.output import Aux, Output
from jaxformer.layers.recurrence import (
    Recurrence,
    read_texts,
    recurrent_mixer,
    recurrent_specs,
    steps,
)
from jaxformer.layers.sublayer import Call


def mamba2_specs(config: ModelConfig) -> Specs:
    """Return the rows of the recurrence, biases of the convolutions, and the rows of the skip
    connection and the norm."""
    specs = recurrent_specs(config)
    n, w, _ = specs["out"].shape
    for name in ("q", "k", "v"):
        taps = specs[f"{name}_taps"]
        specs[f"{name}_taps_bias"] = Spec(taps.shape[:-1], taps.axes[:-1], zeros)
    return specs | {
        "skip": Spec((n,), ("heads",), ones),
        "norm": Spec((n, w), ("heads", "head_dim"), ones),
    }


def mamba2(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    """Read the tokens before each in its text, and with a cache those that were read before:
    [B, T, D] -> [B, T, D]."""
    step, captures = call.request.apply("mamba2_step", steps(params, config, x))
    log_decay = (-jnp.exp(params["log_speed"]) * step)[..., None]
    out, cache, aux = read_texts(params, config, x, call, log_decay, step, _stepped)
    gate = linear("BTD,DNH->BTNH", params, "gate", x, to=DIVIDED_TOKENS).astype(jnp.float32)
    out = _norm_of_groups(params, config, out * jax.nn.silu(gate))
    out = linear(
        "BTNH,NHD->BTD", params, "out", out.astype(x.dtype), to=("batch", "sequence", None)
    )
    return Output(out, cache, Aux(captures=captures | aux.captures))


def _stepped(tokens: Recurrence) -> Recurrence:
    """Return the tokens with values times their steps, which are added as they are."""
    step = jnp.asarray(tokens.rate)[..., None]
    return tokens._replace(v=(tokens.v * step).astype(tokens.v.dtype), rate=None)


def _norm_of_groups(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return x [B, T, N, W] after an RMS norm over all heads that have one key."""
    heads = x.shape[2]
    groups = config.recurrent_key_heads

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        # The means of devices with other heads are needed, and not their heads.
        squares = constrain(jnp.square(x).mean(-1), ("batch", "sequence", None))  # [B, T, N]
        squares = squares.reshape(*x.shape[:2], groups, heads // groups).mean(-1)
        root = jnp.repeat(jax.lax.rsqrt(squares + config.norm_eps), heads // groups, axis=2)
        return x * root[..., None] * scale

    if is_exact():
        return by_tiles(run, x, 2, params["norm"])
    return run(x, params["norm"])


def _formula(config: ModelConfig) -> tuple[str, ...]:
    width = config.recurrent.convolution
    return (
        f"C, B, X = silu(convolution of {width} tokens (x W_C, x W_B, x W_X) + b)",
        "Δ = softplus(x W_Δ + c)",
        "S ← exp(-exp(A) Δ) S + B (Δ X)ᵀ",
        "mamba2 = norm((Sᵀ C + D X) silu(x W_Z)) W_O",
    )


MAMBA2 = recurrent_mixer("mamba2", mamba2_specs, mamba2, _formula)
