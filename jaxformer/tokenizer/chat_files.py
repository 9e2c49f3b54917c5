"""What the files of a tokenizer say of its chat template, and the names of special tokens that it
reads."""

from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError
from jaxformer.tokenizer.files import SETTINGS_FILE, TEMPLATE_FILE
from jaxformer.tokenizer.tokenizer import Tokenizer

# Classes of tokenizers that have no special tokens but those that the files name.
WITHOUT_DEFAULTS = ("PreTrainedTokenizerFast", "TokenizersBackend")


def template_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """The template that a tokenizer was read with or was given, and where it stands. As in
    transformers chat_template.jinja is read before tokenizer_config.json. Raises ConfigError where
    there is none."""
    if tokenizer.metadata.template is not None:
        return tokenizer.metadata.template, tokenizer.metadata.template_name
    where = f"{Path(tokenizer.origin).parent / SETTINGS_FILE}: chat_template"
    found = tokenizer.metadata.settings.get("chat_template")
    if found is None:
        raise ConfigError(
            f"{tokenizer.origin} has no chat template, neither {TEMPLATE_FILE} beside it nor"
            f" chat_template in {SETTINGS_FILE}: put {TEMPLATE_FILE} there, or train with"
            " tokenizer.chat_template set to a file of Jinja."
        )
    return _default_of(found, where), where


def _default_of(found: Any, where: str) -> str:
    """The template that tokenizer_config.json gives: a text, or that of the name "default" in a
    list."""
    if isinstance(found, str):
        return found
    named = {}
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, dict):
            named[entry.get("name")] = entry.get("template")
    if not isinstance(text := named.get("default"), str):
        names = f" (its names are {', '.join(map(repr, named))})" if named else ""
        raise ConfigError(
            f'{where} must be a text, or a list with {{"name": "default", "template": "..."}}'
            f"{names}: correct it, or set tokenizer.chat_template."
        )
    return text


def special_names(tokenizer: Tokenizer) -> dict[str, str]:
    """The names of special tokens that a template reads, as bos_token: those that the files name,
    and those of a class that knows its own, by their usual names."""
    settings, names = tokenizer.metadata.settings, dict[str, str]()
    if settings.get("tokenizer_class") not in WITHOUT_DEFAULTS:
        for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"):
            token = tokenizer.special(role)
            if token is not None and f"{role}_token" not in settings:
                names[f"{role}_token"] = tokenizer.shown(token)
    extra = settings.get("extra_special_tokens")
    for key, value in {**settings, **(extra if isinstance(extra, dict) else {})}.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            names[key] = content
    return names
