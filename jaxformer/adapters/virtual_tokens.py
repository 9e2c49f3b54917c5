"""Prompt tuning and prefix tuning: virtual tokens that learn, in front of what a model reads.

They are the branch `virtual` of the params, beside the weights of the model, which stay as they
are (P virtual tokens, L layers, K key/value heads of width H, values of width W):

prompt tuning   {"prompt": [P, D]}
prefix tuning   {"decoder": {"prefix_k": [L, P, K, H], "prefix_v": [L, P, K, W]}}, and "encoder"
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxformer.arrays.params import Params, Spec, Specs, init_params, lookup, normal
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError


@dataclass(frozen=True)
class _VirtualTokens:
    tokens: int = 20

    def __post_init__(self) -> None:
        tokens = self.tokens
        name = type(self).__name__
        if isinstance(tokens, bool) or tokens != int(tokens) or tokens < 1:
            raise ConfigError(f"{name}: tokens={tokens!r} must be a whole number of at least 1.")


class PromptTuning(_VirtualTokens):
    """Vectors that a model reads in front of the embedded tokens (arXiv:2104.08691).

    The virtual tokens stand at the positions 0 .. tokens - 1 of each segment, and the tokens behind
    them. They are read as rows of the table of tokens are, with its scale, positions and norm, and
    begin as rows of tokens drawn at random. A decoder computes their keys and values once for all
    rows, with one draw of dropout, and each query sees them all, whatever its window. An
    encoder-decoder reads them in front of its source, as tokens like the others.

    Args:
      tokens: P, how many.
    """


class PrefixTuning(_VirtualTokens):
    """Keys and values in front of those of each layer's self-attention (arXiv:2101.00190).

    The virtual tokens stand at the positions 0 .. tokens - 1 of each segment, and the tokens behind
    them; each query sees them all, whatever its window. Their keys are used as they are, neither
    normed nor rotated. An encoder-decoder has them in both stacks. The paper's second
    parametrization, a feed-forward network that makes keys and values, is not computed.

    Args:
      tokens: P, how many.
    """


def virtual_specs(specs: Specs, config: ModelConfig, adapter: PromptTuning | PrefixTuning) -> Specs:
    """Return the table of the virtual tokens of a model, from that of its parameters."""
    _refuse_encoder(config)
    # A prompt of an encoder-decoder is tokens of the source; all others are keys and values.
    of_source = isinstance(adapter, PromptTuning) and config.family == "encoder_decoder"
    if config.mixer != "attention" and not of_source:
        raise ConfigError(
            "virtual tokens (prompt tuning, prefix tuning) are keys and values of"
            f" model.mixer='attention', and it is {config.mixer!r}: choose LoRA, or another model."
        )
    if config.layer_groups:
        raise ConfigError(
            "virtual tokens (prompt tuning, prefix tuning) give each layer keys and values, and"
            f" with model.layer_groups={config.layer_groups} layers share them: choose LoRA."
        )
    if isinstance(adapter, PromptTuning):
        if "tokens" not in specs["embed"]:
            raise ConfigError(
                f"prompt tuning puts rows before those of a table of tokens, which"
                f" model.embedding={config.embedding} has not: choose prefix tuning or LoRA."
            )
        return prompt_specs(specs, adapter.tokens)
    stacks = {"decoder": specs["blocks"]}
    if "encoder" in specs:
        stacks["encoder"] = specs["encoder"]["blocks"]
    return {name: prefix_specs(blocks, adapter.tokens) for name, blocks in stacks.items()}


def _refuse_encoder(config: ModelConfig) -> None:
    if config.family == "encoder":
        raise ConfigError(
            "virtual tokens (prompt tuning, prefix tuning) are for decoders and encoder-decoders,"
            " and model.family is 'encoder': choose LoRA, or another model."
        )


def prompt_specs(specs: Specs, tokens: int) -> Specs:
    """Return the row of a prompt [P, D]."""
    rows: Spec = specs["embed"]["tokens"]
    shape = (tokens, rows.shape[1])
    axes = ("virtual", rows.axes[1])
    return {"prompt": Spec(shape, axes, rows.init, inputs=("virtual",), lookup=True)}


def prefix_specs(blocks: Specs, tokens: int) -> Specs:
    """Return the rows of the prefix of a stack, in the nesting of its blocks."""
    if "attention" not in blocks:  # the positions of a pattern
        return {name: prefix_specs(layers, tokens) for name, layers in blocks.items()}

    def row(projection: Spec) -> Spec:
        """Return the row of what a projection makes of P tokens: [L, D, K, H] -> [L, P, K, H]."""
        index = projection.axes.index("embed")
        shape = (*projection.shape[:index], tokens, *projection.shape[index + 1 :])
        axes = (*projection.axes[:index], "virtual", *projection.axes[index + 1 :])
        start = normal(0.02)
        return replace(projection, shape=shape, axes=axes, init=start, inputs=(), base_fans=None)

    attention = blocks["attention"]
    return {"prefix_k": row(attention["k"]), "prefix_v": row(attention["v"])}


def first_virtual(table: Specs, base: Params, key: jax.Array) -> Params:
    """Return the initial values of virtual tokens over the params of a model; they depend on the
    key and their path alone, and a prompt on the table of tokens."""
    if "prompt" in table:
        # That of the source, where it has its own.
        of_source = base.get("encoder", {}).get("embed", {})
        tokens = (base["embed"] | of_source)["tokens"]

        def sampled(key: jax.Array, spec: Spec) -> jax.Array:
            """[P, D]: rows of the table of tokens [V, D], drawn at random."""
            ids = jax.random.randint(key, spec.shape[:1], 0, tokens.shape[0])
            return lookup(tokens, ids, (None, None))

        table = {"prompt": replace(table["prompt"], init=sampled)}
    # Under the path of the branch, on which the randomness of a leaf depends.
    values: Params = init_params({"virtual": table}, key)["virtual"]
    return values


def virtual_rows(params: Params, config: ModelConfig, specs: Specs) -> Specs:
    """Return the rows that the virtual tokens of params must have in the model with this table."""
    _refuse_encoder(config)
    virtual = params["virtual"]
    expected = {}
    names = [*virtual] if isinstance(virtual, dict) else []
    if "prompt" in names and len(names) > 1:
        raise ConfigError(
            f"params['virtual'] has {', '.join(names)}: a prompt and a prefix exclude each other."
        )
    if "prompt" in names:
        expected = prompt_specs(specs, _count(virtual, -2))
    for name, stack in (("decoder", specs), ("encoder", specs.get("encoder"))):
        if name in names and stack is not None:
            expected[name] = prefix_specs(stack["blocks"], _count(virtual[name], -3))
    return expected


def _count(virtual: Any, axis: int) -> int:
    """Return the number of virtual tokens, the length of an axis of the first leaf, at least 1."""
    shape = next((np.shape(leaf) for leaf in jax.tree.leaves(virtual)), ())
    return max(shape[axis], 1) if len(shape) >= -axis else 1


def virtual_counts(params: Params, config: ModelConfig) -> tuple[int, int]:
    """Return the numbers of virtual tokens before the tokens of a segment, and before those of its
    source."""
    virtual = params.get("virtual", {})
    if "prompt" in virtual:
        tokens = len(virtual["prompt"])
        return (0, tokens) if config.family == "encoder_decoder" else (tokens, 0)
    before, before_source = (
        _count(virtual[stack], -3) if stack in virtual else 0 for stack in ("decoder", "encoder")
    )
    return before, before_source


def without_virtual(params: Params) -> Params:
    """Return the params without their virtual tokens."""
    return {name: branch for name, branch in params.items() if name != "virtual"}


def has_virtual(params: object) -> bool:
    """Return whether params have virtual tokens."""
    return isinstance(params, Mapping) and "virtual" in params
