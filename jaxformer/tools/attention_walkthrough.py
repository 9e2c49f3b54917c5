"""What the page of attention shows of a model beside its maps, step by step: the order of
computation, masks, beams and the logits of each layer."""

import base64
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.files import ConfigError

AxisSizes = Sequence[tuple[str, int]]  # of each axis its symbol, or its size, and its size
Choices = Sequence[tuple[str, float]]  # texts with their probabilities, likeliest first
Box = Literal["encoder", "decoder", "output"]  # of the diagram
STATES = ("kept", "finished", "dropped")
JOINERS = "\u200c\u200d"  # not printable, but they shape the characters around them
VISIBLE = {"\n": "↵", "\r": "␍", "\t": "⇥", **{char: char for char in JOINERS}}


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

    def packed(self, maps: Mapping[str, np.ndarray], steps: int, depth: int) -> dict[str, Any]:
        """It as the data of the page: for maps [L, N, queries, keys] of each kind, `steps` tokens
        that a reader steps through, and `depth` layers that read them. Raises ConfigError with all
        that does not fit."""
        masks = {kind: np.asarray(mask) for kind, mask in self.masks.items()}
        problems = [*_mask_problems(masks, maps), *self._step_problems(steps, depth)]
        if problems:
            raise ConfigError("\n".join(f"walkthrough: {problem}" for problem in problems))
        return {
            "stages": [_packed_stage(stage) for stage in self.stages],
            "symbols": dict(self.symbols),
            "masks": {kind: _packed_mask(mask) for kind, mask in masks.items()},
            "beams": [[_packed_candidate(beam) for beam in step] for step in self.beams],
            "lens": [[packed_choices(choices) for choices in layer] for layer in self.lens],
        }

    def _step_problems(self, steps: int, depth: int) -> Iterator[str]:
        if self.beams and len(self.beams) != steps:
            yield f"{len(self.beams)} steps of beams for {steps} tokens: give a list for each."
        for beam in itertools.chain.from_iterable(self.beams):
            numbers = (beam.log_probability, 0.0 if beam.score is None else beam.score)
            if not all(math.isfinite(number) and number <= 0.01 for number in numbers):
                yield f"a beam has {numbers}: pass log-probabilities, which are finite and below 0."
            if beam.state not in STATES:
                yield f"a beam is {beam.state!r}: it must be one of {', '.join(STATES)}."
        if self.lens and [len(layer) for layer in self.lens] != [steps] * depth:
            yield (
                f"the lens has {len(self.lens)} layers of {[*map(len, self.lens)]} positions, not"
                f" {depth} layers of {steps}: give one list for each layer and token."
            )


def packed_choices(choices: Choices) -> list[tuple[str, float]]:
    """Texts and probabilities for the page. Raises ConfigError for one not within 0 to 1."""
    if not all(0 <= probability <= 1.01 for _, probability in choices):
        raise ConfigError(
            "candidates hold a probability that is not within 0 to 1: pass (text, probability)"
            " after the softmax."
        )
    return [(visible(text), round(float(probability), 6)) for text, probability in choices]


def _mask_problems(
    masks: Mapping[str, np.ndarray], maps: Mapping[str, np.ndarray]
) -> Iterator[str]:
    for kind, mask in masks.items():
        if kind not in maps:
            yield f"masks hold {kind!r}, of which there are no maps: leave it out."
            continue
        layers, _, queries, keys = maps[kind].shape
        if mask.dtype != bool or mask.shape != (layers, queries, keys):
            yield (
                f"the mask {kind!r} is {mask.dtype}{list(mask.shape)}, not"
                f" bool[{layers}, {queries}, {keys}]: pass one for each layer of its maps."
            )
        elif (maps[kind] * ~mask[:, None]).any():
            yield f"the mask {kind!r} hides keys whose weight is not 0: pass that of these maps."


def _packed_mask(mask: np.ndarray) -> dict[str, Any]:
    """The different ones of the masks [L, queries, keys], in base64 with 8 keys a byte, the first
    in the highest bit, and the index of the one that each layer has."""
    different, index_of_layer = np.unique(mask, axis=0, return_inverse=True)
    bits = np.packbits(different.reshape(len(different), -1), axis=1)
    texts = [base64.b64encode(row.tobytes()).decode("ascii") for row in bits]
    return {"bits": texts, "layers": index_of_layer.reshape(-1).tolist()}


def _packed_stage(stage: Stage) -> dict[str, Any]:
    return stage._asdict() | {
        "layers": [int(layer) for layer in stage.layers],
        "reads": _packed_axes(stage.reads),
        "makes": _packed_axes(stage.makes),
        "products": [_packed_stage(product) for product in stage.products],
    }


def _packed_axes(arrays: Sequence[AxisSizes]) -> list[list[tuple[str, int]]]:
    return [[(str(name), int(size)) for name, size in axes] for axes in arrays]


def _packed_candidate(candidate: BeamCandidate) -> dict[str, Any]:
    score = candidate.score
    return candidate._asdict() | {
        "before": visible(candidate.before) if candidate.before else "",
        "token": visible(candidate.token),
        "log_probability": round(float(candidate.log_probability), 4),
        "score": None if score is None else round(float(score), 4),
    }
