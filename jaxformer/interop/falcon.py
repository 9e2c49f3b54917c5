"""Falcon and MPT: decoders with layer norms and few biases, whose queries, keys and values are one
matrix."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import INV_FREQ
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import BY_KEY_HEAD, QKV, TensorRow, linear, norm

FALCON_HEADS = 71


class FalconBlocks(KeyMapping):
    """The number of key heads and the residual connection of Falcon, which four keys state.

    The new architecture has groups of heads, and parallel sublayers with a norm for each
    (Falcon-40B) or one for both (Falcon2-11B). The old one has one key head or as many as heads,
    and parallel sublayers with one norm (Falcon-7B) or sequential ones.
    """

    def read(self, hf: HFConfig) -> ConfigFields:
        heads = hf.number("num_attention_heads", FALCON_HEADS)
        stated_norms = hf.get("num_ln_in_parallel_attn")
        is_parallel = hf.flag("parallel_attn", True)
        has_one_key = hf.flag("multi_query", True)
        if hf.flag("new_decoder_architecture", False):
            hf.only("parallel_attn", (True,))
            hf.only("num_ln_in_parallel_attn", (2, 1, None))
            residual = "parallel_shared" if stated_norms == 1 else "parallel"
            kv_heads = heads if hf.get("num_kv_heads") is None else hf.number("num_kv_heads", 0)
            return {"n_kv_heads": kv_heads, "residual": residual}
        if is_parallel:
            hf.only("num_ln_in_parallel_attn", (1, None))
        if not has_one_key:
            hf.only("num_kv_heads", (heads, None))
        hf.get("num_kv_heads")
        residual = "parallel_shared" if is_parallel else "sequential"
        return {"n_kv_heads": 1 if has_one_key else heads, "residual": residual}

    def write(self, config: ModelConfig) -> Keys:
        is_old = config.residual != "parallel" and config.kv_heads in (1, config.n_heads)
        norms = 2 if config.residual == "parallel" else 1
        return {
            "new_decoder_architecture": not is_old,
            "multi_query": config.kv_heads == 1,
            "num_kv_heads": config.n_heads if is_old else config.kv_heads,
            "parallel_attn": config.residual != "sequential",
            "num_ln_in_parallel_attn": None if is_old else norms,
        }


# Falcon (arXiv:2311.16867).
FALCON_FIELDS = (
    fields.Constant(norm="layer"),
    fields.DivisibleHeads(),
    fields.Key("vocab_size", "vocab_size", 65024),
    fields.Key("hidden_size", "d_model", 4544, instead="n_embed"),
    fields.Key("num_hidden_layers", "n_layers", 32),
    fields.Key("num_attention_heads", "n_heads", FALCON_HEADS),
    fields.Key("ffn_hidden_size", "d_ff"),
    fields.Key("layer_norm_epsilon", "norm_eps", 1e-5),
    FalconBlocks(),
    fields.Choice("activation", "activation", fields.PLAIN, "gelu"),
    fields.Biases({"bias": (frozenset({"qkv", "out", "ffn"}), False)}, always=frozenset({"norm"})),
    # transformers 5 adds ALiBi once or twice, depending on the kernel, rounded to bfloat16.
    fields.FixedKey("alibi", (False, None)),
    Length(2048),
    Rope(),
    fields.tied(True),
    fields.Dropout("attention_dropout hidden_dropout"),
    fields.IgnoredKeys("apply_residual_connection_post_layernorm ff_factor rotary"),
)

FALCON_LAYER = "transformer.h.{}."
FALCON_TRUNK = (
    TensorRow("transformer.word_embeddings.weight", "embed.tokens"),
    *linear(FALCON_LAYER + "self_attention.query_key_value", QKV, BY_KEY_HEAD),
    *linear(FALCON_LAYER + "self_attention.dense", "blocks.attention.out"),
    *linear(FALCON_LAYER + "mlp.dense_h_to_4h", "blocks.ffn.up"),
    *linear(FALCON_LAYER + "mlp.dense_4h_to_h", "blocks.ffn.down"),
    *norm("transformer.ln_f", "final_norm"),
    TensorRow("lm_head.weight", "head.weight"),
)
# The names of the norms before attention and feed-forward, by the residual connection.
FALCON_NORMS = {
    "sequential": ("input_layernorm", "post_attention_layernorm"),
    "parallel": ("ln_attn", "ln_mlp"),
    "parallel_shared": ("input_layernorm", ""),
}


def falcon_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    """The tensors of a Falcon with the norms of this config."""
    attention, ffn = FALCON_NORMS[config.residual]
    ffn_norm = norm(FALCON_LAYER + ffn, "blocks.ffn_norm") if ffn else ()
    return *FALCON_TRUNK, *norm(FALCON_LAYER + attention, "blocks.attention_norm"), *ffn_norm


FALCON = Family(
    "falcon",
    {"FalconForCausalLM": {}},
    FALCON_FIELDS,
    falcon_rows,
    prefix="transformer.",
    bases=("FalconModel",),
    copies=tied_copy("lm_head.weight", "transformer.word_embeddings.weight"),
    ignored=(INV_FREQ,),
    covers="groups of queries, keys and values in one matrix; sublayers in parallel behind one norm"
    " or two, or in turn; ALiBi (`alibi` of Falcon-RW), which transformers adds once or twice,"
    " depending on the attention kernel, is refused",
)


class SoftmaxScale(KeyMapping):
    """The factor of the scores; null is 1 / sqrt(head width)."""

    def read(self, hf: HFConfig) -> ConfigFields:
        scale = hf.get("softmax_scale")
        if scale is None:
            return {}
        if hf.checked_number("softmax_scale", scale) <= 0:
            raise hf.unsupported("softmax_scale", scale, ["a number above 0", None])
        return {"attention_scale": float(scale)}

    def write(self, config: ModelConfig) -> Keys:
        usual = float(f"{config.head_width**-0.5:.9g}")
        return {
            "softmax_scale": None if config.attention_scale == usual else config.attention_scale
        }


# MPT (MosaicML 2023). transformers computes all as one kind: with ALiBi, without biases, with a
# feed-forward of four times the width, whatever other keys say.
MPT_FIELDS = (
    fields.Constant(norm="layer", positions="alibi", activation="gelu"),
    fields.Key("vocab_size", "vocab_size", 50368),
    fields.Key("d_model", "d_model", 2048),
    fields.Key("n_layers", "n_layers", 24),
    fields.Key("n_heads", "n_heads", 16),
    fields.Key("max_seq_len", "max_length", 2048),
    fields.Key("layer_norm_epsilon", "norm_eps", 1e-5),
    fields.KeyTable(
        "attn_config",
        (
            SoftmaxScale(),
            fields.FixedKey("alibi", (True,)),
            fields.FixedKey("alibi_bias_max", (8,)),
            fields.FixedKey("clip_qkv", (None, 0)),
            fields.FixedKey("qk_ln", (False,)),
            fields.FixedKey("prefix_lm", (False,)),
            fields.FixedKey("attn_type", ("multihead_attention",)),
            fields.FixedKey("attn_uses_sequence_id", (False,)),
            # A rate that transformers 5 takes as a whole number alone.
            fields.IgnoredKeys("attn_pdrop attn_impl"),
        ),
    ),
    fields.FixedKey("expansion_ratio", (4,)),
    fields.FixedKey("no_bias", (True,)),
    fields.FixedKey("logit_scale", (None,)),
    fields.tied(True),
    fields.Dropout("resid_pdrop emb_pdrop"),
    fields.IgnoredKeys("init_device learned_pos_emb embedding_fraction norm_type init_config"),
    fields.IgnoredKeys("tokenizer_name verbose"),
)

MPT_LAYER = "transformer.blocks.{}."
MPT_ROWS = (
    TensorRow("transformer.wte.weight", "embed.tokens"),
    *norm(MPT_LAYER + "norm_1", "blocks.attention_norm"),
    *linear(MPT_LAYER + "attn.Wqkv", QKV),
    *linear(MPT_LAYER + "attn.out_proj", "blocks.attention.out"),
    *norm(MPT_LAYER + "norm_2", "blocks.ffn_norm"),
    *linear(MPT_LAYER + "ffn.up_proj", "blocks.ffn.up"),
    *linear(MPT_LAYER + "ffn.down_proj", "blocks.ffn.down"),
    *norm("transformer.norm_f", "final_norm"),
    TensorRow("lm_head.weight", "head.weight"),
)
MPT = Family(
    "mpt",
    {"MptForCausalLM": {}},
    MPT_FIELDS,
    lambda config: MPT_ROWS,
    prefix="transformer.",
    bases=("MptModel",),
    copies=tied_copy("lm_head.weight", "transformer.wte.weight"),
    covers="ALiBi; layer norms without biases; queries, keys and values in one matrix",
)
