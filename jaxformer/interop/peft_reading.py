"""Adapters of Hugging Face's peft (LoRA), read over the params of a model."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.adapters.low_rank import LowRank, low_rank
from jaxformer.arrays.mesh import parameter_sharding
from jaxformer.arrays.params import Params, Spec, check_params, is_custom, map_specs, rows, stack
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError, first_of, located
from jaxformer.interop.peft_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TASKS_WITH_HEAD,
    PeftSettings,
    read_settings,
)
from jaxformer.interop.peft_modules import (
    MAGNITUDE,
    PREFIX,
    SCORE,
    Layout,
    adapter_layout,
    matrix_names,
    matrix_shapes,
    parameter_modules,
    split_matrices,
)
from jaxformer.interop.tensor_files import TensorFiles, copied_model
from jaxformer.interop.tensor_table import Tensor
from jaxformer.models.transformer import specs as model_specs

MATRIX = re.compile(
    r"(?P<module>.+)\.(?P<end>lora_(embedding_)?[AB]|lora_magnitude_vector)(\.default)?(\.weight)?"
)
# What peft puts into the name of a tensor that it saves whole.
WRAPPED = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")
# What to do about an adapter of a weight that the model uses twice.
UNTIE = (
    "Adapt other modules, or save the base with an output layer of its own"
    " (tie_word_embeddings=False, and lm_head.weight a copy of the embedding) and name it as the"
    " base"
)


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
    """Return the adapter of a peft directory."""
    directory = copied_model(directory, ADAPTER_WEIGHTS)
    stored = StoredAdapter(read_settings(directory), TensorFiles(directory, ADAPTER_WEIGHTS))
    for name in stored.files.entries:
        plain = name.removeprefix(PREFIX)
        if match := MATRIX.fullmatch(plain):
            end = match["end"]
            if end in ("lora_A", "lora_B"):
                end += ".weight"
            stored.matrices[match["module"], end] = name
        else:
            stored.saved[WRAPPED.sub("", plain)] = name
    return stored


class AdaptedModule(NamedTuple):
    """A module with an adapter: the names of its two matrices in the file, their rank and scale,
    and the name of its magnitudes, if it is one of DoRA."""

    tensor: Tensor
    names: tuple[str, str]
    rank: int
    scale: float
    magnitude: str | None


SavedTensor = tuple[Tensor, str]  # that an adapter has saved whole, and its name in the file


def fitted(stored: StoredAdapter, layout: Layout) -> tuple[list[AdaptedModule], list[SavedTensor]]:
    """Return where the tensors of an adapter belong: the adapted modules of a model, and the
    tensors that are saved whole, as a new head. ConfigError for a tensor that fits nowhere, has
    another shape or is missing."""
    settings = stored.settings

    def misfit(problem: str) -> ConfigError:
        return ConfigError(
            f"the adapter in {stored.files.directory} does not fit this model: {problem}."
        )

    # By its name in the config: the module in the file, and what it adapts in the model.
    adapters: dict[str, tuple[str, Tensor]] = {}
    # The parameters of experts and routers: the files do not say which they are, only how many.
    modules = dict.fromkeys(module for module, _ in stored.matrices)
    adapted = [name for name in layout.parameters if settings.is_target_parameter(name)]
    expected = parameter_modules([*layout.parameters], adapted)
    names = layout.matched(modules, expected.values())
    for parameter, module in expected.items():
        in_file = names.get(module, module)
        adapters[parameter] = in_file, layout.parameters[parameter]
        modules.pop(in_file, None)
    names = layout.matched(modules, layout.modules)
    if unknown := sorted(modules.keys() - {*names.values()}):
        raise misfit(
            f"{first_of(unknown, 3, ', ')}: the model has no such module of its own, nor are they"
            f" parameters that target_parameters names. {UNTIE}"
        )
    for name, module in names.items():
        tensor = layout.modules[name]
        if obstacle := layout.obstacle(tensor):
            raise misfit(f"{module}: {obstacle}. {UNTIE}")
        adapters[name] = module, tensor
    shapes: dict[str, tuple[int, ...]] = {}  # of the tensors by their names in the file
    adapted_modules = []
    for name, (module, tensor) in adapters.items():
        pair = []
        for end in matrix_names(tensor):
            if (module, end) not in stored.matrices:
                raise misfit(f"{module}.{end}: not in {ADAPTER_WEIGHTS}")
            pair.append(stored.matrices[module, end])
        shape = stored.shape(pair[0])
        rank = sum(shape[:1]) // (tensor.experts or 1)
        if not rank:
            raise misfit(f"{pair[0]}: {[*shape]} in the file, which is of no rank")
        shapes |= zip(pair, matrix_shapes(tensor, rank), strict=True)
        magnitude = stored.matrices.get((module, MAGNITUDE))
        if settings.use_dora:
            if tensor.experts or tensor.specs[0].lookup:
                raise misfit(f"{module}: DoRA is computed here for linear layers alone")
            if magnitude is None:
                raise misfit(f"{module}.{MAGNITUDE}: not in {ADAPTER_WEIGHTS}")
        elif magnitude is not None:
            raise misfit(f"{magnitude}: is of DoRA, and {ADAPTER_CONFIG} has no use_dora")
        if magnitude is not None:
            shapes[magnitude] = (sum(spec.fan_out for spec in tensor.specs),)
        scale = settings.scale(name, rank)
        names_of_pair = (pair[0], pair[1])
        adapted_modules.append(AdaptedModule(tensor, names_of_pair, rank, scale, magnitude))

    copies = {copy.name: copy.of for copy in layout.copies}
    names = layout.matched(stored.saved, [*layout.tensors, *copies])
    if unknown := sorted(stored.saved.keys() - {*names.values()}):
        raise misfit(f"{first_of(unknown, 3, ', ')}: the model has no such tensor")
    # Both names of one tensor in the model: peft changes one of the two, unless it has saved both,
    # and alike.
    for copy, of in copies.items():
        has_both = copy in names and of in names
        if has_both:
            one, other = (stored.read(stored.saved[names[name]]) for name in (copy, of))
            has_both = np.array_equal(one, other)
        if not has_both and not names.keys().isdisjoint((copy, of)):
            raise misfit(f"{copy} is {of}, and peft changes one of the two. {UNTIE}")
    saved = []
    for name, tensor in layout.tensors.items():
        if name in names:
            in_file = stored.saved[names[name]]
            shapes[in_file] = tensor.shape
            saved.append((tensor, in_file))
    for name, shape in shapes.items():
        if stored.shape(name) != shape:
            raise misfit(f"{name}: {[*stored.shape(name)]} in the file, and this model {[*shape]}")
    if not adapted_modules and not saved:
        raise misfit(f"{ADAPTER_WEIGHTS} has no tensors")
    return adapted_modules, saved


PutLeaf = Callable[[Spec, np.ndarray], jax.Array]  # onto the devices of the params


def adapted_config(directory: Path, config: ModelConfig) -> ModelConfig:
    """Return the config of a model with an adapter: that of its base, or with the head of classes
    or tags that the adapter brings."""
    settings = read_settings(directory)
    head = TASKS_WITH_HEAD.get(settings.task_type or "")
    if head is None or config.output == head:
        return config
    if config.family == "encoder_decoder" or (config.family, head) == ("decoder", "tags"):
        raise ConfigError(
            f"{directory / ADAPTER_CONFIG}: task_type={settings.task_type!r} is not supported for a"
            f" model of family {config.family!r}; supported: SEQ_CLS for a decoder or an encoder,"
            " TOKEN_CLS for an encoder."
        )
    stored = stored_in(directory)
    names = (f"{SCORE}.weight", "classifier.weight", "classifier.out_proj.weight")
    output_layers = [stored.saved[name] for name in names if name in stored.saved]
    if not output_layers:
        raise ConfigError(
            f"{stored.files.directory / ADAPTER_WEIGHTS} has no output layer"
            f" ({' or '.join(names)}), which task_type={settings.task_type!r} needs over a base"
            f" with the head {config.output!r}: save the adapter from peft again."
        )
    changes: dict[str, Any] = {
        "head.kind": head,
        "head.n_classes": stored.shape(output_layers[0])[0],
    }
    changes |= dict.fromkeys(("head.next_sentence", "tied_head", "head.bias"), False)
    if config.family == "decoder":
        # As ...ForSequenceClassification of transformers.
        changes |= {"head.pooling": "last", "head.soft_cap": 0.0, "head.scale": "none"}
    return with_settings(config, {**changes})


def read_adapter(directory: str | Path, params: Params, config: ModelConfig) -> Params:
    """Return `params` with the adapter of a peft directory (adapter_config.json and
    adapter_model.safetensors).

    Args:
      directory: of the adapter.
      params: of the base, whose arrays are not copied; leaves may be quantized. A head that the
        adapter brings may be missing.
      config: of the result.

    Each adapted weight is a `LowRank`, whose a and b are float32, beside the weight. Layers with a
    lower rank are padded with zeros, which get no gradient; layers without an adapter have the
    scale 0. Queries, keys and values that are one module in transformers start with the same a.
    ConfigError for an option that is not computed, and for an adapter of another model, naming its
    tensors.
    """
    stored = stored_in(located(directory))
    modules, saved = fitted(stored, adapter_layout(config))
    one_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharding_of_params = getattr(jax.tree.leaves(params)[0], "sharding", one_device)
    mesh = getattr(sharding_of_params, "mesh", None)

    def put(spec: Spec, value: np.ndarray) -> jax.Array:
        # Beside the leaves of the params.
        sharding = sharding_of_params
        if mesh is not None:
            sharding = parameter_sharding(mesh, spec.shape, spec.axes)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    leaves = _with_saved(stored, saved, params, config, put)
    # Stacked leaves have the adapters of all layers in one array, and so one rank: the largest.
    table = rows(model_specs(config))
    modules_of: dict[str, list[AdaptedModule]] = {}
    for module in modules:
        for path in module.tensor.paths:
            modules_of.setdefault(path, []).append(module)
    for path, modules in modules_of.items():
        if isinstance(leaves[path], LowRank):
            raise ConfigError(
                f"the params have an adapter already (of {path}): merge it with jf.merge first."
            )
        # A stack has a module for each layer.
        spec = table[path]
        depth = int(spec.is_stacked)
        one_layer = dataclasses.replace(spec, shape=spec.shape[depth:], axes=spec.axes[depth:])
        rank = max(module.rank for module in modules)
        dropout = stored.settings.lora_dropout
        specs = low_rank(one_layer, rank, 1.0, dropout, dora=stored.settings.use_dora)
        if depth:
            specs = stack(specs, spec.shape[0])  # type: ignore[arg-type, assignment]
        # float32: a [I..., R], b [R, O...] and scale [], in a stack all with the axis of the
        # layers, and of experts a and b with theirs.
        a, b, scale = (np.zeros(row.shape, np.float32) for row in (specs.a, specs.b, specs.scale))
        if specs.magnitude is not None:
            # Of all layers: where the adapter leaves one out, its magnitudes may learn later.
            scale += modules[0].scale
        for module in modules:
            matrices = split_matrices(module.tensor, *map(stored.read, module.names))
            layer: tuple[Any, ...] = module.tensor.entry
            b_index = (*layer, slice(module.rank))
            if module.tensor.experts:
                b_index = (*layer, slice(None), slice(module.rank))
            a_of_layer, b_of_layer = matrices[module.tensor.paths.index(path)]
            a[(*layer, ..., slice(module.rank))] = a_of_layer
            b[b_index] = b_of_layer
            scale[layer] = module.scale
        leaf = dataclasses.replace(
            specs,
            weight=leaves[path],
            a=put(specs.a, a),
            b=put(specs.b, b),
            scale=put(specs.scale, scale),
        )
        if specs.magnitude is not None:
            # Of layers without an adapter, the norms of their weights.
            magnitude = np.array(leaf.norms())
            for module in modules:
                assert module.magnitude is not None
                column = stored.read(module.magnitude)[:, None]
                zeros = np.zeros((1, module.tensor.specs[0].fan_in), np.float32)
                _, parts = zip(*split_matrices(module.tensor, zeros, column), strict=True)
                magnitude[module.tensor.entry] = parts[module.tensor.paths.index(path)][0]
            leaf = dataclasses.replace(leaf, magnitude=put(specs.magnitude, magnitude))
        leaves[path] = leaf
    return map_specs(lambda path, _: leaves[path], model_specs(config))


def _with_saved(
    stored: StoredAdapter,
    saved: Sequence[SavedTensor],
    params: Params,
    config: ModelConfig,
    put: PutLeaf,
) -> dict[str, Any]:
    """Return the leaves of the base by path, replaced or joined by those that the adapter has saved
    whole."""
    table = rows(model_specs(config))
    new: dict[str, np.ndarray] = {}
    leaves = flat_leaves(params, is_custom)
    for tensor, name in saved:
        values = tensor.leaves_of(stored.read(name))
        for path, value in zip(tensor.paths, values, strict=True):
            if not tensor.entry:
                new[path] = np.asarray(value)
                continue
            if is_custom(leaves[path]):
                raise ConfigError(
                    f"{name} of the adapter replaces a layer of {path}, which is a"
                    f" {type(leaves[path]).__name__}."
                )
            if path not in new:
                new[path] = np.array(leaves[path])
            new[path][tensor.entry] = value
        if tensor.name == f"{SCORE}.weight":
            # It has no bias in transformers.
            new["head.bias"] = np.zeros(config.head.n_classes, np.float32)
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


def learned_branches(directory: Path, config: ModelConfig) -> tuple[str, ...]:
    """Return the branches of the params of a model that its adapter has saved whole, beside those
    that it adapts."""
    modules, saved = fitted(stored_in(directory), adapter_layout(config))
    adapted: set[str] = set()
    for module in modules:
        adapted.update(module.tensor.paths)
    branches: dict[str, None] = {}
    for tensor, _ in saved:
        for path in tensor.paths:
            if path not in adapted:
                branches[path.split(".")[0]] = None
    return tuple(branches)
