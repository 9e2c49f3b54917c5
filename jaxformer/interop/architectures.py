"""The architectures of Hugging Face that are read and written, and which one a model is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError, first_of
from jaxformer.interop.albert import ALBERT
from jaxformer.interop.bart import BART, M2M100, MARIAN, MBART, PEGASUS
from jaxformer.interop.bert import BERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from jaxformer.interop.clip import CLIP_TEXT
from jaxformer.interop.cohere import COHERE, GLM4
from jaxformer.interop.deberta import DEBERTA
from jaxformer.interop.deepseek import DEEPSEEK_V3
from jaxformer.interop.electra import ELECTRA
from jaxformer.interop.falcon import FALCON, MPT
from jaxformer.interop.family import Family
from jaxformer.interop.fields import IgnoredKeys
from jaxformer.interop.gemma import GEMMA1, GEMMA2, GEMMA3
from jaxformer.interop.gpt import BLOOM, GPT2, GPT_NEO, GPT_NEOX, GPTJ, OPT
from jaxformer.interop.hf_config import NEUTRAL, HFConfig
from jaxformer.interop.llama import (
    GRANITE,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)
from jaxformer.interop.mixtral import EXPERT_FAMILIES
from jaxformer.interop.modernbert import MODERNBERT
from jaxformer.interop.mpnet import MPNET
from jaxformer.interop.nomic_bert import NOMIC_BERT
from jaxformer.interop.t5 import MT5, MT5_ENCODER, T5, T5_ENCODER, UMT5, UMT5_ENCODER
from jaxformer.interop.t5gemma import T5GEMMA

# The first that is exactly a config is written, so the plainer ones come first.
DECODERS = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA1, GEMMA2, GEMMA3, OLMO2, GPT2, GPT_NEOX, BLOOM, PHI3),
    *(MINISTRAL, MINISTRAL3, SMOLLM3, OLMO3, GRANITE, STABLELM),
    *(GPTJ, GPT_NEO, OPT, COHERE, GLM4, FALCON, MPT, STARCODER2),
)
WITH_EXPERTS = (*EXPERT_FAMILIES, DEEPSEEK_V3)
# DistilBERT is a BERT without token types.
ENCODERS = (
    DISTILBERT,
    BERT,
    ROBERTA,
    XLM_ROBERTA,
    ELECTRA,
    ALBERT,
    MODERNBERT,
    MPNET,
    NOMIC_BERT,
    DEBERTA,
)
TEXT_ENCODERS = (CLIP_TEXT, T5_ENCODER, MT5_ENCODER, UMT5_ENCODER)
WITH_SOURCE = (T5, MT5, UMT5, BART, MARIAN, PEGASUS, MBART, M2M100, T5GEMMA)
HF_FAMILIES: tuple[Family, ...] = (
    *(*DECODERS, *WITH_EXPERTS),
    *(*ENCODERS, *TEXT_ENCODERS, *WITH_SOURCE),
)
ARCHITECTURES = {name: family for family in HF_FAMILIES for name in family.architectures}
BASES = {name: next(iter(family.architectures)) for family in HF_FAMILIES for name in family.bases}
NEAREST_SHOWN, OBSTACLES_SHOWN = 3, 6
KEYS_SHOWN, VALUE_SHOWN = 12, 60  # keys of a config.json, and characters of a value


def stated_architecture(path: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
    """The architecture as which a model is read, from the keys of its config.json. Raises
    ConfigError where there is none, or model_type is that of another one."""
    model_type, stated = values.get("model_type"), values.get("architectures") or []
    if not isinstance(stated, list) or not all(isinstance(name, str) for name in stated):
        raise ConfigError(
            f"{path}: architectures is {json.dumps(stated)[:80]}, and must be a list of names:"
            " download the file again."
        )
    of_type = _of_type(model_type)
    supported = [
        BASES.get(name, name)
        for name in stated or of_type
        if name in ARCHITECTURES or name in BASES
    ]
    if not supported or (len(supported) > 1 and not stated):
        raise _unsupported(path, values, stated)
    family = ARCHITECTURES[supported[0]]
    if model_type not in (None, family.model_type):
        # The tensors of near relatives, such as Gemma and Llama, have the same names and shapes, so
        # nothing later would notice.
        raise ConfigError(
            f"{path} has model_type={json.dumps(model_type)} and"
            f" architectures={json.dumps(stated)}, a class of"
            f" model_type={json.dumps(family.model_type)}: the model would be computed as another"
            f" than it is. Download config.json again, without edits; {_supported(model_type)}."
        )
    return family, supported[0]


def _of_type(model_type: object) -> list[str]:
    """The supported architectures of a model_type."""
    return [name for name, family in ARCHITECTURES.items() if family.model_type == model_type]


def _supported(model_type: object) -> str:
    """The architectures of a model_type, or else the supported model types."""
    of_type = _of_type(model_type)
    if of_type:
        return f"{model_type} has {', '.join(of_type)}"
    types = [f"{row.model_type} ({next(iter(row.architectures))})" for row in HF_FAMILIES]
    return f"supported model types are {', '.join(types)}"


def _unsupported(path: Path, values: Mapping[str, Any], stated: list[str]) -> ConfigError:
    """The error for a config.json that states no supported architecture, or that states none and
    whose model_type has several."""
    model_type = values.get("model_type")
    supported, has_type = _supported(model_type), bool(_of_type(model_type))
    nearest = "" if has_type else _nearest(values)
    if stated:
        remedy = (
            " If transformers loads the directory as one of these, what that model's"
            " save_pretrained writes is read here."
        )
        return ConfigError(
            f"{path} has architectures={json.dumps(stated)}, which is not a supported architecture:"
            f" {supported}.{remedy if has_type else nearest}"
        )
    remedy = ' Name the one that the model is in "architectures".'
    return ConfigError(
        f'{path} has no "architectures", and model_type={json.dumps(model_type)}, which is not a'
        f" supported architecture: {supported}.{remedy if has_type else nearest}"
    )


def _nearest(values: Mapping[str, Any]) -> str:
    """A sentence on the family that leaves the fewest keys of a config.json unread, and of those
    reads the most; empty where none reads any."""
    readings = [(family, *_read_keys(family, values)) for family in HF_FAMILIES]
    family, keys_read, unread = min(readings, key=lambda reading: (len(reading[2]), -reading[1]))
    name = next(iter(family.architectures))
    if not keys_read:
        return ""
    if not unread:
        return (
            f" The nearest is {family.model_type} ({name}), which has all keys of this file; the"
            " model may compute otherwise all the same."
        )
    return (
        f" The nearest is {family.model_type} ({name}); what it does not have or not with this"
        f" value: {first_of(unread, KEYS_SHOWN, between=', ')}."
    )


def _read_keys(family: Family, values: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many keys of a config.json a family reads, and the others with their values, those whose
    value it refuses first."""
    hf, refused = HFConfig(values, None), list[str]()
    # A key that is ignored says nothing of the family.
    for row in (row for row in family.fields if not isinstance(row, IgnoredKeys)):
        before = {*hf.keys_read}
        try:
            row.read(hf)
        except (ValueError, TypeError, AttributeError, ArithmeticError):  # as of a wrong type
            refused += sorted((hf.keys_read - before) & values.keys())
    unread = [*dict.fromkeys([*refused, *hf.unknown()])]
    lines = [f"{key}={json.dumps(values[key], default=str)[:VALUE_SHOWN]}" for key in unread]
    stated = values.keys() - {*NEUTRAL.split(), *refused}
    return len(hf.keys_read & stated), lines


