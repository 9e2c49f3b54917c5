"""Files of token ids as a source of data. `jaxformer.data.ids`, which reads them, is imported where
a run has such a source."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from jaxformer.data.sources import Source
from jaxformer.data.sources.finding import ID_SUFFIXES, find_id_files
from jaxformer.data.sources.reading import unreadable
from jaxformer.data.sources.records import Fields, is_text
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer


@dataclass(frozen=True)
class IdFiles(Source):
    """Files of token ids, and the tokenizer that made them, which `of` gives."""

    tokenizer: Tokenizer | None = None

    def of(self, tokenizer: Tokenizer | None) -> "IdFiles":
        """The same files with their tokenizer. Raises ConfigError where there is none."""
        found = replace(self, tokenizer=tokenizer)
        found.made_by()
        return found

    def made_by(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError where there is none."""
        if self.tokenizer is None:
            told = "holds token ids, and tokenizer.path is empty: set it to their tokenizer.json"
            raise ConfigError(f"{self} {told}.")
        return self.tokenizer


def find_ids(spec: str, setting: str, fields: Fields) -> IdFiles | None:
    """The files of ids that a spec names by their suffix, None where it names something else.

    Raises ConfigError where there is no such file, and for an objective that reads records.
    """
    if Path(spec).suffix.lower() not in ID_SUFFIXES or os.path.isdir(os.path.expanduser(spec)):
        return None
    try:
        files = find_id_files(spec, setting)
    except OSError as error:
        raise unreadable(f"{setting}: {spec}", error) from None
    if not is_text(fields):
        told = "holds token ids of text, and data.objective reads records: name their source"
        raise ConfigError(f"{setting}: {spec} {told}.")
    return IdFiles(setting, spec, files, fields)
