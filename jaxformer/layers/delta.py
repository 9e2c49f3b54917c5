"""The gated delta rule (arXiv:2412.06464), a mixer: each head keeps a matrix S of what it has read,
in which a token corrects what stands under its key.

    q, k, v = silu(convolution(x W))          over the last tokens of a text, of each channel
    q, k    = q / |q| / √H,  k / |k|
    a       = exp(-exp(A) softplus(x W_a + c))   the decay of a head, or of each channel of a key
    b       = sigmoid(x W_b)                     the rate at which it learns
    S       = a S + b k (v - kᵀ a S)ᵀ
    delta   = (norm(Sᵀ q) silu(x W_g)) W_O

With a decay of each channel it is Kimi Delta Attention (arXiv:2510.26692). It reads tokens in the
order of their rows, whatever their positions, and is causal.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxformer.arrays.params import Params, Spec, Specs, ones
from jaxformer.arrays.sharding import activation, constrain, explicit_axes, free_axes, on_devices
from jaxformer.config.model import ModelConfig
from jaxformer.layers.exchange import CONTEXT, DIVIDED_TOKENS, devices_along
from jaxformer.layers.linear import INITIALIZERS, linear
from jaxformer.layers.norm import rms_norm
from jaxformer.layers.output import Aux, Output
from jaxformer.layers.recurrence import (
    Recurrence,
    last_tokens,
    recur,
    short_convolution,
    state_of_device,
    text_starts,
    tokens_before,
)
from jaxformer.layers.sublayer import Call, Sizes, StoredArray, Sublayer

# Added to the squared length of a query or a key, as in the library of the paper's authors.
SMALLEST_SQUARE = 1e-6


def delta_specs(config: ModelConfig) -> Specs:
    """Return the rows q, k, v and gate, those of their convolutions, decay and rate with what the
    decay has of each head, and norm and out."""
    make = INITIALIZERS[config.init](config)
    d = config.d_model
    n = config.recurrent_heads
    shared = config.recurrent_key_heads
    h = config.recurrent_key_width
    w = config.recurrent_value_width
    width = config.recurrent.convolution
    key = ("kv_heads", "head_dim")
    value = ("heads", "head_dim")
    by_channel = config.recurrent.decay == "channel"
    decayed = (n, h) if by_channel else (n,)
    decay_axes = value if by_channel else ("heads",)

    def into(shape: tuple[int, ...], axes: tuple[str, ...], **what: Any) -> Spec:
        return Spec((d, *shape), ("embed", *axes), make.weight, inputs=("embed",), **what)

    def taps(shape: tuple[int, int], axes: tuple[str, ...]) -> Spec:
        return Spec((*shape, width), (*axes, "tap"), _uniform_taps)

    return {
        "q": into((shared, h), key),
        "k": into((shared, h), key),
        "v": into((n, w), value),
        "gate": into((n, w), value),
        # As with a router, a small error of these is one of all later tokens.
        "decay": into(decayed, decay_axes, quantizable=False),
        "rate": into((n,), ("heads",), quantizable=False),
        "q_taps": taps((shared, h), key),
        "k_taps": taps((shared, h), key),
        "v_taps": taps((n, w), value),
        "step_bias": Spec(decayed, decay_axes, _log_steps),
        "log_speed": Spec((n,), ("heads",), _log_speeds),
        "norm": Spec((w,), ("norm",), ones),
        "out": Spec((n, w, d), (*value, "embed"), make.residual, inputs=value),
    }


def _uniform_taps(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw as PyTorch does the weights of a convolution of one channel."""
    bound = 1 / math.sqrt(spec.shape[-1])
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)


