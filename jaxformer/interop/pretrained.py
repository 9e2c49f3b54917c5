"""Model directories of Hugging Face: config.json and safetensors to a config and params, and
back."""

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxformer.arrays.mesh import placement
from jaxformer.arrays.params import (
    CustomLeaf,
    Params,
    Spec,
    Weight,
    check_params,
    dotted,
    is_custom,
    map_specs,
    rows,
)
from jaxformer.checkpoints.reading import flat_leaves
from jaxformer.config.adapter import Quantization
from jaxformer.config.format import human_count
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError, first_of, store_of, write_text
from jaxformer.interop.architectures import find_architecture, read_architecture
from jaxformer.interop.family import Family
from jaxformer.interop.gguf_files import GgufFiles, is_gguf
from jaxformer.interop.hf_config import (
    HFConfig,
    check_dtype,
    is_pretrained,
    quantization_method,
    read_config_json,
    read_problem_type,
)
from jaxformer.interop.sentence_modules import read_pooling, write_modules
from jaxformer.interop.tensor_files import (
    TensorFiles,
    copied_model,
    has_tensors,
    listed,
    write_tensors,
)
from jaxformer.interop.tensor_table import Tensor, joined_tensor, leaf_reader, matched
from jaxformer.layers.block import CROSS
from jaxformer.layers.head import total_divisor
from jaxformer.layers.norm import NORMS
from jaxformer.models.quantize import is_quantized, quantized_leaf
from jaxformer.models.transformer import specs as model_specs
from jaxformer.models.transformer import without_objective

# As transformers: the host holds one file while it is written, and each file is one more to load.
SHARD_BYTES = 5_000_000_000
HOST_BYTES = 1 << 28  # of a leaf that is on its way from the files to the devices
# A config.json of another model gives hundreds.
MISMATCHES_SHOWN = 12
# A config.json of more parameters than both, the second by numbers in its files, is not followed.
SMALL = 10**9
MOST_TIMES = 16

SpecialIds = int | list[int] | None  # of a special token in a config.json; a list for several ends


class SavedTokenizer(Protocol):
    """What is written of a tokenizer, as of `jf.Tokenizer`: tokenizer.json, and its ids by their
    keys in a config.json."""

    def save(self, path: Path, /) -> None: ...

    def ids(self) -> Mapping[str, SpecialIds]: ...


def pretrained_config(directory: Path) -> ModelConfig:
    """Return the config of a model directory, whose files of weights need not be there: then
    config.json says what the model is, with the names in the index of the weights if that is
    there."""
    # Of a URL the weights are not copied for that.
    if store_of(directory).reads_in_place and has_tensors(directory):
        return open_pretrained(directory).config
    path = directory / "config.json"
    values = read_config_json(directory)
    family, architecture = read_architecture(path, values)
    names = None
    _, _, shard_of = listed(directory)
    if shard_of:
        names = family.named(shard_of)
    return _config_of(path, HFConfig(values, names), family, architecture)


def load_pretrained(
    opened: "Opened",
    mesh: Mesh | None = None,
    dtype: str = "float32",
    quantize: Quantization | None = None,
) -> Params:
    """Return the params of an opened model, read leaf by leaf to their places on `mesh` (or this
    machine's first device), as `dtype`; with `quantize` each matrix of the blocks is quantized
    before the next leaf is read (see `jf.quantize`).

    Besides the params the host holds one tensor, and `HOST_BYTES` of a leaf or one layer of it,
    into whatever shards the files are cut. ConfigError for an architecture or an option that is not
    supported, and for tensors that do not fit config.json, each by its name and file.
    """
    if opened.unknown:
        warnings.warn(
            f"{opened.path}/config.json has keys that change nothing in {opened.family.model_type},"
            f" in transformers or here: {', '.join(opened.unknown)}.",
            stacklevel=3,
        )
    plan = opened.family.tensors(opened.config)
    specs = model_specs(opened.config)
    read_leaf = leaf_reader(plan, specs, opened.checked_names(plan), opened.files.read)

    def load_leaf(path: str, spec: Spec) -> Weight:
        sharding = placement(mesh, spec.shape, spec.axes)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            numbers = read_leaf(path, index, jnp.dtype(dtype))
            if dtype != "float16":
                return numbers
            beyond = np.isinf(numbers)
            # The file may hold infinities itself.
            if beyond.any() and np.isfinite(read_leaf(path, index, np.dtype("f4"))[beyond]).any():
                raise ConfigError(
                    f"{opened.path}: {path} has values beyond the range of float16: load it as"
                    " bfloat16 or float32."
                )
            return numbers

        array = _placed(read, spec, sharding, dtype)
        if quantize is None or not is_quantized(spec, quantize):
            return array
        quantized: CustomLeaf = quantized_leaf(path, array, spec, quantize)
        return jax.block_until_ready(quantized)

    return map_specs(load_leaf, specs)


