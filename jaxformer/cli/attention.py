"""`jaxformer attention RUN`: what each token of a prompt looked at, head by head, as a page to
explore."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from jaxformer.cli.prompts import Model, open_run, prompt_of, row_of, source_of, tokens_of
from jaxformer.config import ConfigError

SHOWN_PER_STEP = 5  # candidates shown of each step
MOST_TOKENS = 256  # a page of more could not be read, nor opened quickly


@dataclass(frozen=True)
class AttentionArguments:
    """Writes a page of the attention of every layer and head to one text, and of what the model
    expected at each step."""

    path: Annotated[Path, tyro.conf.Positional]
    """Run directory, or a Hugging Face model directory."""
    prompt: str
    """The text that is read; for an encoder-decoder the source."""
    target: str | None = None
    """What an encoder-decoder writes; where it is not given, what the model does write."""
    pair: str = ""
    """A second text to read beside the prompt, for an encoder trained on two."""
    beams: int = 0
    """Width of the beam search that writes the target; 0 takes the likeliest token each time."""
    layers: tuple[int, ...] = ()
    """Layers to show, the first one 0; all where none is given."""
    output: Path = Path("attention.html")
    """The page; it opens in a browser and needs nothing else."""
    figure: Path | None = None
    """Also a picture, as a PNG."""
    step: int | None = None
    """Checkpoint to read; the newest where it is not given."""


def run(arguments: Sequence[str]) -> int:
    asked = tyro.cli(
        AttentionArguments, prog="jaxformer attention", args=arguments, use_underscores=True
    )
    for path in (asked.output, asked.figure):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(
                f"{path} cannot be written: there is no directory {path.absolute().parent}."
            )
    import jax

    from jaxformer.models.inspect import attention_maps
    from jaxformer.report.attention import attention_figure, attention_page

    model = open_run(asked.path, asked.step)
    inputs = _inputs(model, asked)
    see = jax.jit(attention_maps, static_argnums=1, static_argnames="layers")
    found = see(
        model.params,
        model.config,
        layers=asked.layers or None,
        **{name: row[None] for name, row in inputs.items()},
    )
    kinds = ("encoder", "decoder", "cross")
    maps = {
        kind: np.asarray(weights)[:, 0]
        for kind in kinds
        if (weights := getattr(found, kind)) is not None
    }
    main = "source" if model.config.family == "encoder" else "target"
    texts = {main: _texts(model, inputs["tokens"])}
    if "source" in inputs:
        texts["source"] = _texts(model, inputs["source"])
    page = attention_page(
        maps,
        texts,
        title=asked.prompt,
        layers=asked.layers,
        candidates=_candidates(model, np.asarray(found.logits[0])),
    )
    asked.output.write_text(page, encoding="utf-8")
    print(
        f"{asked.output}: attention of"
        f" {', '.join(f'{len(row)} {axis} tokens' for axis, row in sorted(texts.items()))}"
    )
    if asked.figure is not None:
        attention_figure(maps, texts, asked.figure, title=asked.prompt, layers=asked.layers)
        print(f"{asked.figure}: the same as a picture")
    return 0


def _inputs(model: Model, asked: AttentionArguments) -> dict[str, np.ndarray]:
    """What the model reads, by the names of `jf.forward`. Raises ConfigError for more than a page
    shows."""
    family, rows = model.config.family, {"tokens": np.zeros(0, np.int32)}
    if asked.pair and family != "encoder":
        raise ConfigError(
            f"--pair is for an encoder, and {asked.path} has model.family={family!r}."
        )
    if (asked.target is not None or asked.beams) and family != "encoder_decoder":
        raise ConfigError(
            f"--target and --beams are for an encoder-decoder, and model.family is {family!r} in"
            f" {asked.path}."
        )
    if family == "encoder_decoder":
        rows["source"] = np.array(source_of(model, asked.prompt), np.int32)
        _check(rows, model.config.max_length)
        target = asked.target
        written = (
            _written(model, rows["source"], asked.beams)
            if target is None
            else tokens_of(model.tokenizer, target)
        )
        rows["tokens"] = np.array(model.tokenizer.as_target(written), np.int32)
    elif family == "decoder" and model.config.output in ("language", "none"):
        rows["tokens"] = np.array(prompt_of(model, asked.prompt), np.int32)
        if not rows["tokens"].size:
            raise ConfigError("the prompt is empty: give --prompt some text.")
    else:
        row = row_of(model, asked.prompt, asked.pair)
        rows = {name: row[name] for name in ("tokens", "token_types") if name in row}
    _check(rows, model.config.max_length)
    return rows


def _check(rows: dict[str, np.ndarray], context: int) -> None:
    most, longest = min(MOST_TOKENS, context), max(len(row) for row in rows.values())
    if longest > most:
        raise ConfigError(
            f"{longest} tokens are more than the {most} that a page of this model shows: give a"
            " shorter text."
        )


def _written(model: Model, source: np.ndarray, beams: int) -> list[int]:
    """What the model writes for a source, without the end token."""
    from jaxformer.generation.beam import beam_search
    from jaxformer.generation.decode import generate

    end = model.tokenizer.end_token
    given: dict[str, Any] = {
        "source": source[None],
        "end_token": end,
        "vocab_size": model.tokenizer.vocab_size,
    }
    starts = np.array([model.tokenizer.as_target([])])
    count = min(MOST_TOKENS, model.config.max_length) - starts.size
    if beams:
        made = beam_search(
            model.params, model.config, starts, count, beams=beams, keep=1, **given
        ).tokens[0, 0]
    else:
        made = generate(model.params, model.config, starts, count, temperature=0, **given)[0]
    tokens: list[int] = np.asarray(made).tolist()
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _texts(model: Model, tokens: np.ndarray) -> list[str]:
    return [model.tokenizer.shown(token) for token in tokens.tolist()]


def _candidates(model: Model, logits: np.ndarray) -> list[list[tuple[str, float]]]:
    """The leading (text, probability) at each of the logits' rows [T, V]; none where a text has one
    class."""
    if logits.ndim == 1 or model.config.output == "none":
        return []
    over_tokens = model.config.output in ("language", "masked")
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    name = model.tokenizer.shown if over_tokens else model.labels.__getitem__
    leading = np.argsort(-shares, axis=-1, kind="stable")[:, :SHOWN_PER_STEP]
    return [
        [(name(int(token)), float(row[token])) for token in best]
        for row, best in zip(shares, leading, strict=True)
    ]
