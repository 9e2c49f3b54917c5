"""`jaxformer sample RUN`: text that a model writes, streamed to the terminal; a conversation with
it; or the texts of many prompts of a file."""

import json
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.cli.arguments import SampleArguments
from jaxformer.cli.prompting import (
    Model,
    check_size,
    new_tokens,
    open_model,
    start_of,
    text_of,
    typed_lines,
)
from jaxformer.config.format import printable
from jaxformer.files import ConfigError, parse_object, read_text
from jaxformer.generation.refill import refill
from jaxformer.generation.slide import slide_tokens
from jaxformer.generation.speculative import speculate
from jaxformer.generation.stop_strings import before_stop, stream_before_stop
from jaxformer.runs.loading import load
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate
from jaxformer.tokenizer.messages import ASSISTANT

PROMPTS_ADVICE = 'give a text file with a prompt a line, or .jsonl with {"prompt": "..."} a line'


def run(args: SampleArguments) -> int:
    model = open_model(args)
    _check(model, args)
    if args.prompts is not None:
        _write_prompts(model, args, args.prompts)
    elif args.chat:
        _converse(model, args)
    else:
        _write(model, args)
    return 0


def _check(model: Model, args: SampleArguments) -> None:
    """Refuses a model that writes no text, and options of which one excludes another."""
    head, family = model.config.output, model.config.family
    if head != "language":
        what = f"has the head {head!r}, which" if head != "none" else "has no head, and"
        raise ConfigError(
            f"{args.path} {what} writes no text: `jaxformer predict` gives masked tokens, classes"
            " and tags, and `jaxformer embed` vectors."
        )
    if family != "decoder" and (args.chat or args.beyond == "slide" or args.draft or args.lookup):
        raise ConfigError(
            f"{args.path} has model.family={family!r}: --chat, --draft, --lookup and --beyond slide"
            " are for a decoder."
        )
    if family != "decoder" and args.prompt is None and args.prompts is None:
        raise ConfigError(f"{args.path} is a model that needs a text: give one with --prompt.")
    ways = {
        "--beams": args.beams,
        "--draft": args.draft,
        "--lookup": args.lookup,
        "--beyond slide": args.beyond == "slide",
        "--prompts": args.prompts,
    }
    used = [name for name, is_used in ways.items() if is_used]
    clash = used if len(used) > 1 else []
    if args.n > 1 and used and used[0] not in ("--beams", "--prompts"):
        clash = [*used, "--n"]
    if args.chat and (args.n > 1 or args.prompts):
        clash = ["--chat", "--n" if args.n > 1 else "--prompts"]
    if clash:
        raise ConfigError(f"{' and '.join(clash)} do not go together: use one of them.")
    if args.system and not args.chat:
        raise ConfigError("--system is a message of a conversation: add --chat, or leave it out.")
    for name in ("n", "rows", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)} must be at least 1.")
    if args.seed is not None and not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed} must be a whole number of 64 bits.")


