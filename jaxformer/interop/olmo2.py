"""OLMo 2 (arXiv:2501.00656): norms behind each sublayer, and of queries and keys as one."""

import dataclasses

from jaxformer.interop.fields import Biases, Constant, Tied
from jaxformer.interop.llama import ATTENTION, LAYER, LLAMA, SILU, TRUNK, sizes
from jaxformer.interop.rope import Rope
from jaxformer.interop.table import norm

ROWS = (
    *TRUNK,
    *norm(LAYER + "post_attention_layernorm", "blocks.attention_output_norm"),
    *norm(LAYER + "post_feedforward_layernorm", "blocks.ffn_output_norm"),
)

OLMO2 = dataclasses.replace(
    LLAMA,
    model_type="olmo2",
    architectures={"Olmo2ForCausalLM": {}},
    bases=("Olmo2Model",),
    fields=(
        *sizes(vocab_size=50304, rms_norm_eps=1e-5),
        Constant(norm="rms", norm_placement="output", query_key_norm="width"),
        SILU,
        Rope(),
        Biases({"attention_bias": (ATTENTION, False)}),
        Tied(False),
    ),
    rows=lambda config: ROWS,
)
