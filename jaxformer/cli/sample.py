"""`jaxformer sample RUN`: text that a model writes, streamed to the terminal; a conversation with
it; or the texts of many prompts of a file."""

import json
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxformer.cli.arguments import SampleArguments
from jaxformer.config.format import printable
from jaxformer.files import ConfigError, parse_object, read_text
from jaxformer.generation.beam import beam_search
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.refill import refill
from jaxformer.generation.sampling import FILTERS
from jaxformer.generation.stop_strings import StopStrings, before_stop
from jaxformer.runs.prompting import (
    Model,
    check_size,
    drawing_rules,
    open_model,
    start_of,
    turn_of,
    typed_lines,
)
from jaxformer.tokenizer.chat import ASSISTANT, BESIDE, with_beside

PROMPTS_ADVICE = 'give a text file with a prompt a line, or .jsonl with {"prompt": "..."} a line'
TOOLS_ADVICE = 'give a list of functions in JSON, or {"tools": [...], "documents": [...]}'
# The most new tokens for which the layers are a loop: each token takes 7 to 16 ms more than with
# unrolled layers, which take 2 s longer to compile (GPT-2 124M and SmolLM2-135M, two cores).
SHORT_TEXT = 64
# The options that are rules of a text.
SHOWN = (*FILTERS, "repetition_penalty", "no_repeat_ngram_size")
TextSettings = dict[str, Any]


def run(args: SampleArguments) -> int:
    args.check()
    model = open_model(**args.model)
    head = model.config.output
    family = model.config.family
    if head != "language":
        raise ConfigError(
            f"{args.path} has the head {head!r}, which writes no text: `jaxformer predict` gives"
            " masked tokens, classes and tags, and `jaxformer embed` vectors."
        )
    if args.chat and family != "decoder":
        raise ConfigError(f"--chat is for a decoder, and {args.path} has model.family={family!r}.")
    if family != "decoder" and args.prompt is None and args.prompts is None:
        raise ConfigError(f"{args.path} is a model that needs a text: give one with --prompt.")
    rules = _rules(model, args)
    if args.prompts is not None:
        _write_prompts(model, args, rules, args.prompts)
        return 0
    if args.chat:
        _converse(model, args, rules)
        return 0
    prompt = args.prompt or ""
    start, source = start_of(model, prompt)
    if args.prompt is None:
        start = start or [model.tokenizer.end_token]
    _check_prompt(model, start, source)
    beginning = prompt
    if source:
        beginning = ""
    if args.n == 1:
        print(beginning, end="")
        _print_growing(model, args, rules, start, source)
        return 0
    rows = np.concatenate([*_pieces(model, args, rules, start, source)], axis=1)
    for number, row in enumerate(rows.tolist(), 1):
        print(f"--- {number} of {args.n}")
        print(beginning + before_stop(model.text_after(start, row), args.stop_strings))
    return 0


def _rules(model: Model, args: SampleArguments) -> TextSettings:
    """Return the rules of a text, as keywords of `beam_search` or of the other decoders, and say on
    standard error which hold and whose they are: those of the command, before those that the
    model's generation_config.json states, before the defaults."""
    rules = model.writing_rules()
    commanded = {name: getattr(args, name) for name in SHOWN if getattr(args, name) is not None}
    stated = {name: rules[name] for name in SHOWN if name in rules}
    defaults: TextSettings = {}
    if args.beams:
        commanded = {"beams": args.beams} | commanded
        commanded.pop("temperature", None)  # 0, which a search is
        rules |= {"keep": args.n, "length_penalty": args.length_penalty}
    else:
        drawing, defaults = drawing_rules(model.tokenizer, commanded, args.chat)
        stated = drawing | stated
        seed = args.seed
        if seed is None:
            seed = secrets.randbits(31)
        rules["key"] = jax.random.key(seed)
    owners = dict.fromkeys(defaults, "default")
    owners |= dict.fromkeys(stated, Path(model.tokenizer.metadata.rules_file).name)
    owners |= dict.fromkeys(commanded, "command line")
    holding = defaults | stated | commanded
    said: dict[str, list[str]] = {}
    if holding.get("temperature") == 0:
        # Filters change nothing then, and without them all greedy texts share a program.
        for name in FILTERS[1:]:
            holding.pop(name, None)
        said[owners.pop("temperature")] = ["greedy"]
    for name, value in holding.items():
        if name in owners:
            said.setdefault(owners[name], []).append(f"{name} {value}")
    shown = [f"{', '.join(settings)}: {owner}" for owner, settings in said.items()]
    print("; ".join(shown), file=sys.stderr)
    return rules | holding


