"""Encoders: BERT and its relatives, and the text encoder of CLIP."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config.model import ModelConfig
from jaxformer.interop.family import Copy, Family
from jaxformer.interop.fields import (
    GATED_NAMES,
    PLAIN,
    SIZES,
    Choice,
    ClassCount,
    ConfigFields,
    Constant,
    DivisibleHeads,
    Dropout,
    FixedKey,
    IgnoredKeys,
    Key,
    KeyMapping,
    KeyRule,
    Keys,
    Present,
    Windows,
    fixed,
    keys,
    tied,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.rope import Length, RopeKeys
from jaxformer.interop.tensor_table import TensorRow, block, linear, norm, output, projections

# What the families have in common. Rows of a later mapping override it.
ENCODER = Constant(
    {
        "family": "encoder",
        "norm": "layer",
        "norm_placement": "post",
        "bias": "all",
        "embedding.norm": True,
        "positions": "learned",
    }
)

# Names of TensorFlow in the first published checkpoints.
OLD_NORMS = ((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias"))
# Indices that older versions saved beside the weights.
BUFFERS = (r"embeddings\.(position_ids|token_type_ids)$",)
Heads = Mapping[str, tuple[TensorRow, ...]]  # the rows of each head, by `config.output`
DENSE_TAGS = "dense tags"  # and of tags with a layer before the output


class MaskedHead(NamedTuple):
    """The names of a masked head: its layer, its norm and its output layer.

    Where there is `bias`, that of the output layer has two places: a tied one is read from `bias`,
    and another from its own.
    """

    dense: str
    norm: str
    decoder: str
    bias: str = ""

    def rows(self, config: ModelConfig) -> tuple[TensorRow, ...]:
        bias = f"{self.decoder}.bias"
        if self.bias and config.tied_head:
            bias = self.bias
        return (
            *linear(self.dense, "head.dense"),
            *norm(self.norm, "head.norm"),
            TensorRow(f"{self.decoder}.weight", "head.weight"),
            TensorRow(bias, "head.bias"),
        )

    def copies(self, config: ModelConfig, embedding: str) -> tuple[Copy, ...]:
        """Return what files may hold twice: a tied output layer, and the bias of an untied one,
        whose second name is not read."""
        if config.output != "masked":
            return ()
        biases: tuple[Copy, ...] = ()
        if self.bias and config.tied_head:
            biases = (Copy(f"{self.decoder}.bias", self.bias),)
        elif self.bias:
            biases = (Copy(self.bias, f"{self.decoder}.bias", written=True, checked=False),)
        if config.tied_head:
            return Copy(f"{self.decoder}.weight", embedding, unties=True), *biases
        return biases


CLASSIFIER: Heads = dict.fromkeys(("classes", "tags"), output("classifier", "head"))
# The head of classes where it is two layers.
CLASS_LAYERS = (*linear("classifier.dense", "pooler.dense"), *output("classifier.out_proj", "head"))


def classes_of(name: str) -> dict[str, ConfigFields]:
    """Return the classes that all these families have; `name` begins their names."""
    return {
        f"{name}ForMaskedLM": {"head.kind": "masked"},
        f"{name}ForSequenceClassification": {"head.kind": "classes"},
        f"{name}ForTokenClassification": {"head.kind": "tags"},
        f"{name}Model": {"head.kind": "none"},
    }


def encoder_like(
    model_type: str,
    architectures: Mapping[str, ConfigFields],
    base: str,
    mappings: Sequence[KeyMapping],
    trunk: tuple[TensorRow, ...],
    masked: MaskedHead,
    heads: Heads = CLASSIFIER,
    dropout: str = "hidden_dropout_prob attention_probs_dropout_prob",
    **others: Any,
) -> Family:
    """Return a family of encoders whose names begin with `base` where there is a head. The first
    row of `trunk` is the table of tokens. `heads` are the rows beside those of `masked`, `dropout`
    the keys of rates, and `others` fields of `Family`."""

    def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
        head = config.output
        if head == "masked":
            return *trunk, *heads.get(head, ()), *masked.rows(config)
        if head == "tags" and config.head.class_layers == "dense":
            head = DENSE_TAGS
        return *trunk, *heads.get(head, ())

    return Family(
        model_type,
        architectures,
        (ENCODER, *mappings, tied(True), ClassCount(), Dropout(dropout)),
        rows,
        prefix=f"{base}.",
        copies=lambda config: masked.copies(config, trunk[0].hf),
        **others,
    )


BERT_SIZES = (
    *keys(SIZES, type_vocab_size=2, layer_norm_eps=1e-12),
    *fixed(position_embedding_type="absolute"),
)
BERT_LENGTH = keys("max_position_embeddings")


def embeddings(base: str) -> tuple[TensorRow, ...]:
    """Return the tables below `base` and their norm."""
    return (
        TensorRow(f"{base}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{base}.embeddings.position_embeddings.weight", "embed.positions"),
        TensorRow(f"{base}.embeddings.token_type_embeddings.weight", "embed.types"),
        *norm(f"{base}.embeddings.LayerNorm", "embed.norm"),
    )


BERT_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "ffn_norm": "output.LayerNorm",
}


def bert_trunk(base: str, **names: str) -> tuple[TensorRow, ...]:
    """Return the embeddings and layers below `base`, with the `names` that are not BERT's."""
    layer = base + ".encoder.layer.{}."
    return *embeddings(base), *block(layer, **{**BERT_LAYER, **names})


