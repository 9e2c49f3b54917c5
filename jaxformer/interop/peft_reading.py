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
    Weight,
    check_params,
    is_custom,
    map_specs,
    rows,
    stack,
)
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.config.model import ModelConfig
from jaxformer.config.variants import SECOND_HEADS
from jaxformer.files import ConfigError, first_of, located
from jaxformer.interop.peft_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TASKS_WITH_HEAD,
    PeftSettings,
    read_settings,
)
from jaxformer.interop.peft_modules import (
    PREFIX,
    SCORE,
    Layout,
    is_routed,
    layout_of,
    matrix_names,
    matrix_shapes,
    parameter_modules,
    split_matrices,
)
from jaxformer.interop.tensor_files import TensorFiles, copied_model
from jaxformer.interop.tensor_table import Tensor, matched
from jaxformer.models.transformer import specs as model_specs

MATRIX = re.compile(r"(?P<module>.+)\.(?P<end>lora_(embedding_)?[AB])(\.default)?(\.weight)?")
# What peft puts into the name of a tensor that it saves whole.
WRAPPED = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
PROBLEMS_SHOWN = 12
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")  # in the name of a module
# What to do about an adapter of a weight that the model uses twice.
UNTIE = (
    "save the base with an output layer of its own (tie_word_embeddings=False, and lm_head.weight a"
    " copy of the embedding), and name it as the base"
)
ADAPT_OTHERS = "adapt other modules"


@dataclass
class StoredAdapter:
    """An adapter's settings and the tensors of its file: the matrices of low rank by (module as it
    is named there, the end of the name that peft gives it now), and those that are saved whole by
    their names in the model. The values are names in the file."""

    settings: PeftSettings
    files: TensorFiles
    matrices: dict[tuple[str, str], str] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.entries[name].shape

    def read(self, name: str) -> np.ndarray:
        return self.files.read(name).astype(np.float32)


def stored_in(directory: Path) -> StoredAdapter:
    """The adapter of a peft directory. Raises ConfigError as `read_settings` and `TensorFiles`."""
    directory = copied_model(directory, ADAPTER_WEIGHTS)
    stored = StoredAdapter(read_settings(directory), TensorFiles(directory, ADAPTER_WEIGHTS))
    for name in stored.files.entries:
        plain = name.removeprefix(PREFIX)
        if match := MATRIX.fullmatch(plain):
            end = match["end"] if "embedding" in match["end"] else f"{match['end']}.weight"
            stored.matrices[match["module"], end] = name
        else:
            stored.saved[WRAPPED.sub("", plain)] = name
    return stored


class AdaptedModule(NamedTuple):
    """A module with an adapter: the names of its two matrices in the file, their rank and scale."""

    tensor: Tensor
    names: tuple[str, str]
    rank: int
    scale: float


SavedTensor = tuple[Tensor, str]  # that an adapter has saved whole, and its name in the file


def fitted(stored: StoredAdapter, layout: Layout) -> tuple[list[AdaptedModule], list[SavedTensor]]:
    """Where the tensors of an adapter belong: the adapted modules of a model, and the tensors that
    are saved whole, as a new head. Raises ConfigError naming those that fit nowhere or have another
    shape, and those that are missing."""
    problems: list[str] = []
    modules = [
        *_fitted_modules(stored, layout, problems),
        *_fitted_parameters(stored, layout, problems),
    ]
    saved = _fitted_saved(stored, layout, problems)
    if problems:
        raise ConfigError(
            f"the adapter in {stored.files.directory} does not fit this model:\n"
            f"  {first_of(problems, PROBLEMS_SHOWN)}"
        )
    return modules, saved


