"""`jaxformer sample RUN`: text that a model writes, streamed to the terminal, or its answer about
the prompt."""

import functools
import itertools
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from jaxformer.cli.arguments import ModelArguments, parse
from jaxformer.cli.prompts import (
    Model,
    check_size,
    open_model,
    row_of,
    start_of,
    text_of,
    words_of,
    written,
)
from jaxformer.config.format import escaped, printable
from jaxformer.files import ConfigError

SHOWN_CANDIDATES = 5  # predictions printed for a [MASK] or a text


@dataclass(frozen=True, kw_only=True)
class SampleArguments(ModelArguments):
    """Continues a prompt (decoder), or writes the target of a source (encoder-decoder); predicts
    its [MASK] tokens, its class, or the tags of its words."""

    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Text to continue or to read. If not given, a decoder starts a new text."""
    chat: bool = False
    """Read the prompt as the turn of a user, in the chat template of the tokenizer, and write the
    answer. Without --prompt, each line of standard input is a turn of one conversation."""
    system: str = ""
    """With --chat: the message of the system before the conversation."""
    pair: str = ""
    """Second text of an encoder that reads two."""
    max_new_tokens: int = 256
    """Maximum number of new tokens."""
    beyond: Literal["stop", "slide"] = "stop"
    """At the end of the context: stop, or slide, with which a decoder continues from the newest
    three quarters of it."""
    temperature: float = 0.8
    """Sampling temperature; 0 is greedy."""
    top_k: int = 50
    """Sample from the k most likely tokens; 0 samples from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""
    beams: int = 0
    """Beam width; 0 samples instead."""
    length_penalty: float = 0.6
    """Length penalty of the beam search; 0 prefers short texts."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Random seed. If not given, each call samples another text."""


def run(arguments: Sequence[str]) -> int:
    asked = parse(SampleArguments, "sample", arguments)
    model = open_model(asked, asked.pair)
    head, family = model.config.output, model.config.family
    if head not in ANSWERS:
        raise ConfigError(
            f"{asked.path} has no head, so there is nothing to sample: train one, for example with"
            f" --run.init_from {asked.path} --model.head classes."
        )
    if asked.prompt is None and (head, family) != ("language", "decoder"):
        raise ConfigError(f"{asked.path} is a model that needs a text: give one with --prompt.")
    if asked.beams and head != "language":
        raise ConfigError(
            f"{asked.path} has the head {head!r}, which writes no text: leave out --beams."
        )
    if asked.seed is not None and not -(2**63) <= asked.seed < 2**63:
        raise ConfigError(f"--seed {asked.seed} must be a whole number of 64 bits.")
    if asked.beyond == "slide":
        _require_slide(model, asked)
    if asked.chat:
        from jaxformer.cli.conversation import converse

        converse(
            model, asked.prompt, asked.system, lambda m, start: _print_growing(m, asked, start, [])
        )
        return 0
    if asked.system:
        raise ConfigError("--system is a message of a conversation: add --chat, or leave it out.")
    ANSWERS[head](model, asked)
    return 0


def _require_slide(model: Model, asked: SampleArguments) -> None:
    """Raises ConfigError where a text cannot continue beyond the context."""
    head, family = model.config.output, model.config.family
    if head != "language":
        reason = f"the head {head!r} of {asked.path} writes no text"
    elif family != "decoder":
        reason = f"{asked.path} has model.family={family!r}, whose start token would be lost"
    elif asked.beams:
        reason = "--beams compares whole texts, which a sliding window does not hold"
    else:
        return
    raise ConfigError(f"--beyond slide is for sampling from a decoder, but {reason}: leave it out.")


def _write(model: Model, asked: SampleArguments) -> None:
    """Prints the text that continues the prompt, or the target of the prompt as a source."""
    start, source = start_of(model, asked.prompt or "")
    context = model.context()
    if asked.prompt is None:
        start = start or [model.tokenizer.end_token]
    if source:
        most = model.context(source=True)
        check_size(len(source), most, f"into the context of {most}")
    else:
        check_size(len(start), context - 1, f"before a new token into the context of {context}")
    print("" if source else asked.prompt or "", end="")
    _print_growing(model, asked, start, source)


