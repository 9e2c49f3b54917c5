"""Checkpoints in a bucket, `gs://` or `s3://`.

Orbax writes and reads the arrays there by TensorStore's own drivers, each process its shards, and
all else by `epath`, which opens buckets by gcsfs and s3fs. Nothing is renamed: the objects of a
checkpoint are put where they stay, and it counts once the object MARKER is among them, which is put
last.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from etils import epath

from jaxformer.files import ConfigError, is_remote, located, write_text

MARKER = "commit_success.txt"  # Orbax's name for it
SCHEMES = ("gs", "s3")  # for which both epath and TensorStore have a driver
DAMAGE = "damage.txt"  # says in a checkpoint that was set aside what is wrong with it


def orbax_path(path: Path) -> Any:
    """The path as Orbax takes it: itself on a disk, an `epath.Path` in a bucket."""
    if not is_remote(path):
        return path
    _prepare_orbax()
    return epath.Path(str(path))


def require_bucket(folder: Path) -> None:
    """Raises ConfigError for a store in which Orbax cannot save, and where the bucket does not
    exist: s3fs would create one."""
    if str(folder).partition("://")[0] not in SCHEMES:
        raise ConfigError(
            f"checkpoints cannot be saved to {folder}: Orbax saves to disks, gs:// and s3://."
            " Choose a run.dir there."
        )
    bucket = str(folder).split("/")[2]
    if not located(f"{str(folder).partition('://')[0]}://{bucket}").exists():
        raise ConfigError(
            f"{folder} cannot be written: there is no bucket {bucket}, or it may not be listed with"
            " these credentials. Create it, or choose another run.dir."
        )


def marked_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that have their marker, ascending."""
    return sorted(int(path.name) for path in _steps(folder) if (path / MARKER).exists())


def remove_unmarked(folder: Path) -> None:
    """Removes what a killed run left of an unfinished save, and of checkpoints that it was
    deleting."""
    for path in _steps(folder):
        if not (path / MARKER).exists():
            path.remove()


def copy_aside(checkpoint: Path, target: Path, reason: str) -> None:
    """Copies a damaged checkpoint within its store, then deletes it.

    The copy is complete once it has its DAMAGE, and the checkpoint stays one until its marker is
    deleted after that: a run that is killed in between copies it again when it continues.
    """
    source = cast(Any, checkpoint)
    cast(Any, target).copy_from(source)
    write_text(target / DAMAGE, reason + "\n")
    (checkpoint / MARKER).unlink()
    source.remove()


def _steps(folder: Path) -> list[Any]:
    """The paths of checkpoints, unfinished ones too."""
    try:
        entries = cast(Any, folder).entries()
    except FileNotFoundError:
        return []
    names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries]
    return [folder / name for name in names if name.isascii() and name.isdecimal()]


@functools.cache
def _prepare_orbax() -> None:
    """Lets Orbax save to `s3://`, which it refuses, although TensorStore has a driver for it, and
    keeps its listings of buckets from a cache, which would not show what TensorStore put.

    Orbax builds each location by one function. Here it builds that of a `gs://` of the same name,
    and the driver in it is replaced.
    """
    import fsspec.config  # takes 70 ms, and no run on a disk needs it

    # Private: where a version of Orbax lacks it, runs on a disk go on.
    from orbax.checkpoint._src.serialization import tensorstore_utils

    for scheme in SCHEMES:
        fsspec.config.conf.setdefault(scheme, {}).setdefault("use_listings_cache", False)
    build: Callable[..., Any] = tensorstore_utils.build_kvstore_tspec

    @functools.wraps(build)
    def build_for_any(directory: str, *args: Any, **kwargs: Any) -> Any:
        if not str(directory).startswith("s3://"):
            return build(directory, *args, **kwargs)
        return _with_s3_driver(build(f"gs://{str(directory)[len('s3://') :]}", *args, **kwargs))

    tensorstore_utils.build_kvstore_tspec = build_for_any


def _with_s3_driver(spec: Any) -> Any:
    """A specification of TensorStore with its driver of `s3://` in place of that of `gs://`.

    TensorStore reads no endpoint from the environment, and looks for files of credentials where
    those of the environment would do, with a message for each that is missing.
    """
    if not isinstance(spec, dict):
        return [_with_s3_driver(value) for value in spec] if isinstance(spec, list) else spec
    if spec.get("driver") not in ("gcs", "gcs_grpc"):
        return {name: _with_s3_driver(value) for name, value in spec.items()}
    options: dict[str, Any] = {"driver": "s3", "bucket": spec["bucket"], "path": spec["path"]}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        options |= {"endpoint": endpoint} | ({"aws_region": region} if region else {})
    if "AWS_ACCESS_KEY_ID" in os.environ:
        options["aws_credentials"] = {"type": "environment"}
    return options
