"""The architectures of Hugging Face that are read and written, and which one a model is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.interop.bart import BART
from jaxformer.interop.bert import BERT
from jaxformer.interop.bloom import BLOOM
from jaxformer.interop.family import Family
from jaxformer.interop.gemma import GEMMA2, GEMMA3
from jaxformer.interop.gpt2 import GPT2
from jaxformer.interop.gpt_neox import GPT_NEOX
from jaxformer.interop.llama import LLAMA
from jaxformer.interop.marian import MARIAN
from jaxformer.interop.mistral import MISTRAL
from jaxformer.interop.olmo2 import OLMO2
from jaxformer.interop.qwen import QWEN2, QWEN3
from jaxformer.interop.roberta import ROBERTA
from jaxformer.interop.t5 import T5

# The first that is exactly a config is written, so the plainer ones come first.
DECODERS = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, GPT2, GPT_NEOX, BLOOM)
HF_FAMILIES: tuple[Family, ...] = (*DECODERS, BERT, ROBERTA, T5, BART, MARIAN)
ARCHITECTURES = {name: family for family in HF_FAMILIES for name in family.architectures}
BASES = {name: next(iter(family.architectures)) for family in HF_FAMILIES for name in family.bases}
NEAREST_SHOWN, OBSTACLES_SHOWN = 3, 6


def stated_architecture(path: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
    """The architecture as which a model is read, from the keys of its config.json. Raises
    ConfigError where there is none, or model_type is that of another one."""
    kind, named = values.get("model_type"), values.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        told = "and must be a list of names: download the file again"
        raise ConfigError(f"{path}: architectures is {json.dumps(named)[:80]}, {told}.")
    alike = [name for name, family in ARCHITECTURES.items() if family.model_type == kind]
    known = [BASES.get(name, name) for name in named or alike if name in (*ARCHITECTURES, *BASES)]
    if known and (named or len(known) == 1):
        family = ARCHITECTURES[known[0]]
        if kind not in (None, family.model_type):
            raise ConfigError(_disagreement(path, kind, named, family.model_type))
        return family, known[0]
    if named:
        stated, way = f"architectures={json.dumps(named)}", ""
        if alike:
            way = (
                " If transformers loads the directory as one of these, what that model's"
                " save_pretrained writes is read here."
            )
    else:
        stated = f'no "architectures", and model_type={json.dumps(kind)}'
        way = ' Name the one that the model is in "architectures".' if alike else ""
    raise ConfigError(
        f"{path} has {stated}, which is not a supported architecture: {_supported(kind)}.{way}"
    )


def _supported(kind: Any) -> str:
    """The architectures of a model_type, or else the supported model types."""
    alike = [name for name, family in ARCHITECTURES.items() if family.model_type == kind]
    if alike:
        return f"{kind} has {', '.join(alike)}"
    kinds = [f"{row.model_type} ({next(iter(row.architectures))})" for row in HF_FAMILIES]
    return f"supported model types are {', '.join(kinds)}"


def _disagreement(path: Path, kind: Any, named: list[str], expected: str) -> str:
    """What is said where a config.json names a class of another model_type than its own. The
    tensors of near relatives, such as Gemma and Llama, have the same names and shapes, so nothing
    later would notice."""
    return (
        f"{path} has model_type={json.dumps(kind)} and architectures={json.dumps(named)}, a class"
        f" of model_type={json.dumps(expected)}: the model would be computed as another than it"
        f" is. Download config.json again, without edits; {_supported(kind)}."
    )


def architecture_of(config: ModelConfig, wanted: str | None = None) -> tuple[Family, str]:
    """The first architecture that is exactly this config, or the `wanted` one. Raises ConfigError
    where none is."""
    if wanted is not None and wanted not in ARCHITECTURES:
        raise ConfigError(f"architecture={wanted!r} is not one of {', '.join(ARCHITECTURES)}.")
    obstacles: dict[str, list[str]] = {}
    for name in ARCHITECTURES if wanted is None else [wanted]:
        obstacles[name] = ARCHITECTURES[name].obstacles(config, name)
        if not obstacles[name]:
            return ARCHITECTURES[name], name
    nearest = sorted(obstacles, key=lambda name: _distance(obstacles[name]))[:NEAREST_SHOWN]
    lines = [f"{name}: {', '.join(obstacles[name][:OBSTACLES_SHOWN])}" for name in nearest]
    raise ConfigError(
        "no Hugging Face architecture is exactly this model; the nearest, and how they differ:\n  "
        + "\n  ".join(lines)
    )


def _distance(obstacles: list[str]) -> tuple[int, int]:
    """How far an architecture is from a config: another family or head first, then the count."""
    kinds = ("model.family", "model.head=")
    return sum(any(line.startswith(kind) for line in obstacles) for kind in kinds), len(obstacles)
