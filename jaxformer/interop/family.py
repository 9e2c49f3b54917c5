"""What a family of Hugging Face models is: how its config.json maps to `ModelConfig`, and its
tensors to our leaves."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxformer.config import ConfigError, ModelConfig
from jaxformer.interop.compare import differences, resolved
from jaxformer.interop.fields import Choice, Key, KeyMapping, Ours
from jaxformer.interop.hf_config import REQUIRED, HFConfig
from jaxformer.interop.table import Tensor, TensorRow, tensors, unplaced
from jaxformer.models.transformer import specs as model_specs


class Copy(NamedTuple):
    """A tensor that repeats another: `written` too or not, `checked` to be equal or not; one that
    `unties` may differ, and is the output layer then."""

    name: str
    of: str
    written: bool = False
    checked: bool = True
    unties: bool = False


Copies = Callable[[ModelConfig], tuple[Copy, ...]]


def tied_copy(head: str, embedding: str, *again: str) -> Copies:
    """The output layer, which files may hold though it is tied, and other names under which they
    repeat the embedding."""
    others = tuple(Copy(name, embedding) for name in again)
    return lambda config: (
        *others,
        *((Copy(head, embedding, unties=True),) if config.tied_head else ()),
    )


@dataclass(frozen=True)
class Family:
    """`architectures` maps each class of transformers to the fields of ours that it stands for, the
    narrower first; `bases` are classes without a head that are read as the first of them, which
    ties it to the embedding; `prefix` is what files of a base, and older ones, leave out of names;
    `ignored` are patterns of buffers that files may hold and no one reads.
    """

    model_type: str
    architectures: Mapping[str, Ours]
    fields: Sequence[KeyMapping]
    rows: Callable[[ModelConfig], tuple[TensorRow, ...]]
    copies: Copies
    bases: tuple[str, ...] = ()
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def read(self, hf: HFConfig, architecture: str) -> ModelConfig:
        """Our config of theirs. Raises ConfigError for a key with a value that nothing here
        computes."""
        for key, allowed in REQUIRED.items():
            if key in hf.values:
                hf.only(key, allowed)
        found: Ours = {}
        for row in self.fields:
            found |= row.read(hf)
        found |= self.architectures[architecture]
        if found.get("head") not in ("classes", "tags"):
            found.pop("n_classes", None)
        return ModelConfig(**found)

    def keys(self) -> dict[str, str]:
        """Their key of each field of ours that one alone states."""
        return {row.ours: row.hf for row in self.fields if isinstance(row, (Key, Choice))}

    def write(self, config: ModelConfig, architecture: str) -> dict[str, Any]:
        """Their keys of our config."""
        ours, keys = (
            resolved(config),
            {"architectures": [architecture], "model_type": self.model_type},
        )
        kept = {name: getattr(config, name) for name in ("dropout", "max_length", "tied_head")}
        ours = dataclasses.replace(ours, **kept)
        for row in self.fields:
            keys |= row.write(ours)
        return keys

    def obstacles(self, config: ModelConfig, architecture: str) -> list[str]:
        """What keeps an architecture from being exactly this config; nothing where it can state
        it."""
        if self.architectures[architecture].get("head", "language") != config.output:
            return [f"model.head={config.output!r}"]
        written = self.named(tensor.name for tensor in self.tensors(config))
        try:
            stated = self.read(HFConfig(self.write(config, architecture), written), architecture)
        except ConfigError as error:
            return [str(error)]
        left = unplaced(self.tensors(config), model_specs(config))
        return differences(config, stated) or [f"no tensor for {path}" for path in left]

    def named(self, names: Iterable[str]) -> set[str]:
        """Names as they are and as the class with a head has them."""
        return {name for found in names for name in (found, self.prefix + found)}

    def tensors(self, config: ModelConfig) -> list[Tensor]:
        return tensors(self.rows(config), model_specs(config))
