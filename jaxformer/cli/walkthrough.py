"""What the page of attention shows beside its maps: the order of computation, masks, beams and the
logit lens of one example."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.cli.prompts import Model, text_of
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.tools.walkthrough import BeamCandidate, Choices, Stage, Walkthrough

if TYPE_CHECKING:
    from jaxformer.generation.beam import BeamSteps
    from jaxformer.tools.shape_trace import Shape, ShapeRow

SHOWN_PER_STEP = 5  # candidates shown of each step
MOST_BEAMS_SHOWN = 24  # candidates of a beam search shown of each step


def walkthrough_of(
    model: Model,
    rows: dict[str, Any],
    layers: Sequence[int],
    beams: Sequence[Sequence[BeamCandidate]],
) -> Walkthrough:
    """All that a page shows of one example: `rows` [1, T] by the names of `jf.forward`."""
    from jaxformer.tools.inspect import attention_masks
    from jaxformer.tools.shapes import SYMBOLS

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
    from jaxformer.tools.shapes import formula_of, shapes_of

    try:
        rows = shapes_of(config, 1, length, source_length)
    except ConfigError as error:
        print(f"note: the page has no diagram of the model: {error}", file=sys.stderr)
        return []
    found: list[Stage] = []
    for row in rows:
        if not row.makes:  # parameters that no sublayer reads
            continue
        stage = _stage(row, config)
        if row.depth:
            last = found[-1]
            found[-1] = last._replace(products=(*last.products, stage))
        else:
            found.append(stage._replace(formula=formula_of(config, row.name)))
    return found


def _stage(row: "ShapeRow", config: ModelConfig) -> Stage:
    """A row of `jaxformer shapes` with the part of the diagram that it belongs to."""
    stack, _, rest = row.name.partition(".")
    own = "encoder" if config.family == "encoder" else "decoder"
    part: Any = stack if stack in ("encoder", "decoder") else "output" if stack == "head" else own
    what = rest.rpartition(".")[2]
    kinds = {"attention": part, "cross": "cross"}
    reads, makes = _axes(row.reads_symbols, row.reads), _axes(row.makes_symbols, row.makes)
    kind = "" if row.depth else kinds.get(what, "")
    return Stage(part, row.name, row.layers, reads, makes, row.parameters, kind=kind)


def _axes(symbols: Sequence[str], shapes: Sequence["Shape"]) -> list[list[tuple[str, int]]]:
    """The symbol and the size of each axis of each array."""
    names = (text.strip("[]").split(", ") for text in symbols)
    return [[*zip(of, shape, strict=True)] for of, shape in zip(names, shapes, strict=True)]


# The logit lens


def lens_of(model: Model, rows: dict[str, Any], layers: Sequence[int]) -> list[list[Choices]]:
    """The most probable texts by the output of each layer of the last stack, for each token; none
    for a model without logits of each token."""
    import jax
    import jax.numpy as jnp

    from jaxformer.tools.inspect import inspect, logit_lens

    config, length = model.config, rows["tokens"].shape[1]
    if config.output in ("classes", "none"):
        return []
    stack = "encoder" if config.family == "encoder" else "decoder"
    chosen = [layer for layer in range(config.n_layers) if not layers or layer in layers]
    names = [f"{stack}.{layer}.residual" for layer in chosen]

    def leading(params: Any, rows: dict[str, Any]) -> Any:
        found = inspect(params, config, capture=names, **rows)
        streams = jnp.stack([found.values[name] for name in names])  # [L, 1, T, D]

        def of_layer(x: jax.Array) -> Any:  # one at a time: logits of all layers may not fit
            shares = jax.nn.softmax(logit_lens(params, config, x)[0, -length:], axis=-1)
            return jax.lax.top_k(shares, min(SHOWN_PER_STEP, shares.shape[-1]))

        return jax.lax.map(of_layer, streams)

    if not names:
        return []
    name = naming(model)
    shares, best = map(np.asarray, jax.jit(leading)(model.params, rows))  # [L, T, k] twice
    return [
        [
            [(name(int(token)), float(share)) for token, share in zip(*of_token, strict=True)]
            for of_token in zip(*of_layer, strict=True)
        ]
        for of_layer in zip(best, shares, strict=True)
    ]


# Beams


def beam_candidates(
    model: Model, steps: "BeamSteps", found: Sequence[int]
) -> list[list[BeamCandidate]]:
    """The candidates of each step of the search that found these tokens, likeliest first; of many,
    the first and those that lead to what was found."""
    import jax

    steps = jax.tree.map(np.asarray, steps)
    live: list[list[int]] = [[]] * steps.chosen.shape[-1]
    candidates = []
    for i in range(int(steps.done)):
        parents, tokens = (of[i, 0].tolist() for of in (steps.parents, steps.tokens))
        texts = [[*live[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        chosen, own = steps.chosen[i, 0].tolist(), list[BeamCandidate]()
        for place, text in enumerate(texts):
            log, score = (float(of[i, 0, place]) for of in (steps.log_probabilities, steps.scores))
            leads = text == [*found[: i + 1]]
            if not np.isfinite(log) or (len(own) >= MOST_BEAMS_SHOWN and not leads):
                continue
            finished = bool(np.isfinite(score))
            own.append(
                BeamCandidate(
                    before=text_of(model.tokenizer, text[:-1]),
                    token=model.tokenizer.shown(text[-1]),
                    log_probability=log,
                    state="finished" if finished else "kept" if place in chosen else "dropped",
                    score=score if finished else None,
                    leads=leads,
                )
            )
        candidates.append(own)
        live = [texts[place] for place in chosen]
    return candidates
