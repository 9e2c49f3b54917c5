"""The modules of transformers' classes that peft adapts, and how the two matrices of an adapter lie
in peft's tensors.

A module is a tensor of the table of a family (`tensor_table`) that is a matrix: a linear layer,
or the table of an embedding. Where queries, keys and values are one module, it has one lora_A for
the three leaves, and its lora_B has their rows in the order of that module's own weight.

Experts and their router are parameters and no modules (`target_parameters` of peft). Those of all E
experts of a layer have one lora_A [E R, inputs], in which the rows of an expert follow each other,
and one lora_B [outputs, R E], in which the columns of the experts take turns.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxformer.adapters.low_rank import LowRank, low_rank
from jaxformer.arrays.params import Weight, is_custom, rows
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.interop.architectures import find_architecture
from jaxformer.interop.family import Copy, Family
from jaxformer.interop.peft_config import HEAD_MODULES
from jaxformer.interop.tensor_table import (
    CONV,
    IN_TURN,
    INTERLEAVED,
    LINEAR,
    SAME,
    Tensor,
    Transform,
    matched,
)
from jaxformer.models.transformer import specs as model_specs

PREFIX = "base_model.model."  # of every name in adapter_model.safetensors
# Modules of other layers that peft takes for the experts of a model when it loads an adapter, since
# experts were modules of these names before transformers 5. Their weights are parameters to peft.
TAKEN_FOR_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
MAGNITUDE = "lora_magnitude_vector"  # of DoRA, [outputs]
SCORE = "score"  # the output layer of a decoder's class head in transformers, without a bias


@dataclass(frozen=True)
class Layout:
    """The tensors of an architecture by name, those that are modules which peft can adapt, by the
    name of the module, the parameters that it adapts by their names (experts, routers, and modules
    that it takes for experts), and what repeats a tensor (a tied output layer). `family` has the
    names of other classes and versions."""

    tensors: Mapping[str, Tensor]
    modules: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    copies: tuple[Copy, ...]
    family: Family

    def matched(self, names: Iterable[str], expected: Iterable[str]) -> dict[str, str]:
        """Return the name in the files of each expected one that they have."""
        return matched(names, expected, self.family.prefix, self.family.renamed)

    def obstacle(self, tensor: Tensor) -> str:
        """Return why peft cannot adapt a module as it is adapted here; empty where it can."""
        path = tensor.paths[0]
        if any(copy.of == tensor.name for copy in self.copies):
            return f"{path} is used in several places, and peft adapts one of them"
        if tensor.name.endswith("embed_positions.weight"):
            return f"peft looks its adapter up by the tokens, and {path} by their positions"
        return ""

    def saved_modules(self, leaves: Mapping[str, Weight], learned: tuple[str, ...]) -> set[str]:
        """Return the modules that are saved whole: those of the branches in `learned`, and what
        peft takes for the head of a classifier."""
        modules = set()
        has_adapter = False
        for name, tensor in self.tensors.items():
            branch = name.split(".")[0]
            if branch in HEAD_MODULES:
                modules.add(branch)
                has_adapter |= any(isinstance(leaves[path], LowRank) for path in tensor.paths)
        # A head with an adapter has not learned itself.
        if has_adapter:
            modules.clear()
        if SCORE in modules and np.any(np.asarray(leaves["head.bias"])):
            raise ConfigError(
                "head.bias is not zero, and the class head of a decoder has no bias in"
                " transformers: set it to zero, or merge the adapter (jf.merge) and save the run."
            )
        for name, tensor in self.tensors.items():
            for path in tensor.paths:
                if path.split(".")[0] not in learned:
                    continue
                if not is_in(name, modules):
                    modules.add(name.rpartition(".")[0])
                if is_custom(leaves[path]):
                    raise ConfigError(
                        f"learned={[*learned]} saves {path}, which is no array but"
                        f" {type(leaves[path]).__name__}: leave it out."
                    )
        # peft would load one place alone, and the other would keep the base's numbers.
        repeated = [copy.name for copy in self.copies if is_in(copy.name, modules)]
        if repeated:
            raise ConfigError(
                f"learned={[*learned]} saves {repeated[0]}, which the model has in several places,"
                " and peft saves it in one. Save the merged model instead (jf.merge,"
                " jf.save_pretrained)."
            )
        return modules


def is_in(name: str, modules: Collection[str]) -> bool:
    """Return whether a tensor is one of a module."""
    return any(name.startswith(f"{module}.") for module in modules)


def adapter_layout(config: ModelConfig, architecture: str | None = None) -> Layout:
    """Return the modules of the architecture that is exactly `config`, or of the one named; a
    decoder with a class head is one of transformers' ...ForSequenceClassification."""
    has_score = (config.family, config.output) == ("decoder", "classes")
    if has_score:
        if config.head.soft_cap or config.pooled != "last":
            raise ConfigError(
                "a decoder's class head in transformers reads the last token and has no soft cap,"
                f" and this model has model.head.pooling={config.pooled!r} and"
                f" model.head.soft_cap={config.head.soft_cap}: set last and 0."
            )
        weight = rows(model_specs(config))["head.weight"]
        score = Tensor(f"{SCORE}.weight", ("head.weight",), (), (weight,), SAME)
        config = with_settings(config, {"head.kind": "language", "tied_head": False})
    family, _ = find_architecture(config, architecture)
    plan = family.tensors(config, in_class=True)
    copies = family.copies(config)
    if has_score:
        plan = [tensor for tensor in plan if not tensor.paths[0].startswith("head.")]
        plan.append(score)
        copies = ()

    by_name = {tensor.name: tensor for tensor in plan}
    # peft wraps modules by their names, and experts, which are no modules, as parameters.
    parameters = {}
    modules = {}
    for name, tensor in by_name.items():
        module, _, end = name.rpartition(".")
        if not tensor.specs[0].is_matrix:
            continue
        # No linear layer of transformers holds experts or their router.
        if tensor.experts or tensor.paths[0].endswith("experts.router"):
            parameters[name] = tensor
        elif end == "weight":
            modules[module] = tensor
    if parameters:
        for module, tensor in modules.items():
            if module.rpartition(".")[2] in TAKEN_FOR_EXPERTS:
                parameters[f"{module}.weight"] = tensor
    return Layout(by_name, modules, parameters, copies, family)


