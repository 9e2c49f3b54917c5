"""Writes the certificate of a run: what was proven of it on this machine."""

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax

from jaxformer.arrays.sharding import platform
from jaxformer.checkpoints.reading import saved_steps, versions
from jaxformer.cluster.processes import exchange, together
from jaxformer.config.settings import Log
from jaxformer.files import ConfigError, is_remote, located, make_directory, write_text
from jaxformer.report.metrics import LARGEST_STEP
from jaxformer.runs.device import with_proven_kernel
from jaxformer.runs.rollback import batches_of
from jaxformer.runs.train_run import compile_step
from jaxformer.tools.certificate.chain import stated_of
from jaxformer.tools.certificate.checks import NOT_PROVEN, examined
from jaxformer.tools.certificate.evidence import Evidence
from jaxformer.tools.certificate.page import certificate_page
from jaxformer.tools.certificate.record import (
    CERTIFICATE,
    CERTIFICATE_FORMAT,
    Certificate,
    as_text,
    private_key_in,
    sealed,
    source_digest,
)
from jaxformer.tools.certificate.steps import StepsAgain, chosen_steps, compared
from jaxformer.tools.certificate.text_checks import log_lines
from jaxformer.tools.step_replay import setup_of_run, state_before


def certify(
    path: str | Path,
    steps: int = 3,
    key: Path | None = None,
    output: Path | None = None,
    cache_dir: str | Path = "",
    log: Log = print,
) -> Certificate:
    """Runs the checks of the run directory `path` on this machine, and writes certificate.json and
    a page beside it, certificate.html.

    Args:
      steps: of the run that are done again.
      key: a file with an Ed25519 private key in PEM, by which the certificate is signed.
      output: the file to write in place of certificate.json in the run directory.
      cache_dir: where tokenized text is stored, by default that of this user.
      log: gets a line for each check.

    Every process of a run of several calls this, and the first one writes. Raises ConfigError where
    `path` is no run directory, its data has changed, its mesh does not fit the devices, or the key
    is of another kind.
    """
    if steps < 0:
        raise ConfigError(f"--steps {steps}: give a number of steps, at least 0.")
    if key is not None:
        private_key_in(key)  # before the checks, which take long
    target = output or located(path) / CERTIFICATE
    quiet: Log = log if jax.process_index() == 0 else _ignore
    content = _content(located(path), steps, target.absolute().parent, cache_dir, quiet)
    certificate = sealed(content, key)

    def write() -> None:
        if jax.process_index() == 0:
            write_text(target, as_text(certificate), follow=output is not None)
            page = certificate_page(certificate)
            write_text(target.with_suffix(".html"), page, follow=output is not None)

    together(write)
    return certificate


def failed_checks(certificate: Certificate) -> list[str]:
    """The names of the checks that failed."""
    return [entry["name"] for entry in certificate["checks"] if entry["result"] == "failed"]


def _ignore(text: str) -> None:
    pass


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A new directory in `folder`, on a disk or in a bucket, that all processes share, and which is
    removed at the end."""
    scratch = folder / exchange(f".certify-{uuid.uuid4().hex[:8]}")[0]
    make_directory(scratch)
    try:
        yield scratch
    finally:
        if is_remote(scratch):
            store = cast(Any, scratch)
            with contextlib.suppress(FileNotFoundError):
                store.fs.rm(store.path, recursive=True)
        else:
            shutil.rmtree(scratch, ignore_errors=True)


def _content(
    path: Path, count: int, folder: Path, cache_dir: str | Path, log: Log
) -> dict[str, Any]:
    """All of a certificate but its seals. A state may be saved for a while in `folder`."""
    with _scratch(folder) as scratch:
        evidence = evidence_of(path, count, scratch, cache_dir, log)
        checks = []
        for entry in examined(evidence):
            log(f"{entry['result']:<15} {entry['name']}: {entry['text']}")
            checks.append(entry)
        exchange("")  # no process removes what another one reads
    entries = {"checks": checks, "replayed": [*evidence.replays], "not_proven": [*NOT_PROVEN]}
    return _record_of(evidence, path) | entries


def evidence_of(
    path: Path, count: int, folder: Path, cache_dir: str | Path = "", log: Log = print
) -> Evidence:
    """What the checks look at: the run, its newest state, and `count` of its steps done again."""
    setup = setup_of_run(path, _ignore, cache_dir=cache_dir)
    if platform(setup.mesh) != "cpu":
        # As a run does at its start: another kernel where the compiler refuses that of "auto".
        setup = with_proven_kernel(setup, log)
    if not saved_steps(path):
        log("The run has no checkpoint, so the checks look at its first state.")
    again = StepsAgain(setup, compile_step(setup, _ignore), log)
    steps = chosen_steps(path, setup.run.train.steps, count)
    replays = [compared(replay, again.bound) for replay in again.do(steps)]
    state = state_before(setup, LARGEST_STEP, log)
    batch = batches_of(str(path), setup.batches)[int(state.step)]
    return Evidence(setup, state, again, batch, replays, folder, log)


def _record_of(evidence: Evidence, path: Path) -> dict[str, Any]:
    """What identifies a run, its data, its files and this machine."""
    setup = evidence.setup
    device = setup.mesh.devices.flat[0]
    return {
        "format": CERTIFICATE_FORMAT,
        "run": setup.identity,
        "versions": versions(),
        "device": {
            "kind": device.device_kind,
            "platform": device.platform,
            "count": setup.mesh.size,
            "processes": jax.process_count(),
            "mesh": dict(setup.mesh.shape),
        },
        "code": source_digest(),
    } | stated_of(path, setup.record, log_lines(path))
