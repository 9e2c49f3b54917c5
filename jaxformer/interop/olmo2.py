"""OLMo 2 (arXiv:2501.00656): norms after each sublayer, and of queries and keys over all heads."""

from jaxformer.interop.fields import Constant, tied
from jaxformer.interop.llama import ATTENTION_BIAS, LAYER, SILU, TRUNK, llama_like, sizes
from jaxformer.interop.rope import Rope
from jaxformer.interop.tensor_table import norm

ROWS = (
    *TRUNK,
    *norm(LAYER + "post_attention_layernorm", "blocks.attention_output_norm"),
    *norm(LAYER + "post_feedforward_layernorm", "blocks.ffn_output_norm"),
)

FIELDS = (
    *sizes(vocab_size=50304, rms_norm_eps=1e-5),
    Constant(norm="rms", norm_placement="output", query_key_norm="width"),
    SILU,
    Rope(),
    ATTENTION_BIAS,
    tied(False),
)
OLMO2 = llama_like("olmo2", "Olmo2", ROWS, FIELDS)