def parameter_modules(parameters: Sequence[str], adapted: Collection[str]) -> dict[str, str]:
    """Return the module of each adapted parameter as peft's files name it. A module is wrapped once
    for each of its parameters, of which the first is innermost."""
    names = {}
    outer: Counter[str] = Counter()  # adapted parameters behind this one, by their modules
    for name in reversed(parameters):
        module = name.rpartition(".")[0]
        if name in adapted:
            names[name] = module + ".base_layer" * outer[module]
            outer[module] += 1
    return dict(reversed(names.items()))


def matrix_names(tensor: Tensor) -> tuple[str, str]:
    """Return the ends of the names of an adapter's two matrices."""
    if tensor.specs[0].lookup:
        return "lora_embedding_A", "lora_embedding_B"
    return "lora_A.weight", "lora_B.weight"


def matrix_shapes(tensor: Tensor, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of an adapter's two matrices: [R, inputs] and [outputs, R], of E experts [E
    R, inputs] and [outputs, R E]."""
    outputs = sum(spec.fan_out for spec in tensor.specs)
    width = rank * (tensor.experts or 1)
    return (width, tensor.specs[0].fan_in), (outputs, width)


def split_matrices(
    tensor: Tensor, lora_a: np.ndarray, lora_b: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return a [I..., R] and b [R, O...] of each leaf of a module, from peft's [R, inputs] and
    [outputs, R]; the leaves have the same a. Of experts, a [E, I..., R] and b [E, R, O...] from
    [E R, inputs] and [outputs, R E]."""
    count = tensor.experts or 1
    rank = len(lora_a) // count
    leaves = [low_rank(spec, rank, 1.0) for spec in tensor.specs]
    # lora_A has no order of its own: its columns are the inputs as the weight of every family has
    # them, one after another.
    a = lora_a.reshape(count, rank, -1).swapaxes(1, 2)
    of_experts = lora_b.reshape(-1, rank, count)
    b_specs = [leaf.b for leaf in leaves]
    parts = [_order(tensor).split(of_experts[..., e], b_specs) for e in range(count)]
    matrices = []
    for leaf, b in zip(leaves, zip(*parts, strict=True), strict=True):
        a_of_leaf = a.reshape(count, *leaf.a.shape)
        b_of_leaf = np.reshape(b, (count, *leaf.b.shape))
        if not tensor.experts:
            a_of_leaf = a_of_leaf[0]
            b_of_leaf = b_of_leaf[0]
        matrices.append((a_of_leaf, b_of_leaf))
    return matrices


def join_matrices(
    tensor: Tensor, a: np.ndarray, bs: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return peft's [E R, inputs] and [outputs, R E], from the leaves' common a [E, inputs, R] and
    the b [E, R, outputs] of each; E is 1 where there are no experts."""
    count, inputs, rank = a.shape
    b_specs = [low_rank(spec, rank, 1.0).b for spec in tensor.specs]
    columns = [_order(tensor).join([b[e] for b in bs], b_specs) for e in range(count)]
    lora_a = np.ascontiguousarray(a.swapaxes(1, 2)).reshape(-1, inputs)
    return lora_a, np.stack(columns, -1).reshape(-1, rank * count)


def _order(tensor: Tensor) -> Transform:
    """Return how the rows [outputs, R] of lora_B are ordered: as those of the module's weight. peft
    has this shape also over weights that are stored as [inputs, outputs], and over embeddings."""
    if tensor.transform is INTERLEAVED:
        return IN_TURN
    if tensor.transform in (SAME, CONV):
        return LINEAR
    return tensor.transform
