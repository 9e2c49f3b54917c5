"""Model directories of Hugging Face: config.json and safetensors to a config and params, and
back."""

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.interop.bart import BART
from jaxformer.interop.bert import BERT
from jaxformer.interop.bloom import BLOOM
from jaxformer.interop.family import Family
from jaxformer.interop.gemma import GEMMA2, GEMMA3
from jaxformer.interop.gpt2 import GPT2
from jaxformer.interop.gpt_neox import GPT_NEOX
from jaxformer.interop.hf_config import HFConfig, check_dtype, is_pretrained, read_json
from jaxformer.interop.llama import LLAMA
from jaxformer.interop.marian import MARIAN
from jaxformer.interop.mistral import MISTRAL
from jaxformer.interop.olmo2 import OLMO2
from jaxformer.interop.qwen import QWEN2, QWEN3
from jaxformer.interop.roberta import ROBERTA
from jaxformer.interop.safetensors import TensorFiles, write_tensors
from jaxformer.interop.t5 import T5
from jaxformer.interop.table import PIECE, Tensor, leaf_reader, matched, tensor_of
from jaxformer.mesh import parameter_sharding
from jaxformer.models.transformer import specs as model_specs
from jaxformer.params import Params, Spec, check_params, is_custom, map_specs

# The first that can state a config is written, so the plainer come first.
HF_FAMILIES: tuple[Family, ...] = (
    *(
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3,
        OLMO2,
        GPT2,
        GPT_NEOX,
        BLOOM,
        BERT,
        ROBERTA,
        T5,
        BART,
        MARIAN,
    ),
)
ARCHITECTURES = {name: family for family in HF_FAMILIES for name in family.architectures}
BASES = {name: next(iter(family.architectures)) for family in HF_FAMILIES for name in family.bases}
SHARD_BYTES = 5_000_000_000
SHOWN = 12  # names in a message


class Pretrained(NamedTuple):
    """What a model directory holds, besides text."""

    params: Params
    config: ModelConfig
    labels: tuple[str, ...]


def pretrained_config(directory: Path) -> ModelConfig:
    """The config of a model directory. Raises ConfigError as `load_pretrained` does."""
    return _opened(directory).config


def load_pretrained(
    directory: Path, mesh: Mesh | None = None, dtype: str = "float32"
) -> Pretrained:
    """The model of a directory, leaf by leaf to its place on `mesh` (or this machine's first
    device), as `dtype`.

    The host holds one leaf at a time. Raises ConfigError for an architecture or an option that is
    not computed here, and for tensors that do not fit config.json, each by its name and file.
    """
    family, config, labels, files, unknown = _opened(directory)
    if unknown:
        warnings.warn(
            f"{directory}/config.json has keys that change nothing in {family.model_type}, in"
            f" transformers or here: {', '.join(unknown)}.",
            stacklevel=3,
        )
    plan = family.tensors(config)
    names = _held(directory, family, config, plan, files)
    part = leaf_reader(plan, names, files.read)
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def leaf(path: str, spec: Spec) -> jax.Array:
        place = here if mesh is None else parameter_sharding(mesh, spec.shape, spec.axes)
        made = jax.make_array_from_callback(
            spec.shape, place, lambda index: part(path, index or (), jnp.dtype(dtype))
        )
        return made.block_until_ready()  # until it is on its device, the host holds it too

    return Pretrained(map_specs(leaf, model_specs(config)), config, labels)


class Opened(NamedTuple):
    """A model directory before a tensor was read; `unknown` are keys of its config.json that no row
    asked for."""

    family: Family
    config: ModelConfig
    labels: tuple[str, ...]
    files: TensorFiles
    unknown: list[str]


def _opened(directory: Path) -> Opened:
    path = directory / "config.json"
    values = read_json(path)
    family, architecture = stated_architecture(path, values)
    files = TensorFiles(directory)
    hf = HFConfig(values, family.named(files.entries))
    try:
        config = family.read(hf, architecture)
        model_specs(config)
    except (ConfigError, TypeError) as error:
        said = str(error)
        theirs_too = [
            f"model.{ours} is {key} there"
            for ours, key in family.keys().items()
            if f"{ours}=" in said
        ]
        raise ConfigError(
            f"{path}: {said}" + f"\n({', '.join(theirs_too)})" * bool(theirs_too)
        ) from None
    named = values.get("id2label") if config.output in ("classes", "tags") else None
    labels = tuple(str(named[key]) for key in sorted(named, key=int)) if named else ()
    return Opened(family, _untied(family, config, files), labels, files, hf.unknown())


