"""The arguments of the commands that do steps of a run again: replay, certify and verify."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class DoneAgainArguments:
    """Of commands that do steps of a run again."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    data: Annotated[int | None, tyro.conf.arg(name="mesh.data", metavar="INT")] = None
    """Size of that axis of the mesh, if not the run's; 0 uses the devices that are left."""
    fsdp: Annotated[int | None, tyro.conf.arg(name="mesh.fsdp", metavar="INT")] = None
    """Size of that axis of the mesh, if not the run's."""
    expert: Annotated[int | None, tyro.conf.arg(name="mesh.expert", metavar="INT")] = None
    """Size of that axis of the mesh, if not the run's."""
    context: Annotated[int | None, tyro.conf.arg(name="mesh.context", metavar="INT")] = None
    """Size of that axis of the mesh, if not the run's."""
    tensor: Annotated[int | None, tyro.conf.arg(name="mesh.tensor", metavar="INT")] = None
    """Size of that axis of the mesh, if not the run's."""
    cache_dir: Annotated[str, tyro.conf.arg(name="data.cache_dir")] = ""
    """Directory in which tokenized text is stored and found again. If empty, that of the
    environment variable JAXFORMER_DATA_CACHE, or else ~/.cache/jaxformer/data."""


@dataclass(frozen=True, kw_only=True)
class ReplayArguments(DoneAgainArguments):
    """Does one step of a run again, from the newest checkpoint before it: its batch as text, the
    loss of each token, and the norm of its gradient by layer. On the devices of the run, every
    number is bitwise that of the run. Writes nothing in the run directory."""

    step: Annotated[int, tyro.conf.arg(metavar="K")]
    """The step, counted from 1, as metrics.jsonl counts."""
    worst: int = 10
    """Number of tokens with the highest loss that are printed."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """JSON file for all of it: each row with its tokens and their losses, the norm of each leaf."""


@dataclass(frozen=True, kw_only=True)
class CertifyArguments:
    """Proves on this machine what can be proven of a run: its kernels, masks and steps for its own
    model, mesh and shapes, random steps done again, and its files by digest. Writes
    certificate.json and a page beside it. The exit status is 1 if a check fails."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    steps: int = 3
    """Number of random steps that are done again, each near a checkpoint; 0 does none."""
    sign: Annotated[Path | None, tyro.conf.arg(metavar="KEY.pem")] = None
    """Ed25519 private key in PEM, with which the certificate is signed (needs the package
    cryptography). If not given, it is not signed."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="PATH.json")] = None
    """File for the certificate, and with the suffix .html for the page. If not given,
    certificate.json in the run directory."""
    cache_dir: Annotated[str, tyro.conf.arg(name="data.cache_dir")] = ""
    """Directory in which tokenized text is stored and found again. If empty, that of the
    environment variable JAXFORMER_DATA_CACHE, or else ~/.cache/jaxformer/data."""


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(DoneAgainArguments):
    """Verifies a run on any machine: that no line of its log, no checkpoint, tokenizer or data was
    altered, that its certificate says what the files are, and that some of its steps, done again,
    give the figures that were logged. Writes nothing in the run directory. The exit status is 1 if
    something is not as the files say."""

    steps: int = 5
    """Number of steps that are done again, from the checkpoints nearest to them; 0 reads files
    only."""
    seed: int = 0
    """Seed by which these steps are drawn."""
    key: Annotated[Path | None, tyro.conf.arg(metavar="PEM")] = None
    """File of the Ed25519 public key by which the certificate has to be signed."""
