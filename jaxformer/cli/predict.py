"""`jaxformer predict RUN`: the masked tokens of a text, its class, or the tags of its words."""

from collections.abc import Sequence

import jax
import numpy as np

from jaxformer.cli.arguments import PredictArguments
from jaxformer.cli.prompting import Model, open_model, row_of, words_of
from jaxformer.config.format import escaped
from jaxformer.files import ConfigError
from jaxformer.models.transformer import forward
from jaxformer.report.banner import aligned

SHOWN_CANDIDATES = 5  # predictions printed for a [MASK] or a text


def run(args: PredictArguments) -> int:
    model = open_model(args)
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
    """Prints the most likely tokens for each [MASK] of the prompt."""
    row = row_of(model, args.prompt, args.pair)
    masked = np.flatnonzero(row["tokens"] == model.tokenizer.special("mask"))
    if not masked.size:
        raise ConfigError("the prompt has no [MASK]: write one in place of each token to predict.")
    texts = [repr(model.tokenizer.shown(token)) for token in range(model.tokenizer.vocab_size)]
    for number, probabilities in enumerate(_probabilities(model, row)[masked], 1):
        _print_likeliest(f"[MASK] {number}", texts, probabilities[: len(texts)])


def _classify(model: Model, args: PredictArguments) -> None:
    """Prints the most likely classes of the prompt."""
    row = row_of(model, args.prompt, args.pair)
    _print_likeliest("class", model.labels, _probabilities(model, row))


def _tag(model: Model, args: PredictArguments) -> None:
    """Prints each word of the prompt with its most likely tag."""
    words, encoded_words, row = words_of(model, args.prompt)
    tags = _probabilities(model, row)[row["weights"] > 0].argmax(-1)
    labels = ["(the tokenizer makes no token of it)"] * len(words)
    for index, tag in zip(encoded_words, tags, strict=True):
        labels[index] = escaped(model.labels[tag])
    print("\n".join(aligned([*zip(map(escaped, words), labels, strict=True)])))


def _probabilities(model: Model, row: dict[str, np.ndarray]) -> np.ndarray:
    """The predicted probabilities at each token [T, V], or for the row [C]."""
    types = row["token_types"][None] if "token_types" in row else None
    logits = jax.jit(forward, static_argnums=1)(
        model.params, model.config, row["tokens"][None], token_types=types
    )
    return np.asarray(jax.nn.softmax(logits[0], axis=-1))


def _print_likeliest(title: str, names: Sequence[str], probabilities: np.ndarray) -> None:
    print(title)
    for index in np.argsort(-probabilities, kind="stable")[:SHOWN_CANDIDATES]:
        print(f"{probabilities[index]:8.1%}  {escaped(names[index])}")
