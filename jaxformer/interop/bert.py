"""BERT (arXiv:1810.04805), and RoBERTa (arXiv:1907.11692): BERT without next sentences, whose
positions start after the id of the padding token."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Copies, Copy, Family
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
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


def bert_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
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
    bert_rows,
    prefix="bert.",
    copies=masked_copies("cls.predictions", "bert.embeddings.word_embeddings.weight"),
    ignored=BUFFERS,
    renamed=OLD_NORMS,
)


class OffsetPositions(KeyMapping):
    """The first token has position pad_token_id + 1 of a table of max_position_embeddings rows."""

    def read(self, hf: HFConfig) -> ConfigFields:
        padding = hf.number("pad_token_id", 1)
        table_rows = hf.number("max_position_embeddings", 512)
        if not isinstance(padding, int) or not 0 <= padding < table_rows - 1:
            allowed = ["an id below max_position_embeddings - 1"]
            raise hf.unsupported("pad_token_id", padding, allowed)
        return {"position_offset": padding + 1, "max_length": table_rows - padding - 1}

    def write(self, config: ModelConfig) -> Keys:
        table_rows = config.max_length + config.position_offset
        return {"pad_token_id": config.position_offset - 1, "max_position_embeddings": table_rows}


def roberta_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    masked = (
        *linear("lm_head.dense", "head.dense"),
        *norm("lm_head.layer_norm", "head.norm"),
        TensorRow("lm_head.decoder.weight", "head.weight"),
        TensorRow(f"lm_head.{'' if config.tied_head else 'decoder.'}bias", "head.bias"),
    )
    pooler = linear("roberta.pooler.dense", "pooler.dense")
    dense = linear("classifier.dense", "pooler.dense")
    heads = {
        "masked": (*pooler, *masked),
        "classes": (*dense, *output("classifier.out_proj", "head")),
        "tags": (*pooler, *output("classifier", "head")),
    }
    head = heads.get(config.output, pooler)
    return named_in_class("roberta", config, (*trunk("roberta"), *head))


ROBERTA = Family(
    "roberta",
    {
        "RobertaForMaskedLM": {"head": "masked"},
        "RobertaForSequenceClassification": {"head": "classes"},
        "RobertaForTokenClassification": {"head": "tags"},
        "RobertaModel": {"head": "none"},
    },
    (
        *shared_fields(50265),
        OffsetPositions(),
        # The masked head always has this one.
        fields.FixedKey("hidden_act", ("gelu",)),
        fields.Constant(activation="gelu"),
        fields.Present("roberta.pooler.dense.weight", "pooler", ("RobertaModel",)),
    ),
    roberta_rows,
    prefix="roberta.",
    copies=masked_copies("lm_head", "roberta.embeddings.word_embeddings.weight"),
    ignored=(*BUFFERS, r"^(roberta\.)?pooler\."),  # of the base; the class head has none
    renamed=OLD_NORMS,
)
