"""GPT-2 (Radford et al. 2019)."""

from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.tensor_table import CONV, QKV, TensorRow, linear, norm

FIELDS = (
    fields.Constant(norm="layer", bias="all", positions="learned"),
    fields.Key("vocab_size", "vocab_size", 50257),
    fields.Key("n_positions", "max_length", 1024),
    fields.Key("n_embd", "d_model", 768),
    fields.Key("n_layer", "n_layers", 12),
    fields.Key("n_head", "n_heads", 12),
    fields.Key("n_inner", "d_ff"),
    fields.Key("layer_norm_epsilon", "norm_eps", 1e-5),
    fields.Choice("activation_function", "activation", fields.PLAIN, "gelu_new"),
    fields.Choice("scale_attn_weights", "attention_scale", {True: 0.0, False: 1.0}, True),
    fields.FixedKey("scale_attn_by_inverse_layer_idx", (False,)),
    fields.tied(True),
    fields.Dropout("resid_pdrop embd_pdrop attn_pdrop"),
    # Read by llama.cpp's converter.
    fields.AliasKey("n_ctx", "n_positions", "max_length"),
    fields.IgnoredKeys("reorder_and_upcast_attn summary_type summary_use_proj summary_activation"),
    fields.IgnoredKeys("summary_proj_to_labels summary_first_dropout"),
)

LAYER = "transformer.h.{}."
ROWS = (
    TensorRow("transformer.wte.weight", "embed.tokens"),
    TensorRow("transformer.wpe.weight", "embed.positions"),
    *norm(LAYER + "ln_1", "blocks.attention_norm"),
    *linear(LAYER + "attn.c_attn", QKV, CONV),
    *linear(LAYER + "attn.c_proj", "blocks.attention.out", CONV),
    *norm(LAYER + "ln_2", "blocks.ffn_norm"),
    *linear(LAYER + "mlp.c_fc", "blocks.ffn.up", CONV),
    *linear(LAYER + "mlp.c_proj", "blocks.ffn.down", CONV),
    *norm("transformer.ln_f", "final_norm"),
    TensorRow("lm_head.weight", "head.weight"),
)

GPT2 = Family(
    "gpt2",
    {"GPT2LMHeadModel": {}},
    FIELDS,
    lambda config: ROWS,
    prefix="transformer.",
    bases=("GPT2Model",),
    copies=tied_copy("lm_head.weight", "transformer.wte.weight"),
    ignored=(r"\.attn\.(masked_)?bias$",),
)