def _placed(
    read: Callable[[tuple[slice, ...]], np.ndarray], spec: Spec, sharding: Sharding, dtype: str
) -> jax.Array:
    """Return a leaf on its devices. Of a small one the host holds all numbers until they are there;
    a large one is made on the devices and filled with rows of its first axis, `HOST_BYTES` or one
    row at a time."""
    itemsize = jnp.dtype(dtype).itemsize
    if math.prod(spec.shape) * itemsize <= HOST_BYTES:
        array = jax.make_array_from_callback(spec.shape, sharding, lambda index: read(index or ()))
        return array.block_until_ready()
    shape = sharding.shard_shape(spec.shape)
    indices = sharding.addressable_devices_indices_map(spec.shape)
    shards = {}
    # Devices with the same numbers get them from one reading.
    groups: dict[str, list[jax.Device]] = {}
    for device, index in indices.items():
        groups.setdefault(str(index), []).append(device)
        # `jnp.zeros(device=)` makes them on the first device and copies.
        place = jax.sharding.SingleDeviceSharding(device)
        with jax.set_mesh(Mesh(np.array([device]), ("device",))):
            shards[device] = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)()
    step = max(1, HOST_BYTES // (math.prod(shape[1:]) * itemsize))
    for devices in groups.values():
        first, *others = indices[devices[0]] or ()
        for at in range(0, shape[0], step):
            begin = (first.start or 0) + at
            piece = read((slice(begin, begin + min(step, shape[0] - at)), *others))
            for device in devices:
                # The program is of one device, also where a mesh of several is set.
                with jax.set_mesh(Mesh(np.array([device]), ("device",))):
                    rows_there = jax.device_put(piece, device)
                    shards[device] = WRITE_ROWS(shards[device], rows_there, at, axis=0)
            jax.block_until_ready([shards[device] for device in devices])
            del piece  # before the next one is read
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, [*shards.values()])


WRITE_ROWS = jax.jit(jax.lax.dynamic_update_slice_in_dim, static_argnames="axis", donate_argnums=0)


class Opened(NamedTuple):
    """A model directory before a tensor is read; `problem_type` is that of `Loaded`, and `unknown`
    are the keys of its config.json that no row reads."""

    path: Path
    family: Family
    config: ModelConfig
    labels: tuple[str, ...]
    problem_type: str
    files: TensorFiles
    unknown: list[str]

    def checked_names(self, plan: list[Tensor]) -> dict[str, str]:
        """Return the name in the files of each tensor. ConfigError with all tensors that are
        missing, unexpected, or of another shape."""
        family = self.family
        files = self.files
        copies = family.copies(self.config)
        computed = family.computed(self.config)
        entries = files.entries
        expected = [tensor.name for tensor in plan]
        expected += [*(copy.name for copy in copies), *computed]
        names = matched(entries, expected, family.prefix, family.renamed)
        problems = []
        for tensor in plan:
            name = names.get(tensor.name, tensor.name)
            stored = f"not in {files.listing}"
            if name in entries:
                if entries[name].shape == tensor.shape:
                    continue
                stored = f"{list(entries[name].shape)} in {entries[name].file}"
            problems.append(f"{name}: {stored}, and config.json asks for {list(tensor.shape)}")
        for name in sorted({*entries} - {*names.values()}):
            if not any(re.search(pattern, name) for pattern in family.ignored):
                problems.append(
                    f"{name}: in {entries[name].file}, and {family.model_type} with this"
                    " config.json has no such tensor"
                )
        for copy in copies:
            if not copy.checked or not {copy.name, copy.of} <= names.keys():
                continue
            name = names[copy.name]
            original = names[copy.of]
            if not files.are_equal(name, original):
                problems.append(
                    f"{name}: in {entries[name].file} not equal to {original}, its original"
                )
        for key in computed.keys() & names.keys():
            table = files.read(names[key]).astype(np.float32)
            expected_table = computed[key]
            is_equal = table.shape == expected_table.shape
            # bfloat16 has two digits.
            if not is_equal or not np.allclose(table, expected_table, atol=1e-2):
                problems.append(f"{names[key]}: not the table that {family.model_type} computes")
        if problems:
            raise ConfigError(
                f"the tensors of {files.directory} do not fit its config.json:\n"
                f"  {first_of(problems, MISMATCHES_SHOWN)}"
            )
        return names


