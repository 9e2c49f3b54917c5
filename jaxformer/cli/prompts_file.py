"""`jaxformer sample RUN --prompts FILE`: the texts of many prompts, written beside each other."""

import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxformer.cli.arguments import SampleArguments
from jaxformer.cli.prompting import Model, check_seed, check_size, start_of, text_of
from jaxformer.files import ConfigError, parse_object, read_text
from jaxformer.generation.refill import refill
from jaxformer.generation.stop_strings import before_stop

PROMPTS_ADVICE = 'give a text file with a prompt a line, or .jsonl with {"prompt": "..."} a line'
EXCLUDED_OPTIONS = (
    "prompt",
    "chat",
    "system",
    "pair",
    "embed",
    "output",
    "beams",
    "draft",
    "lookup",
)  # which take no file of prompts


def write_texts(model: Model, args: SampleArguments, path: Path) -> None:
    """Prints {"prompt": ..., "text": ...} for each prompt of a file, in its order.

    Where a text ends, the next prompt takes its row. A sampled text depends on the seed, its prompt
    and its place in the file alone. Raises ConfigError for a file without prompts, and for a prompt
    that does not fit into the context, before anything is written.
    """
    _require_alone(model, args)
    prompts = _read_prompts(path)
    starts, sources = [], []
    for prompt in prompts:
        start, source = start_of(model, prompt)
        _check(model, start, source)
        starts.append(start)
        sources.append(source)
    rules = model.writing_rules() | args.rules(model.tokenizer.encode)
    rules |= {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    rules |= {"tokenizer": model.tokenizer, "n": args.n}
    has_sources = model.config.family == "encoder_decoder"
    texts = refill(
        model.params,
        model.config,
        starts,
        args.max_new_tokens,
        rows=args.rows,
        key=jax.random.key(secrets.randbits(31) if args.seed is None else args.seed),
        sources=sources if has_sources else None,
        **rules,
    )
    early = 0
    for number, tokens in _in_order(texts):
        start, made = starts[number], model.before_end(tokens)
        early += len(start) + len(made) == model.context() and len(made) < args.max_new_tokens
        text = text_of(model.tokenizer, [*start, *made])
        text = before_stop(text[len(text_of(model.tokenizer, start)) :], args.stop_strings)
        line = {"prompt": prompts[number], "text": text}
        print(json.dumps(line, ensure_ascii=False), flush=True)
    if early:
        print(
            f"note: {early} of {len(prompts)} texts end early, where they reach the context of"
            f" {model.context()}.",
            file=sys.stderr,
        )


def _require_alone(model: Model, args: SampleArguments) -> None:
    """Raises ConfigError for another option that says what is read, and for a model that writes no
    text."""
    others = [
        f"--{name}" for name in EXCLUDED_OPTIONS if getattr(args, name) not in (None, False, "", 0)
    ]
    others += ["--beyond slide"] if args.beyond == "slide" else []
    if others:
        raise ConfigError(f"--prompts {args.prompts}: leave out {' and '.join(others)}.")
    if model.config.output != "language":
        raise ConfigError(
            f"{args.path} has the head {model.config.output!r}, which writes no text: leave out"
            " --prompts."
        )
    check_seed(args.seed)
    if args.rows < 1 or args.max_new_tokens < 1:
        raise ConfigError(
            f"--rows {args.rows} and --max_new_tokens {args.max_new_tokens} must be at least 1."
        )


def _check(model: Model, start: list[int], source: list[int]) -> None:
    """Raises ConfigError for a prompt that does not fit into the context."""
    if source:
        context = model.context(source=True)
        check_size(len(source), context, f"into the context of {context}")
    else:
        context = model.context()
        check_size(len(start), context - 1, f"before a new token into the context of {context}")


def _read_prompts(path: Path) -> list[str]:
    """The prompts of a file, without blank lines. Raises ConfigError."""
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


def _in_order(texts: Iterator[tuple[int, list[int]]]) -> Iterator[tuple[int, list[int]]]:
    """The texts by their numbers, each as soon as those before it have ended."""
    waiting: dict[int, list[int]] = {}
    following = 0
    for number, tokens in texts:
        waiting[number] = tokens
        while following in waiting:
            yield following, waiting.pop(following)
            following += 1
