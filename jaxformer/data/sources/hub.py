"""Finds the files of the data set that `datasets:NAME` names: on the Hugging Face hub, or in a
directory that `datasets` can read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxformer.files import ConfigError, is_remote

if TYPE_CHECKING:
    import datasets

GRAMMAR = (
    "write 'datasets:NAME', 'datasets:NAME:SPLIT' or 'datasets:NAME:CONFIG:SPLIT', as in"
    " 'datasets:Salesforce/wikitext:wikitext-103-raw-v1:train'; the split is train if none is given"
)
SECONDS_TO_ANSWER = 10.0


def dataset_files(name: str, where: str) -> list[Path]:
    """The Arrow files of a data set, which the library `datasets` downloads or converts. `name` is
    what follows "datasets:", and `where` the setting, for messages."""
    if is_remote(name):
        raise ConfigError(
            f"{where}: data sets are read from the hub or from a directory of this machine: name"
            " .parquet or .jsonl files by their URL without 'datasets:', or copy the directory."
        )
    parts = name.split(":")
    if len(parts) > 3 or not all(parts) or "[" in name:
        raise ConfigError(
            f"{where} names no data set, or a part of a split: {GRAMMAR}. A split is read whole."
        )
    try:
        import datasets
    except ModuleNotFoundError:
        raise ConfigError(
            f"{where} needs the library `datasets`, which is not installed: pip install"
            " 'jaxformer[datasets]'."
        ) from None
    config, split = parts[1] if len(parts) == 3 else None, parts[-1] if len(parts) > 1 else None
    dataset = _loaded(datasets, parts[0], config, split, where)
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not files:
        raise ConfigError(
            f"{where} is empty, or in memory only: save it by save_to_disk, and name that"
            " directory."
        )
    return files


def _loaded(
    library: ModuleType, name: str, config: str | None, split: str | None, where: str
) -> "datasets.Dataset":
    folder = Path(os.path.expanduser(name))
    try:
        if any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return _saved(library.load_from_disk(str(folder)), name, config, split, where)
        if folder.is_dir():
            return library.load_dataset(str(folder), config, split=split or "train")
        with _hub_if_it_answers(library):
            return library.load_dataset(name, config, split=split or "train")
    except ConfigError:
        raise
    except ConnectionError as error:
        raise ConfigError(
            f"{where}: the Hugging Face hub cannot be reached ({error}), and"
            f" {library.config.HF_DATASETS_CACHE} holds no copy of {name!r}: run once with"
            " a network and the same HF_HOME, or give what save_to_disk wrote,"
            " 'datasets:DIRECTORY'."
        ) from None
    except Exception as error:
        # The library's own errors, Arrow's, and those of its HTTP client.
        raise ConfigError(
            f"{where} cannot be loaded by the library `datasets`: {error} To choose, {GRAMMAR}."
        ) from None


def _saved(
    saved: "datasets.Dataset | datasets.DatasetDict",
    name: str,
    config: str | None,
    split: str | None,
    where: str,
) -> "datasets.Dataset":
    """One split of what save_to_disk wrote: a data set, or a dictionary of them."""
    splits, default = saved, "train"
    if not isinstance(saved, dict):
        default = str(saved.split or "")
        splits = {str(saved.split or split or ""): saved}
    split = split or default
    if config or split not in splits:
        raise ConfigError(
            f"{where}, written by save_to_disk, has the splits {', '.join(map(str, splits))} and no"
            f" configurations: write 'datasets:{name}:SPLIT'."
        )
    return splits[split]


@contextlib.contextmanager
def _hub_if_it_answers(library: ModuleType) -> Iterator[None]:
    """Makes the library use only its local copies where the hub does not answer in time."""
    import huggingface_hub  # which comes with `datasets`

    before = library.config.HF_HUB_OFFLINE
    try:
        huggingface_hub.get_session().head(library.config.HF_ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:
        # The error of one HTTP client or another, by the version of the library.
        library.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE = before
