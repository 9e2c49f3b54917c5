"""ELECTRA (arXiv:2003.10555): BERT whose embeddings may be narrower than its layers. Its generator
has the masked head; its discriminator predicts of each token whether it was replaced, and is the
base of those for classes."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.bert import (
    BUFFERS,
    OLD_NORMS,
    masked_tied_copy,
    named_in_class,
    shared_fields,
    trunk,
)
from jaxformer.interop.family import Family
from jaxformer.interop.tensor_table import TensorRow, linear, norm, output


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    masked = (
        *linear("generator_predictions.dense", "head.dense"),
        *norm("generator_predictions.LayerNorm", "head.norm"),
        *output("generator_lm_head", "head"),
    )
    heads = {
        "masked": masked,
        "classes": (
            *linear("classifier.dense", "pooler.dense"),
            *output("classifier.out_proj", "head"),
        ),
        "tags": output("classifier", "head"),
    }
    discriminator = (
        *linear("discriminator_predictions.dense", "head.dense"),
        *output("discriminator_predictions.dense_prediction", "head"),
    )
    projection = linear("electra.embeddings_project", "embed.projection")
    is_discriminator = config.output == "tags" and config.class_head != "auto"
    head = discriminator if is_discriminator else heads.get(config.output, ())
    return named_in_class("electra", config, (*trunk("electra"), *projection, *head))


ELECTRA = Family(
    "electra",
    {
        "ElectraForMaskedLM": {"head": "masked"},
        "ElectraForPreTraining": {"head": "tags", "class_head": "dense", "n_classes": 1},
        "ElectraForSequenceClassification": {"head": "classes"},
        "ElectraForTokenClassification": {"head": "tags"},
        "ElectraModel": {"head": "none"},
    },
    (
        *shared_fields(hidden_size=256, num_attention_heads=4, intermediate_size=1024),
        fields.Key("embedding_size", "embedding_width", 128),
        fields.Key("max_position_embeddings", "max_length", 512),
        # Its heads always have this one.
        fields.FixedKey("hidden_act", ("gelu",)),
        fields.Constant(activation="gelu", pooler_activation="gelu"),
        fields.IgnoredKeys("summary_type summary_use_proj summary_activation summary_last_dropout"),
    ),
    rows,
    prefix="electra.",
    copies=masked_tied_copy(
        "generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"
    ),
    ignored=BUFFERS,
    renamed=OLD_NORMS,
    covers="an embedding of another width; masked-LM, text- and token-classification heads, and"
    " the discriminator's; no head",
)