def open_pretrained(location: Path) -> Opened:
    """Open a Hugging Face directory or a GGUF file: its config, and its tensors by their names."""
    files: TensorFiles
    if is_gguf(location):
        path = store_of(location).local_copy()
        files = GgufFiles(path)
        values = files.values
        family, architecture = read_architecture(path, values)
    else:
        directory = copied_model(location)
        path = directory / "config.json"
        values = read_config_json(directory)
        family, architecture = read_architecture(path, values)
        reader = family.packed.get(quantization_method(values), TensorFiles)
        files = reader(directory)
    hf = HFConfig(values, family.named(files.entries))
    config = _config_of(path, hf, family, architecture)
    if config.output not in ("classes", "projection") and not is_gguf(location):
        pooling = read_pooling(location)
        if pooling != "auto":
            config = with_settings(config, {"head.pooling": pooling})

    # Before anything makes room for what a config.json says.
    described = sum(math.prod(spec.shape) for spec in rows(model_specs(config)).values())
    stored = sum(math.prod(entry.shape) for entry in files.entries.values())
    if described > max(MOST_TIMES * stored, SMALL):
        raise ConfigError(
            f"{path} describes a model of {human_count(described)} parameters, and"
            f" {files.listing} holds {human_count(stored)} numbers: the two do not belong together."
        )

    labels: Any = {}
    if config.output in ("classes", "tags"):
        # The names of transformers, which writes none for two classes.
        default = {str(index): f"LABEL_{index}" for index in range(config.head.n_classes)}
        labels = values.get("id2label") or default
    if not isinstance(labels, dict) or {*labels} != {str(index) for index in range(len(labels))}:
        raise ConfigError(
            f"{path}: id2label is {json.dumps(labels)[:80]}, and must name each class by its number"
            ' from 0, as in {"0": "negative", "1": "positive"}.'
        )
    names = tuple(str(labels[str(index)]) for index in range(len(labels)))

    # A file may have an output layer that is not the embedding, whatever it says.
    for copy in family.copies(config):
        if copy.unties and copy.name in files.entries:
            originals = matched(files.entries, (copy.of,), family.prefix, family.renamed)
            if copy.of not in originals or not files.are_equal(copy.name, originals[copy.of]):
                config = dataclasses.replace(config, tied_head=False)
    problem_type = ""
    if config.output == "classes":
        problem_type = read_problem_type(values, path)
    return Opened(location, family, config, names, problem_type, files, hf.unknown())


def _config_of(path: Path, hf: HFConfig, family: Family, architecture: str) -> ModelConfig:
    """Return the config that a config.json at `path` describes."""
    try:
        config = family.read(hf, architecture)
        model_specs(config)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:  # of a wrong type
        # The message names fields of ModelConfig; the file has other names for some of them.
        message = f"{path}: {error}"
        for field, key in family.keys().items():
            if f"{field}=" in str(error):
                message += f"\n(model.{field} is {key} there)"
        raise ConfigError(message) from None
    return config