def _fitted_modules(
    stored: StoredAdapter, layout: Layout, problems: list[str]
) -> list[AdaptedModule]:
    """The modules with an adapter; what does not fit is added to `problems`."""
    stored_modules = dict.fromkeys(module for module, _ in stored.matrices)
    names = matched(stored_modules, layout.modules, layout.prefix, layout.renamed)
    of_parameters = _parameter_names(stored, layout)
    for module in sorted(stored_modules.keys() - {*names.values(), *of_parameters.values()}):
        problems.append(f"{module}: {_why_not_in_model(module, layout)}")
    names = {name: module for name, module in names.items() if module not in of_parameters.values()}
    peft_names = _peft_names(layout, names)
    modules = []
    for name, tensor in layout.modules.items():
        module = peft_names[name]
        is_output = tensor.paths == ("head.weight",) and tensor.specs[0].axes[0] == "vocab"
        is_linear = not (tensor.specs[0].lookup or is_output or is_routed(tensor))
        is_target = stored.settings.is_target(module, in_all_linear=is_linear)
        if name not in names:
            if is_target and not is_routed(tensor):
                problems.append(
                    f"{module}: {ADAPTER_CONFIG} names it, and {ADAPTER_WEIGHTS} has no tensors of"
                    " it"
                )
            continue
        if is_target is False:
            problems.append(f"{module}: in {ADAPTER_WEIGHTS}, and no target of {ADAPTER_CONFIG}")
        elif obstacle := layout.obstacle(tensor):
            unties = any(copy.unties and copy.of == tensor.name for copy in layout.copies)
            problems.append(f"{module}: {obstacle}: {UNTIE if unties else ADAPT_OTHERS}")
        else:
            modules.append(_adapted_module(stored, module, tensor, problems))
    return modules


def _parameter_names(stored: StoredAdapter, layout: Layout) -> dict[str, str]:
    """The module of each parameter that target_parameters names, as it is named in the file; the
    name that it should have where the file has none."""
    adapted = [name for name in layout.parameters if stored.settings.is_target_parameter(name)]
    expected = parameter_modules([*layout.parameters], adapted)
    stored_modules = dict.fromkeys(module for module, _ in stored.matrices)
    names = matched(stored_modules, expected.values(), layout.prefix, layout.renamed)
    return {parameter: names.get(module, module) for parameter, module in expected.items()}


def _fitted_parameters(
    stored: StoredAdapter, layout: Layout, problems: list[str]
) -> list[AdaptedModule]:
    """The parameters of experts and routers with an adapter; what does not fit is added to
    `problems`."""
    names, settings = _parameter_names(stored, layout), stored.settings
    for target in settings.parameters:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            problems.append(
                f"{target}: target_parameters of {ADAPTER_CONFIG} names it, and the model has no"
                " such matrix of experts or of a router"
            )
    if names and settings.dropout:
        problems.append(f"lora_dropout={settings.dropout} with target_parameters, as never in peft")
    return [
        _adapted_module(stored, module, layout.parameters[parameter], problems, parameter)
        for parameter, module in names.items()
    ]


def _peft_names(layout: Layout, names: Mapping[str, str]) -> dict[str, str]:
    """The name of each module of a model in the class that the adapter was trained on: that of the
    file (`names`), and for the others without the prefix too where that class has none."""
    without_prefix = bool(names) and not any(
        name.startswith(layout.prefix) for name in names.values()
    )
    return {
        name: names.get(name, name.removeprefix(layout.prefix) if without_prefix else name)
        for name in layout.modules
    }


def _why_not_in_model(module: str, layout: Layout) -> str:
    """Why a module of the file is none of the model."""
    if ONE_EXPERT.search(module):
        return (
            "an adapter of one expert, as peft saved it before transformers 5: load it with peft"
            " and transformers 5, and save it again"
        )
    for copy in layout.copies:
        if copy.name == f"{module}.weight":
            remedy = UNTIE if copy.unties else ADAPT_OTHERS
            return f"the model has no such weight of its own, but {copy.of}: {remedy}"
    return "the model has no such module"


