"""`jaxformer attention RUN`: an interactive page of the attention of each head to the tokens of a
prompt."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.params import Params
from jaxformer.cli.arguments import AttentionArguments, check_output
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError, write_text
from jaxformer.generation.beam import BeamSteps, beam_search_steps
from jaxformer.generation.decode import generate
from jaxformer.layers.block import MIXERS
from jaxformer.runs.prompting import (
    Model,
    check_size,
    open_model,
    row_of,
    start_of,
    text_of,
    tokens_of,
)
from jaxformer.tokenizer.pieces import character_groups
from jaxformer.tools.attention_page import AXES, BeamCandidate, Choices, attention_page
from jaxformer.tools.inspect import attention_maps, attention_masks, inspect, logit_lens
from jaxformer.tools.model_shapes import SYMBOLS, Shape, formula_of, shapes_of

PADDING = "[padding]"  # shown as the text of a token of padding
MAX_TOKENS = 256  # a page of more could not be read, nor opened quickly
SHOWN_PER_STEP = 5  # candidates shown of each step
SHOWN_BEAMS = 24  # candidates of a beam search shown of each step, and those that lead on


def run(args: AttentionArguments) -> int:
    check_output(args.output)
    model = open_model(**args.model, pair=args.pair)
    inputs, beams = _inputs(model, args)
    # One program for logits and maps: the weights are those of the very pass that made the logits.
    compute = jax.jit(attention_maps, static_argnums=1, static_argnames="layers")
    rows = {name: row[None] for name, row in inputs.items()}  # [1, T]
    # [L, 1, N, queries, keys] of each kind, and logits [1, T, V].
    attention = compute(model.params, model.config, layers=args.layers or None, **rows)
    axis_rows = {"target": inputs["tokens"]}
    if model.config.family == "encoder":
        axis_rows = {"source": inputs["tokens"]}
    elif "source" in inputs:
        axis_rows["source"] = inputs["source"]
    texts = {}
    groups = {}
    for axis, row in axis_rows.items():
        padding = []
        if axis == "source":
            padding = [PADDING] * args.padding
        ids = row[: len(row) - len(padding)].tolist()
        texts[axis] = [*map(model.tokenizer.shown, ids), *padding]
        # Runs of tokens that share characters.
        groups[axis] = character_groups([*map(model.tokenizer.raw, ids)])
    maps = {}
    for kind in ("encoder", "decoder", "cross"):
        weights = getattr(attention, kind)  # [L, 1, N, queries, keys]
        if weights is not None:
            # Virtual tokens, which come first, are not shown.
            queries, keys = (len(texts[axis]) for axis in AXES[kind])
            maps[kind] = np.asarray(weights)[:, 0, :, -queries:, -keys:]
    logits = attention.logits[0]
    candidates = []
    # --layers may name layers that only the encoder has.
    if "target" in texts and "decoder" not in maps:
        beams = []
    elif logits.ndim == 2 and model.config.output != "none":
        candidates = _choices(model, *map(np.asarray, _likeliest(logits)))
    length = rows["tokens"].shape[1]
    source_length = len(inputs.get("source", ()))
    # [L, 1, queries, keys], from positions and segments alone.
    masks = attention_masks(model.config, layers=args.layers or None, **rows)
    page = attention_page(
        maps,
        texts,
        title=args.prompt,
        candidates=candidates,
        layers=args.layers,
        groups=groups,
        stages=stages_of(model.config, length, source_length),
        symbols=SYMBOLS,
        masks={kind: np.asarray(mask)[:, 0] for kind, mask in masks.items()},
        beams=beams,
        lens=lens_of(model, rows, args.layers),
    )
    write_text(args.output, page)
    counts = ", ".join(f"{len(tokens)} {axis} tokens" for axis, tokens in sorted(texts.items()))
    print(f"{args.output}: attention of {counts}")
    if "virtual" in model.params:
        print("Of the attention of a token, what these lack to 1 is to the virtual tokens.")
    return 0


def _inputs(
    model: Model, args: AttentionArguments
) -> tuple[dict[str, np.ndarray], list[list[BeamCandidate]]]:
    """Return what the model reads [T], by the names of `jf.forward`, and the beams that wrote the
    target. Raises ConfigError for more than a page shows."""
    config = model.config
    limit = min(MAX_TOKENS, model.context())
    if (args.target is not None or args.beams) and config.family != "encoder_decoder":
        raise ConfigError(
            f"--target and --beams need an encoder-decoder, but {args.path} has"
            f" model.family={config.family!r}."
        )
    if args.target is not None and args.beams:
        raise ConfigError("--beams searches for a target, and --target gives one: leave one out.")
    if args.padding < 0 or (args.padding and config.family == "decoder"):
        raise ConfigError(
            f"--padding {args.padding} must be 0 or more, and needs an encoder: {args.path} has"
            f" model.family={config.family!r}."
        )
    rows: dict[str, list[int]]
    beams: list[list[BeamCandidate]] = []
    start, source = start_of(model, args.prompt)
    padded_names = ["source"]
    segment_ids = "source_segment_ids"
    if config.family == "encoder_decoder":
        source_limit = min(MAX_TOKENS, model.context(source=True))
        # Before the model writes a target, which may take a while.
        check_size(len(source) + args.padding, source_limit, "on a page")
        rules = model.writing_rules() | {"source": [source]}
        # As many tokens as the page has room for.
        count = limit - len(start)
        if args.target is not None:
            ids = tokens_of(model.tokenizer, args.target)
        elif args.beams:
            rules |= {"beams": args.beams, "keep": 1}
            texts, steps = beam_search_steps(model.params, config, [start], count, **rules)
            best = np.asarray(texts.tokens[0, 0]).tolist()
            ids = model.before_end(best)
            # There are no candidates for the start but its last token, nor after the last step.
            beams = [[]] * (len(start) - 1) + beam_candidates(model, steps, best) + [[]] * len(ids)
            del beams[len(start) + len(ids) :]
        else:
            # Greedy, so that the page of a model is the same each time.
            made = generate(model.params, config, [start], count, temperature=0.0, **rules)
            ids = model.before_end(made[0].tolist())
        rows = {"tokens": model.tokenizer.as_target(ids), "source": source}
    elif config.family == "decoder" and config.output in ("language", "none"):
        rows = {"tokens": start}
    else:
        row = row_of(model, args.prompt, args.pair)
        rows = {"tokens": row["tokens"].tolist()}
        if "token_types" in row:
            rows["token_types"] = row["token_types"].tolist()
        padded_names = [*rows]
        segment_ids = "segment_ids"
    if args.padding:
        rows[segment_ids] = [1] * len(rows[padded_names[0]]) + [0] * args.padding
        for name in padded_names:
            rows[name] = rows[name] + [0] * args.padding
    check_size(len(rows["tokens"]), limit, "on a page")
    return {name: np.array(row, np.int32) for name, row in rows.items()}, beams


def _likeliest(logits: jax.Array) -> Sequence[jax.Array]:
    """Return the probabilities [T, k] of the likeliest entries of logits [T, V], and these
    entries."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jax.lax.top_k(probabilities, min(SHOWN_PER_STEP, probabilities.shape[-1]))


