"""The model class of EleutherAI's evaluation harness: log-likelihoods of texts, and generation.

Requests become token ids, windows and stops as for the harness's own Hugging Face models, but for
the tokens that a template puts before a text: these are never scored.
Rows are sorted by length and padded to a full batch and to multiples of `BUCKET` tokens, so that
few programs are compiled.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxformer.arrays.params import Params
from jaxformer.files import ConfigError
from jaxformer.generation.decode import decode, start
from jaxformer.generation.prompts import context_of, full_batch, padded, rounded
from jaxformer.generation.sampling import Sampling
from jaxformer.generation.weights import prepared
from jaxformer.runs.loading import load
from jaxformer.runs.stated import writing_rules
from jaxformer.tokenizer.metadata import without_tokenizer
from jaxformer.tools.lm_eval.scores import scores

AUTO_BATCH = 16
BUCKET = 64  # lengths are rounded up to multiples of this
# The number of scored tokens before a row's last one is rounded up to one of these.
WIDTHS = (0, *(16 * 4**power for power in range(14)))
CHUNK = 32  # tokens generated between two checks whether every text has stopped
IGNORED = {"device", "max_batch_size"}  # given to every model by the harness
SAMPLING = {"do_sample", "temperature", "top_k", "top_p"}

ScoringRequest = tuple[tuple[str, str] | None, list[int], list[int]]
Answer = tuple[float, bool]
ScoredRow = tuple[tuple[int, ...], int]  # the tokens read, and how many at the end are scored


@register_model("jaxformer")
class JaxformerLM(TemplateLM):
    """A decoder from a run directory or a Hugging Face directory.

    `step` selects a checkpoint; `batch_size` "auto" is 16 rows; `max_length` and `max_gen_toks` are
    numbers of tokens; `dtype` is that of weights and products, "auto" as the config says;
    `add_bos_token` None follows the tokenizer's template. Raises ConfigError for an argument that
    is unknown or out of range, and for a model that is not a language model with a decoder.
    """

    def __init__(
        self,
        path: str = "",
        step: int | None = None,
        batch_size: int | str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        dtype: str = "auto",
        add_bos_token: bool | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if not path or others.keys() - IGNORED:
            wrong = ", ".join(sorted(others.keys() - IGNORED)) or "no path"
            raise ConfigError(
                f"--model_args holds {wrong}: the model jaxformer needs path=DIRECTORY, and takes"
                " step, batch_size, max_length, max_gen_toks, dtype and add_bos_token."
            )
        settings: dict[str, Any] = {} if dtype == "auto" else {"dtype": dtype}
        model = load(str(path), step, **settings)
        config = model.config
        if config.family != "decoder" or config.output != "language":
            raise ConfigError(
                f"{path} has model.family={config.family!r} and the head {config.output!r}, and the"
                " harness asks for the next token: give it a decoder that is a language model."
            )
        if model.tokenizer is None:
            raise without_tokenizer(path)
        self.params, self.tokenizer = model.params, model.tokenizer
        # A scan compiles fastest, and there are many shapes to compile.
        self.config = dataclasses.replace(config, layer_loop="scan", **settings)
        auto = str(batch_size).startswith("auto")
        self.batch_size = AUTO_BATCH if auto else _count("batch_size", batch_size)
        longest = context_of(self.params, config)
        given = longest if max_length is None else max_length
        self.max_length = _count("max_length", given, longest)
        self.max_gen_toks = _count("max_gen_toks", max_gen_toks)
        self.add_bos_token = add_bos_token

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_token

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none."""
        begin = self.tokenizer.special("bos")
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.fingerprint()

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        raise ConfigError(
            "the model jaxformer has no chat template: leave out --apply_chat_template."
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids, with the special tokens of the template unless they are switched off or the
        text begins with one."""
        ids = self.tokenizer.encode(string, special_tokens=True)
        before, after = len(self.tokenizer.prefix), len(self.tokenizer.suffix)
        begun = string.startswith(self.tokenizer.shown(self.prefix_token_id))
        whole = not begun if add_special_tokens is None else add_special_tokens
        if self.add_bos_token is False or not whole:
            return ids[before : len(ids) - after]
        return [self.prefix_token_id, *ids] if self.add_bos_token and not before else ids

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Answer]:
        """(log-likelihood, whether it is the greedy continuation) of each text after its context.

        An empty context is the prefix token. Raises ConfigError for a continuation without tokens,
        whose probability would be 1.
        """
        for request in requests:
            context, continuation = request.args
            if context == "" and not self.tok_encode(continuation, add_special_tokens=False):
                raise _without_continuation((context, continuation))
        answers: list[Answer] = super().loglikelihood(requests, disable_tqdm)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each text, read in windows of max_length tokens in which each token
        is predicted once. Tokens that the template puts before a text are read, not scored."""
        windows: list[ScoringRequest] = []
        owners: list[int] = []  # the number of each window's text
        for number, request in enumerate(requests):
            for window in self._windows(self.tok_encode(request.args[0])):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (value, _) in zip(owners, answers, strict=True):
            totals[number] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, tokens: list[int]) -> Iterator[ScoringRequest]:
        """The windows of a text, of which the first begins with the template's tokens, or with the
        prefix token where the template has none."""
        template = self.tokenizer.prefix
        if template and tokens[: len(template)] == template:
            unscored = len(template) - 1  # beside the first token, which has no context
        else:
            unscored = 0
            if tokens[:1] != [self.prefix_token_id]:
                tokens = [self.prefix_token_id, *tokens]
        for pair in get_rolling_token_windows(
            tokens[1:], tokens[0], self.max_length, context_len=1
        ):
            context, continuation = make_disjoint_window(pair)
            read = min(unscored, len(continuation))
            unscored -= read
            if continuation[read:]:
                yield None, [*context, *continuation[:read]], continuation[read:]

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoringRequest], disable_tqdm: bool = False, **__: Any
    ) -> list[Answer]:
        """(log-likelihood, whether it is the greedy continuation) of each continuation after its
        context.

        Requests that differ only in their last token, as the letters of a multiple choice do, are
        one row. An empty context is the prefix token, as `loglikelihood` has it. Raises ConfigError
        for a continuation that is empty or longer than max_length.
        """
        asking: dict[ScoredRow, list[int]] = {}  # the numbers of the requests of each row
        cut = 0
        answers: list[Answer] = [(0.0, False)] * len(requests)  # each is replaced below
        for number, (asked, context, continuation) in enumerate(requests):
            if not continuation:
                raise _without_continuation(asked)
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens does not fit into"
                    f" max_length={self.max_length}."
                )
            before = context or [self.prefix_token_id]
            cut += len(before) + len(continuation) > self.max_length + 1
            read = tuple((before + continuation)[-self.max_length - 1 : -1])
            asking.setdefault((read, len(continuation)), []).append(number)
        _warn(cut, len(requests), self.max_length)
        rows = sorted(asking, key=lambda row: (-len(row[0]), row))
        title = "Running loglikelihood requests"
        with tqdm(total=len(requests), disable=disable_tqdm, desc=title) as bar:
            for row, earlier, likeliest, final in self._scored(rows):
                for number in asking[row]:
                    text, _, continuation = requests[number]
                    token = continuation[-1]
                    greedy = bool(likeliest and final.argmax() == token)
                    answers[number] = (float(earlier + final[token]), greedy)
                    if text is not None:
                        self.cache_hook.add_partial("loglikelihood", text, answers[number])
                bar.update(len(asking[row]))
        return answers

    def _scored(
        self, rows: list[ScoredRow]
    ) -> Iterator[tuple[ScoredRow, np.ndarray, np.ndarray, np.ndarray]]:
        """Each row with the results of `scores`."""
        for at in range(0, len(rows), self.batch_size):
            batch = rows[at : at + self.batch_size]
            filled = full_batch(batch, self.batch_size)
            lengths, counts = np.array([(len(read), count) for read, count in filled], np.int32).T
            length = min(rounded(lengths.max(), BUCKET), self.max_length)
            tokens, _ = padded([read for read, _ in filled], length)
            width = next(width for width in WIDTHS if width >= counts.max() - 1)
            found = scores(self.params, self.config, width, tokens, lengths, counts)
            yield from zip(batch, *map(np.asarray, found), strict=False)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each context, up to the first of the request's stops."""
        order = Collator(
            [request.args for request in requests],
            lambda args: -len(args[0]),
            lambda args: args[1],
            "gen_kwargs",
        )
        texts, title = [], "Running generate_until requests"
        with tqdm(total=len(requests), disable=disable_tqdm, desc=title) as bar:
            for batch in order.get_batched(n=self.batch_size):
                asked = normalize_gen_kwargs(batch[0][1], self.max_gen_toks)
                count = asked.pop("max_gen_toks")
                stops = [*asked.pop("until"), self.tokenizer.shown(self.eot_token_id)]
                rules = self._rules(asked)
                written = self._written([context for context, _ in batch], count, stops, rules)
                for args, text in zip(batch, written, strict=True):
                    self.cache_hook.add_partial("generate_until", args, text)
                texts += written
                bar.update(len(batch))
        return order.get_original(texts)  # type: ignore[no-any-return]

    def _rules(self, asked: dict[str, Any]) -> Sampling:
        """The sampling of a request; greedy unless it says otherwise."""
        if asked.get("num_beams") == 1:
            asked.pop("num_beams")
        if unknown := sorted(asked.keys() - SAMPLING):
            raise ConfigError(
                f"generation_kwargs hold {', '.join(unknown)}: the model jaxformer takes until,"
                f" max_gen_toks, {', '.join(sorted(SAMPLING))}."
            )
        drawn = bool(asked.pop("do_sample"))
        asked["temperature"] = asked.get("temperature", 1.0) if drawn else 0.0
        return Sampling(**writing_rules(self.tokenizer), **asked)

    def _written(
        self, contexts: Sequence[str], count: int, stops: Sequence[str], rules: Sampling
    ) -> list[str]:
        """The texts, cut at their stops; generation ends once each has one, or after `count`
        tokens."""
        space = self.max_length - count
        if space < 1:
            raise ConfigError(
                f"max_gen_toks={count} leaves no space for a context in"
                f" max_length={self.max_length}: ask for fewer tokens."
            )
        whole = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        _warn(sum(len(prompt) > space for prompt in whole), len(whole), space)
        prompts = full_batch([prompt[-space:] for prompt in whole], self.batch_size)
        length = rounded(max(map(len, prompts)), BUCKET)
        tokens, real = padded(prompts, length, left=True)
        key = jax.random.key(np.random.randint(2**31))  # the harness has seeded NumPy
        stream = start(self.params, self.config, tokens, count, key, real)
        made, texts = np.zeros((len(prompts), 0), np.int32), [""] * len(contexts)
        while made.shape[1] < count:
            piece, stream = decode(self._weights, self.config, rules, CHUNK, stream)
            made = np.concatenate([made, piece], axis=1)[:, :count]
            texts, stopped = [], True
            for row in made[: len(contexts)].tolist():
                kept = [*itertools.takewhile(self.eot_token_id.__ne__, row)]
                texts.append(self.tokenizer.decode(kept))
                has_stop = any(stop in texts[-1] for stop in stops if stop)
                stopped = stopped and (len(kept) < len(row) or has_stop)
            if stopped:
                break
        return [postprocess_generated_text(text, stops, None) for text in texts]

    @functools.cached_property
    def _weights(self) -> Params:
        """The weights as the loop of generation reads them."""
        return prepared(self.params, self.config)


def _warn(cut: int, number: int, space: int) -> None:
    if cut:
        logging.getLogger(__name__).warning(
            f"{cut} of {number} contexts lose their beginning: there is room for {space} tokens."
        )


def _without_continuation(asked: tuple[str, str] | None) -> ConfigError:
    """The refusal of a continuation without tokens, which a probability of 1 would let win."""
    texts = "" if asked is None else f" {asked[1]!r} after the context {asked[0]!r}"
    return ConfigError(
        f"the continuation{texts} has no tokens of its own, so it has no likelihood: a task needs"
        " choices that are not empty, and that begin with the space or line that separates them"
        " from the context (target_delimiter)."
    )


def _count(name: str, value: Any, most: int | None = None) -> int:
    """A whole number from 1 to `most`, as the command line or a caller gives it."""
    if not str(value).isdecimal() or int(value) < 1 or (most is not None and int(value) > most):
        least = "of at least 1" if most is None else f"from 1 to {most}"
        raise ConfigError(f"{name}={value} must be a whole number {least}.")
    return int(value)
