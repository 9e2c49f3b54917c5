"""Finds the files of the data set that `datasets:NAME` names: on the Hugging Face hub, or in a
directory that `datasets` can read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from jaxformer.files import ConfigError

if TYPE_CHECKING:
    import datasets

GRAMMAR = (
    "write 'datasets:NAME', 'datasets:NAME:SPLIT' or 'datasets:NAME:CONFIG:SPLIT', as in"
    " 'datasets:Salesforce/wikitext:wikitext-103-raw-v1:train'; the split is train if none is given"
)
SECONDS_TO_ANSWER = 10.0


class Wanted(NamedTuple):
    """A name on the hub or a directory, and a configuration and a split where given."""

    name: str
    config: str | None
    split: str | None


def dataset_files(name: str, where: str) -> list[Path]:
    """The Arrow files of a data set, which the library `datasets` downloads or converts. `name` is
    what follows "datasets:", and `where` the setting, for messages."""
    parts = name.split(":")
    if len(parts) > 3 or not all(parts) or "[" in name:
        told = f"names no data set, or a part of a split: {GRAMMAR}. A split is read whole"
        raise ConfigError(f"{where} {told}.")
    try:
        import datasets
    except ModuleNotFoundError:
        told = "needs the library `datasets`, which is not installed"
        raise ConfigError(f"{where} {told}: pip install 'jaxformer[datasets]'.") from None
    config, split = parts[1] if len(parts) == 3 else None, parts[-1] if len(parts) > 1 else None
    found = _loaded(datasets, Wanted(parts[0], config, split), where)
    files = [Path(entry["filename"]) for entry in found.cache_files]
    if not files:
        remedy = "save it by save_to_disk, and name that directory"
        raise ConfigError(f"{where} is empty, or in memory only: {remedy}.")
    return files


def _loaded(library: ModuleType, wanted: Wanted, where: str) -> "datasets.Dataset":
    folder = Path(os.path.expanduser(wanted.name))
    try:
        if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return _saved(library.load_from_disk(str(folder)), wanted, where)
        if folder.is_dir():
            return library.load_dataset(str(folder), wanted.config, split=wanted.split or "train")
        with _hub_if_it_answers(library):
            return library.load_dataset(wanted.name, wanted.config, split=wanted.split or "train")
    except ConfigError:
        raise
    except ConnectionError as error:
        raise ConfigError(
            f"{where}: the Hugging Face hub cannot be reached ({error}), and"
            f" {library.config.HF_DATASETS_CACHE} holds no copy of {wanted.name!r}: run once with a"
            " network and the same HF_HOME, or give what save_to_disk wrote, 'datasets:DIRECTORY'."
        ) from None
    except Exception as error:  # the library's own, Arrow's, and those of its HTTP client
        raise ConfigError(
            f"{where} cannot be loaded by the library `datasets`: {error} To choose, {GRAMMAR}."
        ) from None


def _saved(
    found: "datasets.Dataset | datasets.DatasetDict", wanted: Wanted, where: str
) -> "datasets.Dataset":
    """One split of what save_to_disk wrote: a data set, or a dictionary of them."""
    splits, split = found, wanted.split or "train"
    if not isinstance(found, dict):
        split = wanted.split or str(found.split or "")
        splits = {str(found.split or split): found}
    if wanted.config or split not in splits:
        told = f"has the splits {', '.join(map(str, splits))} and no configurations"
        remedy = f"write 'datasets:{wanted.name}:SPLIT'"
        raise ConfigError(f"{where}, written by save_to_disk, {told}: {remedy}.")
    return splits[split]


@contextlib.contextmanager
def _hub_if_it_answers(library: ModuleType) -> Iterator[None]:
    """Makes the library use only its local copies where the hub does not answer in time."""
    import huggingface_hub

    before = library.config.HF_HUB_OFFLINE
    try:
        huggingface_hub.get_session().head(library.config.HF_ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:  # of one HTTP client or another, by its version
        library.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE = before
