"""A model as EleutherAI's evaluation harness asks it: log-likelihoods of texts, and generation.

Requests become token ids, windows and stops as for the harness's own Hugging Face models, except
that the tokens that a template puts before a text are never scored. Rows are sorted by length and
padded to a full batch and to multiples of `BUCKET` tokens, so that few programs are compiled.
Importing this file imports lm_eval, an optional package.
"""

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxformer.arrays.exact import log_softmax
from jaxformer.arrays.params import Params
from jaxformer.arrays.sharding import constrain
from jaxformer.checkpoints.digests import fingerprint
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.cluster.signals import current
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.train import Weights
from jaxformer.files import ConfigError
from jaxformer.generation.prompts import full_batch, padded, rounded
from jaxformer.generation.refill import refill
from jaxformer.generation.sampling import FILTERS, LOGIT_PENALTIES, Sampling
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout, layout_of
from jaxformer.models.inputs import Inputs
from jaxformer.models.transformer import context_of, hidden
from jaxformer.runs.loading import Loaded, load
from jaxformer.runs.model_files import ModelFiles, writing_rules
from jaxformer.tokenizer.chat import (
    PROBE,
    ChatTemplate,
    special_names,
    template_fingerprint,
    template_of,
)
from jaxformer.tokenizer.metadata import TOKENIZER_FILE, missing

LOG = logging.getLogger(__name__)
# The arguments of `--model_args` that `HarnessModel` takes, and those that the harness gives to
# every model.
PASSED_ON = ("batch_size", "max_length", "max_gen_toks", "add_bos_token")
GIVEN_TO_ALL = ("device", "max_batch_size")
AUTO_BATCH = 16
BUCKET = 64  # lengths are rounded up to multiples of this
# The keywords of generation that a request may have.
SAMPLING = {"do_sample", "no_repeat_ngram_size", "min_new_tokens", *LOGIT_PENALTIES, *FILTERS}


# The number of scored tokens before a row's last one is rounded up to one of these.
WIDTHS = (0, *(16 * 4**power for power in range(14)))
MAX_LOGITS = 2**23  # about as many are in memory at once


ScoringRequest = tuple[tuple[str, str] | None, list[int], list[int]]
Answer = tuple[float, bool]
# A row with the results of `token_scores`.
RowScores = tuple["ScoredRow", np.ndarray, np.ndarray, np.ndarray]


class ScoredRow(NamedTuple):
    """The tokens read, how many tokens at the end are scored with the one that follows, and the
    source of an encoder-decoder."""

    read: tuple[int, ...]
    scored: int
    source: tuple[int, ...] = ()


