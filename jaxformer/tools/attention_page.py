"""The page of attention of one example: its weights head by head and step by step, beside the order
of computation, masks, beams and the logits of each layer."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.files import ConfigError
from jaxformer.tools import filled_page

# The tokens that are the queries and those that are the keys of each kind of map.
AXES = {
    "encoder": ("source", "source"),
    "decoder": ("target", "target"),
    "cross": ("target", "source"),
}
TITLES = {
    "encoder": "Encoder self-attention",
    "decoder": "Decoder self-attention",
    "cross": "Cross-attention",
}
LEVELS = 65_535  # steps between the weights 0 and 1
MAX_WEIGHTS = 2**25  # of a page: 64 MiB as 16-bit integers

JOINERS = "\u200c\u200d"  # not printable, but they shape the characters around them
VISIBLE = {"\n": "↵", "\r": "␍", "\t": "⇥", **{char: char for char in JOINERS}}

Maps = Mapping[str, np.ndarray]
TokenStrings = Mapping[str, Sequence[str]]
Groups = Mapping[str, Sequence[tuple[int, int, str]]]
AxisSizes = Sequence[tuple[str, int]]  # of each axis its symbol, or its size, and its size
Choices = Sequence[tuple[str, float]]  # texts with their probabilities, likeliest first
Box = Literal["encoder", "decoder", "output"]  # of the diagram


def visible(token: str) -> str:
    """A token's text with its white space shown as `·`, `↵` or `⇥`, and `∅` for no text at all."""
    return "".join(map(_visible_character, token)) or "∅"


def _visible_character(char: str) -> str:
    if char in VISIBLE or char.isspace():
        return VISIBLE.get(char, "·")
    return char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"


class Stage(NamedTuple):
    """A sublayer in the order of computation, or a product within one, which has no `products`.

    `part` is the box of the diagram that it stands in, `name` its full name, `kind` the kind of
    maps that it makes ("" for none). `layers` are the numbers of the layers that have it. `formula`
    is lines of text.
    """

    part: Box
    name: str
    layers: Sequence[int]
    reads: Sequence[AxisSizes]
    makes: Sequence[AxisSizes]
    parameters: int = 0
    formula: Sequence[str] = ()
    kind: str = ""
    products: Sequence["Stage"] = ()


class BeamCandidate(NamedTuple):
    """A text that a step of a beam search could go on with: the text so far and its new token, its
    log-probability in nats, and, if the token ends it, its score by the length penalty.

    `state` is kept, finished or dropped. `leads` says whether the text that the search returned
    begins with it.
    """

    before: str
    token: str
    log_probability: float
    state: Literal["kept", "finished", "dropped"]
    score: float | None = None
    leads: bool = False


@dataclass(frozen=True, kw_only=True)
class Walkthrough:
    """What a page shows beside its maps; an empty field is not shown.

    `stages` are in the order of computation, and `symbols` say what the symbols of their axes mean.
    `masks` hold, for kinds of maps that the page has, which keys each query may attend to: bool
    [L, queries, keys]. `beams[t]` are the candidates for what follows target token t, likeliest
    first. `lens[l][t]` are the most probable texts with their probabilities by the output of layer
    l for position t of the target, or of the source where there is no target.
    """

    stages: Sequence[Stage] = ()
    symbols: Mapping[str, str] = field(default_factory=dict)
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    beams: Sequence[Sequence[BeamCandidate]] = ()
    lens: Sequence[Sequence[Choices]] = ()


