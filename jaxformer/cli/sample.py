"""`jaxformer sample RUN`: text that a model writes, streamed to the terminal; a conversation with
it; or the texts of many prompts of a file."""

import json
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxformer.cli.arguments import SampleArguments
from jaxformer.cli.prompting import Model, check_size, open_model, start_of, text_of, typed_lines
from jaxformer.config.format import printable
from jaxformer.files import ConfigError, parse_object, read_text
from jaxformer.generation.beam import beam_search
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.refill import refill
from jaxformer.generation.sampling import Sampling
from jaxformer.generation.stop_strings import StopStrings, before_stop, stream_before_stop
from jaxformer.generation.token_rules import rules_of
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ASSISTANT, ChatTemplate

PROMPTS_ADVICE = 'give a text file with a prompt a line, or .jsonl with {"prompt": "..."} a line'
# The most new tokens for which the layers are a loop: each token takes 7 to 16 ms more than with
# unrolled layers, which take 2 s longer to compile (GPT-2 124M and SmolLM2-135M, two cores).
SHORT_TEXT = 64
FILTERS = ("top_k", "top_p", "min_p")
# The options that are rules of a text.
SHOWN = ("temperature", *FILTERS, "repetition_penalty", "no_repeat_ngram_size")
TextSettings = dict[str, Any]


def run(args: SampleArguments) -> int:
    args.check()
    model = open_model(args)
    head = model.config.output
    family = model.config.family
    if head != "language":
        raise ConfigError(
            f"{args.path} has the head {head!r}, which writes no text: `jaxformer predict` gives"
            " masked tokens, classes and tags, and `jaxformer embed` vectors."
        )
    if args.chat and family != "decoder":
        raise ConfigError(f"--chat is for a decoder, and {args.path} has model.family={family!r}.")
    is_typed = args.chat or args.prompts is not None
    if not is_typed and args.prompt is None and family != "decoder":
        raise ConfigError(f"{args.path} is a model that needs a text: give one with --prompt.")
    rules = _rules(model, args)
    if args.prompts is not None:
        _write_prompts(model, args, rules, args.prompts)
        return 0
    if args.chat:
        _converse(model, args, rules)
        return 0
    start, source = start_of(model, args.prompt or "")
    if args.prompt is None:
        start = start or [model.tokenizer.end_token]
    _check_prompt(model, start, source)
    beginning = "" if source else args.prompt or ""
    if args.n == 1:
        print(beginning, end="")
        _print_growing(model, args, rules, start, source)
        return 0
    rows = np.concatenate([*_pieces(model, args, rules, start, source)], axis=1)
    for number, row in enumerate(rows.tolist(), 1):
        print(f"--- {number} of {args.n}")
        print(beginning + _text_after(model, args, start, row))
    return 0


def _rules(model: Model, args: SampleArguments) -> TextSettings:
    """Return the rules of a text, as keywords of `beam_search` or of the other decoders, and say on
    standard error which hold and whose they are: those of the command, before those that the
    model's generation_config.json states, before these defaults."""
    rules = model.writing_rules()
    file = model.tokenizer.metadata.rules_file
    commanded = {name: getattr(args, name) for name in SHOWN if getattr(args, name) is not None}
    stated = {name: rules[name] for name in SHOWN if name in rules}
    defaults: dict[str, Any] = {}
    if args.beams:
        commanded = {"beams": args.beams} | commanded
        commanded.pop("temperature", None)  # 0, which a search is
        rules |= {"keep": args.n, "length_penalty": args.length_penalty}
    else:
        stated = _drawing(model.tokenizer.metadata.rules, file, commanded) | stated
        # Temperature 1 without a filter writes nonsense of a small model. A model with a chat
        # template was tuned to answer, and its likeliest answer is the safest.
        defaults["temperature"] = 0.7
        if not any(name in commanded or name in stated for name in FILTERS):
            defaults["min_p"] = 0.05
            if args.chat:
                defaults["temperature"] = 0.0
        rules["key"] = jax.random.key(secrets.randbits(31) if args.seed is None else args.seed)
    holding = defaults | stated | commanded
    if holding.get("temperature") == 0:
        # Filters change nothing then, and without them all greedy texts share a program.
        holding = {name: value for name, value in holding.items() if name not in FILTERS}
    said: dict[str, list[str]] = {}
    for name, value in holding.items():
        owner = Path(file).name if name in stated else "default"
        if name in commanded:
            owner = "command line"
        is_greedy = name == "temperature" and value == 0
        said.setdefault(owner, []).append("greedy" if is_greedy else f"{name} {value}")
    shown = [f"{', '.join(settings)}: {owner}" for owner, settings in said.items()]
    print("; ".join(shown), file=sys.stderr)
    return rules | holding


