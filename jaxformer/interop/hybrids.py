"""Decoders in which some layers have a recurrent state instead of the keys of all tokens."""

import math
from dataclasses import dataclass

from jaxformer.config.model import ModelConfig
from jaxformer.config.variants import RECURRENT
from jaxformer.interop.experts import (
    EXPERT_BLOCKS,
    EXPERT_PARAMETERS,
    GRANITE_PARAMETERS,
    GRANITE_SHARED_ROWS,
    LATENT_KEYS,
    QWEN_ROWS,
    SIGMOID_ROUTER,
    DenseLayers,
    latent_rows,
    one_each,
    read_sparse_layers,
    routed,
    shared_experts,
    shared_rows,
    written_sparse_layers,
)
from jaxformer.interop.family import INV_FREQ, decoder_like
from jaxformer.interop.fields import (
    FLAG,
    FULL,
    Choice,
    ConfigFields,
    Constant,
    FixedKey,
    IgnoredKeys,
    Key,
    KeyMapping,
    KeyRule,
    Keys,
    fixed,
    letters,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import (
    ATTENTION_BIAS,
    BIAS_FLAGS,
    HEAD_NORM,
    LAYER,
    MULTIPLIERS,
    OLMO2_KEYS,
    OLMO2_ROWS,
    RMS,
    ROWS,
    SILU,
    SIZES_OF_ALL,
    USUAL,
    sizes,
)
from jaxformer.interop.rope import RopeKeys
from jaxformer.interop.tensor_table import (
    AS_4D,
    BY_HEAD,
    LINEAR,
    SAME,
    TAPS,
    TensorRow,
    block,
    by_groups,
    linear,
    norm,
    with_rows,
)
from jaxformer.layers.pattern import layer_configs

LINEAR_ATTENTION = "linear_attention"
# The kinds of layers in files of transformers 4.
OLDER_KINDS = {"mamba": LINEAR_ATTENTION, "attention": FULL}


def leaves(mixer: str, names: str) -> tuple[str, ...]:
    """Return the paths of these leaves of a recurrent layer, whose names are separated by
    spaces."""
    return tuple(f"blocks.{mixer}.{name}" for name in names.split())


def recurrent_rows(mixer: str, module: str, **weights: str) -> tuple[TensorRow, ...]:
    """Return the rows of a recurrent layer, whose module has `weights`: the leaves of each."""
    rows = [
        TensorRow(f"{LAYER}{module}.dt_bias", leaves(mixer, "step_bias")),
        TensorRow(f"{LAYER}{module}.A_log", leaves(mixer, "log_speed")),
    ]
    for name, names in weights.items():
        transform = LINEAR
        if name.endswith("norm"):
            transform = SAME
        elif name.endswith("conv1d"):
            transform = TAPS
        rows.append(TensorRow(f"{LAYER}{module}.{name}.weight", leaves(mixer, names), transform))
    return tuple(rows)


@dataclass(frozen=True)
class RecurrentLayers(KeyMapping):
    """Which layers are recurrent, by `layer_types`, and the keys of these layers; without
    `layer_types` all are but every full_attention_interval-th. `letter` is that of their mixer in
    `layer_pattern`."""

    rows: tuple[KeyMapping, ...]
    letter: str = "d"
    interval: int = 4  # of full_attention_interval; 0: there is no such key, and all are recurrent

    def read(self, hf: HFConfig) -> ConfigFields:
        layers = hf.whole("num_hidden_layers")
        interval = layers + 1
        if self.interval:
            interval = hf.whole("full_attention_interval", self.interval)
        kinds = hf.get("layer_types")
        if isinstance(kinds, list):
            kinds = [OLDER_KINDS.get(str(kind), kind) for kind in kinds]
        if kinds is None:
            recurrent = [(i + 1) % interval != 0 for i in range(layers)]
        elif (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not {*kinds} <= {FULL, LINEAR_ATTENTION}
        ):
            raise hf.unsupported("layer_types", kinds, [f"{layers} of", FULL, LINEAR_ATTENTION])
        else:
            recurrent = [kind == LINEAR_ATTENTION for kind in kinds]
        fields: ConfigFields = {"layer_pattern": letters(recurrent, self.letter, "m")}
        for row in self.rows:
            fields |= row.read(hf)
        # Where no layer is recurrent, none reads these.
        if not any(recurrent):
            return {}
        return fields

    def write(self, config: ModelConfig) -> Keys:
        layers = layer_configs(config, config.n_layers)
        kinds = [
            LINEAR_ATTENTION if layer.mixer in RECURRENT.values() else FULL for layer in layers
        ]
        keys: Keys = {"layer_types": kinds}
        for row in self.rows:
            keys |= row.write(config)
        return keys


DELTA_KEYS = (
    Key("linear_num_value_heads", "recurrent.heads", 32),
    Key("linear_num_key_heads", "recurrent.key_heads", 16),
    Key("linear_key_head_dim", "recurrent.key_dim", 128),
    Key("linear_value_head_dim", "recurrent.value_dim", 128),
    Key("linear_conv_kernel_dim", "recurrent.convolution", 4),
)

# Qwen3-Next (2025): three layers of four are recurrent, the others have gated attention; experts,
# of which the shared one has a gate.
QWEN3_NEXT_ROWS = (
    *with_rows(
        QWEN_ROWS,
        *linear(
            LAYER + "self_attn.q_proj", ("blocks.attention.q", "blocks.attention.gate"), BY_HEAD
        ),
    ),
    *shared_rows("mlp.shared_expert"),
    TensorRow(LAYER + "mlp.shared_expert_gate.weight", f"{EXPERT_BLOCKS}shared_gate", LINEAR),
    *norm(LAYER + "input_layernorm", "blocks.delta_norm"),
    *recurrent_rows(
        "delta", "linear_attn", conv1d="q_taps k_taps v_taps", norm="norm", out_proj="out"
    ),
)


def qwen3_next_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    """Return the tensors, in which the heads that share a key are below one another."""
    groups = by_groups(config.recurrent_key_heads)
    return (
        *QWEN3_NEXT_ROWS,
        TensorRow(LAYER + "linear_attn.in_proj_qkvz.weight", leaves("delta", "q k v gate"), groups),
        TensorRow(LAYER + "linear_attn.in_proj_ba.weight", leaves("delta", "rate decay"), groups),
    )


QWEN3_NEXT = decoder_like(
    "qwen3_next",
    "Qwen3Next",
    qwen3_next_rows,
    (
        *SIZES_OF_ALL,
        Key("moe_intermediate_size", "experts.d_ff", 512),
        Key("shared_expert_intermediate_size", "experts.shared_ff", 512),
        Constant({"experts.shared_gate": True, "attention.output_gate": True, "norm": "rms1p"}),
        *routed("num_experts"),
        KeyRule(read_sparse_layers, written_sparse_layers),
        Choice("norm_topk_prob", "experts.renormalize", FLAG, True),
        HEAD_NORM,
        SILU,
        RopeKeys(fraction=("partial_rotary_factor", 0.25)),
        ATTENTION_BIAS,
        RecurrentLayers(DELTA_KEYS),
    ),
    module_rows=EXPERT_PARAMETERS,
    # What predicts further tokens.
    ignored=(INV_FREQ, r"^mtp\."),
)

CONVOLUTIONS = {"q_conv1d": "q_taps", "k_conv1d": "k_taps", "v_conv1d": "v_taps"}

# OLMo Hybrid (2026): the recurrent layers have their norms before the sublayers, those with
# attention on their outputs. Published models have no positions.
NO_ROPE = {"rope_theta": None, "rope_type": "default"}


class OptionalRope(RopeKeys):
    """RoPE, or no positions with NO_ROPE."""

    def read(self, hf: HFConfig) -> ConfigFields:
        if hf.table("rope_parameters") == NO_ROPE:
            return {"positions": "none"}
        return super().read(hf)

    def write(self, config: ModelConfig) -> Keys:
        if config.positions == "none":
            return {"rope_parameters": NO_ROPE}
        return super().write(config)


OLMO_HYBRID = decoder_like(
    "olmo_hybrid",
    "OlmoHybrid",
    (
        *OLMO2_ROWS,
        *norm(LAYER + "attention_layer_norm", "blocks.delta_norm"),
        *norm(LAYER + "feedforward_layer_norm", "blocks.ffn_norm"),
        *recurrent_rows(
            "delta",
            "linear_attn",
            **CONVOLUTIONS,
            q_proj="q",
            k_proj="k",
            v_proj="v",
            g_proj="gate",
            a_proj="decay",
            b_proj="rate",
            o_norm="norm",
            o_proj="out",
        ),
    ),
    (
        *OLMO2_KEYS,
        OptionalRope(),
        RecurrentLayers(
            (
                *DELTA_KEYS,
                Constant({"recurrent.norm_placement": "pre", "recurrent.norm_eps": 1e-5}),
                Choice("linear_allow_neg_eigval", "recurrent.negative_eigenvalues", FLAG, True),
                # Of initial values.
                IgnoredKeys(
                    "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max"
                    " linear_dt_init_floor"
                ),
            )
        ),
    ),
    # transformers writes the name of the norm of recurrent layers in all.
    renamed=(("feedforward_layer_norm", "post_attention_layernorm"),),
)


# Kimi Linear (arXiv:2510.26692): a decay of each channel, latent attention without positions, and
# the experts of DeepSeek-V3.
KIMI_EXPERTS = "block_sparse_moe"


@dataclass(frozen=True)
class KimiLayers(RecurrentLayers):
    """Which layers are recurrent, and what these have, by `linear_attn_config`, which counts layers
    from 1, or by the keys of transformers."""

    def read(self, hf: HFConfig) -> ConfigFields:
        table = hf.table("linear_attn_config")
        if table:
            full = table.get("full_attn_layers")
            if not isinstance(full, list):
                raise hf.unsupported("linear_attn_config", table, [{"full_attn_layers": [4]}])
            numbers = range(1, hf.whole("num_hidden_layers") + 1)
            kinds = [FULL if number in full else LINEAR_ATTENTION for number in numbers]
            values: Keys = {"layer_types": kinds}
            for key, name in KIMI_SIZES.items():
                values[key] = table.get(name)
            hf = hf.with_values(values)
        return super().read(hf)

    def write(self, config: ModelConfig) -> Keys:
        keys = super().write(config)
        numbers: dict[str, list[int]] = {FULL: [], LINEAR_ATTENTION: []}
        for number, kind in enumerate(keys["layer_types"], start=1):
            numbers[kind].append(number)
        table: Keys = {name: keys[key] for key, name in KIMI_SIZES.items()}
        table |= {"full_attn_layers": numbers[FULL], "kda_layers": numbers[LINEAR_ATTENTION]}
        return {"linear_attn_config": table}


KIMI_SIZES = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


class KimiExperts(DenseLayers):
    """The experts of all layers but the first ones, also by mlp_layer_types."""

    def read(self, hf: HFConfig) -> ConfigFields:
        dense = hf.whole("first_k_dense_replace", 1, least=0)
        kinds = hf.get("mlp_layer_types")
        if isinstance(kinds, list):
            dense = kinds.count("dense")
        if kinds is not None:
            sparse = hf.whole("num_hidden_layers") - dense
            hf.only("mlp_layer_types", (["dense"] * dense + ["sparse"] * sparse,))
        return super().read(hf.with_values({"first_k_dense_replace": dense}))


KIMI_LINEAR = decoder_like(
    "kimi_linear",
    "KimiLinear",
    (
        *latent_rows(KIMI_EXPERTS, one_each(KIMI_EXPERTS, "w1", "w3", "w2")),
        *linear(LAYER + "self_attn.q_proj", "blocks.latent.q"),
        *norm(LAYER + "input_layernorm", "blocks.delta_norm"),
        *with_rows(
            recurrent_rows(
                "delta",
                "self_attn",
                **CONVOLUTIONS,
                q_proj="q",
                k_proj="k",
                v_proj="v",
                f_a_proj="decay_down",
                f_b_proj="decay",
                g_a_proj="gate_down",
                g_b_proj="gate",
                b_proj="rate",
                o_norm="norm",
                o_proj="out",
            ),
            TensorRow(LAYER + "self_attn.A_log", leaves("delta", "log_speed"), AS_4D),
        ),
    ),
    (
        *LATENT_KEYS,
        Constant({"positions": "none"}),
        Key("model_max_length", "max_length", 1_048_576),
        # Queries of latents have no published model.
        *fixed(q_lora_rank=None),
        KimiExperts(
            (
                SIGMOID_ROUTER,
                Key("num_experts", "experts.n", 256),
                Key("num_experts_per_token", "experts.per_token", 8),
                Key("moe_intermediate_size", "experts.d_ff", 1024),
                shared_experts("num_shared_experts", 1024),
                Key("num_expert_group", "experts.groups", 1),
                Key("topk_group", "experts.top_groups", 1),
                Choice("moe_renormalize", "experts.renormalize", FLAG, True),
                Key("routed_scaling_factor", "experts.scale", 2.446),
            )
        ),
        KimiLayers(
            (
                Constant({"recurrent.decay": "channel", "recurrent.gate": "sigmoid"}),
                Key("linear_num_heads", "recurrent.heads", 32),
                Key("linear_conv_kernel_dim", "recurrent.convolution", 4),
                # The width of keys, of values and of the latents of decay and gate.
                Key("linear_head_dim", "recurrent.key_dim", 128),
                Key("linear_head_dim", "recurrent.value_dim", 128),
                Key("linear_head_dim", "recurrent.rank", 128),
            )
        ),
        # Of the published files, whose keys transformers does not read.
        *fixed(mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1),
        *fixed(use_grouped_topk=True),
        IgnoredKeys("head_dim rope_theta rope_scaling"),
    ),
    module_rows=(
        *EXPERT_PARAMETERS,
        *latent_rows("mlp", ()),
        *recurrent_rows("delta", "self_attn.forget_gate", f_a_proj="decay_down", f_b_proj="decay"),
    ),
    # transformers writes the names of experts for dense layers too.
    renamed=((r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"),),
)


# Decoders with layers of Mamba-2: Bamba and Granite 4.

MAMBA2_ROWS = (
    *norm(LAYER + "input_layernorm", "blocks.mamba2_norm"),
    *recurrent_rows(
        "mamba2",
        "mamba",
        in_proj="gate v k q decay",
        conv1d="v_taps k_taps q_taps",
        norm="norm",
        out_proj="out",
    ),
    TensorRow(
        LAYER + "mamba.conv1d.bias", leaves("mamba2", "v_taps_bias k_taps_bias q_taps_bias"), LINEAR
    ),
    TensorRow(LAYER + "mamba.D", "blocks.mamba2.skip"),
)


def read_mamba2_heads(hf: HFConfig) -> ConfigFields:
    """Return the number and the width of the heads, which together are a multiple of the width of
    the model."""
    heads = hf.whole("mamba_n_heads", 128)
    inner = hf.whole("mamba_expand", 2) * hf.whole("hidden_size")
    width = hf.get("mamba_d_head", "auto")
    if inner % heads or width not in ("auto", inner // heads):
        raise hf.unsupported("mamba_d_head", width, [f"{inner} / mamba_n_heads={heads}", "auto"])
    limits = hf.get("time_step_limit", (0.0, math.inf))
    # transformers writes infinity as a table.
    if not isinstance(limits, list | tuple) or [*limits] not in NO_LIMITS:
        raise hf.unsupported("time_step_limit", limits, [[0.0, math.inf]])
    return {"recurrent.heads": heads, "recurrent.value_dim": inner // heads}


NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
MAMBA2_KEYS = (
    KeyRule(
        read_mamba2_heads,
        lambda config: {
            "mamba_n_heads": config.recurrent_heads,
            "mamba_d_head": config.recurrent_value_width,
            "mamba_expand": config.recurrent_heads * config.recurrent_value_width // config.d_model,
        },
    ),
    Key("mamba_n_groups", "recurrent.key_heads", 1),
    Key("mamba_d_state", "recurrent.key_dim", 256),
    Key("mamba_d_conv", "recurrent.convolution", 4),
    *fixed(mamba_conv_bias=True, mamba_proj_bias=False),
    Key("mamba_chunk_size", "recurrent.chunk", 256),
)


class BambaLayers(RecurrentLayers):
    """Which layers are recurrent: all but those of attn_layer_indices."""

    def read(self, hf: HFConfig) -> ConfigFields:
        layers = hf.whole("num_hidden_layers")
        attending = hf.get("attn_layer_indices") or []
        if not isinstance(attending, list) or not {*attending} <= {*range(layers)}:
            raise hf.unsupported("attn_layer_indices", attending, [f"numbers below {layers}"])
        kinds = [FULL if i in attending else LINEAR_ATTENTION for i in range(layers)]
        hf.keys_read.add("layer_types")
        return super().read(hf.with_values({"layer_types": kinds}))

    def write(self, config: ModelConfig) -> Keys:
        keys = super().write(config)
        kinds = keys.pop("layer_types")
        return keys | {"attn_layer_indices": [i for i, kind in enumerate(kinds) if kind == FULL]}


# Bamba (IBM 2024): RoPE of half a head, whatever its config.json says.
BAMBA = decoder_like(
    "bamba",
    "Bamba",
    (
        *with_rows(
            ROWS,
            *block(
                LAYER,
                gate="feed_forward.gate_proj",
                up="feed_forward.up_proj",
                down="feed_forward.down_proj",
                ffn_norm="pre_ff_layernorm",
            ),
            *norm("model.final_layernorm", "final_norm"),
        ),
        *MAMBA2_ROWS,
    ),
    (
        # The width of a head follows from the two others.
        *sizes("head_dim"),
        RMS,
        SILU,
        RopeKeys(fraction=("partial_rotary_factor", 0.5)),
        FixedKey("partial_rotary_factor", (0.5,)),
        BIAS_FLAGS,
        BambaLayers(MAMBA2_KEYS, "s"),
        IgnoredKeys("num_logits_to_keep z_loss_coefficient"),
    ),
)


# Of a feed-forward with experts, whose shared one is the whole of it where there are no others.
SHARED_EXPERT = "shared_intermediate_size"
GRANITE_EXPERTS = (
    Key("intermediate_size", "experts.d_ff", needed=True),
    *routed("num_local_experts"),
    Key(SHARED_EXPERT, "experts.shared_ff", 1024),
)
GRANITE_DENSE = (
    Key(SHARED_EXPERT, "d_ff", 1024),
    IgnoredKeys("intermediate_size num_experts_per_tok router_aux_loss_coef"),
)


def read_optional_experts(hf: HFConfig) -> ConfigFields:
    rows: tuple[KeyMapping, ...] = GRANITE_EXPERTS
    if hf.get("num_local_experts") == 0:
        rows = GRANITE_DENSE
    fields: ConfigFields = {}
    for row in rows:
        fields |= row.read(hf)
    return fields


def written_optional_experts(config: ModelConfig) -> Keys:
    if config.feed_forward != "experts":
        width = config.ff_width
        return {"num_local_experts": 0, "intermediate_size": width, SHARED_EXPERT: width}
    keys: Keys = {}
    for row in GRANITE_EXPERTS:
        keys |= row.write(config)
    return keys


# Granite 4 (IBM 2025): multipliers, and layers of attention with or without positions.
GRANITE_HYBRID = decoder_like(
    "granitemoehybrid",
    "GraniteMoeHybrid",
    (
        *with_rows(
            GRANITE_SHARED_ROWS,
            *linear(LAYER + "shared_mlp.input_linear", ("blocks.ffn.gate", "blocks.ffn.up")),
            *linear(LAYER + "shared_mlp.output_linear", "blocks.ffn.down"),
        ),
        *MAMBA2_ROWS,
    ),
    (
        *sizes("intermediate_size"),
        *MULTIPLIERS,
        *USUAL,
        ATTENTION_BIAS,
        KeyRule(read_optional_experts, written_optional_experts),
        Choice(
            "position_embedding_type",
            "positions",
            {"rope": "rope", "nope": "none", None: "none"},
            None,
        ),
        RecurrentLayers(MAMBA2_KEYS, "s", interval=0),
    ),
    module_rows=GRANITE_PARAMETERS,
)
