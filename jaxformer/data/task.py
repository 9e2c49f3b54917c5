"""What data needs to know of an objective: what it reads, and how rows are made of it."""

from collections.abc import Callable
from typing import NamedTuple

from jaxformer.config.run import DataConfig
from jaxformer.data.records import Fields, Kind, RecordField
from jaxformer.data.rows import BestFitRows, CausalRows, OrderedRows, RowFormat, Rows, WindowRows
from jaxformer.data.store import TokenStore
from jaxformer.data.templates import Template
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer

# Cuts rows from the tokens of a text.
MakeRows = Callable[[TokenStore, DataConfig, RowFormat, Tokenizer], Rows]


def causal_rows(
    store: TokenStore, data: DataConfig, row_format: RowFormat, tokenizer: Tokenizer
) -> Rows:
    """Cut rows in which every token but the first is a target once, packed as data.packing says."""
    if data.order == "random":
        return WindowRows(store, data)
    if data.order == "text":
        return OrderedRows(store, data)
    if data.packing == "best_fit":
        return BestFitRows(store, data, tokenizer.end_token)
    return CausalRows(store, data)


def missing_sentinels(tokenizer: Tokenizer) -> list[str]:
    """Return the names of the special tokens that hidden spans need and a tokenizer lacks."""
    return [] if tokenizer.sentinels() else ["<extra_id_0> and so on"]


def nothing_missing(tokenizer: Tokenizer) -> list[str]:
    """Miss nothing, for rows that work with every tokenizer."""
    return []


def reads_plain_text(template: object, rows: object) -> bool:
    """Return whether rows are plain text that a decoder learns, without a template of their own."""
    return template is None and rows is causal_rows


class FieldSetting(NamedTuple):
    """The setting of DataConfig that names a field, what the field holds, and whether an empty
    setting means that it is not read.
    """

    setting: str
    kind: Kind
    optional: bool = False


# What an objective may read that a setting names.
FIELD_SETTINGS = {
    "text": FieldSetting("text_field", "text"),
    "pair": FieldSetting("pair_field", "text", optional=True),
    "source": FieldSetting("source_field", "text"),
    "target": FieldSetting("target_field", "text"),
    "negatives": FieldSetting("negatives_field", "texts", optional=True),
    "label": FieldSetting("label_field", "label"),
    "expected": FieldSetting("target_field", "label", optional=True),
    "messages": FieldSetting("messages_field", "messages"),
    "words": FieldSetting("text_field", "words"),
    "tags": FieldSetting("label_field", "tags"),
}


def fields_of(entries: tuple[str | RecordField, ...], data: DataConfig) -> Fields:
    """Return the fields of an objective by the names that the settings give them."""
    fields = []
    for entry in entries:
        if isinstance(entry, RecordField):
            fields.append(entry)
            continue
        setting, kind, optional = FIELD_SETTINGS[entry]
        field_name = getattr(data, setting)
        if field_name or not optional:
            fields.append(RecordField(f"data.{setting}", field_name, kind))
    return tuple(fields)


class Task(NamedTuple):
    """An objective as the data package sees it, resolved for one run (`objectives.task_of`).

    `fields` are those that are read of each record; a text alone means text. `specials` are the
    special tokens, beside the end token, of a tokenizer that is made for it. Records become rows by
    their `template`, text by `rows` where there is no template. `missing` gives the names of the
    special tokens that the rows need and a tokenizer lacks. `every_token` is true where each token
    of a text is predicted once, so that bits per byte mean something.
    """

    name: str
    format: RowFormat
    fields: Fields
    specials: tuple[str, ...] = ()
    template: type[Template] | None = None
    rows: MakeRows = causal_rows
    missing: Callable[[Tokenizer], list[str]] = nothing_missing
    every_token: bool = False

    def beginning(self, bos: str, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens with which each document of a text begins, as data.bos=`bos` says; none
        where rows are made otherwise."""
        if bos == "never" or not reads_plain_text(self.template, self.rows):
            return ()
        # As prompts and the templates of records have it.
        beginning = tuple(tokenizer.prefix)
        if bos == "auto" or beginning:
            return beginning
        token = tokenizer.special("bos")
        if token is None:
            raise ConfigError(
                f"data.bos=always, and {tokenizer.origin} has no BOS: name it as bos_token in the"
                " tokenizer_config.json beside it, or set data.bos to auto or never."
            )
        return (token,)