def _drawing(stored: Mapping[str, Any], file: str, commanded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model's file says of how a token is drawn and the command does not. A value
    that cannot be is refused by name."""
    stated = {}
    for name in ("temperature", *FILTERS):
        values = rules_of(Sampling)[name].values
        if name in stored and name not in commanded:
            if not values.allowed(stored[name]):
                raise ConfigError(
                    f"{file}: {name} is {str(stored[name])[:80]}, and must be {values.words}:"
                    f" correct it, or state --{name}."
                )
            stated[name] = stored[name]
    if "temperature" in commanded:
        return stated
    draws = stored.get("do_sample")
    if not isinstance(draws, bool | None):
        raise ConfigError(
            f"{file}: do_sample is {str(draws)[:80]}, and must be true or false: correct it, or"
            " state --temperature."
        )
    if draws is False and not any(name in commanded for name in FILTERS):
        stated["temperature"] = 0.0
    elif draws or stated:
        # As in transformers, where a file that says how to draw states no temperature.
        stated.setdefault("temperature", 1.0)
    return stated


def _check_prompt(model: Model, start: list[int], source: list[int]) -> None:
    """Refuses a prompt that does not fit into the context."""
    context = model.context(source=bool(source))
    if source:
        check_size(len(source), context, f"into the context of {context}")
    else:
        check_size(len(start), context - 1, f"before a new token into the context of {context}")


def _text_after(model: Model, args: SampleArguments, start: list[int], made: list[int]) -> str:
    """The text that new tokens add to that of `start`, before an end token or a stop string."""
    text = text_of(model.tokenizer, [*start, *model.before_end(made)])
    return before_stop(text[len(text_of(model.tokenizer, start)) :], args.stop_strings)


def _pieces(
    model: Model, args: SampleArguments, rules: TextSettings, start: list[int], source: list[int]
) -> Iterator[np.ndarray]:
    """New tokens [texts, length], in pieces as they are made."""
    count = min(args.max_new_tokens, model.context() - len(start))
    rules = rules | {"end_token": model.end_tokens}
    if args.beams:
        if source:
            rules["source"] = [source]
        best = beam_search(model.params, model.config, [start], count, **rules)
        yield np.asarray(best.tokens[0])
        return
    loop: Literal["scan", "unroll"] = "scan" if count <= SHORT_TEXT else "unroll"
    yield from stream_tokens(
        model.params,
        replace(model.config, layer_loop=loop),
        [start],
        count,
        sources=([source] if source else None, None),
        n=args.n,
        stop_strings=args.stop_strings,
        tokenizer=model.tokenizer,
        **rules,
    )


def _print_growing(
    model: Model, args: SampleArguments, rules: TextSettings, start: list[int], source: list[int]
) -> str:
    """Prints what the model writes after `start` as it is made, and returns it."""
    made: list[int] = []

    def before_end() -> Iterator[list[int]]:
        """The pieces up to the first end token, which `made` has too."""
        for piece in _pieces(model, args, rules, start, source):  # [1, n]
            tokens = piece[0].tolist()
            made.extend(tokens)
            yield model.before_end(tokens)

    # A pipe or a file gets the text as it is, a terminal without control characters.
    shown = printable if sys.stdout.isatty() else str
    answer = ""
    growing = growing_text(model.tokenizer, start, before_end())
    for text in stream_before_stop(growing, args.stop_strings):
        print(shown(text), end="", flush=True)
        answer += text
    print(flush=True)
    context = model.context()
    space = context - len(start)
    written = text_of(model.tokenizer, made)
    is_stopped = any(stop in written for stop in args.stop_strings)
    has_ended = is_stopped or len(model.before_end(made)) < len(made)
    if space < args.max_new_tokens and not has_ended:
        print(
            f"note: the text ends early: of {args.max_new_tokens} new tokens, only {space} fit"
            f" after the prompt into the context of {context}.",
            file=sys.stderr,
        )
    return answer


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


def _converse(model: Model, args: SampleArguments, rules: TextSettings) -> None:
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
        answer = _print_growing(replace(model, stops=stops), args, rules, start, [])
        messages.append({"role": ASSISTANT, "content": answer.strip()})


def _write_prompts(model: Model, args: SampleArguments, rules: TextSettings, path: Path) -> None:
    """Prints {"prompt": ..., "text": ...} for each prompt of a file, in its order.

    Where a text ends, the next prompt takes its row. A sampled text depends on the seed, its prompt
    and its place in the file alone."""
    lines = [line for line in read_text(path, PROMPTS_ADVICE).split("\n") if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path} has no prompt: {PROMPTS_ADVICE}.")
    prompts = [line.rstrip("\r") for line in lines]
    if path.suffix == ".jsonl":
        for number, line in enumerate(lines, 1):
            where = f"{path}, prompt {number}"
            prompt = parse_object(line, where, PROMPTS_ADVICE).get("prompt")
            if not isinstance(prompt, str):
                raise ConfigError(f'{where}, has no "prompt" that is a text: {PROMPTS_ADVICE}.')
            prompts[number - 1] = prompt
    starts = []
    sources = []
    for prompt in prompts:
        start, source = start_of(model, prompt)
        _check_prompt(model, start, source)
        starts.append(start)
        sources.append(source)
    stops = StopStrings(args.stop_strings, model.tokenizer)
    texts = refill(
        model.params,
        model.config,
        starts,
        args.max_new_tokens,
        rows=args.rows,
        sources=sources if model.config.family == "encoder_decoder" else None,
        stopped=lambda number, tokens: stops.length(tokens) > 0,
        **rules,
    )
    early = 0
    waiting: dict[int, list[int]] = {}
    following = 0
    for index, tokens in texts:
        waiting[index] = tokens
        while following in waiting:  # the texts before it have ended
            start = starts[following]
            made = model.before_end(waiting.pop(following))
            early += len(start) + len(made) == model.context() and len(made) < args.max_new_tokens
            text = _text_after(model, args, start, made)
            record = {"prompt": prompts[following], "text": text}
            print(json.dumps(record, ensure_ascii=False), flush=True)
            following += 1
    if early:
        print(
            f"note: {early} of {len(prompts)} texts end early, where they reach the context of"
            f" {model.context()}.",
            file=sys.stderr,
        )
