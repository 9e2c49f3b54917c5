"""The loss of a model that learns from rewards of its own texts, over batches that
`runs/rollouts.py` makes."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import GRPOConfig
from jaxformer.layers.head import output_layer, readout
from jaxformer.losses.cross_entropy import token_log_probs
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.training.step import Batch, Sums


def policy_log_probs(
    params: Params, config: ModelConfig, batch: Batch, temperature: float = 1.0
) -> Float[Array, "B T"]:
    """Return the log-probability of each target of a batch with tokens and targets [B, T], float32,
    as it is drawn at a temperature; without dropout."""
    inputs = inputs_of(batch)
    x = hidden(params, config, inputs).x
    layer = output_layer(params, config, readout(params, config, x, inputs.layout))
    return token_log_probs(
        layer, batch["targets"], temperature=temperature, soft_cap=config.head.soft_cap
    )


def grpo_loss(params: Params, config: ModelConfig, batch: Batch, settings: GRPOConfig) -> Sums:
    """Return the loss of group relative policy optimization (arXiv:2402.03300, eq. 3) as sums.

    With pi the probability of a token, pi_old that when it was drawn, A the advantage of its answer
    and r = pi / pi_old, the loss of a token is

        -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl (pi_ref / pi - log(pi_ref / pi) - 1).

    The batch has tokens, targets, weights [B, T] (1 on the tokens of an answer), segment_ids,
    advantages and rewards [B], and the log-probabilities sampled_log_probs and, if `settings.kl` is
    not 0, reference_log_probs [B, T]. `settings.lengths` says by what the sum over tokens is
    divided: "answer" by the length of each answer, and then by their number (GRPO), "tokens" by the
    tokens of all answers, and "constant" by the number of answers times `settings.new_tokens`
    (Dr. GRPO, arXiv:2503.20783).

    "kl" is the mean of the last term over tokens, without its factor, "clipped" the fraction of
    tokens whose ratio is clipped, "reward" the mean reward. With the log-probabilities at
    temperature 1 of the cached pass that drew the answers, drawn_log_probs, and of the forward pass
    of the same parameters, forward_log_probs [B, T], "mismatch_kl" is the mean of r - log r - 1
    of these: 0 but for rounding.
    """
    weights = jnp.asarray(batch["weights"], jnp.float32)
    advantages = jnp.asarray(batch["advantages"])[:, None]
    # [B, T]
    now = policy_log_probs(params, config, batch, settings.temperature)
    change = jnp.where(weights > 0, now - batch["sampled_log_probs"], 0)
    ratio = jnp.exp(change)
    high = settings.clip_high or settings.clip
    clipped = jnp.clip(ratio, 1 - settings.clip, 1 + high)
    losses = -jnp.minimum(ratio * advantages, clipped * advantages)
    tokens = weights.sum()
    sums = {
        "clipped": ((weights * (clipped * advantages < ratio * advantages)).sum(), tokens),
        "reward": (batch["rewards"].sum(), jnp.float32(len(weights))),
    }
    if "drawn_log_probs" in batch:
        error = batch["forward_log_probs"] - batch["drawn_log_probs"]
        sums["mismatch_kl"] = ((weights * (jnp.expm1(error) - error)).sum(), tokens)
    if settings.kl:
        behind = jnp.where(weights > 0, batch["reference_log_probs"] - now, 0)
        divergence = jnp.exp(behind) - behind - 1
        losses += settings.kl * divergence
        sums["kl"] = ((weights * divergence).sum(), tokens)
    # [B]
    of_answers = (weights * losses).sum(axis=1)
    count = jnp.float32(len(weights))
    if settings.lengths == "answer":
        of_answers = of_answers / jnp.maximum(weights.sum(axis=1), 1)
    elif settings.lengths == "tokens":
        count = tokens
    else:
        count = count * settings.new_tokens
    return {"loss": (of_answers.sum(), count), **sums}
