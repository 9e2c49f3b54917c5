"""Mistral (arXiv:2310.06825): Llama with a window in every layer."""

from jaxformer.interop.fields import Constant, Windows, tied
from jaxformer.interop.llama import ROWS, SILU, llama_like, sizes
from jaxformer.interop.rope import Rope

SIZES = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
COMMON = (Constant(norm="rms"), SILU, Rope(), Windows(32, kinds=False), tied(False))

MISTRAL = llama_like("mistral", "Mistral", ROWS, (*sizes(**SIZES), *COMMON))