def _choices(model: Model, probabilities: np.ndarray, entries: np.ndarray) -> list[Choices]:
    """Return the texts of entries of the logits [T, k], which are tokens or classes, each with its
    probability."""
    text: Callable[[int], str] = model.labels.__getitem__
    if model.config.output in ("language", "masked"):
        text = model.tokenizer.shown
    rows = list[Choices]()
    for of_token, shares in zip(entries.tolist(), probabilities.tolist(), strict=True):
        rows.append([*zip(map(text, of_token), shares, strict=True)])
    return rows


# The order of computation


def stages_of(config: ModelConfig, length: int, source_length: int = 0) -> list[dict[str, Any]]:
    """Return the sublayers of a forward pass of one row in the order of computation, from the rows
    of `jaxformer shapes`, as `attention_page` takes them."""
    stages: list[dict[str, Any]] = []
    for row in shapes_of(config, 1, length, source_length):
        if not row.makes:  # parameters that no sublayer reads
            continue
        stage = {
            "part": "decoder",
            "name": row.name,
            "layers": row.layers,
            "reads": [*map(_axes, row.reads)],
            "makes": [*map(_axes, row.makes)],
            "parameters": row.parameters,
            "formula": (),
            "kind": "",
            "products": [],
        }
        stack = row.name.partition(".")[0]
        if stack == "head":
            stage["part"] = "output"
        elif "encoder" in (stack, config.family) and stack != "decoder":
            stage["part"] = "encoder"
        if row.depth:
            # A product belongs to the sublayer before it.
            stages[-1]["products"].append(stage)
            continue
        stage["formula"] = formula_of(config, row.name)
        what = row.name.rpartition(".")[2]
        if what == "cross":
            stage["kind"] = "cross"
        elif what in MIXERS and MIXERS[what].capture == "attention_out":
            # The page shows the maps of a stage where the stage stands in the diagram.
            stage["kind"] = stage["part"]
        stages.append(stage)
    return stages


