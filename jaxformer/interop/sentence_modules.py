"""How sentence-transformers makes the vector of a text from what a model computes: modules.json of
a model directory, with a config.json for each module."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxformer.files import ConfigError, parse_object, read_object, read_text, write_text

# The name of a pooling there, the key that older files have for it, and model.head.pooling.
Pooling = Literal["auto", "first", "last", "mean"]
POOLING_KEYS: dict[str, tuple[str, Pooling | None]] = {
    "cls": ("pooling_mode_cls_token", "first"),
    "mean": ("pooling_mode_mean_tokens", "mean"),
    "lasttoken": ("pooling_mode_lasttoken", "last"),
    "max": ("pooling_mode_max_tokens", None),
    "mean_sqrt_len_tokens": ("pooling_mode_mean_sqrt_len_tokens", None),
    "weightedmean": ("pooling_mode_weightedmean_tokens", None),
}
LISTING = "modules.json"
TEXT_SETTINGS = "sentence_*_config.json"
ADVICE = "compute the vectors with sentence-transformers, or remove modules.json to load the model"


def read_pooling(directory: Path) -> Pooling:
    """Return the `model.head.pooling` that the modules of a directory ask for, "auto" where it has
    none. Raises ConfigError for a module, a pooling, a prompt, or a change of the texts or of the
    vectors that jaxformer does not follow."""
    path = directory / LISTING
    if not path.is_file():
        return "auto"

    def unfollowed(path: Path, said: str, remedy: str) -> ConfigError:
        return ConfigError(f"{path} {said}, which is not followed: {remedy}.")

    # The file is a list, and in an object it is read with the messages of all other files.
    modules = parse_object(f'{{"modules": {read_text(path)}}}', str(path), ADVICE)["modules"]
    pooling: Pooling | None = None
    # Prompts are in the mean unless the module says otherwise.
    pools_prompt = True
    if not isinstance(modules, list):
        modules = [modules]
    for module in modules:
        if not isinstance(module, dict):
            module = {}
        kind = str(module.get("type"))
        match kind.rpartition(".")[2]:
            case "Pooling":
                place = directory / str(module.get("path")) / "config.json"
                keys = read_object(place, ADVICE)
                names = keys.get("pooling_mode")
                if names is None:
                    names = [name for name, (key, _) in POOLING_KEYS.items() if keys.get(key)]
                if not isinstance(names, list):
                    names = [names]
                # Without any the library takes the mean.
                name = " with ".join(map(str, names)) or "mean"
                _, pooling = POOLING_KEYS.get(name, ("", None))
                if pooling is None:
                    remedy = f"cls, mean and lasttoken are; {ADVICE}"
                    raise unfollowed(place, f"has the pooling {name}", remedy)
                pools_prompt = keys.get("include_prompt") is not False
            case "Transformer" | "Normalize":
                pass
            case _:
                remedy = f"Transformer, Pooling and Normalize are; {ADVICE}"
                raise unfollowed(path, f"has the module {kind!r}", remedy)
    if pooling is None:
        raise ConfigError(f"{path} has no module Pooling: {ADVICE}.")

    # Named by the architecture, as sentence_bert_config.json.
    for path in sorted(directory.glob(TEXT_SETTINGS)):
        for key in ("do_lower_case", "processing_kwargs"):
            if read_object(path, ADVICE).get(key):
                remedy = "give the texts as it leaves them (do_lower_case: in lower case), and"
                raise unfollowed(path, f"has {key}", f"{remedy} remove it")
    path = directory / "config_sentence_transformers.json"
    settings: dict[str, Any] = {}
    if path.is_file():
        settings = read_object(path, ADVICE)
    width = settings.get("truncate_dim")
    if width is not None:
        remedy = "take so many numbers of each vector, and set it to null"
        raise unfollowed(path, f"has truncate_dim={width}", remedy)
    prompts = settings.get("prompts")
    if not isinstance(prompts, dict):
        prompts = {}
    if not pools_prompt and any(prompts.values()):
        said = "has prompts that are no part of the vectors (include_prompt)"
        raise unfollowed(path, said, ADVICE)
    prompt = prompts.get(settings.get("default_prompt_name"))
    if prompt:
        remedy = "write it before the texts, and set default_prompt_name to null"
        raise unfollowed(path, f"puts the prompt {str(prompt)!r} before each text", remedy)
    return pooling


def read_text_length(directory: Path, settings: Mapping[str, Any]) -> float | None:
    """Return the number of tokens at which sentence-transformers cuts a text, as its settings for
    texts or else those of the tokenizer say; None where they say nothing. Raises ConfigError where
    that is no number."""
    lengths = [
        (path, "max_seq_length", read_object(path, ADVICE).get("max_seq_length"))
        for path in sorted(directory.glob(TEXT_SETTINGS))
    ]
    file = directory / "tokenizer_config.json"
    lengths.append((file, "model_max_length", settings.get("model_max_length")))
    for path, key, length in lengths:
        if length is None:
            continue
        if type(length) not in (int, float) or not length >= 1:  # NaN is not
            raise ConfigError(
                f"{path} has {key}={str(length)[:80]}, which must be a number of at least 1:"
                " correct it, or remove it to have no limit."
            )
        return float(length)
    return None


def write_modules(directory: Path, pooling: str, width: int) -> None:
    """Write the modules of a model whose vectors are not the mean of the tokens, which
    sentence-transformers takes where there are none."""
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": place,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, place) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling")])
    ]
    # The names of newer files are the keys of POOLING_KEYS; written are the older ones, which every
    # version reads.
    keys: dict[str, Any] = {key: value == pooling for key, value in POOLING_KEYS.values()}
    keys["word_embedding_dimension"] = width
    write_text(directory / LISTING, json.dumps(modules, indent=2))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    write_text(directory / "1_Pooling" / "config.json", json.dumps(keys, indent=2))
