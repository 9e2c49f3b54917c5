"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts behind some dense layers."""

import dataclasses
import math
from typing import Any

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import ATTENTION_BIAS, INV_FREQ, LAYER, RMS, SILU
from jaxformer.interop.mixtral import EXPERT_BLOCKS, QWEN_ROWS
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import HEADS_STACKED, LINEAR, STACKED, TensorRow, linear, norm
from jaxformer.layers.pattern import layer_configs

UNROTATED, ROTATED, DEEPSEEK_LAYERS = 128, 64, 61  # defaults of DeepseekV3Config
LATENT_BLOCKS = "blocks.latent."

DEEPSEEK_ROWS = (
    *QWEN_ROWS,
    *norm(LAYER + "input_layernorm", "blocks.latent_norm"),
    *linear(LAYER + "self_attn.q_a_proj", f"{LATENT_BLOCKS}q_down"),
    TensorRow(LAYER + "self_attn.q_a_layernorm.weight", f"{LATENT_BLOCKS}q_down_norm"),
    *linear(
        LAYER + "self_attn.kv_a_proj_with_mqa",
        (f"{LATENT_BLOCKS}kv_down", f"{LATENT_BLOCKS}k_rope"),
        STACKED,
    ),
    TensorRow(LAYER + "self_attn.kv_a_layernorm.weight", f"{LATENT_BLOCKS}kv_down_norm"),
    TensorRow(
        LAYER + "self_attn.kv_b_proj.weight",
        (f"{LATENT_BLOCKS}k", f"{LATENT_BLOCKS}v"),
        HEADS_STACKED,
    ),
    *linear(LAYER + "self_attn.o_proj", f"{LATENT_BLOCKS}out"),
    TensorRow(LAYER + "mlp.gate.e_score_correction_bias", f"{EXPERT_BLOCKS}router_bias"),
    *(
        TensorRow(
            f"{LAYER}mlp.shared_experts.{name}_proj.weight", f"{EXPERT_BLOCKS}shared.{name}", LINEAR
        )
        for name in ("gate", "up", "down")
    ),
)


def deepseek_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    """The tensors, of which that of the queries has another name without a query rank."""
    name = "q_b_proj" if config.query_rank else "q_proj"
    return (
        *DEEPSEEK_ROWS,
        TensorRow(f"{LAYER}self_attn.{name}.weight", f"{LATENT_BLOCKS}q", LINEAR),
    )


class LatentHeads(KeyMapping):
    """The widths of a head without and with rotation; `qk_head_dim` and `head_dim` follow."""

    def read(self, hf: HFConfig) -> ConfigFields:
        nope, rotated = (
            hf.number("qk_nope_head_dim", UNROTATED),
            hf.number("qk_rope_head_dim", ROTATED),
        )
        for key, following in (("qk_head_dim", nope + rotated), ("head_dim", rotated)):
            hf.only(key, (following, None))
        return {"head_dim": nope + rotated, "rope_head_dim": rotated}

    def write(self, config: ModelConfig) -> Keys:
        rotated = config.rope_head_dim
        return {"qk_nope_head_dim": config.head_width - rotated, "qk_rope_head_dim": rotated}


class LatentRope(Rope):
    """RoPE whose YaRN multiplies the scores by m(mscale_all_dim)^2, m(x) = 1 + 0.1 x ln(factor)."""

    def read(self, hf: HFConfig) -> ConfigFields:
        rotation = super().read(hf)
        entry = {**hf.table("rope_parameters"), **hf.table("rope_scaling")}
        number = entry.get("mscale_all_dim")
        if not number or rotation.get("rope_scaling") != "yarn":
            return rotation
        factor, width = rotation["rope_factor"], LatentHeads().read(hf)["head_dim"]
        return rotation | {"attention_scale": width**-0.5 * _mscale(number, factor) ** 2}

    def write(self, config: ModelConfig) -> Keys:
        keys = super().write(config)
        root = math.sqrt(config.attention_scale * config.head_width**0.5)
        # attention_scale has nine digits here.
        if config.rope_scaling == "yarn" and abs(root - 1) > 1e-8:
            log = 0.1 * math.log(config.rope_factor)
            of_all, of_rotated = (root - 1) / log, (root * config.rope_scale - 1) / log
            short = float(f"{of_all:.7g}")
            scale = config.head_width**-0.5 * _mscale(short, config.rope_factor) ** 2
            if f"{scale:.9g}" == f"{config.attention_scale:.9g}":
                of_all = short
            # Readers but transformers do not know attention_factor here.
            mscales = {"mscale": float(f"{of_rotated:.7g}"), "mscale_all_dim": of_all}
            keys["rope_scaling"] = keys["rope_scaling"] | mscales
        return keys


def _mscale(number: Any, factor: float) -> float:
    return 1 + 0.1 * float(number) * math.log(factor)


