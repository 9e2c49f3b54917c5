"""The adapter_config.json of Hugging Face's peft (LoRA, arXiv:2106.09685).

Which modules are adapted, and with which ranks, the tensors of an adapter say themselves; the
config says their scales, and which of the parameters of experts are adapted.
"""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from jaxformer.files import ConfigError, located, read_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# The heads that peft saves whole with these two tasks, whatever modules_to_save says.
TASKS_WITH_HEAD = {"SEQ_CLS": "classes", "TOKEN_CLS": "tags"}
HEAD_MODULES = ("classifier", "score")
# Keys that change nothing in what the saved tensors of an adapter compute.
NEUTRAL_KEYS = """
target_modules exclude_modules modules_to_save layers_to_transform layers_pattern bias
init_lora_weights inference_mode fan_in_fan_out peft_version auto_mapping revision runtime_config
megatron_core qalora_group_size loftq_config eva_config corda_config lora_ga_config
ensure_weight_tying
"""
# Initial values for which peft changes the weights of the base too, each time that it loads it.
CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Seconds for all regular expressions of a file, which are a stranger's.
FITTING_SECONDS = 10.0


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds an adapter of peft."""
    return (located(path) / ADAPTER_CONFIG).is_file()


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    # Of any size, and not NaN.
    return type(value) in (int, float) and abs(value) < math.inf


def _is_table(value: Any, is_value: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, dict) and all(map(is_value, value.values())))


def _is_list_of_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(type(one) is str for one in value))


# The keys that are read: their default, what their value has to be, and the words for that.
READ_KEYS: Mapping[str, tuple[Any, Callable[[Any], bool], str]] = {
    "peft_type": (None, lambda value: value == "LORA", '"LORA"'),
    "task_type": (None, lambda value: isinstance(value, str | None), "the name of a task or null"),
    "base_model_name_or_path": (
        None,
        lambda value: isinstance(value, str | None),
        "a directory, or the id of a model",
    ),
    "r": (8, _is_count, "a whole number of at least 1"),
    "lora_alpha": (8, _is_number, "a number"),
    "lora_dropout": (
        0.0,
        lambda value: _is_number(value) and 0 <= value < 1,
        "at least 0 and below 1",
    ),
    "use_rslora": (None, lambda value: isinstance(value, bool | None), "true or false"),
    "rank_pattern": (
        None,
        lambda value: _is_table(value, _is_count),
        "an object of whole numbers of at least 1 by the names of modules",
    ),
    "alpha_pattern": (
        None,
        lambda value: _is_table(value, _is_number),
        "an object of numbers by the names of modules",
    ),
    "target_parameters": (None, _is_list_of_names, "a list of names, or null"),
}


@dataclass(frozen=True)
class PeftSettings:
    """What an adapter_config.json says, by the names of peft. Modules are named as in the model
    that the adapter was trained on, as "model.layers.0.self_attn.q_proj"."""

    path: Path
    task: str | None
    base: str | None
    ranks: frozenset[int]
    alpha: float
    alphas: Mapping[str, float]
    rslora: bool
    dropout: float
    parameters: tuple[str, ...]
    # Ends of the names of modules that are all adapted; none where other keys make exceptions.
    targets: tuple[str, ...]

    def scales(self, ranks: Mapping[str, int]) -> dict[str, float]:
        """alpha / rank of each module with this rank, or alpha / sqrt(rank) where the adapter is
        rank-stabilized (arXiv:2312.03732)."""
        deadline = time.monotonic() + FITTING_SECONDS
        scales = {}
        for module, rank in ranks.items():
            alpha = next(
                (value for key, value in self.alphas.items() if self._fits(key, module, deadline)),
                self.alpha,
            )
            scales[module] = alpha / (math.sqrt(rank) if self.rslora else rank)
        return scales

    def _fits(self, key: str, module: str, deadline: float) -> bool:
        """Whether a key of alpha_pattern, a regular expression, is a module or its end."""
        seconds = max(deadline - time.monotonic(), 1e-3)
        try:
            return bool(regex.fullmatch(rf"(.*\.)?({key})", module, timeout=seconds))
        except TimeoutError:
            reason = f"takes longer than {FITTING_SECONDS:g} s; write the names of modules"
        except RecursionError:
            reason = "is nested too deeply"
        except (regex.error, OverflowError, MemoryError) as error:
            reason = f"is no regular expression ({error})"
        raise ConfigError(f"{self.path}: alpha_pattern: {key[:80]!r} {reason}.")

    def is_target_parameter(self, parameter: str) -> bool:
        """Whether target_parameters names a parameter: it is one of them, or ends with one."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.parameters)


