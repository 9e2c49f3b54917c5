"""BERT (arXiv:1810.04805), and RoBERTa (arXiv:1907.11692): BERT without next sentences, whose
positions start after the id of the padding token. DistilBERT (arXiv:1910.01108) has neither token
types nor a pooler beside its class head; XLM-RoBERTa (arXiv:1911.02116) is RoBERTa."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Copies, Copy, Family
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.tensor_table import TensorRow, linear, norm, output

ENCODER = fields.Constant(
    family="encoder",
    norm="layer",
    norm_placement="post",
    bias="all",
    embedding_norm=True,
    positions="learned",
)


# Key, field, and the default of BERT.
BERT_SIZE_KEYS = (
    ("vocab_size", "vocab_size", 30522),
    ("hidden_size", "d_model", 768),
    ("num_hidden_layers", "n_layers", 12),
    ("num_attention_heads", "n_heads", 12),
    ("intermediate_size", "d_ff", 3072),
)


def shared_fields(**default: int) -> tuple[KeyMapping, ...]:
    """The keys of all these families; `default` has a family's own defaults."""
    return (
        ENCODER,
        *(fields.Key(hf, field, default.get(hf, usual)) for hf, field, usual in BERT_SIZE_KEYS),
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
        *shared_fields(),
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
    covers="masked-LM, next-sentence, text- and token-classification heads; pooler; no head",
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


def roberta_like(model_type: str, name: str, vocab_size: int) -> Family:
    """A family with the tensors of RoBERTa; `name` begins the names of its classes."""
    return Family(
        model_type,
        {
            f"{name}ForMaskedLM": {"head": "masked"},
            f"{name}ForSequenceClassification": {"head": "classes"},
            f"{name}ForTokenClassification": {"head": "tags"},
            f"{name}Model": {"head": "none"},
        },
        (
            *shared_fields(vocab_size=vocab_size),
            OffsetPositions(),
            # The masked head always has this one.
            fields.FixedKey("hidden_act", ("gelu",)),
            fields.Constant(activation="gelu"),
            fields.Present("roberta.pooler.dense.weight", "pooler", (f"{name}Model",)),
        ),
        roberta_rows,
        prefix="roberta.",
        copies=masked_copies("lm_head", "roberta.embeddings.word_embeddings.weight"),
        ignored=(*BUFFERS, r"^(roberta\.)?pooler\."),  # of the base; the class head has none
        renamed=OLD_NORMS,
        covers="masked-LM, text- and token-classification heads; pooler; no head",
    )


ROBERTA = roberta_like("roberta", "Roberta", 50265)
XLM_ROBERTA = roberta_like("xlm-roberta", "XLMRoberta", 30522)


def distilbert_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "distilbert"
    layer = base + ".transformer.layer.{}."
    layers = (
        TensorRow(f"{base}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{base}.embeddings.position_embeddings.weight", "embed.positions"),
        *norm(f"{base}.embeddings.LayerNorm", "embed.norm"),
        *linear(layer + "attention.q_lin", "blocks.attention.q"),
        *linear(layer + "attention.k_lin", "blocks.attention.k"),
        *linear(layer + "attention.v_lin", "blocks.attention.v"),
        *linear(layer + "attention.out_lin", "blocks.attention.out"),
        *norm(layer + "sa_layer_norm", "blocks.attention_norm"),
        *linear(layer + "ffn.lin1", "blocks.ffn.up"),
        *linear(layer + "ffn.lin2", "blocks.ffn.down"),
        *norm(layer + "output_layer_norm", "blocks.ffn_norm"),
    )
    masked = (
        *linear("vocab_transform", "head.dense"),
        *norm("vocab_layer_norm", "head.norm"),
        *output("vocab_projector", "head"),
    )
    classes = output("classifier", "head")
    pooler = linear("pre_classifier", "pooler.dense")
    heads = {"masked": masked, "classes": (*pooler, *classes), "tags": classes}
    return named_in_class(base, config, (*layers, *heads.get(config.output, ())))


def masked_tied_copy(head: str, embedding: str) -> Copies:
    """A tied output layer of a masked head, which files may hold."""
    tied = (Copy(head, embedding, unties=True),)
    return lambda config: tied if config.output == "masked" and config.tied_head else ()


DISTILBERT = Family(
    "distilbert",
    {
        "DistilBertForMaskedLM": {"head": "masked"},
        "DistilBertForSequenceClassification": {"head": "classes"},
        "DistilBertForTokenClassification": {"head": "tags"},
        "DistilBertModel": {"head": "none"},
    },
    (
        ENCODER,
        fields.Constant(norm_eps=1e-12, pooler_activation="relu"),
        fields.Key("vocab_size", "vocab_size", 30522),
        fields.Key("dim", "d_model", 768),
        fields.Key("n_layers", "n_layers", 6),
        fields.Key("n_heads", "n_heads", 12),
        fields.Key("hidden_dim", "d_ff", 3072),
        fields.Key("max_position_embeddings", "max_length", 512),
        fields.Choice("activation", "activation", fields.PLAIN, "gelu"),
        fields.tied(True),
        fields.ClassCount(),
        fields.Dropout("dropout attention_dropout"),
        # The positions are stored, also where they began as sinusoids.
        fields.IgnoredKeys("sinusoidal_pos_embds qa_dropout seq_classif_dropout tie_weights_"),
    ),
    distilbert_rows,
    prefix="distilbert.",
    copies=masked_tied_copy(
        "vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"
    ),
    ignored=(r"embeddings\.position_ids$",),
    covers="masked-LM, text- and token-classification heads; no head",
)
