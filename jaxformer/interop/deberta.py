"""DeBERTa-v3 (arXiv:2111.09543) and what v2 (arXiv:2006.03654) has in common with it: BERT whose
attention reads relative positions by the projections of queries and keys. The classes are those of
v2 in transformers."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.bert import BERT_SIZE_KEYS, masked_copies, named_in_class
from jaxformer.interop.family import Family
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.tensor_table import TensorRow, linear, norm, output

DEBERTA_SIZES: Mapping[str, int] = {
    "vocab_size": 128100,
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "intermediate_size": 6144,
}
POSITION_TERMS = ["p2c", "c2p"]  # the terms that positions add to the scores


class DisentangledPositions(KeyMapping):
    """relative_attention adds to the scores both products of a row of relative positions, whose
    queries and keys are of the matrices of the tokens, and divides the sum of the three by sqrt(3
    H). position_biased_input adds learned positions to the embeddings."""

    def read(self, hf: HFConfig) -> ConfigFields:
        length = hf.number("max_position_embeddings", 512)
        embedded = hf.flag("position_biased_input", True)
        terms = hf.get("pos_att_type") or []
        terms = [term.strip() for term in terms.split("|")] if isinstance(terms, str) else terms
        buckets, distance = hf.number("position_buckets", -1), self._distance(hf, length)
        self._refuse_other_widths(hf)
        if not hf.flag("relative_attention", False):
            if terms:
                raise hf.unsupported("pos_att_type", terms, [None])
            hf.only("norm_rel_ebd", ("none",))
            return {"max_length": length, "positions": "learned" if embedded else "none"}
        if sorted(terms) != sorted(POSITION_TERMS):
            raise hf.unsupported("pos_att_type", terms, [POSITION_TERMS])
        if not hf.flag("share_att_key", False):
            raise hf.unsupported("share_att_key", False, [True])
        if hf.get("norm_rel_ebd") != "layer_norm":
            raise hf.unsupported("norm_rel_ebd", hf.get("norm_rel_ebd"), ["layer_norm"])
        if not isinstance(buckets, int) or not 4 <= buckets < 2 * (distance - 1):
            raise hf.unsupported("position_buckets", buckets, [f"4 to {2 * distance - 3}"])
        width, heads = (hf.number(key, DEBERTA_SIZES[key]) for key in WIDTH_KEYS)
        return {
            "max_length": length,
            "positions": "disentangled",
            "position_embedding": "learned" if embedded else "auto",
            "relative_buckets": buckets,
            "relative_distance": distance,
            "attention_scale": (3 * (width // heads)) ** -0.5,
        }

    def _distance(self, hf: HFConfig, length: int | float) -> int:
        stated = hf.number("max_relative_positions", -1)
        return int(length if stated < 1 else stated)

    def _refuse_other_widths(self, hf: HFConfig) -> None:
        """ConfigError where heads or embeddings have another width than that of the model."""
        width, heads = (hf.number(key, DEBERTA_SIZES[key]) for key in WIDTH_KEYS)
        hf.only("attention_head_size", (width // heads,))
        for key in ("embedding_size", "pooler_hidden_size"):
            hf.only(key, (width,))

    def write(self, config: ModelConfig) -> Keys:
        keys: Keys = {
            "max_position_embeddings": config.max_length,
            "position_biased_input": config.embedded_positions == "learned",
            "relative_attention": config.positions == "disentangled",
        }
        if not keys["relative_attention"]:
            return keys
        return keys | {
            "pos_att_type": POSITION_TERMS,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_buckets": config.relative_buckets,
            "max_relative_positions": config.relative_distance,
        }


WIDTH_KEYS = ("hidden_size", "num_attention_heads")


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "deberta"
    layer = base + ".encoder.layer.{}."
    trunk = (
        TensorRow(f"{base}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{base}.embeddings.position_embeddings.weight", "embed.positions"),
        TensorRow(f"{base}.embeddings.token_type_embeddings.weight", "embed.types"),
        *norm(f"{base}.embeddings.LayerNorm", "embed.norm"),
        TensorRow(f"{base}.encoder.rel_embeddings.weight", "relative_embedding"),
        *norm(f"{base}.encoder.LayerNorm", "relative_norm"),
        *linear(layer + "attention.self.query_proj", "blocks.attention.q"),
        *linear(layer + "attention.self.key_proj", "blocks.attention.k"),
        *linear(layer + "attention.self.value_proj", "blocks.attention.v"),
        *linear(layer + "attention.output.dense", "blocks.attention.out"),
        *norm(layer + "attention.output.LayerNorm", "blocks.attention_norm"),
        *linear(layer + "intermediate.dense", "blocks.ffn.up"),
        *linear(layer + "output.dense", "blocks.ffn.down"),
        *norm(layer + "output.LayerNorm", "blocks.ffn_norm"),
    )
    masked = (
        *linear("cls.predictions.transform.dense", "head.dense"),
        *norm("cls.predictions.transform.LayerNorm", "head.norm"),
        TensorRow("cls.predictions.decoder.weight", "head.weight"),
        TensorRow(f"cls.predictions.{'' if config.tied_head else 'decoder.'}bias", "head.bias"),
    )
    classes = output("classifier", "head")
    heads = {
        "masked": masked,
        "classes": (*linear("pooler.dense", "pooler.dense"), *classes),
        "tags": classes,
    }
    return named_in_class(base, config, (*trunk, *heads.get(config.output, ())))


# The masked head of the published files, which the class reads only with legacy=False.
PUBLISHED_HEAD = (
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
    (r"^lm_predictions\.lm_head\.", "cls.predictions.transform."),
)
POOLER_ACTIVATIONS: Mapping[Any, Any] = {"gelu": "gelu", "tanh": "tanh", "relu": "relu"}
DEBERTA = Family(
    "deberta-v2",
    {
        "DebertaV2ForMaskedLM": {"head": "masked"},
        "DebertaV2ForSequenceClassification": {"head": "classes"},
        "DebertaV2ForTokenClassification": {"head": "tags"},
        "DebertaV2Model": {"head": "none"},
    },
    (
        fields.Constant(
            family="encoder", norm="layer", norm_placement="post", bias="all", embedding_norm=True
        ),
        *(fields.Key(hf, field, DEBERTA_SIZES[hf]) for hf, field, _ in BERT_SIZE_KEYS),
        fields.DivisibleHeads(),
        fields.Key("type_vocab_size", "token_types", 0),
        fields.Key("layer_norm_eps", "norm_eps", 1e-7),
        DisentangledPositions(),
        fields.FixedKey("conv_kernel_size", (0,)),
        fields.FixedKey("legacy", (True, False)),
        fields.Choice("hidden_act", "activation", fields.PLAIN, "gelu"),
        fields.Choice("pooler_hidden_act", "pooler_activation", POOLER_ACTIVATIONS, "gelu"),
        fields.tied(True),
        fields.ClassCount(),
        fields.Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        fields.IgnoredKeys("pooler_dropout cls_dropout conv_act conv_groups summary_type"),
    ),
    rows,
    prefix="deberta.",
    copies=masked_copies("cls.predictions", "deberta.embeddings.word_embeddings.weight"),
    ignored=(r"^mask_predictions\.", r"embeddings\.position_(ids|embeddings\.weight)$"),
    renamed=PUBLISHED_HEAD,
    covers="v3, and v2 without a convolution: disentangled attention with shared keys and log"
    " buckets; masked-LM, text- and token-classification heads; no head",
)