def _adapted_module(
    stored: StoredAdapter, module: str, tensor: Tensor, problems: list[str], parameter: str = ""
) -> AdaptedModule:
    """The adapter of one module, or of a parameter of it; what is missing or of another shape is
    added to `problems`."""
    name_in_config = parameter or module
    rank = stored.settings.rank_of(name_in_config)
    ends = matrix_names(tensor)
    names = [stored.matrices.get((module, end), "") for end in ends]
    for end, name, shape in zip(ends, names, matrix_shapes(tensor, rank), strict=True):
        if not name:
            problems.append(f"{module}.{end}: not in {ADAPTER_WEIGHTS}")
        elif stored.shape(name) != shape:
            problems.append(
                f"{name}: {list(stored.shape(name))} in the file, and this model with rank {rank}"
                f" ({ADAPTER_CONFIG}) has {list(shape)}"
            )
    return AdaptedModule(
        tensor, (names[0], names[1]), rank, stored.settings.scale_of(name_in_config)
    )


def _fitted_saved(stored: StoredAdapter, layout: Layout, problems: list[str]) -> list[SavedTensor]:
    """The tensors that are saved whole, each with its name in the file. What does not fit is added
    to `problems`."""
    copies = {copy.name: copy.of for copy in layout.copies}
    names = matched(stored.saved, [*layout.tensors, *copies], layout.prefix, layout.renamed)
    for name in sorted({*stored.saved} - {*names.values()}):
        problems.append(f"{name}: the model has no such tensor")
    saved = []
    for name, tensor in layout.tensors.items():
        module = name.rpartition(".")[0]
        if name not in names:
            if stored.settings.is_saved(module):
                problems.append(
                    f"{name}: not in {ADAPTER_WEIGHTS}, and modules_to_save of {ADAPTER_CONFIG}"
                    f" holds {module}"
                )
            continue
        stored_name = stored.saved[names[name]]
        saved.append((tensor, stored_name))
        if stored.shape(stored_name) != tensor.shape:
            problems.append(
                f"{stored_name}: {list(stored.shape(stored_name))} in the file, and this model"
                f" {list(tensor.shape)}"
            )
    for copy, of in copies.items():
        pair = [stored.saved[names[name]] for name in (copy, of) if name in names]
        # peft changes one of the two, unless it has saved both, and alike.
        values = [stored.read(name) for name in pair]
        if len(pair) == 1 or (pair and not np.array_equal(values[0], values[1])):
            problems.append(f"{pair[0]}: {copy} is {of}, and peft changes one of the two: {UNTIE}")
    return saved


PutLeaf = Callable[[Spec, np.ndarray], jax.Array]  # onto the devices of the params


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
    output_layers = [stored.saved[name] for name in names if name in stored.saved]
    if not output_layers:
        raise ConfigError(
            f"{stored.files.directory / ADAPTER_WEIGHTS} has no output layer"
            f" ({' or '.join(names)}), which task_type={settings.task!r} needs over a base with"
            f" the head {config.output!r}: save the adapter from peft again."
        )
    changes: dict[str, Any] = {"head": head, "n_classes": stored.shape(output_layers[0])[0]}
    changes |= dict.fromkeys((*SECOND_HEADS, "tied_head", "head_bias"), False)
    if config.family == "decoder":
        # As ...ForSequenceClassification of transformers.
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
    stored = stored_in(located(directory))
    modules, saved = fitted(stored, layout_of(config))
    put = _put_beside(params)
    leaves = _with_saved(stored, saved, params, config, put)
    table, modules_of = rows(model_specs(config)), dict[str, list[AdaptedModule]]()
    for module in modules:
        for path in module.tensor.paths:
            modules_of.setdefault(path, []).append(module)
    for path, modules in modules_of.items():
        if isinstance(leaves[path], LowRank):
            raise ConfigError(
                f"the params have an adapter already (of {path}): merge it with jf.merge first."
            )
        leaves[path] = _adapted_leaf(path, leaves[path], table[path], modules, stored, put)
    return map_specs(lambda path, _: leaves[path], model_specs(config))