def attention_page(
    maps: Maps,
    tokens: TokenStrings,
    *,
    title: str,
    candidates: Sequence[Choices] = (),
    layers: Sequence[int] = (),
    groups: Groups | None = None,
    walkthrough: Walkthrough | None = None,
) -> str:
    """A self-contained HTML page that shows the attention of one example, head by head and step by
    step.

    `maps` holds any of "encoder" [L, N, S, S], "decoder" [L, N, T, T] and "cross" [L, N, T, S]:
    layer, head, query, key; `layers` are the numbers of the layers where they are not all. `tokens`
    holds the texts of "source" (S) and "target" (T), as far as the maps need them. `candidates[t]`
    are the most probable (text, probability) for what follows target token t; without a target, for
    source token t itself. `groups` holds, for "source" and "target", runs of tokens that share
    characters, (first, one past the last, their text), which are labeled as one; `walkthrough` is
    what is shown beside the maps. Save the page as UTF-8. Raises ConfigError for more weights than
    a page shows, and for a weight or probability that is not within 0 to 1.
    """
    arrays = _checked(maps)
    shown = walkthrough or Walkthrough()
    axes = sorted({axis for kind in arrays for axis in AXES[kind]})
    data = {
        "title": title,
        "layers": sorted(layers),
        "tokens": {axis: [visible(token) for token in tokens[axis]] for axis in axes},
        "groups": {
            axis: [(first, end, visible(text)) for first, end, text in (groups or {}).get(axis, ())]
            for axis in axes
        },
        "maps": {kind: _packed(kind, weights) for kind, weights in arrays.items()},
        "candidates": [_packed_choices(step) for step in candidates],
        "stages": [_packed_stage(stage) for stage in shown.stages],
        "symbols": dict(shown.symbols),
        "masks": {kind: _packed_mask(mask) for kind, mask in shown.masks.items()},
        "beams": [[_packed_candidate(beam) for beam in step] for step in shown.beams],
        "lens": [[_packed_choices(choices) for choices in layer] for layer in shown.lens],
    }
    # Without "<" in the data no text can end the script element that holds it.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return filled_page("attention.html", {"data": packed})


def _checked(maps: Maps) -> dict[str, np.ndarray]:
    """The maps as float32 in the order of AXES. Raises ConfigError for what cannot be shown."""
    arrays = {kind: np.asarray(maps[kind], np.float32) for kind in AXES if kind in maps}
    count = sum(array.size for array in arrays.values())
    if count > MAX_WEIGHTS:
        raise ConfigError(
            f"attention maps: {count:,} weights are too many to show (at most {MAX_WEIGHTS:,}):"
            " take fewer tokens or layers."
        )
    for kind, array in arrays.items():
        # NaN fails both comparisons; a low precision rounds to a little above 1.
        if not (array.min() >= 0 and array.max() <= 1.01):
            raise ConfigError(
                f"attention maps: {kind!r} holds weights from {array.min():g} to {array.max():g}:"
                " pass those after the softmax, from 0 to 1."
            )
    return arrays


def _packed(kind: str, weights: np.ndarray) -> dict[str, Any]:
    """One kind of map for the page: weights in steps of 1/65535, as little-endian 16-bit integers
    in base64."""
    steps = np.rint(np.minimum(weights, 1) * LEVELS).astype("<u2")
    text = base64.b64encode(steps.tobytes()).decode("ascii")
    query, key = AXES[kind]
    sides = {"title": TITLES[kind], "query": query, "key": key}
    return sides | {"shape": weights.shape, "weights": text}


def _packed_choices(choices: Choices) -> list[tuple[str, float]]:
    """Texts and probabilities for the page. Raises ConfigError for one not within 0 to 1."""
    if not all(0 <= probability <= 1.01 for _, probability in choices):
        raise ConfigError(
            "candidates hold a probability that is not within 0 to 1: pass (text, probability)"
            " after the softmax."
        )
    return [(visible(text), round(float(probability), 6)) for text, probability in choices]


def _packed_mask(mask: np.ndarray) -> dict[str, Any]:
    """The different ones of the masks [L, queries, keys], in base64 with 8 keys a byte, the first
    in the highest bit, and the index of the one that each layer has."""
    different, index_of_layer = np.unique(mask, axis=0, return_inverse=True)
    bits = np.packbits(different.reshape(len(different), -1), axis=1)
    texts = [base64.b64encode(row.tobytes()).decode("ascii") for row in bits]
    return {"bits": texts, "layers": index_of_layer.reshape(-1).tolist()}


def _packed_stage(stage: Stage) -> dict[str, Any]:
    return stage._asdict() | {"products": [_packed_stage(product) for product in stage.products]}


def _packed_candidate(candidate: BeamCandidate) -> dict[str, Any]:
    score = candidate.score
    return candidate._asdict() | {
        "before": visible(candidate.before) if candidate.before else "",
        "token": visible(candidate.token),
        "log_probability": round(float(candidate.log_probability), 4),
        "score": None if score is None else round(float(score), 4),
    }
