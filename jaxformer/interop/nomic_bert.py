"""NomicBERT (arXiv:2402.01613): BERT with RoPE in place of learned positions, a gated feed-forward,
and no biases but those of the norms and heads."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.bert import BERT_SIZE_KEYS, masked_copies, named_in_class
from jaxformer.interop.family import Family
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import QKV, STACKED, TensorRow, linear, norm, output

BASE = "nomic_bert"


def stored_rows() -> tuple[TensorRow, ...]:
    """The tensors of the layers as files have them."""
    layer = BASE + ".encoder.layers.{}."
    return (
        *norm(f"{BASE}.emb_ln", "embed.norm"),
        *linear(layer + "attn.Wqkv", QKV, STACKED),
        *linear(layer + "attn.out_proj", "blocks.attention.out"),
        *norm(layer + "norm1", "blocks.attention_norm"),
        *linear(layer + "mlp.fc12", "blocks.ffn.gate"),
        *linear(layer + "mlp.fc11", "blocks.ffn.up"),
        *linear(layer + "mlp.fc2", "blocks.ffn.down"),
        *norm(layer + "norm2", "blocks.ffn_norm"),
    )


def module_rows() -> tuple[TensorRow, ...]:
    """The same as the classes of transformers have them, which peft adapts."""
    layer = BASE + ".layers.{}."
    return (
        *norm(f"{BASE}.embeddings.LayerNorm", "embed.norm"),
        *linear(layer + "self_attn.q_proj", "blocks.attention.q"),
        *linear(layer + "self_attn.k_proj", "blocks.attention.k"),
        *linear(layer + "self_attn.v_proj", "blocks.attention.v"),
        *linear(layer + "self_attn.o_proj", "blocks.attention.out"),
        *norm(layer + "post_attention_layernorm", "blocks.attention_norm"),
        *linear(layer + "mlp.gate_proj", "blocks.ffn.gate"),
        *linear(layer + "mlp.up_proj", "blocks.ffn.up"),
        *linear(layer + "mlp.down_proj", "blocks.ffn.down"),
        *norm(layer + "post_mlp_layernorm", "blocks.ffn_norm"),
    )


def with_ends(config: ModelConfig, layers: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    trunk = (
        TensorRow(f"{BASE}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{BASE}.embeddings.token_type_embeddings.weight", "embed.types"),
        *layers,
        *linear(f"{BASE}.pooler.dense", "pooler.dense"),
    )
    masked = (
        *linear("cls.predictions.transform.dense", "head.dense"),
        *norm("cls.predictions.transform.layer_norm", "head.norm"),
        TensorRow("cls.predictions.decoder.weight", "head.weight"),
        TensorRow(f"cls.predictions.{'' if config.tied_head else 'decoder.'}bias", "head.bias"),
    )
    classes = output("classifier", "head")
    head = {"masked": masked, "classes": classes, "tags": classes}.get(config.output, ())
    return named_in_class(BASE, config, (*trunk, *head))


NOMIC_BERT = Family(
    "nomic_bert",
    {
        "NomicBertForMaskedLM": {"head": "masked"},
        "NomicBertForSequenceClassification": {"head": "classes"},
        "NomicBertForTokenClassification": {"head": "tags"},
        "NomicBertModel": {"head": "none"},
    },
    (
        fields.Constant(
            family="encoder", norm="layer", norm_placement="post", bias="norm", embedding_norm=True
        ),
        *(
            fields.Key(hf, field, 30528 if hf == "vocab_size" else usual)
            for hf, field, usual in BERT_SIZE_KEYS
        ),
        fields.Key("head_dim", "head_dim"),
        fields.Key("type_vocab_size", "token_types", 2),
        fields.Key("layer_norm_eps", "norm_eps", 1e-12),
        fields.Choice("hidden_act", "activation", fields.GATED_NAMES, "silu"),
        Length(2048),
        Rope(theta=("rope_theta", 1000.0)),
        fields.tied(True),
        fields.ClassCount(),
        fields.Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        fields.Present(
            "nomic_bert.pooler.dense.weight", "pooler", ("NomicBertForSequenceClassification",)
        ),
        fields.IgnoredKeys("classifier_dropout default_theta"),
    ),
    lambda config: with_ends(config, stored_rows()),
    prefix="nomic_bert.",
    copies=masked_copies("cls.predictions", "nomic_bert.embeddings.word_embeddings.weight"),
    module_rows=lambda config: with_ends(config, module_rows()),
    required_ids={"pad_token_id": 0},
    covers="RoPE with every scaling; gated activations; masked-LM, text- and"
    " token-classification heads; no head",
)
