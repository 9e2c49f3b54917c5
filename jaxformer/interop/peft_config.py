"""The adapter_config.json of Hugging Face's peft (LoRA, arXiv:2106.09685): which modules it adapts,
with which rank and scale, and over which model."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.files import ConfigError, read_object
from jaxformer.interop.expressions import Expression, Fits, fits

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The heads that peft saves whole with these two tasks, whatever modules_to_save says.
TASKS_WITH_HEAD = {"SEQ_CLS": "classes", "TOKEN_CLS": "tags"}
HEAD_MODULES = ("classifier", "score")
# Keys that are read, and keys that change nothing in what an adapter computes once it is saved.
READ_KEYS = """
peft_type task_type base_model_name_or_path r lora_alpha lora_dropout rank_pattern alpha_pattern
use_rslora target_modules exclude_modules modules_to_save layers_to_transform layers_pattern bias
init_lora_weights
"""
UNREAD_KEYS = """
inference_mode fan_in_fan_out peft_version auto_mapping revision runtime_config megatron_core
qalora_group_size loftq_config eva_config corda_config lora_ga_config ensure_weight_tying
"""
# Initial values for which peft changes the weights of the base too, each time that it loads it.
CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Number = TypeVar("Number", int, float)


def is_adapter(path: str | Path) -> bool:
    """Whether a directory holds an adapter of peft."""
    return (Path(path) / ADAPTER_CONFIG).is_file()


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
    excluded: str | tuple[str, ...]
    saved: tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]

    def of_modules(self, modules: Sequence[str]) -> "ModuleSettings":
        """What the settings say of these modules, to which their regular expressions are fitted.
        Raises ConfigError for one that is none, or that takes too long."""
        expressions = [*map(_of_rank, self.ranks), *map(_of_alpha, self.alphas)]
        if isinstance(self.targets, str) and not self.all_linear:
            expressions.append(_of_targets(self.targets))
        if isinstance(self.excluded, str):
            expressions.append(_of_excluded(self.excluded))
        expressions += map(_of_layer, self.layers_pattern)
        return ModuleSettings(self, fits(expressions, modules, self.path))

    @property
    def all_linear(self) -> bool:
        return isinstance(self.targets, str) and self.targets.lower() == "all-linear"

    def is_saved(self, module: str) -> bool:
        """Whether a module is saved whole: it, or one that contains it, is in modules_to_save."""
        names = module.split(".")
        around = [".".join(names[:count]) for count in range(1, len(names) + 1)]
        return any(name.endswith(saved) for name in around for saved in self.saved)


@dataclass(frozen=True)
class ModuleSettings:
    """What settings say of single modules. `fitting` has the groups of each (expression, module)
    that fits."""

    settings: PeftSettings
    fitting: Fits

    def rank_of(self, module: str) -> int:
        settings = self.settings
        return self._first(map(_of_rank, settings.ranks), settings.ranks, module, settings.rank)

    def scale_of(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) where it is rank-stabilized (arXiv:2312.03732)."""
        settings, rank = self.settings, self.rank_of(module)
        alphas = settings.alphas
        alpha = self._first(map(_of_alpha, alphas), alphas, module, settings.alpha)
        return alpha / (math.sqrt(rank) if settings.rslora else rank)

    def is_target(self, module: str, in_all_linear: bool) -> bool | None:
        """Whether the config names a module to be adapted; None where it names none at all.

        `in_all_linear`: whether it is a linear layer and not the output layer, as "all-linear".
        """
        settings = self.settings
        if settings.targets is None:
            return None
        if settings.is_saved(module) or self._is_excluded(module):
            return False
        if settings.all_linear:
            return in_all_linear
        if isinstance(settings.targets, str):
            return (_of_targets(settings.targets), module) in self.fitting
        if module in settings.targets:
            return True
        return _is_end(settings.targets, module) and self._is_layer(module)

    def _is_excluded(self, module: str) -> bool:
        excluded = self.settings.excluded
        if isinstance(excluded, str):
            return (_of_excluded(excluded), module) in self.fitting
        return _is_end(excluded, module)

    def _is_layer(self, module: str) -> bool:
        """Whether a module is in one of layers_to_transform: its first number is that of its
        layer. Raises ConfigError for a layers_pattern whose own group takes the number's place."""
        settings = self.settings
        if not settings.layers:
            return True
        if not settings.layers_pattern:
            match = re.match(r".*?\.[^.]*\.(\d+)\.", module)
            return match is not None and int(match[1]) in settings.layers
        fitting = (self.fitting.get((_of_layer(name), module)) for name in settings.layers_pattern)
        number = next((groups[0] for groups in fitting if groups), "")
        if number is None or not re.fullmatch(r"\d*", number):
            raise ConfigError(
                f"{settings.path}: layers_pattern={[*settings.layers_pattern]} has a group (...):"
                " write it as (?:...)."
            )
        return bool(number) and int(number) in settings.layers

    def _first(
        self,
        expressions: Iterable[Expression],
        values: Mapping[str, Number],
        module: str,
        default: Number,
    ) -> Number:
        """The value of the first expression that fits a module, the default where none does."""
        pairs = zip(expressions, values.values(), strict=True)
        return next((value for one, value in pairs if (one, module) in self.fitting), default)


def _is_end(names: Sequence[str], module: str) -> bool:
    """Whether a name is a module, or its end from a dot on."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _of_rank(name: str) -> Expression:
    return Expression("rank_pattern", name, rf"(.*\.)?({name})$")


def _of_alpha(name: str) -> Expression:
    return Expression("alpha_pattern", name, rf"(.*\.)?({name})$")


def _of_targets(written: str) -> Expression:
    return Expression("target_modules", written, written, entire=True)


def _of_excluded(written: str) -> Expression:
    return Expression("exclude_modules", written, written, entire=True)


def _of_layer(name: str) -> Expression:
    """Whose first group is the number of a layer."""
    return Expression("layers_pattern", name, rf"(?:.*?\.)?{name}\.(\d+)\.")


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
        excluded=get.targets("exclude_modules") or (),
        saved=saved + (HEAD_MODULES if task in TASKS_WITH_HEAD else ()),
        layers=get.layers("layers_to_transform"),
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

    def layers(self, key: str) -> tuple[int, ...] | None:
        """The numbers of layers, of which one may stand alone; None where the key is null."""
        value = self.values.get(key)
        numbers = [value] if isinstance(value, int) else value
        if numbers is None:
            return None
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise self.wrong(key, "the numbers of layers, or null")
        return tuple(numbers)

    def names(self, key: str) -> tuple[str, ...]:
        value = self.values.get(key) or []
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "a list of names, or null")
        return tuple(value)

    def targets(self, key: str) -> str | tuple[str, ...] | None:
        """One expression, or names of modules; None where the key is not given."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        return self.names(key)


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
    candidates = [Path(name)] if base is not None else [Path(name), directory / name]
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
