"""Checks of what a run reads and writes: the first token of texts, and the chain of its log."""

from pathlib import Path

import numpy as np

from jaxformer.data.task import reads_plain_text
from jaxformer.files import located
from jaxformer.report.metrics import BEFORE, FILE, LoggedLine, logged_lines
from jaxformer.runs.rollback import batches_of
from jaxformer.tools.certificate.chain import broken_lines
from jaxformer.tools.certificate.evidence import Evidence, Measured

BATCHES = 8  # that are searched for beginnings of texts


def no_beginning(evidence: Evidence) -> str:
    """Why there is no token with which texts have to begin; empty if there is."""
    setup = evidence.setup
    if setup.model.family == "encoder_decoder":
        return "the rows of an encoder-decoder begin in a way of their own"
    if setup.run.data.messages_field:
        return "the chat template says how a conversation begins"
    beginning = beginning_of(evidence)
    if not beginning:
        stated = f"data.bos={setup.run.data.bos}"
        return f"no token begins a text: with {stated} the template of this tokenizer adds none"
    if beginning[0] == setup.corpus.tokenizer.end_token and setup.model.family == "decoder":
        return "texts begin with the token that ends them, so that the two cannot be told apart"
    return ""


def beginning_of(evidence: Evidence) -> tuple[int, ...]:
    """The tokens with which the texts of a run begin, as data.bos or the tokenizer's template says;
    empty where there are none."""
    setup = evidence.setup
    tokenizer = setup.corpus.tokenizer
    if setup.model.family == "encoder":
        frame = tokenizer.frame(1)
        token = frame.slots[0].token if frame else tokenizer.special("cls")
        return () if token is None else (token,)
    if reads_plain_text(setup.task.template, setup.task.rows):
        return setup.task.beginning(setup.run.data.bos, tokenizer)
    return tuple(tokenizer.prefix)


def texts_begin(evidence: Evidence) -> Measured:
    """The first token of each text in some batches."""
    setup, beginning = evidence.setup, beginning_of(evidence)
    batches = batches_of(setup.run.run.dir, setup.batches)
    is_stream = setup.model.family == "decoder" and reads_plain_text(
        setup.task.template, setup.task.rows
    )
    end = setup.corpus.tokenizer.end_token if is_stream else None
    first, seen, wrong = int(evidence.state.step), 0, 0
    for number in range(first, first + BATCHES):
        batch = batches[number]
        starts = _starts(batch, end)
        tokens = batch["tokens"].reshape(-1, batch["tokens"].shape[-1])
        seen, wrong = seen + int(starts.sum()), wrong + int((tokens[starts] != beginning[0]).sum())
        if seen:
            break
    shown = setup.corpus.tokenizer.shown(beginning[0])
    if not seen:
        return Measured(None, f"no text begins within a row of {BATCHES} batches")
    text = f"{seen - wrong} of {seen} texts that begin in the rows of a batch begin with {shown}."
    return Measured(not wrong, text, float(wrong), 0.0)


def _starts(batch: dict[str, np.ndarray], end: int | None) -> np.ndarray:
    """bool [rows, T]: the tokens that begin a text. In a stream of documents these are the ones
    behind the token `end`; else the first of each segment that does not fill its row, which may
    have been cut."""
    tokens = batch["tokens"].reshape(-1, batch["tokens"].shape[-1])
    segments = np.asarray(batch.get("segment_ids", np.ones_like(tokens))).reshape(tokens.shape)
    changes = np.ones_like(tokens, bool)
    changes[:, 1:] = segments[:, 1:] != segments[:, :-1]
    if end is None:
        fills = (segments == segments[:, :1]).all(axis=1, keepdims=True)
        return changes & (segments != 0) & ~fills
    behind_end = np.zeros_like(tokens, bool)
    behind_end[:, 1:] = tokens[:, :-1] == end
    return behind_end & (segments != 0)


def no_chain(evidence: Evidence) -> str:
    lines = log_lines(located(evidence.setup.run.run.dir))
    if lines and BEFORE in lines[0].entry:
        return ""
    return "an earlier version logged this run, whose lines have no digest of the one before them"


def chained(evidence: Evidence) -> Measured:
    """Every line of metrics.jsonl has the digest of the line before it, and the first one that of
    the run."""
    lines = log_lines(located(evidence.setup.run.run.dir))
    broken = broken_lines(lines, evidence.setup.identity)
    if not broken:
        return Measured(True, f"{len(lines)} lines of metrics.jsonl.", 0.0, 0.0)
    step = lines[broken[0] - 1].entry["step"]
    text = f"The line before the one of step {step} is not the one that was logged."
    return Measured(False, text, float(len(broken)), 0.0)


def log_lines(run_dir: Path) -> list[LoggedLine]:
    """The lines of metrics.jsonl. Raises ConfigError for one that no run writes."""
    return list(logged_lines(run_dir / FILE))
