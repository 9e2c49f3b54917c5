"""The settings of an adapter, which is trained in place of the model below it."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from jaxformer.config.settings import Bounds, Count, Rate, Section, parsed_groups, parts_of
from jaxformer.files import ConfigError

AdapterKind = Literal["none", "lora", "prompt", "prefix"]
# Formats in which weights are loaded: int8 also that of the tables of tokens, int8_blocks that of
# the blocks alone; nf4_double stores its scales in 8 bits too.
Quantization = Literal["int8", "int8_blocks", "nf4", "nf4_double"]
BaseWeights = Literal["float32", "int8", "nf4", "nf4_double"]
OF_LORA = ("rank", "alpha", "targets", "dropout", "rslora", "dora", "init", "groups")
LORA_WORDS = ("rank", "alpha")  # what a group of adapter.groups may give
# Settings that a kind of adapter does not read.
UNREAD = {
    "none": (*OF_LORA, "tokens", "base"),
    "lora": ("tokens",),
    "prompt": OF_LORA,
    "prefix": OF_LORA,
}


@dataclass(frozen=True)
class AdapterConfig(Section):
    """Adapter that is trained on top of the model of run.init_from, which stays as it is."""

    section = "adapter"

    kind: AdapterKind = "none"
    """Adapter: none trains the whole model, lora matrices of low rank beside the weights, prompt
    virtual tokens before the tokens, prefix keys and values before those of each layer."""
    base: BaseWeights = "float32"
    """Weights of the matrices of the model below: as they are, in int8 (a scale for each output
    channel), or in 4 bits (NF4, blocks of 64; nf4_double has their scales in 8 bits)."""
    tokens: Count = 20
    """Number of virtual tokens of the kinds prompt and prefix."""
    rank: Count = 8
    """Rank of the matrices of LoRA."""
    alpha: Annotated[float, Bounds(1e-6, most=1e6)] = 16.0
    """Scale of LoRA: its product is multiplied by alpha / rank."""
    targets: str = "attention"
    """Weights that LoRA adapts, separated by commas: names in their paths, such as attention,
    cross, ffn, embed or head, or patterns of whole paths, such as 'blocks.attention.[qv]'."""
    dropout: Rate = 0.0
    """Fraction of what the matrices of LoRA read that is set to zero in training."""
    rslora: bool = False
    """Scale of LoRA alpha / sqrt(rank), which suits large ranks."""
    dora: bool = False
    """Let the norm of the weights of each output learn by itself, as DoRA does."""
    init: Literal["zeros", "pissa"] = "zeros"
    """Initial values of LoRA: zeros adds nothing to a weight, pissa begins with its principal
    components, which learn in its place."""
    groups: str = ""
    """Other ranks and alphas of some targets, the first that fits, for example 'ffn: rank 4,
    blocks.attention.q: rank 16 alpha 8'."""

    def conflicts(self) -> list[str]:
        problems = []
        try:
            parsed_groups(self.groups, LORA_WORDS)
        except ConfigError as error:
            problems.append(str(error))
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name in UNREAD[self.kind] and value != setting.default:
                readers = [kind for kind in UNREAD if setting.name not in UNREAD[kind]]
                problems.append(
                    f"{setting.name}={value!r} has no effect with adapter.kind={self.kind!r}: set"
                    f" adapter.kind={' or '.join(readers)}, or leave it out."
                )
        if self.kind == "lora" and not parts_of(self.targets):
            problems.append("targets='' names no weights: give some, as in 'attention, ffn'.")
        return problems
