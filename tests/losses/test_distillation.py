"""The loss of distillation beside NumPy in float64 and beside TRL, dense and in tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl.experimental.gkd import GKDTrainer

import jaxformer as jf
from jaxformer.layers.head import OutputLayer
from jaxformer.losses.cross_entropy import distillation
from jaxformer.losses.heads import Distillation

B, T, V = 3, 7, 40
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


STUDENT = OutputLayer(array(B, T, 6), 0.5 * array(V, 6), array(V))
# Wider, and its table is filled up.
TEACHER = OutputLayer(array(B, T, 9), 0.5 * array(V + 8, 9), None)
TARGETS = RNG.integers(0, V, (B, T))
WEIGHTS = RNG.choice(np.array([0, 0.5, 1], np.float32), (B, T))


def sums_of(rows, **options):
    arrays = jax.tree.map(jnp.asarray, (STUDENT._replace(rows=rows), TEACHER, TARGETS, WEIGHTS))
    return distillation(*arrays, **options)


def log_softmax(logits):
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def expected(temperature, cap=0.0):
    """(nats, divergence, its gradient by the rows of the student) of each row, in float64."""
    logits = STUDENT.rows.astype(float) @ STUDENT.matrix.T.astype(float) + STUDENT.bias
    theirs = (TEACHER.rows.astype(float) @ TEACHER.matrix.T.astype(float))[..., :V]
    if cap:
        theirs = cap * np.tanh(theirs / cap)
    nats = -np.take_along_axis(log_softmax(logits), TARGETS[..., None], -1)[..., 0]
    log_p = log_softmax(logits / temperature)
    log_q = log_softmax(theirs / temperature)
    divergence = (np.exp(log_q) * (log_q - log_p)).sum(-1)
    slope = WEIGHTS[..., None] * (np.exp(log_p) - np.exp(log_q)) / temperature
    return (WEIGHTS * nats).sum(1), (WEIGHTS * divergence).sum(1), slope @ STUDENT.matrix


@pytest.mark.parametrize("tile", [None, 3, 1])
@pytest.mark.parametrize(("temperature", "cap"), [(1.0, 0.0), (2.5, 1.5)])
def test_values_and_gradients_are_those_of_the_formula(temperature, cap, tile):
    options = {"temperature": temperature, "teacher_cap": cap, "tile": tile}

    def divergence(rows):
        parts = sums_of(rows, **options)
        return parts[2].sum(), parts

    slope, (objective, nats, found) = jax.grad(divergence, has_aux=True)(STUDENT.rows)
    plain, each, gradient = expected(temperature, cap)
    np.testing.assert_allclose(found, each, rtol=1e-5)
    np.testing.assert_allclose(nats, plain, rtol=1e-5)
    np.testing.assert_array_equal(objective, nats)
    np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=1e-6)


def test_all_logits_are_never_in_memory_together():
    def total(rows):
        return sums_of(rows, tile=2)[2].sum()

    text = str(jax.make_jaxpr(jax.grad(total))(STUDENT.rows))
    assert f"{B},2,{V}" in text
    assert f"{B},{T},{V}" not in text and f"4,{B},2,{V}" not in text


def test_the_divergence_is_that_of_trl():
    """TRL's generalized JSD with beta=0, the mean over the tokens, without the factor T^2."""
    config = jf.ModelConfig(vocab_size=V, d_model=16, n_layers=1, n_heads=2, max_length=8)
    teacher = jf.ModelConfig(vocab_size=V, d_model=24, n_layers=2, n_heads=2, max_length=8)
    # Sharper than initial values.
    params = jax.tree.map(lambda leaf: 4 * leaf, jf.init(config, jax.random.key(0)))
    theirs = jax.tree.map(lambda leaf: 4 * leaf, jf.init(teacher, jax.random.key(1)))
    batch = {"tokens": TARGETS, "targets": np.roll(TARGETS, -1, 1), "weights": np.ceil(WEIGHTS)}
    batch = jax.tree.map(jnp.asarray, batch)
    plain = jf.loss_of("causal", config)(params, batch, None)
    batch["shared"] = theirs
    logits = [
        torch.tensor(np.asarray(jf.forward(p, c, batch["tokens"])))
        for p, c in ((params, config), (theirs, teacher))
    ]
    labels = torch.where(torch.tensor(WEIGHTS) > 0, torch.tensor(np.roll(TARGETS, -1, 1)), -100)
    divergence = GKDTrainer.generalized_jsd_loss(*logits, labels, beta=0.0, temperature=3.0).item()
    loss = jf.loss_of("causal", config, distill=Distillation(teacher, 3.0, 0.25))
    sums = loss(params, batch, None)
    mean = {name: float(total / weight) for name, (total, weight) in sums.items()}
    assert mean["kl"] == pytest.approx(divergence, rel=1e-5)
    assert mean["nats"] == pytest.approx(float(plain["loss"][0] / plain["loss"][1]), rel=1e-6)
    assert mean["loss"] == pytest.approx(0.25 * mean["nats"] + 0.75 * 9 * mean["kl"], rel=1e-6)
    del batch["shared"]
    with pytest.raises(jf.ConfigError, match="has a teacher, and the batch no 'shared'"):
        loss(params, batch, None)
