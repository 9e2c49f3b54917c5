"""A page of attention with everything on it, of known numbers: groups of tokens, masks with padding
and a window, beams of every fate, and the logit lens."""

import functools
from typing import Any

import numpy as np
from test_attention_page import softmax_maps

import jaxformer as jf
from jaxformer.cli.attention import stages_of
from jaxformer.tools.attention_page import BeamCandidate, attention_page

SOURCE = ["\\xe4", "\\xbd\\xa0", " Hund", "[padding]"]
TARGET = ["<s>", "The", " \\xe7", "\\x8b\\x97", "."]
GROUPS = {"source": [(0, 2, "你")], "target": [(2, 4, " 狗")]}
MASKS = {
    "encoder": np.array([[[1, 1, 1, 0]] * 3 + [[0] * 4]] * 2, bool),
    "decoder": np.stack([np.tril(np.ones((5, 5), bool)), np.tril(np.ones((5, 5), bool))]),
    "cross": np.array([[[1, 1, 1, 0]] * 5] * 2, bool),
}
MASKS["decoder"][0] &= ~np.tril(np.ones((5, 5), bool), -2)  # a window of two tokens in layer 0
MODEL = jf.ModelConfig(
    vocab_size=50, d_model=16, n_layers=2, n_heads=2, d_ff=24, family="encoder_decoder"
)


def shares(seed: int, count: int = 3) -> list[tuple[str, float]]:
    found = np.random.default_rng(seed).dirichlet([1.0] * (count + 1))
    texts = ["The", " \\xe7", "cat"][:count]
    return sorted(zip(texts, found.tolist(), strict=False), key=lambda each: -each[1])


LENS = [[shares(10 * layer + t) for t in range(5)] for layer in range(2)]
BEAMS = [
    [
        BeamCandidate("", "The", -0.25, "kept", leads=True),
        BeamCandidate("", "A", -1.5, "kept"),
        BeamCandidate("", "<s>", -4.125, "finished", score=-3.75),
        BeamCandidate("", "</b>", -6.0, "dropped"),
    ],
    *[[BeamCandidate("so far " * 9, f"word{t}", -1.0 - t, "kept")] for t in range(1, 4)],
    [],
]


@functools.cache
def stages() -> list[dict[str, Any]]:
    return stages_of(MODEL, 5, 4)


def example(hostile: str = "") -> str:
    """A page of an encoder-decoder of two layers, with everything on it."""
    maps = softmax_maps(2, 3, 4, 5)
    for kind, weights in maps.items():
        weights *= MASKS[kind][:, None]
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-9)
    tokens = {"source": SOURCE, "target": [hostile or TARGET[0], *TARGET[1:]]}
    beams = [[each._replace(before=hostile or each.before) for each in step] for step in BEAMS]
    lens = [[[(hostile or text, share) for text, share in of] for of in layer] for layer in LENS]
    candidates = [shares(t) for t in range(5)]
    return attention_page(
        maps, tokens, title=hostile or "A page", candidates=candidates, groups=GROUPS,
        stages=stages(), symbols={"T": "tokens"}, masks=MASKS, beams=beams, lens=lens,
    )  # fmt: skip