class HarnessModel(TemplateLM):
    """A language model with a decoder, as the harness asks it.

    Without parameters it answers nothing, but refuses all that it would refuse with them.
    `batch_size` "auto" is 16 rows; `max_length` and `max_gen_toks` are numbers of tokens;
    `add_bos_token` None follows the tokenizer's template. `name` is the model in messages.
    """

    shows_progress = True  # by bars on standard error; of an instance it may be set to False

    def __init__(
        self,
        model: Loaded,
        name: str,
        *,
        batch_size: int | str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
    ) -> None:
        config = model.config
        if config.output != "language":
            raise ConfigError(
                f"{name} has model.family={config.family!r} and the head {config.output!r}, and the"
                " harness asks for the next token: give it a decoder or an encoder-decoder that is"
                " a language model."
            )
        super().__init__()
        self.backend = "causal"
        if config.family == "encoder_decoder":
            self.backend = "seq2seq"
        self.tokenizer: Any = model.tokenizer
        self.add_bos_token = add_bos_token
        # The token that ends an answer in a conversation, if any; None before the first one.
        self._turn_ends: set[int] | None = None
        self.params = model.params
        self.step = model.step
        self.batches = 0  # that were read
        # A scan compiles fastest, and there are many shapes to compile.
        self.config = dataclasses.replace(config, layer_loop="scan")
        if str(batch_size).startswith("auto"):
            batch_size = AUTO_BATCH
        self.batch_size = _count("batch_size", batch_size)
        context = context_of(self.params, config)
        self.max_length = context
        if max_length is not None:
            self.max_length = _count("max_length", max_length, context)
        self.max_gen_toks = _count("max_gen_toks", max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.end_token

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none: BOS, or the end token where the settings of the
        tokenizer name no BOS, whatever config.json says."""
        if "bos_token" in special_names(self.tokenizer):
            begin = self.tokenizer.special("bos")
            if begin is not None:
                return begin
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Under this name the harness keeps requests, in which the template of chats is written."""
        return f"{self.tokenizer.fingerprint()}-{template_fingerprint(self.tokenizer)}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template of chats; None where it is switched off."""
        if not chat_template:
            return None
        if chat_template not in (True, "default"):
            raise ConfigError(
                f"--apply_chat_template {chat_template}: the model jaxformer renders the default"
                " template of a tokenizer alone; leave out the name."
            )
        text, _ = template_of(self.tokenizer)
        return text

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of messages, with the beginning of an answer, or else up to the end of the last
        message, which the model goes on with.

        As for the harness's own models, a template that refuses a system message gets none. From
        now on an answer ends with the token with which the template ends a turn.
        """
        try:
            if self._turn_ends is None:
                before_answer = chat_history
                if not add_generation_prompt:
                    before_answer = chat_history[:-1]
                self._turn_ends = set()
                end = self._template.end_of_turn(before_answer)
                if end is not None:
                    self._turn_ends.add(end)
            return self._rendered(chat_history, add_generation_prompt)
        except ConfigError as error:
            spoken = [message for message in chat_history if message["role"] != "system"]
            if len(spoken) == len(chat_history):
                raise
            LOG.warning(f"{error}: the system message is left out.")
            return self._rendered(spoken, add_generation_prompt)

    def _rendered(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        if add_generation_prompt:
            return self._template.render(messages, True)
        # The last message is cut where its content ends. A template may strip what it writes.
        *before, last = messages
        marked = last | {"content": f"{last['content']}{PROBE} "}
        text, _, after = self._template.render([*before, marked]).rpartition(PROBE)
        if after.startswith(" "):
            return text
        return text.rstrip()

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer, today=True)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids, with the special tokens of the template unless they are switched off or the
        text begins with one. With them a source ends with the end token."""
        ids = self.tokenizer.encode(string, special_tokens=True)
        prefix_length = len(self.tokenizer.prefix)
        suffix_length = len(self.tokenizer.suffix)
        if add_special_tokens is None:
            has_prefix = string.startswith(self.tokenizer.shown(self.prefix_token_id))
            add_special_tokens = not has_prefix
        if self.add_bos_token is False or not add_special_tokens:
            return ids[prefix_length : len(ids) - suffix_length]
        if self.backend == "seq2seq" and ids[-1:] != [self.eot_token_id]:
            ids.append(self.eot_token_id)
        if self.add_bos_token and not prefix_length:
            ids.insert(0, self.prefix_token_id)
        return ids

    def stops_of(self, until: Sequence[Any]) -> tuple[list[str], set[int]]:
        """The texts that stop a text, and the tokens that do.

        A text lacks special tokens, so that a stop that is the name of one is that token.
        """
        added = self.tokenizer.encoder.spec()["added_tokens"]
        names = [row["content"] for row in added if row["special"]]
        texts = [self.tokenizer.shown(self.eot_token_id)]
        ends = set(self._turn_ends or ())
        for stop in until:
            if stop in (None, ""):
                continue
            if not isinstance(stop, str):
                raise ConfigError(f"generation_kwargs: until has {stop!r}, and takes texts.")
            name = max((name for name in names if name in stop), key=len, default=None)
            if name is None:
                texts.append(stop)
            elif stop.lstrip().startswith(name):
                ends.add(self.tokenizer.id_of(name))
            else:
                raise ConfigError(
                    f"generation_kwargs: until has {stop!r}, which no text has, since the special"
                    f" token {name!r} is left out of texts: give the text before it, or the token."
                )
        return texts, ends

    def get_model_info(self) -> dict[str, Any]:
        """Which weights these are, for the results of the harness."""
        leaves = flat_leaves(self.params)
        revision = ""
        if self.step is not None:
            revision = f"step {self.step}"
        return {
            "model_num_parameters": sum(leaf.size for leaf in leaves.values()),
            "model_dtype": self.config.dtype,
            "model_revision": revision,
            "model_sha": fingerprint(leaves),
            "model_config": dataclasses.asdict(self.config),
        }

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """(log-likelihood, whether it is the greedy continuation) of each text after its context.

        An empty context is the prefix token.
        """
        for request in requests:
            context, continuation = request.args
            if context == "" and not self.tok_encode(continuation, add_special_tokens=False):
                raise _without_continuation((context, continuation))
        answers: list[Answer] = super().loglikelihood(requests, self._hides(disable_tqdm))
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of each text, read in windows of max_length tokens in which each token
        is predicted once. What the template puts before a text, or the prefix token where it puts
        nothing there, is read and not scored."""
        windows: list[ScoringRequest] = []
        owners: list[int] = []  # the number of each window's text
        begin = self.tokenizer.prefix or [self.prefix_token_id]
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            if tokens[: len(begin)] == begin:
                tokens = tokens[len(begin) :]
            before = begin[:-1]  # of the first window
            pairs = get_rolling_token_windows(tokens, begin[-1], self.max_length, context_len=1)
            for pair in pairs:
                context, continuation = make_disjoint_window(pair)
                windows.append((None, [*before, *context], continuation))
                owners.append(number)
                before = []
        totals = [0.0] * len(requests)
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (value, _) in zip(owners, answers, strict=True):
            totals[number] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[ScoringRequest], disable_tqdm: bool = False, **__: Any
    ) -> list[Answer]:
        """(log-likelihood, whether it is the greedy continuation) of each continuation after its
        context.

        Requests that differ only in their last token, as the letters of a multiple choice do, are
        one row. An empty context is the prefix token, as `loglikelihood` has it.
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
            context = context or [self.prefix_token_id]
            if self.backend == "causal":
                tokens = [*context, *continuation]
                row = ScoredRow(tuple(tokens[-self.max_length - 1 : -1]), len(continuation))
                cut += len(tokens) > self.max_length + 1
            else:
                # The context is the source, and the start token is before the continuation, as for
                # the harness's own models.
                read = (self.tokenizer.start_token, *continuation[:-1])
                source = tuple(context[-self._source_length :])
                row = ScoredRow(read, len(continuation), source)
                cut += len(context) > self._source_length
            request_numbers.setdefault(row, []).append(number)
        _warn(cut, len(requests), self.max_length)
        rows = sorted(request_numbers, key=lambda row: (-len(row.source), -len(row.read), row))
        title = "Running loglikelihood requests"
        with tqdm(total=len(requests), disable=self._hides(disable_tqdm), desc=title) as bar:
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

    def _hides(self, disable_tqdm: bool) -> bool:
        """Whether a bar is left out, by the harness or by whoever made this model."""
        return disable_tqdm or not self.shows_progress

    def _heed(self) -> None:
        """Ends the evaluation of a run that a signal asks to stop, between two batches."""
        request = current()
        if request:
            request.heed(self.batches)
        self.batches += 1

    @property
    def _source_length(self) -> int:
        """The most tokens of a source."""
        return min(self.max_length, context_of(self.params, self.config, source=True))

    def _scored(self, rows: list[ScoredRow]) -> Iterator[RowScores]:
        """Each row with the results of `token_scores`; zeros without parameters."""
        if not self.params:
            nothing = np.zeros(self.config.vocab_size, np.float32)
            for row in rows:
                yield row, nothing[0], nothing[0], nothing
            return
        for start_row in range(0, len(rows), self.batch_size):
            self._heed()
            batch = rows[start_row : start_row + self.batch_size]
            filled = full_batch(batch, self.batch_size)
            length = rounded(max(len(row.read) for row in filled), BUCKET)
            read = padded([row.read for row in filled], min(length, self.max_length), left=True)
            source = None
            if self.backend == "seq2seq":
                length = rounded(max(len(row.source) for row in filled), BUCKET)
                sources = [row.source for row in filled]
                source = padded(sources, min(length, self._source_length))
            counts = np.array([row.scored for row in filled], np.int32)
            width = next(width for width in WIDTHS if width >= counts.max() - 1)
            results = token_scores(self.params, self.config, width, read, counts, source)
            yield from zip(batch, *map(np.asarray, results), strict=False)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each context, up to the first of the request's stops."""
        order = Collator(
            [request.args for request in requests],
            lambda args: -len(args[0]),
            lambda args: args[1],
            "gen_kwargs",
        )
        texts = []
        title = "Running generate_until requests"
        with tqdm(total=len(requests), disable=self._hides(disable_tqdm), desc=title) as bar:
            # All requests of the same keywords: where a text ends, the next one takes its row.
            for group in order.get_batched(n=0):
                count, stops, rules = self.check_generation(group[0][1])
                group_texts = [""] * len(group)
                contexts = [context for context, _ in group]
                for number, text in self._generated(contexts, count, stops, rules):
                    group_texts[number] = text
                    self.cache_hook.add_partial("generate_until", group[number], text)
                    bar.update()
                texts += group_texts
        return order.get_original(texts)  # type: ignore[no-any-return]

    def check_generation(
        self, keywords: Mapping[str, Any]
    ) -> tuple[int, list[str], dict[str, Any]]:
        """How many tokens a request asks for, the texts that stop it, and the fields of its
        `Sampling`, greedy unless it says otherwise."""
        kwargs = dict(normalize_gen_kwargs(dict(keywords), self.max_gen_toks))
        count = kwargs.pop("max_gen_toks")
        stops, ends = self.stops_of(kwargs.pop("until"))
        if kwargs.get("num_beams") == 1:
            kwargs.pop("num_beams")
        unknown = sorted(kwargs.keys() - SAMPLING)
        if unknown:
            raise ConfigError(
                f"generation_kwargs hold {', '.join(unknown)}: the model jaxformer takes until,"
                f" max_gen_toks, {', '.join(sorted(SAMPLING))}."
            )
        if self.max_length - count - len(self._beginning[1:]) < 1:
            raise ConfigError(
                f"max_gen_toks={count} leaves no space for a context in"
                f" max_length={self.max_length}: ask for fewer tokens."
            )
        if kwargs.pop("do_sample"):
            kwargs.setdefault("temperature", 1.0)
        else:
            kwargs["temperature"] = 0.0
        rules = writing_rules(self.tokenizer) | kwargs
        rules["end_token"] = tuple(dict.fromkeys([*rules["end_token"], *sorted(ends)]))
        Sampling(**rules)  # raises for a value out of range
        return count, stops, rules

    @property
    def _beginning(self) -> list[int]:
        """The tokens with which the decoder of an encoder-decoder begins; none of a decoder."""
        if self.backend == "causal":
            return []
        return self.tokenizer.as_target([])  # type: ignore[no-any-return]

    def _generated(
        self, contexts: Sequence[str], count: int, stops: Sequence[str], rules: dict[str, Any]
    ) -> Iterator[tuple[int, str]]:
        """The numbers of the contexts and their texts, cut at the stops, as the texts end; empty
        texts without parameters."""
        if not self.params:
            for number in range(len(contexts)):
                yield number, ""
            return
        beginning = self._beginning
        most = self.max_length - count
        if beginning:
            most = self._source_length
        read = list[list[int]]()
        cut = 0
        for context in contexts:
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            cut += len(prompt) > most
            read.append(prompt[-most:])
        _warn(cut, len(read), most)
        prompts = read
        sources = None
        if beginning:
            prompts = [beginning] * len(read)
            sources = read
        ends = rules["end_token"]

        def text_of(tokens: list[int]) -> str:
            return str(self.tokenizer.decode(itertools.takewhile(lambda t: t not in ends, tokens)))

        def stopped(number: int, tokens: list[int]) -> bool:
            self._heed()
            text = text_of(tokens)
            return any(stop in text for stop in stops)

        texts = refill(
            self.params,
            self.config,
            prompts,
            count,
            rows=self.batch_size,
            key=jax.random.key(np.random.randint(2**31)),  # the harness has seeded NumPy
            sources=sources,
            stopped=stopped,
            **rules,
        )
        for number, tokens in texts:
            yield number, postprocess_generated_text(text_of(tokens), stops, None)


class JaxformerLM(HarnessModel):
    """The model that the harness makes from `--model_args`: a decoder or an encoder-decoder from a
    run directory or a Hugging Face directory.

    `step` selects a checkpoint; `dtype` is that of weights and products, "auto" as the config says;
    `weights` are as `jf.load` takes them; the other arguments are those of `HarnessModel`. Raises
    ConfigError for an argument that is unknown or out of range, and for a model that is not a
    language model with a decoder.
    """

    def __init__(
        self,
        path: str = "",
        step: int | None = None,
        dtype: str = "auto",
        weights: Weights = "auto",
        **arguments: Any,
    ) -> None:
        for name in GIVEN_TO_ALL:
            arguments.pop(name, None)
        unknown = sorted(arguments.keys() - {*PASSED_ON})
        if not path:
            unknown = ["no path"]
        if unknown:
            raise ConfigError(
                f"--model_args holds {', '.join(unknown)}: the model jaxformer needs"
                " path=DIRECTORY, and takes step, weights, batch_size, max_length, max_gen_toks,"
                " dtype and add_bos_token."
            )
        settings = dict[str, Any]()
        if dtype != "auto":
            settings["dtype"] = dtype
        files = ModelFiles(path)
        model = load(files, step, weights=weights, **settings)
        if model.tokenizer is None:
            raise missing(files.path / TOKENIZER_FILE)
        config = with_settings(model.config, settings)
        super().__init__(dataclasses.replace(model, config=config), str(path), **arguments)


# B is the number of rows, T that of their tokens, S that of the tokens of a source, D the width of
# the model and V the size of the vocabulary.
@functools.partial(jax.jit, static_argnums=(1, 2))
def token_scores(
    params: Params,
    config: ModelConfig,
    width: int,
    read: tuple[jax.Array, jax.Array],
    counts: jax.Array,
    source: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scores of each row's last tokens: the sum of the log-probabilities of all but the very
    last [B], whether each of these is the likeliest token [B], and the log-probabilities of every
    token of the vocabulary as the very last [B, V].

    `read` are the tokens [B, T] without the very last, with padding on the left, and their segment
    ids [B, T]; `counts` [B] tokens are scored, at most `width` + 1. Only their logits are computed,
    and no more than about `MAX_LOGITS` at once. An encoder-decoder reads the tokens of `source`
    [B, S] with their segment ids [B, S].
    """
    tokens, segments = read
    inputs = Inputs(tokens, layout_of(tokens, None, segments))
    if source is not None:
        source_layout = layout_of(source[0], None, source[1])
        inputs = dataclasses.replace(inputs, source=source[0], source_layout=source_layout)
    x = hidden(params, config, inputs).x  # [B, T, D]

    def log_probs(x: jax.Array) -> jax.Array:  # [B, n, D] -> [B, n, V]
        layout = TokenLayout(jnp.zeros(x.shape[:2], jnp.int32))
        return log_softmax(head(params, config, x, layout), config.exact)

    def of_token(token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """The first two results of one token of each row: [B, D], [B], [B] -> [B] twice."""
        y, target, is_scored = token
        logs = log_probs(y[:, None])[:, 0]
        score = jnp.take_along_axis(logs, target[:, None], axis=-1)[:, 0]
        return jnp.where(is_scored, score, 0), ~is_scored | (logs.argmax(-1) == target)

    length = tokens.shape[1]
    first = max(length - 1 - width, 0)
    is_scored = jnp.arange(length - 1, 0, -1) < counts[:, None]  # by the distance from the last
    pairs = (x[:, first:-1], tokens[:, first + 1 :], is_scored[:, first:])
    by_position = jax.tree.map(lambda a: a.swapaxes(0, 1), pairs)
    at_once = max(MAX_LOGITS // (len(tokens) * config.vocab_size), 1)
    scores, right = jax.lax.map(of_token, by_position, batch_size=at_once)
    # Every process of a run reads them all.
    return (
        constrain(scores.sum(0), (None,)),
        constrain(right.all(0), (None,)),
        constrain(log_probs(x[:, -1:])[:, 0], (None, None)),
    )


def _warn(cut: int, number: int, space: int) -> None:
    if cut:
        LOG.warning(
            f"{cut} of {number} contexts lose their beginning: there is room for {space} tokens."
        )


def _without_continuation(texts: tuple[str, str] | None) -> ConfigError:
    """The error of a continuation without tokens, which would win with its probability of 1.
    `texts` are the context and the continuation, where they are known."""
    quoted = ""
    if texts is not None:
        quoted = f" {texts[1]!r} after the context {texts[0]!r}"
    return ConfigError(
        f"the continuation{quoted} has no tokens of its own, so it has no likelihood: a task needs"
        " choices that are not empty, and that begin with the space or line that separates them"
        " from the context (target_delimiter)."
    )


def _count(name: str, value: Any, limit: int | None = None) -> int:
    """A whole number from 1 to `limit`, as the command line or a caller gives it."""
    if str(value).isdecimal() and 1 <= int(value) <= (limit or math.inf):
        return int(value)
    allowed = "of at least 1"
    if limit is not None:
        allowed = f"from 1 to {limit}"
    raise ConfigError(f"{name}={value} must be a whole number {allowed}.")