def _log_speeds(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw logarithms of numbers between 1 and 16 (arXiv:2405.21060)."""
    return jnp.log(jax.random.uniform(key, spec.shape, minval=1.0, maxval=16.0))


def _log_steps(key: jax.Array, spec: Spec) -> jax.Array:
    """Draw the inverse of softplus of steps between 0.001 and 0.1, uniform in their logarithm."""
    shortest = math.log(1e-3)
    longest = math.log(0.1)
    step = jnp.exp(jax.random.uniform(key, spec.shape, minval=shortest, maxval=longest))
    return step + jnp.log(-jnp.expm1(-step))


def start(config: ModelConfig, batch: int, slots: int, dtype: DTypeLike) -> dict[str, jax.Array]:
    """Return what is kept of a text: its state [B, N, H, W] float32, the last tokens that the
    convolutions read [B, K - 1, heads, width], and its segment [B]. It does not grow with the
    text."""
    specs = delta_specs(config)
    kept = {
        name: jnp.zeros((batch, config.recurrent.convolution - 1, *specs[name].shape[1:]), dtype)
        for name in ("q", "k", "v")
    }
    n, w, _ = specs["out"].shape
    state = jnp.zeros((batch, n, specs["q"].shape[2], w), jnp.float32)
    state = constrain(state, ("batch", "heads", None, None))
    return kept | {"state": state, "segment": jnp.zeros(batch, jnp.int32)}


def delta(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    """Read the tokens before each in its text, and with a cache those that were read before:
    [B, T, D] -> [B, T, D]."""
    cache = call.cache
    kept = start(config, len(x), 0, x.dtype) if cache is None else cache.kept
    begins, real, segment = text_starts(call.mask, kept["segment"])
    q = linear("BTD,DNH->BTNH", params, "q", x, to=DIVIDED_TOKENS)
    k = linear("BTD,DNH->BTNH", params, "k", x, to=DIVIDED_TOKENS)
    v = linear("BTD,DNH->BTNH", params, "v", x, to=DIVIDED_TOKENS)
    log_decay, rate = decay_and_rate(params, config, x, real)
    log_decay, captures = call.request.apply("delta_log_decay", log_decay)
    rate, captured = call.request.apply("delta_rate", rate)
    captures |= captured
    taps = {name: params[f"{name}_taps"] for name in ("q", "k", "v")}
    kept = {name: array for name, array in kept.items() if name != "segment"}
    read = {"q": q, "k": k, "v": v}, taps, log_decay, rate, begins, real, kept
    out, kept = _placed(config, cache is not None, *read)
    gate = linear("BTD,DNH->BTNH", params, "gate", x, to=DIVIDED_TOKENS).astype(jnp.float32)
    out = rms_norm(out, params["norm"], config.norm_eps) * jax.nn.silu(gate)
    out = linear(
        "BTNH,NHD->BTD", params, "out", out.astype(x.dtype), to=("batch", "sequence", None)
    )
    state, captured = call.request.apply("delta_state", kept["state"])
    captures |= captured
    if cache is not None:
        cache = cache._replace(kept=kept | {"state": state, "segment": segment})
    return Output(out, cache, Aux(captures=captures))


def decay_and_rate(
    params: Params, config: ModelConfig, x: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the logarithm of the decay [B, T, N, G] and the rate [B, T, N] of each token, float32;
    both 0 on padding, which leaves the state as it is."""
    by_channel = config.recurrent.decay == "channel"
    equation = "BTD,DNH->BTNH" if by_channel else "BTD,DN->BTN"
    step = linear(equation, params, "decay", x, point="gate").astype(jnp.float32)
    step = jax.nn.softplus(step + params["step_bias"])
    if not by_channel:
        step = step[..., None]
    rate = jax.nn.sigmoid(
        linear("BTD,DN->BTN", params, "rate", x, point="gate").astype(jnp.float32)
    )
    log_decay = -jnp.exp(params["log_speed"])[:, None] * step
    return jnp.where(real[..., None, None], log_decay, 0), jnp.where(real[..., None], rate, 0)


def _placed(
    config: ModelConfig,
    cached: bool,
    projected: dict[str, jax.Array],
    taps: dict[str, jax.Array],
    *arrays: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Call `_on_device` on the rows, heads and tokens of each device of the mesh in force. With a
    cache each device reads all tokens of its rows, since the state behind the last is kept, and so
    it does where it would have fewer tokens than a convolution reads of the device before it."""
    shape = projected["q"].shape
    batch, tokens, heads, _ = activation(shape, DIVIDED_TOKENS)
    if cached or shape[1] // devices_along(tokens) < config.recurrent.convolution - 1:
        tokens = None
    run = functools.partial(_on_device, config, cached, tokens is not None)
    if math.prod(free_axes().values()) == 1:
        return run(projected, taps, *arrays)
    of_heads = PartitionSpec(batch, tokens, heads)
    of_tokens = PartitionSpec(batch, tokens)
    of_tails = PartitionSpec(batch, None, heads)
    of_kept = {name: of_tails for name in projected} | {"state": PartitionSpec(batch, heads)}
    in_specs = of_heads, PartitionSpec(heads), of_heads, of_heads, of_tokens, of_tokens, of_kept
    read = projected, taps, *arrays
    if explicit_axes():
        # What the layers before have left in another place.
        read = jax.tree.map(_resharded, in_specs, read)
    return on_devices(run, in_specs, (of_heads, of_kept))(*read)


def _resharded(place: PartitionSpec, tree: Any) -> Any:
    return jax.tree.map(lambda array: jax.sharding.reshard(array, place), tree)


def _on_device(
    config: ModelConfig,
    cached: bool,
    divided: bool,
    projected: dict[str, jax.Array],
    taps: dict[str, jax.Array],
    log_decay: jax.Array,
    rate: jax.Array,
    begins: jax.Array,
    real: jax.Array,
    kept: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the sums of values [B, T, N, W] float32 that the tokens of a device read, and what is
    kept behind them. Where tokens are `divided`, those before them are on other devices."""
    tail = config.recurrent.convolution - 1
    begins_before = jnp.zeros((len(begins), tail), bool)
    if divided:
        begins_before = tokens_before(begins, tail)
    convolved = {}
    new = {}
    for name, x in projected.items():
        x = jnp.where(real[..., None, None], x, 0)
        before = tokens_before(x, tail) if divided else kept[name]
        convolved[name] = jax.nn.silu(
            short_convolution(x, taps[name], begins, (before, begins_before))
        )
        new[name] = last_tokens(x, begins, real, before) if cached else kept[name]
    v = convolved["v"]
    q = _unit(convolved["q"]) * convolved["q"].shape[-1] ** -0.5
    k = _unit(convolved["k"])
    # One head of queries and keys serves several of values.
    group = v.shape[2] // k.shape[2]
    q = jnp.repeat(q.astype(v.dtype), group, axis=2)
    k = jnp.repeat(k.astype(v.dtype), group, axis=2)
    read = Recurrence(q, k, v, log_decay, rate, begins)
    chunk = config.recurrent.chunk
    state = state_of_device(read, chunk) if divided else kept["state"]
    out, state = recur(read, state, chunk)
    if divided:
        # That behind the last token of the row.
        is_last = jax.lax.axis_index(CONTEXT) == jax.lax.axis_size(CONTEXT) - 1
        state = jax.lax.psum(jnp.where(is_last, state, 0), CONTEXT)
    return out, new | {"state": state}


def _unit(x: jax.Array) -> jax.Array:
    """Return queries or keys of length 1, float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + SMALLEST_SQUARE)


def _stored(config: ModelConfig, sizes: Sizes) -> list[StoredArray]:
    """Return the products, what the convolutions make of them, and a state for each chunk."""
    specs = delta_specs(config)
    sum_of_widths = 0.0
    arrays = []
    for name in ("q", "k", "v", "gate"):
        _, heads, width = specs[name].shape
        numbers = sizes.tokens * sizes.share(heads) * width
        arrays.append(StoredArray(name, numbers * sizes.number))
        sum_of_widths += numbers
    n, h = specs["out"].shape[0], specs["q"].shape[2]
    out = sizes.tokens * sizes.share(n) * specs["v"].shape[2]
    states = out * h / min(config.recurrent.chunk, sizes.length)
    convolved = StoredArray("convolved", (sum_of_widths - out) * sizes.number)
    # In float32: the states, and the output before its norm.
    return [*arrays, convolved, StoredArray("attention", 4 * states), StoredArray("read", 4 * out)]


def _flops(config: ModelConfig, keys: int | float) -> int | float:
    """Return FLOPs per token of the products inside a chunk and of those with the state, whatever
    the number of tokens before."""
    specs = delta_specs(config)
    n, w, _ = specs["out"].shape
    h = specs["q"].shape[2]
    chunk = config.recurrent.chunk
    # Scores of keys and of queries, half of a square for the solution of both sides, the sum of
    # values; the state is read by queries and keys, and written.
    return n * (2 * chunk * (2 * h + w) + chunk * (h + w) + 6 * h * w)


def _formula(config: ModelConfig) -> tuple[str, ...]:
    width = config.recurrent.convolution
    return (
        f"Q, K, V = silu(convolution of {width} tokens (x W_Q, x W_K, x W_V))",
        "q = q / (|q| √H),  k = k / |k|",
        "a = exp(-exp(A) softplus(x W_a + c)),  b = sigmoid(x W_b)",
        "S ← a S + b k (v - kᵀ a S)ᵀ",
        "delta = (norm(Sᵀ q) silu(x W_G)) W_O",
    )


GATED_DELTA = Sublayer(
    specs=delta_specs,
    apply=delta,
    product="out",
    stored=_stored,
    gradients=("q", "k", "v", "gate", "convolved"),
    formula=_formula,
    scores=_flops,
    start=start,
    in_order=True,
    capture="delta_out",
)