def architecture_of(config: ModelConfig, architecture: str | None = None) -> tuple[Family, str]:
    """The first architecture that is exactly this config, or the one named. Raises ConfigError
    where none is."""
    if architecture is not None and architecture not in ARCHITECTURES:
        raise ConfigError(
            f"architecture={architecture!r} is not one of {', '.join(ARCHITECTURES)}."
        )
    obstacles, refusals = dict[str, list[str]](), list[str]()
    for name in ARCHITECTURES if architecture is None else [architecture]:
        try:
            obstacles[name] = ARCHITECTURES[name].obstacles(config, name)
        except ConfigError as error:
            refusals.append(f"{name}: {error}")
            continue
        if not obstacles[name]:
            return ARCHITECTURES[name], name
    nearest = sorted(obstacles, key=lambda name: _distance(obstacles[name]))
    lines = [f"{name}: {', '.join(obstacles[name][:OBSTACLES_SHOWN])}" for name in nearest]
    # How far an architecture is that cannot state the model at all is not known: these are last.
    lines = [*lines, *refusals][:NEAREST_SHOWN]
    raise ConfigError(
        "no Hugging Face architecture is exactly this model; the nearest, and how they differ:\n  "
        f"{first_of(lines)}"
    )


def _distance(obstacles: list[str]) -> tuple[int, int]:
    """How far an architecture is from a config: another family, head or sublayer first, then
    the count."""
    kinds = ("model.family", "model.head=", "model.feed_forward", "model.mixer")
    return sum(any(line.startswith(kind) for line in obstacles) for kind in kinds), len(obstacles)
