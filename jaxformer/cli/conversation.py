"""`jaxformer sample RUN --chat`: a conversation with a model, in the chat template of its
tokenizer."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxformer.cli.prompts import Model, check_size
from jaxformer.files import ConfigError
from jaxformer.tokenizer.chat import ChatTemplate
from jaxformer.tokenizer.messages import ASSISTANT


def converse(
    model: Model, prompt: str | None, system: str, answer: Callable[[Model, list[int]], str]
) -> None:
    """Answers the prompt, or without one each line of standard input after those before it.

    `answer` prints what a model writes after some tokens, and returns it. It ends with the special
    token with which the template ends a turn. Raises ConfigError for a model that writes no text,
    a tokenizer without a template, and a conversation that is longer than the context.
    """
    if (model.config.output, model.config.family) != ("language", "decoder"):
        raise ConfigError(f"{model.path} is no decoder that writes text: leave out --chat.")
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty: give --prompt some text.")
    template, context = ChatTemplate.of(model.tokenizer, today=True), model.context()
    messages = [{"role": "system", "content": system}] if system else []
    for number, text in enumerate(_typed() if prompt is None else [prompt]):
        messages.append({"role": "user", "content": text})
        start, end = template.encode_prompt(messages), template.end_of_turn(messages)
        check_size(len(start), context - 1, f"before a new token into the context of {context}")
        if end is None and not number:
            print(
                f"note: {template.where} ends an answer without a special token, so it is written"
                " until the end of the text, or --max_new_tokens.",
                file=sys.stderr,
            )
        written = answer(replace(model, stops=() if end is None else (end,)), start)
        messages.append({"role": ASSISTANT, "content": written.strip()})


def _typed() -> Iterator[str]:
    """The lines of standard input that are not blank."""
    closed, read = sys.stdin is None or sys.stdin.closed, False
    terminal = not closed and sys.stdin.isatty()
    while not closed:
        if terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not UTF-8 ({error}): convert it.") from None
        if not line:
            break
        if line.strip():
            read = True
            yield line.rstrip("\r\n")
    if not read and not terminal:
        raise ConfigError("standard input has no line of text: type one, or give --prompt.")