def _check_prompt(model: Model, start: list[int], source: list[int]) -> None:
    """Refuses a prompt that does not fit into the context."""
    context = model.context(source=bool(source))
    if source:
        check_size(len(source), context, f"into the context of {context}")
    else:
        check_size(len(start), context - 1, f"before a new token into the context of {context}")


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
    loop: Literal["scan", "unroll"] = "unroll"
    if count <= SHORT_TEXT:
        loop = "scan"
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
    is_terminal = sys.stdout.isatty()
    # The last characters, which may be the beginning of a stop string, wait for the next piece.
    waiting = max(map(len, args.stop_strings), default=1) - 1
    made: list[int] = []
    answer = ""

    def show(text: str) -> str:
        """Print what a text adds to the answer so far."""
        added = text[len(answer) :]
        if is_terminal:
            print(printable(added), end="", flush=True)
        else:  # a pipe or a file gets the text as it is
            print(added, end="", flush=True)
        return answer + added

    for piece in _pieces(model, args, rules, start, source):  # [1, n]
        made += piece[0].tolist()
        text = model.text_after(start, made)
        # So does a character that still lacks bytes.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            before = before_stop(text, args.stop_strings)
            answer = show(before[: max(len(text) - waiting, 0)])
    text = model.text_after(start, made)
    answer = show(before_stop(text, args.stop_strings))
    print(flush=True)
    context = model.context()
    space = context - len(start)
    has_ended = len(answer) < len(text) or len(model.before_end(made)) < len(made)
    if space < args.max_new_tokens and not has_ended:
        print(
            f"note: the text ends early: of {args.max_new_tokens} new tokens, only {space} fit"
            f" after the prompt into the context of {context}.",
            file=sys.stderr,
        )
    return answer


def _converse(model: Model, args: SampleArguments, rules: TextSettings) -> None:
    """Answers the prompt, or without one every line of standard input, with the turns before it. An
    answer ends with the special token with which the chat template of the tokenizer ends a turn."""
    beside = {}
    if args.tools is not None:
        text = read_text(args.tools, TOOLS_ADVICE).strip()
        if text.startswith("["):
            text = f'{{"tools": {text}}}'
        beside = parse_object(text, f"--tools {args.tools}", TOOLS_ADVICE)
        if not {*beside} <= {*BESIDE}:
            raise ConfigError(
                f"--tools {args.tools} has the keys {', '.join(beside)}: {TOOLS_ADVICE}."
            )
    messages = []
    if args.system:
        messages.append({"role": "system", "content": args.system})
    turns: Iterable[str] = [args.prompt or ""]
    if args.prompt is None:
        turns = typed_lines()
    for number, turn in enumerate(turns):
        if not turn.strip():
            raise ConfigError("the prompt is empty: give --prompt some text.")
        messages.append({"role": "user", "content": turn})
        answering, start = turn_of(model, [with_beside(messages[0], beside), *messages[1:]])
        _check_prompt(model, start, [])
        if not answering.stops and not number:
            print(
                "note: the chat template ends an answer without a special token, so it is written"
                " until the end of the text, or --max_new_tokens.",
                file=sys.stderr,
            )
        answer = _print_growing(answering, args, rules, start, [])
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
        sources=sources if any(sources) else None,
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
            if len(start) + len(made) == model.context() and len(made) < args.max_new_tokens:
                early += 1
            text = before_stop(model.text_after(start, made), args.stop_strings)
            record = {"prompt": prompts[following], "text": text}
            print(json.dumps(record, ensure_ascii=False), flush=True)
            following += 1
    if early:
        print(
            f"note: {early} of {len(prompts)} texts end early, where they reach the context of"
            f" {model.context()}.",
            file=sys.stderr,
        )
