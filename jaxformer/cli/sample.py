"""`jaxformer sample RUN`: text that a model writes, streamed to the terminal, a conversation with
it, or what it predicts for the prompt."""

import functools
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxformer.cli.arguments import SampleArguments
from jaxformer.cli.embedding import embed_texts
from jaxformer.cli.prompting import (
    Model,
    check_seed,
    check_size,
    new_tokens,
    open_model,
    row_of,
    several_texts,
    speculated,
    start_of,
    text_of,
    typed_lines,
    words_of,
)
from jaxformer.cli.prompts_file import write_texts
from jaxformer.config.format import escaped, printable
from jaxformer.files import ConfigError
from jaxformer.generation.slide import slide_tokens
from jaxformer.generation.stop_strings import before_stop, stream_before_stop
from jaxformer.models.transformer import forward
from jaxformer.report.banner import aligned
from jaxformer.tokenizer.chat import ChatTemplate
from jaxformer.tokenizer.messages import ASSISTANT

SHOWN_CANDIDATES = 5  # predictions printed for a [MASK] or a text


def run(args: SampleArguments) -> int:
    model = open_model(args, args.pair)
    if args.prompts is not None:
        write_texts(model, args, args.prompts)
        return 0
    if args.embed:
        embed_texts(model, args)
        return 0
    if args.output:
        raise ConfigError("--output is a file for vectors: add --embed, or leave it out.")
    head, family = model.config.output, model.config.family
    if head not in ANSWERS:
        raise ConfigError(
            f"{args.path} has no head, so there is nothing to sample: print its vectors with"
            f" --embed, or train a head, for example with --run.init_from {args.path} --model.head"
            " classes."
        )
    if args.prompt is None and (head, family) != ("language", "decoder"):
        raise ConfigError(f"{args.path} is a model that needs a text: give one with --prompt.")
    if args.beams and head != "language":
        raise ConfigError(
            f"{args.path} has the head {head!r}, which writes no text: leave out --beams."
        )
    _require_several(model, args)
    _require_speculation(args)
    check_seed(args.seed)
    if args.beyond == "slide":
        _require_slide(model, args)
    if args.chat:
        _converse(model, args)
        return 0
    if args.system:
        raise ConfigError("--system is a message of a conversation: add --chat, or leave it out.")
    ANSWERS[head](model, args)
    return 0


def _require_slide(model: Model, args: SampleArguments) -> None:
    """Raises ConfigError where a text cannot continue beyond the context."""
    head, family = model.config.output, model.config.family
    if head != "language":
        reason = f"the head {head!r} of {args.path} writes no text"
    elif family != "decoder":
        reason = f"{args.path} has model.family={family!r}, whose start token would be lost"
    elif args.beams:
        reason = "--beams compares whole texts, which a sliding window does not hold"
    else:
        return
    raise ConfigError(f"--beyond slide is for sampling from a decoder, but {reason}: leave it out.")


def _require_several(model: Model, args: SampleArguments) -> None:
    """Raises ConfigError for --n where only one text can be written."""
    if args.n == 1:
        return
    if args.n < 1:
        reason = "write at least one text"
    elif model.config.output != "language":
        reason = f"the head {model.config.output!r} of {args.path} writes no text: leave it out"
    elif args.chat:
        reason = "a conversation goes on from one answer: leave out --n or --chat"
    elif args.beyond == "slide":
        reason = "several texts cannot slide together: leave out --n or --beyond slide"
    else:
        return
    raise ConfigError(f"--n {args.n}: {reason}.")


def _require_speculation(args: SampleArguments) -> None:
    """Raises ConfigError for --draft and --lookup beside what excludes them."""
    names = [name for name, used in (("--draft", args.draft), ("--lookup", args.lookup)) if used]
    if not names:
        return
    others = {"--beams": args.beams, "--beyond slide": args.beyond == "slide", "--n": args.n > 1}
    excluded = [*names[1:], *(name for name, is_used in others.items() if is_used)]
    if excluded:
        raise ConfigError(f"{names[0]} cannot be combined with {', '.join(excluded)}: use one.")


def _write(model: Model, args: SampleArguments) -> None:
    """Prints the text that continues the prompt, or the target of the prompt as a source."""
    start, source = start_of(model, args.prompt or "")
    context = model.context()
    if args.prompt is None:
        start = start or [model.tokenizer.end_token]
    if source:
        source_context = model.context(source=True)
        check_size(len(source), source_context, f"into the context of {source_context}")
    else:
        check_size(len(start), context - 1, f"before a new token into the context of {context}")
    if args.n > 1:
        _print_several(model, args, start, source)
        return
    print("" if source else args.prompt or "", end="")
    _print_growing(model, args, start, source)


def _print_several(
    model: Model, args: SampleArguments, start: list[int], source: list[int]
) -> None:
    """Prints `n` texts, each below a line with its number; of a beam search the best first."""
    count = min(args.max_new_tokens, model.context() - len(start))
    rules = _rules(model, args) | ({"keep": args.n} if args.beams else {"n": args.n})
    decode = functools.partial(text_of, model.tokenizer)
    rows = several_texts(model, start, source, count, args.beams, **rules)
    for number, row in enumerate(rows, 1):
        text = decode([*start, *model.before_end(row)])[len(decode(start)) :]
        print(f"--- {number} of {args.n}")
        print(("" if source else args.prompt or "") + before_stop(text, args.stop_strings))


