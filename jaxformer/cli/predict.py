"""`jaxformer predict RUN`: the masked tokens of a text, its class, or the tags of its words."""

from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxformer.cli.arguments import PredictArguments
from jaxformer.config.format import escaped
from jaxformer.files import ConfigError
from jaxformer.models.transformer import forward
from jaxformer.report.banner import aligned
from jaxformer.runs.prompting import Model, open_model, row_of, words_of

SHOWN_CANDIDATES = 5  # predictions printed for a [MASK] or a text


def run(args: PredictArguments) -> int:
    model = open_model(**args.model, pair=args.pair)
    answers = {"masked": _fill, "classes": _classify, "tags": _tag}
    answer = answers.get(model.config.output)
    if answer is None:
        raise ConfigError(
            f"{args.path} has the head {model.config.output!r}: `jaxformer predict` takes one of"
            f" {', '.join(answers)}. `jaxformer sample` writes text, and `jaxformer embed` gives"
            " vectors."
        )
    answer(model, args)
    return 0


def _fill(model: Model, args: PredictArguments) -> None:
    """Print the most likely tokens for each [MASK] of the prompt."""
    row = row_of(model, args.prompt, args.pair)
    # [masks]
    masked = np.flatnonzero(row["tokens"] == model.tokenizer.special("mask"))
    if not masked.size:
        raise ConfigError("the prompt has no [MASK]: write one in place of each token to predict.")
    texts = [repr(model.tokenizer.shown(token)) for token in range(model.tokenizer.vocab_size)]
    # [masks, V]
    probabilities_at = jax.nn.softmax(_logits(model, row)[masked], axis=-1)
    for number, probabilities in enumerate(probabilities_at, 1):
        _print_likeliest(f"[MASK] {number}", texts, probabilities[: len(texts)])


def _classify(model: Model, args: PredictArguments) -> None:
    """Print the most likely classes of the prompt, as the text-classification pipeline of
    transformers does: of several that exclude each other, or each for itself, or numbers."""
    logits = _logits(model, row_of(model, args.prompt, args.pair))
    if model.problem_type == "regression":
        print("number")
        for label, number in zip(model.labels, logits.tolist(), strict=True):
            print(f"{number:8.4f}  {escaped(label)}")
    elif model.problem_type == "multi_label_classification" or logits.size == 1:
        _print_likeliest("class, each for itself", model.labels, jax.nn.sigmoid(logits))
    else:
        _print_likeliest("class", model.labels, jax.nn.softmax(logits))


def _tag(model: Model, args: PredictArguments) -> None:
    """Print each word of the prompt with its most likely tag."""
    words, encoded_words, row = words_of(model, args.prompt)
    tags = _logits(model, row)[row["weights"] > 0].argmax(-1)
    # A word without a token has no tag, and keeps its place in the list.
    labels = ["(the tokenizer makes no token of it)"] * len(words)
    for index, tag in zip(encoded_words, tags, strict=True):
        labels[index] = escaped(model.labels[tag])
    print("\n".join(aligned([*zip(map(escaped, words), labels, strict=True)])))


def _logits(model: Model, row: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits at each token [T, V], or for the row [C]."""
    types = row["token_types"][None] if "token_types" in row else None
    logits = jax.jit(forward, static_argnums=1)(
        model.params, model.config, row["tokens"][None], token_types=types
    )
    return np.asarray(logits[0])


def _print_likeliest(title: str, names: Sequence[str], scores: ArrayLike) -> None:
    probabilities = np.asarray(scores)
    print(title)
    for index in np.argsort(-probabilities, kind="stable")[:SHOWN_CANDIDATES]:
        print(f"{probabilities[index]:8.1%}  {escaped(names[index])}")
