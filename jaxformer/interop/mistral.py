"""Mistral (arXiv:2310.06825): Llama with a window in every layer."""

import dataclasses

from jaxformer.interop.fields import Constant, Tied, Windows
from jaxformer.interop.llama import LLAMA, SILU, sizes
from jaxformer.interop.rope import Rope

SIZES = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}

MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architectures={"MistralForCausalLM": {}},
    bases=("MistralModel",),
    fields=(
        *sizes(**SIZES),
        Constant(norm="rms"),
        SILU,
        Rope(),
        Windows(32, kinds=False),
        Tied(False),
    ),
)
