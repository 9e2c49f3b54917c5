"""The kernels of attention and of experts of a run against float32, forward and backward."""

from typing import Any

import numpy as np

from jaxformer.config.model import ModelConfig
from jaxformer.layers.pattern import layer_configs, of_source
from jaxformer.runs.device import AttentionKind, checked_lengths, kernel_errors, kinds_of_attention
from jaxformer.runs.expert_check import prove_experts
from jaxformer.tools.certificate.evidence import Evidence, Measured
from jaxformer.training.state import on_mesh


def attention_kernel(evidence: Evidence) -> Measured:
    """The errors of the attention kernel in each kind of layer that the model has."""
    setup = evidence.setup
    model, train = setup.model, setup.run.train
    name = model.attention_kernel
    rows = train.batch_size // train.n_microbatches * setup.objective.sequences
    length, source_length = checked_lengths(
        model.n_heads, setup.mesh.shape, setup.length, setup.source_length
    )
    worst, leaked, kinds = dict[str, float](), 0.0, 0
    with on_mesh(setup.mesh):
        for config, kind in _kinds(model, length, source_length):
            errors, leak = kernel_errors(name, config, rows, kind)
            worst |= {key: max(error, worst.get(key, 0.0)) for key, error in errors.items()}
            leaked, kinds = max(leaked, leak), kinds + 1
    figure, bound = max(worst.values()), evidence.tolerance
    stated = ", ".join(f"{key} {error:.1e}" for key, error in worst.items())
    layers = f"{kinds} kind{'s' if kinds > 1 else ''} of layer"
    text = f"The kernel {name} on rows of {length} tokens in {evidence.dtype}, {layers}: {stated}."
    if length < setup.length:
        text += f" The rows of the run have {setup.length}; the scores of these would not fit."
    if leaked:
        text += f" Texts of one row read each other (gradients up to {leaked:.1e})."
    figure = min(figure, np.finfo(np.float32).max.item())
    return Measured(figure <= bound and not leaked, text, figure, bound)


def _kinds(
    model: ModelConfig, length: int, source_length: int
) -> list[tuple[ModelConfig, AttentionKind]]:
    """A config of a layer for each attention that differs in its mask or its scores, with its
    direction and lengths."""
    pairs: dict[Any, tuple[ModelConfig, AttentionKind]] = {}
    for kind in kinds_of_attention(model, length, source_length or length):
        encodes = model.family == "encoder_decoder" and kind.relative and not kind.causal
        config = of_source(model) if encodes else model
        layers = model.encoder_layers if encodes else model.n_layers
        for layer in layer_configs(config, layers):
            pairs[layer.window, layer.positions, kind] = layer, kind
    return list(pairs.values())


def no_experts(evidence: Evidence) -> str:
    model = evidence.setup.model
    if model.feed_forward != "experts":
        return "the model has no experts"
    return "" if model.expert_kernel != "xla" else "the kernel xla is the reference itself"


def expert_kernel(evidence: Evidence) -> Measured:
    """The products and gradients of the kernel of experts."""
    try:
        return Measured(True, prove_experts(evidence.setup))
    except RuntimeError as error:
        return Measured(False, str(error))
