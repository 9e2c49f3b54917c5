"""A family of Hugging Face models: how its config.json maps to `ModelConfig`, and its tensors to
the params."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.interop.fields import Choice, ConfigFields, Key, KeyMapping, tied, with_factors
from jaxformer.interop.hf_config import QUANTIZATION, REQUIRED, HFConfig, quantization_method
from jaxformer.interop.tensor_files import TensorFiles
from jaxformer.interop.tensor_table import (
    Tensor,
    TensorRow,
    paths_without_tensor,
    tensors,
    with_rows,
)
from jaxformer.models.transformer import specs as model_specs


class Copy(NamedTuple):
    """A tensor that repeats the tensor `of`. `written`: it is saved too. `checked`: the two have to
    be equal. `unties`: they may differ, and the tensor is then the output layer."""

    name: str
    of: str
    written: bool = False
    checked: bool = True
    unties: bool = False


Copies = Callable[[ModelConfig], tuple[Copy, ...]]


def tied_copy(head: str, embedding: str, *others: str) -> Copies:
    """Return the output layer of a tied model, which files may hold, and other names of the
    embedding."""
    repeated = tuple(Copy(name, embedding) for name in others)

    def copies(config: ModelConfig) -> tuple[Copy, ...]:
        if config.tied_head:
            return *repeated, Copy(head, embedding, unties=True)
        return repeated

    return copies


@dataclass(frozen=True)
class Family:
    """A row for each family of architectures.

    `architectures` maps each class of transformers to the fields that it implies, the more specific
    first. `bases` are classes without a head, read as the first architecture with a tied output
    layer. `prefix` is the start of names that files of a base, and older files, leave out.
    `ignored` are patterns of tensors that are not read; `renamed` are (pattern, new) of old names.
    `computed` are tensors that follow from the config, such as sinusoids: they are written, and
    files may lack them. `module_rows` are rows of the class of transformers, in the place of those
    with the same leaves, where files have other tensors. `required_ids` are the ids of special
    tokens that are written where there is no such token, if the class wants a number. `packed` are
    the readers of packed weights, by quant_method of quantization_config.
    """

    model_type: str
    architectures: Mapping[str, ConfigFields]
    fields: Sequence[KeyMapping]
    rows: Callable[[ModelConfig], tuple[TensorRow, ...]]
    copies: Copies
    bases: tuple[str, ...] = ()
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    computed: Callable[[ModelConfig], Mapping[str, np.ndarray]] = lambda config: {}
    packed: Mapping[str, type[TensorFiles]] = dataclasses.field(default_factory=dict)
    module_rows: tuple[TensorRow, ...] = ()
    required_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def read(self, hf: HFConfig, architecture: str) -> ModelConfig:
        """Return the config of a config.json."""
        for key, allowed in REQUIRED.items():
            if key == QUANTIZATION:
                allowed += tuple({"quant_method": name} for name in self.packed)
                if quantization_method(hf.values) in self.packed:
                    continue
            hf.only(key, allowed)
        config_fields: ConfigFields = {}
        # What a later row says holds: the families put their own behind those of their relatives.
        for row in self.fields:
            config_fields |= row.read(hf)
        config_fields |= self.architectures[architecture]
        # A config.json counts classes whether the model has a head of classes or not.
        if config_fields.get("head.kind") not in ("classes", "tags"):
            config_fields.pop("head.n_classes", None)
        return with_settings(ModelConfig(), config_fields)

    def keys(self) -> dict[str, str]:
        """Return the key of each field that has one key."""
        names = {}
        for row in self.fields:
            if isinstance(row, Key | Choice):
                names[row.field] = row.hf
        return names

    def write(self, config: ModelConfig, architecture: str) -> dict[str, Any]:
        """Return the keys of a config."""
        # No config.json has a parametrization, so factors that follow from muP are numbers there.
        complete = with_factors(config)
        keys = {"architectures": [architecture], "model_type": self.model_type}
        for row in self.fields:
            keys |= row.write(complete)
        return keys

    def read_again(self, config: ModelConfig, architecture: str) -> ModelConfig:
        """Return what the config.json says that is written of a config. ConfigError where it cannot
        be written as this architecture at all."""
        if self.architectures[architecture].get("head.kind", "language") != config.output:
            raise ConfigError(f"model.head.kind={config.output!r}")
        # Some settings are read off the tensors that a file has, such as a pooler.
        names = self.named(tensor.name for tensor in self.tensors(config))
        return self.read(HFConfig(self.write(config, architecture), names), architecture)

    def left_out(self, config: ModelConfig) -> list[str]:
        """Return the leaves of a model that no tensor of its files holds."""
        return paths_without_tensor(self.tensors(config), model_specs(config))

    def named(self, names: Iterable[str]) -> set[str]:
        """Return the names as they are, and as the class with a head has them."""
        names = {*names}
        return names | {self.prefix + name for name in names}

    def tensors(self, config: ModelConfig, in_class: bool = False) -> list[Tensor]:
        """Return the tensors of the files; with `in_class`, those of the class of transformers."""
        rows = self.rows(config)
        if in_class:
            rows = with_rows(rows, *self.module_rows)
        if config.output == "none":
            # The class without a head is the base itself.
            rows = tuple(row._replace(hf=row.hf.removeprefix(self.prefix)) for row in rows)
        return tensors(rows, model_specs(config))


# The frequencies of RoPE, which older versions of transformers saved; they are computed.
INV_FREQ = r"rotary_emb\.inv_freq$"


def decoder_like(
    model_type: str,
    name: str,
    rows: tuple[TensorRow, ...] | Callable[[ModelConfig], tuple[TensorRow, ...]],
    mappings: Sequence[KeyMapping],
    embedding: str = "model.embed_tokens.weight",
    head: str = "lm_head.weight",
    model: str = "ForCausalLM",
    base: str | None = None,
    is_tied: bool = False,
    ignored: tuple[str, ...] = (INV_FREQ,),
    **others: Any,
) -> Family:
    """Return a family of decoders, whose class is `name` + `model`.

    `rows` are all but those of the tensors `embedding`, whose first part all names of the base
    begin with, and `head`. `base` is the class without a head, "" where it is not read, by default
    `name` + "Model". `is_tied` is the default of tie_word_embeddings; `others` are as in `Family`.
    """
    first = TensorRow(embedding, "embed.tokens")
    last = TensorRow(head, "head.weight")
    if base is None:
        base = f"{name}Model"

    def all_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
        if callable(rows):
            return first, *rows(config), last
        return first, *rows, last

    return Family(
        model_type,
        {name + model: {}},
        (*mappings, tied(is_tied)),
        all_rows,
        prefix=embedding.split(".")[0] + ".",
        bases=(base,) if base else (),
        copies=tied_copy(head, embedding),
        ignored=ignored,
        **others,
    )
