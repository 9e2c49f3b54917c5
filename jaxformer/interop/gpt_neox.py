"""GPT-NeoX (arXiv:2204.06745), also the architecture of Pythia."""

from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.llama import ATTENTION, INV_FREQ
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import BY_HEAD, QKV, TensorRow, linear, norm

FIELDS = (
    fields.Constant(norm="layer"),
    fields.DivisibleHeads(),
    fields.Key("vocab_size", "vocab_size", 50432),
    fields.Key("hidden_size", "d_model", 6144),
    fields.Key("num_hidden_layers", "n_layers", 44),
    fields.Key("num_attention_heads", "n_heads", 64),
    fields.Key("intermediate_size", "d_ff", 24576),
    fields.Key("layer_norm_eps", "norm_eps", 1e-5),
    Length(2048),
    fields.Choice("hidden_act", "activation", fields.PLAIN, "gelu"),
    fields.Choice(
        "use_parallel_residual", "residual", {True: "parallel", False: "sequential"}, True
    ),
    Rope(theta=("rotary_emb_base", 10_000.0), fraction=("rotary_pct", 0.25)),
    fields.AliasKey("rope_theta", "rotary_emb_base", "rope_theta", checked=True),
    fields.AliasKey("partial_rotary_factor", "rotary_pct", "rope_fraction", checked=True),
    fields.Biases({"attention_bias": (ATTENTION, True)}, always=frozenset({"ffn", "norm"})),
    fields.tied(False),
    fields.Dropout("attention_dropout hidden_dropout"),
)

LAYER = "gpt_neox.layers.{}."
ROWS = (
    TensorRow("gpt_neox.embed_in.weight", "embed.tokens"),
    *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
    *linear(LAYER + "attention.query_key_value", QKV, BY_HEAD),
    *linear(LAYER + "attention.dense", "blocks.attention.out"),
    *norm(LAYER + "post_attention_layernorm", "blocks.ffn_norm"),
    *linear(LAYER + "mlp.dense_h_to_4h", "blocks.ffn.up"),
    *linear(LAYER + "mlp.dense_4h_to_h", "blocks.ffn.down"),
    *norm("gpt_neox.final_layer_norm", "final_norm"),
    TensorRow("embed_out.weight", "head.weight"),
)

GPT_NEOX = Family(
    "gpt_neox",
    {"GPTNeoXForCausalLM": {}},
    FIELDS,
    lambda config: ROWS,
    prefix="gpt_neox.",
    bases=("GPTNeoXModel",),
    copies=tied_copy("embed_out.weight", "gpt_neox.embed_in.weight"),
    ignored=(r"\.attention\.(masked_)?bias$", INV_FREQ),
)