def _rules(model: Model, args: SampleArguments) -> dict[str, Any]:
    """The settings of the command, as keywords of `beam_search` or of the other decoders."""
    rules = args.rules(model.tokenizer.encode)
    if args.stop_strings:
        rules["tokenizer"] = model.tokenizer
    if args.beams:
        return rules | args.search()
    rules |= {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    rules["key"] = jax.random.key(secrets.randbits(31) if args.seed is None else args.seed)
    return rules


def _check_prompt(model: Model, start: list[int], source: list[int]) -> None:
    """Refuses a prompt that does not fit into the context."""
    if source:
        context = model.context(source=True)
        check_size(len(source), context, f"into the context of {context}")
    else:
        context = model.context()
        check_size(len(start), context - 1, f"before a new token into the context of {context}")


def _write(model: Model, args: SampleArguments) -> None:
    """Prints the text that continues the prompt, or the target of the prompt as a source."""
    start, source = start_of(model, args.prompt or "")
    if args.prompt is None:
        start = start or [model.tokenizer.end_token]
    _check_prompt(model, start, source)
    beginning = "" if source else args.prompt or ""
    if args.n == 1:
        print(beginning, end="")
        _print_growing(model, args, start, source)
        return
    count = min(args.max_new_tokens, model.context() - len(start))
    rules = _rules(model, args) | ({"keep": args.n} if args.beams else {"n": args.n})
    rows = np.concatenate([*new_tokens(model, start, source, count, args.beams, **rules)], axis=1)
    for number, row in enumerate(rows.tolist(), 1):
        print(f"--- {number} of {args.n}")
        print(beginning + _text_after(model, args, start, row))


def _text_after(model: Model, args: SampleArguments, start: list[int], made: list[int]) -> str:
    """The text that new tokens add to that of `start`, before an end token or a stop string."""
    text = text_of(model.tokenizer, [*start, *model.before_end(made)])
    return before_stop(text[len(text_of(model.tokenizer, start)) :], args.stop_strings)


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

    # A pipe or a file gets the text as it is, a terminal without control characters.
    shown = printable if sys.stdout.isatty() else str
    texts: list[str] = []
    growing = growing_text(model.tokenizer, start, before_end())
    for text in stream_before_stop(growing, args.stop_strings):
        print(shown(text), end="", flush=True)
        texts.append(text)
    print(flush=True)
    context = model.context()
    space = context - len(start)
    ended = len(model.before_end(made)) < len(made)
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


def growing_text(
    tokenizer: Tokenizer, start: list[int], pieces: Iterable[list[int]]
) -> Iterator[str]:
    """What each piece of new tokens adds to the text of `start`. A character that still lacks bytes
    waits for the next piece."""
    tokens = [*start]
    shown = text_of(tokenizer, start)
    for piece in pieces:
        tokens += piece
        text = text_of(tokenizer, tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield text_of(tokenizer, tokens)[len(shown) :]


def _pieces(
    model: Model, args: SampleArguments, start: list[int], source: list[int]
) -> Iterator[list[int]]:
    """New tokens, in pieces as they are made."""
    count = min(args.max_new_tokens, model.context() - len(start))
    rules = _rules(model, args)
    if args.draft is not None or args.lookup:
        yield _speculated(model, args, start, count, model.writing_rules() | rules)
        return
    if args.beyond == "slide":
        # The special tokens with which every text begins stay in the window.
        rules = model.writing_rules() | rules | {"beginning": len(model.tokenizer.as_prompt([]))}
        pieces = slide_tokens(model.params, model.config, start, args.max_new_tokens, **rules)
    else:
        pieces = new_tokens(model, start, source, count, args.beams, **rules)
    for piece in pieces:  # [1, n]
        yield piece[0].tolist()


def _speculated(
    model: Model, args: SampleArguments, start: list[int], count: int, rules: dict[str, Any]
) -> list[int]:
    """`count` new tokens by speculative decoding, with a draft or by look-up; a note to standard
    error says how often the model read."""
    proposer = None
    if args.draft is not None:
        loaded = load(args.draft)
        if loaded.tokenizer is None or (
            loaded.tokenizer.fingerprint() != model.tokenizer.fingerprint()
        ):
            raise ConfigError(
                f"the draft {args.draft} has another tokenizer than {model.path}: what it proposes"
                " would be other text. Choose a draft with the same one, or use --lookup."
            )
        proposer = (loaded.params, loaded.config)
    began = time.perf_counter()
    made = speculate(
        model.params, model.config, [start], count, draft=proposer, ahead=args.ahead, **rules
    )
    tokens = np.asarray(made.tokens)[0].tolist()
    seconds = time.perf_counter() - began
    rounds, accepted = int(made.rounds), int(made.accepted)
    print(
        f"note: {accepted} of {rounds * args.ahead} proposed tokens are in the text,"
        f" {accepted / max(rounds, 1):.2f} each time that the model read; {seconds:.2f} s with"
        " compilation.",
        file=sys.stderr,
    )
    return tokens  # type: ignore[no-any-return]


def _converse(model: Model, args: SampleArguments) -> None:
    """Answers the prompt, or without one every line of standard input, with the turns before it. An
    answer ends with the special token with which the chat template of the tokenizer ends a turn."""
    template = ChatTemplate.of(model.tokenizer, today=True)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    turns = typed_lines() if args.prompt is None else [args.prompt]
    for number, turn in enumerate(turns):
        if not turn.strip():
            raise ConfigError("the prompt is empty: give --prompt some text.")
        messages.append({"role": "user", "content": turn})
        start = template.encode_prompt(messages)
        end = template.end_of_turn(messages)
        _check_prompt(model, start, [])
        if end is None and not number:
            print(
                f"note: {template.where} ends an answer without a special token, so it is written"
                " until the end of the text, or --max_new_tokens.",
                file=sys.stderr,
            )
        stops = () if end is None else (end,)
        answer = _print_growing(replace(model, stops=stops), args, start, [])
        messages.append({"role": ASSISTANT, "content": answer.strip()})


def _write_prompts(model: Model, args: SampleArguments, path: Path) -> None:
    """Prints {"prompt": ..., "text": ...} for each prompt of a file, in its order.

    Where a text ends, the next prompt takes its row. A sampled text depends on the seed, its prompt
    and its place in the file alone."""
    prompts = _read_prompts(path)
    starts, sources = [], []
    for prompt in prompts:
        start, source = start_of(model, prompt)
        _check_prompt(model, start, source)
        starts.append(start)
        sources.append(source)
    rules = model.writing_rules() | _rules(model, args)
    rules |= {"tokenizer": model.tokenizer, "n": args.n}
    texts = refill(
        model.params,
        model.config,
        starts,
        args.max_new_tokens,
        rows=args.rows,
        sources=sources if model.config.family == "encoder_decoder" else None,
        **rules,
    )
    early = 0
    waiting: dict[int, list[int]] = {}
    following = 0
    for index, tokens in texts:
        waiting[index] = tokens
        while following in waiting:  # the texts before it have ended
            start, made = starts[following], model.before_end(waiting.pop(following))
            early += len(start) + len(made) == model.context() and len(made) < args.max_new_tokens
            text = _text_after(model, args, start, made)
            line = {"prompt": prompts[following], "text": text}
            print(json.dumps(line, ensure_ascii=False), flush=True)
            following += 1
    if early:
        print(
            f"note: {early} of {len(prompts)} texts end early, where they reach the context of"
            f" {model.context()}.",
            file=sys.stderr,
        )


def _read_prompts(path: Path) -> list[str]:
    """The prompts of a file, without blank lines."""
    lines = [line for line in read_text(path, PROMPTS_ADVICE).split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path} has no prompt: {PROMPTS_ADVICE}.")
    if path.suffix != ".jsonl":
        return [line.rstrip("\r") for line in lines]
    prompts = []
    for number, line in enumerate(lines, 1):
        prompt = parse_object(line, f"{path}, prompt {number}", PROMPTS_ADVICE).get("prompt")
        if not isinstance(prompt, str):
            raise ConfigError(
                f'{path}, prompt {number}, has no "prompt" that is a text: {PROMPTS_ADVICE}.'
            )
        prompts.append(prompt)
    return prompts
