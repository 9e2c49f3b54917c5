"""What a peft directory holds, and which tensors of a model it is for."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxformer.files import ConfigError, first_of
from jaxformer.interop.peft_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ModuleSettings,
    PeftSettings,
)
from jaxformer.interop.peft_modules import (
    PREFIX,
    Layout,
    is_lookup,
    is_output,
    part_names,
    part_shapes,
)
from jaxformer.interop.safetensors import TensorFiles
from jaxformer.interop.table import Tensor, matched

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
