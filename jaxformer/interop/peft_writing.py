"""Adapters written in the format of Hugging Face's peft (LoRA)."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save as safetensors_bytes

from jaxformer.adapters.low_rank import LowRank, low_rank
from jaxformer.arrays.params import Params, Weight, check_params, is_custom
from jaxformer.checkpoints.reading import flat_leaves
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
    MAGNITUDE,
    PREFIX,
    Layout,
    adapter_layout,
    is_in,
    join_matrices,
    matrix_names,
    parameter_modules,
)
from jaxformer.interop.tensor_files import as_stored
from jaxformer.interop.tensor_table import CONV, Tensor, joined_tensor
from jaxformer.models.transformer import specs as model_specs
from jaxformer.models.transformer import without_objective

# Of models with a language head, by their family.
TASKS = {"decoder": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}


class PeftModule(NamedTuple):
    """A module as peft has it: lora_a [R, inputs], lora_b [outputs, R] and their scale; of E
    experts lora_a [E R, inputs] and lora_b [outputs, R E]. The magnitude [outputs] is of DoRA."""

    tensor: Tensor
    lora_a: np.ndarray
    lora_b: np.ndarray
    scale: float
    magnitude: np.ndarray | None

    @property
    def rank(self) -> int:
        return len(self.lora_a) // (self.tensor.experts or 1)

    @property
    def alpha(self) -> float:
        """Return alpha = scale * rank, in so many digits that `scale` is the same float32."""
        alpha = float(f"{self.scale * self.rank:.8g}")
        if alpha.is_integer():
            return int(alpha)
        return alpha


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
    """Write the adapter of `params` (`jf.adapt`) for peft: adapter_config.json and
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
    queries, keys and values as one module, or the gates and ups of experts as one parameter, they
    have the same lora_A if they have the same a, and else one of the sum of their ranks. Dropout is
    written as 0 where experts or a router are adapted, because peft has none there. ConfigError for
    params without an adapter, for an embedding that is used in several places, and where no
    architecture is this config.
    """
    params = without_objective(params)
    check_params(model_specs(config), params)
    check_dtype(dtype)
    directory = Path(path)
    if (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has the config.json of a model: choose another directory.")
    layout = adapter_layout(config, architecture)
    leaves = flat_leaves(params, is_custom)

    modules: dict[str, PeftModule] = {}
    parameters: dict[str, PeftModule] = {}  # of experts, routers and what peft takes for experts
    for name, tensor in layout.parameters.items():
        if module := _module_of(tensor, leaves):
            parameters[name] = module
    for name, tensor in layout.modules.items():
        if f"{name}.weight" in layout.parameters:
            continue
        module = _module_of(tensor, leaves)
        if not module:
            continue
        if obstacle := layout.obstacle(tensor):
            raise ConfigError(
                f"the adapter of {tensor.paths[0]} cannot be written for peft: {obstacle}. Merge it"
                " (jf.merge) and save the whole model (jf.save_pretrained), or adapt other weights."
            )
        modules[name] = module
    for name, module in parameters.items():
        if module.magnitude is not None:
            raise ConfigError(
                f"{module.tensor.paths[0]} has an adapter of DoRA, and peft has none of {name},"
                " which is a parameter to it: merge it (jf.merge) and save the whole model"
                " (jf.save_pretrained), or adapt other weights."
            )
    if not modules and not parameters:
        raise ConfigError(
            "these params have no adapter: jf.adapt makes one, and jf.save_pretrained writes whole"
            " models."
        )

    saved_modules = layout.saved_modules(leaves, learned)
    tensors = {}
    for name, tensor in layout.tensors.items():
        if is_in(name, saved_modules):
            tensors[PREFIX + name] = joined_tensor(tensor, leaves)
    names = {name: name for name in modules} | parameter_modules([*layout.parameters], parameters)
    for name, module in (modules | parameters).items():
        name_a, name_b = matrix_names(module.tensor)
        tensors[f"{PREFIX}{names[name]}.{name_a}"] = module.lora_a
        tensors[f"{PREFIX}{names[name]}.{name_b}"] = module.lora_b
        if module.magnitude is not None:
            tensors[f"{PREFIX}{names[name]}.{MAGNITUDE}"] = module.magnitude
    stored = {name: as_stored(name, tensors[name], jnp.dtype(dtype)) for name in sorted(tensors)}
    settings = _settings(config, layout, modules, parameters, saved_modules)
    settings["base_model_name_or_path"] = str(base) or None
    settings["lora_dropout"] = 0.0
    # peft refuses dropout of parameters.
    if not parameters:
        rates = [leaf.dropout for leaf in leaves.values() if isinstance(leaf, LowRank)]
        settings["lora_dropout"] = max(rates)
    with replacing(directory / ADAPTER_WEIGHTS) as file:
        file.write(safetensors_bytes(stored, {"format": "pt"}))
    text = json.dumps(settings, indent=2, sort_keys=True)
    write_text(directory / ADAPTER_CONFIG, text + "\n")
    return [directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS]


def _module_of(tensor: Tensor, leaves: Mapping[str, Weight]) -> PeftModule | None:
    """Return the adapter of a module, or of a parameter of all experts, from those of its leaves,
    of which some may have none; None where no leaf has one. Components that are zero in a and in b
    at the end are left out."""
    experts = tensor.experts or 1
    layer = tensor.entry[:1]
    # By the index of the leaf: a [E, inputs, R] and b [E, R, outputs], where E is 1 without
    # experts; the scale, and the number of components that are not zero.
    adapters: dict[int, tuple[np.ndarray, np.ndarray, float, int]] = {}
    adapted: list[Any] = [leaves[path] for path in tensor.paths]
    for index, leaf in enumerate(adapted):
        if not isinstance(leaf, LowRank):
            continue
        a, b, scale = (np.asarray(x[layer], np.float32) for x in (*leaf.factors, leaf.scale))
        if not scale:  # of a layer that the adapter leaves out
            continue
        a = a.reshape(experts, -1, a.shape[-1])
        b = b.reshape(experts, a.shape[-1], -1)
        used = a.any((0, 1)) | b.any((0, 2))
        rank = int(np.max(np.flatnonzero(used), initial=0)) + 1
        adapters[index] = a, b, float(scale), rank
    if not adapters:
        return None
    first, _, module_scale, _ = next(iter(adapters.values()))
    is_shared = all(np.array_equal(a, first) for a, _, _, _ in adapters.values())
    if is_shared:
        module_a = first[..., : max(rank for _, _, _, rank in adapters.values())]
    else:
        # a is [a_q a_k a_v] then, and each b lies in the rows of its own a.
        module_a = np.concatenate([a[..., :rank] for a, _, _, rank in adapters.values()], -1)
    bs = []
    row = 0
    for index, spec in enumerate(tensor.specs):
        module_b = np.zeros((experts, module_a.shape[-1], spec.fan_out), np.float32)
        if index in adapters:
            _, leaf_b, leaf_scale, rank = adapters[index]
            # One module has one scale: another leaf's goes into its b.
            factor = np.float32(leaf_scale / module_scale)
            module_b[:, row : row + rank] = leaf_b[:, :rank] * factor
            if not is_shared:
                row += rank
        bs.append(module_b)
    magnitude = None
    has_magnitudes = [isinstance(leaf, LowRank) and leaf.magnitude is not None for leaf in adapted]
    if any(has_magnitudes):
        rows = []  # of magnitudes, [1, 1, outputs] each
        for leaf, spec in zip(adapted, tensor.specs, strict=True):
            if not isinstance(leaf, LowRank):
                # What is not adapted keeps its norms.
                inputs = low_rank(spec, 1, 1.0).inputs
                weight = leaf.array() if is_custom(leaf) else leaf
                squares = jnp.square(weight[layer].astype(jnp.float32))
                values = jnp.sqrt(squares.sum(inputs))
            else:
                values = leaf.magnitude[layer]
            rows.append(np.asarray(values, np.float32).reshape(1, 1, -1))
        magnitude = join_matrices(tensor, module_a[..., :1], rows)[1][:, 0]
    return PeftModule(tensor, *join_matrices(tensor, module_a, bs), module_scale, magnitude)


def _settings(
    config: ModelConfig,
    layout: Layout,
    modules: Mapping[str, PeftModule],
    parameters: Mapping[str, PeftModule],
    saved_modules: Collection[str],
) -> dict[str, Any]:
    """Return what adapter_config.json says, but for the base and the dropout."""
    adapted = {**modules, **parameters}
    # The most frequent ones are the default, and the others are patterns.
    rank = Counter(module.rank for module in adapted.values()).most_common(1)[0][0]
    alpha = Counter(module.alpha for module in adapted.values()).most_common(1)[0][0]
    task = None
    if config.output == "language":
        task = TASKS.get(config.family)
    elif {*saved_modules} & {*HEAD_MODULES}:
        # With the task of a classifier peft expects its head among the tensors.
        tasks = {head: task for task, head in TASKS_WITH_HEAD.items()}
        task = tasks.get(config.output)
    return {
        "peft_type": "LORA",
        "task_type": task,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: m.rank for name, m in adapted.items() if m.rank != rank},
        "alpha_pattern": {name: m.alpha for name, m in adapted.items() if m.alpha != alpha},
        "target_modules": _targets(modules, layout.modules),
        "target_parameters": _targets(parameters, layout.parameters, names=2) or None,
        "modules_to_save": sorted(saved_modules) or None,
        # Whether a weight is stored as [inputs, outputs].
        "fan_in_fan_out": any(module.tensor.transform is CONV for module in modules.values()),
        "bias": "none",
        "use_rslora": False,
        "use_dora": any(module.magnitude is not None for module in adapted.values()),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(adapted: Iterable[str], modules: Iterable[str], names: int = 1) -> list[str]:
    """Return names that fit the adapted modules and no others: the last `names` of the path where
    all modules with them are adapted, and else whole paths."""
    adapted = {*adapted}

    def end(name: str) -> str:
        return ".".join(name.split(".")[-names:])

    others = {*map(end, {*modules} - adapted)}
    targets = set()
    for name in adapted:
        if end(name) in others:
            targets.add(name)
        else:
            targets.add(end(name))
    return sorted(targets)
