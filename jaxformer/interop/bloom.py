"""BLOOM (arXiv:2211.05100): ALiBi, and a norm after the embedding."""

from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import Constant, Dropout, FixedKey, IgnoredKeys, Key, tied
from jaxformer.interop.tensor_table import BY_HEAD, QKV, TensorRow, linear, norm

FIELDS = (
    Constant(
        norm="layer", bias="all", positions="alibi", embedding_norm=True, activation="gelu_tanh"
    ),
    Key("vocab_size", "vocab_size", 250880),
    Key("hidden_size", "d_model", 64, instead="n_embed"),
    Key("n_layer", "n_layers", 2, instead="num_hidden_layers"),
    Key("n_head", "n_heads", 8, instead="num_attention_heads"),
    Key("layer_norm_epsilon", "norm_eps", 1e-5),
    Key("seq_length", "max_length", 2048),
    FixedKey("apply_residual_connection_post_layernorm", (False,)),
    tied(True),
    Dropout("hidden_dropout attention_dropout"),
    # It would leave out biases with pretraining_tp > 1.
    FixedKey("slow_but_exact", (False,)),
    IgnoredKeys("attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi"),
    IgnoredKeys("pretraining_pp skip_bias_add skip_bias_add_qkv n_inner"),
)

LAYER = "transformer.h.{}."
ROWS = (
    TensorRow("transformer.word_embeddings.weight", "embed.tokens"),
    *norm("transformer.word_embeddings_layernorm", "embed.norm"),
    *norm(LAYER + "input_layernorm", "blocks.attention_norm"),
    *linear(LAYER + "self_attention.query_key_value", QKV, BY_HEAD),
    *linear(LAYER + "self_attention.dense", "blocks.attention.out"),
    *norm(LAYER + "post_attention_layernorm", "blocks.ffn_norm"),
    *linear(LAYER + "mlp.dense_h_to_4h", "blocks.ffn.up"),
    *linear(LAYER + "mlp.dense_4h_to_h", "blocks.ffn.down"),
    *norm("transformer.ln_f", "final_norm"),
    TensorRow("lm_head.weight", "head.weight"),
)

BLOOM = Family(
    "bloom",
    {"BloomForCausalLM": {}},
    FIELDS,
    lambda config: ROWS,
    prefix="transformer.",
    bases=("BloomModel",),
    copies=tied_copy("lm_head.weight", "transformer.word_embeddings.weight"),
)
