"""`jaxformer sample RUN`: streams text from a trained run to the terminal."""

import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxformer.config import ConfigError


@dataclass(frozen=True)
class Arguments:
    """Writes text from a trained run, as it is made."""

    path: Annotated[Path, tyro.conf.Positional]  # Run directory.
    prompt: str | None = None  # Start of the text; where it is not given, an end-of-text token starts a new one.
    max_new_tokens: int = 256  # Tokens to write, at most; also limited by the model's context.
    temperature: float = 0.8  # 0 always takes the likeliest token.
    top_k: int = 50  # Draw from the k likeliest tokens; 0 from all.
    top_p: float = 1.0  # Draw from the likeliest tokens that hold this probability together.
    seed: int | None = None  # Of the draw; another one each time where it is not given.
    step: int | None = None  # Checkpoint to read; the newest where it is not given.


def run(arguments: Sequence[str]) -> int:
    asked = tyro.cli(Arguments, prog="jaxformer sample", args=arguments, use_underscores=True)
    import jax

    from jaxformer.checkpoint import load
    from jaxformer.generate.decode import stream_tokens

    model = load(asked.path, asked.step)
    if model.tokenizer is None:
        raise ConfigError(f"{asked.path} has no tokenizer.json, so there is no text to read or write.")
    tokens = [model.tokenizer.end_token] if asked.prompt is None else model.tokenizer.encode(asked.prompt)
    if not tokens:
        raise ConfigError("the prompt is empty: give --prompt some text, or leave it out to start a new text.")
    room = model.config.max_length - len(tokens)
    if room < 1:
        raise ConfigError(
            f"the prompt is {len(tokens)} tokens, and the context of this model is {model.config.max_length}: shorten it."
        )
    seed = secrets.randbits(31) if asked.seed is None else asked.seed
    rules: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "end_token": model.tokenizer.end_token,
        "vocab_size": model.tokenizer.vocab_size,
    }
    count = min(asked.max_new_tokens, room)
    pieces = stream_tokens(model.params, model.config, [tokens], count, key=jax.random.key(seed), **rules)
    sys.stdout.write(asked.prompt or "")
    for text in _growing(model.tokenizer.decode, (piece[0].tolist() for piece in pieces)):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0


def _growing(decode, pieces: Iterator[list[int]]) -> Iterator[str]:  # type: ignore[no-untyped-def]
    """What each piece adds to the text; a character still lacking bytes waits for them."""
    tokens: list[int] = []
    shown = ""
    for piece in pieces:
        tokens += piece
        text = decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield decode(tokens)[len(shown) :]
