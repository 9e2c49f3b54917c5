"""`jaxformer attention RUN`: an interactive page of the attention of each head to the tokens of a
prompt."""

import itertools
from collections.abc import Iterable

import jax
import numpy as np

from jaxformer.cli.arguments import AttentionArguments, check_output
from jaxformer.cli.prompting import (
    Model,
    check_size,
    new_tokens,
    open_model,
    row_of,
    start_of,
    tokens_of,
)
from jaxformer.cli.walkthrough import SHOWN_PER_STEP, beam_candidates, naming, walkthrough_of
from jaxformer.files import ConfigError, write_text
from jaxformer.generation.beam import beam_search_steps
from jaxformer.tokenizer.pieces import character_groups
from jaxformer.tools.attention_page import AXES, attention_figure, attention_page
from jaxformer.tools.attention_walkthrough import BeamCandidate
from jaxformer.tools.inspect import attention_maps

PADDING = "[padding]"  # shown as the text of a token of padding
MAX_TOKENS = 256  # a page of more could not be read, nor opened quickly


def run(args: AttentionArguments) -> int:
    check_output(args.output)
    check_output(args.figure)
    model = open_model(args, args.pair)
    inputs, beams = _inputs(model, args)
    compute = jax.jit(attention_maps, static_argnums=1, static_argnames="layers")
    rows = {name: row[None] for name, row in inputs.items()}  # [1, T]
    attention = compute(model.params, model.config, layers=args.layers or None, **rows)
    axis_rows = {"source" if model.config.family == "encoder" else "target": inputs["tokens"]}
    if "source" in inputs:
        axis_rows["source"] = inputs["source"]
    texts, groups = {}, {}
    for axis, row in axis_rows.items():
        texts[axis], groups[axis] = _texts(model, row, args.padding if axis == "source" else 0)
    maps = {}
    for kind in ("encoder", "decoder", "cross"):
        weights = getattr(attention, kind)  # [L, 1, N, queries, keys]
        if weights is not None:
            # Virtual tokens, which come first, are not shown.
            queries, keys = (len(texts[axis]) for axis in AXES[kind])
            maps[kind] = np.asarray(weights)[:, 0, :, -queries:, -keys:]
    candidates = _candidates(model, np.asarray(attention.logits[0]))
    # --layers may name layers that only the encoder has.
    if "target" in texts and "decoder" not in maps:
        candidates, beams = [], []
    walkthrough = walkthrough_of(model, rows, args.layers, beams)
    page = attention_page(
        maps,
        texts,
        title=args.prompt,
        candidates=candidates,
        layers=args.layers,
        groups=groups,
        walkthrough=walkthrough,
    )
    write_text(args.output, page)
    counts = ", ".join(f"{len(tokens)} {axis} tokens" for axis, tokens in sorted(texts.items()))
    print(f"{args.output}: attention of {counts}")
    if "virtual" in model.params:
        print("Of the attention of a token, what these lack to 1 is to the virtual tokens.")
    if args.figure is not None:
        attention_figure(maps, texts, args.figure, title=args.prompt, layers=args.layers)
        print(f"{args.figure}: the same as a picture")
    return 0


def _texts(
    model: Model, row: np.ndarray, padding: int
) -> tuple[list[str], list[tuple[int, int, str]]]:
    """The texts of tokens [T], of which the last `padding` are padding, and the runs of tokens that
    share characters."""
    ids = row[: len(row) - padding].tolist()
    texts = [model.tokenizer.shown(token) for token in ids] + [PADDING] * padding
    return texts, character_groups([model.tokenizer.raw(token) for token in ids])


def _inputs(
    model: Model, args: AttentionArguments
) -> tuple[dict[str, np.ndarray], list[list[BeamCandidate]]]:
    """What the model reads [T], by the names of `jf.forward`, and the beams that wrote the target.
    Raises ConfigError for more than a page shows."""
    _check_options(model, args)
    config, limit = model.config, min(MAX_TOKENS, model.context())
    rows: dict[str, list[int]]
    beams: list[list[BeamCandidate]] = []
    start, source = start_of(model, args.prompt)
    if config.family == "encoder_decoder":
        source_limit = min(MAX_TOKENS, model.context(source=True))
        check_size(len(source) + args.padding, source_limit, "on a page")
        if args.target is None:
            ids, beams = _target(model, start, source, limit - len(start), args.beams)
        else:
            ids = tokens_of(model.tokenizer, args.target)
        rows = {"tokens": model.tokenizer.as_target(ids), "source": source}
    elif config.family == "decoder" and config.output in ("language", "none"):
        rows = {"tokens": start}
    else:
        row = row_of(model, args.prompt, args.pair)
        rows = {name: row[name].tolist() for name in ("tokens", "token_types") if name in row}
    check_size(len(rows["tokens"]), limit, "on a page")
    if args.padding:
        rows = _padded(rows, args.padding)
        check_size(len(rows["tokens"]), limit, "on a page")
    return {name: np.array(row, np.int32) for name, row in rows.items()}, beams


def _check_options(model: Model, args: AttentionArguments) -> None:
    """Raises ConfigError for options that do not fit the model."""
    config = model.config
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


def _padded(rows: dict[str, list[int]], padding: int) -> dict[str, list[int]]:
    """Rows with padding after the source, or after the tokens of an encoder, and their segment
    ids."""
    if "source" in rows:
        names, read, segment_ids = ["source"], rows["source"], "source_segment_ids"
    else:
        names, read, segment_ids = list(rows), rows["tokens"], "segment_ids"
    padded = {name: rows[name] + [0] * padding for name in names}
    return rows | padded | {segment_ids: [1] * len(read) + [0] * padding}


def _target(
    model: Model, start: list[int], source: list[int], count: int, beams: int
) -> tuple[list[int], list[list[BeamCandidate]]]:
    """The tokens that the model writes for a source, without the end token, and for each token of
    the target the candidates of a beam search, if there is one."""
    if not beams:
        pieces = new_tokens(model, start, source, count, 0, temperature=0.0, key=jax.random.key(0))
        return _before_end(model, itertools.chain.from_iterable(pieces)), []
    rules = model.writing_rules() | {"source": [source], "beams": beams, "keep": 1}
    texts, steps = beam_search_steps(model.params, model.config, [start], count, **rules)
    best = np.asarray(texts.tokens[0, 0]).tolist()
    ids = _before_end(model, best)
    # There are no candidates for the start but its last token, nor for tokens after the last step.
    candidates: list[list[BeamCandidate]] = [[] for _ in start[1:]]
    candidates += beam_candidates(model, steps, best)
    length = len(start) + len(ids)
    candidates += [[] for _ in range(length - len(candidates))]
    return ids, candidates[:length]


def _before_end(model: Model, tokens: Iterable[int]) -> list[int]:
    """The tokens before the first end token."""
    return [*itertools.takewhile(lambda token: token not in model.tokenizer.end_tokens, tokens)]


def _candidates(model: Model, logits: np.ndarray) -> list[list[tuple[str, float]]]:
    """The most likely (text, probability) at each row of the logits [T, V]; none for the class of
    a text [C]."""
    if logits.ndim == 1 or model.config.output == "none":
        return []
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)  # [T, V]
    likeliest = np.argsort(-probabilities, axis=-1, kind="stable")[:, :SHOWN_PER_STEP]
    name = naming(model)
    candidates = []
    for row, tokens in zip(probabilities, likeliest, strict=True):
        candidates.append([(name(int(token)), float(row[token])) for token in tokens])
    return candidates