def read_settings(directory: Path) -> PeftSettings:
    """The settings of an adapter. ConfigError for an option that is not computed here, by name."""
    path = directory / ADAPTER_CONFIG
    values = read_object(path, "download it again")

    def refused(key: str, allowed: str) -> ConfigError:
        value = json.dumps(values.get(key))[:80]
        return ConfigError(f"{path}: {key}={value} is not supported; supported: {allowed}.")

    keys = {}
    for key, (default, is_valid, words) in READ_KEYS.items():
        keys[key] = values.get(key, default)
        if not is_valid(keys[key]):
            raise refused(key, words)
    if values.get("bias", "none") not in ("none", None):
        raise refused("bias", '"none"')
    supported = {*READ_KEYS, *NEUTRAL_KEYS.split()}
    for key, value in values.items():
        if key not in supported and value not in (None, False, {}, []):
            raise refused(key, "false" if value is True else "null")
    initial = str(values.get("init_lora_weights", True)).lower()
    if initial.startswith(CHANGE_THE_BASE):
        raise ConfigError(
            f"{path}: init_lora_weights={initial!r} changes the weights of the base as well, so the"
            " saved tensors alone do not give the model. Save it from peft as a plain adapter:"
            " save_pretrained(..., path_initial_model_for_weight_conversion=...), or the whole"
            " model after merge_and_unload()."
        )
    targets = values.get("target_modules")
    exceptions = values.get("exclude_modules") or values.get("layers_to_transform") is not None
    if exceptions or not isinstance(targets, list):
        targets = []
    return PeftSettings(
        path=path,
        task=keys["task_type"],
        base=keys["base_model_name_or_path"],
        ranks=frozenset([keys["r"], *(keys["rank_pattern"] or {}).values()]),
        alpha=keys["lora_alpha"],
        alphas=keys["alpha_pattern"] or {},
        rslora=bool(keys["use_rslora"]),
        dropout=keys["lora_dropout"],
        parameters=tuple(keys["target_parameters"] or ()),
        targets=tuple(targets),
    )


def base_of(directory: Path, base: str | Path | None = None) -> Path:
    """The directory of the model that an adapter is for: `base` if it is given, else the one that
    adapter_config.json names, relative to the current directory or to the adapter's."""
    name = str(base) if base is not None else read_settings(directory).base
    remedy = (
        f"name its directory, as in jf.load({str(directory)!r}, base=PATH), or as"
        f' "base_model_name_or_path" in {directory / ADAPTER_CONFIG}.'
    )
    if not name:
        raise ConfigError(f"{directory} names no base model: {remedy}")
    candidates = [located(name)]
    if base is None:
        candidates.append(directory / name)
    for candidate in candidates:
        if candidate.is_dir() and is_adapter(candidate):
            raise ConfigError(
                f"the base of {directory}, {candidate}, is an adapter itself: merge that one first"
                f" (jaxformer convert {candidate} MERGED --merge), and {remedy}"
            )
        if candidate.is_dir():
            return candidate
    download = ""
    if base is None and HUB_ID.fullmatch(name):
        download = f"download it (hf download {name} --local-dir PATH) and "
    raise ConfigError(
        f"the base model of {directory}, {name!r}, is no directory here: {download}{remedy}"
    )
