"""Qwen 2 (arXiv:2407.10671), with biases of queries, keys and values, and Qwen 3
(arXiv:2505.09388), with their norms."""

import dataclasses

from jaxformer.interop.fields import Biases, Constant, Tied, Windows
from jaxformer.interop.llama import ATTENTION, LLAMA, SILU, sizes
from jaxformer.interop.rope import Rope

SIZES = {
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
COMMON = (Constant(norm="rms"), SILU, Rope(), Windows(32, switch=True), Tied(False))

QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    architectures={"Qwen2ForCausalLM": {}},
    bases=("Qwen2Model",),
    fields=(*sizes(**SIZES), *COMMON, Constant(bias="qkv")),
)
QWEN3 = dataclasses.replace(
    LLAMA,
    model_type="qwen3",
    architectures={"Qwen3ForCausalLM": {}},
    bases=("Qwen3Model",),
    fields=(
        *sizes(**SIZES, head_dim=128),
        *COMMON,
        Constant(query_key_norm="head"),
        Biases({"attention_bias": (ATTENTION, False)}),
    ),
)