def _print_growing(model: Model, args: SampleArguments, start: list[int], source: list[int]) -> str:
    """Prints what the model writes after `start` as it is made, and returns it."""
    made: list[int] = []

    def before_end() -> Iterator[list[int]]:
        """The pieces up to the first end token, which `made` has too."""
        for piece in _pieces(model, args, start, source):
            made.extend(piece)
            text_tokens = model.before_end(piece)
            yield text_tokens
            if len(text_tokens) < len(piece):
                return

    context = model.context()
    # A pipe or a file gets the text as it is, a terminal without control characters.
    shown = printable if sys.stdout.isatty() else str
    texts: list[str] = []
    growing = _growing(functools.partial(text_of, model.tokenizer), start, before_end())
    for text in stream_before_stop(growing, args.stop_strings):
        print(shown(text), end="", flush=True)
        texts.append(text)
    print(flush=True)
    space, ended = context - len(start), len(model.before_end(made)) < len(made)
    written = text_of(model.tokenizer, made)
    ended = ended or any(stop in written for stop in args.stop_strings)
    if args.beyond == "stop" and space < args.max_new_tokens and not ended:
        slide = "" if source else "; --beyond slide continues beyond it"
        print(
            f"note: the text ends early: of {args.max_new_tokens} new tokens, only {space} fit"
            f" after the prompt into the context of {context}{slide}.",
            file=sys.stderr,
        )
    return "".join(texts)


def _pieces(
    model: Model, args: SampleArguments, start: list[int], source: list[int]
) -> Iterator[list[int]]:
    """New tokens, in pieces as they are made."""
    count = min(args.max_new_tokens, model.context() - len(start))
    rules = _rules(model, args)
    if args.draft is not None or args.lookup:
        return iter([speculated(model, start, count, args.draft, args.ahead, **rules)])
    if args.beams or args.beyond == "stop":
        return new_tokens(model, start, source, count, args.beams, **rules)
    # The special tokens with which every text begins stay in the window.
    rules = model.writing_rules() | rules | {"beginning": len(model.tokenizer.as_prompt([]))}
    pieces = slide_tokens(model.params, model.config, start, args.max_new_tokens, **rules)
    return (piece[0].tolist() for piece in pieces)  # [1, n]


def _rules(model: Model, args: SampleArguments) -> dict[str, Any]:
    """The settings of the command, as keywords of `beam_search` or of `stream_tokens`."""
    rules = args.rules(model.tokenizer.encode)
    if args.stop_strings:
        rules["tokenizer"] = model.tokenizer
    if args.beams:
        return rules | args.search()
    rules |= {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    rules["key"] = jax.random.key(secrets.randbits(31) if args.seed is None else args.seed)
    return rules


def _growing(
    decode: Callable[[list[int]], str], start: list[int], pieces: Iterator[list[int]]
) -> Iterator[str]:
    """What each piece adds to the text of `start`. A character that still lacks bytes waits for the
    next piece."""
    tokens, shown = [*start], decode(start)
    for piece in pieces:
        tokens += piece
        text = decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield decode(tokens)[len(shown) :]


def _converse(model: Model, args: SampleArguments) -> None:
    """Answers the prompt, or without one every line of standard input, with the turns before it.

    An answer ends with the special token with which the chat template of the tokenizer ends a turn.
    Raises ConfigError for a model that writes no text, a tokenizer without a template, and a
    conversation that is longer than the context.
    """
    if (model.config.output, model.config.family) != ("language", "decoder"):
        raise ConfigError(f"{model.path} is no decoder that writes text: leave out --chat.")
    if args.prompt is not None and not args.prompt.strip():
        raise ConfigError("the prompt is empty: give --prompt some text.")
    template, context = ChatTemplate.of(model.tokenizer, today=True), model.context()
    messages = [{"role": "system", "content": args.system}] if args.system else []
    turns = typed_lines() if args.prompt is None else [args.prompt]
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        start, end = template.encode_prompt(messages), template.end_of_turn(messages)
        check_size(len(start), context - 1, f"before a new token into the context of {context}")
        if end is None and not number:
            print(
                f"note: {template.where} ends an answer without a special token, so it is written"
                " until the end of the text, or --max_new_tokens.",
                file=sys.stderr,
            )
        stops = () if end is None else (end,)
        answer = _print_growing(replace(model, stops=stops), args, start, [])
        messages.append({"role": ASSISTANT, "content": answer.strip()})


def _fill(model: Model, args: SampleArguments) -> None:
    """Prints the most likely tokens for each [MASK] of the prompt."""
    row = row_of(model, args.prompt or "", args.pair)
    masked = np.flatnonzero(row["tokens"] == model.tokenizer.special("mask"))
    if not masked.size:
        raise ConfigError("the prompt has no [MASK]: write one in place of each token to predict.")
    texts = [repr(model.tokenizer.shown(token)) for token in range(model.tokenizer.vocab_size)]
    for number, probabilities in enumerate(_probabilities(model, row)[masked], 1):
        _print_likeliest(f"[MASK] {number}", texts, probabilities[: len(texts)])


def _classify(model: Model, args: SampleArguments) -> None:
    """Prints the most likely classes of the prompt."""
    row = row_of(model, args.prompt or "", args.pair)
    _print_likeliest("class", model.labels, _probabilities(model, row))


def _tag(model: Model, args: SampleArguments) -> None:
    """Prints each word of the prompt with its most likely tag."""
    words, encoded_words, row = words_of(model, args.prompt or "")
    tags = _probabilities(model, row)[row["weights"] > 0].argmax(-1)
    labels = ["(the tokenizer makes no token of it)"] * len(words)
    for index, tag in zip(encoded_words, tags, strict=True):
        labels[index] = escaped(model.labels[tag])
    print("\n".join(aligned([*zip(map(escaped, words), labels, strict=True)])))


def _probabilities(model: Model, row: dict[str, np.ndarray]) -> np.ndarray:
    """The predicted probabilities at each token [T, V], or for the row [C]."""
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
