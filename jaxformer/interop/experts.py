"""Decoders with experts: those with the attention of Llama, and DeepSeek-V3."""

import math
from dataclasses import dataclass

from jaxformer.config.model import ModelConfig
from jaxformer.interop.family import INV_FREQ, decoder_like
from jaxformer.interop.fields import (
    FLAG,
    SIZES,
    AliasKey,
    Biases,
    Choice,
    ConfigFields,
    Constant,
    Dropout,
    FixedKey,
    IgnoredKeys,
    Key,
    KeyMapping,
    KeyRule,
    Keys,
    OptionalKey,
    Windows,
    fixed,
    keys,
    letters,
)
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
    SIZES_OF_ALL,
    USUAL,
    sizes,
)
from jaxformer.interop.rope import Length, RopeKeys
from jaxformer.interop.tensor_files import Mxfp4Files
from jaxformer.interop.tensor_table import (
    BY_HEAD,
    CONV,
    INTERLEAVED,
    LINEAR,
    SAME,
    TensorRow,
    linear,
    norm,
)
from jaxformer.layers.pattern import layer_configs

# Decoders with experts and Llama's attention: Mixtral, Qwen3-MoE, OLMoE, Granite-MoE and gpt-oss.
#
# The tensors have the names of the published files: one for each expert, or one for all experts
# of a layer. transformers reads both, whatever its version has in memory.

EXPERT_BLOCKS = "blocks.experts."
ROUTER = f"{EXPERT_BLOCKS}router"
DOWN = f"{EXPERT_BLOCKS}down"
GATE_UP = (f"{EXPERT_BLOCKS}gate", f"{EXPERT_BLOCKS}up")

# The trunk, with the norm before the experts; layers without experts have the rows of Llama.
ROUTED_TRUNK = (*ROWS, *norm(LAYER + "post_attention_layernorm", "blocks.experts_norm"))


