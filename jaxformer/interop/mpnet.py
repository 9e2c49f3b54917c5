"""MPNet (arXiv:2004.09297): RoBERTa with T5's relative positions in all layers, beside the learned
ones. Its 32 buckets and the offset of its positions are in the code, not in the config."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.bert import (
    BERT_SIZE_KEYS,
    ENCODER,
    OLD_NORMS,
    OffsetPositions,
    masked_copies,
    named_in_class,
)
from jaxformer.interop.family import Family
from jaxformer.interop.tensor_table import TensorRow, linear, norm, output


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "mpnet"
    layer = base + ".encoder.layer.{}."
    trunk = (
        TensorRow(f"{base}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{base}.embeddings.position_embeddings.weight", "embed.positions"),
        *norm(f"{base}.embeddings.LayerNorm", "embed.norm"),
        TensorRow(f"{base}.encoder.relative_attention_bias.weight", "relative_bias"),
        *linear(layer + "attention.attn.q", "blocks.attention.q"),
        *linear(layer + "attention.attn.k", "blocks.attention.k"),
        *linear(layer + "attention.attn.v", "blocks.attention.v"),
        *linear(layer + "attention.attn.o", "blocks.attention.out"),
        *norm(layer + "attention.LayerNorm", "blocks.attention_norm"),
        *linear(layer + "intermediate.dense", "blocks.ffn.up"),
        *linear(layer + "output.dense", "blocks.ffn.down"),
        *norm(layer + "output.LayerNorm", "blocks.ffn_norm"),
    )
    masked = (
        *linear("lm_head.dense", "head.dense"),
        *norm("lm_head.layer_norm", "head.norm"),
        TensorRow("lm_head.decoder.weight", "head.weight"),
        TensorRow(f"lm_head.{'' if config.tied_head else 'decoder.'}bias", "head.bias"),
    )
    pooler = linear(f"{base}.pooler.dense", "pooler.dense")
    dense = linear("classifier.dense", "pooler.dense")
    heads = {
        "masked": (*pooler, *masked),
        "classes": (*dense, *output("classifier.out_proj", "head")),
        "tags": (*pooler, *output("classifier", "head")),
    }
    return named_in_class(base, config, (*trunk, *heads.get(config.output, pooler)))


MPNET = Family(
    "mpnet",
    {
        "MPNetForMaskedLM": {"head": "masked"},
        "MPNetForSequenceClassification": {"head": "classes"},
        "MPNetForTokenClassification": {"head": "tags"},
        "MPNetModel": {"head": "none"},
    },
    (
        ENCODER,
        fields.Constant(
            positions="t5",
            position_embedding="learned",
            relative_buckets=32,
            relative_distance=128,
            activation="gelu",
        ),
        *(
            fields.Key(hf, field, 30527 if hf == "vocab_size" else usual)
            for hf, field, usual in BERT_SIZE_KEYS
        ),
        fields.Key("layer_norm_eps", "norm_eps", 1e-12),
        fields.FixedKey("relative_attention_num_buckets", (32,)),
        fields.FixedKey("pad_token_id", (1,)),
        OffsetPositions(),
        # The masked head always has this one.
        fields.FixedKey("hidden_act", ("gelu",)),
        fields.tied(True),
        fields.ClassCount(),
        fields.Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        fields.Present("mpnet.pooler.dense.weight", "pooler", ("MPNetModel",)),
        fields.IgnoredKeys("gradient_checkpointing"),
    ),
    rows,
    prefix="mpnet.",
    copies=masked_copies("lm_head", "mpnet.embeddings.word_embeddings.weight"),
    ignored=(r"embeddings\.position_ids$", r"^(mpnet\.)?pooler\."),  # as of RoBERTa
    renamed=OLD_NORMS,
    covers="relative beside learned positions; masked-LM, text- and token-classification heads;"
    " pooler; no head",
)
