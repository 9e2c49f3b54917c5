"""Adapters written in the format of Hugging Face's peft (LoRA)."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save as safetensors_bytes

from jaxformer.adapters.low_rank import LowRank
from jaxformer.arrays.params import Params, check_params, dotted, is_custom
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError, replacing, write_text
from jaxformer.interop.hf_config import check_dtype
from jaxformer.interop.peft_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    HEAD_MODULES,
    TASKS_WITH_HEAD,
)
from jaxformer.interop.peft_modules import (
    PREFIX,
    Layout,
    is_conv,
    join_parts,
    layout_of,
    part_names,
)
from jaxformer.interop.tensor_files import as_stored
from jaxformer.interop.tensor_table import Tensor, tensor_of
from jaxformer.models.transformer import specs as model_specs

TASKS = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}  # with a language head


class Part(NamedTuple):
    """A leaf's part of a module in one layer, float32: a [I..., R], b [R, O...] and its scale."""

    a: np.ndarray
    b: np.ndarray
    scale: float


class PeftModule(NamedTuple):
    """A module as peft has it: [R, inputs], [outputs, R], and alpha with scale = alpha / R."""

    tensor: Tensor
    first: np.ndarray
    second: np.ndarray
    alpha: float

    @property
    def rank(self) -> int:
        return len(self.first)


