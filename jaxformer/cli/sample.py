"""`jaxformer sample RUN`: what a trained run makes of a prompt; text is streamed to the terminal as
it is written."""

import functools
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from jaxformer.cli.prompts import Model, open_run, prompt_of, row_of, source_of, text_of, words_of
from jaxformer.config import ConfigError

SHOWN_CANDIDATES = 5  # fillings and classes shown


@dataclass(frozen=True)
class SampleArguments:
    """Writes on from a prompt, or to it as the source; fills its [MASK]s; or tells its class or the
    tags of its words."""

    path: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a Hugging Face model directory."""
    prompt: str | None = None
    """Start of the text, or what is read; without it a decoder starts a new text."""
    pair: str = ""
    """A second text to read beside the prompt, for an encoder trained on two."""
    max_new_tokens: int = 256
    """Tokens to write, at most."""
    # At the end of the model's context: stop, or slide, which lets a decoder go on from the newest
    # three quarters of it, read again each time it is full.
    beyond: Literal["stop", "slide"] = "stop"
    temperature: float = 0.8  # 0 always takes the likeliest token.
    top_k: int = 50
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this probability together."""
    beams: int = 0
    """Write the likeliest text that a beam search of this width finds; 0 draws."""
    length_penalty: float = 0.6
    """Of the beam search; 0 favours short texts."""
    seed: int | None = None
    """Of the draw; another one each time where it is not given."""
    step: int | None = None
    """Checkpoint to read; the newest where it is not given."""


def run(arguments: Sequence[str]) -> int:
    asked = tyro.cli(SampleArguments, prog="jaxformer sample", args=arguments, use_underscores=True)
    model = open_run(asked.path, asked.step)
    writes = model.config.output == "language"
    if model.config.output not in ANSWERS:
        new = f"--run.init_from {asked.path} --model.head classes"
        raise ConfigError(
            f"{asked.path} has no head, so there is nothing to sample: train one, as with {new}."
        )
    if asked.prompt is None and not (writes and model.config.family == "decoder"):
        raise ConfigError(
            f"{asked.path} is a model that reads a text first: give it one with --prompt."
        )
    if asked.beams and not writes:
        raise ConfigError(
            f"{asked.path} has the head {model.config.output!r}, which writes no text: leave out"
            " --beams."
        )
    if asked.pair and model.config.family != "encoder":
        raise ConfigError(
            f"--pair is for an encoder, and {asked.path} has model.family={model.config.family!r}."
        )
    if asked.beyond == "slide":
        _require_slide(model, asked)
    ANSWERS[model.config.output](model, asked)
    return 0


def _require_slide(model: Model, asked: SampleArguments) -> None:
    """ConfigError where a text cannot go on past the context."""
    if model.config.output != "language":
        reason = f"{asked.path} has the head {model.config.output!r}, which writes no text"
    elif model.config.family != "decoder":
        reason = (
            f"{asked.path} has model.family={model.config.family!r}, and what it writes is an"
            " answer that has to begin with its start token"
        )
    elif asked.beams:
        reason = "--beams searches for the likeliest of whole texts, which a window does not hold"
    else:
        return
    raise ConfigError(f"--beyond slide is for text drawn from a decoder; {reason}: leave it out.")


def _write(model: Model, asked: SampleArguments) -> None:
    """Prints the text that follows the prompt, or that answers it as the source."""
    given: dict[str, Any] = {}
    if asks := model.config.family == "encoder_decoder":
        given["source"] = [source_of(model, asked.prompt or "")]
    start = model.tokenizer.as_target([]) if asks else prompt_of(model, asked.prompt or "")
    if asked.prompt is None:
        start = start or [model.tokenizer.end_token]
    space = _space(model, start, given.get("source", [[]])[0])
    sys.stdout.write("" if asks else asked.prompt or "")
    made: list[int] = []
    pieces = _noted(_pieces(model, asked, start, space, given), made)
    for text in _growing(functools.partial(text_of, model.tokenizer), start, pieces):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    ended = not {*made}.isdisjoint(model.tokenizer.end_tokens)
    if asked.beyond == "stop" and space < asked.max_new_tokens and not ended:
        slide = "; --beyond slide goes on" if model.config.family == "decoder" else ""
        print(
            f"note: the text was cut: {asked.max_new_tokens} tokens were asked for, and {space} fit"
            f" behind the prompt in the context of {model.config.max_length}{slide}.",
            file=sys.stderr,
        )


