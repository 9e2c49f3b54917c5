"""Adapters of Hugging Face's peft (LoRA), read over the params of a model."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.adapters.low_rank import LowRank, low_rank
from jaxformer.arrays.mesh import parameter_sharding
from jaxformer.arrays.params import (
    Params,
    Spec,
    check_params,
    dotted,
    is_custom,
    map_specs,
    rows,
    stack,
)
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError, first_of
from jaxformer.interop.peft_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TASKS_WITH_HEAD,
    ModuleSettings,
    PeftSettings,
    read_settings,
)
from jaxformer.interop.peft_modules import (
    PREFIX,
    SCORE,
    Layout,
    is_lookup,
    is_output,
    layout_of,
    part_names,
    part_shapes,
    split_parts,
)
from jaxformer.interop.tensor_files import TensorFiles
from jaxformer.interop.tensor_table import Tensor, matched
from jaxformer.models.transformer import specs as model_specs

PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_(embedding_)?[AB])(\.default)?(?P<end>\.weight)?")
# What peft puts into the name of a tensor that it saves whole.
WRAPPED = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
PROBLEMS_SHOWN = 12
UNTIE = (
    "save the base with an output layer of its own (tie_word_embeddings=False, and lm_head.weight a"
    " copy of the embedding), and name it as the base"
)
OTHERS = "adapt other modules"


@dataclass
class StoredAdapter:
    """The tensors of an adapter's file: those of low rank by (module as it is named there, the end
    of the name that peft gives it now), and whole ones by their names in the model. The values are
    names in the file."""

    files: TensorFiles
    parts: dict[tuple[str, str], str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(module for module, _ in self.parts))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.entries[name].shape

    def read(self, name: str) -> np.ndarray:
        return self.files.read(name).astype(np.float32)


def stored_in(directory: Path) -> StoredAdapter:
    found = StoredAdapter(TensorFiles(directory, ADAPTER_WEIGHTS))
    for name in found.files.entries:
        plain = name.removeprefix(PREFIX)
        if part := PART.fullmatch(plain):
            end = part["part"] if "embedding" in part["part"] else f"{part['part']}.weight"
            found.parts[part["module"], end] = name
        else:
            found.whole[WRAPPED.sub("", plain)] = name
    return found


class AdaptedModule(NamedTuple):
    """A module with an adapter: where its two tensors are, their rank and scale."""

    tensor: Tensor
    names: tuple[str, str]
    rank: int
    scale: float


class Placed(NamedTuple):
    """The adapted modules of a model, and the tensors that its adapter holds whole, as a new head,
    each with its name in the file."""

    modules: list[AdaptedModule]
    whole: list[tuple[Tensor, str]]


def placed_in(settings: PeftSettings, stored: StoredAdapter, layout: Layout) -> Placed:
    """Where the tensors of an adapter belong. Raises ConfigError naming those that fit nowhere or
    have another shape, and those that are missing."""
    problems: list[str] = []
    modules = _modules(settings, stored, layout, problems)
    whole = _whole(settings, stored, layout, problems)
    if problems:
        raise ConfigError(
            f"the adapter in {stored.files.directory} does not fit this model:\n  "
            + first_of(problems, PROBLEMS_SHOWN)
        )
    return Placed(modules, whole)


def _modules(
    settings: PeftSettings, stored: StoredAdapter, layout: Layout, problems: list[str]
) -> list[AdaptedModule]:
    """The modules with an adapter; what does not fit is added to `problems`."""
    prefix, renamed = layout.prefix, layout.renamed
    names = matched(stored.modules, layout.modules, prefix, renamed)
    bare = bool(names) and all(found.removeprefix(prefix) == found for found in names.values())
    for module in sorted({*stored.modules} - {*names.values()}):
        problems.append(f"{module}: {_unplaced(module, layout)}")
    owns = {
        name: names.get(name, name.removeprefix(prefix) if bare else name)
        for name in layout.modules
    }
    of_modules, found = settings.of_modules([*owns.values()]), []
    for name, tensor in layout.modules.items():
        own = owns[name]
        linear = not is_lookup(tensor) and not is_output(tensor)
        wanted = of_modules.is_target(own, in_all_linear=linear)
        if name not in names:
            if wanted:
                problems.append(
                    f"{own}: {ADAPTER_CONFIG} names it, and {ADAPTER_WEIGHTS} has no tensors of it"
                )
            continue
        if wanted is False:
            problems.append(f"{own}: in {ADAPTER_WEIGHTS}, and no target of {ADAPTER_CONFIG}")
        elif obstacle := layout.obstacle(tensor):
            unties = any(copy.unties and copy.of == tensor.name for copy in layout.copies)
            problems.append(f"{own}: {obstacle}: {UNTIE if unties else OTHERS}")
        else:
            found.append(_module(of_modules, stored, own, tensor, problems))
    return found


def _unplaced(module: str, layout: Layout) -> str:
    """Why a module of the file is none of the model."""
    for copy in layout.copies:
        if copy.name == f"{module}.weight":
            remedy = UNTIE if copy.unties else OTHERS
            return f"the model has no such weight of its own, but {copy.of}: {remedy}"
    return "the model has no such module"


def _module(
    settings: ModuleSettings, stored: StoredAdapter, own: str, tensor: Tensor, problems: list[str]
) -> AdaptedModule:
    rank, ends = settings.rank_of(own), part_names(tensor)
    names = [stored.parts.get((own, end), "") for end in ends]
    for end, name, wanted in zip(ends, names, part_shapes(tensor, rank), strict=True):
        if not name:
            problems.append(f"{own}.{end}: not in {ADAPTER_WEIGHTS}")
        elif stored.shape(name) != wanted:
            problems.append(
                f"{name}: {list(stored.shape(name))} in the file, and this model with rank {rank}"
                f" ({ADAPTER_CONFIG}) has {list(wanted)}"
            )
    return AdaptedModule(tensor, (names[0], names[1]), rank, settings.scale_of(own))


def _whole(
    settings: PeftSettings, stored: StoredAdapter, layout: Layout, problems: list[str]
) -> list[tuple[Tensor, str]]:
    """The tensors that are saved whole, each with its name in the file. What does not fit is added
    to `problems`."""
    copies = {copy.name: copy.of for copy in layout.copies}
    names = matched(stored.whole, [*layout.tensors, *copies], layout.prefix, layout.renamed)
    for name in sorted({*stored.whole} - {*names.values()}):
        problems.append(f"{name}: the model has no such tensor")
    found = []
    for name, tensor in layout.tensors.items():
        module = name.rpartition(".")[0]
        if name not in names:
            if settings.is_saved(module):
                problems.append(
                    f"{name}: not in {ADAPTER_WEIGHTS}, and modules_to_save of {ADAPTER_CONFIG}"
                    f" holds {module}"
                )
            continue
        inside = stored.whole[names[name]]
        found.append((tensor, inside))
        if stored.shape(inside) != tensor.shape:
            shape = list(stored.shape(inside))
            problems.append(f"{inside}: {shape} in the file, and this model {list(tensor.shape)}")
    for copy, of in copies.items():
        both = [stored.whole[names[name]] for name in (copy, of) if name in names]
        # peft changes one of the two, unless it has saved both, and alike.
        values = [stored.read(name) for name in both]
        if len(both) == 1 or (both and not np.array_equal(values[0], values[1])):
            problems.append(f"{both[0]}: {copy} is {of}, and peft changes one of the two: {UNTIE}")
    return found


Use = tuple[AdaptedModule, int]  # and which of the leaves of the module it is
PlaceLeaf = Callable[[Spec, np.ndarray], jax.Array]


def adapted_config(directory: Path, config: ModelConfig) -> ModelConfig:
    """The config of a model with an adapter: that of its base, or with the head of classes or tags
    that the adapter brings. Raises ConfigError where that head does not fit the model."""
    settings = read_settings(directory)
    head = TASKS_WITH_HEAD.get(settings.task or "")
    if head is None or config.output == head:
        return config
    if config.family == "encoder_decoder" or (config.family, head) == ("decoder", "tags"):
        raise ConfigError(
            f"{directory / ADAPTER_CONFIG}: task_type={settings.task!r} is not supported for a"
            f" model of family {config.family!r}; supported: SEQ_CLS for a decoder or an encoder,"
            " TOKEN_CLS for an encoder."
        )
    stored = stored_in(directory)
    names = (f"{SCORE}.weight", "classifier.weight", "classifier.out_proj.weight")
    found = [stored.whole[name] for name in names if name in stored.whole]
    if not found:
        raise ConfigError(
            f"{stored.files.directory / ADAPTER_WEIGHTS} has no output layer"
            f" ({' or '.join(names)}), which task_type={settings.task!r} needs over a base with"
            f" the head {config.output!r}: save the adapter from peft again."
        )
    changes: dict[str, Any] = {"head": head, "n_classes": stored.shape(found[0])[0]}
    changes |= {"next_sentence": False, "tied_head": False, "head_bias": False}
    if config.family == "decoder":  # as ...ForSequenceClassification of transformers
        changes |= {"pooling": "last", "logit_soft_cap": 0.0, "logit_scale": "none"}
    return dataclasses.replace(config, **changes)


def read_adapter(directory: str | Path, params: Params, config: ModelConfig) -> Params:
    """`params` with the adapter of a peft directory (adapter_config.json and
    adapter_model.safetensors).

    Args:
      directory: of the adapter.
      params: of the base, whose arrays are not copied; leaves may be quantized. A head that the
        adapter brings may be missing.
      config: of the result.

    Each adapted weight is a `LowRank`, whose a and b are float32, beside the weight. Layers with a
    lower rank are padded with zeros, which get no gradient; layers without an adapter have the
    scale 0. Queries, keys and values that are one module in transformers start with the same a.
    Raises ConfigError for an option that is not computed, and for an adapter of another model,
    naming its tensors.
    """
    folder = Path(directory)
    settings, stored = read_settings(folder), stored_in(folder)
    found = placed_in(settings, stored, layout_of(config))
    place = _place_of(params)
    leaves = _with_whole(stored, found.whole, params, config, place)
    uses: dict[str, list[Use]] = {}
    for module in found.modules:
        for at, path in enumerate(module.tensor.paths):
            uses.setdefault(path, []).append((module, at))
    for path, modules in uses.items():
        if isinstance(leaves[path], LowRank):
            raise ConfigError(
                f"the params have an adapter already (of {path}): merge it with jf.merge first."
            )
        parts, arrays = _parts_of(modules, leaves[path].shape, stored, settings.dropout)
        own: dict[str, Any] = {
            name: place(getattr(parts, name), value) for name, value in arrays.items()
        }
        leaves[path] = dataclasses.replace(parts, weight=leaves[path], **own)
    return map_specs(lambda path, _: leaves[path], model_specs(config))


def _parts_of(
    uses: Sequence[Use], shape: Sequence[int], stored: StoredAdapter, dropout: float
) -> tuple[LowRank, dict[str, np.ndarray]]:
    """The rows of an adapted leaf of this shape, and its a, b and scale; a layer of a stack is
    padded with zeros to the largest rank."""
    first, at_first = uses[0]
    stacked = first.tensor.layer is not None
    rank = max(module.rank for module, _ in uses)
    parts = low_rank(first.tensor.specs[at_first], rank, 1.0, dropout)
    if stacked:
        parts = stack(parts, shape[0])  # type: ignore[arg-type, assignment]
    rows_of = {"a": parts.a, "b": parts.b, "scale": parts.scale}
    arrays = {name: np.zeros(spec.shape, np.float32) for name, spec in rows_of.items()}
    for module, at in uses:
        a, b = split_parts(module.tensor, *map(stored.read, module.names))[at]
        layer = (module.tensor.layer,) if stacked else ()
        arrays["a"][(*layer, ..., slice(module.rank))] = a
        arrays["b"][(*layer, slice(module.rank))] = b
        arrays["scale"][layer] = module.scale
    return parts, arrays


def _with_whole(
    stored: StoredAdapter,
    whole: Sequence[tuple[Tensor, str]],
    params: Params,
    config: ModelConfig,
    place: PlaceLeaf,
) -> dict[str, Any]:
    """The leaves of the base by path, with those that the adapter holds whole in their place."""
    table, new = rows(model_specs(config)), dict[str, np.ndarray]()
    leaves = {dotted(p): leaf for p, leaf in jax.tree.leaves_with_path(params, is_leaf=is_custom)}
    for tensor, name in whole:
        values = tensor.transform.split(stored.read(name), tensor.specs)
        for path, value in zip(tensor.paths, values, strict=True):
            if tensor.layer is None:
                new[path] = np.asarray(value)
            elif path not in new:
                new[path] = np.array(_array_at(leaves, path, name))
            if tensor.layer is not None:
                new[path][tensor.layer] = value
        if tensor.name == f"{SCORE}.weight":  # which has no bias in transformers
            new["head.bias"] = np.zeros(config.n_classes, np.float32)
    for path, value in new.items():
        dtype = getattr(leaves.get(path), "dtype", jnp.float32)
        leaves[path] = place(table[path], value.astype(dtype))
    if missing := [path for path in table if path not in leaves]:
        raise ConfigError(
            f"the adapter in {stored.files.directory} and its base lack {', '.join(missing)}, which"
            f" the head {config.output!r} needs: save the adapter with these modules in"
            " modules_to_save."
        )
    check_params(model_specs(config), leaves)
    return leaves


def _array_at(leaves: Mapping[str, Any], path: str, name: str) -> Any:
    """The array at a path. Raises ConfigError for a leaf of another kind, as a quantized one."""
    if is_custom(leaves[path]):
        kind = type(leaves[path]).__name__
        raise ConfigError(f"{name} of the adapter replaces a layer of {path}, which is a {kind}.")
    return leaves[path]


def learned_of(directory: Path, config: ModelConfig) -> tuple[str, ...]:
    """The branches of the params of a model that its adapter holds whole, beside those that it
    adapts."""
    settings, stored = read_settings(directory), stored_in(directory)
    found = placed_in(settings, stored, layout_of(config))
    adapted = {path for module in found.modules for path in module.tensor.paths}
    whole = [path for tensor, _ in found.whole for path in tensor.paths if path not in adapted]
    return tuple(dict.fromkeys(path.split(".")[0] for path in whole))


def _place_of(params: Params) -> PlaceLeaf:
    """A function of a row and its value that puts it where the leaves of `params` are."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", here)

    def place(spec: Spec, value: np.ndarray) -> jax.Array:
        mesh = getattr(sharding, "mesh", None)
        where = sharding if mesh is None else parameter_sharding(mesh, spec.shape, spec.axes)
        return jax.make_array_from_callback(value.shape, where, lambda index: value[index])

    return place
