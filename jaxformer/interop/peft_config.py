"""The adapter_config.json of Hugging Face's peft (LoRA, arXiv:2106.09685): which modules it adapts,
with which rank and scale, and over which model."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import regex

from jaxformer.files import ConfigError, located, read_object

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The heads that peft saves whole with these two tasks, whatever modules_to_save says.
TASKS_WITH_HEAD = {"SEQ_CLS": "classes", "TOKEN_CLS": "tags"}
HEAD_MODULES = ("classifier", "score")
# Keys that are read, and keys that change nothing in what an adapter computes once it is saved.
READ_KEYS = """
peft_type task_type base_model_name_or_path r lora_alpha lora_dropout rank_pattern alpha_pattern
use_rslora target_modules target_parameters exclude_modules modules_to_save layers_to_transform
layers_pattern bias init_lora_weights
"""
UNREAD_KEYS = """
inference_mode fan_in_fan_out peft_version auto_mapping revision runtime_config megatron_core
qalora_group_size loftq_config eva_config corda_config lora_ga_config ensure_weight_tying
"""
# Initial values for which peft changes the weights of the base too, each time that it loads it.
CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# The regular expression of each key, with {} for what the file says. That of a layers_pattern has
# the number of a layer as its first group.
EXPRESSIONS = {
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "layers_pattern": r"(?:.*?\.)?{}\.(\d+)\.",
    "target_modules": "{}",
    "exclude_modules": "{}",
}
WHOLE_NAME = ("target_modules", "exclude_modules")  # which have to fit the whole name of a module
MATCH_SECONDS = 1.0  # for one expression and one name; those of a stranger may never end
WRITTEN_SHOWN = 80  # characters of an expression in a message

Number = TypeVar("Number", int, float)


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds an adapter of peft."""
    return (located(path) / ADAPTER_CONFIG).is_file()


@dataclass(frozen=True)
class PeftSettings:
    """What an adapter_config.json says, by the names of peft. Modules are named as in the model
    that the adapter was trained on, as "model.layers.0.self_attn.q_proj"."""

    path: Path
    task: str | None
    base: str | None
    rank: int
    alpha: float
    dropout: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...] | None
    parameters: tuple[str, ...]
    excluded: str | tuple[str, ...]
    saved: tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]

    @property
    def all_linear(self) -> bool:
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"

    def is_target_parameter(self, parameter: str) -> bool:
        """Whether target_parameters names a parameter: it is one of them, or ends with one."""
        return any(f".{parameter}".endswith(f".{name}") for name in self.parameters)

    def is_saved(self, module: str) -> bool:
        """Whether a module is saved whole: it, or one that contains it, is in modules_to_save."""
        names = module.split(".")
        around = [".".join(names[:count]) for count in range(1, len(names) + 1)]
        return any(name.endswith(saved) for name in around for saved in self.saved)

    def rank_of(self, module: str) -> int:
        return self._value("rank_pattern", self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) where it is rank-stabilized (arXiv:2312.03732)."""
        rank = self.rank_of(module)
        alpha = self._value("alpha_pattern", self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def is_target(self, module: str, in_all_linear: bool) -> bool | None:
        """Whether the config names a module to be adapted; None where it names none at all.

        `in_all_linear`: whether it is a linear layer and not the output layer, as "all-linear".
        """
        if self.targets is None:
            return None
        if self.is_saved(module) or self._fits("exclude_modules", self.excluded, module):
            return False
        if self.all_linear:
            return in_all_linear
        fits = self._fits("target_modules", self.targets, module)
        # layers_to_transform selects among modules by the ends of their names.
        exact = isinstance(self.targets, str) or module in self.targets
        return fits and (exact or self._is_layer(module))

    def _fits(self, key: str, names: str | Sequence[str], module: str) -> bool:
        """Whether an expression fits a module, or one of several names is the module or its end
        from a dot on."""
        if isinstance(names, str):
            return self._match(key, names, module) is not None
        return any(f".{module}".endswith(f".{name}") for name in names)

    def _is_layer(self, module: str) -> bool:
        """Whether a module is in one of layers_to_transform: its first number is that of its
        layer. Raises ConfigError for a layers_pattern whose own group takes the number's place."""
        if not self.layers:
            return True
        if not self.layers_pattern:
            match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
            return match is not None and int(match[1]) in self.layers
        matches = (self._match("layers_pattern", name, module) for name in self.layers_pattern)
        number = next((match[1] for match in matches if match), "")
        if number is None or not re.fullmatch(r"\d*", number):
            raise ConfigError(
                f"{self.path}: layers_pattern={[*self.layers_pattern]} has a group (...):"
                " write it as (?:...)."
            )
        return bool(number) and int(number) in self.layers

    def _value(
        self, key: str, values: Mapping[str, Number], module: str, default: Number
    ) -> Number:
        """The value of the first expression that fits a module, the default where none does."""
        for name, value in values.items():
            if self._match(key, name, module):
                return value
        return default

    def _match(self, key: str, written: str, module: str) -> Any:
        """The match of the expression that stands at a key and the name of a module, or None."""
        cut = written[:WRITTEN_SHOWN]
        shown = repr(cut if cut == written else f"{cut}...")
        try:
            compiled = regex.compile(EXPRESSIONS[key].format(written))
            fit = compiled.fullmatch if key in WHOLE_NAME else compiled.match
            return fit(module, timeout=MATCH_SECONDS)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"{self.path}: {key}: {shown} is no regular expression ({error})."
            ) from None
        except (TimeoutError, MemoryError):
            raise ConfigError(
                f"{self.path}: {key}: {shown} takes more than {MATCH_SECONDS:g} s or all memory to"
                f" fit to {module}: write the names of the modules there."
            ) from None