def stated_architecture(path: Path, values: Mapping[str, Any]) -> tuple[Family, str]:
    """The architecture that a config.json is read as. Raises ConfigError for one that is not
    computed here."""
    kind, named = values.get("model_type"), values.get("architectures") or []
    alike = [name for name, family in ARCHITECTURES.items() if family.model_type == kind]
    known = [
        BASES.get(name, name) for name in named or alike if name in ARCHITECTURES or name in BASES
    ]
    if not known or (not named and len(known) > 1):
        what = (
            f"architectures={json.dumps(named)}"
            if named
            else f'no "architectures", and model_type={json.dumps(kind)}'
        )
        kinds = [
            f"{family.model_type} ({next(iter(family.architectures))})" for family in HF_FAMILIES
        ]
        those = (
            f"of {kind} those are {', '.join(alike)}"
            if alike
            else f"those are of the model types {', '.join(kinds)}"
        )
        raise ConfigError(
            f"{path} has {what}, which does not name one that jaxformer computes: {those}. "
            'Write it into "architectures" if the model is one.'
        )
    return ARCHITECTURES[known[0]], known[0]


def _untied(family: Family, config: ModelConfig, files: TensorFiles) -> ModelConfig:
    """`config` with an output layer of its own where the files have one that is not the
    embedding."""
    for copy in family.copies(config):
        if copy.unties and copy.name in files.entries:
            of = matched(files.entries, (copy.of,), family.prefix, family.renamed).get(copy.of)
            if of is None or not _equal(files, copy.name, of):
                return dataclasses.replace(config, tied_head=False)
    return config


