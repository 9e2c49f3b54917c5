"""Checkpoints in a bucket, `gs://` or `s3://`.

Orbax writes and reads the arrays there by TensorStore's own drivers, each process its shards, and
all else by `epath`, which opens buckets by gcsfs and s3fs. Nothing is renamed: the objects of a
checkpoint are put where they stay, and it counts once the object MARKER is among them, which is put
last.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from etils import epath

from jaxformer.files import ConfigError, store_of

MARKER = "commit_success.txt"  # Orbax's name for it
SCHEMES = ("gs", "s3")  # for which both epath and TensorStore have a driver
DAMAGE_FILE = "damage.txt"  # says in a checkpoint that was set aside what is wrong with it


def orbax_path(path: Path) -> Any:
    """Convert a path to that of Orbax, which opens the files of a disk and of buckets."""
    text = str(path)
    if text.startswith("s3://"):
        _prepare_orbax()
    return epath.Path(text)


# With these characters in its path a checkpoint is saved but cannot be read: Orbax takes the path
# for a glob pattern, and TensorStore a backslash for a slash.
UNSAVABLE_CHARACTERS = "*?[\\"


def require_savable(folder: Path) -> None:
    """Raise ConfigError for a path below which Orbax does not save checkpoints, or saves some that
    cannot be read."""
    if marks := [mark for mark in UNSAVABLE_CHARACTERS if mark in str(folder)]:
        raise ConfigError(
            f"{folder} has {' and '.join(marks)} in its path, and checkpoints saved there cannot be"
            " read again: choose a directory without any of *, ?, [ and \\ in its path."
        )
    scheme, separator, rest = str(folder).partition("://")
    if separator and "//" in rest:
        raise ConfigError(
            f"{folder} has an empty name between two slashes, by which programs find different"
            f" objects: write {scheme}://{re.sub('/+', '/', rest)}."
        )
    if separator and scheme not in SCHEMES:
        raise ConfigError(
            f"checkpoints cannot be saved to {folder}: Orbax saves to disks, gs:// and s3://."
            " Choose a run.dir there."
        )


def steps_among(paths: Iterable[Any]) -> dict[int, Any]:
    """Select the paths that have the names of checkpoints, by their steps."""
    return {int(path.name): path for path in paths if path.name.isascii() and path.name.isdecimal()}


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run left of an unfinished save, and of checkpoints that it was deleting:
    Orbax would take their names in a bucket for those of finished ones."""
    for path in steps_among(store_of(folder).folders(MARKER, complete=False)).values():
        path.remove()


@functools.cache
def _prepare_orbax() -> None:
    """Let Orbax save to `s3://`, which it refuses, although TensorStore has a driver for it.

    Orbax builds each location by one function. Here it builds that of a `gs://` of the same name,
    and the driver in it is replaced.
    """
    # Private: where a version of Orbax lacks it, runs on a disk go on.
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build: Callable[..., Any] = tensorstore_utils.build_kvstore_tspec

    @functools.wraps(build)
    def build_for_any(directory: str, *args: Any, **kwargs: Any) -> Any:
        if not str(directory).startswith("s3://"):
            return build(directory, *args, **kwargs)
        return _with_s3_driver(build(f"gs://{str(directory)[len('s3://') :]}", *args, **kwargs))

    tensorstore_utils.build_kvstore_tspec = build_for_any


def _with_s3_driver(spec: Any) -> Any:
    """Return a specification of TensorStore with its driver of `s3://` in place of that of `gs://`.

    TensorStore reads no endpoint from the environment, and looks for files of credentials where
    those of the environment would do, with a message for each that is missing.
    """
    if not isinstance(spec, dict):
        if isinstance(spec, list):
            return [_with_s3_driver(value) for value in spec]
        return spec
    if spec.get("driver") not in ("gcs", "gcs_grpc"):
        return {name: _with_s3_driver(value) for name, value in spec.items()}
    # As the libraries of Amazon do, so that one set of variables serves all.
    options: dict[str, Any] = {"driver": "s3", "bucket": spec["bucket"], "path": spec["path"]}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        options["endpoint"] = endpoint
        if region:
            options["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in os.environ:
        options["aws_credentials"] = {"type": "environment"}
    return options
