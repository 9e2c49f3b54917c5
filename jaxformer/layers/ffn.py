"""The feed-forward sublayer: plain or gated, with any activation of the table."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params, Spec, Specs, contract, zeros
from jaxformer.arrays.sharding import platform
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import Activation
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.output import NOTHING, Aux, Captures, Output, Request
from jaxformer.layers.sublayer import Call, Sizes, StoredArray, Sublayer, biased_text


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Return x Phi(x), exact by the error function (arXiv:1606.08415)."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


@gelu.defjvp
def _gelu_tangent(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    """Return the derivative Phi(x) + x phi(x), from x alone. Phi is written with erf(-x / sqrt(2)):
    for a CPU, XLA would otherwise keep erf(x / sqrt(2)) of the forward pass. On two cores of an AMD
    EPYC with AVX-512 the small step of benchmarks/train_cpu.py in 1 microbatch takes 1.69 GB, with
    `jax.nn.gelu` 2.04 GB, and is 1.03 times as fast (0.98 to 1.11, 12 samples in turn)."""
    (x,) = primals
    (tangent,) = tangents
    phi = jnp.exp(-0.5 * jnp.square(x)) / math.sqrt(2 * math.pi)
    slope = 0.5 * (1 - jax.lax.erf(-x * math.sqrt(0.5))) + x * phi
    return gelu(x), slope * tangent


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
    (arXiv:1606.08415). The tanh is faster on a CPU; a GPU writes it and reads it again, and the
    sigmoid not: 4 of the 104 ms of a step of gpt2_124m on an H100, by the count of
    benchmarks/compiled.py."""
    if platform() == "cpu":
        return jax.nn.gelu(x)
    return x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def relu2(x: jax.Array) -> jax.Array:
    """Return max(x, 0)^2 (arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


def quick_gelu(x: jax.Array) -> jax.Array:
    """Return x sigmoid(1.702 x) (arXiv:1606.08415, CLIP's)."""
    return x * jax.nn.sigmoid(1.702 * x)


CLAMP = 7.0  # of swiglu_clamped


def clamped_swish(gate: jax.Array) -> jax.Array:
    """Return g sigmoid(1.702 g), g = min(gate, 7) (gpt-oss, arXiv:2508.10925)."""
    gate = jnp.minimum(gate, CLAMP)
    return gate * jax.nn.sigmoid(1.702 * gate)


# Activations of the hidden layer, or of the gate for the names in `config.variants.GATED`.
ACTIVATIONS: Table[Callable[[jax.Array], jax.Array]] = Table(
    Activation,
    {
        "swiglu": jax.nn.silu,
        "swiglu_clamped": clamped_swish,
        "geglu": gelu,
        "geglu_tanh": gelu_tanh,
        "reglu": jax.nn.relu,
        "glu": jax.nn.sigmoid,
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "relu": jax.nn.relu,
        "silu": jax.nn.silu,
        "relu2": relu2,
        "tanh": jnp.tanh,
        "quick_gelu": quick_gelu,
    },
)


def units(config: ModelConfig, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Return the activations of the units: act(up), or act(gate)."""
    return ACTIVATIONS[config.activation](up if gate is None else gate)


def hidden_of(config: ModelConfig, active: jax.Array, up: jax.Array) -> jax.Array:
    """Return the hidden layer from its activated units, which a gate multiplies with what it has of
    up."""
    if not config.gated:
        return active
    if config.activation == "swiglu_clamped":
        # gpt-oss adds 1, so that a unit passes its gate on where up is 0.
        up = jnp.clip(up, -CLAMP, CLAMP) + 1
    return active * up


def swiglu(
    x: Float[Array, "... D"],
    gate: Float[Array, "D F"],
    up: Float[Array, "D F"],
    down: Float[Array, "F D"],
) -> Float[Array, "... D"]:
    """Return (silu(x gate) * (x up)) down: [..., D], [D, F], [D, F], [F, D] -> [..., D]
    (arXiv:2002.05202)."""
    rows = x.reshape(-1, x.shape[-1])  # [T, D], T of all leading axes
    hidden = jax.nn.silu(contract("TD,DF->TF", rows, gate)) * contract("TD,DF->TF", rows, up)
    return contract("TF,FD->TD", hidden, down).reshape(x.shape)


def ffn_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    d = config.d_model
    f = config.ff_width
    into = Spec((d, f), ("embed", "mlp"), make.weight, inputs=("embed",))
    specs: Specs = {"gate": into, "up": into} if config.gated else {"up": into}
    specs["down"] = Spec((f, d), ("mlp", "embed"), make.residual, inputs=("mlp",))
    if "ffn" in config.biased:
        hidden = ("gate", "up") if config.gated else ("up",)
        specs |= {f"{name}_bias": Spec((f,), ("mlp",), zeros) for name in hidden}
        specs["down_bias"] = Spec((d,), ("residual",), zeros)
    return specs


def ffn(params: Params, config: ModelConfig, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Map [B, T, D] -> [B, T, D]: down(act(up x)), or down(act(gate x) * up x)."""
    return captured_ffn(params, config, x, NOTHING)[0]


def captured_ffn(
    params: Params, config: ModelConfig, x: Float[Array, "B T D"], request: Request
) -> tuple[Float[Array, "B T D"], Captures]:
    """Return `ffn`, and the activations of its units [B, T, F] as "mlp_units" where they are asked
    for."""
    up = linear("BTD,DF->BTF", params, "up", x)
    gate = linear("BTD,DF->BTF", params, "gate", x) if config.gated else None
    active, captures = request.apply("mlp_units", units(config, up, gate))
    # Behind the capture: a replaced unit has its effect on all that reads it.
    hidden = checkpoint_name(hidden_of(config, active, up), "hidden")
    return linear("BTF,FD->BTD", params, "down", hidden, to=("batch", "sequence", None)), captures


def _apply(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    y, captures = captured_ffn(params, config, x, call.request)
    return Output(y, call.cache, Aux(captures=captures))


def _stored(config: ModelConfig, sizes: Sizes) -> list[StoredArray]:
    # [B, T, F] each: the products before the activation, and the input of the last product.
    hidden = sizes.tokens * sizes.share(config.ff_width) * sizes.number
    names = ("gate", "up", "hidden") if config.gated else ("up", "hidden")
    return [StoredArray(name, hidden) for name in names]


# In formulas; the others are written as they are named.
ACTIVATION_TEXTS = {
    "swiglu": "silu",
    "swiglu_clamped": "clamped_swish",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "relu2": "relu²",
}


def _formula(config: ModelConfig) -> tuple[str, ...]:
    act = ACTIVATION_TEXTS.get(config.activation, config.activation)
    up = f"x W_up{biased_text(config, 'ffn')}"
    down = f"W_down{biased_text(config, 'ffn', 'c')}"
    if config.gated:
        gate = f"x W_gate{biased_text(config, 'ffn', 'a')}"
        factor = f"clip({up}, ±7) + 1" if config.activation == "swiglu_clamped" else up
        return (f"ffn = ({act}({gate}) ⊙ ({factor})) {down}",)
    return (f"ffn = {act}({up}) {down}",)


FEED_FORWARD = Sublayer(
    specs=ffn_specs,
    apply=_apply,
    product="down",
    stored=_stored,
    gradients=("gate", "up", "hidden"),
    formula=_formula,
    capture="mlp_out",
)
