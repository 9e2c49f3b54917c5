"""ALBERT (arXiv:1909.11942): BERT with narrow embeddings, whose layers share their parameters in
groups; its second head predicts the order of two texts."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.bert import masked_copies, named_in_class, shared_fields
from jaxformer.interop.family import Family
from jaxformer.interop.fields import ConfigFields, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.tensor_table import TensorRow, linear, norm, output

ALBERT_SIZES = {
    "vocab_size": 30000,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
}


class NarrowEmbedding(fields.Key):
    """The width of the embeddings, which the matrix that projects them has to differ from: there it
    is also of a model with one width."""

    def read(self, hf: HFConfig) -> ConfigFields:
        width = hf.number(self.hf, self.default)
        if width == hf.number("hidden_size", ALBERT_SIZES["hidden_size"]):
            raise hf.unsupported(self.hf, width, ["a number that is not hidden_size"])
        return super().read(hf)


class LayerGroups(fields.Key):
    """The number of groups, which has to divide that of the layers."""

    def read(self, hf: HFConfig) -> ConfigFields:
        groups, layers = hf.number(self.hf, self.default), hf.number("num_hidden_layers", 12)
        if groups < 1 or layers % groups:
            raise hf.unsupported(self.hf, groups, [f"a divisor of num_hidden_layers={layers:g}"])
        return super().read(hf)

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: config.layer_groups or config.n_layers}


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "albert"
    group = f"{base}.encoder.albert_layer_groups.{{}}.albert_layers.0."
    trunk = (
        TensorRow(f"{base}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{base}.embeddings.position_embeddings.weight", "embed.positions"),
        TensorRow(f"{base}.embeddings.token_type_embeddings.weight", "embed.types"),
        *norm(f"{base}.embeddings.LayerNorm", "embed.norm"),
        *linear(f"{base}.encoder.embedding_hidden_mapping_in", "embed.projection"),
        *linear(group + "attention.query", "blocks.attention.q"),
        *linear(group + "attention.key", "blocks.attention.k"),
        *linear(group + "attention.value", "blocks.attention.v"),
        *linear(group + "attention.dense", "blocks.attention.out"),
        *norm(group + "attention.LayerNorm", "blocks.attention_norm"),
        *linear(group + "ffn", "blocks.ffn.up"),
        *linear(group + "ffn_output", "blocks.ffn.down"),
        *norm(group + "full_layer_layer_norm", "blocks.ffn_norm"),
        *linear(f"{base}.pooler", "pooler.dense"),
    )
    masked = (
        *linear("predictions.dense", "head.dense"),
        *norm("predictions.LayerNorm", "head.norm"),
        TensorRow("predictions.decoder.weight", "head.weight"),
        TensorRow(f"predictions.{'' if config.tied_head else 'decoder.'}bias", "head.bias"),
        *output("sop_classifier.classifier", "next_sentence"),
    )
    classes = output("classifier", "head")
    head = {"masked": masked, "classes": classes, "tags": classes}.get(config.output, ())
    return named_in_class(base, config, (*trunk, *head))


ALBERT_WITH_POOLER = ("AlbertForPreTraining", "AlbertForSequenceClassification", "AlbertModel")
ALBERT = Family(
    "albert",
    {
        "AlbertForPreTraining": {"head": "masked", "next_sentence": True},
        "AlbertForMaskedLM": {"head": "masked"},
        "AlbertForSequenceClassification": {"head": "classes"},
        "AlbertForTokenClassification": {"head": "tags"},
        "AlbertModel": {"head": "none"},
    },
    (
        *shared_fields(**ALBERT_SIZES),
        NarrowEmbedding("embedding_size", "embedding_width", 128),
        LayerGroups("num_hidden_groups", "layer_groups", 1),
        fields.FixedKey("inner_group_num", (1,)),
        fields.Key("max_position_embeddings", "max_length", 512),
        fields.Choice("hidden_act", "activation", fields.PLAIN, "gelu_new"),
        fields.Present("albert.pooler.weight", "pooler", ALBERT_WITH_POOLER),
        fields.Present(
            "sop_classifier.classifier.weight", "next_sentence", ("AlbertForPreTraining",)
        ),
        # Of dropout, and of versions that no code reads.
        fields.IgnoredKeys("classifier_dropout_prob down_scale_factor gap_size net_structure_type"),
        fields.IgnoredKeys("num_memory_blocks"),
    ),
    rows,
    prefix="albert.",
    copies=masked_copies("predictions", "albert.embeddings.word_embeddings.weight"),
    ignored=(r"embeddings\.(position_ids|token_type_ids)$",),
    covers="layers that share parameters in groups; masked-LM, sentence-order, text- and"
    " token-classification heads; pooler; no head",
)
