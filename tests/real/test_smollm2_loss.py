"""The loss of a text by SmolLM2-135M-Instruct, as the command `evaluate` prints it, is
transformers' mean over the tokens, and that of int8 and NF4 weights is near."""

import contextlib
import dataclasses
import functools
import io
import re
from pathlib import Path

import pytest
import torch
from smollm2 import HOME, MARKS, converted, reading, tokenizer, words

from jaxformer.cli import main
from jaxformer.runs import run_evaluation
from jaxformer.runs.config import looked_at

pytestmark = [*MARKS, pytest.mark.usefixtures("rows_of_one_batch")]
EVALUATED = 6_000  # characters
LENGTH = 256  # tokens of a row
# The least and the most that the loss may be above that of float32, in nats a token.
RISES = {"int8": (-0.005, 0.005), "nf4": (0.1, 0.4)}


@pytest.fixture
def rows_of_one_batch(monkeypatch):
    """Evaluation in short rows, one at a time."""

    def in_short_rows(files, *arguments):
        run = looked_at(files, *arguments)
        short = dataclasses.replace(run.data, sequence_length=LENGTH)
        single = dataclasses.replace(run.train, batch_size=1)
        return dataclasses.replace(run, data=short, train=single)

    monkeypatch.setattr(run_evaluation, "looked_at", in_short_rows)


def text_file() -> str:
    file = Path(HOME.name, "text.txt")
    file.write_text(words()[:EVALUATED], encoding="utf-8")
    return str(file)


@functools.cache
def loss() -> float:
    """The loss that the command prints, in nats a token."""
    arguments = ["--data.validation", text_file(), "--data.cache_dir", HOME.name]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["evaluate", str(converted()), *arguments]) == 0
    print(out.getvalue())
    return float(re.search(r"loss ([\d.]+) nats per target", out.getvalue()).group(1))


def expected_loss() -> float:
    """The mean over the tokens of transformers' cross-entropy. The text and its end token are read
    in rows, and the target of the last token of a row is the first of the next.

    The logarithm of the softmax is that of float64: PyTorch's cross-entropy in float32 adds the
    powers of 49,152 logits with an error of 1e-5 to 1.5e-4, depending on how they lie in memory.
    """
    ids = [*tokenizer()(words()[:EVALUATED])["input_ids"], tokenizer().eos_token_id]
    nats = 0.0
    for start in range(0, len(ids) - 1, LENGTH):
        row = torch.tensor(ids[start : start + LENGTH + 1])
        with torch.no_grad():
            logits = reading()(row[None, :-1]).logits[0].double()
        nats += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    print(f"transformers: {nats / (len(ids) - 1):.6f} nats a token, {len(ids) - 1:,} tokens")
    return nats / (len(ids) - 1)


def test_the_loss_of_a_text_is_that_of_transformers():
    assert loss() == pytest.approx(expected_loss(), abs=1e-4)


@pytest.mark.parametrize("kind", RISES)
def test_the_loss_of_quantized_weights_is_near(kind):
    metrics = run_evaluation.evaluate_run(
        converted(), text_file(), cache_dir=HOME.name, quantize=kind
    )
    rise = metrics["val_loss"] - loss()
    print(f"{kind}: {rise:+.4f} nats a token")
    least, most = RISES[kind]
    assert least < rise < most
