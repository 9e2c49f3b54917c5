"""Files in a store that a URL names, such as a bucket: what `jaxformer.files` does for them.

The paths are those of universal_pathlib, which asks fsspec and with it s3fs or gcsfs. A store has
no directories, links or renames: an object appears by one put, and nothing is left of one that
fails.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

# gcsfs logs each error with its traceback, which would stand before the one message about it.
logging.getLogger("gcsfs").addHandler(logging.NullHandler())

_reached = set[tuple[str, str]]()  # the schemes and buckets that have answered
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # of pyproject.toml, by scheme
REASON_CHARACTERS = 300  # of the message of an error

# What the errors of the libraries are called, or the code that a store answers, and what to do.
ADVICE_BY_SIGNS = (
    (
        "NoCredentialsError PartialCredentialsError DefaultCredentialsError RefreshError 401"
        " InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken",
        "set credentials that are valid, for S3 by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or"
        " ~/.aws, for Google Cloud by `gcloud auth application-default login` or"
        " GOOGLE_APPLICATION_CREDENTIALS",
    ),
    (
        "301 PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException",
        "set AWS_DEFAULT_REGION to the region of the bucket",
    ),
    (
        "NoSuchBucket FileNotFoundError 404",
        "create the bucket, or correct its name: jaxformer makes none",
    ),
    (
        "PermissionError AccessDenied 403 Forbidden",
        "allow these credentials to list, read, write and delete objects there, or use others",
    ),
    (
        "429 500 502 503 504 SlowDown InternalError ServiceUnavailable ProxyError",
        "the store answered so to every try; wait, and start the same command again",
    ),
    (
        "EndpointConnectionError ConnectionError ClientConnectorError ClientConnectionError"
        " ClientPayloadError"
        " ConnectTimeoutError ReadTimeoutError ConnectionClosedError TimeoutError",
        "check the network and AWS_ENDPOINT_URL or STORAGE_EMULATOR_HOST if one is set, and start"
        " the same command again",
    ),
)


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
        _reach(path)
        _reached.add((scheme, bucket))
    return cast(Path, path)


def _reach(path: Any) -> None:
    """Asks a store about a path, once for a bucket, so that what keeps it from being read is said
    before anything begins. Raises ValueError."""
    try:
        path.fs.info(path.path)
    except Exception as error:
        if not isinstance(error, FileNotFoundError) or "NoSuchBucket" in _names(error):
            raise ValueError(f"{path} cannot be read {explained(error)}.") from error


def put_file(name: str, path: Path) -> None:
    """Makes an object of a local file, all at once: one put, or several that count at the end."""
    store: Any = path
    store.fs.put_file(name, store.path)


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
    moved: list[tuple[str, str]] = []
    store: Any = folder
    for path in paths:
        source: Any = path
        for name in store.fs.find(source.path):
            below = name.removeprefix(source.path.rstrip("/"))
            moved.append((name, f"{store.path}/{path.name}{below}"))
    for name, target in moved:
        store.fs.cp_file(name, target)
    for name, _ in moved:
        store.fs.rm_file(name)


def explained(error: BaseException) -> str:
    """The reason, in parentheses, for what a store or its library raised once all tries were over,
    and what to do."""
    names = _names(error)
    advice = next(
        (advice for signs, advice in ADVICE_BY_SIGNS if names.intersection(signs.split())),
        "read what the store says, and check the URL",
    )
    reason = " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
    return f"({reason}): {advice}"


def _names(error: BaseException) -> set[str]:
    """What tells the kind of an error: the names of its class and of what it was raised from, the
    codes that the store answered, and a code at the beginning of its text."""
    names, cause = set[str](), error
    while cause is not None:
        names |= {kind.__name__ for kind in type(cause).__mro__}
        answer: Any = getattr(cause, "response", None)
        if isinstance(answer, dict):  # of botocore
            names.add(str(answer.get("Error", {}).get("Code")))
            names.add(str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode")))
        names.add(str(getattr(cause, "code", None)))  # of gcsfs
        names.add(re.split(r"\W", str(cause), maxsplit=1)[0])
        cause = cause.__cause__  # type: ignore[assignment]
    return names
