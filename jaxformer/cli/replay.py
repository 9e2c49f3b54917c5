"""`jaxformer replay RUN --step K`: one step of a run, done again and looked into."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.cli.arguments import check_output
from jaxformer.cli.trust_arguments import ReplayArguments
from jaxformer.files import ConfigError, write_text
from jaxformer.report import printable
from jaxformer.tools.step_replay import Replay, norms_by_layer, replay

LONGEST_TEXT = 200  # characters of a row that are printed


def run(args: ReplayArguments) -> int:
    if args.worst < 0:
        raise ConfigError(f"--worst {args.worst}: give a number of tokens, at least 0.")
    check_output(args.output)
    mesh = {axis: getattr(args, axis) for axis in MESH_AXES}
    mesh_sizes = {axis: size for axis, size in mesh.items() if size is not None}
    replayed = replay(args.path, args.step, print, mesh_sizes, args.cache_dir)
    print("\n".join(["", *_lines(replayed, args.worst)]))
    if args.output is not None:
        write_text(args.output, json.dumps(as_json(replayed), indent=1) + "\n")
        print(f"{args.output}: each token with its loss, and the norm of each leaf")
    return 0


def _lines(replayed: Replay, worst: int) -> Iterator[str]:
    """The lines that the command prints, with the `worst` tokens of the highest loss."""
    start = f"the checkpoint of step {replayed.begun}" if replayed.begun else "the beginning"
    between = replayed.step - 1 - replayed.begun
    if between:
        start += f", after {between} {'step' if between == 1 else 'steps'} in between"
    yield f"Step {replayed.step}, from {start}."
    for name, value in replayed.metrics.items():
        yield f"  {name:<14} {value:.9g}"
    yield _against_the_log(replayed)
    yield "Norm of the gradient, before clipping:"
    for name, norm in norms_by_layer(replayed.norms, replayed.setup.specs).items():
        yield f"  {name:<24} {norm:.6g}{'' if math.isfinite(norm) else '  <- not finite'}"
    rows = list(rows_of(replayed))
    yield f"The batch, {len(rows)} rows:"
    for row in rows:
        loss = "" if row["loss"] is None else f" loss {row['loss']:.4f}"
        yield f"  row {row['row']}:{loss} | {_short(row['text'])}"
        if "source" in row:
            yield f"    from | {_short(row['source'])}"
    if worst and replayed.nats is not None:
        yield "Tokens with the highest loss:"
        tokens = [(token["nats"], row["row"], token) for row in rows for token in row["tokens"]]
        ranked = sorted(tokens, key=lambda entry: math.inf if entry[0] is None else entry[0])
        for nats, row, token in ranked[::-1][:worst]:
            loss = "not a number" if nats is None else f"{nats:.4f}"
            yield f"  {loss}  row {row}, position {token['position']}: {token['target']!r}"


def _against_the_log(replayed: Replay) -> str:
    """Whether the run logged the same numbers."""
    if replayed.logged is None:
        return "  This step was not logged (train.log_every), so there is nothing to compare with."
    differing = replayed.differing()
    if not differing:
        return "  Each of these that metrics.jsonl has is the same there, to the bit."
    pairs = ", ".join(f"{name} {now!r}, logged {then!r}" for name, (now, then) in differing.items())
    return (
        f"  Not as the run logged it: {pairs}. Another device, mesh or version of JAX rounds"
        " otherwise."
    )


def rows_of(replayed: Replay) -> Iterator[dict[str, Any]]:
    """The rows of the batch as text, with the loss of each target that counts."""
    tokenizer, labels = replayed.setup.corpus.tokenizer, replayed.setup.corpus.labels
    batch = replayed.batch
    targets, weights = batch.get("targets"), batch.get("weights")
    for row, tokens in enumerate(batch["tokens"]):
        entry: dict[str, Any] = {"row": row, "text": _text(replayed, tokens, "segment_ids", row)}
        if "source" in batch:
            entry["source"] = _text(replayed, batch["source"][row], "source_segment_ids", row)
        entry |= {"loss": None, "tokens": []}
        if replayed.nats is not None and targets is not None and weights is not None:
            for position in np.flatnonzero(weights[row]).tolist():
                target, nats = int(targets[row, position]), float(replayed.nats[row, position])
                shown = labels[target] if labels else tokenizer.shown(target)
                token = {"position": position, "id": target, "target": shown}
                entry["tokens"].append(token | {"nats": nats if math.isfinite(nats) else None})
            total, weight = (replayed.nats[row] * weights[row]).sum(), weights[row].sum()
            if weight and np.isfinite(total):
                entry["loss"] = float(total / weight)
        yield entry


def _text(replayed: Replay, tokens: np.ndarray, segments: str, row: int) -> str:
    """The text of a row, without its padding."""
    if segments in replayed.batch:
        tokens = tokens[replayed.batch[segments][row] != 0]
    return replayed.setup.corpus.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def _short(text: str) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST_TEXT else line[: LONGEST_TEXT - 3] + "..."


def as_json(replayed: Replay) -> dict[str, Any]:
    """All numbers of a replay; null stands for what is not finite."""
    norms = {
        path: [norm if math.isfinite(norm) else None for norm in layer_norms]
        for path, layer_norms in replayed.norms.items()
    }
    return {
        "step": replayed.step,
        "from_step": replayed.begun,
        "metrics": _finite(replayed.metrics),
        "logged": None if replayed.logged is None else _finite(replayed.logged),
        "equal": None if replayed.logged is None else not replayed.differing(),
        "gradient_norms": norms,
        "rows": list(rows_of(replayed)),
    }


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a line, with None for what is not finite."""
    return {
        name: value if isinstance(value, str) or math.isfinite(value) else None
        for name, value in numbers.items()
    }
