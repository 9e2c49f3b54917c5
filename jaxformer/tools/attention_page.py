"""Attention weights as an HTML page to explore, and as a picture."""

import base64
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.files import ConfigError, replacing
from jaxformer.report.plot import FAINT, INK
from jaxformer.tools.attention_walkthrough import Walkthrough, packed_choices, visible

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

Maps = Mapping[str, np.ndarray]
TokenStrings = Mapping[str, Sequence[str]]
Groups = Mapping[str, Sequence[tuple[int, int, str]]]


def attention_page(
    maps: Maps,
    tokens: TokenStrings,
    *,
    title: str,
    candidates: Sequence[Sequence[tuple[str, float]]] = (),
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
    what is shown beside the maps. Save the page as UTF-8. Raises ConfigError where shapes do not
    fit, or a weight is not within 0 to 1.
    """
    arrays = _checked(maps, tokens)
    axes = sorted(_axes(arrays))
    stepped = axes[-1]  # the tokens that a reader steps through: the target, or else the source
    steps = len(tokens[stepped])
    depth = max(len(weights) for kind, weights in arrays.items() if AXES[kind][0] == stepped)
    data = {
        "title": title,
        "layers": sorted(layers),
        "tokens": {axis: [visible(token) for token in tokens[axis]] for axis in axes},
        "groups": {axis: _grouped((groups or {}).get(axis, ()), tokens[axis]) for axis in axes},
        "maps": {kind: _packed(kind, weights) for kind, weights in arrays.items()},
        "candidates": _packed_candidates(candidates, steps),
        **(walkthrough or Walkthrough()).packed(arrays, steps, depth),
    }
    # Without "<" in the data no text can end the script element that holds it.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

    def content(slot: re.Match[str]) -> str:
        """What stands for {{data}}, or for the {{name}} of a file."""
        return packed if slot[1] == "data" else _read(slot[1])

    return re.sub("{{(.+?)}}", content, _read("attention.html"))


def attention_figure(
    maps: Maps,
    tokens: TokenStrings,
    path: str | Path,
    *,
    title: str,
    kind: str | None = None,
    layers: Sequence[int] = (),
) -> None:
    """Draws one kind of map as a PNG, with a row for each layer and a column for each head; tokens
    are on both axes where they are 64 or fewer.

    `maps`, `tokens` and `layers` are those of `attention_page`; `kind` defaults to cross, else
    decoder, else encoder.
    """
    arrays = _checked(maps, tokens)
    chosen = kind or list(arrays)[-1]
    if chosen not in arrays:
        raise ConfigError(
            f"attention maps hold no {chosen!r}: choose one of {', '.join(map(repr, arrays))}."
        )
    labels = tuple([visible(token) for token in tokens[axis]] for axis in AXES[chosen])
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = _figure(arrays[chosen], labels, f"{title}\n{TITLES[chosen]}", layers)
        dots = min(160.0, 8000 / max(figure.get_size_inches()))
        with replacing(Path(path)) as file:
            figure.savefig(file, format="png", dpi=dots)


def _read(name: str) -> str:
    return files("jaxformer.tools").joinpath("pages", name).read_text(encoding="utf-8")


def _axes(maps: Maps) -> set[str]:
    return {axis for kind in maps for axis in AXES[kind]}


def _checked(maps: Maps, tokens: TokenStrings) -> dict[str, np.ndarray]:
    """The maps as float32 in the order of AXES. Raises ConfigError with all that does not fit."""
    kinds = ", ".join(map(repr, AXES))
    problems = [f"{kind!r} is not a kind of map: {kinds} are." for kind in maps if kind not in AXES]
    if not maps:
        problems.append(f"there is none: pass any of {kinds}.")
    arrays = {kind: np.asarray(maps[kind], np.float32) for kind in AXES if kind in maps}
    missing = sorted(axis for axis in _axes(arrays) if not len(tokens.get(axis, ())))
    problems += [f"{axis} tokens are missing: pass tokens[{axis!r}]." for axis in missing]
    if not problems:
        for kind, array in arrays.items():
            problems += _problems(kind, array, tokens)
    count = sum(array.size for array in arrays.values())
    if count > MAX_WEIGHTS:
        problems.append(
            f"{count:,} weights are too many to show (at most {MAX_WEIGHTS:,}): take fewer tokens"
            " or layers."
        )
    if problems:
        raise ConfigError("\n".join(f"attention maps: {problem}" for problem in problems))
    return arrays


def _problems(kind: str, array: np.ndarray, tokens: TokenStrings) -> Iterator[str]:
    query, key = AXES[kind]
    queries, keys = len(tokens[query]), len(tokens[key])
    if array.ndim != 4 or array.shape[2:] != (queries, keys) or not array.size:
        yield (
            f"{kind!r} has the shape {array.shape}, not (layers, heads, {queries} {query} tokens,"
            f" {keys} {key} tokens): pass the weights of one example with its own tokens."
        )
    # NaN fails both comparisons; a low precision rounds to a little above 1.
    elif not (array.min() >= 0 and array.max() <= 1.01):
        yield (
            f"{kind!r} holds weights from {array.min():g} to {array.max():g}: pass those after the"
            " softmax, from 0 to 1."
        )


def _packed(kind: str, weights: np.ndarray) -> dict[str, Any]:
    """One kind of map for the page: weights in steps of 1/65535, as little-endian 16-bit integers
    in base64."""
    steps = np.rint(np.minimum(weights, 1) * LEVELS).astype("<u2")
    text = base64.b64encode(steps.tobytes()).decode("ascii")
    query, key = AXES[kind]
    sides = {"title": TITLES[kind], "query": query, "key": key}
    return sides | {"shape": weights.shape, "weights": text}


def _packed_candidates(
    candidates: Sequence[Sequence[tuple[str, float]]], count: int
) -> list[list[tuple[str, float]]]:
    if candidates and len(candidates) != count:
        raise ConfigError(
            f"{len(candidates)} steps of candidates for {count} tokens: give one list for each"
            " token, or none."
        )
    return [packed_choices(step) for step in candidates]


def _grouped(
    groups: Sequence[tuple[int, int, str]], tokens: Sequence[str]
) -> list[tuple[int, int, str]]:
    """The groups of one axis. Raises ConfigError for runs that overlap or are not within it."""
    end = 0
    for first, last, text in groups:
        if not end <= first < last <= len(tokens):
            raise ConfigError(
                f"groups hold {(first, last, text)}: the runs of {len(tokens)} tokens must be in"
                f" order and not overlap, from {end} on."
            )
        end = last
    return [(int(first), int(last), visible(text)) for first, last, text in groups]


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
