"""The arguments of the commands that do steps of a run again: replay and verify."""

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


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(DoneAgainArguments):
    """Verifies a run on any machine: that no line of its log, no checkpoint, tokenizer or data was
    altered, that some of its steps, done again, give the figures that were logged, and that its
    masks, kernels and mesh compute what they should. Writes nothing in the run directory. The exit
    status is 1 if something is not so."""

    steps: int = 5
    """Number of steps that are done again, from the checkpoints nearest to them; 0 reads files
    only."""
