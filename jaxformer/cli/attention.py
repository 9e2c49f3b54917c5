"""`jaxformer attention RUN`: an interactive page of the attention of each head to the tokens of a
prompt."""

import itertools
from collections.abc import Iterable, Sequence
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
from jaxformer.cli.walkthrough import SHOWN_PER_STEP, beam_candidates, naming, walkthrough_of
from jaxformer.files import ConfigError, write_text
from jaxformer.tokenizer.pieces import character_groups
from jaxformer.tools.walkthrough import BeamCandidate

PADDING = "[padding]"  # shown in the place of a token
MOST_TOKENS = 256  # a page of more could not be read, nor opened quickly


@dataclass(frozen=True, kw_only=True)
class AttentionArguments(ModelArguments):
    """Writes an HTML page of the attention weights of each layer and head for one text: a walk
    through the model, with its sublayers, masks, beams, and the most likely next tokens at each
    step, by the output of the model and by that of each layer."""

    prompt: str
    """Text to read; for an encoder-decoder, the source."""
    target: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Target of an encoder-decoder. If not given, the one that the model writes."""
    pair: str = ""
    """Second text of an encoder that reads two."""
    beams: int = 0
    """Beam width for writing the target; 0 is greedy. The page shows the beams of each step."""
    padding: int = 0
    """Tokens of padding behind the text that an encoder reads, to see them masked."""
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

    from jaxformer.tools.attention_page import AXES, attention_figure, attention_page
    from jaxformer.tools.inspect import attention_maps

    model = open_model(asked, asked.pair)
    inputs, beams = _inputs(model, asked)
    see = jax.jit(attention_maps, static_argnums=1, static_argnames="layers")
    rows = {name: row[None] for name, row in inputs.items()}
    found = see(model.params, model.config, layers=asked.layers or None, **rows)
    by_kind = {kind: getattr(found, kind) for kind in ("encoder", "decoder", "cross")}
    read = {"source" if model.config.family == "encoder" else "target": inputs["tokens"]}
    if "source" in inputs:
        read["source"] = inputs["source"]
    shown, groups = {}, {}
    for axis, row in read.items():
        shown[axis], groups[axis] = _texts(model, row, asked.padding if axis == "source" else 0)
    maps = {}
    for kind, weights in by_kind.items():
        if weights is not None:  # virtual tokens, which come first, are not shown
            queries, keys = (len(shown[axis]) for axis in AXES[kind])
            maps[kind] = np.asarray(weights)[:, 0, :, -queries:, -keys:]
    candidates = _candidates(model, np.asarray(found.logits[0]))
    if "target" in shown and "decoder" not in maps:  # layers that only the encoder has
        candidates, beams = [], []
    about: dict[str, Any] = {"title": asked.prompt, "layers": asked.layers}
    more = walkthrough_of(model, rows, asked.layers, beams)
    page = attention_page(
        maps, shown, candidates=candidates, groups=groups, walkthrough=more, **about
    )
    write_text(asked.output, page)
    counts = ", ".join(f"{len(row)} {axis} tokens" for axis, row in sorted(shown.items()))
    print(f"{asked.output}: attention of {counts}")
    if "virtual" in model.params:
        print("Of the attention of a token, what these lack to 1 is to the virtual tokens.")
    if asked.figure is not None:
        attention_figure(maps, shown, asked.figure, **about)
        print(f"{asked.figure}: the same as a picture")
    return 0


def _texts(
    model: Model, row: np.ndarray, padding: int
) -> tuple[list[str], list[tuple[int, int, str]]]:
    """The texts of tokens, of which the last are `padding`, and the runs that share characters."""
    ids = row[: len(row) - padding].tolist()
    texts = [*map(model.tokenizer.shown, ids), *[PADDING] * padding]
    return texts, character_groups([*map(model.tokenizer.raw, ids)])


def _inputs(
    model: Model, asked: AttentionArguments
) -> tuple[dict[str, np.ndarray], list[list[BeamCandidate]]]:
    """What the model reads, by the names of `jf.forward`, and the beams that wrote the target.
    Raises ConfigError for more than a page shows."""
    config, limit = model.config, min(MOST_TOKENS, model.context())
    rows: dict[str, Any]
    beams: list[list[BeamCandidate]] = []
    if (asked.target is not None or asked.beams) and config.family != "encoder_decoder":
        raise ConfigError(
            f"--target and --beams need an encoder-decoder, but {asked.path} has"
            f" model.family={config.family!r}."
        )
    if asked.target is not None and asked.beams:
        raise ConfigError("--beams searches for a target, and --target gives one: leave one out.")
    if asked.padding < 0 or (asked.padding and config.family == "decoder"):
        raise ConfigError(
            f"--padding {asked.padding} must be 0 or more, and needs an encoder: {asked.path} has"
            f" model.family={config.family!r}."
        )
    start, source = start_of(model, asked.prompt)
    if config.family == "encoder_decoder":
        most = min(MOST_TOKENS, model.context(source=True))
        check_size(len(source) + asked.padding, most, "on a page")
        if asked.target is None:
            ids, beams = _target(model, start, source, limit - len(start), asked.beams)
        else:
            ids = tokens_of(model.tokenizer, asked.target)
        rows = {"tokens": model.tokenizer.as_target(ids), "source": source}
    elif config.family == "decoder" and config.output in ("language", "none"):
        rows = {"tokens": start}
    else:
        row = row_of(model, asked.prompt, asked.pair)
        rows = {name: row[name].tolist() for name in ("tokens", "token_types") if name in row}
    check_size(len(rows["tokens"]), limit, "on a page")
    if asked.padding:
        rows = _padded(rows, asked.padding)
        check_size(len(rows["tokens"]), limit, "on a page")
    return {name: np.array(row, np.int32) for name, row in rows.items()}, beams


def _padded(rows: dict[str, Any], padding: int) -> dict[str, Any]:
    """Rows whose source, or the tokens of an encoder, have padding behind them."""
    read = "source" if "source" in rows else "tokens"
    names = [name for name in rows if read == "tokens" or name == read]
    segments = {"source": "source_segment_ids", "tokens": "segment_ids"}[read]
    real = {segments: [1] * len(rows[read]) + [0] * padding}
    return rows | {name: [*rows[name], *[0] * padding] for name in names} | real


def _target(
    model: Model, start: list[int], source: list[int], count: int, beams: int
) -> tuple[list[int], list[list[BeamCandidate]]]:
    """The tokens that the model writes for a source, without the end token, and for each token of
    the target the candidates of a beam search, if there is one."""
    import jax

    if not beams:
        rules: dict[str, Any] = {"temperature": 0.0, "key": jax.random.key(0)}
        made = itertools.chain.from_iterable(written(model, start, source, count, 0, **rules))
        return _until_end(model, made), []
    from jaxformer.generation.beam import beam_search_steps

    rules = model.writing_rules() | {"source": [source], "beams": beams, "keep": 1}
    found, steps = beam_search_steps(model.params, model.config, [start], count, **rules)
    best = np.asarray(found.tokens[0, 0]).tolist()
    ids = _until_end(model, best)
    candidates = [*[[]] * (len(start) - 1), *beam_candidates(model, steps, best)]
    length = len(start) + len(ids)
    return ids, [*candidates, *[[]] * length][:length]


def _until_end(model: Model, tokens: Iterable[int]) -> list[int]:
    return [*itertools.takewhile(lambda token: token not in model.tokenizer.end_tokens, tokens)]


def _candidates(model: Model, logits: np.ndarray) -> list[list[tuple[str, float]]]:
    """The most likely (text, probability) at each row of the logits [T, V]; none for the class of
    a text [C]."""
    if logits.ndim == 1 or model.config.output == "none":
        return []
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    name = naming(model)
    best = np.argsort(-shares, axis=-1, kind="stable")[:, :SHOWN_PER_STEP]
    return [
        [(name(int(token)), float(row[token])) for token in tokens]
        for row, tokens in zip(shares, best, strict=True)
    ]
