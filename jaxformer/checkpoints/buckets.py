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

from jaxformer.files import ConfigError, is_remote, write_text

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
    store, path = _store_of(folder)
    bucket = path.split("/")[0]
    if not store.exists(bucket):
        raise ConfigError(
            f"{folder} cannot be written: there is no bucket {bucket}, or it may not be listed with"
            " these credentials. Create it, or choose another run.dir."
        )


def marked_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that have their marker, ascending."""
    steps = _step_names(folder)
    store, path = _store_of(folder)
    return sorted(int(name) for name in steps if store.exists(f"{path}/{name}/{MARKER}"))


def remove_unmarked(folder: Path) -> None:
    """Removes what a killed run left of an unfinished save, and of checkpoints that it was
    deleting."""
    store, path = _store_of(folder)
    for name in _step_names(folder):
        if not store.exists(f"{path}/{name}/{MARKER}"):
            store.rm(f"{path}/{name}", recursive=True)


def copy_aside(checkpoint: Path, target: Path, reason: str) -> None:
    """Copies a damaged checkpoint within its store, then deletes it.

    The copy is complete once it has its DAMAGE, and the checkpoint stays one until its marker is
    deleted after that: a run that is killed in between copies it again when it continues.
    """
    store, source = _store_of(checkpoint)
    copies = _store_of(target)[1]
    for name in object_names(checkpoint):
        store.cp_file(f"{source}/{name}", f"{copies}/{name}")
    write_text(target / DAMAGE, reason + "\n")
    store.rm_file(f"{source}/{MARKER}")
    store.rm(source, recursive=True)


def object_names(folder: Path) -> list[str]:
    """The names of all objects below a folder of a bucket, relative to it, by one listing."""
    store, path = _store_of(folder)
    return [name.removeprefix(f"{path}/") for name in store.find(path)]


def _step_names(folder: Path) -> list[str]:
    store, path = _store_of(folder)
    try:
        names = [str(name).rstrip("/").split("/")[-1] for name in store.ls(path, detail=False)]
    except FileNotFoundError:
        return []
    return [name for name in names if name.isascii() and name.isdecimal()]


def _store_of(folder: Path) -> tuple[Any, str]:
    """The fsspec file system of a folder, and the folder's path in it."""
    remote = cast(Any, folder)
    return remote.fs, remote.path.rstrip("/")


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
