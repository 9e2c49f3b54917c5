"""The architectures of Hugging Face that are read and written, and which one a model is."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer.arrays.params import map_specs, rows
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import flat, with_settings
from jaxformer.files import ConfigError, first_of
from jaxformer.interop import encoder_decoders, encoders, experts, gpt, hybrids, llama
from jaxformer.interop.family import Family
from jaxformer.interop.fields import value_of, with_factors
from jaxformer.models.transformer import forward
from jaxformer.models.transformer import specs as model_specs

# Every family that these files define, in this order: a new one is listed nowhere else. The first
# that is exactly a config is written, so the plainer one of two relatives is defined first.
HF_FAMILIES: list[Family] = []
ARCHITECTURES: dict[str, Family] = {}
BASES: dict[str, str] = {}  # the first architecture, by the classes without a head
for _file in (llama, gpt, experts, hybrids, encoders, encoder_decoders):
    for _family in vars(_file).values():
        if isinstance(_family, Family):
            HF_FAMILIES.append(_family)
            ARCHITECTURES |= dict.fromkeys(_family.architectures, _family)
            BASES |= dict.fromkeys(_family.bases, next(iter(_family.architectures)))
OBSTACLES_SHOWN = 6
# Settings of configs that are compared: how a model is computed and trained, whatever it computes.
COMPUTATION: Mapping[str, Any] = {
    "dropout": 0.0,
    "attention.dropout": "auto",
    "init": "gpt2",
    "dtype": "float32",
    "exact": False,
    "layer_loop": "scan",  # which is traced once, however many layers there are
    "remat": "none",
    "attention.kernel": "xla",
    "experts.kernel": "xla",
}


def read_architecture(path: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
    """Return the architecture as which a model is read, from the keys of its config.json."""
    model_type = values.get("model_type")
    listed = values.get("architectures") or []
    of_type = [name for name, family in ARCHITECTURES.items() if family.model_type == model_type]
    names = []
    if isinstance(listed, list):
        names = [BASES.get(str(name), str(name)) for name in listed]
    if not listed and len(of_type) == 1:
        names = of_type
    for name in names:
        # The tensors of near relatives, such as Gemma and Llama, have the same names and shapes, so
        # nothing later would notice that a model is computed as another.
        if name in ARCHITECTURES and model_type in (None, ARCHITECTURES[name].model_type):
            return ARCHITECTURES[name], name
    if of_type:
        allowed = f"{model_type} has {', '.join(of_type)}"
    else:
        types = (f"{row.model_type} ({next(iter(row.architectures))})" for row in HF_FAMILIES)
        allowed = f"supported model types are {', '.join(types)}"
    raise ConfigError(
        f"{path} has model_type={json.dumps(model_type)} and"
        f" architectures={json.dumps(listed)[:200]}, which are no model type that is supported and"
        f" a list with a class of it: {allowed}. Download config.json again if it was edited."
    )


@functools.lru_cache(maxsize=8)
def _program(config: ModelConfig, length: int) -> str:
    """Return the text of the programs of the logits, of rows of two tokens and of `length`: windows
    show in long ones, and LongRoPE has other factors in short ones."""
    specs = model_specs(config)
    params = map_specs(lambda path, spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)
    texts = []
    for tokens in (2, length):
        ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
        inputs = {"segment_ids": ids}
        if config.family == "encoder_decoder":
            inputs |= {"source": ids, "source_segment_ids": ids}
        # Of no mesh, whichever the caller has set.
        with jax.set_mesh(Mesh(np.empty((), object), ())):
            lowered = jax.jit(forward, static_argnums=1).lower(params, config, ids, **inputs)
        texts.append(lowered.as_text())
    return "".join(texts)


def is_same_function(config: ModelConfig, other: ModelConfig) -> bool:
    """Return whether JAX makes the same program of the logits of two configs, so that no list has
    to say which fields matter beside which others. That takes a tenth of a second, and ten where
    there are hundreds of experts."""
    length = config.max_length
    config = _of_logits(config)
    other = _of_logits(other)
    if config == other:
        return True
    # Shapes take a millisecond, and programs a hundred of them.
    if _shapes(config) != _shapes(other):
        return False
    return _program(config, length) == _program(other, length)


def _of_logits(config: ModelConfig) -> ModelConfig:
    return with_settings(with_factors(config), COMPUTATION)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {path: spec.shape for path, spec in rows(model_specs(config)).items()}


def differences(config: ModelConfig, stated: ModelConfig) -> list[str]:
    """Return the fields in which a config that is another function than that of a config.json
    differs from it, as "model.activation='relu2' (there 'swiglu')"."""
    if is_same_function(config, stated):
        return []
    config = _of_logits(config)
    stated = _of_logits(stated)
    fields = []
    for name in flat(config):
        value = value_of(config, name)
        there = value_of(stated, name)
        if value != there:
            fields.append(f"model.{name}={value!r} (there {there!r})")
    return fields


def find_architecture(config: ModelConfig, architecture: str | None = None) -> tuple[Family, str]:
    """Return the first architecture that is exactly this config, or the one named: by what its
    config.json says when it is read again."""
    candidates = ARCHITECTURES
    if architecture is not None:
        if architecture not in ARCHITECTURES:
            raise ConfigError(
                f"architecture={architecture!r} is not one of {', '.join(ARCHITECTURES)}."
            )
        candidates = {architecture: ARCHITECTURES[architecture]}
    for name, family in candidates.items():
        try:
            obstacles = differences(config, family.read_again(config, name))
        except ConfigError as error:
            obstacles = [str(error)]
        obstacles = obstacles or [f"no tensor for {path}" for path in family.left_out(config)]
        if not obstacles:
            return family, name
    if architecture is None:
        raise ConfigError(
            "no Hugging Face architecture is exactly this model: name one, as in"
            ' jf.save_pretrained(..., architecture="LlamaForCausalLM") or --architecture, to see'
            " what it lacks."
        )
    raise ConfigError(
        f"{architecture} is not exactly this model: {first_of(obstacles, OBSTACLES_SHOWN, ', ')}."
    )
