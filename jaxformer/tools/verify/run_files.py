"""What the files of a run say of each other: the chain of metrics.jsonl, the tokenizer, and the
digests of checkpoints. Needs neither the data nor a device of the run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.checkpoints.digests import Altered, altered_files, combined, digest_on_host
from jaxformer.checkpoints.reading import read_back, read_manifest, saved_steps
from jaxformer.config.config_file import read_config
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError, first_of, read_object
from jaxformer.report.metrics import (
    BEFORE,
    FILE,
    STATE,
    LoggedLine,
    first_digest,
    line_digest,
    logged_lines,
)
from jaxformer.runs.directory import RunDirectory, identity_of
from jaxformer.tokenizer import Tokenizer

# "equal" is to the bit; "unknown" is what could not be compared here.
Verdict = Literal["equal", "equal to rounding", "NO", "unknown"]
# Files of a run that nothing in it has a digest of.
UNRECORDED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
LISTED = 5  # problems of one kind


class Statement(NamedTuple):
    """What `verify` says of one subject: a verdict, and a sentence about it."""

    subject: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class RunFiles:
    """A finished or stopped run: its directory, config.json, data.json (`record`), and the lines of
    metrics.jsonl, whose last one `is_cut` where it has no end."""

    folder: Path
    config: RunConfig
    record: dict[str, Any]
    lines: list[LoggedLine]
    is_cut: bool

    @property
    def identity(self) -> dict[str, Any]:
        """What the manifests of its checkpoints say of the run."""
        return identity_of(self.record, self.config.run.seed)

    @property
    def states(self) -> dict[int, str]:
        """The fingerprint of the state after a step, by step, of the lines that have one."""
        entries = [line.entry for line in self.lines]
        return {entry["step"]: entry[STATE] for entry in entries if STATE in entry}


def read_run(path: Path) -> RunFiles:
    """The files of a run. Raises ConfigError for a folder that is no run, for a run that a process
    is still writing, and for one whose lines are no chain."""
    # Orbax takes no relative path.
    folder = path.absolute()
    missing = [name for name in ("config.json", "data.json", FILE) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} has no {' and no '.join(missing)}, so it is no run directory, or a run that"
            " logged nothing yet: give the directory that a run was trained in (run.dir)."
        )
    if RunDirectory(folder).is_in_use():
        raise ConfigError(
            f"{folder} is still being written by a run: verify it when the run has ended, or a copy"
            " of it now."
        )
    content = (folder / FILE).read_bytes()
    lines = list(logged_lines(folder / FILE))
    if not any(BEFORE in line.entry for line in lines):
        raise ConfigError(
            f"{folder / FILE} has {len(lines)} lines, none with `{BEFORE}`, so that nothing chains"
            " them: give a run whose metrics.jsonl is as train.py wrote it."
        )
    return RunFiles(
        folder=folder,
        config=read_config(folder / "config.json"),
        record=read_object(folder / "data.json"),
        lines=lines,
        is_cut=content.count(b"\n") != len(lines),
    )


def compared_files(files: RunFiles) -> Iterator[Statement]:
    """All that can be said without the data of the run: whether each line has the digest of the one
    before it, the first that of the run; whether tokenizer.json holds the tokenizer that the run
    was begun with; and the checkpoints."""
    before = first_digest(files.identity)
    broken = []
    for number, line in enumerate(files.lines, start=1):
        if line.entry.get(BEFORE) != before:
            broken.append(number)
        before = line_digest(line.raw)
    if broken:
        numbers = first_of([str(number) for number in broken], LISTED, ", ")
        what = "what data.json and the seed say" if broken == [1] else "the line before"
        text = f"lines that do not follow from {what}: {numbers} (counted from 1)."
        yield Statement(FILE, "NO", text)
    elif files.is_cut:
        yield Statement(FILE, "NO", f"the line after line {len(files.lines)} is incomplete.")
    else:
        text = f"each of {len(files.lines)} lines follows from the one before."
        yield Statement(FILE, "equal", text)
    path = files.folder / "tokenizer.json"
    recorded = files.record.get("tokenizer")
    try:
        actual = Tokenizer.load(path).fingerprint()
    except ConfigError as error:
        yield Statement(path.name, "NO", str(error))
    else:
        text = f"its fingerprint is {actual}, and that in data.json {recorded}."
        yield Statement(path.name, "equal" if actual == recorded else "NO", text)
    unknown = [name for name in UNRECORDED if (files.folder / name).exists()]
    if unknown:
        text = "they decide what the model writes, and the run has no digest of them."
        yield Statement(", ".join(unknown), "unknown", text)
    for step in saved_steps(files.folder):
        yield _checkpoint(files, step)


def _checkpoint(files: RunFiles, step: int) -> Statement:
    """Whether a checkpoint has the bytes that were saved, is of this run and step, and holds the
    state that its line in metrics.jsonl has."""
    subject = f"checkpoint {step}"
    folder = files.folder / "checkpoints" / str(step)
    try:
        if altered := altered_files(folder):
            names = first_of(altered, LISTED, ", ")
            return Statement(subject, "NO", f"files are not as they were saved: {names}.")
        manifest = read_manifest(folder)
        other = [key for key, one in files.identity.items() if manifest["run"].get(key) != one]
        if other:
            names = first_of(other, LISTED, ", ")
            return Statement(subject, "NO", f"it is of another run ({names} differ).")
        counter = manifest["leaves"].get("step", ["", "", ""])[2]
        if counter != digest_on_host(np.array(step, np.int32)):
            return Statement(subject, "NO", "it is of another step.")
        read_back(folder)
    except Altered as error:
        return Statement(subject, "NO", f"{error}.")
    except Exception as error:  # Orbax and TensorStore raise many kinds
        return Statement(subject, "NO", f"it cannot be read ({type(error).__name__}: {error}).")
    state = combined({path: row[2] for path, row in manifest["leaves"].items()})
    logged = files.states.get(step)
    if logged is None:
        text = f"its files are as they were saved; metrics.jsonl has no state of step {step}."
        return Statement(subject, "equal", text)
    if logged != state:
        text = f"its state is {state}, and that of step {step} in metrics.jsonl {logged}."
        return Statement(subject, "NO", text)
    return Statement(subject, "equal", f"its state is that of its line in metrics.jsonl, {state}.")
