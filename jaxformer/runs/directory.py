"""The run directory: it belongs to one config and one text, and to one process at a time."""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxformer.config import ConfigError, RunConfig
from jaxformer.config_file import differences, read_config
from jaxformer.config_json import to_json
from jaxformer.tokenizer import Tokenizer

LOCK = ".lock"


@contextlib.contextmanager
def lock(run: RunConfig) -> Iterator[None]:
    """Makes the run directory where it is missing and holds it; one that is still empty afterwards
    is taken away again.

    Of several processes of one run the first holds it for all.

    Raises ConfigError if another process holds it, it cannot be written, or it belongs to another
    config.
    """
    if not run.run.dir:
        raise ConfigError("run.dir is empty: name the directory of the run, as in runs/mine.")
    if jax.process_index():
        check_config(run)
        yield
        return
    folder = Path(run.run.dir)
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"run.dir={run.run.dir!r} cannot be written: {error.strerror}. Choose another run.dir."
        ) from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"run.dir={run.run.dir!r} is in use by another process: wait for it, or choose"
                " another run.dir."
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
    """ConfigError, naming the fields, if the run directory was begun with another config."""
    path = Path(run.run.dir) / "config.json"
    if not path.is_file():
        return
    written = read_config(path)
    unknown = {
        name: getattr(written.model, name)
        for name in ("vocab_size", "n_classes")
        if not getattr(run.model, name)
    }
    run = dataclasses.replace(
        run, model=dataclasses.replace(run.model, **unknown)
    )  # not known before the data is
    found = differences(written, run)
    if found:
        raise ConfigError(
            f"run.dir={run.run.dir!r} belongs to another config; nothing was changed. These fields"
            " differ:\n  "
            + "\n  ".join(found)
            + "\nChoose another run.dir, or ask for what is there."
        )


def claim(
    run: RunConfig, tokenizer: Tokenizer, texts: dict[str, str], labels: tuple[str, ...]
) -> None:
    """Writes config.json, tokenizer.json and data.json, or holds them against what is there.

    `texts` maps each split to its fingerprint; `labels` are the names of its classes, if any.
    Raises ConfigError if the text or the tokenizer is no longer the same.
    """
    folder = Path(run.run.dir)
    named = {"labels": list(labels)} if labels else {}
    record = json.dumps({"tokenizer": tokenizer.fingerprint()} | texts | named, indent=2) + "\n"
    path = folder / "data.json"
    if path.is_file() and path.read_text(encoding="utf-8") != record:
        before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(record)
        changed = [name for name in now if before.get(name) != now[name]]
        raise ConfigError(
            f"run.dir={run.run.dir!r} was begun on other text ({', '.join(changed)} changed since),"
            " so it cannot be continued exactly; nothing was changed. Restore the text, or choose"
            " another run.dir."
        )
    check_config(run)
    if jax.process_index():
        return
    tokenizer.save(folder / "tokenizer.json")
    _replace(folder / "config.json", to_json(run))
    _replace(path, record)


def _replace(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