def _pieces(
    model: Model, asked: SampleArguments, start: list[int], space: int, given: dict[str, Any]
) -> Iterator[list[int]]:
    """New tokens as they are made: no more than fit, or as many as asked for where they slide."""
    from jaxformer.generation.beam import beam_search
    from jaxformer.generation.decode import stream_tokens
    from jaxformer.generation.slide import slide_tokens

    params, config, count = model.params, model.config, min(asked.max_new_tokens, space)
    given = given | {
        "end_token": model.tokenizer.end_tokens,
        "vocab_size": model.tokenizer.vocab_size,
    }
    if asked.beams:
        rules = {"beams": asked.beams, "keep": 1, "length_penalty": asked.length_penalty}
        found = beam_search(params, config, [start], count, **given, **rules)
        yield np.asarray(found.tokens[0, 0]).tolist()
        return
    given |= {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
    key = _key(asked.seed)
    if asked.beyond == "slide":
        first = len(prompt_of(model, ""))  # what every text begins with
        row = slide_tokens(
            params, config, start, asked.max_new_tokens, key=key, beginning=first, **given
        )
    else:
        row = stream_tokens(params, config, [start], count, key=key, **given)
    for piece in row:
        yield piece[0].tolist()


def _noted(pieces: Iterator[list[int]], made: list[int]) -> Iterator[list[int]]:
    """The pieces, while `made` gathers their tokens."""
    for piece in pieces:
        made += piece
        yield piece


def _space(model: Model, start: Sequence[int], source: Sequence[int]) -> int:
    """How many tokens can follow; ConfigError where none can."""
    most = model.config.max_length
    if not start:
        raise ConfigError(
            "the prompt is empty: give --prompt some text, or leave it out to start a new text."
        )
    if len(start) >= most or len(source) > most:
        size = max(len(start), len(source))
        raise ConfigError(
            f"the prompt is {size} tokens, and the context of this model is {most}: shorten it."
        )
    return most - len(start)


def _key(seed: int | None) -> Any:
    import jax

    return jax.random.key(secrets.randbits(31) if seed is None else seed)


def _growing(
    decode: Callable[[list[int]], str], start: list[int], pieces: Iterator[list[int]]
) -> Iterator[str]:
    """What each piece adds to the text of `start`; a character still lacking bytes waits for
    them."""
    tokens, shown = [*start], decode(start)
    for piece in pieces:
        tokens += piece
        text = decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield decode(tokens)[len(shown) :]


def _fill(model: Model, asked: SampleArguments) -> None:
    """Prints the likeliest tokens for each [MASK] of the prompt."""
    row = row_of(model, asked.prompt or "", asked.pair)
    hidden = np.flatnonzero(row["tokens"] == model.tokenizer.special("mask"))
    if not hidden.size:
        raise ConfigError("the prompt hides nothing: write [MASK] where a token is to be told.")
    texts = [model.tokenizer.shown(token) for token in range(model.tokenizer.vocab_size)]
    for number, shares in enumerate(_shares(model, row)[hidden], 1):
        _print_leading(f"[MASK] {number}", [repr(text) for text in texts], shares[: len(texts)])


def _classify(model: Model, asked: SampleArguments) -> None:
    """Prints the likeliest classes of the prompt."""
    _print_leading(
        "class", model.labels, _shares(model, row_of(model, asked.prompt or "", asked.pair))
    )


def _tag(model: Model, asked: SampleArguments) -> None:
    """Prints each word of the prompt with its likeliest tag."""
    words, row = words_of(model, asked.prompt or "")
    tags = _shares(model, row)[row["weights"] > 0].argmax(-1)
    width = max(map(len, words))
    for word, tag in zip(words, tags, strict=True):
        print(f"{word:<{width}}  {model.labels[tag]}")


def _shares(model: Model, row: dict[str, np.ndarray]) -> np.ndarray:
    """Probabilities, of each token [T, V] or of the row [C]."""
    import jax

    from jaxformer.models.transformer import forward

    types = row["token_types"][None] if "token_types" in row else None
    logits = jax.jit(forward, static_argnums=1)(
        model.params, model.config, row["tokens"][None], token_types=types
    )
    return np.asarray(jax.nn.softmax(logits[0], axis=-1))


def _print_leading(title: str, names: Sequence[str], shares: np.ndarray) -> None:
    print(title)
    for index in np.argsort(-shares, kind="stable")[:SHOWN_CANDIDATES]:
        print(f"{shares[index]:8.1%}  {names[index]}")


ANSWERS: dict[str, Callable[[Model, SampleArguments], None]] = {
    "language": _write,
    "masked": _fill,
    "classes": _classify,
    "tags": _tag,
}
