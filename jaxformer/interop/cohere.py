"""Command R of Cohere and GLM-4: decoders with the tensors of Llama whose RoPE rotates neighboring
dimensions."""

from dataclasses import dataclass

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import (
    ATTENTION_BIAS,
    HEAD_NORMS,
    LAYER,
    LAYER_NORM_OF_HEADS,
    RMS,
    SILU,
    TRUNK,
    llama_like,
    sizes,
)
from jaxformer.interop.rope import Rope
from jaxformer.interop.tensor_table import AS_STORED, STACKED, TensorRow, linear, norm

INTERLEAVED_PAIRS = fields.Constant(rope_pairing="interleaved")


@dataclass(frozen=True)
class LogitFactor(KeyMapping):
    """The factor of the logits, which are divided by its inverse here."""

    hf: str
    default: float

    def read(self, hf: HFConfig) -> ConfigFields:
        factor = hf.number(self.hf, self.default)
        if factor <= 0:
            raise hf.unsupported(self.hf, factor, ["a number above 0"])
        return {"logit_divisor": _inverse(factor)}

    def write(self, config: ModelConfig) -> Keys:
        exact = 1 / config.logit_divisor
        # The inverse of 0.1 is no binary number, and its inverse is to be 0.1 again.
        rounded = float(f"{exact:.12g}")
        return {self.hf: rounded if _inverse(rounded) == config.logit_divisor else exact}


def _inverse(number: float) -> float:
    """1 / number to 15 digits, so that 49 is the inverse of 1 / 49."""
    return float(f"{1 / number:.15g}")


# Command R (Cohere 2024): attention and feed-forward read the same norm.
COHERE_ROWS = (
    *(row for row in TRUNK if row.leaves not in HEAD_NORMS),
    TensorRow(LAYER + "self_attn.q_norm.weight", "blocks.attention.q_norm", AS_STORED),
    TensorRow(LAYER + "self_attn.k_norm.weight", "blocks.attention.k_norm", AS_STORED),
    *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
)
COHERE_SIZES = sizes(
    vocab_size=256000,
    hidden_size=8192,
    num_hidden_layers=40,
    num_attention_heads=64,
    intermediate_size=22528,
    max_position_embeddings=8192,
)
COHERE = llama_like(
    "cohere",
    "Cohere",
    COHERE_ROWS,
    (
        # The width of a head follows from the two others.
        *(row for row in COHERE_SIZES if getattr(row, "field", "") not in ("head_dim", "norm_eps")),
        fields.DivisibleHeads(),
        fields.Constant(norm="layer", residual="parallel_shared"),
        fields.Key("layer_norm_eps", "norm_eps", 1e-5),
        LogitFactor("logit_scale", 0.0625),
        SILU,
        Rope(theta=("rope_theta", 500_000.0)),
        INTERLEAVED_PAIRS,
        ATTENTION_BIAS,
        fields.Choice("use_qk_norm", "query_key_norm", LAYER_NORM_OF_HEADS, False),
        fields.IgnoredKeys("model_max_length"),
        fields.tied(True),
    ),
    covers="Command R and R+: one norm for attention and feed-forward; norms of queries and keys;"
    " factor of the logits; interleaved RoPE",
)

# GLM-4 (arXiv:2406.12793), as of GLM-4-0414: norms before and after each sublayer.
GLM4_ROWS = (
    *(row for row in TRUNK if row.hf.split(".")[-2] not in ("gate_proj", "up_proj")),
    *linear(LAYER + "mlp.gate_up_proj", ("blocks.ffn.gate", "blocks.ffn.up"), STACKED),
    *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
    *norm(LAYER + "post_self_attn_layernorm", "blocks.attention_output_norm"),
    *norm(LAYER + "post_attention_layernorm", "blocks.ffn_norm"),
    *norm(LAYER + "post_mlp_layernorm", "blocks.ffn_output_norm"),
)
GLM4 = llama_like(
    "glm4",
    "Glm4",
    GLM4_ROWS,
    (
        *sizes(
            vocab_size=151552,
            hidden_size=4096,
            num_hidden_layers=40,
            num_key_value_heads=2,
            head_dim=128,
            intermediate_size=13696,
            max_position_embeddings=131072,
            rms_norm_eps=1.5625e-7,
        ),
        RMS,
        fields.Constant(norm_placement="sandwich"),
        SILU,
        Rope(fraction=("partial_rotary_factor", 0.5)),
        INTERLEAVED_PAIRS,
        fields.Biases({"attention_bias": (frozenset({"qkv"}), True)}),
        fields.tied(False),
    ),
    covers="GLM-4-0414: norms before and after each sublayer; rotated part of a head; interleaved"
    " RoPE; biases of queries, keys and values",
)
