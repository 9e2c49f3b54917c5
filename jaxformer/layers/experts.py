"""The sublayer of experts: a router sends each token to some of many feed-forward layers, and adds
what they return with its weights (arXiv:1701.06538, 2101.03961, 2401.04088, 2412.19437).

    1  route     scores of all experts for each token, its top k, and their weights
    2  sort      the pairs of a token and an expert by expert, so that each expert has rows in turn
    3  gather    the token of each pair, [M, D]
    4  multiply  grouped products, one matrix for each group of rows (`grouped.py`)
    5  combine   the sum of each token's k rows

Nothing is dropped unless model.experts.capacity is set. Padding is sent to no expert.

In the comments, B are the rows of a batch, T their tokens, N the tokens of a device, E the experts,
K those of a token, M the pairs, D the width of the model and F that of an expert.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxformer.arrays.exact import by_tiles, is_exact, sum_in_order
from jaxformer.arrays.params import Params, Spec, Specs, contract, zeros
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.layers.dispatch import (
    TOKEN_AXES,
    Dispatch,
    Routes,
    expert_sum,
    most_rows,
    sends_rows,
)
from jaxformer.layers.ffn import FEED_FORWARD, ffn, ffn_specs, hidden_of, units
from jaxformer.layers.grouped import GroupedRows
from jaxformer.layers.linear import INITIALIZERS
from jaxformer.layers.masks import AttentionMask
from jaxformer.layers.output import Aux, AuxSums, Output
from jaxformer.layers.sublayer import Call, Sizes, StoredArray, Sublayer

WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
# The gradient of a balanced bias, of which only the sign counts, is so small that it is nothing in
# the norm of all gradients.
BIAS_GRADIENT = 1e-6
# Change of a balanced bias in a step, as in DeepSeek-V3 (arXiv:2412.19437).
BALANCED_RATE = 0.001


def shared_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the shared expert, a plain feed-forward."""
    return with_settings(
        config, {"feed_forward": "ffn", "experts.n": 0, "d_ff": config.experts.shared_ff}
    )


def expert_specs(config: ModelConfig) -> Specs:
    make = INITIALIZERS[config.init](config)
    d = config.d_model
    f = config.expert_width
    e = config.experts.n
    active = config.experts.per_token / e
    into = Spec((e, d, f), ("experts", "embed", "mlp"), make.weight, ("embed",), active=active)
    out = Spec((e, f, d), ("experts", "mlp", "embed"), make.residual, ("mlp",), active=active)
    # "scores" and not "experts": it is an axis of outputs here, and does not count matrices.
    router = Spec((d, e), ("embed", "scores"), make.weight, ("embed",), quantizable=False)
    specs: Specs = {"router": router}
    if config.experts.router_bias != "none":
        rate = BALANCED_RATE if config.experts.router_bias == "balanced" else 0.0
        specs["router_bias"] = Spec((e,), ("scores",), zeros, sign_rate=rate)
    hidden = ("gate", "up") if config.gated else ("up",)
    specs |= {**dict.fromkeys(hidden, into), "down": out}
    if "ffn" in config.biased:
        specs |= {f"{name}_bias": Spec((e, f), ("experts", "mlp"), zeros) for name in hidden}
        specs["down_bias"] = Spec((e, d), ("experts", "residual"), zeros)
    if config.experts.shared_ff:
        specs["shared"] = ffn_specs(shared_config(config))
    if config.experts.shared_gate:
        gate = Spec((d, 1), ("embed", "scores"), make.weight, ("embed",), quantizable=False)
        specs["shared_gate"] = gate
    return specs


