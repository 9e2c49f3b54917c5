"""The page of attention of one example: its weights head by head and step by step, beside the order
of computation, masks, beams and the logits of each layer."""

import base64
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.files import ConfigError

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
VISIBLE = {"\n": "↵", "\r": "␍", "\t": "⇥"}

Choices = Sequence[tuple[str, float]]  # texts with their probabilities, likeliest first


def visible(token: str) -> str:
    """Return a token's text with its white space shown as `·`, `↵` or `⇥`, and `∅` for no text at
    all."""
    shown = ""
    for char in token:
        if char in VISIBLE or char.isspace():
            shown += VISIBLE.get(char, "·")
        elif char in JOINERS or char.isprintable():
            shown += char
        else:
            shown += "\N{REPLACEMENT CHARACTER}"
    return shown or "∅"


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


def attention_page(
    maps: Mapping[str, np.ndarray],
    tokens: Mapping[str, Sequence[str]],
    *,
    title: str,
    candidates: Sequence[Choices] = (),
    layers: Sequence[int] = (),
    groups: Mapping[str, Sequence[tuple[int, int, str]]] = {},
    stages: Sequence[Mapping[str, Any]] = (),
    symbols: Mapping[str, str] = {},
    masks: Mapping[str, np.ndarray] = {},
    beams: Sequence[Sequence[BeamCandidate]] = (),
    lens: Sequence[Sequence[Choices]] = (),
) -> str:
    """Return a self-contained HTML page that shows the attention of one example, head by head and
    step by step. Save it as UTF-8. What is left out is not shown.

    Args:
      maps: any of "encoder" [L, N, S, S], "decoder" [L, N, T, T] and "cross" [L, N, T, S]: layer,
        head, query, key.
      tokens: the texts of "source" (S) and "target" (T), as far as the maps need them.
      title: a text.
      candidates: of step t, the most probable (text, probability) for what follows target token t;
        without a target, for source token t itself.
      layers: their numbers, where they are not all.
      groups: for "source" and "target", runs of tokens that share characters, (first, one past the
        last, their text), which are labeled as one.
      stages: the sublayers in the order of computation, for JSON. Each has under "part" the box of
        the diagram that it stands in (encoder, decoder or output), its full "name", the numbers of
        the "layers" that have it, what it "reads" and "makes": for each axis of each array the
        symbol, or the size, and the size, its number of "parameters", the lines of its "formula",
        the "kind" of maps that it makes ("" for none), and the "products" within it, which are
        stages too.
      symbols: what the symbols of the axes of stages mean.
      masks: for kinds of maps, which keys each query may attend to: bool [L, queries, keys].
      beams: of step t, the candidates for what follows target token t, likeliest first.
      lens: of layer l and step t, the most probable texts with their probabilities by the output of
        the layer for position t of the target, or of the source where there is no target.

    Raises:
      ConfigError: for more weights than a page shows, and for a weight or probability that is not
        within 0 to 1.
    """
    kinds = [kind for kind in AXES if kind in maps]
    # A browser takes seconds to open more.
    count = sum(np.size(maps[kind]) for kind in kinds)
    if count > MAX_WEIGHTS:
        raise ConfigError(
            f"attention maps: {count:,} weights are too many to show (at most {MAX_WEIGHTS:,}):"
            " take fewer tokens or layers."
        )
    packed_maps = {}
    for kind in kinds:
        weights = np.asarray(maps[kind], np.float32)
        # NaN fails both comparisons; a low precision rounds to a little above 1.
        if not (weights.min() >= 0 and weights.max() <= 1.01):
            raise ConfigError(
                f"attention maps: {kind!r} holds weights from {weights.min():g} to"
                f" {weights.max():g}: pass those after the softmax, from 0 to 1."
            )
        # In steps of 1/65535, as little-endian 16-bit integers.
        # 16 bits are finer than a screen can show, and half of float32.
        steps = np.rint(np.minimum(weights, 1) * LEVELS).astype("<u2")
        query, key = AXES[kind]
        packed_maps[kind] = {
            "title": TITLES[kind],
            "query": query,
            "key": key,
            "shape": weights.shape,
            "weights": _base64(steps),
        }
    packed_masks = {}
    for kind, mask in masks.items():
        # The different ones, with 8 keys a byte, the first in the highest bit, and the index of the
        # one that each layer has.
        different, index_of_layer = np.unique(mask, axis=0, return_inverse=True)
        bits = np.packbits(different.reshape(len(different), -1), axis=1)
        packed_masks[kind] = {
            "bits": [_base64(row) for row in bits],
            "layers": index_of_layer.reshape(-1).tolist(),
        }
    texts = {}
    # As of a character that is three tokens of bytes.
    shared = {}
    for axis in sorted({*itertools.chain.from_iterable(AXES[kind] for kind in kinds)}):
        texts[axis] = [visible(token) for token in tokens[axis]]
        shared[axis] = [(first, end, visible(text)) for first, end, text in groups.get(axis, ())]
    data = {
        "title": title,
        "layers": sorted(layers),
        "tokens": texts,
        "groups": shared,
        "maps": packed_maps,
        "candidates": [_packed_choices(step) for step in candidates],
        "stages": stages,
        "symbols": dict(symbols),
        "masks": packed_masks,
        "beams": [[_packed_candidate(beam) for beam in step] for step in beams],
        "lens": [[_packed_choices(choices) for choices in layer] for layer in lens],
    }
    # Without "<" in the data no text can end the script element that holds it.
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    folder = files("jaxformer.tools").joinpath("pages")

    def filled(slot: re.Match[str]) -> str:
        """Return the data, or the file of this name, such as a script."""
        if slot[1] == "data":
            return content
        return folder.joinpath(slot[1]).read_text("utf-8")

    return re.sub("{{(.+?)}}", filled, folder.joinpath("attention.html").read_text("utf-8"))


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _packed_choices(choices: Choices) -> list[tuple[str, float]]:
    """Return texts and probabilities for the page. Raises ConfigError for one not within 0 to 1."""
    if not all(0 <= probability <= 1.01 for _, probability in choices):
        raise ConfigError(
            "candidates hold a probability that is not within 0 to 1: pass (text, probability)"
            " after the softmax."
        )
    return [(visible(text), round(float(probability), 6)) for text, probability in choices]


def _packed_candidate(candidate: BeamCandidate) -> dict[str, Any]:
    record = candidate._asdict()
    if candidate.before:
        record["before"] = visible(candidate.before)
    if candidate.score is not None:
        record["score"] = round(float(candidate.score), 4)
    record["token"] = visible(candidate.token)
    record["log_probability"] = round(float(candidate.log_probability), 4)
    return record
