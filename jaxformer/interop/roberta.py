"""RoBERTa (arXiv:1907.11692): BERT without next sentences; positions start after the id of the
padding token."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop.bert import (
    BUFFERS,
    OLD_NORMS,
    masked_copies,
    named_in_class,
    shared_fields,
    trunk,
)
from jaxformer.interop.family import Family
from jaxformer.interop.fields import ConfigFields, Constant, FixedKey, KeyMapping, Keys, Present
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.tensor_table import TensorRow, linear, norm, output


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


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
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
        FixedKey("hidden_act", ("gelu",)),
        Constant(activation="gelu"),
        Present("roberta.pooler.dense.weight", "pooler", ("RobertaModel",)),
    ),
    rows,
    prefix="roberta.",
    copies=masked_copies("lm_head", "roberta.embeddings.word_embeddings.weight"),
    ignored=(*BUFFERS, r"^(roberta\.)?pooler\."),  # of the base; the class head has none
    renamed=OLD_NORMS,
)
