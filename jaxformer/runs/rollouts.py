"""Batches of the answers that a model writes itself, with their rewards, for `losses/policy.py`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.arrays.mesh import place_batch
from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.config.train import GRPOConfig
from jaxformer.files import ConfigError
from jaxformer.generation.prompts import padded, rounded
from jaxformer.generation.refill import CHUNK, RowWriter
from jaxformer.generation.sampling import NUMBERS, Sampling
from jaxformer.losses.policy import policy_log_probs
from jaxformer.tokenizer import Tokenizer
from jaxformer.training.state import TrainState, mesh_of, on_mesh
from jaxformer.training.step import Batch

# (prompts, answers) -> a number for each answer.
Reward = Callable[[Sequence[str], Sequence[str]], Sequence[float]]


def advantages_of(rewards: np.ndarray, deviation: bool) -> np.ndarray:
    """Return rewards [groups, answers] less the mean of their group, float32, and with `deviation`
    over its standard deviation, whose divisor is the number of answers less one, plus 1e-4 (as in
    TRL)."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    if deviation:
        centered = centered / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return centered.astype(np.float32)


class Rollouts:
    """Batches for `jf.fit` and `grpo_loss`: `rows(step, state)` is a function of the seed, the
    number of the step and the parameters before it, so that a resumed run makes the same ones.

    Args:
      config: of the model that answers.
      tokenizer: of the same model.
      prompts: texts, read in an order that the seed gives, and then anew in another.
      reward: (prompts, answers), texts of one length -> a number for each answer.
      settings: how answers are drawn and compared.
      batch_size: answers of a step, a multiple of `settings.group`.
      seed: of the order and the draws.
      reference: for `settings.kl`: the params of another model of this config, or a function from
          the params of the state to them, such as `jf.without_adapters`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        prompts: Sequence[str],
        reward: Reward,
        settings: GRPOConfig,
        *,
        batch_size: int,
        seed: int = 0,
        reference: Params | Callable[[Params], Params] | None = None,
    ) -> None:
        if batch_size % settings.group:
            raise ConfigError(
                f"batch_size={batch_size} answers do not divide into groups of"
                f" grpo.group={settings.group}: make it a multiple of that."
            )
        if settings.kl and reference is None:
            raise ConfigError(
                f"grpo.kl={settings.kl} compares the model with a reference: give one, or set it to"
                " 0."
            )
        if jax.process_count() > 1:
            raise ConfigError("answers are written by one process: start the run with one.")
        self.config = config
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.reward = reward
        self.settings = settings
        self.groups = batch_size // settings.group
        self.seed = seed
        self.reference = reference
        self._encoded = [tokenizer.as_prompt(ids) for ids in tokenizer.encode_batch([*prompts])]
        # One length for all batches, so that one program is compiled.
        longest = max(map(len, self._encoded), default=0)
        self.length = rounded(longest + settings.new_tokens)
        if not longest or longest + settings.new_tokens > config.max_length:
            raise ConfigError(
                f"the longest of {len(prompts)} prompts has {longest} tokens, and"
                f" grpo.new_tokens={settings.new_tokens} have to fit behind it into"
                f" model.max_length={config.max_length}: shorten them, or leave empty ones out."
            )
        self._score = jax.jit(policy_log_probs, static_argnums=(1, 3))

    def rows(self, step: int, state: TrainState) -> Batch:
        """Return the batch of a step, counted from 0, with the answers of the state's params."""
        settings = self.settings
        first = step * self.groups
        chosen = []
        for number in range(first, first + self.groups):
            epoch, place = divmod(number, len(self.prompts))
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.prompts))
            chosen += [int(order[place])] * settings.group
        prompts = [self._encoded[index] for index in chosen]
        mesh = mesh_of(state)
        with on_mesh(mesh):
            key = jax.random.fold_in(jax.random.key(self.seed), step)
            answers, drawn = self._answers(state.params, prompts, key)
        texts = [self.tokenizer.decode(answer) for answer in answers]
        asked = [self.prompts[index] for index in chosen]
        rewards = np.asarray(self.reward(asked, texts), np.float32)
        if rewards.shape != (len(texts),) or not np.isfinite(rewards).all():
            raise ConfigError(
                f"the reward function returned an array {list(rewards.shape)}: it must return a"
                f" finite number for each of the {len(texts)} answers."
            )
        whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        tokens, segments = padded(whole, self.length + 1)
        # [B, T + 1], shifted below; a target is learned where it is a token of the answer.
        begins = np.array([[len(prompt)] for prompt in prompts])
        learned = (np.arange(self.length + 1) >= begins) & (segments > 0)
        advantages = advantages_of(rewards.reshape(-1, settings.group), settings.deviation)
        batch: Batch = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "segment_ids": segments[:, :-1],
            "weights": learned[:, 1:].astype(np.float32),
            "advantages": advantages.reshape(-1),
            "rewards": rewards,
        }
        # [B, T], in the places of the answers, in their order.
        batch["drawn_log_probs"] = np.zeros(batch["targets"].shape, np.float32)
        batch["drawn_log_probs"][learned[:, 1:]] = np.concatenate(drawn)
        batch = place_batch(batch, mesh)
        with on_mesh(mesh):
            scored = {"sampled_log_probs": state.params}
            if settings.kl:
                reference: Any = self.reference
                if callable(reference):
                    reference = reference(state.params)
                scored["reference_log_probs"] = reference
            for name, params in scored.items():
                batch[name] = self._score(params, self.config, batch, settings.temperature)
            # Those of the sampler are of the logits themselves.
            batch["forward_log_probs"] = batch["sampled_log_probs"]
            if settings.temperature != 1:
                batch["forward_log_probs"] = self._score(state.params, self.config, batch, 1.0)
        return batch

    def _answers(
        self, params: Params, prompts: list[list[int]], key: jax.Array
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Return the tokens of an answer to each prompt, and their log-probabilities in the cached
        pass that drew them, at temperature 1."""
        settings = self.settings
        rules = Sampling(
            temperature=settings.temperature,
            end_token=self.tokenizer.end_tokens,
            vocab_size=self.tokenizer.vocab_size,
        )
        numbers = {name: getattr(rules, name) for name in NUMBERS}
        longest = max(map(len, self._encoded))
        slots = rounded(rounded(longest) * 2 + settings.new_tokens)
        writer = RowWriter(
            params, self.config, rules, len(prompts), (longest, 0), slots, own_numbers=True
        )
        answers = list[list[int]]()
        drawn = list[np.ndarray]()
        for index, prompt in enumerate(prompts):
            of_answer = jax.random.fold_in(key, index)
            writer.read(prompt, of_answer, settings.new_tokens, scored=True, **numbers)
            answers.append([])
            drawn.append(np.zeros(0, np.float32))
        while len(writer.free()) < len(prompts):
            for index, made in writer.advance(CHUNK).items():
                answers[index] += made.tokens.tolist()
                drawn[index] = np.append(drawn[index], made.log_probs)
        return answers, drawn