def _print_growing(
    model: Model, asked: SampleArguments, start: list[int], source: list[int]
) -> str:
    """Prints what the model writes after `start` as it is made, and returns it."""
    context, end = model.context(), model.end_tokens
    pieces, made = itertools.tee(_pieces(model, asked, start, source))
    shown = printable if sys.stdout.isatty() else str  # a pipe or a file gets what is written
    decode, texts = functools.partial(text_of, model.tokenizer), list[str]()
    for text in _growing(decode, start, _until(end, pieces)):
        print(shown(text), end="", flush=True)
        texts.append(text)
    print(flush=True)
    space, ended = context - len(start), not {*itertools.chain(*made)}.isdisjoint(end)
    if asked.beyond == "stop" and space < asked.max_new_tokens and not ended:
        slide = "" if source else "; --beyond slide continues beyond it"
        print(
            f"note: the text ends early: of {asked.max_new_tokens} new tokens, only {space} fit"
            f" after the prompt into the context of {context}{slide}.",
            file=sys.stderr,
        )
    return "".join(texts)


def _until(end: tuple[int, ...], pieces: Iterator[list[int]]) -> Iterator[list[int]]:
    """The tokens before the first end token."""
    for piece in pieces:
        kept = [*itertools.takewhile(lambda token: token not in end, piece)]
        yield kept
        if len(kept) < len(piece):
            return


def _pieces(
    model: Model, asked: SampleArguments, start: list[int], source: list[int]
) -> Iterator[list[int]]:
    """New tokens as they are made."""
    count = min(asked.max_new_tokens, model.context() - len(start))
    if asked.beams:
        penalty = asked.length_penalty
        return written(model, start, source, count, asked.beams, length_penalty=penalty)
    import jax

    key = jax.random.key(secrets.randbits(31) if asked.seed is None else asked.seed)
    rules: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
    }
    if asked.beyond == "stop":
        return written(model, start, source, count, 0, key=key, **rules)
    from jaxformer.generation.slide import slide_tokens

    rules |= model.writing_rules()
    beginning = len(model.tokenizer.as_prompt([]))  # special tokens with which every text begins
    count = asked.max_new_tokens
    row = slide_tokens(
        model.params, model.config, start, count, key=key, beginning=beginning, **rules
    )
    return (piece[0].tolist() for piece in row)


def _growing(
    decode: Callable[[list[int]], str], start: list[int], pieces: Iterator[list[int]]
) -> Iterator[str]:
    """What each piece adds to the text of `start`. A character that still lacks bytes is held
    back."""
    tokens, shown = [*start], decode(start)
    for piece in pieces:
        tokens += piece
        text = decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield decode(tokens)[len(shown) :]


def _fill(model: Model, asked: SampleArguments) -> None:
    """Prints the most likely tokens for each [MASK] of the prompt."""
    row = row_of(model, asked.prompt or "", asked.pair)
    masked = np.flatnonzero(row["tokens"] == model.tokenizer.special("mask"))
    if not masked.size:
        raise ConfigError("the prompt has no [MASK]: write one in place of each token to predict.")
    texts = [repr(model.tokenizer.shown(token)) for token in range(model.tokenizer.vocab_size)]
    for number, shares in enumerate(_probabilities(model, row)[masked], 1):
        _print_likeliest(f"[MASK] {number}", texts, shares[: len(texts)])


def _classify(model: Model, asked: SampleArguments) -> None:
    """Prints the most likely classes of the prompt."""
    row = row_of(model, asked.prompt or "", asked.pair)
    _print_likeliest("class", model.labels, _probabilities(model, row))


def _tag(model: Model, asked: SampleArguments) -> None:
    """Prints each word of the prompt with its most likely tag."""
    words, encoded, row = words_of(model, asked.prompt or "")
    tags = _probabilities(model, row)[row["weights"] > 0].argmax(-1)
    labels = dict.fromkeys(range(len(words)), "(the tokenizer makes no token of it)")
    for index, tag in zip(encoded, tags, strict=True):
        labels[index] = escaped(model.labels[tag])
    shown = list(map(escaped, words))
    width = max(map(len, shown))
    for index, word in enumerate(shown):
        print(f"{word:<{width}}  {labels[index]}")


def _probabilities(model: Model, row: dict[str, np.ndarray]) -> np.ndarray:
    """The prediction at each token [T, V], or for the row [C]."""
    import jax

    from jaxformer.models.transformer import forward

    types = row["token_types"][None] if "token_types" in row else None
    logits = jax.jit(forward, static_argnums=1)(
        model.params, model.config, row["tokens"][None], token_types=types
    )
    return np.asarray(jax.nn.softmax(logits[0], axis=-1))


def _print_likeliest(title: str, names: Sequence[str], probabilities: np.ndarray) -> None:
    print(title)
    for index in np.argsort(-probabilities, kind="stable")[:SHOWN_CANDIDATES]:
        print(f"{probabilities[index]:8.1%}  {escaped(names[index])}")


ANSWERS: dict[str, Callable[[Model, SampleArguments], None]] = {
    "language": _write,
    "masked": _fill,
    "classes": _classify,
    "tags": _tag,
}
