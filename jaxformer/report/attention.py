"""The weights of attention as a page to explore in a browser, and as a picture."""

import base64
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.report.plot import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
VISIBLE = {
    "\n": "↵",
    "\r": "␍",
    "\t": "⇥",
    "\u200c": "\u200c",
    "\u200d": "\u200d",
}  # joiners shape what is around them
LEVELS = 65_535
MOST_WEIGHTS = 2**25
MOST_LABELS = 64

Maps = Mapping[str, np.ndarray]
TokenStrings = Mapping[str, Sequence[str]]


def attention_page(
    maps: Maps,
    tokens: TokenStrings,
    *,
    title: str,
    candidates: Sequence[Sequence[tuple[str, float]]] = (),
    layers: Sequence[int] = (),
) -> str:
    """A self-contained HTML page that shows the attention of one example, head by head and step by
    step.

    `maps` holds any of "encoder" [L, N, S, S], "decoder" [L, N, T, T] and "cross" [L, N, T, S]:
    layer, head, query, key; `layers` numbers the layers where they are not all. `tokens` holds the
    texts of "source" (S) and "target" (T), those of the two that the maps need. `candidates[t]` are
    the leading (text, probability) for what follows target token t; without a target, for what
    stands at source token t. Save it as UTF-8. ConfigError if shapes do not fit, or a weight is not
    within 0 to 1.
    """
    checked = _checked(maps, tokens)
    data = {
        "title": title,
        "layers": sorted(layers),
        "tokens": {
            axis: [visible(token) for token in tokens[axis]] for axis in sorted(_axes(checked))
        },
        "maps": {kind: _packed(kind, weights) for kind, weights in checked.items()},
        "candidates": _steps(
            candidates, tokens["target" if "target" in _axes(checked) else "source"]
        ),
    }
    packed = json.dumps(data, separators=(",", ":")).replace(
        "<", "\\u003c"
    )  # so that no text can end the script element
    return re.sub(
        r"{{(.+?)}}",
        lambda found: packed if found[1] == "data" else _part(found[1]),
        _part("attention.html"),
    )


def attention_figure(
    maps: Maps,
    tokens: TokenStrings,
    path: str | Path,
    *,
    title: str,
    kind: str | None = None,
    layers: Sequence[int] = (),
) -> None:
    """Draws one kind of map as a PNG: a row a layer, a column a head; tokens on both axes where
    they are 64 or fewer.

    `maps`, `tokens` and `layers` are those of `attention_page`; `kind` defaults to cross, else
    decoder, else encoder.
    """
    checked = _checked(maps, tokens)
    chosen = kind or list(checked)[-1]
    if chosen not in checked:
        raise ConfigError(
            f"attention maps hold no {chosen!r}: choose one of {', '.join(map(repr, checked))}."
        )
    labels = tuple([visible(token) for token in tokens[axis]] for axis in AXES[chosen])
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # such a character is drawn as a box
        figure = _figure(checked[chosen], labels, f"{title}\n{TITLES[chosen]}", layers)
        figure.savefig(path, format="png", dpi=min(160.0, 8000 / max(figure.get_size_inches())))


def visible(token: str) -> str:
    """A token's text with its white space shown as `·`, `↵` or `⇥`, and `∅` for no text at all."""
    return "".join(map(_visible, token)) or "∅"


def _visible(char: str) -> str:
    if char in VISIBLE or char.isspace():
        return VISIBLE.get(char, "·")
    return char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"


def _part(name: str) -> str:
    return files("jaxformer.report").joinpath(name).read_text(encoding="utf-8")


def _axes(maps: Maps) -> set[str]:
    return {axis for kind in maps for axis in AXES[kind]}


def _checked(maps: Maps, tokens: TokenStrings) -> dict[str, np.ndarray]:
    """The maps as float32 in the order of AXES; ConfigError with everything that does not fit."""
    found = [
        f"{kind!r} is not a kind of map: {', '.join(map(repr, AXES))} are."
        for kind in maps
        if kind not in AXES
    ]
    found += [] if maps else [f"there is none: pass any of {', '.join(map(repr, AXES))}."]
    arrays = {kind: np.asarray(maps[kind], np.float32) for kind in AXES if kind in maps}
    missing = sorted(axis for axis in _axes(arrays) if not len(tokens.get(axis, ())))
    found += [f"{axis} tokens are missing: pass tokens[{axis!r}]." for axis in missing]
    if not found:
        found = [
            problem for kind, array in arrays.items() for problem in _misfits(kind, array, tokens)
        ]
    if (count := sum(array.size for array in arrays.values())) > MOST_WEIGHTS:
        found.append(
            f"{count:,} weights are too many to show (at most {MOST_WEIGHTS:,}): take fewer tokens"
            " or layers."
        )
    if found:
        raise ConfigError("\n".join(f"attention maps: {problem}" for problem in found))
    return arrays