def save_adapter(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    base: str | Path = "",
    learned: tuple[str, ...] = (),
    architecture: str | None = None,
    dtype: str = "float32",
) -> list[Path]:
    """Writes the adapter of `params` (`jf.adapt`) for peft: adapter_config.json and
    adapter_model.safetensors, which peft.PeftModel.from_pretrained puts on the model of
    transformers. Returns their paths.

    Args:
      path: the directory.
      params: adapted; what is not adapted is taken to be the base's, and is not written.
      config: of the model.
      base: the directory or the hub id of the base, for base_model_name_or_path.
      learned: branches of `params` that learned beside the adapter, as "pooler", and are saved
        whole (modules_to_save). A head of classes or tags always is, as peft does.
      architecture: the class of transformers whose names are written; by default the first that is
        exactly `config`.
      dtype: of the tensors.

    The ranks are without the components that are zero in a and in b. Where transformers has
    queries, keys and values as one module, they have the same lora_A if they have the same a, and
    else one of the sum of their ranks. Raises ConfigError for params without an adapter, an
    embedding that is used in several places, and where no architecture is this config.
    """
    check_params(model_specs(config), params)
    check_dtype(dtype)
    directory, layout = Path(path), layout_of(config, architecture)
    if (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has the config.json of a model: choose another directory.")
    leaves = {dotted(at): leaf for at, leaf in jax.tree.leaves_with_path(params, is_leaf=is_custom)}
    modules = _modules_of(layout, leaves)
    whole = _whole_of(layout, leaves, learned)
    tensors = {PREFIX + name: tensor_of(tensor, leaves) for name, tensor in whole.items()}
    for name, module in modules.items():
        for end, value in zip(part_names(module.tensor), module[1:3], strict=True):
            tensors[f"{PREFIX}{name}.{end}"] = value
    written = {
        name: as_stored(name, value, jnp.dtype(dtype)) for name, value in sorted(tensors.items())
    }
    settings = _settings(config, layout, modules, whole)
    settings["base_model_name_or_path"] = str(base) or None
    settings["lora_dropout"] = max(
        leaf.dropout for leaf in leaves.values() if isinstance(leaf, LowRank)
    )
    with replacing(directory / ADAPTER_WEIGHTS) as file:
        file.write(safetensors_bytes(written, {"format": "pt"}))
    text = json.dumps(settings, indent=2, sort_keys=True)
    write_text(directory / ADAPTER_CONFIG, text + "\n")
    return [directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS]


def _modules_of(layout: Layout, leaves: Mapping[str, Any]) -> dict[str, PeftModule]:
    """The adapted modules by name. Raises ConfigError where there are none, or one that peft has
    not."""
    found, held = {}, {path: _host(leaf) for path, leaf in leaves.items()}
    for name, tensor in layout.modules.items():
        parts = [_part(held[path], tensor.layer) for path in tensor.paths]
        if not any(parts):
            continue
        if obstacle := layout.obstacle(tensor):
            raise ConfigError(
                f"the adapter of {tensor.paths[0]} cannot be written for peft: {obstacle}. Merge it"
                " (jf.merge) and save the whole model (jf.save_pretrained), or adapt other weights."
            )
        found[name] = _module_of(tensor, parts)
    if not found:
        raise ConfigError(
            "these params have no adapter: jf.adapt makes one, and jf.save_pretrained writes whole"
            " models."
        )
    return found


def _host(leaf: Any) -> tuple[np.ndarray, ...] | None:
    """a, b and scale of an adapted leaf, on the host in float32."""
    if not isinstance(leaf, LowRank):
        return None
    return tuple(np.asarray(part).astype(np.float32) for part in (leaf.a, leaf.b, leaf.scale))


def _part(held: tuple[np.ndarray, ...] | None, layer: int | None) -> Part | None:
    """A leaf's adapter in one layer; None where it has none."""
    if held is None:
        return None
    a, b, scale = held if layer is None else (part[layer] for part in held)
    return Part(a, b, float(scale)) if scale else None  # 0: a layer that the adapter leaves out


def _module_of(tensor: Tensor, parts: list[Part | None]) -> PeftModule:
    """The adapter of a module from those of its leaves, of which some may have none."""
    given = [part for part in parts if part]
    scale, outputs = given[0].scale, given[0].b.shape[1:]
    shared = all(np.array_equal(part.a, given[0].a) for part in given)
    if not shared:  # [a_q a_k a_v], and each b in the rows of its own a
        parts = [part and _trimmed(part) for part in parts]
        given = [part for part in parts if part]
    a = given[0].a if shared else np.concatenate([part.a for part in given], -1)
    blocks, at = [], 0
    for part in parts:
        block = np.zeros((a.shape[-1], *outputs), np.float32)
        if part:
            # One module has one scale: another leaf's goes into its b.
            block[at : at + len(part.b)] = part.b * np.float32(part.scale / scale)
            at += 0 if shared else len(part.b)
        blocks.append(block)
    first, second = join_parts(tensor, a, blocks)
    rank = _rank_of(first, second.T)
    first, second = first[:rank], np.ascontiguousarray(second[:, :rank])
    return PeftModule(tensor, first, second, _alpha_of(scale, rank))


def _trimmed(part: Part) -> Part:
    rank = _rank_of(np.moveaxis(part.a, -1, 0), part.b)
    return Part(part.a[..., :rank], part.b[:rank], part.scale)


def _rank_of(a: np.ndarray, b: np.ndarray) -> int:
    """The rank without the last components that are zero in both a [R, ...] and b [R, ...]; 1 at
    the least."""
    used = a.reshape(len(a), -1).any(1) | b.reshape(len(b), -1).any(1)
    return int(np.max(np.flatnonzero(used), initial=0)) + 1


def _alpha_of(scale: float, rank: int) -> float:
    """The alpha with the fewest digits for which alpha / rank is the float32 `scale`."""
    for digits in range(9):
        alpha = round(scale * rank, digits)
        if np.float32(alpha / rank) == np.float32(scale):
            return int(alpha) if alpha == int(alpha) else alpha
    return scale * rank


def _whole_of(
    layout: Layout, leaves: Mapping[str, Any], learned: tuple[str, ...]
) -> dict[str, Tensor]:
    """The tensors that are saved whole: those of the branches in `learned`, and of the module that
    peft takes for the head of a classifier. Raises ConfigError where peft cannot save them so."""
    asked = {
        name: tensor
        for name, tensor in layout.tensors.items()
        if any(path.split(".")[0] in learned for path in tensor.paths)
    }
    head = {n: t for n, t in layout.tensors.items() if n.split(".")[0] in HEAD_MODULES}
    if any(isinstance(leaves[path], LowRank) for t in head.values() for path in t.paths):
        head = {}  # adapted, and then not learned
    if layout.score and head and np.any(leaves["head.bias"]):
        raise ConfigError(
            "head.bias is not zero, and the class head of a decoder has no bias in transformers:"
            " set it to zero, or merge the adapter (jf.merge) and save the run."
        )
    found = head | asked
    for name, tensor in asked.items():
        module = name.rpartition(".")[0]
        parts = [n for n in (*layout.tensors, *layout.repeated) if n.startswith(f"{module}.")]
        if missing := sorted({*parts} - {*found}):
            raise ConfigError(
                f"learned={list(learned)} saves {name}, and peft saves whole modules: {module} also"
                f" has {missing[0]}. Save the merged model instead (jf.merge, jf.save_pretrained)."
            )
        if custom := [path for path in tensor.paths if is_custom(leaves[path])]:
            raise ConfigError(
                f"learned={list(learned)} saves {custom[0]}, which is no array but"
                f" {type(leaves[custom[0]]).__name__}: leave it out."
            )
    return found


def _settings(
    config: ModelConfig,
    layout: Layout,
    modules: Mapping[str, PeftModule],
    whole: Mapping[str, Tensor],
) -> dict[str, Any]:
    """What adapter_config.json says, but for the base and the dropout."""
    ranks = {name: module.rank for name, module in modules.items()}
    alphas = {name: module.alpha for name, module in modules.items()}
    rank, alpha = (Counter(found.values()).most_common(1)[0][0] for found in (ranks, alphas))
    saved = sorted({_saved_module(name) for name in whole})
    heads = {head: task for task, head in TASKS_WITH_HEAD.items() if {*saved} & {*HEAD_MODULES}}
    task = TASKS.get(config.family) if config.output == "language" else heads.get(config.output)
    return {
        "peft_type": "LORA",
        "task_type": task,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _patterns(ranks, rank),
        "alpha_pattern": _patterns(alphas, alpha),
        "target_modules": _targets(modules, layout.modules),
        "modules_to_save": saved or None,
        "fan_in_fan_out": any(is_conv(module.tensor) for module in modules.values()),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _saved_module(name: str) -> str:
    """The module of a tensor; the whole of a head that peft takes whole."""
    first = name.split(".")[0]
    return first if first in HEAD_MODULES else name.rpartition(".")[0]


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
    """The values that are not the default: by the last name of a module where all with that name
    have the same, and else by whole names."""
    found: dict[str, float] = {}
    for name, value in values.items():
        alike = {other for module, other in values.items() if _last(module) == _last(name)}
        if value != default:
            found[_last(name) if len(alike) == 1 else name] = value
    return found


def _targets(adapted: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Names that fit the adapted modules and no others: the last name where all modules with it are
    adapted, and else whole names."""
    found, others = {*adapted}, {*modules} - {*adapted}
    partly = {_last(name) for name in others}
    return sorted({name if _last(name) in partly else _last(name) for name in found})
