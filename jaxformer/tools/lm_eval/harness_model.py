"""The model class of EleutherAI's evaluation harness: log-likelihoods of texts, and generation.

Requests become token ids, windows and stops as for the harness's own Hugging Face models, except
that the tokens that a template puts before a text are never scored. Rows are sorted by length and
padded to a full batch and to multiples of `BUCKET` tokens, so that few programs are compiled.

In the comments, B is the number of rows, T that of tokens, D the width of the model and V the size
of the vocabulary.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.decode import decode, start
from jaxformer.generation.prompts import full_batch, padded, rounded
from jaxformer.generation.sampling import Sampling
from jaxformer.generation.weights import prepared
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.inputs import Inputs
from jaxformer.models.transformer import context_of, hidden
from jaxformer.runs.loading import load
from jaxformer.runs.stated import writing_rules
from jaxformer.tokenizer.metadata import without_tokenizer

AUTO_BATCH = 16
BUCKET = 64  # lengths are rounded up to multiples of this
# The number of scored tokens before a row's last one is rounded up to one of these.
WIDTHS = (0, *(16 * 4**power for power in range(14)))
MAX_LOGITS = 2**23  # about as many are in memory at once
CHUNK = 32  # tokens generated between two checks whether every text has stopped
IGNORED = {"device", "max_batch_size"}  # given to every model by the harness
SAMPLING = {"do_sample", "temperature", "top_k", "top_p"}


class HarnessRequest(Protocol):
    """An instance of the harness: `args` are a text, a context and its continuation, or a context
    and the keywords of its generation."""

    @property
    def args(self) -> tuple[Any, ...]: ...


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
        **ignored: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(ignored.keys() - IGNORED)
        if not path or unknown:
            raise ConfigError(
                f"--model_args holds {', '.join(unknown) or 'no path'}: the model jaxformer needs"
                " path=DIRECTORY, and takes step, batch_size, max_length, max_gen_toks, dtype and"
                " add_bos_token."
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
        context = context_of(self.params, config)
        length = context if max_length is None else max_length
        self.max_length = _count("max_length", length, context)
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
        prefix_length, suffix_length = len(self.tokenizer.prefix), len(self.tokenizer.suffix)
        if add_special_tokens is None:
            has_prefix = string.startswith(self.tokenizer.shown(self.prefix_token_id))
            add_special_tokens = not has_prefix
        if self.add_bos_token is False or not add_special_tokens:
            return ids[prefix_length : len(ids) - suffix_length]
        return [self.prefix_token_id, *ids] if self.add_bos_token and not prefix_length else ids

    def loglikelihood(
        self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
    ) -> list[Answer]:
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
        self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
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
        """The windows of a text. The first begins with the tokens that the template puts before a
        text, or with the prefix token where there are none."""
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
            skipped = min(unscored, len(continuation))
            unscored -= skipped
            if continuation[skipped:]:
                yield None, [*context, *continuation[:skipped]], continuation[skipped:]

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoringRequest], disable_tqdm: bool = False, **__: Any
    ) -> list[Answer]:
        """(log-likelihood, whether it is the greedy continuation) of each continuation after its
        context.

        Requests that differ only in their last token, as the letters of a multiple choice do, are
        one row. An empty context is the prefix token, as `loglikelihood` has it. Raises ConfigError
        for a continuation that is empty or longer than max_length.
        """
        request_numbers: dict[ScoredRow, list[int]] = {}  # of the requests of each row
        cut = 0
        answers: list[Answer] = [(0.0, False)] * len(requests)  # each is replaced below
        for number, (texts, context, continuation) in enumerate(requests):
            if not continuation:
                raise _without_continuation(texts)
            if len(continuation) > self.max_length:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens does not fit into"
                    f" max_length={self.max_length}."
                )
            tokens = (context or [self.prefix_token_id]) + continuation
            cut += len(tokens) > self.max_length + 1
            row = tuple(tokens[-self.max_length - 1 : -1]), len(continuation)
            request_numbers.setdefault(row, []).append(number)
        _warn(cut, len(requests), self.max_length)
        rows = sorted(request_numbers, key=lambda row: (-len(row[0]), row))
        title = "Running loglikelihood requests"
        with tqdm(total=len(requests), disable=disable_tqdm, desc=title) as bar:
            for row, earlier, likeliest, final in self._scored(rows):
                for number in request_numbers[row]:
                    texts, _, continuation = requests[number]
                    token = continuation[-1]
                    greedy = bool(likeliest and final.argmax() == token)
                    answers[number] = (float(earlier + final[token]), greedy)
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answers[number])
                bar.update(len(request_numbers[row]))
        return answers

    def _scored(
        self, rows: list[ScoredRow]
    ) -> Iterator[tuple[ScoredRow, np.ndarray, np.ndarray, np.ndarray]]:
        """Each row with the results of `token_scores`."""
        for start_row in range(0, len(rows), self.batch_size):
            batch = rows[start_row : start_row + self.batch_size]
            filled = full_batch(batch, self.batch_size)
            lengths, counts = np.array([(len(read), count) for read, count in filled], np.int32).T
            length = min(rounded(lengths.max(), BUCKET), self.max_length)
            tokens, _ = padded([read for read, _ in filled], length)
            width = next(width for width in WIDTHS if width >= counts.max() - 1)
            results = token_scores(self.params, self.config, width, tokens, lengths, counts)
            yield from zip(batch, *map(np.asarray, results), strict=False)

    def generate_until(
        self, requests: Sequence[HarnessRequest], disable_tqdm: bool = False
    ) -> list[str]:
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
                kwargs = normalize_gen_kwargs(batch[0][1], self.max_gen_toks)
                count = kwargs.pop("max_gen_toks")
                stops = [*kwargs.pop("until"), self.tokenizer.shown(self.eot_token_id)]
                rules = self._rules(kwargs)
                contexts = [context for context, _ in batch]
                batch_texts = self._generated(contexts, count, stops, rules)
                for args, text in zip(batch, batch_texts, strict=True):
                    self.cache_hook.add_partial("generate_until", args, text)
                texts += batch_texts
                bar.update(len(batch))
        return order.get_original(texts)  # type: ignore[no-any-return]

    def _rules(self, kwargs: dict[str, Any]) -> Sampling:
        """The sampling of a request; greedy unless it says otherwise."""
        if kwargs.get("num_beams") == 1:
            kwargs.pop("num_beams")
        unknown = sorted(kwargs.keys() - SAMPLING)
        if unknown:
            raise ConfigError(
                f"generation_kwargs hold {', '.join(unknown)}: the model jaxformer takes until,"
                f" max_gen_toks, {', '.join(sorted(SAMPLING))}."
            )
        is_random = bool(kwargs.pop("do_sample"))
        kwargs["temperature"] = kwargs.get("temperature", 1.0) if is_random else 0.0
        return Sampling(**writing_rules(self.tokenizer), **kwargs)

    def _generated(
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
        encoded = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        _warn(sum(len(prompt) > space for prompt in encoded), len(encoded), space)
        prompts = full_batch([prompt[-space:] for prompt in encoded], self.batch_size)
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
                before_end = [*itertools.takewhile(self.eot_token_id.__ne__, row)]
                texts.append(self.tokenizer.decode(before_end))
                has_stop = any(stop in texts[-1] for stop in stops if stop)
                stopped = stopped and (len(before_end) < len(row) or has_stop)
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


def _without_continuation(texts: tuple[str, str] | None) -> ConfigError:
    """The error of a continuation without tokens, which would win with its probability of 1.
    `texts` are the context and the continuation, where they are known."""
    quoted = "" if texts is None else f" {texts[1]!r} after the context {texts[0]!r}"
    return ConfigError(
        f"the continuation{quoted} has no tokens of its own, so it has no likelihood: a task needs"
        " choices that are not empty, and that begin with the space or line that separates them"
        " from the context (target_delimiter)."
    )


def _count(name: str, value: Any, limit: int | None = None) -> int:
    """A whole number from 1 to `limit`, as the command line or a caller gives it."""
    if not str(value).isdecimal() or int(value) < 1 or (limit is not None and int(value) > limit):
        allowed = "of at least 1" if limit is None else f"from 1 to {limit}"
        raise ConfigError(f"{name}={value} must be a whole number {allowed}.")
    return int(value)


@functools.partial(jax.jit, static_argnums=(1, 2))
def token_scores(
    params: Params,
    config: ModelConfig,
    width: int,
    tokens: jax.Array,
    lengths: jax.Array,
    counts: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scores of each row's last tokens: the sum of the log-probabilities of all but the very
    last [B], whether each of these is the likeliest token [B], and the log-probabilities of every
    token of the vocabulary as the very last [B, V].

    `tokens` [B, T] have `lengths` [B] tokens each, without the very last, and padding on the right;
    `counts` [B] tokens are scored, at most `width` + 1. Only their logits are computed, and no more
    than about `MAX_LOGITS` at once.
    """
    segments = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
    x = hidden(params, config, Inputs(tokens, layout_of(tokens, None, segments))).x  # [B, T, D]

    def logits(index: jax.Array) -> jax.Array:  # [B, n] -> [B, n, V]
        chosen = jnp.take_along_axis(x, index[..., None], axis=1)  # [B, n, D]
        return head(params, config, chosen, TokenLayout(index))

    def tile(distances: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first two results for the tokens at `distances` [n] before the last one."""
        index = jnp.maximum(lengths[:, None] - 1 - distances, 0)  # [B, n]
        tile_logits = logits(index)
        targets = jnp.take_along_axis(tokens, index + 1, axis=1)
        is_scored = distances < counts[:, None]
        scores = jnp.take_along_axis(tile_logits, targets[..., None], axis=-1)[..., 0]
        scores = scores - jax.nn.logsumexp(tile_logits, axis=-1)
        is_likeliest = tile_logits.argmax(-1) == targets
        return jnp.where(is_scored, scores, 0).sum(1), (~is_scored | is_likeliest).all(1)

    # A tile has a power of two of tokens of each row, which divides every width, and at most
    # MAX_LOGITS logits.
    tile_tokens = max(MAX_LOGITS // (len(tokens) * config.vocab_size), 1)
    size = min(width, 1 << (tile_tokens.bit_length() - 1))
    sums, right = jax.lax.map(tile, jnp.arange(1, width + 1).reshape(-1, max(size, 1)))
    final = jax.nn.log_softmax(logits(lengths[:, None] - 1), axis=-1)[:, 0]
    return sums.sum(0), right.all(0), final
