"""The page of attention of one example: its weights head by head and step by step, beside the order
of computation, masks, beams and the logits of each layer; and a picture of the weights."""

import base64
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jaxformer.files import ConfigError, located, replacing
from jaxformer.report.plot import FAINT, INK
from jaxformer.tools import filled_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
MAX_LABELS = 64  # tokens that a figure names on an axis

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


def attention_figure(
    maps: Maps, tokens: TokenStrings, path: str | Path, *, title: str, layers: Sequence[int] = ()
) -> None:
    """Draws one kind of map, that of cross-attention if there is one, else of the decoder, as a
    PNG, with a row for each layer and a column for each head; tokens are on both axes where they
    are 64 or fewer. `maps`, `tokens` and `layers` are those of `attention_page`."""
    arrays = _checked(maps)
    chosen = list(arrays)[-1]
    labels = tuple([visible(token) for token in tokens[axis]] for axis in AXES[chosen])
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = _figure(arrays[chosen], labels, f"{title}\n{TITLES[chosen]}", layers)
        dots = min(160.0, 8000 / max(figure.get_size_inches()))
        with replacing(located(path)) as file:
            figure.savefig(file, format="png", dpi=dots)


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


def _figure(
    weights: np.ndarray, labels: tuple[list[str], ...], title: str, layers: Sequence[int]
) -> "Figure":
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    depth, heads, rows, columns = weights.shape
    labeled = max(rows, columns) <= MAX_LABELS
    # Sizes are in inches: of a cell, of a map, and of the whole figure.
    cell = max(min(0.22, 2.6 / max(rows, columns)), 0.055 if labeled else 0)
    width, height = max(columns * cell, 0.9), max(rows * cell, 0.9)
    size = (heads * (width + 0.12) + 2, depth * (height + 0.3) + 2)
    text: dict[str, Any] = {"color": INK, "fontsize": max(8.0, 3 * width)}
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    headline = text | {"fontsize": 1.5 * text["fontsize"]}
    figure.suptitle(title, fontweight="bold", parse_math=False, **headline)
    grid = figure.subplots(depth, heads, squeeze=False, sharex=True, sharey=True)
    shading: dict[str, Any] = {"cmap": "Blues", "norm": PowerNorm(0.5, 0, 1), "aspect": "auto"}
    queries, keys = labels if labeled else ([], [])
    font: dict[str, Any] = {"fontsize": min(9.0, 72 * cell * 0.85), "family": "monospace"}
    for (layer, head), axes in np.ndenumerate(grid):
        image = axes.imshow(weights[layer, head], interpolation="none", **shading)
        number = sorted(layers)[layer] if layers else layer
        axes.set_title(f"layer {number}, head {head}", pad=3, **text)
        axes.spines[:].set_color(FAINT)
        axes.tick_params(length=0, colors=INK)
        axes.set_yticks(range(len(queries)), queries, parse_math=False, **font)
        axes.set_xticks(range(len(keys)), keys, rotation=90, parse_math=False, **font)
    figure.supylabel("query", **text)
    figure.supxlabel("key", **text)
    ticks = {0: "0", 0.01: ".01", 0.1: ".1", 0.25: ".25", 0.5: ".5", 1: "1"}
    length = min(1, 3 / size[1])
    bar = figure.colorbar(image, ax=grid, ticks=[*ticks], shrink=length, aspect=24, pad=0.01)
    bar.outline.set_visible(False)
    bar.ax.set_yticklabels([*ticks.values()], **text)
    return figure
