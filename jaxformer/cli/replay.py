"""`jaxformer replay RUN --step K`: one step of a run, done again and looked into."""

import math
from collections.abc import Iterator

import numpy as np

from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.cli.arguments import ReplayArguments
from jaxformer.report import printable
from jaxformer.tools.step_replay import Replay, replay

LONGEST_TEXT = 200  # characters of a row that are printed
WORST = 10  # tokens with the highest loss that are printed


def run(args: ReplayArguments) -> int:
    mesh = {axis: getattr(args, axis) for axis in MESH_AXES}
    mesh_sizes = {axis: size for axis, size in mesh.items() if size is not None}
    replayed = replay(args.path, args.step, print, mesh_sizes, args.cache_dir)
    print("\n".join(["", *_numbers(replayed), *_batch(replayed)]))
    return 0


def _numbers(replayed: Replay) -> Iterator[str]:
    start = f"the checkpoint of step {replayed.begun}" if replayed.begun else "the beginning"
    yield f"Step {replayed.step}, from {start}."
    logged = replayed.logged
    for name, value in replayed.metrics.items():
        line = f"  {name:<14} {value:.9g}"
        if logged is not None and name in logged:
            then = float(logged[name])
            same = value == then or (math.isnan(value) and math.isnan(then))
            line += "" if same else f"  <- logged {then!r}, here {value!r}"
        yield line
    if logged is None:
        yield "  This step was not logged (train.log_every), so there is nothing to compare with."
    else:
        yield (
            "  Each number without an arrow is that of metrics.jsonl to the bit. Another device,"
            " mesh or version of JAX rounds otherwise."
        )
    yield "Norm of the gradient, before clipping:"
    for name, norm in replayed.norms.items():
        yield f"  {name:<24} {norm:.6g}{'' if math.isfinite(norm) else '  <- not finite'}"


def _batch(replayed: Replay) -> Iterator[str]:
    """The rows as text with their loss, and the tokens of the highest loss."""
    tokenizer = replayed.setup.corpus.tokenizer
    labels = replayed.setup.corpus.labels
    batch = replayed.batch
    yield f"The batch, {len(batch['tokens'])} rows:"
    for row in range(len(batch["tokens"])):
        loss = ""
        if replayed.nats is not None:
            weights = batch["weights"][row]
            if weights.sum():
                loss = f" loss {(replayed.nats[row] * weights).sum() / weights.sum():.4f}"
        yield f"  row {row}:{loss} | {_text(replayed, 'tokens', 'segment_ids', row)}"
        if "source" in batch:
            yield f"    from | {_text(replayed, 'source', 'source_segment_ids', row)}"
    if replayed.nats is None:
        return
    yield "Tokens with the highest loss:"
    counted = np.where(batch["weights"] != 0, replayed.nats, -math.inf)
    order = np.argsort(counted, axis=None)[::-1]  # NaNs first
    for index in order[: min(WORST, np.count_nonzero(batch["weights"]))]:
        row, position = np.unravel_index(index, counted.shape)
        target = int(batch["targets"][row, position])
        shown = labels[target] if labels else tokenizer.shown(target)
        yield f"  {counted[row, position]:.4f}  row {row}, position {position}: {shown!r}"


def _text(replayed: Replay, name: str, segments: str, row: int) -> str:
    """The text of a row in one line, without its padding."""
    tokens = replayed.batch[name][row]
    if segments in replayed.batch:
        tokens = tokens[replayed.batch[segments][row] != 0]
    text = replayed.setup.corpus.tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    line = " ".join(printable(text).split())
    return line if len(line) <= LONGEST_TEXT else line[: LONGEST_TEXT - 3] + "..."
