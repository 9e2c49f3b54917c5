"""Losses of pairs, whose two sequences stand on the second axis of a batch, and go through the
model as 2 B sequences. A loss is a sum over pairs.

preferences  Two completions of one prompt, of which the first is preferred to the second. A batch
             holds tokens, targets and weights [B, 2, T] (and segment_ids): the chosen and the
             rejected completion, each after the prompt; weights are 1 for targets of the completion
             and 0 for those of the prompt.
kto          A completion of a prompt that is desirable or not, [B, 2, T] with "desirable" [B]: the
             second sequence is the same prompt with the completion of another one.
contrastive  Two texts that belong together, each told from the others of the batch. A batch holds
             tokens and segment_ids [B, 2 + N, T] (and token_types): a text, the anchor, one that
             belongs to it, its positive, and N that do not, its hard negatives. The positives of
             the other pairs, and the hard negatives of all, are its negatives.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import constrain
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import TrainConfig
from jaxformer.files import ConfigError
from jaxformer.layers.head import output_layer, readout
from jaxformer.layers.output import Aux
from jaxformer.losses.cross_entropy import row_nats
from jaxformer.models.inputs import INPUT_NAMES, Inputs, inputs_of
from jaxformer.models.text_vectors import of_length_1, row_vectors
from jaxformer.models.transformer import hidden
from jaxformer.training.step import Batch, Sums

# The arrays of a batch with the log-probabilities of the reference, [B] float32 each.
REFERENCE_ARRAYS = ("reference_chosen", "reference_rejected")
# Mean log-probabilities are cut off at this value, so that the odds of a certain text are finite.
LARGEST_LOG_PROB = -1e-6

ReferenceOf = Callable[[Params], Params]


class PairScores(NamedTuple):
    """The scores of the completions of a batch, float32 [B, 2], chosen first: the sum of the
    log-probabilities of their tokens, and the number of these tokens (both 0 in a row that only
    fills a batch); and the `Aux` of the layers."""

    log_probs: Float[Array, "B 2"]
    lengths: Float[Array, "B 2"]
    aux: Aux

    @property
    def means(self) -> Float[Array, "B 2"]:
        """The mean log-probability of a token of each completion."""
        return self.log_probs / jnp.maximum(self.lengths, 1)


def pairs_of(
    params: Params, config: ModelConfig, batch: Batch, key: jax.Array | None = None
) -> PairScores:
    """Return the scores of a batch of pairs under a model; a key turns dropout on."""
    targets = jnp.asarray(batch["targets"])
    weights = jnp.asarray(batch["weights"])
    x, inputs, aux = _both_hidden(params, config, batch, key)
    rows, matrix, bias = output_layer(params, config, readout(params, config, x, inputs.layout))
    # [2 B]: one number for each completion.
    nats = row_nats(
        rows,
        matrix,
        _sequences(targets),
        _sequences(weights),
        bias=bias,
        soft_cap=config.head.soft_cap,
    )
    return PairScores(-nats.reshape(-1, 2), weights.sum(axis=-1, dtype=jnp.float32), aux)


def _sequences(array: Any) -> jax.Array:
    """Return [S B, T] of [B, S, T], in an order in which rows stay on their device."""
    return jnp.asarray(array).reshape(-1, jnp.shape(array)[-1])


def _both_hidden(
    params: Params, config: ModelConfig, batch: Batch, key: jax.Array | None
) -> tuple[Float[Array, "S T D"], Inputs, Aux]:
    """Return the residual stream of both sequences of all pairs, S = 2 B, or of more, what the
    model read, and the `Aux` of its layers."""
    arrays = {name: _sequences(batch[name]) for name in INPUT_NAMES if name in batch}
    inputs = inputs_of(arrays)
    x, _, aux = hidden(params, config, inputs, key=key if config.has_dropout else None)
    return x, inputs, aux


def reference_log_probs(params: Params, config: ModelConfig, batch: Batch) -> dict[str, jax.Array]:
    """Return the arrays that "dpo" and "ipo" compare a model with: for a batch of pairs the sums of
    the log-probabilities of the completions under the params of the reference.

    "reference_chosen" and "reference_rejected", float32 [B] each, belong into the batch, as in
    `batch | jf.reference_log_probs(reference, config, batch)`. A pure function without dropout, to
    be jitted with `static_argnums=1`.
    """
    log_probs = pairs_of(params, config, batch).log_probs
    return {name: log_probs[:, side] for side, name in enumerate(REFERENCE_ARRAYS)}


def dpo_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    beta: float = 0.1,
    reference_of: ReferenceOf | None = None,
) -> Sums:
    """Return the loss of direct preference optimization (arXiv:2305.18290, eq. 7), a sum over
    pairs.

    loss = -log sigmoid(beta (h_chosen - h_rejected)), h = log pi(y|x) - log pi_ref(y|x), each a sum
    over the tokens of a completion. The reference is that of the arrays of `reference_log_probs` in
    the batch; without these, the params that `reference_of` makes of those of the model, as those
    without an adapter.
    """
    pairs, reference = _with_reference(params, config, batch, key, reference_of)
    rewards = beta * (pairs.log_probs - reference)
    return _sums(pairs, -jax.nn.log_sigmoid(_margin(rewards)), rewards, reference)


def ipo_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    beta: float = 0.1,
    reference_of: ReferenceOf | None = None,
) -> Sums:
    """Return the loss of identity preference optimization (arXiv:2310.12036, eq. 17, whose tau is
    beta), a sum over pairs.

    loss = (h_chosen - h_rejected - 1 / (2 beta))^2, h = (log pi(y|x) - log pi_ref(y|x)) / |y|. As
    in TRL, h is a mean over the tokens of a completion, not a sum; the authors of IPO confirmed
    this to the developers of TRL. The reference is that of `dpo_loss`.
    """
    pairs, reference = _with_reference(params, config, batch, key, reference_of)
    ratios = pairs.log_probs - reference
    # [B, 2]
    means = ratios / jnp.maximum(pairs.lengths, 1)
    losses = jnp.square(_margin(means) - 1 / (2 * beta))
    return _sums(pairs, losses, beta * ratios, reference)


def orpo_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    beta: float = 0.1,
) -> Sums:
    """Return the loss of odds ratio preference optimization (arXiv:2403.07691, eq. 6, whose lambda
    is beta), a sum over pairs, without a reference.

    loss = -log P(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)), with log P the
    mean log-probability of the tokens of a completion and odds = P / (1 - P). The first term is of
    the completion alone, as in the paper; TRL's includes the prompt.
    """
    pairs = pairs_of(params, config, batch, key)
    losses = -pairs.means[:, 0] - beta * jax.nn.log_sigmoid(_margin(log_odds(pairs.means)))
    return _sums(pairs, losses, beta * pairs.means)


def simpo_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    beta: float = 2.0,
    margin: float = TrainConfig.preference_margin,
) -> Sums:
    """Return the loss of simple preference optimization (arXiv:2405.14734, eq. 6), a sum over
    pairs, without a reference.

    loss = -log sigmoid(beta (m_chosen - m_rejected) - gamma), with m the mean log-probability of
    the tokens of a completion and gamma = `margin` beta the target margin of the rewards beta m.
    """
    pairs = pairs_of(params, config, batch, key)
    losses = -jax.nn.log_sigmoid(beta * (_margin(pairs.means) - margin))
    return _sums(pairs, losses, beta * pairs.means)


def kto_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    beta: float = 0.1,
    desirable: float = TrainConfig.preference_desirable,
    undesirable: float = TrainConfig.preference_undesirable,
    reference_of: ReferenceOf | None = None,
) -> Sums:
    """Return the loss of Kahneman-Tversky optimization (arXiv:2402.01306, eq. 8), a sum over
    completions, each of which is desirable or not by itself.

    With h = log pi(y|x) - log pi_ref(y|x), loss = desirable (1 - sigmoid(beta (h - z))) of a
    completion that is desirable, and undesirable (1 - sigmoid(beta (z - h))) of another. z, which
    has no gradient, is an estimate of KL(pi || pi_ref): the mean of h, at least 0, of the second
    sequences of the batch, whose completions belong to other prompts. The batch has "desirable"
    float [B], 1 or 0, and its sequences and reference are those of `dpo_loss`. z is that of the
    microbatch, on all devices.
    """
    scores, reference = _with_reference(params, config, batch, key, reference_of)
    ratios = scores.log_probs - reference
    # [B]: a row that only fills a batch has no tokens.
    real = (scores.lengths[:, 0] > 0).astype(jnp.float32)
    count = real.sum()
    kl = jnp.maximum((real * ratios[:, 1]).sum() / jnp.maximum(count, 1), 0)
    kl = jax.lax.stop_gradient(kl)
    good = real * batch["desirable"]
    bad = real - good
    reward = beta * ratios[:, 0]
    losses = desirable * good * jax.nn.sigmoid(beta * kl - reward)
    losses += undesirable * bad * jax.nn.sigmoid(reward - beta * kl)
    return {
        "loss": (scores.aux.added(losses.sum(), count), count),
        **scores.aux.losses,
        **scores.aux.metrics,
        "reward_desirable": ((good * reward).sum(), good.sum()),
        "reward_undesirable": ((bad * reward).sum(), bad.sum()),
        "kl": (kl * count, count),
    }


def log_odds(log_probs: jax.Array) -> jax.Array:
    """Return log(p / (1 - p)) of log p < 0, of any shape, finite for p = 1 too."""
    log_p = jnp.minimum(log_probs, LARGEST_LOG_PROB)
    # log(1 - p) by whichever of the two functions is free of cancellation. The other one reads the
    # limit, so that its gradient is finite.
    limit = -math.log(2)
    near = log_p > limit
    small = jnp.log1p(-jnp.exp(jnp.where(near, limit, log_p)))
    large = jnp.log(-jnp.expm1(jnp.where(near, log_p, limit)))
    return log_p - jnp.where(near, large, small)


def _margin(values: jax.Array) -> jax.Array:
    """Return chosen minus rejected: [B, 2] -> [B]."""
    return values[:, 0] - values[:, 1]


def _with_reference(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None,
    reference_of: ReferenceOf | None,
) -> tuple[PairScores, jax.Array]:
    """Return the scores under the model, and the log-probabilities [B, 2] under the reference."""
    if all(name in batch for name in REFERENCE_ARRAYS):
        columns = [jnp.asarray(batch[name], jnp.float32) for name in REFERENCE_ARRAYS]
        reference = jnp.stack(columns, axis=-1)
    elif reference_of is not None:
        frozen = jax.lax.stop_gradient(reference_of(params))
        reference = pairs_of(frozen, config, batch).log_probs
    else:
        raise ConfigError(
            "the objectives dpo, ipo and kto compare a model with a reference, and the batch has no"
            f" {' and '.join(REFERENCE_ARRAYS)}: add them by jf.reference_log_probs, give the run"
            " a run.init_from, or choose orpo or simpo, which need none."
        )
    return pairs_of(params, config, batch, key), jax.lax.stop_gradient(reference)


def _sums(
    pairs: PairScores, losses: jax.Array, rewards: jax.Array, reference: jax.Array | None = None
) -> Sums:
    """Return the loss and the metrics as sums over pairs, from the losses [B] of the pairs; the
    weight is the number of pairs.

    reward_margin is that of the rewards [B, 2], chosen minus rejected, and reward_accuracy how
    often it is positive; log_prob_chosen and log_prob_rejected are sums over the tokens of a
    completion.
    With a reference, kl is the mean of log pi - log pi_ref over the tokens of chosen completions.
    It would be the KL divergence if the model had generated these, and may be negative.
    """
    # [B]: a row that only fills a batch has no tokens.
    real = (pairs.lengths.max(axis=-1) > 0).astype(jnp.float32)
    count = real.sum()
    margin = _margin(rewards)
    objective = pairs.aux.added((real * losses).sum(), count)
    figures = {
        "reward_margin": margin,
        "reward_accuracy": margin > 0,
        "log_prob_chosen": pairs.log_probs[:, 0],
        "log_prob_rejected": pairs.log_probs[:, 1],
    }
    sums = {"loss": (objective, count), **pairs.aux.losses, **pairs.aux.metrics}
    sums |= {name: ((real * value).sum(), count) for name, value in figures.items()}
    if reference is not None:
        ratios = pairs.log_probs - reference
        sums["kl"] = (ratios[:, 0].sum(), pairs.lengths[:, 0].sum())
    return sums


def contrastive_loss(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    key: jax.Array | None = None,
    *,
    temperature: float = TrainConfig.contrastive_temperature,
    widths: tuple[int, ...] = (),
) -> Sums:
    """Return InfoNCE with in-batch negatives, in both directions, a sum over pairs
    (arXiv:1908.10084, arXiv:2212.03533).

    With a_i and p_i the vectors of length 1 of `jf.embed`, s_ij = a_i . p_j / temperature, and
    loss_i = -(log softmax_j(s_ij)_i + log softmax_j(s_ji)_i) / 2. In the first of the two softmaxes
    j is also each hard negative of the batch, those after the pair of each row. Negatives are those
    of the batch that the loss is called with: under a mesh those of all devices, and in a step of
    several microbatches those of the microbatch. Two pairs with one anchor, or with one positive,
    are not each other's negatives, nor is a text that equals the positive of an anchor. A pair
    whose texts are padding, which only fills a batch, is none, and neither is such a negative.

    With `widths` the loss is the mean of those of the first so many numbers of the vectors, made
    to length 1 again, and of the whole vectors (arXiv:2205.13147). ConfigError for a width beyond
    theirs.

    "accuracy" is how often the positive of an anchor is the nearest of the batch. Losses and
    metrics of the layers are there by name. Dropout needs a key.
    """
    tokens = batch["tokens"]
    pairs, sides, _ = tokens.shape
    x, inputs, aux = _both_hidden(params, config, batch, key)
    # [B, 2 + N, D], each of length 1.
    vectors = row_vectors(config, x, inputs.layout).reshape(pairs, sides, -1)
    segments = inputs.layout.segments
    is_text = jnp.ones((pairs, sides), bool)
    if segments is not None:
        segments = segments.reshape(tokens.shape)
        is_text = (segments != 0).any(axis=-1)
        tokens = jnp.where(segments != 0, tokens, -1)
    real = is_text.any(axis=1)
    whole = vectors.shape[-1]
    if any(not 0 < width <= whole for width in widths):
        raise ConfigError(
            f"contrastive: widths={widths} must be between 1 and {whole}, the width of the vectors."
        )

    def candidates(array: jax.Array) -> jax.Array:
        """Return the positives of all pairs, and then all hard negatives: [C, n] on every device of
        [B, 2 + N, n]."""
        of_sides = array[:, 1:].swapaxes(0, 1)
        return constrain(of_sides.reshape(-1, array.shape[-1]), (None, None))

    # [B, C]: what anchor i is told from, and by the first B columns positive i too.
    same = (tokens[:, 1, None] == candidates(tokens)).all(axis=-1)
    anchors = tokens[:, 0]
    same_anchor = (anchors[:, None] == constrain(anchors, (None, None))).all(axis=-1)
    same = same.at[:, :pairs].set(same[:, :pairs] | same_anchor)
    others = candidates(is_text[..., None])[:, 0] & ~same
    compared = real[:, None] & (others | jnp.eye(pairs, same.shape[1], dtype=bool))

    def nats_and_scores(vectors: jax.Array) -> tuple[jax.Array, jax.Array]:
        anchors = vectors[:, 0]
        matched = (anchors * vectors[:, 1]).sum(axis=1) / temperature
        # Every device compares its anchors with the texts of all.
        # [C, D] on every device: C x D numbers are sent, and no scores.
        gathered = candidates(vectors)
        scores = jnp.einsum("ID,JD->IJ", anchors, gathered, precision=jax.lax.Precision.HIGHEST)
        # Finite, so that a row of padding alone has a finite gradient.
        scores = jnp.where(compared, scores / temperature, jnp.finfo(jnp.float32).min)
        # [B]: the anchor finds its positive, and the positive its anchor; the mean of both.
        of_positives = jax.nn.logsumexp(scores[:, :pairs], axis=0)
        both = jax.nn.logsumexp(scores, axis=1) + of_positives
        return both / 2 - matched, scores

    nats, scores = nats_and_scores(vectors)
    narrower = {*widths} - {whole}
    for width in sorted(narrower):
        nats += nats_and_scores(of_length_1(vectors[..., :width]))[0]
    nats /= 1 + len(narrower)
    count = real.sum(dtype=jnp.float32)
    objective = jnp.where(real, nats, 0).sum()
    right = real & (scores.argmax(axis=1) == jnp.arange(pairs))
    sums = {"accuracy": (right.sum(dtype=jnp.float32), count), **aux.losses, **aux.metrics}
    if aux.losses:
        sums["nats"] = (objective, count)
    return {"loss": (aux.added(objective, count), count), **sums}