@dataclasses.dataclass(frozen=True)
class DenseLayers(KeyMapping):
    """The experts of all layers but the first ones; none where these are all."""

    rows: tuple[KeyMapping, ...]

    def read(self, hf: HFConfig) -> ConfigFields:
        layers, dense = (
            hf.number("num_hidden_layers", DEEPSEEK_LAYERS),
            hf.number("first_k_dense_replace", 3),
        )
        if dense >= layers:
            # No layer reads the others.
            hf.keys_read |= {key for row in self.rows for key in row.write(ModelConfig())}
            return {}
        experts: ConfigFields = {"feed_forward": "experts", "dense_layers": dense}
        for row in self.rows:
            experts |= row.read(hf)
        return experts

    def write(self, config: ModelConfig) -> Keys:
        layers = layer_configs(config, config.n_layers)
        have_experts = [layer.feed_forward == "experts" for layer in layers]
        keys: Keys = {"first_k_dense_replace": [*have_experts, True].index(True)}
        for row in self.rows if any(have_experts) else ():
            keys |= row.write(config)
        return keys


class SharedExperts(KeyMapping):
    """The width of the shared expert, as a number of experts."""

    def read(self, hf: HFConfig) -> ConfigFields:
        number = hf.number("n_shared_experts", 1)
        if number < 1:
            raise hf.unsupported("n_shared_experts", number, ["1 or more"])
        return {"shared_ff": number * hf.number("moe_intermediate_size", 2048)}

    def write(self, config: ModelConfig) -> Keys:
        return {"n_shared_experts": config.shared_ff // config.expert_width}


class PredictedAhead(KeyMapping):
    """The number of layers that predict further tokens, which are not read, and so not written."""

    def read(self, hf: HFConfig) -> ConfigFields:
        hf.keys_read |= {"num_nextn_predict_layers", "num_mtp_layers"}
        return {}

    def write(self, config: ModelConfig) -> Keys:
        return {"num_nextn_predict_layers": 0}


DEEPSEEK_SIZES = (
    fields.Key("vocab_size", "vocab_size", 129280),
    fields.Key("hidden_size", "d_model", 7168),
    fields.Key("num_hidden_layers", "n_layers", DEEPSEEK_LAYERS),
    fields.Key("num_attention_heads", "n_heads", 128),
    fields.AliasKey("num_key_value_heads", "num_attention_heads", "n_heads", True, 128),
    fields.Key("intermediate_size", "d_ff", 18432),
    fields.Key("rms_norm_eps", "norm_eps", 1e-6),
    fields.Key("kv_lora_rank", "kv_rank", 512),
    fields.OptionalKey("q_lora_rank", "query_rank", 1536),
    fields.Key("v_head_dim", "value_dim", 128),
    Length(4096),
    fields.Dropout("attention_dropout"),
)
DEEPSEEK_EXPERTS = (
    fields.Constant(router="sigmoid", router_bias="balanced", router_balance_loss=0.0),
    fields.Key("n_routed_experts", "n_experts", 256, instead="num_local_experts"),
    fields.Key("num_experts_per_tok", "experts_per_token", 8),
    fields.Key("moe_intermediate_size", "expert_ff", 2048),
    SharedExperts(),
    fields.Key("n_group", "router_groups", 8),
    fields.Key("topk_group", "router_top_groups", 4),
    fields.Choice("norm_topk_prob", "router_renormalize", {True: True, False: False}, True),
    fields.Key("routed_scaling_factor", "router_scale", 2.5),
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    {"DeepseekV3ForCausalLM": {}},
    (
        fields.Constant(mixer="latent"),
        *DEEPSEEK_SIZES,
        LatentHeads(),
        DenseLayers(DEEPSEEK_EXPERTS),
        RMS,
        SILU,
        LatentRope(),
        fields.Choice(
            "rope_interleave", "rope_pairing", {True: "interleaved", False: "half"}, True
        ),
        ATTENTION_BIAS,
        PredictedAhead(),
        # Of the published files, whose keys transformers does not read.
        fields.FixedKey("scoring_func", ("sigmoid",)),
        fields.FixedKey("topk_method", ("noaux_tc",)),
        fields.FixedKey("moe_layer_freq", (1,)),
        fields.IgnoredKeys("aux_loss_alpha seq_aux ep_size output_router_logits"),
        fields.tied(False),
    ),
    deepseek_rows,
    prefix="model.",
    bases=("DeepseekV3Model",),
    copies=tied_copy("lm_head.weight", "model.embed_tokens.weight"),
    # The published model has a layer behind its 61 that predicts a further token.
    ignored=(INV_FREQ, r"^model\.layers\.61\."),
    covers="latent attention; experts in groups behind dense layers, and a shared one;"
    " YaRN with `mscale_all_dim`",
)