def route(
    params: Params,
    config: ModelConfig,
    x: Float[Array, "B T D"],
    mask: AttentionMask,
    capped: bool = True,
) -> tuple[Routes, Aux]:
    """Return the experts of each token with their weights, and the losses and metrics of the
    router; with `capped` an expert takes no more tokens of a row than model.experts.capacity
    says."""
    number = config.experts.n
    k = config.experts.per_token
    logits = contract("BTD,DE->BTE", x, params["router"], dtype=jnp.float32)
    if config.experts.router_bias == "learned":
        logits += params["router_bias"].astype(jnp.float32)
    logits = constrain(logits, TOKEN_AXES)
    # float32 [B, T, E]: in 16 bits a small error would send a token to another expert.
    if config.experts.router == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    elif is_exact():
        scores = by_tiles(jax.nn.softmax, logits, 2)
    else:
        scores = jax.nn.softmax(logits)
    select = scores
    if config.experts.router_bias == "balanced":
        # It selects experts, and the weights are of the scores without it (arXiv:2408.15664).
        select = scores + jax.lax.stop_gradient(params["router_bias"]).astype(jnp.float32)
    if config.experts.groups > 1:
        # Only the groups with the highest sums of their two best scores (arXiv:2412.19437).
        # [B, T, G, E / G], of which `best` has at most two for each group.
        of_group = select.reshape(*select.shape[:-1], config.experts.groups, -1)
        best, _ = jax.lax.top_k(of_group, min(2, of_group.shape[-1]))
        _, chosen = jax.lax.top_k(best.sum(-1), config.experts.top_groups)  # [B, T, top]
        allowed = (chosen[..., None] == jnp.arange(config.experts.groups)).any(-2)  # [B, T, G]
        select = jnp.where(allowed[..., None], of_group, -jnp.inf).reshape(select.shape)
    # [B, T, K], of which only the weights have a gradient.
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(select), k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.experts.renormalize:
        # Sigmoids may all be 0 in float32, and their sum too.
        weights = weights / (sum_in_order(weights, -1)[..., None] + 1e-20)
    weights = weights * config.experts.scale
    segments = mask.queries.segments
    real = jnp.ones(x.shape[:2], bool)
    if segments is not None:
        real = segments != 0
    experts = jnp.where(real[..., None], experts, number)
    kept = experts
    if config.experts.capacity and capped:
        # The first choices of all tokens of a row come before the second ones, in their order.
        b, t, _ = experts.shape
        in_order = experts.swapaxes(1, 2).reshape(b, k * t)  # [B, K T]
        one_hot = in_order[..., None] == jnp.arange(number)  # [B, K T, E]
        before = jnp.cumsum(one_hot, axis=1, dtype=jnp.int32) - 1
        # [B, K T]: how many pairs of the row come before it to the same expert.
        position = jnp.where(one_hot, before, 0).sum(-1)
        kept = jnp.where(position < capacity_of(config, t), in_order, number)
        kept = kept.reshape(b, k, t).swapaxes(1, 2)
    aux = _router_aux(params, config, logits, scores, experts, kept, real)
    return Routes(kept, weights), aux


def capacity_of(config: ModelConfig, length: int) -> int:
    """Return the most tokens of a row of so many that an expert takes. Raises ConfigError below
    1."""
    share = length * config.experts.per_token / config.experts.n
    capacity = math.floor(config.experts.capacity * share)
    if capacity < 1:
        raise ConfigError(
            f"model.experts.capacity={config.experts.capacity:g} lets an expert take"
            f" {config.experts.capacity * share:.2g} tokens of a row of {length}, below 1: the mean"
            f" is {share:.3g} tokens, so set it to {1 / share:.3g} or more, or to 0, which drops"
            " none."
        )
    return capacity