def _equal(files: TensorFiles, a: str, b: str) -> bool:
    """Whether two tensors are, without either being in memory as a whole."""
    shape = files.entries[a].shape
    step = max(1, PIECE // math.prod(shape[1:]))
    rows = (slice(at, at + step) for at in range(0, shape[0], step))
    return shape == files.entries[b].shape and all(
        np.array_equal(files.read(a, cut), files.read(b, cut)) for cut in rows
    )


def _held(
    directory: Path, family: Family, config: ModelConfig, plan: list[Tensor], files: TensorFiles
) -> dict[str, str]:
    """The name in the files of each tensor; ConfigError naming all that are missing, left over or
    of another shape."""
    copies = family.copies(config)
    expected = {tensor.name: tensor.shape for tensor in plan}
    found = matched(
        files.entries, [*expected, *(copy.name for copy in copies)], family.prefix, family.renamed
    )
    problems = [
        f"{name}: not in {files.listing}, and config.json asks for {list(expected[name])}"
        for name in expected
        if name not in found
    ]
    for name, shape in expected.items():
        entry = files.entries.get(found.get(name, ""))
        if entry is not None and entry.shape != shape:
            problems.append(
                f"{found[name]}: {list(entry.shape)} in {entry.file}, and config.json asks for"
                f" {list(shape)}"
            )
    unused = {*files.entries} - {*found.values()}
    problems += [
        f"{name}: in {files.entries[name].file}, and {family.model_type} with this config.json has"
        " no such tensor"
        for name in sorted(unused)
        if not any(re.search(pattern, name) for pattern in family.ignored)
    ]
    for copy in copies:
        if (
            copy.name in found
            and copy.of in found
            and copy.checked
            and not _equal(files, found[copy.name], found[copy.of])
        ):
            file = files.entries[found[copy.name]].file
            problems.append(
                f"{found[copy.name]}: in {file} not equal to {found[copy.of]}, which it has to"
                " repeat"
            )
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ConfigError(
            f"the tensors of {directory} do not fit its config.json:\n  "
            + "\n  ".join(problems[:SHOWN] + more)
        )
    return found


def architecture_of(config: ModelConfig, wanted: str | None = None) -> tuple[Family, str]:
    """The first architecture that is exactly this config, or the `wanted` one. Raises ConfigError
    where none is."""
    if wanted is not None and wanted not in ARCHITECTURES:
        raise ConfigError(f"architecture={wanted!r} is not one of {', '.join(ARCHITECTURES)}.")
    in_the_way = {}
    for name, family in ARCHITECTURES.items():
        if wanted in (None, name):
            in_the_way[name] = family.obstacles(config, name)
            if not in_the_way[name]:
                return family, name
    nearest = sorted(
        in_the_way, key=lambda name: (_kinship(in_the_way[name]), len(in_the_way[name]))
    )[:3]
    told = "\n  ".join(f"{name}: {', '.join(in_the_way[name][:6])}" for name in nearest)
    raise ConfigError(
        "no Hugging Face architecture is exactly this model; the nearest, and what is in the"
        f" way:\n  {told}"
    )


def _kinship(obstacles: list[str]) -> int:
    """How far an architecture is: 0 where neither family nor head is in the way."""
    return sum(
        any(what.startswith(name) for what in obstacles) for name in ("model.family", "model.head=")
    )


def save_pretrained(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    tokenizer: Any = None,
    *,
    labels: tuple[str, ...] = (),
    architecture: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes a model directory that transformers, vLLM and llama.cpp's converter read; returns the
    files of weights.

    The architecture is the first that is exactly `config`, or the one named. `dtype` is that of the
    weights (default: that of the params); a file of weights has at most `shard_bytes`. The host
    holds one leaf of one layer at a time. Raises ConfigError where no architecture is this config,
    naming the fields in the way; nothing is written then.
    """
    directory, table = Path(path), model_specs(config)
    check_params(table, params)
    _refuse_custom(params)
    family, name = architecture_of(config, architecture)
    if dtype is not None:
        check_dtype(dtype)
    if (directory / "config.json").is_file() and not is_pretrained(directory):
        raise ConfigError(
            f"{directory} holds a config.json of something else (a run?): choose another directory."
        )
    leaves = {
        jax.tree_util.keystr(at, simple=True, separator="."): leaf
        for at, leaf in jax.tree.leaves_with_path(params)
    }
    plan = {tensor.name: tensor for tensor in family.tensors(config)}
    plan |= {copy.name: plan[copy.of] for copy in family.copies(config) if copy.written}
    shapes = {
        key: (tensor.shape, np.dtype(jnp.dtype(dtype or leaves[tensor.paths[0]].dtype)))
        for key, tensor in sorted(plan.items())
    }
    directory.mkdir(parents=True, exist_ok=True)
    files = write_tensors(directory, shapes, lambda key: tensor_of(plan[key], leaves), shard_bytes)
    stored = dtype or str(next(iter(leaves.values())).dtype)
    keys = {"torch_dtype": stored, **_tokens(config, tokenizer), **family.write(config, name)}
    if keys.pop("num_labels", None):
        names = labels or tuple(f"LABEL_{index}" for index in range(config.n_classes))
        keys |= {
            "id2label": dict(enumerate(names)),
            "label2id": {label: index for index, label in enumerate(names)},
        }
    if tokenizer is not None:
        tokenizer.save(directory / "tokenizer.json")
    _write_json(directory / "config.json", keys)
    return files


def _refuse_custom(params: Any) -> None:
    """ConfigError where a leaf of the params is no array: the format has no name for its parts."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_custom)
    custom = {
        jax.tree_util.keystr(at, simple=True, separator="."): leaf
        for at, leaf in leaves
        if is_custom(leaf)
    }
    if custom:
        named = ", ".join(f"{path} ({type(leaf).__name__})" for path, leaf in custom.items())
        raise ConfigError(
            f"a model directory holds plain arrays, and these leaves are none: {named}. Merge each"
            " into one array first."
        )


def _tokens(config: ModelConfig, tokenizer: Any) -> dict[str, int | None]:
    """Ids of special tokens; those with which a target begins where there is one."""
    known = tokenizer.ids() if tokenizer is not None else {}
    named: dict[str, int | None] = {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | known
    begins = config.family == "encoder_decoder"
    return {
        key: token
        for key, token in named.items()
        if begins or key not in ("decoder_start_token_id", "forced_bos_token_id")
    }


def _write_json(path: Path, keys: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
