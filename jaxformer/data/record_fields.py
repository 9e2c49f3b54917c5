"""The fields of records that an objective reads, and the settings that name them."""

from typing import NamedTuple

from jaxformer.config.run import DataConfig
from jaxformer.data.sources.records import Fields, Kind, RecordField


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
    "label": FieldSetting("label_field", "label"),
    "messages": FieldSetting("messages_field", "messages"),
    "words": FieldSetting("text_field", "words"),
    "tags": FieldSetting("label_field", "tags"),
}


def fields_of(entries: tuple[str | RecordField, ...], data: DataConfig) -> Fields:
    """The fields of an objective by the names that the settings give them."""
    found = []
    for entry in entries:
        if isinstance(entry, RecordField):
            found.append(entry)
            continue
        setting, kind, optional = FIELD_SETTINGS[entry]
        field_name = getattr(data, setting)
        if field_name or not optional:
            found.append(RecordField(f"data.{setting}", field_name, kind))
    return tuple(found)