def _adapted_leaf(
    path: str,
    weight: Weight,
    spec: Spec,
    modules: Sequence[AdaptedModule],
    stored: StoredAdapter,
    put: PutLeaf,
) -> LowRank:
    """A leaf with the adapters of its modules, of which a stack has one for each layer: a layer of
    a lower rank is padded with zeros."""
    rank, depth = max(module.rank for module in modules), int(spec.is_stacked)
    one_layer = dataclasses.replace(spec, shape=spec.shape[depth:], axes=spec.axes[depth:])
    specs = low_rank(one_layer, rank, 1.0, stored.settings.dropout)
    if depth:
        specs = stack(specs, spec.shape[0])  # type: ignore[arg-type, assignment]
    # float32: a [I..., R], b [R, O...] and scale [], in a stack all with the axis of the layers,
    # and of experts a and b with theirs.
    a, b, scale = (np.zeros(row.shape, np.float32) for row in (specs.a, specs.b, specs.scale))
    for module in modules:
        matrices = split_matrices(module.tensor, *map(stored.read, module.names))
        layer: tuple[Any, ...] = module.tensor.entry
        at = module.tensor.paths.index(path)
        experts = (slice(None),) if module.tensor.experts else ()
        a_index, b_index = (*layer, ..., slice(module.rank)), (*experts, slice(module.rank))
        a[a_index], b[(*layer, *b_index)] = matrices[at]
        scale[layer] = module.scale
    return dataclasses.replace(
        specs, weight=weight, a=put(specs.a, a), b=put(specs.b, b), scale=put(specs.scale, scale)
    )


def _with_saved(
    stored: StoredAdapter,
    saved: Sequence[SavedTensor],
    params: Params,
    config: ModelConfig,
    put: PutLeaf,
) -> dict[str, Any]:
    """The leaves of the base by path, replaced or joined by those that the adapter has saved
    whole."""
    table, new = rows(model_specs(config)), dict[str, np.ndarray]()
    leaves = flat_leaves(params, is_custom)
    for tensor, name in saved:
        values = tensor.leaves_of(stored.read(name))
        for path, value in zip(tensor.paths, values, strict=True):
            if not tensor.entry:
                new[path] = np.asarray(value)
                continue
            if path not in new:
                new[path] = np.array(_array_at(leaves, path, name))
            new[path][tensor.entry] = value
        if tensor.name == f"{SCORE}.weight":
            # It has no bias in transformers.
            new["head.bias"] = np.zeros(config.n_classes, np.float32)
    for path, value in new.items():
        dtype = getattr(leaves.get(path), "dtype", jnp.float32)
        leaves[path] = put(table[path], value.astype(dtype))
    if missing := [path for path in table if path not in leaves]:
        raise ConfigError(
            f"the adapter in {stored.files.directory} and its base lack {', '.join(missing)}, which"
            f" the head {config.output!r} needs: save the adapter with these modules in"
            " modules_to_save."
        )
    check_params(model_specs(config), leaves)
    return leaves


def _array_at(leaves: Mapping[str, Any], path: str, name: str) -> jax.Array:
    """The array at a path. Raises ConfigError for a leaf of another kind, as a quantized one."""
    leaf = leaves[path]
    if is_custom(leaf):
        raise ConfigError(
            f"{name} of the adapter replaces a layer of {path}, which is a {type(leaf).__name__}."
        )
    array: jax.Array = leaf
    return array


def learned_of(directory: Path, config: ModelConfig) -> tuple[str, ...]:
    """The branches of the params of a model that its adapter has saved whole, beside those that it
    adapts."""
    modules, saved = fitted(stored_in(directory), layout_of(config))
    adapted = {path for module in modules for path in module.tensor.paths}
    paths = [path for tensor, _ in saved for path in tensor.paths if path not in adapted]
    return tuple(dict.fromkeys(path.split(".")[0] for path in paths))


def _put_beside(params: Params) -> PutLeaf:
    """A function of a row and its value that puts it on the devices of the leaves of `params`."""
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    of_params = getattr(jax.tree.leaves(params)[0], "sharding", one_device)
    mesh = getattr(of_params, "mesh", None)

    def put(spec: Spec, value: np.ndarray) -> jax.Array:
        sharding = of_params if mesh is None else parameter_sharding(mesh, spec.shape, spec.axes)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return put
