"""Qwen 2 (arXiv:2407.10671), with biases of queries, keys and values, and Qwen 3
(arXiv:2505.09388), with their norms."""

from jaxformer.interop.fields import Constant, Windows, tied
from jaxformer.interop.llama import ATTENTION_BIAS, ROWS, SILU, llama_like, sizes
from jaxformer.interop.rope import Rope

SIZES = {
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
COMMON = (Constant(norm="rms"), SILU, Rope(), Windows(32, switch=True), tied(False))
HEAD_NORM = Constant(query_key_norm="head")

QWEN2 = llama_like("qwen2", "Qwen2", ROWS, (*sizes(**SIZES), *COMMON, Constant(bias="qkv")))
QWEN3 = llama_like(
    "qwen3", "Qwen3", ROWS, (*sizes(**SIZES, head_dim=128), *COMMON, HEAD_NORM, ATTENTION_BIAS)
)