def one_each(prefix: str, gate: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """Return the trunk and the rows of a family with a tensor for each expert, whose matrices have
    these names below `prefix`."""
    return (
        *ROUTED_TRUNK,
        TensorRow(f"{LAYER}{prefix}.gate.weight", ROUTER, LINEAR),
        *(
            TensorRow(
                f"{LAYER}{prefix}.experts.{{}}.{name}.weight", f"{EXPERT_BLOCKS}{leaf}", LINEAR
            )
            for leaf, name in (("gate", gate), ("up", up), ("down", down))
        ),
    )


# All experts of a layer in one parameter, as the classes of transformers 5 have them: by these
# names peft adapts them (`target_parameters`).
EXPERT_PARAMETERS = (
    TensorRow(f"{LAYER}mlp.gate.weight", ROUTER, LINEAR),
    TensorRow(f"{LAYER}mlp.experts.gate_up_proj", GATE_UP, LINEAR),
    TensorRow(f"{LAYER}mlp.experts.down_proj", DOWN, LINEAR),
)


def balance_loss(default: float) -> KeyRule:
    """Return the weight of the balance loss. The loss of transformers counts every expert that a
    token is routed to, and so is as many times that of `experts.balance_loss`."""
    key = "router_aux_loss_coef"

    def read(hf: HFConfig) -> ConfigFields:
        weight = hf.number(key, default) * hf.number("num_experts_per_tok")
        return {"experts.balance_loss": float(weight)}

    def write(config: ModelConfig) -> Keys:
        weight = config.experts.balance_loss / config.experts.per_token
        return {key: float(f"{weight:.9g}")}

    return KeyRule(read, write)


def read_sparse_layers(hf: HFConfig) -> ConfigFields:
    """Return Qwen's layers with experts: every decoder_sparse_step-th, but not those of
    mlp_only_layers."""
    layers = hf.whole("num_hidden_layers")
    step = hf.whole("decoder_sparse_step", 1)
    dense = hf.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise hf.unsupported("mlp_only_layers", dense, ["a list of numbers of layers"])
    # Which have experts.
    sparse = {*range(step - 1, layers, step)} - {*dense}
    if not sparse or hf.get("num_experts") == 0:
        return {"feed_forward": "ffn", "experts.n": 0}
    return {"experts.pattern": letters(map(sparse.__contains__, range(layers)), "e", "d")}


def written_sparse_layers(config: ModelConfig) -> Keys:
    dense = []
    for index, layer in enumerate(layer_configs(config, config.n_layers)):
        if layer.feed_forward != "experts":
            dense.append(index)
    # The step names the layers that may have experts, and the list those of them that do not.
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def routed(number: str, loss: float = 0.001) -> tuple[KeyMapping, ...]:
    """Return the keys of the experts: `number` is the key of their number, and `loss` the default
    of the weight of the balance loss."""
    (other,) = {"num_experts", "num_local_experts"} - {number}
    return (
        # transformers has no z-loss in these models.
        Constant({"feed_forward": "experts", "experts.z_loss": 0.0}),
        Key(number, "experts.n", instead=other, needed=True),
        Key("num_experts_per_tok", "experts.per_token", needed=True),
        balance_loss(loss),
    )


def expert_sizes(without: str = "") -> tuple[KeyMapping, ...]:
    """Return the keys of `sizes`, but intermediate_size is the width of an expert."""
    usual = sizes(f"intermediate_size {without}")
    return (*usual, Key("intermediate_size", "experts.d_ff", needed=True))


RENORMALIZED = Choice("norm_topk_prob", "experts.renormalize", FLAG, False)

# Mixtral (arXiv:2401.04088).
MIXTRAL = decoder_like(
    "mixtral",
    "Mixtral",
    one_each("block_sparse_moe", "w1", "w3", "w2"),
    (
        *expert_sizes(),
        *routed("num_local_experts"),
        RMS,
        SILU,
        RopeKeys(theta=("rope_theta", 1_000_000.0)),
        Windows(kinds=False, default_window=None),
        # Noise on the input of the experts in training, and not on the logits of the router.
        FixedKey("router_jitter_noise", (0.0, None)),
    ),
    module_rows=EXPERT_PARAMETERS,
)

# Qwen 3 with experts (arXiv:2505.09388), of which some layers may have none.
QWEN_ROWS = one_each("mlp", "gate_proj", "up_proj", "down_proj")
QWEN3_MOE = decoder_like(
    "qwen3_moe",
    "Qwen3Moe",
    QWEN_ROWS,
    (
        *SIZES_OF_ALL,
        Key("moe_intermediate_size", "experts.d_ff", 768),
        *routed("num_experts"),
        KeyRule(read_sparse_layers, written_sparse_layers),
        RENORMALIZED,
        HEAD_NORM,
        *USUAL,
        # With windows every layer has one in transformers, whatever max_window_layers says.
        FixedKey("use_sliding_window", (False, None)),
        IgnoredKeys("sliding_window max_window_layers"),
        ATTENTION_BIAS,
    ),
    module_rows=EXPERT_PARAMETERS,
)

# OLMoE (arXiv:2409.02060): norms of queries and keys over all heads.
OLMOE = decoder_like(
    "olmoe",
    "Olmoe",
    QWEN_ROWS,
    (
        # The width of a head follows from the two others.
        *expert_sizes("head_dim"),
        *routed("num_experts", loss=0.01),
        Constant({"attention.query_key_norm": "width"}),
        RENORMALIZED,
        *USUAL,
        *fixed(clip_qkv=None),
        ATTENTION_BIAS,
    ),
    module_rows=EXPERT_PARAMETERS,
)

# Granite with experts (granite-3.0-1b-a400m), and with a shared one: multipliers, and the gates of
# all experts above their ups in one tensor.
SPARSE = LAYER + "block_sparse_moe."
SHARED = ("blocks.experts.shared.gate", "blocks.experts.shared.up")
GRANITE_ROWS = (
    *ROUTED_TRUNK,
    TensorRow(SPARSE + "router.layer.weight", ROUTER, LINEAR),
    TensorRow(SPARSE + "input_linear.weight", GATE_UP, LINEAR),
    TensorRow(SPARSE + "output_linear.weight", DOWN, LINEAR),
)
GRANITE_PARAMETERS = (
    TensorRow(SPARSE + "router.weight", ROUTER, LINEAR),
    TensorRow(SPARSE + "experts.gate_up_proj", GATE_UP, LINEAR),
    TensorRow(SPARSE + "experts.down_proj", DOWN, LINEAR),
)
GRANITE_KEYS = (*expert_sizes(), *routed("num_local_experts"), *MULTIPLIERS, *USUAL, ATTENTION_BIAS)
GRANITE_MOE = decoder_like(
    "granitemoe", "GraniteMoe", GRANITE_ROWS, GRANITE_KEYS, module_rows=GRANITE_PARAMETERS
)
GRANITE_SHARED_ROWS = (
    *GRANITE_ROWS,
    *linear(LAYER + "shared_mlp.input_linear", SHARED),
    *linear(LAYER + "shared_mlp.output_linear", "blocks.experts.shared.down"),
)
GRANITE_MOE_SHARED = decoder_like(
    "granitemoeshared",
    "GraniteMoeShared",
    GRANITE_SHARED_ROWS,
    (*GRANITE_KEYS, Key("shared_intermediate_size", "experts.shared_ff", 0)),
    module_rows=GRANITE_PARAMETERS,
)

# gpt-oss (arXiv:2508.10925): attention sinks, biases, a clamped activation, and published weights
# of experts that are packed.
MLP = LAYER + "mlp."
GPT_OSS = decoder_like(
    "gpt_oss",
    "GptOss",
    (
        *ROUTED_TRUNK,
        TensorRow(LAYER + "self_attn.sinks", "blocks.attention.sinks"),
        *linear(MLP + "router", ROUTER),
        TensorRow(MLP + "experts.gate_up_proj", GATE_UP, INTERLEAVED),
        TensorRow(
            MLP + "experts.gate_up_proj_bias",
            tuple(f"{leaf}_bias" for leaf in GATE_UP),
            INTERLEAVED,
        ),
        TensorRow(MLP + "experts.down_proj", DOWN, CONV),
        TensorRow(MLP + "experts.down_proj_bias", f"{EXPERT_BLOCKS}down_bias", SAME),
    ),
    (
        *expert_sizes(),
        *routed("num_local_experts"),
        Constant({"experts.router_bias": "learned", "attention.sinks": True}),
        Constant({"activation": "swiglu_clamped"}),
        *fixed(hidden_act="silu", swiglu_limit=7.0, swiglu_alpha=1.702),
        RMS,
        RopeKeys(theta=("rope_theta", 150_000.0), needed=True),
        Windows(every=2, default_window=128),
        Biases({"attention_bias": (ATTENTION, True)}, always=FFN),
        # Of the published files, which transformers does not read.
        IgnoredKeys("experts_per_token initial_context_length"),
    ),
    packed={"mxfp4": Mxfp4Files},
)

# DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts behind some dense layers.

LATENT_BLOCKS = "blocks.latent."


def shared_rows(module: str) -> tuple[TensorRow, ...]:
    """Return the rows of the shared expert."""
    return tuple(
        TensorRow(f"{LAYER}{module}.{name}_proj.weight", f"{EXPERT_BLOCKS}shared.{name}", LINEAR)
        for name in ("gate", "up", "down")
    )


def latent_rows(experts: str, trunk: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    """Return the rows of a family with latent attention, and with experts below `experts`, whose
    rows and those of the trunk are `trunk`."""
    return (
        *trunk,
        *norm(LAYER + "input_layernorm", "blocks.latent_norm"),
        *linear(LAYER + "self_attn.q_a_proj", f"{LATENT_BLOCKS}q_down"),
        TensorRow(LAYER + "self_attn.q_a_layernorm.weight", f"{LATENT_BLOCKS}q_down_norm"),
        *linear(
            LAYER + "self_attn.kv_a_proj_with_mqa",
            (f"{LATENT_BLOCKS}kv_down", f"{LATENT_BLOCKS}k_rope"),
        ),
        TensorRow(LAYER + "self_attn.kv_a_layernorm.weight", f"{LATENT_BLOCKS}kv_down_norm"),
        TensorRow(
            LAYER + "self_attn.kv_b_proj.weight",
            (f"{LATENT_BLOCKS}k", f"{LATENT_BLOCKS}v"),
            BY_HEAD,
        ),
        *linear(LAYER + "self_attn.o_proj", f"{LATENT_BLOCKS}out"),
        TensorRow(f"{LAYER}{experts}.gate.e_score_correction_bias", f"{EXPERT_BLOCKS}router_bias"),
        *shared_rows(f"{experts}.shared_experts"),
    )


DEEPSEEK_ROWS = latent_rows("mlp", QWEN_ROWS)


def deepseek_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    """Return the tensors, of which that of the queries has another name without a query rank."""
    name = "q_proj"
    if config.latent.query_rank:
        name = "q_b_proj"
    return (*DEEPSEEK_ROWS, *linear(f"{LAYER}self_attn.{name}", f"{LATENT_BLOCKS}q"))


def read_latent_heads(hf: HFConfig) -> ConfigFields:
    """Return the widths of a head without and with rotation; `qk_head_dim` follows."""
    rotated = hf.number("qk_rope_head_dim")
    width = hf.number("qk_nope_head_dim") + rotated
    hf.only("qk_head_dim", (width, None))
    return {"head_dim": width, "latent.rope_head_dim": rotated}


def written_latent_heads(config: ModelConfig) -> Keys:
    rotated = config.latent.rope_head_dim
    return {"qk_nope_head_dim": config.head_width - rotated, "qk_rope_head_dim": rotated}


class LatentRope(RopeKeys):
    """RoPE whose YaRN multiplies the scores by m(mscale_all_dim)^2, m(x) = 1 + 0.1 x ln(factor)."""

    def read(self, hf: HFConfig) -> ConfigFields:
        rotation = super().read(hf)
        entry = {**hf.table("rope_parameters"), **hf.table("rope_scaling")}
        number = entry.get("mscale_all_dim")
        if number and rotation.get("rope.scaling") == "yarn":
            width = read_latent_heads(hf)["head_dim"]
            scale = 1 + 0.1 * float(number) * math.log(rotation["rope.factor"])
            rotation["attention.scale"] = width**-0.5 * scale**2
        return rotation

    def write(self, config: ModelConfig) -> Keys:
        keys = super().write(config)
        root = math.sqrt(config.attention.scale * config.head_width**0.5)
        if config.rope.scaling == "yarn" and abs(root - 1) > 1e-8:
            log = 0.1 * math.log(config.rope.factor)
            # Readers but transformers do not know attention_factor here.
            mscales = {"mscale": root * config.rope_scale, "mscale_all_dim": root}
            for key, scale in mscales.items():
                # Without the last digits, which are of rounding: 1.0 is written as that.
                keys["rope_scaling"][key] = float(f"{(scale - 1) / log:.12g}")
        return keys


@dataclass(frozen=True)
class DenseLayers(KeyMapping):
    """The experts of all layers but the first ones; none where these are all."""

    rows: tuple[KeyMapping, ...]

    def read(self, hf: HFConfig) -> ConfigFields:
        layers = hf.number("num_hidden_layers")
        dense = hf.number("first_k_dense_replace", 3)
        experts: ConfigFields = {"feed_forward": "experts", "experts.dense_layers": dense}
        for row in self.rows:
            experts |= row.read(hf)
        # Where all layers are dense, none reads these.
        if dense >= layers:
            return {}
        return experts

    def write(self, config: ModelConfig) -> Keys:
        layers = layer_configs(config, config.n_layers)
        have_experts = [layer.feed_forward == "experts" for layer in layers]
        keys: Keys = {"first_k_dense_replace": [*have_experts, True].index(True)}
        if any(have_experts):
            for row in self.rows:
                keys |= row.write(config)
        return keys


def shared_experts(key: str, width: int) -> KeyRule:
    """Return the width of the shared expert, which is a number of experts, by default of this
    width."""
    return KeyRule(
        lambda hf: {
            "experts.shared_ff": hf.whole(key, 1) * hf.number("moe_intermediate_size", width)
        },
        lambda config: {key: config.experts.shared_ff // config.expert_width},
    )


# Of all these models with latent attention.
LATENT_KEYS = (
    Constant({"mixer": "latent"}),
    *keys(f"{SIZES} rms_norm_eps"),
    AliasKey("num_key_value_heads", "num_attention_heads", "n_heads", checked=True),
    Key("kv_lora_rank", "latent.kv_rank", 512),
    Key("v_head_dim", "attention.value_dim", 128),
    KeyRule(read_latent_heads, written_latent_heads),
    Dropout("attention_dropout"),
    RMS,
    SILU,
    ATTENTION_BIAS,
)
SIGMOID_ROUTER = Constant(
    {"experts.router": "sigmoid", "experts.router_bias": "balanced", "experts.balance_loss": 0.0}
)
DEEPSEEK_V3 = decoder_like(
    "deepseek_v3",
    "DeepseekV3",
    deepseek_rows,
    (
        *LATENT_KEYS,
        OptionalKey("q_lora_rank", "latent.query_rank", 1536),
        Length(),
        AliasKey("head_dim", "qk_rope_head_dim", "latent.rope_head_dim", checked=True),
        DenseLayers(
            (
                SIGMOID_ROUTER,
                Key("n_routed_experts", "experts.n", 256, instead="num_local_experts"),
                Key("num_experts_per_tok", "experts.per_token", 8),
                Key("moe_intermediate_size", "experts.d_ff", 2048),
                shared_experts("n_shared_experts", 2048),
                Key("n_group", "experts.groups", 8),
                Key("topk_group", "experts.top_groups", 4),
                Choice("norm_topk_prob", "experts.renormalize", FLAG, True),
                Key("routed_scaling_factor", "experts.scale", 2.5),
            )
        ),
        LatentRope(),
        Choice("rope_interleave", "rope.pairing", {True: "interleaved", False: "half"}, True),
        # Layers that predict further tokens are not read, and so not written.
        IgnoredKeys(
            "num_nextn_predict_layers num_mtp_layers", written={"num_nextn_predict_layers": 0}
        ),
        # Of the published files, whose keys transformers does not read.
        *fixed(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1),
        IgnoredKeys("aux_loss_alpha seq_aux ep_size"),
    ),
    # The published model has a layer behind its 61 that predicts a further token.
    ignored=(INV_FREQ, r"^model\.layers\.61\."),
    module_rows=EXPERT_PARAMETERS,
)
