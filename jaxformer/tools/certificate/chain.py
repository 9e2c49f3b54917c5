"""What the files of a run say of each other: the chain of metrics.jsonl, the digests of data,
tokenizer and checkpoints, and the certificate. Needs neither the data nor a device of the run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxformer.checkpoints.digests import FILES, Altered, altered_files, combined, digest_on_host
from jaxformer.checkpoints.reading import Manifest, read_back, read_manifest, saved_steps
from jaxformer.config.config_file import read_config
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError, first_of, located, read_object
from jaxformer.report.metrics import (
    BEFORE,
    FILE,
    STATE,
    LoggedLine,
    first_digest,
    line_digest,
    logged_lines,
)
from jaxformer.runs.directory import identity_of
from jaxformer.tokenizer import Tokenizer
from jaxformer.tools.certificate.record import (
    CERTIFICATE,
    file_sha256,
    read_certificate,
    seal_problems,
)
from jaxformer.tools.listing import is_running

# "equal" to the bit; equal to "rounding"; "no"; or what could not be "checked" here.
Verdict = Literal["equal", "rounding", "no", "not checked"]
LISTED = 5  # problems of one kind that are listed


class Statement(NamedTuple):
    """What `verify` says of one subject: whether it is as it was, and a sentence about it."""

    subject: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class RunFiles:
    """A finished or stopped run, as its files say.

    Attributes:
      folder: the run directory.
      config: that of config.json.
      record: what data.json holds.
      lines: of metrics.jsonl.
      is_cut: whether metrics.jsonl ends with an incomplete line.
    """

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

    def logged(self, step: int, name: str) -> dict[str, Any]:
        """The line of a step that has a figure, with NaN and infinities; empty without one."""
        for _, entry in reversed(self.lines):
            if entry["step"] == step and name in entry:
                odd = entry.get("non_finite", {})
                return entry | {figure: float(text) for figure, text in odd.items()}
        return {}


def read_run(path: str | Path) -> RunFiles:
    """The files of a run. Raises ConfigError, with one message, for a folder that is no run, for a
    run that a process is still writing, and for one whose lines are no chain."""
    folder = located(path)
    missing = [name for name in ("config.json", "data.json", FILE) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} has no {' and no '.join(missing)}, so it is no run directory, or a run that"
            " logged nothing yet: give the directory that a run was trained in (run.dir)."
        )
    if is_running(folder):
        raise ConfigError(
            f"{folder} is still being written by a run: verify it when the run has ended, or a copy"
            " of it now."
        )
    content = (folder / FILE).read_bytes()
    lines = list(logged_lines(folder / FILE))
    if not any(BEFORE in line.entry for line in lines):
        raise ConfigError(
            f"{folder / FILE} has {len(lines)} lines, none with `{BEFORE}`: the run is of a version"
            " that chained no lines, and cannot be verified. `jaxformer replay` does its steps"
            " again."
        )
    return RunFiles(
        folder=folder,
        config=read_config(folder / "config.json"),
        record=read_object(folder / "data.json"),
        lines=lines,
        is_cut=content.count(b"\n") != len(lines),
    )


def compared_files(files: RunFiles, public_key: str = "") -> Iterator[Statement]:
    """All that can be said without the data of the run, the cheapest first. `public_key`, 64
    hexadecimal digits, is the key by which the certificate has to be signed."""
    yield _chain(files)
    yield _sequence(files)
    yield _tokenizer(files)
    for step in saved_steps(files.folder):
        yield _checkpoint(files, step)
    if (files.folder / CERTIFICATE).exists() or public_key:
        yield _certificate(files, public_key)
    else:
        yield Statement(
            CERTIFICATE,
            "not checked",
            "there is none: nothing outside of metrics.jsonl says what its last line is, nor what"
            " config.json held.",
        )


def broken_lines(lines: Sequence[LoggedLine], identity: Mapping[str, Any]) -> list[int]:
    """The lines of metrics.jsonl, counted from 1, that do not have the digest of the one before
    them, of the first one that of `identity`."""
    before, broken = first_digest(identity), []
    for number, line in enumerate(lines, start=1):
        if line.entry.get(BEFORE) != before:
            broken.append(number)
        before = line_digest(line.raw)
    return broken


def _chain(files: RunFiles) -> Statement:
    """Whether each line has the digest of the one before it."""
    if broken := broken_lines(files.lines, files.identity):
        numbers = first_of([str(number) for number in broken], LISTED, ", ")
        what = "what data.json and the seed say" if broken == [1] else "the line before"
        text = f"lines that do not follow from {what}: {numbers} (counted from 1)."
        return Statement(FILE, "no", text)
    if files.is_cut:
        return Statement(FILE, "no", f"the line after line {len(files.lines)} is incomplete.")
    return Statement(
        FILE, "equal", f"each of {len(files.lines)} lines follows from the one before."
    )


def _sequence(files: RunFiles) -> Statement:
    """Whether the steps of the lines are those of one run, up to its newest checkpoint."""
    entries, steps = [line.entry for line in files.lines], files.config.train.steps
    numbers = [entry["step"] for entry in entries]
    problems = [
        f"line {line} is of step {later}, after one of step {earlier}"
        for line, (earlier, later) in enumerate(pairwise(numbers), start=2)
        if later < earlier
    ]
    tokens = {
        entry["tokens"] / entry["step"] for entry in entries if entry["step"] and "tokens" in entry
    }
    if len(tokens) > 1:
        problems.append(f"the tokens of a step are {' and '.join(map(str, sorted(tokens)))}")
    problems += [
        f"line {line} has another state than the last line of step {entry['step']}"
        for line, entry in enumerate(entries, start=1)
        if STATE in entry and entry[STATE] != files.states[entry["step"]]
    ]
    if max(numbers) > steps:
        problems.append(f"a line is of step {max(numbers)}, and the run has {steps} steps")
    if steps in saved_steps(files.folder):
        problems += _missing_at_end([entry for entry in entries if entry["step"] == steps], files)
    if problems:
        return Statement("steps", "no", f"{first_of(problems, LISTED, '; ')}.")
    return Statement("steps", "equal", f"the lines are of steps {numbers[0]} to {numbers[-1]}.")


def _missing_at_end(final: list[dict[str, Any]], files: RunFiles) -> Iterator[str]:
    """What the lines of the last step of a finished run lack."""
    if not any("loss" in entry for entry in final):
        yield "the last step has no line"
    if "validation" in files.record and not any("val_loss" in entry for entry in final):
        yield "the last step has no line of its evaluation"


def _tokenizer(files: RunFiles) -> Statement:
    """Whether tokenizer.json holds the tokenizer that the run was begun with."""
    path, recorded = files.folder / "tokenizer.json", files.record.get("tokenizer")
    try:
        actual = Tokenizer.load(path).fingerprint()
    except ConfigError as error:
        return Statement(path.name, "no", str(error))
    if actual != recorded:
        return Statement(path.name, "no", f"its fingerprint is {actual}, in data.json {recorded}.")
    return Statement(path.name, "equal", f"its fingerprint is that of data.json, {actual}.")


def _checkpoint(files: RunFiles, step: int) -> Statement:
    """Whether a checkpoint has the bytes that were saved, is of this run and step, and holds the
    state that its line in metrics.jsonl has."""
    subject, folder = f"checkpoint {step}", files.folder / "checkpoints" / str(step)
    try:
        if altered := altered_files(folder):
            names = first_of(altered, LISTED, ", ")
            return Statement(subject, "no", f"files are not as they were saved: {names}.")
        manifest = read_manifest(folder)
        if problem := _other(manifest, files.identity, step):
            return Statement(subject, "no", f"it is of {problem}.")
        read_back(folder)
    except Altered as error:
        return Statement(subject, "no", f"{error}.")
    except Exception as error:  # Orbax and TensorStore raise many kinds
        return Statement(subject, "no", f"it cannot be read ({type(error).__name__}: {error}).")
    state = combined({path: row[2] for path, row in manifest["leaves"].items()})
    logged = files.states.get(step)
    if logged is None:
        text = f"its files are as they were saved; metrics.jsonl has no state of step {step}."
        return Statement(subject, "equal", text)
    if logged != state:
        text = f"its state is {state}, and that of step {step} in metrics.jsonl {logged}."
        return Statement(subject, "no", text)
    return Statement(subject, "equal", f"its state is that of its line in metrics.jsonl, {state}.")


def _other(manifest: Manifest, identity: Mapping[str, Any], step: int) -> str:
    """The other run or step that a checkpoint is of; empty where it is that of `step`."""
    saved = manifest["run"]
    differing = [name for name in identity if saved.get(name) != identity[name]]
    if differing:
        return f"another run ({first_of(differing, LISTED, ', ')} differ)"
    counter = manifest["leaves"].get("step", ["", "", ""])[2]
    return "" if counter == digest_on_host(np.array(step, np.int32)) else "another step"


def _certificate(files: RunFiles, public_key: str) -> Statement:
    """Whether the certificate is as it was written, and says of the run what its files are."""
    try:
        certificate = read_certificate(files.folder / CERTIFICATE)
        problems = seal_problems(certificate, public_key)
        problems += [
            f"{name} is not what it says."
            for name, value in stated_of(files.folder, files.record, files.lines).items()
            if certificate[name] != value
        ]
        problems += [
            f"it says that a check failed: {entry['name']}."
            for entry in certificate["checks"]
            if entry["result"] == "failed"
        ]
        signature = certificate.get("signature")
        signed = f"signed by the key {signature['public_key']}" if signature else "not signed"
    except ConfigError as error:
        return Statement(CERTIFICATE, "no", str(error))
    except (LookupError, TypeError, ValueError) as error:
        text = f"it is no certificate ({type(error).__name__}: {error})."
        return Statement(CERTIFICATE, "no", text)
    if problems:
        return Statement(CERTIFICATE, "no", " ".join(problems))
    return Statement(CERTIFICATE, "equal", f"it says what the files are, and is {signed}.")


def stated_of(
    folder: Path, record: Mapping[str, Any], lines: Sequence[LoggedLine]
) -> dict[str, Any]:
    """What a certificate says of the files of a run: the entries "config", "tokenizer", "data",
    "chain" and "checkpoints". `record` is what data.json holds, `lines` those of metrics.jsonl."""
    states = [line.entry[STATE] for line in lines if STATE in line.entry]
    checkpoints = folder / "checkpoints"
    return {
        "config": file_sha256(folder / "config.json"),
        "tokenizer": file_sha256(folder / "tokenizer.json"),
        "data": record,
        "chain": {
            "lines": len(lines),
            "last": line_digest(lines[-1].raw) if lines else "",
            "state": states[-1] if states else "",
        },
        "checkpoints": {
            str(step): file_sha256(checkpoints / str(step) / FILES) for step in saved_steps(folder)
        },
    }
