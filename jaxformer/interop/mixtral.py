"""Decoders with experts and Llama's attention: Mixtral, Qwen3-MoE, OLMoE, Granite-MoE and gpt-oss.

The tensors have the names of the published files: one for each expert, or one for all experts of a
layer. transformers reads both, whatever its version has in memory.
"""

from dataclasses import dataclass

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Family
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys, Windows
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import (
    ATTENTION,
    ATTENTION_BIAS,
    FFN,
    HEAD_NORM,
    LAYER,
    MULTIPLIERS,
    RMS,
    ROWS,
    SILU,
    llama_like,
    sizes,
)
from jaxformer.interop.mxfp4 import Mxfp4Files
from jaxformer.interop.rope import Rope
from jaxformer.interop.tensor_table import (
    CONV,
    INTERLEAVED,
    LINEAR,
    SAME,
    STACKED,
    TensorRow,
    linear,
    norm,
)
from jaxformer.layers.pattern import layer_configs

EXPERT_BLOCKS = "blocks.experts."
GATE_UP = (f"{EXPERT_BLOCKS}gate", f"{EXPERT_BLOCKS}up")

# The trunk, with the norm before the experts; layers without experts have the rows of Llama.
ROUTED_TRUNK = (*ROWS, *norm(LAYER + "post_attention_layernorm", "blocks.experts_norm"))


def one_each(prefix: str, gate: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """The trunk and the rows of a family with a tensor for each expert, whose matrices have these
    names below `prefix`."""
    return (
        *ROUTED_TRUNK,
        TensorRow(f"{LAYER}{prefix}.gate.weight", f"{EXPERT_BLOCKS}router", LINEAR),
        *(
            TensorRow(
                f"{LAYER}{prefix}.experts.{{}}.{name}.weight", f"{EXPERT_BLOCKS}{leaf}", LINEAR
            )
            for leaf, name in (("gate", gate), ("up", up), ("down", down))
        ),
    )


@dataclass(frozen=True)
class BalanceLoss(KeyMapping):
    """The weight of the balance loss. The loss of transformers counts every expert that a token is
    routed to, and so is as many times that of `router_balance_loss`."""

    default: float
    chosen: int

    def read(self, hf: HFConfig) -> ConfigFields:
        weight = hf.number("router_aux_loss_coef", self.default)
        return {
            "router_balance_loss": float(weight) * hf.number("num_experts_per_tok", self.chosen)
        }

    def write(self, config: ModelConfig) -> Keys:
        weight = config.router_balance_loss / config.experts_per_token
        return {"router_aux_loss_coef": float(f"{weight:.9g}")}


class SparseLayers(KeyMapping):
    """Qwen's layers with experts: every decoder_sparse_step-th, but not those of
    mlp_only_layers."""

    def read(self, hf: HFConfig) -> ConfigFields:
        layers, step = hf.number("num_hidden_layers", 24), hf.number("decoder_sparse_step", 1)
        dense = hf.get("mlp_only_layers") or []
        if not isinstance(step, int) or step < 1:
            raise hf.unsupported("decoder_sparse_step", step, ["a whole number from 1"])
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            raise hf.unsupported("mlp_only_layers", dense, ["a list of numbers of layers"])
        has_experts = [(i + 1) % step == 0 and i not in dense for i in range(int(layers))]
        if not any(has_experts) or hf.get("num_experts") == 0:
            return {"feed_forward": "ffn", "n_experts": 0}
        return {"expert_pattern": "".join("e" if has else "d" for has in has_experts)}

    def write(self, config: ModelConfig) -> Keys:
        layers = layer_configs(config, config.n_layers)
        dense = [i for i, layer in enumerate(layers) if layer.feed_forward != "experts"]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def routed(
    number: tuple[str, int], chosen: int, loss: float = 0.001, **constants: object
) -> tuple[KeyMapping, ...]:
    """The keys of the experts: `number` is the key of their number and its default, `chosen` the
    default of those of a token and `loss` of the weight of the balance loss."""
    names = {"num_experts", "num_local_experts"} - {number[0]}
    return (
        # transformers has no z-loss in these models.
        fields.Constant(feed_forward="experts", router_z_loss=0.0, **constants),
        fields.Key(number[0], "n_experts", number[1], instead=names.pop()),
        fields.Key("num_experts_per_tok", "experts_per_token", chosen),
        BalanceLoss(loss, chosen),
        fields.IgnoredKeys("output_router_logits"),
    )


def expert_sizes(width: int, without: str = "", /, **default: float) -> tuple[KeyMapping, ...]:
    """The keys of `sizes`, but intermediate_size is the width of an expert."""
    usual = sizes(f"intermediate_size {without}", **default)
    return (*usual, fields.Key("intermediate_size", "expert_ff", width))


RENORMALIZED = fields.Choice(
    "norm_topk_prob", "router_renormalize", {True: True, False: False}, False
)

# Mixtral (arXiv:2401.04088).
MIXTRAL = llama_like(
    "mixtral",
    "Mixtral",
    one_each("block_sparse_moe", "w1", "w3", "w2"),
    (
        *expert_sizes(
            14336, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5
        ),
        *routed(("num_local_experts", 8), 2),
        RMS,
        SILU,
        Rope(theta=("rope_theta", 1_000_000.0)),
        Windows(32, kinds=False, default_window=None),
        # Noise on the input of the experts in training, and not on the logits of the router.
        fields.FixedKey("router_jitter_noise", (0.0, None)),
        fields.tied(False),
    ),
    covers="one tensor for each expert; windows",
)

# Qwen 3 with experts (arXiv:2505.09388), of which some layers may have none.
QWEN_ROWS = one_each("mlp", "gate_proj", "up_proj", "down_proj")
QWEN_MOE_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
}
QWEN3_MOE = llama_like(
    "qwen3_moe",
    "Qwen3Moe",
    QWEN_ROWS,
    (
        *sizes(**QWEN_MOE_SIZES),
        fields.Key("moe_intermediate_size", "expert_ff", 768),
        *routed(("num_experts", 128), 8),
        SparseLayers(),
        RENORMALIZED,
        HEAD_NORM,
        RMS,
        SILU,
        Rope(),
        # With windows every layer has one in transformers, whatever max_window_layers says.
        fields.FixedKey("use_sliding_window", (False, None)),
        fields.IgnoredKeys("sliding_window max_window_layers"),
        ATTENTION_BIAS,
        fields.tied(False),
    ),
    covers="one tensor for each expert; layers without experts; query-key norms",
)