def save_pretrained(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    tokenizer: SavedTokenizer | None = None,
    *,
    labels: tuple[str, ...] = (),
    problem_type: str = "",
    architecture: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write a model directory that transformers, vLLM and llama.cpp's converter read, and return
    the files of weights.

    The architecture is the first that is exactly `config`, or the one named. `dtype` is that of the
    weights (default: that of the params). A file of weights has at most `shard_bytes`; the host
    holds the tensors of one file at a time. Parameters of the loss of an objective are not
    written. A model in muP is written as the standard one of the same function (`standard_form`)
    where no architecture has the factors of its scores and logits. ConfigError where no
    architecture is this config; nothing is written then.
    """
    directory = Path(path)
    if "virtual" in params:
        raise ConfigError(
            "a model directory has no place for virtual tokens: write the model below them,"
            " jf.without_adapters(params)."
        )
    params = without_objective(params)
    check_params(model_specs(config), params)
    for leaf_path, leaf in flat_leaves(params, is_custom).items():
        if is_custom(leaf):
            raise ConfigError(
                f"a model directory holds plain arrays, and {leaf_path} is a {type(leaf).__name__}."
                " Merge each such leaf into one array first: jf.merge does it for adapters, and"
                " jf.save_adapter writes an adapter alone."
            )
    if dtype is not None:
        check_dtype(dtype)
    if (directory / "config.json").is_file() and not is_pretrained(directory):
        raise ConfigError(
            f"{directory} has a config.json of something else, such as a run: choose another"
            " directory."
        )
    try:
        family, name = find_architecture(config, architecture)
    except ConfigError:
        if not config.mup_base:
            raise
        params, config = standard_form(params, config)
        family, name = find_architecture(config, architecture)

    leaves = flat_leaves(params)
    plan = {tensor.name: tensor for tensor in family.tensors(config)}
    for copy in family.copies(config):
        if copy.written:
            plan[copy.name] = plan[copy.of]
    computed = family.computed(config)
    stored = dtype or str(next(iter(leaves.values())).dtype)
    shapes = {key: (table.shape, jnp.dtype(stored)) for key, table in computed.items()}
    for key, tensor in plan.items():
        shapes[key] = (tensor.shape, jnp.dtype(dtype or leaves[tensor.paths[0]].dtype))

    def make_tensor(key: str) -> np.ndarray:
        if key in computed:
            return computed[key]
        return joined_tensor(plan[key], leaves)

    files = write_tensors(directory, dict(sorted(shapes.items())), make_tensor, shard_bytes)
    keys: dict[str, Any] = {"torch_dtype": stored}
    # Null where there is no such token: transformers would take the ids of its default config.
    keys |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if tokenizer is not None:
        tokenizer.save(directory / "tokenizer.json")
        keys |= tokenizer.ids()
    if config.family != "encoder_decoder":
        # These begin a target.
        keys.pop("decoder_start_token_id", None)
        keys.pop("forced_bos_token_id", None)
    for key, value in family.required_ids.items():
        if keys[key] is None:
            keys[key] = value
    keys |= family.write(config, name)
    if config.output not in ("classes", "projection") and config.text_pooling in ("first", "last"):
        write_modules(directory, config.text_pooling, config.d_model)
    if keys.pop("num_labels", None):
        labels = labels or tuple(f"LABEL_{index}" for index in range(config.head.n_classes))
        keys["id2label"] = dict(enumerate(labels))
        keys["label2id"] = {label: index for index, label in enumerate(labels)}
        if problem_type:
            keys["problem_type"] = problem_type
    write_text(directory / "config.json", json.dumps(keys, indent=2) + "\n")
    return files


def standard_form(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """Return the standard model that computes the logits of one in muP, up to rounding.

    The factor of the scores is in the queries, or in their norm, and the divisor of the logits of a
    tied head is in an output matrix of its own. It is for inference and export: further training
    would have other rates.
    """
    usual = config.attention.scale or config.head_width**-0.5
    factor = (config.score_scale or usual) / usual
    has_norm = config.attention.query_key_norm != "none"
    offset = NORMS[config.norm].offset
    if config.attention.query_key_norm == "layer":
        offset = 0

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        parent, _, name = dotted(path).rpartition(".")
        if parent.split(".")[-1] not in (config.mixer, CROSS):
            return leaf
        if name == "q_norm":
            return factor * (offset + leaf) - offset
        # A norm of the queries would divide by a factor before it.
        if name in ("q", "q_bias") and not has_norm:
            return factor * leaf
        return leaf

    # A factor of 1 changes no number, and a copy of all leaves would hold the model twice.
    if factor != 1:
        params = jax.tree.map_with_path(scaled, params)
    divisor = total_divisor(config) / config.head.divisor
    # A tied matrix is the embedding too, which is not divided.
    if divisor != 1:
        matrix = params["embed"]["tokens"] / divisor
        params = {**params, "head": {**params.get("head", {}), "weight": matrix}}
    return params, standard_config(config)


def standard_config(config: ModelConfig) -> ModelConfig:
    """Return the config of the `standard_form` of a model in muP."""
    standard = dataclasses.replace(config, parametrization="standard", mup_base="")
    if total_divisor(config) != config.head.divisor:
        standard = dataclasses.replace(standard, tied_head=False)
    return standard