def _router_aux(
    params: Params,
    config: ModelConfig,
    logits: jax.Array,
    scores: jax.Array,
    experts: jax.Array,
    kept: jax.Array,
    real: jax.Array,
) -> Aux:
    """Return the loss of the router, and its metrics. A load or a loss of 1 is that of equal use.

    balance   E sum_e f_e p_e, of the fraction f of the tokens that are routed to an expert and the
              mean p of its probabilities, over all tokens (arXiv:2101.03961, 2401.06066)
    z         mean of logsumexp(logits)^2 (arXiv:2202.08906)
    """
    number = config.experts.n
    k = config.experts.per_token
    # [B, T, E], which sum to 1: sigmoids do not by themselves.
    probabilities = scores
    if config.experts.router == "sigmoid":
        probabilities = scores / scores.sum(-1, keepdims=True)
    # [B, T, E]: whether the token is routed to the expert; no row has E, where padding is.
    routed = (experts[..., None] == jnp.arange(number)).any(-2)
    tokens = real.sum(-1).astype(jnp.float32)  # [B]
    total = jnp.maximum(tokens.sum(), 1)
    counts = routed.sum(1).astype(jnp.float32)  # [B, E]
    sums = jnp.where(real[..., None], probabilities, 0).sum(1)  # [B, E]
    load = counts.sum(0) * number / (k * total)  # [E]
    balance = (load * sums.sum(0)).sum() / total
    z = jnp.where(real, jnp.square(jax.nn.logsumexp(logits, axis=-1)), 0).sum() / total
    # p log p [B, T, E], which xlogy has as 0 for p = 0.
    entropies = -jax.scipy.special.xlogy(probabilities, probabilities).sum(-1)
    entropy = jnp.where(real, entropies, 0).sum() / total
    dropped = (kept != experts).sum() / (k * total)
    loss = config.experts.balance_loss * balance + config.experts.z_loss * z
    if config.experts.router_bias == "balanced":
        bias = params["router_bias"].astype(jnp.float32)
        # 0, with the load above the mean as the gradient of the bias.
        moved = bias - jax.lax.stop_gradient(bias)
        loss += BIAS_GRADIENT * (jax.lax.stop_gradient(load - 1) * moved).sum()
    one = jnp.float32(1)
    metrics: AuxSums = {
        "router_balance": (balance, one),
        "router_z": (z, one),
        "router_entropy": (entropy, one),
        "expert_dropped": (dropped, one),
        "expert_load_max": (load.max(), one),
        "expert_load_min": (load.min(), one),
        **{f"expert_load_{e}": (load[e], one) for e in range(number)},
    }
    losses: AuxSums = {"router_loss": (loss, one)}
    stopped = {name: (jax.lax.stop_gradient(value), w) for name, (value, w) in metrics.items()}
    return Aux(losses=losses, metrics=stopped)


def _added_bias(y: jax.Array, bias: jax.Array | None, sizes: jax.Array) -> jax.Array:
    """Return rows [M, F] plus the bias [E, F] of the expert of each, by a product, whose gradient
    adds in one order. Rows without an expert, which may be anything, are 0."""
    if bias is None:
        return y
    ends = jnp.cumsum(sizes)
    index = jnp.arange(len(y))[:, None]
    of_expert = (index >= ends - sizes) & (index < ends)  # [M, E]
    biased = y + of_expert.astype(y.dtype) @ bias.astype(y.dtype)
    return jnp.where(index < ends[-1], biased, 0)


def _expert_rows(
    config: ModelConfig, weights: Params, rows: jax.Array, scale: jax.Array, groups: GroupedRows
) -> jax.Array:
    """Return the rows [M, D] of each expert through its feed-forward, times `scale` [M]: [M, D].
    The hidden rows are scaled, so that the backward pass reads no output of an expert."""

    def linear(name: str, x: jax.Array, equation: str) -> jax.Array:
        y = checkpoint_name(contract(equation, x, weights[name], groups=groups), name)
        return _added_bias(y, weights.get(f"{name}_bias"), groups.sizes)

    up = linear("up", rows, "MD,EDF->MF")  # [M, F]
    gate = linear("gate", rows, "MD,EDF->MF") if config.gated else None
    hidden = hidden_of(config, units(config, up, gate), up)
    scale = scale.astype(hidden.dtype)[:, None]
    hidden = checkpoint_name(hidden * scale, "hidden")
    y = contract("MF,EFD->MD", hidden, weights["down"], groups=groups)
    bias = weights.get("down_bias")
    if bias is not None:
        # Scaled as the product is, which had its scale before.
        added = _added_bias(jnp.zeros_like(y), bias, groups.sizes)
        if is_exact():
            # A compiler may round once or twice here, which it decides by the number of rows.
            y = by_tiles(_scaled_sum, jnp.concatenate([y, added, scale], axis=-1), 1)
        else:
            y = y + scale * added
    return y


