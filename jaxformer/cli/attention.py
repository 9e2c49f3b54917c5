"""`jaxformer attention RUN`: an interactive page of the attention of each head to the tokens of a
prompt."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from jaxformer.cli.arguments import ModelArguments, check_output, parse
from jaxformer.cli.prompts import (
    Model,
    check_size,
    open_model,
    row_of,
    start_of,
    tokens_of,
    written,
)
from jaxformer.config import ConfigError
from jaxformer.files import write_text

SHOWN_PER_STEP = 5  # candidates shown of each step
MOST_TOKENS = 256  # a page of more could not be read, nor opened quickly


@dataclass(frozen=True, kw_only=True)
class AttentionArguments(ModelArguments):
    """Writes an HTML page of the attention weights of each layer and head for one text, with the
    most likely next tokens at each step."""

    prompt: str
    """Text to read; for an encoder-decoder, the source."""
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Target of an encoder-decoder. If not given, the one that the model writes."""
    pair: str = ""
    """Second text of an encoder that reads two."""
    beams: int = 0
    """Beam width for writing the target; 0 is greedy."""
    layers: tuple[int, ...] = ()
    """Layers to show, counted from 0. If not given, all."""
    output: Path = Path("attention.html")
    """File for the page, which needs no other files."""
    figure: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """PNG file for a picture of the same attention."""


def run(arguments: Sequence[str]) -> int:
    asked = parse(AttentionArguments, "attention", arguments)
    check_output(asked.output)
    check_output(asked.figure)
    import jax

    from jaxformer.models.inspect import attention_maps
    from jaxformer.report.attention import AXES, attention_figure, attention_page

    model = open_model(asked, asked.pair)
    inputs = _inputs(model, asked)
    see = jax.jit(attention_maps, static_argnums=1, static_argnames="layers")
    rows = {name: row[None] for name, row in inputs.items()}
    found = see(model.params, model.config, layers=asked.layers or None, **rows)
    by_kind = {kind: getattr(found, kind) for kind in ("encoder", "decoder", "cross")}
    texts = {"source" if model.config.family == "encoder" else "target": inputs["tokens"]}
    if "source" in inputs:
        texts["source"] = inputs["source"]
    shown = {axis: [*map(model.tokenizer.shown, row.tolist())] for axis, row in texts.items()}
    maps = {}
    for kind, row in by_kind.items():
        if row is not None:  # virtual tokens, which come first, are not shown
            queries, keys = (len(shown[axis]) for axis in AXES[kind])
            maps[kind] = np.asarray(row)[:, 0, :, -queries:, -keys:]
    candidates = _candidates(model, np.asarray(found.logits[0]))
    about: dict[str, Any] = {"title": asked.prompt, "layers": asked.layers}
    write_text(asked.output, attention_page(maps, shown, candidates=candidates, **about))
    counts = ", ".join(f"{len(row)} {axis} tokens" for axis, row in sorted(shown.items()))
    print(f"{asked.output}: attention of {counts}")
    if "virtual" in model.params:
        print("Of the attention of a token, what these lack to 1 is to the virtual tokens.")
    if asked.figure is not None:
        attention_figure(maps, shown, asked.figure, **about)
        print(f"{asked.figure}: the same as a picture")
    return 0


def _inputs(model: Model, asked: AttentionArguments) -> dict[str, np.ndarray]:
    """What the model reads, by the names of `jf.forward`. Raises ConfigError for more than a page
    shows."""
    config, limit = model.config, min(MOST_TOKENS, model.context())
    if (asked.target is not None or asked.beams) and config.family != "encoder_decoder":
        raise ConfigError(
            f"--target and --beams need an encoder-decoder, but {asked.path} has"
            f" model.family={config.family!r}."
        )
    start, source = start_of(model, asked.prompt)
    if config.family == "encoder_decoder":
        check_size(len(source), min(MOST_TOKENS, model.context(source=True)), "on a page")
        ids = (
            _target(model, start, source, limit - len(start), asked.beams)
            if asked.target is None
            else tokens_of(model.tokenizer, asked.target)
        )
        rows = {"tokens": model.tokenizer.as_target(ids), "source": source}
    elif config.family == "decoder" and config.output in ("language", "none"):
        rows = {"tokens": start}
    else:
        row = row_of(model, asked.prompt, asked.pair)
        rows = {name: row[name].tolist() for name in ("tokens", "token_types") if name in row}
    check_size(len(rows["tokens"]), limit, "on a page")
    return {name: np.array(row, np.int32) for name, row in rows.items()}


def _target(model: Model, start: list[int], source: list[int], count: int, beams: int) -> list[int]:
    """The tokens that the model writes for a source, without the end token."""
    import jax

    rules = {} if beams else {"temperature": 0.0, "key": jax.random.key(0)}
    made = itertools.chain.from_iterable(written(model, start, source, count, beams, **rules))
    return [*itertools.takewhile(lambda token: token not in model.tokenizer.end_tokens, made)]


def _candidates(model: Model, logits: np.ndarray) -> list[list[tuple[str, float]]]:
    """The most likely (text, probability) at each row of the logits [T, V]; none for the class of
    a text [C]."""
    if logits.ndim == 1 or model.config.output == "none":
        return []
    over_tokens = model.config.output in ("language", "masked")
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    name = model.tokenizer.shown if over_tokens else model.labels.__getitem__
    best = np.argsort(-shares, axis=-1, kind="stable")[:, :SHOWN_PER_STEP]
    return [
        [(name(int(token)), float(row[token])) for token in tokens]
        for row, tokens in zip(shares, best, strict=True)
    ]