def read_settings(directory: Path) -> PeftSettings:
    """The settings of an adapter. Raises ConfigError for a value of a wrong type, and by name for
    every option that is not computed here."""
    path = directory / ADAPTER_CONFIG
    values = read_object(path, "download it again")
    _refuse_options(path, values)
    get = _PeftValues(path, values)
    saved = get.names("modules_to_save")
    task = get.one_of("task_type", str, "the name of a task, or null")
    settings = PeftSettings(
        path=path,
        task=task,
        base=get.one_of("base_model_name_or_path", str, "a directory, or the id of a model"),
        rank=get.number("r", 8, integer=True),
        alpha=get.number("lora_alpha", 8),
        dropout=get.number("lora_dropout", 0.0),
        rslora=get.one_of("use_rslora", bool, "true or false") or False,
        ranks=get.numbers("rank_pattern", integer=True),
        alphas=get.numbers("alpha_pattern"),
        targets=get.targets("target_modules"),
        parameters=get.names("target_parameters"),
        excluded=get.targets("exclude_modules") or (),
        saved=saved + (HEAD_MODULES if task in TASKS_WITH_HEAD else ()),
        layers=get.several("layers_to_transform", int, "the numbers of layers"),
        layers_pattern=get.names("layers_pattern"),
    )
    if not 0 <= settings.dropout < 1:
        raise get.wrong("lora_dropout", "at least 0 and below 1")
    return settings


def _refuse_options(path: Path, values: Mapping[str, Any]) -> None:
    """ConfigError for what is no LoRA, and for an option of LoRA that changes what it computes."""

    def refused(key: str, allowed: str) -> ConfigError:
        value = json.dumps(values.get(key))[:80]
        return ConfigError(f"{path}: {key}={value} is not supported; supported: {allowed}.")

    if values.get("peft_type") != "LORA":
        raise refused("peft_type", '"LORA"')
    if values.get("bias", "none") not in ("none", None):
        raise refused("bias", '"none"')
    supported = {*READ_KEYS.split(), *UNREAD_KEYS.split()}
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


class _PeftValues:
    """Reads values of one adapter_config.json, each of its type. Raises ConfigError."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def wrong(self, key: str, allowed: str) -> ConfigError:
        value = json.dumps(self.values.get(key))[:80]
        return ConfigError(f"{self.path}: {key}={value} must be {allowed}.")

    def one_of(self, key: str, kind: type, allowed: str) -> Any:
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise self.wrong(key, allowed)
        return value

    def number(self, key: str, default: float, integer: bool = False) -> Any:
        value = self.values.get(key, default)
        if not _is_number(value, integer):
            raise self.wrong(key, "a whole number of at least 1" if integer else "a number")
        return value

    def numbers(self, key: str, integer: bool = False) -> dict[str, Any]:
        """A number for each expression."""
        table = self.values.get(key) or {}
        if not isinstance(table, dict) or not all(_is_number(v, integer) for v in table.values()):
            numbers = "whole numbers of at least 1" if integer else "numbers"
            raise self.wrong(key, f"an object of {numbers} by the names of modules")
        return table

    def several(self, key: str, kind: type, allowed: str) -> tuple[Any, ...] | None:
        """Values of one type, of which one may stand alone; None where the key is null or empty."""
        value = self.values.get(key)
        if value is None or value == "":
            return None
        values = [value] if isinstance(value, kind) else value
        if not isinstance(values, list) or not all(type(one) is kind for one in values):
            raise self.wrong(key, f"{allowed}, or null")
        return tuple(values)

    def names(self, key: str) -> tuple[str, ...]:
        return self.several(key, str, "a list of names") or ()

    def targets(self, key: str) -> str | tuple[str, ...] | None:
        """One expression, or names of modules; None where the key is not given."""
        value = self.values.get(key)
        return value if isinstance(value, str) else self.several(key, str, "a list of names")


def _is_number(value: Any, integer: bool) -> bool:
    if integer:
        return type(value) is int and value >= 1
    # Of any size, and not NaN.
    return type(value) in (int, float) and abs(value) < math.inf


def base_of(directory: Path, base: str | Path | None = None) -> Path:
    """The directory of the model that an adapter is for: `base` if it is given, else the one that
    adapter_config.json names, relative to the current directory or to the adapter's.

    Raises ConfigError where there is none, or where it holds an adapter itself.
    """
    name = str(base) if base is not None else read_settings(directory).base
    call = f"jf.load({str(directory)!r}, base=PATH)"
    key = f'"base_model_name_or_path" in {directory / ADAPTER_CONFIG}'
    if not name:
        raise ConfigError(f"{directory} names no base model: name one, as in {call}, or as {key}")
    candidates = [located(name)] + ([] if base is not None else [directory / name])
    base_directory = next((path for path in candidates if path.is_dir()), None)
    if base_directory is None and base is None and HUB_ID.fullmatch(name):
        raise ConfigError(
            f"the base model of {directory}, {name!r}, is no directory here: download it (hf"
            f" download {name} --local-dir PATH) and name its directory, as in {call}, or as {key}."
        )
    if base_directory is None:
        raise ConfigError(
            f"the base model of {directory}, {name!r}, is no directory here: name its directory, as"
            f" in {call}, or as {key}."
        )
    if is_adapter(base_directory):
        raise ConfigError(
            f"the base of {directory}, {base_directory}, is an adapter itself: merge that one first"
            f" (jaxformer convert {base_directory} MERGED --merge), and name the result, as in"
            f" {call}."
        )
    return base_directory
