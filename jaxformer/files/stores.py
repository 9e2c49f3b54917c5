"""Files in a store that a URL names, such as a bucket: what `jaxformer.files` does for them.

The paths are those of universal_pathlib, which asks fsspec and with it s3fs or gcsfs. A store has
no directories, links or renames: an object appears by one put, and nothing is left of one that
fails.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

# gcsfs logs each error with its traceback, which would stand before the one message about it.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())

_reached = set[tuple[str, str]]()  # the schemes and buckets that have answered
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of pyproject.toml, by scheme
REASON_CHARACTERS = 300  # of the message of an error


def opened_url(url: str) -> Path:
    """The path of a URL. It has the methods of `pathlib.Path`, but is none, and reads and lists
    anew each time. Raises ValueError where nothing here opens such URLs."""
    # These take 80 ms, and a run on a disk needs neither.
    import fsspec
    from upath import UPath

    scheme = url.split("://")[0].lower()
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        install = f'pip install "jaxformer[{extra}]"' if extra else str(error)
        raise ValueError(f"{url}: {scheme}:// needs another package: {install}") from error
    except ValueError as error:
        raise ValueError(
            f"{url}: no store is known for {scheme}://. Name a path, or a URL such as"
            " gs://bucket/run or s3://bucket/run."
        ) from error
    # Another process, or Orbax in this one, may have written since the last listing.
    options: Any = {"use_listings_cache": False} if scheme in EXTRAS else {}
    path = UPath(url, **options)
    bucket = url.split("/")[2]
    if scheme in EXTRAS and (scheme, bucket) not in _reached:
        # What keeps a store from being read is said before anything begins.
        try:
            path.fs.info(path.path)
        except Exception as error:
            has_bucket = "NoSuchBucket" not in str(error.__cause__)
            if not (isinstance(error, FileNotFoundError) and has_bucket):
                raise ValueError(f"{path} cannot be read {explained(error)}.") from error
        _reached.add((scheme, bucket))
    return cast(Path, path)


def put_new(path: Path, content: bytes) -> bool:
    """Writes an object where none has its name, in one request that no other process can come
    between: S3 has `If-None-Match`, Google Cloud `ifGenerationMatch`. Returns False where there is
    one. Other stores are asked first, and a write between is not noticed."""
    store: Any = path
    try:
        store.fs.pipe_file(store.path, content, mode="create")
    except FileExistsError:
        return False
    return True


def move_objects(paths: Sequence[Path], folder: Path) -> None:
    """Moves objects, and those below the paths, into a folder of the same store: each is copied
    there, and once all are, they are removed."""
    store: Any = folder
    targets: dict[str, str] = {}
    for path in paths:
        source: Any = path
        for name in store.fs.find(source.path):
            below = name.removeprefix(source.path.rstrip("/"))
            targets[name] = f"{store.path}/{path.name}{below}"
    for name, target in targets.items():
        store.fs.cp_file(name, target)
    for name in targets:
        store.fs.rm_file(name)


def explained(error: BaseException) -> str:
    """The reason, in parentheses, for what a store or its library raised once all tries were over,
    and what to do."""
    reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
    return (
        f"({reason}): look whether the bucket exists (jaxformer makes none), whether its region is"
        " that of AWS_DEFAULT_REGION, whether the credentials are valid and may list, read, write"
        " and delete objects there, and whether the network reaches it; start the same command"
        " again"
    )