# DistilBERT (arXiv:1910.01108) is BERT without token types and without a pooler beside its class
# head. It is before BERT, so that a model of both is written as the plainer one.
DISTILBERT = encoder_like(
    "distilbert",
    classes_of("DistilBert"),
    "distilbert",
    (
        Constant({"norm_eps": 1e-12, "head.pooler_activation": "relu"}),
        *keys("vocab_size dim n_layers n_heads hidden_dim max_position_embeddings"),
        Choice("activation", "activation", PLAIN, "gelu"),
        # The positions are stored, also where they began as sinusoids.
        IgnoredKeys("sinusoidal_pos_embds tie_weights_"),
    ),
    (
        *embeddings("distilbert"),
        *block(
            "distilbert.transformer.layer.{}.",
            q="attention.q_lin",
            k="attention.k_lin",
            v="attention.v_lin",
            out="attention.out_lin",
            attention_norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            ffn_norm="output_layer_norm",
        ),
        *linear("pre_classifier", "pooler.dense"),
    ),
    MaskedHead("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    dropout="dropout attention_dropout",
    ignored=(r"embeddings\.position_ids$",),
)

# BERT (arXiv:1810.04805).
BERT_MASKED = MaskedHead(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
# The classes that have a pooler, for a config.json whose weights are not there.
WITH_POOLER = ("BertForPreTraining", "BertForSequenceClassification", "BertModel")
BERT = encoder_like(
    "bert",
    {
        "BertForPreTraining": {"head.kind": "masked", "head.next_sentence": True},
        **classes_of("Bert"),
    },
    "bert",
    (
        *BERT_SIZES,
        *BERT_LENGTH,
        Choice("hidden_act", "activation", PLAIN, "gelu"),
        Present("bert.pooler.dense.weight", "head.pooler", WITH_POOLER),
        Present("cls.seq_relationship.weight", "head.next_sentence", ("BertForPreTraining",)),
    ),
    (*bert_trunk("bert"), *linear("bert.pooler.dense", "pooler.dense")),
    BERT_MASKED,
    {**CLASSIFIER, "masked": output("cls.seq_relationship", "next_sentence")},
    ignored=BUFFERS,
    renamed=OLD_NORMS,
)


# RoBERTa (arXiv:1907.11692): BERT without next sentences, whose positions start after the id of
# the padding token. XLM-RoBERTa (arXiv:1911.02116) is the same with another vocabulary.


def read_offset_positions(hf: HFConfig) -> ConfigFields:
    padding = hf.whole("pad_token_id", 1, least=0)
    table_rows = hf.number("max_position_embeddings", 512)
    if padding >= table_rows - 1:
        allowed = ["an id below max_position_embeddings - 1"]
        raise hf.unsupported("pad_token_id", padding, allowed)
    return {"embedding.position_offset": padding + 1, "max_length": table_rows - padding - 1}


# The first token has position pad_token_id + 1 of a table of max_position_embeddings rows.
OFFSET_POSITIONS = KeyRule(
    read_offset_positions,
    lambda config: {
        "pad_token_id": config.embedding.position_offset - 1,
        "max_position_embeddings": config.max_length + config.embedding.position_offset,
    },
)

# The heads of RoBERTa always have this activation.
ALWAYS_GELU = (*fixed(hidden_act="gelu"), Constant({"activation": "gelu"}))
ROBERTA_MASKED = MaskedHead(
    "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias"
)


def roberta_heads(base: str) -> Heads:
    """Return the rows of the heads: that of classes has a layer of its own; with any other, files
    may have a pooler."""
    pooler = linear(f"{base}.pooler.dense", "pooler.dense")
    return {
        "masked": pooler,
        "classes": CLASS_LAYERS,
        "tags": (*pooler, *output("classifier", "head")),
        "none": pooler,
    }


def roberta_like(model_type: str, name: str) -> Family:
    """Return a family with the tensors of RoBERTa; `name` begins the names of its classes."""
    return encoder_like(
        model_type,
        classes_of(name),
        "roberta",
        (
            *BERT_SIZES,
            OFFSET_POSITIONS,
            *ALWAYS_GELU,
            Present("roberta.pooler.dense.weight", "head.pooler", (f"{name}Model",)),
        ),
        bert_trunk("roberta"),
        ROBERTA_MASKED,
        roberta_heads("roberta"),
        ignored=(*BUFFERS, r"^(roberta\.)?pooler\."),  # of the base; the class head has none
        renamed=OLD_NORMS,
    )


ROBERTA = roberta_like("roberta", "Roberta")
XLM_ROBERTA = roberta_like("xlm-roberta", "XLMRoberta")


# ELECTRA (arXiv:2003.10555): BERT whose embeddings may be narrower than its layers. Its generator
# has the masked head; its discriminator predicts of each token whether it was replaced, and is
# the base of those for classes. It is defined before ALBERT, of which it is the case without
# shared layers.
ELECTRA = encoder_like(
    "electra",
    {
        **classes_of("Electra"),
        "ElectraForPreTraining": {
            "head.kind": "tags",
            "head.class_layers": "dense",
            "head.n_classes": 1,
        },
    },
    "electra",
    (
        *BERT_SIZES,
        *BERT_LENGTH,
        Key("embedding_size", "embedding.width", 128),
        *ALWAYS_GELU,
        Constant({"head.pooler_activation": "gelu"}),
    ),
    (*bert_trunk("electra"), *linear("electra.embeddings_project", "embed.projection")),
    MaskedHead(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
    ),
    {
        "classes": CLASS_LAYERS,
        "tags": output("classifier", "head"),
        DENSE_TAGS: (
            *linear("discriminator_predictions.dense", "head.dense"),
            *output("discriminator_predictions.dense_prediction", "head"),
        ),
    },
    ignored=BUFFERS,
    renamed=OLD_NORMS,
)


# ALBERT (arXiv:1909.11942): BERT with narrow embeddings, whose layers share their parameters in
# groups; its second head predicts the order of two texts.


class NarrowEmbedding(Key):
    """The width of the embeddings, which the matrix that projects them has to differ from: there it
    is also of a model with one width."""

    def read(self, hf: HFConfig) -> ConfigFields:
        width = hf.number(self.hf, self.default)
        if width == hf.number("hidden_size"):
            raise hf.unsupported(self.hf, width, ["a number that is not hidden_size"])
        return super().read(hf)


class LayerGroups(Key):
    """The number of groups, which has to divide that of the layers."""

    def read(self, hf: HFConfig) -> ConfigFields:
        groups = hf.whole(self.hf, self.default)
        layers = hf.number("num_hidden_layers")
        if layers % groups:
            raise hf.unsupported(self.hf, groups, [f"a divisor of num_hidden_layers={layers:g}"])
        return super().read(hf)

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: config.layer_groups or config.n_layers}


ALBERT_WITH_POOLER = ("AlbertForPreTraining", "AlbertForSequenceClassification", "AlbertModel")
ALBERT = encoder_like(
    "albert",
    {
        "AlbertForPreTraining": {"head.kind": "masked", "head.next_sentence": True},
        **classes_of("Albert"),
    },
    "albert",
    (
        *BERT_SIZES,
        *BERT_LENGTH,
        NarrowEmbedding("embedding_size", "embedding.width", 128),
        LayerGroups("num_hidden_groups", "layer_groups", 1),
        *fixed(inner_group_num=1),
        Choice("hidden_act", "activation", PLAIN, "gelu_new"),
        Present("albert.pooler.weight", "head.pooler", ALBERT_WITH_POOLER),
        Present(
            "sop_classifier.classifier.weight", "head.next_sentence", ("AlbertForPreTraining",)
        ),
        # Of versions that no code reads.
        IgnoredKeys("down_scale_factor gap_size net_structure_type num_memory_blocks"),
    ),
    (
        *embeddings("albert"),
        *linear("albert.encoder.embedding_hidden_mapping_in", "embed.projection"),
        *block(
            "albert.encoder.albert_layer_groups.{}.albert_layers.0.",
            q="attention.query",
            k="attention.key",
            v="attention.value",
            out="attention.dense",
            attention_norm="attention.LayerNorm",
            up="ffn",
            down="ffn_output",
            ffn_norm="full_layer_layer_norm",
        ),
        *linear("albert.pooler", "pooler.dense"),
    ),
    MaskedHead(
        "predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias"
    ),
    {**CLASSIFIER, "masked": output("sop_classifier.classifier", "next_sentence")},
    ignored=BUFFERS,
)

# MPNet (arXiv:2004.09297): RoBERTa with T5's relative positions in all layers, beside the learned
# ones. Its 32 buckets and the offset of its positions are in the code, not in the config.
MPNET = encoder_like(
    "mpnet",
    classes_of("MPNet"),
    "mpnet",
    (
        Constant(
            {
                "positions": "t5",
                "embedding.positions": "learned",
                "relative.buckets": 32,
                "relative.distance": 128,
            }
        ),
        *keys(SIZES, layer_norm_eps=1e-12),
        *fixed(relative_attention_num_buckets=32, pad_token_id=1),
        OFFSET_POSITIONS,
        *ALWAYS_GELU,
        Present("mpnet.pooler.dense.weight", "head.pooler", ("MPNetModel",)),
    ),
    (
        *bert_trunk(
            "mpnet",
            q="attention.attn.q",
            k="attention.attn.k",
            v="attention.attn.v",
            out="attention.attn.o",
            attention_norm="attention.LayerNorm",
        ),
        TensorRow("mpnet.encoder.relative_attention_bias.weight", "relative_bias"),
    ),
    ROBERTA_MASKED,
    roberta_heads("mpnet"),
    ignored=(r"embeddings\.position_ids$", r"^(mpnet\.)?pooler\."),  # as of RoBERTa
    renamed=OLD_NORMS,
)


# NomicBERT (arXiv:2402.01613): BERT with RoPE in place of learned positions, a gated
# feed-forward, and no biases but those of the norms and heads. Files have other names than the
# classes of transformers, which peft adapts.

NOMIC_BERT = encoder_like(
    "nomic_bert",
    classes_of("NomicBert"),
    "nomic_bert",
    (
        Constant({"bias": "norm"}),
        *keys(SIZES, head_dim=None, type_vocab_size=2, layer_norm_eps=1e-12),
        Choice("hidden_act", "activation", GATED_NAMES, "silu"),
        Length(2048),
        RopeKeys(theta=("rope_theta", 1000.0)),
        Present(
            "nomic_bert.pooler.dense.weight", "head.pooler", ("NomicBertForSequenceClassification",)
        ),
        IgnoredKeys("default_theta"),
    ),
    (
        TensorRow("nomic_bert.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow("nomic_bert.embeddings.token_type_embeddings.weight", "embed.types"),
        *norm("nomic_bert.emb_ln", "embed.norm"),
        *block(
            "nomic_bert.encoder.layers.{}.",
            qkv="attn.Wqkv",
            out="attn.out_proj",
            attention_norm="norm1",
            gate="mlp.fc12",
            up="mlp.fc11",
            down="mlp.fc2",
            ffn_norm="norm2",
        ),
        *linear("nomic_bert.pooler.dense", "pooler.dense"),
    ),
    BERT_MASKED._replace(norm="cls.predictions.transform.layer_norm"),
    module_rows=(
        *norm("nomic_bert.embeddings.LayerNorm", "embed.norm"),
        *projections("nomic_bert.layers.{}.self_attn", "o_proj"),
        *block(
            "nomic_bert.layers.{}.",
            attention_norm="post_attention_layernorm",
            gate="mlp.gate_proj",
            up="mlp.up_proj",
            down="mlp.down_proj",
            ffn_norm="post_mlp_layernorm",
        ),
    ),
    required_ids={"pad_token_id": 0},
)


# ModernBERT (arXiv:2412.13663): an encoder with RoPE, of which every third layer sees the whole
# sequence and the others a window with another base; its first layer has no norm before
# attention.


class LocalWindows(Windows):
    """Windows of local_attention tokens, half of them on each side, beside the token itself: in the
    sliding layers of layer_types, or without that key in all but every third one."""

    def window(self, hf: HFConfig) -> int:
        return int(hf.number("local_attention", 128)) // 2 + 1

    def usual_full_layers(self, hf: HFConfig, layers: int) -> list[bool]:
        every = hf.whole("global_attn_every_n_layers", 3)
        return [i % every == 0 for i in range(layers)]

    def write(self, config: ModelConfig) -> Keys:
        width = 2 * max(config.window - 1, 0)
        return {"layer_types": super().write(config)["layer_types"], "local_attention": width}


MODERNBERT = encoder_like(
    "modernbert",
    classes_of("ModernBert"),
    "model",
    (
        Constant(
            {
                "norm_placement": "pre",
                "bias": "none",
                "unnormed_layers": 1,
                "activation": "geglu",
                "head.dense_bias": False,
                "head.class_layers": "dense_norm",
                "head.pooler_activation": "gelu",
            }
        ),
        DivisibleHeads(),
        *keys(f"{SIZES} norm_eps"),
        Length(8192),
        RopeKeys(
            theta=("global_rope_theta", 160_000.0),
            local=("local_rope_theta", 10_000.0),
            kinds=("default",),
        ),
        LocalWindows(),
        *(FixedKey(f"{name}_activation", ("gelu",)) for name in ("hidden", "classifier")),
        *(FixedKey(f"{name}_bias", (False,)) for name in ("norm", "attention", "mlp")),
        *fixed(classifier_bias=False, decoder_bias=True),
        Choice("classifier_pooling", "head.pooling", {"cls": "first", "mean": "mean"}, "cls"),
        # Of training, of kernels, and two that are read by no layer.
        IgnoredKeys(
            "sparse_prediction sparse_pred_ignore_index initializer_cutoff_factor"
            " deterministic_flash_attn reference_compile repad_logits_with_grad layer_norm_eps"
            " position_embedding_type cls_token_id"
        ),
    ),
    (
        TensorRow("model.embeddings.tok_embeddings.weight", "embed.tokens"),
        *norm("model.embeddings.norm", "embed.norm"),
        *block(
            "model.layers.{}.",
            attention_norm="attn_norm",
            qkv="attn.Wqkv",
            out="attn.Wo",
            ffn_norm="mlp_norm",
            gate_up="mlp.Wi",
            down="mlp.Wo",
        ),
        *norm("model.final_norm", "final_norm"),
    ),
    MaskedHead("head.dense", "head.norm", "decoder"),
    {
        "classes": (
            *linear("head.dense", "pooler.dense"),
            *norm("head.norm", "pooler.norm"),
            *output("classifier", "head"),
        ),
        "tags": (
            *linear("head.dense", "head.dense"),
            *norm("head.norm", "head.norm"),
            *output("classifier", "head"),
        ),
    },
    dropout="attention_dropout embedding_dropout mlp_dropout",
)


# DeBERTa-v3 (arXiv:2111.09543) and what v2 (arXiv:2006.03654) has in common with it: BERT whose
# attention reads relative positions by the projections of queries and keys. The classes are those
# of v2 in transformers.

POSITION_TERMS = ["p2c", "c2p"]  # the terms that positions add to the scores


def read_disentangled_positions(hf: HFConfig) -> ConfigFields:
    """Return the fields of positions.

    relative_attention adds to the scores both products of a row of relative positions, whose
    queries and keys are of the matrices of the tokens, and divides the sum of the three by sqrt(3
    H). position_biased_input adds learned positions to the embeddings.
    """
    length = hf.number("max_position_embeddings", 512)
    embedded = hf.flag("position_biased_input", True)
    terms = hf.get("pos_att_type") or []
    if isinstance(terms, str):
        terms = [term.strip() for term in terms.split("|")]
    buckets = hf.number("position_buckets", -1)
    distance = hf.number("max_relative_positions", -1)
    if distance < 1:
        distance = length
    width = hf.number("hidden_size")
    head_width = width // hf.positive("num_attention_heads")
    hf.only("attention_head_size", (head_width,))
    hf.only("embedding_size", (width,))
    hf.only("pooler_hidden_size", (width,))
    if not hf.flag("relative_attention", False):
        if terms:
            raise hf.unsupported("pos_att_type", terms, [None])
        hf.only("norm_rel_ebd", ("none",))
        return {"max_length": length, "positions": "learned" if embedded else "none"}
    if sorted(terms) != sorted(POSITION_TERMS):
        raise hf.unsupported("pos_att_type", terms, [POSITION_TERMS])
    for key, value in (("share_att_key", True), ("norm_rel_ebd", "layer_norm")):
        if hf.get(key) != value:
            raise hf.unsupported(key, hf.get(key), [value])
    if not isinstance(buckets, int) or not 4 <= buckets < 2 * (distance - 1):
        raise hf.unsupported("position_buckets", buckets, [f"4 to {2 * distance - 3}"])
    return {
        "max_length": length,
        "positions": "disentangled",
        "embedding.positions": "learned" if embedded else "auto",
        "relative.buckets": buckets,
        "relative.distance": int(distance),
        "attention.scale": (3 * head_width) ** -0.5,
    }


def written_disentangled_positions(config: ModelConfig) -> Keys:
    keys: Keys = {
        "max_position_embeddings": config.max_length,
        "position_biased_input": config.embedded_positions == "learned",
        "relative_attention": config.positions == "disentangled",
    }
    if keys["relative_attention"]:
        keys |= {
            "pos_att_type": POSITION_TERMS,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_buckets": config.relative.buckets,
            "max_relative_positions": config.relative.distance,
        }
    return keys


# The masked head of the published files, which the class reads only with legacy=False.
PUBLISHED_HEAD = (
    (r"^lm_predictions\.lm_head\.bias$", "cls.predictions.bias"),
    (r"^lm_predictions\.lm_head\.", "cls.predictions.transform."),
)
# Other names are refused: the pooler has one of three here.
POOLER_ACTIVATIONS: Mapping[Any, Any] = {"gelu": "gelu", "tanh": "tanh", "relu": "relu"}
DEBERTA = encoder_like(
    "deberta-v2",
    classes_of("DebertaV2"),
    "deberta",
    (
        *keys(SIZES, type_vocab_size=0, layer_norm_eps=1e-7),
        DivisibleHeads(),
        KeyRule(read_disentangled_positions, written_disentangled_positions),
        *fixed(conv_kernel_size=0),
        FixedKey("legacy", (True, False)),
        Choice("hidden_act", "activation", PLAIN, "gelu"),
        Choice("pooler_hidden_act", "head.pooler_activation", POOLER_ACTIVATIONS, "gelu"),
        IgnoredKeys("conv_act conv_groups"),
    ),
    (
        *bert_trunk(
            "deberta",
            q="attention.self.query_proj",
            k="attention.self.key_proj",
            v="attention.self.value_proj",
        ),
        TensorRow("deberta.encoder.rel_embeddings.weight", "relative_embedding"),
        *norm("deberta.encoder.LayerNorm", "relative_norm"),
        *linear("pooler.dense", "pooler.dense"),
    ),
    BERT_MASKED,
    ignored=(r"^mask_predictions\.", r"embeddings\.position_(ids|embeddings\.weight)$"),
    renamed=PUBLISHED_HEAD,
)


# The text encoder of CLIP (arXiv:2103.00020): a decoder without an output layer, and with the
# projection of the last token of a text, which is its EOS.


class ProjectionWidth(Key):
    """The width of the vector of a text, which a model without the projection states too."""

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: config.head.width or config.d_model}


CLIP_ROWS = (
    TensorRow("text_model.embeddings.token_embedding.weight", "embed.tokens"),
    TensorRow("text_model.embeddings.position_embedding.weight", "embed.positions"),
    *projections("text_model.encoder.layers.{}.self_attn", "out_proj"),
    *block(
        "text_model.encoder.layers.{}.",
        attention_norm="layer_norm1",
        ffn_norm="layer_norm2",
        up="mlp.fc1",
        down="mlp.fc2",
    ),
    *norm("text_model.final_layer_norm", "final_norm"),
    TensorRow("text_projection.weight", "head.weight"),
)
CLIP_TEXT = Family(
    "clip_text_model",
    {
        "CLIPTextModelWithProjection": {"head.kind": "projection"},
        "CLIPTextModel": {"head.kind": "none"},
    },
    (
        Constant({"norm": "layer", "bias": "all", "positions": "learned", "head.pooling": "last"}),
        DivisibleHeads(),
        *keys(f"{SIZES} max_position_embeddings layer_norm_eps"),
        ProjectionWidth("projection_dim", "head.width", 512),
        Choice("hidden_act", "activation", PLAIN, "quick_gelu"),
        Dropout("attention_dropout"),
    ),
    lambda config: CLIP_ROWS,
    copies=lambda config: (),
    prefix="text_model.",
    ignored=(r"embeddings\.position_ids$",),
)
