"""The loss of a model that learns from rewards of its own texts, over batches that
`runs/rollouts.py` makes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.arrays.exact import exactly
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import GRPOConfig
from jaxformer.layers.head import output_layer, readout
from jaxformer.layers.output import Aux
from jaxformer.losses.cross_entropy import token_log_probs
from jaxformer.models.inputs import inputs_of
from jaxformer.models.transformer import hidden
from jaxformer.training.step import Batch, Sums


def policy_log_probs(
    params: Params, config: ModelConfig, batch: Batch, temperature: float = 1.0
) -> tuple[Float[Array, "B T"], Aux]:
    """Return the log-probability of each target of a batch with tokens and targets [B, T], float32,
    as it is drawn at a temperature, and the `Aux` of the layers; without dropout."""
    inputs = inputs_of(batch)
    x, _, aux = hidden(params, config, inputs)
    layer = output_layer(params, config, readout(params, config, x, inputs.layout))
    with exactly(config.exact):
        log_probs = token_log_probs(
            layer, batch["targets"], temperature=temperature, soft_cap=config.head.soft_cap
        )
    return log_probs, aux


# Of the loss where a caller gives none.
DEFAULTS = GRPOConfig()


def grpo_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    grpo: GRPOConfig = DEFAULTS,
) -> Sums:
    """Return the loss of group relative policy optimization (arXiv:2402.03300, eq. 3) as sums.

    With pi the probability of a token, pi_old that when it was drawn, A the advantage of its answer
    and r = pi / pi_old, the loss of a token is

        -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl (pi_ref / pi - log(pi_ref / pi) - 1).

    The batch has tokens, targets, weights [B, T] (1 on the tokens of an answer), segment_ids,
    advantages and rewards [B], and the log-probabilities sampled_log_probs and, if `grpo.kl` is
    not 0, reference_log_probs [B, T]. `grpo.lengths` says by what the sum over tokens is
    divided: "answer" by the length of each answer, and then by their number (GRPO), "tokens" by the
    tokens of all answers, and "constant" by the number of answers times `grpo.new_tokens`
    (Dr. GRPO, arXiv:2503.20783). A row that is padding alone is no answer.

    "kl" is the mean of the last term over tokens, without its factor, "clipped" the fraction of
    tokens whose ratio is clipped, "reward" the mean reward, "answer_length" the mean number of
    tokens. "mismatch_kl" is the mean over tokens of r - log r - 1, of the cached pass that drew an
    answer and of the forward pass of the same parameters at temperature 1, of which the batch has
    the sum of each answer, mismatch [B]: 0 but for rounding. Losses and metrics of the layers are
    there by name.
    """
    weights = jnp.asarray(batch["weights"], jnp.float32)
    advantages = jnp.asarray(batch["advantages"])[:, None]
    # [B, T]
    now, aux = policy_log_probs(params, config, batch, grpo.temperature)
    change = jnp.where(weights > 0, now - batch["sampled_log_probs"], 0)
    ratio = jnp.exp(change)
    high = grpo.clip_high or grpo.clip
    clipped = jnp.clip(ratio, 1 - grpo.clip, 1 + high)
    losses = -jnp.minimum(ratio * advantages, clipped * advantages)
    tokens = weights.sum()
    answers = jnp.asarray(batch["segment_ids"]).any(axis=1).sum(dtype=jnp.float32)
    sums = {
        "clipped": ((weights * (clipped * advantages < ratio * advantages)).sum(), tokens),
        "reward": (batch["rewards"].sum(), answers),
        "answer_length": (tokens, answers),
        "mismatch_kl": (batch["mismatch"].sum(), tokens),
    }
    if grpo.kl:
        behind = jnp.where(weights > 0, batch["reference_log_probs"] - now, 0)
        divergence = jnp.exp(behind) - behind - 1
        losses += grpo.kl * divergence
        sums["kl"] = ((weights * divergence).sum(), tokens)
    # [B]
    of_answers = (weights * losses).sum(axis=1)
    count = answers
    if grpo.lengths == "answer":
        of_answers = of_answers / jnp.maximum(weights.sum(axis=1), 1)
    elif grpo.lengths == "tokens":
        count = tokens
    else:
        count = count * grpo.new_tokens
    objective = aux.added(of_answers.sum(), count)
    return {"loss": (objective, count), **aux.losses, **aux.metrics, **sums}
