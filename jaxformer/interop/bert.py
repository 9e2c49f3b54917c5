"""BERT (arXiv:1810.04805), and what RoBERTa shares with it."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Copies, Copy, Family
from jaxformer.interop.fields import KeyMapping
from jaxformer.interop.tensor_table import TensorRow, linear, norm, output


def shared_fields(vocab_size: int) -> tuple[KeyMapping, ...]:
    """The keys of both, with the default of vocab_size."""
    return (
        fields.Constant(
            family="encoder",
            norm="layer",
            norm_placement="post",
            bias="all",
            embedding_norm=True,
            positions="learned",
        ),
        fields.Key("vocab_size", "vocab_size", vocab_size),
        fields.Key("hidden_size", "d_model", 768),
        fields.Key("num_hidden_layers", "n_layers", 12),
        fields.Key("num_attention_heads", "n_heads", 12),
        fields.Key("intermediate_size", "d_ff", 3072),
        fields.Key("type_vocab_size", "token_types", 2),
        fields.Key("layer_norm_eps", "norm_eps", 1e-12),
        fields.FixedKey("position_embedding_type", ("absolute",)),
        fields.tied(True),
        fields.ClassCount(),
        fields.Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        fields.IgnoredKeys("classifier_dropout gradient_checkpointing"),
    )


def trunk(base: str) -> tuple[TensorRow, ...]:
    """All but the heads; `base` is the prefix of the names."""
    layer = base + ".encoder.layer.{}."
    return (
        TensorRow(f"{base}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{base}.embeddings.position_embeddings.weight", "embed.positions"),
        TensorRow(f"{base}.embeddings.token_type_embeddings.weight", "embed.types"),
        *norm(f"{base}.embeddings.LayerNorm", "embed.norm"),
        *linear(layer + "attention.self.query", "blocks.attention.q"),
        *linear(layer + "attention.self.key", "blocks.attention.k"),
        *linear(layer + "attention.self.value", "blocks.attention.v"),
        *linear(layer + "attention.output.dense", "blocks.attention.out"),
        *norm(layer + "attention.output.LayerNorm", "blocks.attention_norm"),
        *linear(layer + "intermediate.dense", "blocks.ffn.up"),
        *linear(layer + "output.dense", "blocks.ffn.down"),
        *norm(layer + "output.LayerNorm", "blocks.ffn_norm"),
    )


def named_in_class(
    base: str, config: ModelConfig, tensor_rows: tuple[TensorRow, ...]
) -> tuple[TensorRow, ...]:
    """The rows as a class with a head names them; without a head, as the base model does."""
    if config.output != "none":
        return tensor_rows
    return tuple(row._replace(hf=row.hf.removeprefix(f"{base}.")) for row in tensor_rows)


OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
BUFFERS = (r"embeddings\.(position_ids|token_type_ids)$",)


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    masked = (
        *linear("cls.predictions.transform.dense", "head.dense"),
        *norm("cls.predictions.transform.LayerNorm", "head.norm"),
        TensorRow("cls.predictions.decoder.weight", "head.weight"),
        TensorRow(f"cls.predictions.{'' if config.tied_head else 'decoder.'}bias", "head.bias"),
        *output("cls.seq_relationship", "next_sentence"),
    )
    classes = output("classifier", "head")
    head = {"masked": masked, "classes": classes, "tags": classes}.get(config.output, ())
    pooler = linear("bert.pooler.dense", "pooler.dense")
    return named_in_class("bert", config, (*trunk("bert"), *pooler, *head))


def masked_copies(head: str, embedding: str) -> Copies:
    """A tied output layer may be stored again; the bias of an untied one has a second name that
    is not read."""

    def copies(config: ModelConfig) -> tuple[Copy, ...]:
        if config.output != "masked":
            return ()
        if not config.tied_head:
            return (Copy(f"{head}.bias", f"{head}.decoder.bias", written=True, checked=False),)
        weight = Copy(f"{head}.decoder.weight", embedding, unties=True)
        return weight, Copy(f"{head}.decoder.bias", f"{head}.bias")

    return copies


WITH_POOLER = ("BertForPreTraining", "BertForSequenceClassification", "BertModel")
BERT = Family(
    "bert",
    {
        "BertForPreTraining": {"head": "masked", "next_sentence": True},
        "BertForMaskedLM": {"head": "masked"},
        "BertForSequenceClassification": {"head": "classes"},
        "BertForTokenClassification": {"head": "tags"},
        "BertModel": {"head": "none"},
    },
    (
        *shared_fields(30522),
        fields.Key("max_position_embeddings", "max_length", 512),
        fields.Choice("hidden_act", "activation", fields.PLAIN, "gelu"),
        fields.Present("bert.pooler.dense.weight", "pooler", WITH_POOLER),
        fields.Present("cls.seq_relationship.weight", "next_sentence", ("BertForPreTraining",)),
    ),
    rows,
    prefix="bert.",
    copies=masked_copies("cls.predictions", "bert.embeddings.word_embeddings.weight"),
    ignored=BUFFERS,
    renamed=OLD_NORMS,
)