def _misfits(kind: str, array: np.ndarray, tokens: TokenStrings) -> list[str]:
    query, key = AXES[kind]
    if (
        array.ndim != 4
        or array.shape[2:] != (len(tokens[query]), len(tokens[key]))
        or not array.size
    ):
        wanted = (
            f"(layers, heads, {len(tokens[query])} {query} tokens, {len(tokens[key])} {key} tokens)"
        )
        return [
            f"{kind!r} has the shape {array.shape}, not {wanted}: pass the weights of one example"
            " with its own tokens."
        ]
    if not (
        array.min() >= 0 and array.max() <= 1.01
    ):  # NaN fails both; a low precision rounds a little above 1
        return [
            f"{kind!r} holds weights from {array.min():g} to {array.max():g}: pass those after the"
            " softmax, from 0 to 1."
        ]
    return []


def _packed(kind: str, weights: np.ndarray) -> dict[str, Any]:
    """One kind for the page: weights in steps of 1/65535, two bytes each, little end first, in
    base64."""
    steps = np.rint(np.minimum(weights, 1) * LEVELS).astype("<u2")
    query, key = AXES[kind]
    text = base64.b64encode(steps.tobytes()).decode("ascii")
    return {
        "title": TITLES[kind],
        "query": query,
        "key": key,
        "shape": weights.shape,
        "weights": text,
    }


def _steps(
    candidates: Sequence[Sequence[tuple[str, float]]], tokens: Sequence[str]
) -> list[list[tuple[str, float]]]:
    if candidates and len(candidates) != len(tokens):
        raise ConfigError(
            f"{len(candidates)} steps of candidates for {len(tokens)} tokens: give one list a"
            " token, or none."
        )
    steps = [
        [(visible(text), round(float(share), 6)) for text, share in step] for step in candidates
    ]
    if not all(0 <= share <= 1.01 for step in steps for _, share in step):
        raise ConfigError(
            "candidates hold a probability that is not within 0 to 1: pass (text, probability)"
            " after the softmax."
        )
    return steps


def _figure(
    weights: np.ndarray, labels: tuple[list[str], ...], title: str, layers: Sequence[int]
) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    depth, heads, rows, columns = weights.shape
    labelled = max(rows, columns) <= MOST_LABELS
    cell = max(min(0.22, 2.6 / max(rows, columns)), 0.055 if labelled else 0)
    width, height = max(columns * cell, 0.9), max(rows * cell, 0.9)
    size = (heads * (width + 0.12) + 2, depth * (height + 0.3) + 2)
    text = max(8.0, 3 * width)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=1.5 * text, fontweight="bold", parse_math=False)
    grid = figure.subplots(depth, heads, squeeze=False, sharex=True, sharey=True)
    for (layer, head), axes in np.ndenumerate(grid):
        image = axes.imshow(
            weights[layer, head],
            cmap="Blues",
            norm=PowerNorm(0.5, 0, 1),
            aspect="auto",
            interpolation="none",
        )
        axes.set_title(
            f"layer {sorted(layers)[layer] if layers else layer}, head {head}",
            fontsize=text,
            color=INK,
            pad=3,
        )
        axes.spines[:].set_color(FAINT)
        axes.tick_params(length=0, colors=INK)
        queries, keys = labels if labelled else ([], [])
        _label(axes, queries, keys, fontsize=min(9.0, 72 * cell * 0.85))
    figure.supylabel("query", color=INK, fontsize=text)
    figure.supxlabel("key", color=INK, fontsize=text)
    bar = figure.colorbar(
        image,
        ax=grid,
        ticks=[0, 0.01, 0.1, 0.25, 0.5, 1],
        shrink=min(1, 3 / size[1]),
        aspect=24,
        pad=0.01,
    )
    bar.outline.set_visible(False)
    bar.ax.set_yticklabels(["0", ".01", ".1", ".25", ".5", "1"], fontsize=text, color=INK)
    return figure


def _label(axes: "Axes", queries: list[str], keys: list[str], fontsize: float) -> None:
    style: dict[str, Any] = {"fontsize": fontsize, "family": "monospace", "parse_math": False}
    axes.set_yticks(range(len(queries)), queries, **style)
    axes.set_xticks(range(len(keys)), keys, rotation=90, **style)
