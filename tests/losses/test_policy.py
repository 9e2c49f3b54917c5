"""The loss of GRPO beside TRL's, and the answers and advantages of its batches."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from trl import GRPOTrainer

import jaxformer as jf
from jaxformer.config.train import GRPOConfig
from jaxformer.generation.sampling import Sampling, draw
from jaxformer.layers.head import OutputLayer
from jaxformer.losses.cross_entropy import token_log_probs
from jaxformer.losses.policy import grpo_loss, policy_log_probs
from jaxformer.runs.rollouts import Rollouts, advantages_of
from jaxformer.tokenizer import byte_tokenizer

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
    }
    batch = jax.tree.map(jnp.asarray, batch)
    now, pull = jax.vjp(lambda p: policy_log_probs(p, CONFIG, batch, 0.7), params)
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
        sums = grpo_loss(params, CONFIG, batch, settings)
        return sums["loss"][0] / sums["loss"][1], sums

    (found, sums), slopes = jax.value_and_grad(mean, has_aux=True)(params)
    figures = {name: float(total / weight) for name, (total, weight) in sums.items()}
    assert float(found) == pytest.approx(expected.item(), rel=1e-5)
    logged = trainer._metrics["eval"]
    assert 0 < figures["clipped"] == pytest.approx(logged["clip_ratio/region_mean"][0], rel=1e-6)
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


def length_of(prompts, answers):
    return [len(answer) / 10 for answer in answers]


@pytest.fixture(scope="module")
def rollouts(params):
    settings = GRPOConfig(group=4, new_tokens=8, temperature=0.9, kl=0.1)
    return Rollouts(
        CONFIG,
        byte_tokenizer(),
        ["a", "some text", "three"],
        length_of,
        settings,
        batch_size=8,
        seed=3,
        reference=jax.tree.map(lambda leaf: 0.9 * leaf, params),
    )


def test_the_probabilities_of_the_sampler_are_those_of_the_step(params, rollouts):
    """Each answer is drawn again, from the logits of the forward pass of the step."""
    state = jf.init_state(params, optax.sgd(0.1))
    batch = rollouts.rows(5, state)
    sums = grpo_loss(params, CONFIG, batch, rollouts.settings)
    mismatch = float(sums["mismatch_kl"][0] / sums["mismatch_kl"][1])
    assert 0 < abs(mismatch) < 1e-6
    assert float(sums["clipped"][0]) == 0 and float(sums["kl"][0]) > 0
    tokenizer = rollouts.tokenizer
    rules = Sampling(temperature=0.9, vocab_size=tokenizer.vocab_size)
    logits = jf.forward(params, CONFIG, batch["tokens"], segment_ids=batch["segment_ids"])
    key = jax.random.fold_in(jax.random.key(3), 5)
    for row, (targets, weights) in enumerate(zip(batch["targets"], batch["weights"], strict=True)):
        places = np.flatnonzero(weights)
        assert 1 <= len(places) <= 8
        for count, place in enumerate(places):
            of_token = jax.random.fold_in(jax.random.fold_in(key, row), count)
            assert draw(logits[row, place][None], of_token, rules)[0] == targets[place]
    # The prompts of a step are different ones, and each answer is that of its prompt.
    texts = [
        tokenizer.decode(np.asarray(tokens)[np.asarray(real) > 0])
        for tokens, real in zip(batch["tokens"], batch["segment_ids"], strict=True)
    ]
    begins = [next(p for p in rollouts.prompts if text.startswith(p)) for text in texts]
    assert begins[:4] == begins[:1] * 4 and begins[4:] == begins[4:5] * 4 != begins[:4]
    groups = np.asarray(batch["advantages"]).reshape(2, 4)
    np.testing.assert_allclose(groups.sum(axis=1), 0, atol=1e-5)


def test_a_step_in_microbatches_is_the_whole_one(params, rollouts):
    state = jf.init_state(params, optax.sgd(0.1))
    batch = rollouts.rows(0, state)
    after = []
    for microbatches in (1, 2):
        step = jf.make_step(
            lambda p, b, key: grpo_loss(p, CONFIG, b, rollouts.settings),
            optax.sgd(0.1),
            microbatches=microbatches,
            rowwise=True,
        )
        after.append(step(jf.init_state(params, optax.sgd(0.1)), batch)[0].params)
    for a, b in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"group": 3}, {}, "batch_size=8 answers do not divide into groups of grpo.group=3"),
        ({"kl": 0.1}, {}, "grpo.kl=0.1 compares the model with a reference: give one"),
        ({"new_tokens": 64}, {}, "has 1 tokens, and grpo.new_tokens=64 have to fit"),
        ({"new_tokens": 8}, {"prompts": []}, "the longest of 0 prompts has 0 tokens"),
        ({"new_tokens": 8}, {"reward": lambda p, a: [1.0]}, r"an array \[1\]: it must"),
        ({"new_tokens": 8}, {"reward": lambda p, a: [np.nan] * 8}, "a finite number for each of"),
    ],
)
def test_what_cannot_be_learned_is_refused(changes, options, message, params):
    given = {"prompts": ["a"], "reward": length_of, "batch_size": 8} | options
    settings = GRPOConfig(**{"group": 4, "new_tokens": 8} | changes)
    with pytest.raises(jf.ConfigError, match=message):
        Rollouts(CONFIG, byte_tokenizer(), settings=settings, **given).rows(
            0, jf.init_state(params, optax.sgd(0.1))
        )
