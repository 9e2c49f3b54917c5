"""The adapter_config.json of Hugging Face's peft (LoRA, arXiv:2106.09685).

Which modules are adapted, and with which ranks, the tensors of an adapter say themselves; the
config says their scales, and which of the parameters of experts are adapted.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.files import ConfigError, is_remote, located, read_object, store_of

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# The heads that peft saves whole with these two tasks, whatever modules_to_save says.
TASKS_WITH_HEAD = {"SEQ_CLS": "classes", "TOKEN_CLS": "tags"}
HEAD_MODULES = ("classifier", "score")
# Keys that change nothing in what the saved tensors of an adapter compute.
NEUTRAL_KEYS = """
r rank_pattern target_modules exclude_modules modules_to_save layers_to_transform layers_pattern
init_lora_weights inference_mode fan_in_fan_out peft_version auto_mapping revision runtime_config
megatron_core qalora_group_size loftq_config eva_config corda_config lora_ga_config
ensure_weight_tying
"""
# Initial values for which peft changes the weights of the base too, each time that it loads it.
BASE_CHANGES = ("pissa", "corda", "olora", "loftq", "lora_ga")
MATCH_SECONDS = 2.0  # for a regular expression of the file, which is a stranger's


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter of peft."""
    return (directory / ADAPTER_CONFIG).is_file()


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30  # whose square float32 holds, not NaN


def _is_name(value: Any) -> bool:
    return isinstance(value, str | None)


# The keys that are read: their default, what their value has to be, and the words for that.
READ_KEYS: Mapping[str, tuple[Any, Callable[[Any], bool], str]] = {
    "peft_type": (None, lambda value: value == "LORA", '"LORA"'),
    "bias": ("none", lambda value: value == "none", '"none"'),
    "task_type": (None, _is_name, "the name of a task or null"),
    "base_model_name_or_path": (None, _is_name, "a directory, or the id of a model"),
    "lora_alpha": (8, _is_number, "a number"),
    "lora_dropout": (0.0, lambda v: _is_number(v) and 0 <= v < 1, "at least 0 and below 1"),
    "use_rslora": (None, lambda value: isinstance(value, bool | None), "true or false"),
    "use_dora": (False, lambda value: isinstance(value, bool), "true or false"),
    "alpha_pattern": (
        {},
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "an object of numbers by the names of modules",
    ),
    "target_parameters": (
        [],
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names, or null",
    ),
}


@dataclass(frozen=True)
class PeftSettings:
    """What an adapter_config.json says, by the names of peft. Modules are named as in the model
    that the adapter was trained on, as "model.layers.0.self_attn.q_proj"."""

    path: Path
    peft_type: str
    bias: str
    task_type: str | None
    base_model_name_or_path: str | None
    lora_alpha: float
    lora_dropout: float
    use_rslora: bool | None
    use_dora: bool
    alpha_pattern: Mapping[str, float]
    target_parameters: list[str]

    def scale(self, module: str, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) where the adapter is rank-stabilized
        (arXiv:2312.03732). A key of alpha_pattern is a regular expression of a module's end."""
        import regex  # its start takes 20 ms, and only an adapter needs it

        alpha = self.lora_alpha
        for key, value in self.alpha_pattern.items():
            # The package stops at a time, and `re` of the standard library does not.
            try:
                if regex.fullmatch(rf"(.*\.)?({key})", module, timeout=MATCH_SECONDS):
                    alpha = value
                    break
            except (TimeoutError, RecursionError, regex.error, OverflowError, MemoryError) as error:
                raise ConfigError(
                    f"{self.path}: alpha_pattern: {key[:80]!r} is no regular expression that can be"
                    f" matched ({type(error).__name__}: {error}): write the names of modules."
                ) from None
        if self.use_rslora:
            return alpha / math.sqrt(rank)
        return alpha / rank

    def is_target_parameter(self, parameter: str) -> bool:
        """Return whether target_parameters has a parameter, or an end of its name."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.target_parameters)


def read_settings(directory: Path) -> PeftSettings:
    """Return the settings of an adapter. ConfigError for an option that is not computed here, by
    name."""
    path = directory / ADAPTER_CONFIG
    values = read_object(path, "download it again")
    keys: dict[str, Any] = {}
    for key, (default, is_valid, words) in READ_KEYS.items():
        value = values.get(key)
        if value is None:
            value = default
        if not is_valid(value):
            raise _unsupported(path, key, value, words)
        keys[key] = value
    for key in values.keys() - READ_KEYS.keys() - {*NEUTRAL_KEYS.split()}:
        if values[key] not in (None, False, {}, []):
            raise _unsupported(path, key, values[key], "false or null")
    initial = str(values.get("init_lora_weights", True)).lower()
    if initial.startswith(BASE_CHANGES):
        raise ConfigError(
            f"{path}: init_lora_weights={initial!r} changes the weights of the base as well, so the"
            " saved tensors alone do not give the model. Save it from peft as a plain adapter:"
            " save_pretrained(..., path_initial_model_for_weight_conversion=...), or the whole"
            " model after merge_and_unload()."
        )
    return PeftSettings(path, **keys)


def _unsupported(path: Path, key: str, value: Any, allowed: str) -> ConfigError:
    shown = json.dumps(value)[:80]
    return ConfigError(f"{path}: {key}={shown} is not supported; supported: {allowed}.")


def find_base(directory: Path, base: str | Path | None = None) -> Path:
    """Return the directory of the model that an adapter is for: `base` if it is given, else the one
    that adapter_config.json names, relative to the current directory or to the adapter's."""
    if base is None:
        name = read_settings(directory).base_model_name_or_path or ""
        # A local adapter of a stranger makes nobody read from a URL.
        if is_remote(name) and store_of(directory).reads_in_place:
            raise ConfigError(
                f"the base model of {directory} is at {name!r}, which whoever made the adapter has"
                f" chosen: name it, as in jf.load({str(directory)!r}, base={name!r}), or copy it,"
                f' and name its directory as "base_model_name_or_path" in'
                f" {directory / ADAPTER_CONFIG}."
            )
        candidates = [located(name), directory / name]
    else:
        name = str(base)
        candidates = [located(name)]
    candidates = [place for place in candidates if name and place.is_dir()]
    if not candidates:
        raise ConfigError(
            f"the base model of {directory}, {name or None!r}, is no directory here. Download a"
            " model of the hub (hf download ID --local-dir PATH), and name its directory, as in"
            f" jf.load({str(directory)!r}, base=PATH), or as"
            f' "base_model_name_or_path" in {directory / ADAPTER_CONFIG}.'
        )
    found = candidates[0]
    # Two adapters on top of each other would need an order that no file states.
    if is_adapter(found):
        raise ConfigError(
            f"the base of {directory}, {found}, is an adapter itself: merge that one first"
            f" (jaxformer convert {found} MERGED --merge), and name MERGED as the base."
        )
    return found