def _scaled_sum(rows: jax.Array) -> jax.Array:
    """Map rows of y, added and scale [M, D + D + 1] -> y + scale added, [M, D]."""
    width = rows.shape[-1] // 2
    return rows[:, :width] + rows[:, -1:] * rows[:, width:-1]


def dispatch_of(config: ModelConfig, length: int, capped: bool) -> Dispatch:
    """Return how the tokens of rows of so many find their experts."""
    capacity = capacity_of(config, length) if config.experts.capacity and capped else 0
    return Dispatch(config.experts.n, config.experts.kernel, capacity)


def _apply(params: Params, config: ModelConfig, x: jax.Array, call: Call) -> Output:
    # A call with a cache has a few tokens of each row, of which none is dropped.
    capped = call.cache is None
    routes, aux = route(params, config, x, call.mask, capped)
    dispatch = dispatch_of(config, x.shape[1], capped)
    weights = {name: params[name] for name in WEIGHTS if name in params}
    run = functools.partial(_expert_rows, config)
    y = expert_sum(run, weights, expert_specs(config), x, routes, dispatch)
    y = checkpoint_name(y, "down")
    if config.experts.shared_ff:
        shared = ffn(params["shared"], shared_config(config), x)
        if config.experts.shared_gate:
            gate = contract("BTD,DE->BTE", x, params["shared_gate"], dtype=jnp.float32)
            shared = shared * jax.nn.sigmoid(gate).astype(shared.dtype)  # [B, T, 1]
        y = y + shared
    return Output(y, call.cache, aux)


def _stored(config: ModelConfig, sizes: Sizes) -> list[StoredArray]:
    # The devices that divide the experts have different tokens, all of which may come to one.
    pairs = most_rows(
        sizes.tokens * sizes.expert,
        sizes.rows * sizes.expert,
        config.experts.per_token,
        dispatch_of(config, sizes.length * sizes.context, capped=True),
        sizes.expert,
    )
    hidden = pairs * sizes.share(config.expert_width) * sizes.number
    names = ("gate", "up", "hidden") if config.gated else ("up", "hidden")
    arrays = [StoredArray(name, hidden) for name in names]
    wide = config.d_model * sizes.number
    arrays.append(StoredArray("gathered rows", pairs * wide))
    k = config.experts.per_token
    if sizes.expert > 1 and not sends_rows(k, sizes.expert):
        # The rows of the tokens of all devices, before they are added up.
        arrays.append(StoredArray("rows of tokens", sizes.tokens * sizes.expert * k * wide))
    if config.experts.shared_ff:
        arrays += FEED_FORWARD.stored(shared_config(config), sizes)
    return arrays


def _formula(config: ModelConfig) -> tuple[str, ...]:
    bias = " + b" if config.experts.router_bias == "learned" else ""
    scores = f"s = {config.experts.router}(x W_router{bias})"
    chosen = "s + b" if config.experts.router_bias == "balanced" else "s"
    groups = ""
    if config.experts.groups > 1:
        groups = f" in {config.experts.top_groups} of {config.experts.groups} groups"
    weight = "s_e / Σ s" if config.experts.renormalize else "s_e"
    scale = f"{config.experts.scale:g} " if config.experts.scale != 1 else ""
    gate = " · sigmoid(x w_shared)" if config.experts.shared_gate else ""
    shared = f" + shared(x){gate}" if config.experts.shared_ff else ""
    (dense,) = FEED_FORWARD.formula(config)
    return (
        f"{scores},  e = top {config.experts.per_token} of {config.experts.n} by {chosen}{groups}",
        f"experts = Σ_e {scale}{weight} · expert_e(x){shared}",
        dense.replace("ffn =", "expert ="),
    )


EXPERTS = Sublayer(
    specs=expert_specs,
    apply=_apply,
    product="down",
    stored=_stored,
    gradients=("gate", "up", "gathered rows", "rows of tokens"),
    formula=_formula,
    # It draws nothing, but runs have had a key for it: without, their dropout would change.
    draws=True,
    capture="mlp_out",
)
