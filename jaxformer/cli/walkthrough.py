"""What the page of attention shows beside its maps: the order of computation, masks, beams and the
logit lens of one example."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.cli.prompting import Model, text_of
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.generation.beam import BeamSteps
from jaxformer.tools.attention_walkthrough import BeamCandidate, Box, Choices, Stage, Walkthrough
from jaxformer.tools.inspect import attention_masks, inspect, logit_lens
from jaxformer.tools.model_shapes import SYMBOLS, formula_of, shapes_of
from jaxformer.tools.shape_trace import Shape, ShapeRow

SHOWN_PER_STEP = 5  # candidates shown of each step
SHOWN_BEAMS = 24  # candidates of a beam search shown of each step, and those that lead on


def walkthrough_of(
    model: Model,
    rows: dict[str, Any],
    layers: Sequence[int],
    beams: Sequence[Sequence[BeamCandidate]],
) -> Walkthrough:
    """All that a page shows of one example beside its maps: `rows` [1, T] by the names of
    `jf.forward`, the numbers of the layers to show (none: all), and the beams of each token."""
    length, source = rows["tokens"].shape[1], rows.get("source")
    masks = attention_masks(model.config, layers=layers or None, **rows)
    return Walkthrough(
        stages=stages_of(model.config, length, 0 if source is None else source.shape[1]),
        symbols={name: symbol.meaning for name, symbol in SYMBOLS.items()},
        masks={kind: np.asarray(mask)[:, 0] for kind, mask in masks.items()},
        beams=beams,
        lens=lens_of(model, rows, layers),
    )


def naming(model: Model) -> Callable[[int], str]:
    """The text of an entry of the logits: a token, or a class."""
    over_tokens = model.config.output in ("language", "masked")
    return model.tokenizer.shown if over_tokens else model.labels.__getitem__


# The order of computation


def stages_of(config: ModelConfig, length: int, source_length: int = 0) -> list[Stage]:
    """The sublayers of a forward pass of one row in the order of computation, from the rows of
    `jaxformer shapes`; none, with a note, for a model whose axes have no names."""
    try:
        rows = shapes_of(config, 1, length, source_length)
    except ConfigError as error:
        print(f"note: the page has no diagram of the model: {error}", file=sys.stderr)
        return []
    stages: list[Stage] = []
    for row in rows:
        if not row.makes:  # parameters that no sublayer reads
            continue
        stage = _stage(row, config)
        if row.depth:
            sublayer = stages[-1]
            stages[-1] = sublayer._replace(products=(*sublayer.products, stage))
        else:
            stages.append(stage._replace(formula=formula_of(config, row.name)))
    return stages


def _stage(row: ShapeRow, config: ModelConfig) -> Stage:
    """A row of `jaxformer shapes` with the box of the diagram that it stands in."""
    stack, _, path = row.name.partition(".")
    box: Box
    if stack == "head":
        box = "output"
    elif stack == "encoder" or (stack != "decoder" and config.family == "encoder"):
        box = "encoder"
    else:
        box = "decoder"
    kinds = {"attention": box, "cross": "cross"}
    kind = "" if row.depth else kinds.get(path.rpartition(".")[2], "")
    reads, makes = _axes(row.reads_symbols, row.reads), _axes(row.makes_symbols, row.makes)
    return Stage(box, row.name, row.layers, reads, makes, row.parameters, kind=kind)


def _axes(symbols: Sequence[str], shapes: Sequence[Shape]) -> list[list[tuple[str, int]]]:
    """The symbol and the size of each axis of each array, from texts such as "[B, T, D]"."""
    arrays = []
    for text, shape in zip(symbols, shapes, strict=True):
        arrays.append(list(zip(text.strip("[]").split(", "), shape, strict=True)))
    return arrays


# The logit lens


def lens_of(model: Model, rows: dict[str, Any], layers: Sequence[int]) -> list[list[Choices]]:
    """The most probable texts by the output of each layer of the last stack, for each token; none
    for a model without logits of each token."""
    config, length = model.config, rows["tokens"].shape[1]
    if config.output in ("classes", "none"):
        return []
    stack = "encoder" if config.family == "encoder" else "decoder"
    chosen = [layer for layer in range(config.n_layers) if not layers or layer in layers]
    names = [f"{stack}.{layer}.residual" for layer in chosen]

    if not names:
        return []

    def likeliest(params: Any, rows: dict[str, Any]) -> Any:
        captured = inspect(params, config, capture=names, **rows).values
        streams = jnp.stack([captured[name] for name in names])  # [L, 1, T, D]

        def of_layer(x: jax.Array) -> Any:
            probabilities = jax.nn.softmax(logit_lens(params, config, x)[0, -length:], axis=-1)
            return jax.lax.top_k(probabilities, min(SHOWN_PER_STEP, probabilities.shape[-1]))

        # One layer at a time: the logits of all layers may not fit.
        return jax.lax.map(of_layer, streams)

    probabilities, tokens = map(np.asarray, jax.jit(likeliest)(model.params, rows))  # [L, T, k]
    name = naming(model)

    def choices(layer: int, position: int) -> Choices:
        pairs = zip(tokens[layer, position], probabilities[layer, position], strict=True)
        return [(name(int(token)), float(probability)) for token, probability in pairs]

    layer_count, positions, _ = tokens.shape
    return [[choices(layer, t) for t in range(positions)] for layer in range(layer_count)]


# Beams


def beam_candidates(
    model: Model, steps: BeamSteps, best: Sequence[int]
) -> list[list[BeamCandidate]]:
    """The candidates of each step of the search whose best text has the tokens `best`, likeliest
    first; of many, the first and those that lead to the best text."""
    steps = jax.tree.map(np.asarray, steps)
    live: list[list[int]] = [[]] * steps.chosen.shape[-1]
    candidates = []
    for i in range(int(steps.done)):
        parents, tokens = steps.parents[i, 0].tolist(), steps.tokens[i, 0].tolist()
        texts = [[*live[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        chosen, shown = steps.chosen[i, 0].tolist(), list[BeamCandidate]()
        for index, text in enumerate(texts):
            log_probability = float(steps.log_probabilities[i, 0, index])
            score = float(steps.scores[i, 0, index])
            leads = text == [*best[: i + 1]]
            if not np.isfinite(log_probability) or (len(shown) >= SHOWN_BEAMS and not leads):
                continue
            finished = bool(np.isfinite(score))
            shown.append(
                BeamCandidate(
                    before=text_of(model.tokenizer, text[:-1]),
                    token=model.tokenizer.shown(text[-1]),
                    log_probability=log_probability,
                    state="finished" if finished else "kept" if index in chosen else "dropped",
                    score=score if finished else None,
                    leads=leads,
                )
            )
        candidates.append(shown)
        live = [texts[index] for index in chosen]
    return candidates
