"""The loss of GRPO beside TRL's, and the advantages of its batches."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from trl import GRPOTrainer

import jaxformer as jf
from jaxformer.config import GRPOConfig, with_settings
from jaxformer.layers.head import OutputLayer
from jaxformer.losses.cross_entropy import token_log_probs
from jaxformer.losses.policy import grpo_loss, policy_log_probs
from jaxformer.runs.rollouts import advantages_of

B, T, V = 6, 10, 257
CONFIG = jf.ModelConfig(vocab_size=V, d_model=32, n_layers=1, n_heads=2, max_length=64)
RNG = np.random.default_rng(0)
LENGTHS = {"answer": "grpo", "tokens": "bnpo", "constant": "dr_grpo"}


@pytest.fixture(scope="module")
def params():
    """Sharper than initial values."""
    return jax.tree.map(lambda leaf: 3 * leaf, jf.init(CONFIG, jax.random.key(0)))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_value_gradient_and_figures_are_those_of_trl(lengths, kl, params):
    """With ratios on both sides of the clip, answers of several lengths, and one that is empty."""
    settings = GRPOConfig(
        clip=0.2, clip_high=0.3, kl=kl, lengths=lengths, new_tokens=T, temperature=0.7
    )
    weights = (np.arange(T) < np.array([[0], [3], [10], [7], [1], [5]])).astype(np.float32)
    batch = {
        "tokens": RNG.integers(0, V, (B, T)),
        "targets": RNG.integers(0, V, (B, T)),
        "weights": weights,
        "advantages": RNG.normal(size=B).astype(np.float32),
        "rewards": RNG.normal(size=B).astype(np.float32),
        "segment_ids": np.ones((B, T), np.int32),
        "mismatch": np.arange(B, dtype=np.float32),
    }
    batch = jax.tree.map(jnp.asarray, batch)
    now, pull = jax.vjp(lambda p: policy_log_probs(p, CONFIG, batch, 0.7)[0], params)
    batch["sampled_log_probs"] = now + RNG.normal(scale=0.4, size=(B, T)).astype(np.float32)
    batch["reference_log_probs"] = now + RNG.normal(scale=0.4, size=(B, T)).astype(np.float32)

    log_probs = torch.tensor(np.asarray(now), requires_grad=True)
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros(B, T), None),
        accelerator=same,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
        aux_loss_enabled=False,
        beta=kl,
        current_gradient_accumulation_steps=1,
        epsilon_high=0.3,
        epsilon_low=0.2,
        importance_sampling_level="token",
        loss_type=LENGTHS[lengths],
        max_completion_length=T,
        model=SimpleNamespace(training=False),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"eval": defaultdict(list)},
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": torch.tensor(weights),
        "advantages": torch.tensor(np.asarray(batch["advantages"])),
        "old_per_token_logps": torch.tensor(np.asarray(batch["sampled_log_probs"])),
        "ref_per_token_logps": torch.tensor(np.asarray(batch["reference_log_probs"])),
    }
    expected = GRPOTrainer._compute_loss(trainer, None, inputs)
    expected.backward()

    def mean(params):
        sums = grpo_loss(params, CONFIG, batch, grpo=settings)
        return sums["loss"][0] / sums["loss"][1], sums

    (found, sums), slopes = jax.value_and_grad(mean, has_aux=True)(params)
    figures = {name: float(total / weight) for name, (total, weight) in sums.items()}
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    logged = trainer._metrics["eval"]
    assert 0 < figures["clipped"] == pytest.approx(logged["clip_ratio/region_mean"][0], rel=1e-6)
    assert figures["answer_length"] == pytest.approx(weights.sum() / B)
    assert figures["mismatch_kl"] == pytest.approx(15 / weights.sum())
    assert ("kl" in figures) == bool(kl)
    if kl:
        assert figures["kl"] == pytest.approx(logged["kl"][0], rel=1e-5)
    (gradient,) = pull(jnp.asarray(log_probs.grad.numpy()))
    for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("tile", [None, 4])
def test_log_probs_of_tokens_and_their_gradient_are_those_of_the_formula(tile):
    layer = OutputLayer(
        *(jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((2, T, 5), (V, 5), (V,)))
    )
    targets = jnp.asarray(RNG.integers(0, V, (2, T)))
    slope = jnp.asarray(RNG.normal(size=(2, T)), jnp.float32)

    def plain(rows):
        logits = 3 * jnp.tanh((rows @ layer.matrix.T + layer.bias) / 3) / 0.5
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]

    def ours(rows):
        changed = layer._replace(rows=rows)
        return token_log_probs(changed, targets, temperature=0.5, soft_cap=3.0, tile=tile)

    found, pull = jax.vjp(ours, layer.rows)
    expected, pull_plain = jax.vjp(plain, layer.rows)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pull(slope)[0], pull_plain(slope)[0], rtol=1e-4, atol=1e-5)


def test_advantages_are_those_of_a_group():
    rewards = RNG.normal(size=(3, 4)).astype(np.float32)
    theirs = torch.tensor(rewards)
    centered = theirs - theirs.mean(dim=1, keepdim=True)
    scaled = centered / (theirs.std(dim=1, keepdim=True) + 1e-4)
    np.testing.assert_allclose(advantages_of(rewards, False), centered, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(advantages_of(rewards, True), scaled, rtol=1e-5, atol=1e-6)
    assert (advantages_of(np.ones((2, 4), np.float32), True) == 0).all()


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_row_of_padding_is_no_answer_and_experts_are_balanced(lengths, params):
    config = with_settings(
        CONFIG, {"feed_forward": "experts", "experts.n": 4, "experts.balance_loss": 0.5}
    )
    params = jf.init(config, jax.random.key(0))
    names = ("sampled_log_probs", "weights")
    batch = {name: np.zeros((4, T), np.float32) for name in names}
    batch |= {name: np.zeros(4, np.float32) for name in ("rewards", "mismatch", "advantages")}
    for name in ("tokens", "targets"):
        batch[name] = RNG.integers(0, V, (4, T))
    batch["segment_ids"] = np.ones((4, T), np.int32)
    for name, value in {"weights": 1, "rewards": 2, "advantages": 3}.items():
        batch[name][:3] = value
    batch["segment_ids"][3] = 0
    batch = jax.tree.map(jnp.asarray, batch)
    settings = GRPOConfig(lengths=lengths, new_tokens=T)
    few = {name: array[:3] for name, array in batch.items()}
    found, expected = (grpo_loss(params, config, each, grpo=settings) for each in (batch, few))
    for name, (total, weight) in found.items():
        assert float(total) == pytest.approx(float(expected[name][0]), rel=1e-5), name
        assert float(weight) == pytest.approx(float(expected[name][1]), rel=1e-5), name
    total, weight = found["router_balance"]
    without = with_settings(config, {"experts.balance_loss": 0.0})
    plain = grpo_loss(params, without, batch, grpo=settings)["loss"][0]
    added = float(found["loss"][0] - plain)
    assert (
        added == pytest.approx(0.5 * float(total / weight * found["loss"][1]), rel=1e-4)
        and added > 0
    )
