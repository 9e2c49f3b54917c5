"""The answers that a model writes to the prompts of a batch, with their rewards, for the loss of
`losses/policy.py`."""

import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.mesh import batch_sharding, place_batch
from jaxformer.arrays.params import Params
from jaxformer.data.rows import NumpyBatch
from jaxformer.files import ConfigError
from jaxformer.generation.prompts import padded, rounded
from jaxformer.generation.refill import CHUNK, RowWriter
from jaxformer.generation.sampling import NUMBERS, Sampling
from jaxformer.losses.policy import policy_log_probs
from jaxformer.models.adapt import without_adapters
from jaxformer.runs.resolve import Resolved
from jaxformer.tokenizer import Tokenizer
from jaxformer.training.compiler_options import compiler_options
from jaxformer.training.state import on_mesh
from jaxformer.training.step import Batch

# (prompts, answers, targets), as many texts each -> a number for each answer.
Reward = Callable[[Sequence[str], Sequence[str], Sequence[str]], Sequence[float]]


def reward_of(name: str) -> Reward:
    """Return the function that grpo.reward names. Raises ConfigError where there is none."""
    # A module is looked for in the current directory first, as by `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        reward = pkgutil.resolve_name(name)
        if not callable(reward):
            raise TypeError(f"it is of type {type(reward).__name__}")
    except Exception as error:  # of a module of the user: anything
        raise ConfigError(
            f"grpo.reward={name!r} cannot be used ({type(error).__name__}: {error}): name a"
            " function as module:function, of a module that Python finds in the current directory"
            " or among its packages."
        ) from error
    finally:
        sys.path.pop(0)
    return reward  # type: ignore[no-any-return]


def advantages_of(rewards: np.ndarray, deviation: bool) -> np.ndarray:
    """Return rewards [groups, answers] less the mean of their group, float32, and with `deviation`
    over its standard deviation, whose divisor is the number of answers less one, plus 1e-4 (as in
    TRL)."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    if deviation:
        centered = centered / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return centered.astype(np.float32)


class Rollouts:
    """Makes batches of answers, which depend on a seed, the number of the step, the prompts and the
    parameters alone, so that a resumed run makes the same ones.

    Args:
      resolved: the run, whose settings of grpo say how answers are drawn, rewarded and compared.
      tokenizer: of its model.
    """

    def __init__(self, resolved: Resolved, tokenizer: Tokenizer) -> None:
        if jax.process_count() > 1:
            raise ConfigError(
                "answers are written by one process: start a run of data.objective=grpo with one."
            )
        config = resolved.model
        settings = resolved.run.grpo
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.reward = reward_of(settings.reward)

        def score(params: Params, start: Params, batch: Any) -> dict[str, jax.Array]:
            log_probs, _ = policy_log_probs(params, config, batch, settings.temperature)
            # Those of the sampler are of the logits themselves.
            forward, _ = policy_log_probs(params, config, batch)
            error = jnp.where(batch["weights"] > 0, forward - batch.pop("drawn_log_probs"), 0)
            mismatch = (jnp.expm1(error) - error).sum(axis=1)
            batch |= {"sampled_log_probs": log_probs, "mismatch": mismatch}
            if settings.kl:
                reference = without_adapters(start)
                compared, _ = policy_log_probs(reference, config, batch, settings.temperature)
                batch["reference_log_probs"] = compared
            return batch  # type: ignore[no-any-return]

        mesh = resolved.mesh
        self._score = jax.jit(
            score, out_shardings=batch_sharding(mesh), compiler_options=compiler_options(mesh)
        )

    def __call__(self, prompts: NumpyBatch, params: Params, start: Params, step: int) -> Batch:
        """Return a batch on the devices: grpo.group answers of these params to each of the prompts
        [groups, S], in their order. A row of zeros, which fills the last batch of an evaluation,
        gets rows of zeros. The reference is `start`, without its adapters."""
        run = self.resolved.run
        settings = run.grpo
        length = self.resolved.length
        mesh = self.resolved.mesh
        sizes = prompts["segment_ids"].sum(axis=1)
        chosen = np.repeat(np.flatnonzero(sizes), settings.group)
        read = [prompts["tokens"][row, : sizes[row]].tolist() for row in chosen]
        rules = Sampling(
            temperature=settings.temperature,
            end_token=self.tokenizer.end_tokens,
            vocab_size=self.tokenizer.vocab_size,
        )
        numbers = {name: getattr(rules, name) for name in NUMBERS}
        # One number of rows and of slots for all batches, so that one program is compiled.
        rows = len(sizes) * settings.group
        longest = prompts["tokens"].shape[1]
        slots = rounded(rounded(longest) * 2 + settings.new_tokens)
        # The tokens of each answer, and their log-probabilities in the cached pass that draws them,
        # at temperature 1.
        answers = [list[int]() for _ in read]
        drawn = [list[float]() for _ in read]
        with on_mesh(mesh):
            writer = RowWriter(
                params, self.resolved.model, rules, rows, (longest, 0), slots, own_numbers=True
            )
            key = jax.random.fold_in(jax.random.key(run.run.seed), step)
            for index, prompt in enumerate(read):
                of_answer = jax.random.fold_in(key, index)
                writer.read(prompt, of_answer, settings.new_tokens, scored=True, **numbers)
            while len(writer.free()) < rows:
                for index, made in writer.advance(CHUNK).items():
                    answers[index] += made.tokens.tolist()
                    drawn[index] += made.log_probs.tolist()
        # Ids of a target are stored from 1.
        targets = [ids[ids > 0] - 1 for ids in prompts["expected"][chosen]]
        texts = [[*map(self.tokenizer.decode, each)] for each in (read, answers, targets)]
        rewards = np.asarray(self.reward(*texts), np.float32)
        if rewards.shape != chosen.shape or not np.isfinite(rewards).all():
            raise ConfigError(
                f"grpo.reward={settings.reward!r} returned an array {list(rewards.shape)}: it must"
                f" return a finite number for each of the {len(chosen)} answers."
            )
        whole = [[*prompt, *answer] for prompt, answer in zip(read, answers, strict=True)]
        tokens, segments = padded(whole, length + 1)
        # [B, T + 1], shifted below; a target is learned where it is a token of the answer.
        begins = sizes[chosen][:, None]
        learned = (np.arange(length + 1) >= begins) & (segments > 0)
        # In the places of the answers, in their order.
        log_probs = np.zeros(learned.shape, np.float32)
        log_probs[learned] = np.concatenate(drawn)
        advantages = advantages_of(rewards.reshape(-1, settings.group), settings.deviation)
        arrays = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segment_ids": segments[:, :-1],
            "weights": learned[:, 1:].astype(np.float32),
            "drawn_log_probs": log_probs[:, 1:],
            "advantages": advantages.reshape(-1),
            "rewards": rewards,
        }
        batch = {}
        for name, array in arrays.items():
            batch[name] = np.zeros((rows, *array.shape[1:]), array.dtype)
            batch[name][: len(array)] = array
        with on_mesh(mesh):
            return self._score(params, start, place_batch(batch, mesh))  # type: ignore[no-any-return]