def _axes(shape: Shape) -> list[tuple[str, int]]:
    """Return the symbol and the size of each axis."""
    return [(axis.symbol, axis) for axis in shape]


# The logit lens


def lens_of(
    model: Model, rows: dict[str, np.ndarray], layers: Sequence[int]
) -> list[list[Choices]]:
    """Return the most probable texts by the output of each layer of the last stack, for each token;
    none for a model without logits of each token."""
    config = model.config
    length = rows["tokens"].shape[1]
    if config.output in ("classes", "projection", "none"):
        return []
    stack = "decoder"
    if config.family == "encoder":
        stack = "encoder"
    # The streams after the blocks, which the head alone would read of the last one.
    names = []
    for layer in range(config.n_layers):
        if not layers or layer in layers:
            names.append(f"{stack}.{layer}.residual")
    if not names:
        return []

    def likeliest(params: Params, rows: dict[str, Any]) -> Sequence[jax.Array]:
        # One forward pass for all layers.
        captured = inspect(params, config, capture=names, **rows).values
        streams = jnp.stack([captured[name] for name in names])  # [L, 1, T, D]

        # One layer at a time: the logits of all layers may not fit.
        return jax.lax.map(
            lambda x: _likeliest(logit_lens(params, config, x)[0, -length:]), streams
        )

    probabilities, tokens = map(np.asarray, jax.jit(likeliest)(model.params, rows))  # [L, T, k]
    return [_choices(model, *layer) for layer in zip(probabilities, tokens, strict=True)]


# Beams


def beam_candidates(
    model: Model, steps: BeamSteps, best: Sequence[int]
) -> list[list[BeamCandidate]]:
    """Return the candidates of each step of the search whose best text has the tokens `best`,
    likeliest first; of many, the first and those that lead to the best text."""
    # [steps, 1, candidates]
    steps = jax.tree.map(np.asarray, steps)
    live: list[list[int]] = [[]] * steps.chosen.shape[-1]
    candidates = []
    for i in range(int(steps.done)):
        parents = steps.parents[i, 0].tolist()
        tokens = steps.tokens[i, 0].tolist()
        texts = [[*live[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        chosen = steps.chosen[i, 0].tolist()
        shown = list[BeamCandidate]()
        for index, text in enumerate(texts):
            log_probability = float(steps.log_probabilities[i, 0, index])
            score: float | None = float(steps.scores[i, 0, index])
            # The text that won is shown even where it was far behind at first.
            leads = text == [*best[: i + 1]]
            if not np.isfinite(log_probability) or (len(shown) >= SHOWN_BEAMS and not leads):
                continue
            state: Literal["kept", "finished", "dropped"] = "finished"
            if score == -np.inf:
                score = None
                state = "dropped"
                if index in chosen:
                    state = "kept"
            shown.append(
                BeamCandidate(
                    before=text_of(model.tokenizer, text[:-1]),
                    token=model.tokenizer.shown(text[-1]),
                    log_probability=log_probability,
                    state=state,
                    score=score,
                    leads=leads,
                )
            )
        candidates.append(shown)
        # The beams of the next step are the candidates that were kept.
        live = [texts[index] for index in chosen]
    return candidates
