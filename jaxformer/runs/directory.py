"""The run directory: it belongs to one config and one text, and to one process at a time."""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxformer.config import ConfigError, RunConfig
from jaxformer.config_file import differences, read_config
from jaxformer.config_json import to_json
from jaxformer.files import read_object, write_text
from jaxformer.tokenizer import Tokenizer

LOCK = ".lock"
ROLLBACKS = "rollbacks.json"  # of `runs.rollback`


@contextlib.contextmanager
def lock(run: RunConfig) -> Iterator[None]:
    """Creates the run directory where it is missing, and locks it. One that is still empty
    afterwards is removed.

    Of several processes of one run, the first one locks it for all. Raises ConfigError if another
    run holds the lock, or the directory cannot be written or belongs to another config.
    """
    if not run.run.dir:
        raise ConfigError("run.dir is empty: name the directory of the run, for example runs/mine.")
    if jax.process_index():
        check_config(run)
        yield
        return
    folder, name = Path(run.run.dir), f"run.dir={run.run.dir!r}"
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be written ({error.strerror}): choose another run.dir."
        ) from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{name} is in use by another process: wait for it, or choose another run.dir."
            ) from error
        try:
            check_config(run)
            yield
        finally:
            if missing and [entry.name for entry in folder.iterdir()] == [LOCK]:
                (folder / LOCK).unlink()
                for path in missing:
                    path.rmdir()


def check_config(run: RunConfig) -> None:
    """Raises ConfigError, naming the fields, if the run directory was begun with another config."""
    path = Path(run.run.dir) / "config.json"
    if not path.is_file():
        return
    written, model = read_config(path), run.model
    filled = dataclasses.replace(  # from the data, which is not read yet
        model,
        vocab_size=model.vocab_size or written.model.vocab_size,
        n_classes=model.n_classes or written.model.n_classes,
    )
    if found := differences(written, dataclasses.replace(run, model=filled)):
        fields = "\n  ".join(found)
        raise ConfigError(
            f"run.dir={run.run.dir!r} belongs to another config; nothing was changed. These fields"
            f" differ:\n  {fields}\nChoose another run.dir, or restore these settings."
        )


def claim(
    run: RunConfig, tokenizer: Tokenizer, texts: dict[str, str], labels: tuple[str, ...]
) -> None:
    """Writes config.json, tokenizer.json and data.json, or compares them with those of the
    directory.

    `texts` maps each split to its fingerprint; `labels` are the names of its classes, if any.
    Raises ConfigError if the text or the tokenizer has changed.
    """
    folder = Path(run.run.dir)
    path, named = folder / "data.json", {"labels": list(labels)} if labels else {}
    now: dict[str, Any] = {"tokenizer": tokenizer.fingerprint(), **texts, **named}
    before = read_object(path) if path.is_file() else now
    if before != now:
        changed = [name for name in before | now if before.get(name) != now.get(name)]
        raise ConfigError(
            f"run.dir={run.run.dir!r} was begun with other text ({', '.join(changed)} changed), so"
            " it cannot be continued exactly; nothing was changed. Restore the text, or choose"
            " another run.dir."
        )
    check_config(run)
    if jax.process_index() == 0:
        tokenizer.save(folder / "tokenizer.json")
        write_text(folder / "config.json", to_json(run))
        write_text(path, json.dumps(now, indent=2) + "\n")


def profile_dir(run_dir: str) -> Path:
    """Where a run keeps the trace of run.profile."""
    return Path(run_dir) / "profile"


def is_begun(run: RunConfig) -> bool:
    """Whether the run directory belongs to the config of an earlier command."""
    return (Path(run.run.dir) / "config.json").is_file()


def release(run: RunConfig) -> None:
    """Takes back what `claim` wrote, so that the directory may be begun with another config. Only
    for the command that claimed it, before there is a checkpoint."""
    if jax.process_index():
        return
    folder = Path(run.run.dir)
    for name in ("config.json", "data.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