# OLMoE (arXiv:2409.02060): norms of queries and keys over all heads.
OLMOE_SIZES = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
OLMOE = llama_like(
    "olmoe",
    "Olmoe",
    QWEN_ROWS,
    (
        # The width of a head follows from the two others.
        *expert_sizes(2048, "head_dim", **OLMOE_SIZES),
        *routed(("num_experts", 64), 8, loss=0.01, query_key_norm="width"),
        RENORMALIZED,
        RMS,
        SILU,
        Rope(),
        fields.FixedKey("clip_qkv", (None,)),
        ATTENTION_BIAS,
        fields.tied(False),
    ),
    covers="one tensor for each expert; query-key norms over all heads",
)

# Granite with experts (granite-3.0-1b-a400m), and with a shared one: multipliers, and the gates of
# all experts above their ups in one tensor.
SPARSE = LAYER + "block_sparse_moe."
SHARED = ("blocks.experts.shared.gate", "blocks.experts.shared.up")
GRANITE_ROWS = (
    *ROUTED_TRUNK,
    TensorRow(SPARSE + "router.layer.weight", f"{EXPERT_BLOCKS}router", LINEAR),
    TensorRow(SPARSE + "input_linear.weight", GATE_UP, STACKED),
    TensorRow(SPARSE + "output_linear.weight", f"{EXPERT_BLOCKS}down", LINEAR),
)
GRANITE_SHARED_ROWS = (
    *GRANITE_ROWS,
    *linear(LAYER + "shared_mlp.input_linear", SHARED, STACKED),
    *linear(LAYER + "shared_mlp.output_linear", "blocks.experts.shared.down"),
)
GRANITE_KEYS = (
    *expert_sizes(11008),
    *routed(("num_local_experts", 8), 2),
    *MULTIPLIERS,
    RMS,
    SILU,
    Rope(),
    ATTENTION_BIAS,
    fields.tied(False),
)
GRANITE_MOE = llama_like(
    "granitemoe",
    "GraniteMoe",
    GRANITE_ROWS,
    GRANITE_KEYS,
    covers="one tensor for all experts of a layer; multipliers",
)
GRANITE_MOE_SHARED = llama_like(
    "granitemoeshared",
    "GraniteMoeShared",
    GRANITE_SHARED_ROWS,
    (*GRANITE_KEYS, fields.Key("shared_intermediate_size", "shared_ff", 0)),
    covers="as granitemoe, with a shared expert",
)

# gpt-oss (arXiv:2508.10925): attention sinks, biases, a clamped activation, and published weights
# of experts that are packed.
GPT_OSS_LAYERS = 36
GPT_OSS_SIZES = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": GPT_OSS_LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
MLP = LAYER + "mlp."
GPT_OSS_ROWS = (
    *ROUTED_TRUNK,
    TensorRow(LAYER + "self_attn.sinks", "blocks.attention.sinks"),
    TensorRow(MLP + "router.weight", f"{EXPERT_BLOCKS}router", LINEAR),
    TensorRow(MLP + "router.bias", f"{EXPERT_BLOCKS}router_bias"),
    TensorRow(MLP + "experts.gate_up_proj", GATE_UP, INTERLEAVED),
    TensorRow(
        MLP + "experts.gate_up_proj_bias", tuple(f"{leaf}_bias" for leaf in GATE_UP), INTERLEAVED
    ),
    TensorRow(MLP + "experts.down_proj", f"{EXPERT_BLOCKS}down", CONV),
    TensorRow(MLP + "experts.down_proj_bias", f"{EXPERT_BLOCKS}down_bias", SAME),
)
GPT_OSS = llama_like(
    "gpt_oss",
    "GptOss",
    GPT_OSS_ROWS,
    (
        *expert_sizes(2880, **GPT_OSS_SIZES),
        *routed(("num_local_experts", 128), 4, router_bias="learned", attention_sinks=True),
        fields.Constant(activation="swiglu_clamped"),
        fields.FixedKey("hidden_act", ("silu",)),
        fields.FixedKey("swiglu_limit", (7.0,)),
        fields.FixedKey("swiglu_alpha", (1.702,)),
        RMS,
        Rope(theta=("rope_theta", 150_000.0), otherwise=GPT_OSS_YARN),
        Windows(GPT_OSS_LAYERS, every=2, default_window=128),
        fields.Biases({"attention_bias": (ATTENTION, True)}, always=FFN),
        # Of the published files, which transformers does not read.
        fields.IgnoredKeys("experts_per_token initial_context_length"),
        fields.tied(False),
    ),
    packed={"mxfp4": Mxfp4Files},
    covers="sinks; clamped activation; biases of experts and router; windows; MXFP4 weights",
)

EXPERT_FAMILIES: tuple[Family, ...] = (
    MIXTRAL,
    QWEN3_MOE,
    OLMOE,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    GPT_OSS,
)
