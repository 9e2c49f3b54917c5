"""Encoders: BERT and its relatives, and the text encoder of CLIP."""

from collections.abc import Mapping
from typing import Any

from jaxformer.config.model import ModelConfig
from jaxformer.interop.family import Copies, Copy, Family
from jaxformer.interop.fields import (
    FULL,
    GATED_NAMES,
    MOST_LAYERS,
    PLAIN,
    SLIDING,
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
    Keys,
    Present,
    fixed,
    keys,
    tied,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import TensorRow, block, linear, norm, output, projections
from jaxformer.layers.pattern import layer_configs

# BERT (arXiv:1810.04805), and RoBERTa (arXiv:1907.11692): BERT without next sentences, whose
# positions start after the id of the padding token. DistilBERT (arXiv:1910.01108) has neither
# token types nor a pooler beside its class head; XLM-RoBERTa (arXiv:1911.02116) is RoBERTa.

ENCODER = Constant(
    family="encoder",
    norm="layer",
    norm_placement="post",
    bias="all",
    embedding_norm=True,
    positions="learned",
)


# The defaults of BERT.
BERT_SIZES: Mapping[str, int] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}


def shared_fields(**default: int) -> tuple[KeyMapping, ...]:
    """The keys of all these families; `default` has a family's own defaults."""
    return (
        ENCODER,
        *keys(**{**BERT_SIZES, **default}),
        *keys(type_vocab_size=2, layer_norm_eps=1e-12),
        *fixed(position_embedding_type="absolute"),
        tied(True),
        ClassCount(),
        Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        IgnoredKeys("classifier_dropout gradient_checkpointing"),
    )


def classes_of(name: str) -> dict[str, ConfigFields]:
    """The classes that all these families have; `name` begins their names."""
    return {
        f"{name}ForMaskedLM": {"head": "masked"},
        f"{name}ForSequenceClassification": {"head": "classes"},
        f"{name}ForTokenClassification": {"head": "tags"},
        f"{name}Model": {"head": "none"},
    }


def embeddings(base: str) -> tuple[TensorRow, ...]:
    """The tables below `base` and their norm."""
    return (
        TensorRow(f"{base}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{base}.embeddings.position_embeddings.weight", "embed.positions"),
        TensorRow(f"{base}.embeddings.token_type_embeddings.weight", "embed.types"),
        *norm(f"{base}.embeddings.LayerNorm", "embed.norm"),
    )


def masked_head(
    config: ModelConfig, base: str, dense: str, norm_name: str
) -> tuple[TensorRow, ...]:
    """The layer and the norm below `base` before the output layer, whose bias has two places."""
    return (
        *linear(f"{base}.{dense}", "head.dense"),
        *norm(f"{base}.{norm_name}", "head.norm"),
        TensorRow(f"{base}.decoder.weight", "head.weight"),
        TensorRow(f"{base}.{'' if config.tied_head else 'decoder.'}bias", "head.bias"),
    )


def trunk(base: str) -> tuple[TensorRow, ...]:
    """All but the heads; `base` is the prefix of the names."""
    layer = base + ".encoder.layer.{}."
    return (
        *embeddings(base),
        *block(
            layer,
            q="attention.self.query",
            k="attention.self.key",
            v="attention.self.value",
            out="attention.output.dense",
            attention_norm="attention.output.LayerNorm",
            up="intermediate.dense",
            down="output.dense",
            ffn_norm="output.LayerNorm",
        ),
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
        *masked_head(config, "cls.predictions", "transform.dense", "transform.LayerNorm"),
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
    {"BertForPreTraining": {"head": "masked", "next_sentence": True}, **classes_of("Bert")},
    (
        *shared_fields(),
        *keys(max_position_embeddings=512),
        Choice("hidden_act", "activation", PLAIN, "gelu"),
        Present("bert.pooler.dense.weight", "pooler", WITH_POOLER),
        Present("cls.seq_relationship.weight", "next_sentence", ("BertForPreTraining",)),
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


def roberta_heads(config: ModelConfig, base: str) -> tuple[TensorRow, ...]:
    pooler = linear(f"{base}.pooler.dense", "pooler.dense")
    if config.output == "masked":
        return *pooler, *masked_head(config, "lm_head", "dense", "layer_norm")
    if config.output == "classes":
        dense = linear("classifier.dense", "pooler.dense")
        return *dense, *output("classifier.out_proj", "head")
    return (*pooler, *output("classifier", "head")) if config.output == "tags" else pooler


def roberta_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    tensor_rows = (*trunk("roberta"), *roberta_heads(config, "roberta"))
    return named_in_class("roberta", config, tensor_rows)


def roberta_like(model_type: str, name: str, vocab_size: int) -> Family:
    """A family with the tensors of RoBERTa; `name` begins the names of its classes."""
    return Family(
        model_type,
        classes_of(name),
        (
            *shared_fields(vocab_size=vocab_size),
            OffsetPositions(),
            # The masked head always has this one.
            *fixed(hidden_act="gelu"),
            Constant(activation="gelu"),
            Present("roberta.pooler.dense.weight", "pooler", (f"{name}Model",)),
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
        *embeddings(base),
        *block(
            layer,
            q="attention.q_lin",
            k="attention.k_lin",
            v="attention.v_lin",
            out="attention.out_lin",
            attention_norm="sa_layer_norm",
            up="ffn.lin1",
            down="ffn.lin2",
            ffn_norm="output_layer_norm",
        ),
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
    classes_of("DistilBert"),
    (
        ENCODER,
        Constant(norm_eps=1e-12, pooler_activation="relu"),
        *keys(
            vocab_size=30522,
            dim=768,
            n_layers=6,
            n_heads=12,
            hidden_dim=3072,
            max_position_embeddings=512,
        ),
        Choice("activation", "activation", PLAIN, "gelu"),
        tied(True),
        ClassCount(),
        Dropout("dropout attention_dropout"),
        # The positions are stored, also where they began as sinusoids.
        IgnoredKeys("sinusoidal_pos_embds qa_dropout seq_classif_dropout tie_weights_"),
    ),
    distilbert_rows,
    prefix="distilbert.",
    copies=masked_tied_copy(
        "vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"
    ),
    ignored=(r"embeddings\.position_ids$",),
    covers="masked-LM, text- and token-classification heads; no head",
)


# ALBERT (arXiv:1909.11942): BERT with narrow embeddings, whose layers share their parameters in
# groups; its second head predicts the order of two texts.

ALBERT_SIZES = {
    "vocab_size": 30000,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16384,
}


class NarrowEmbedding(Key):
    """The width of the embeddings, which the matrix that projects them has to differ from: there it
    is also of a model with one width."""

    def read(self, hf: HFConfig) -> ConfigFields:
        width = hf.number(self.hf, self.default)
        if width == hf.number("hidden_size", ALBERT_SIZES["hidden_size"]):
            raise hf.unsupported(self.hf, width, ["a number that is not hidden_size"])
        return super().read(hf)


class LayerGroups(Key):
    """The number of groups, which has to divide that of the layers."""

    def read(self, hf: HFConfig) -> ConfigFields:
        groups, layers = hf.number(self.hf, self.default), hf.number("num_hidden_layers", 12)
        if groups < 1 or layers % groups:
            raise hf.unsupported(self.hf, groups, [f"a divisor of num_hidden_layers={layers:g}"])
        return super().read(hf)

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: config.layer_groups or config.n_layers}


def albert_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "albert"
    group = f"{base}.encoder.albert_layer_groups.{{}}.albert_layers.0."
    trunk = (
        *embeddings(base),
        *linear(f"{base}.encoder.embedding_hidden_mapping_in", "embed.projection"),
        *block(
            group,
            q="attention.query",
            k="attention.key",
            v="attention.value",
            out="attention.dense",
            attention_norm="attention.LayerNorm",
            up="ffn",
            down="ffn_output",
            ffn_norm="full_layer_layer_norm",
        ),
        *linear(f"{base}.pooler", "pooler.dense"),
    )
    masked = (
        *masked_head(config, "predictions", "dense", "LayerNorm"),
        *output("sop_classifier.classifier", "next_sentence"),
    )
    classes = output("classifier", "head")
    head = {"masked": masked, "classes": classes, "tags": classes}.get(config.output, ())
    return named_in_class(base, config, (*trunk, *head))


ALBERT_WITH_POOLER = ("AlbertForPreTraining", "AlbertForSequenceClassification", "AlbertModel")
ALBERT = Family(
    "albert",
    {"AlbertForPreTraining": {"head": "masked", "next_sentence": True}, **classes_of("Albert")},
    (
        *shared_fields(**ALBERT_SIZES),
        NarrowEmbedding("embedding_size", "embedding_width", 128),
        LayerGroups("num_hidden_groups", "layer_groups", 1),
        *fixed(inner_group_num=1),
        *keys(max_position_embeddings=512),
        Choice("hidden_act", "activation", PLAIN, "gelu_new"),
        Present("albert.pooler.weight", "pooler", ALBERT_WITH_POOLER),
        Present("sop_classifier.classifier.weight", "next_sentence", ("AlbertForPreTraining",)),
        # Of dropout, and of versions that no code reads.
        IgnoredKeys(
            "classifier_dropout_prob down_scale_factor gap_size net_structure_type"
            " num_memory_blocks"
        ),
    ),
    albert_rows,
    prefix="albert.",
    copies=masked_copies("predictions", "albert.embeddings.word_embeddings.weight"),
    ignored=(r"embeddings\.(position_ids|token_type_ids)$",),
    covers="layers that share parameters in groups; masked-LM, sentence-order, text- and"
    " token-classification heads; pooler; no head",
)


# ELECTRA (arXiv:2003.10555): BERT whose embeddings may be narrower than its layers. Its generator
# has the masked head; its discriminator predicts of each token whether it was replaced, and is
# the base of those for classes.


def electra_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
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
        **classes_of("Electra"),
        "ElectraForPreTraining": {"head": "tags", "class_head": "dense", "n_classes": 1},
    },
    (
        *shared_fields(hidden_size=256, num_attention_heads=4, intermediate_size=1024),
        Key("embedding_size", "embedding_width", 128),
        *keys(max_position_embeddings=512),
        # Its heads always have this one.
        *fixed(hidden_act="gelu"),
        Constant(activation="gelu", pooler_activation="gelu"),
        IgnoredKeys("summary_type summary_use_proj summary_activation summary_last_dropout"),
    ),
    electra_rows,
    prefix="electra.",
    copies=masked_tied_copy(
        "generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"
    ),
    ignored=BUFFERS,
    renamed=OLD_NORMS,
    covers="an embedding of another width; masked-LM, text- and token-classification heads, and"
    " the discriminator's; no head",
)


# MPNet (arXiv:2004.09297): RoBERTa with T5's relative positions in all layers, beside the learned
# ones. Its 32 buckets and the offset of its positions are in the code, not in the config.


def mpnet_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "mpnet"
    layer = base + ".encoder.layer.{}."
    trunk = (
        *embeddings(base),
        TensorRow(f"{base}.encoder.relative_attention_bias.weight", "relative_bias"),
        *block(
            layer,
            q="attention.attn.q",
            k="attention.attn.k",
            v="attention.attn.v",
            out="attention.attn.o",
            attention_norm="attention.LayerNorm",
            up="intermediate.dense",
            down="output.dense",
            ffn_norm="output.LayerNorm",
        ),
    )
    return named_in_class(base, config, (*trunk, *roberta_heads(config, base)))


MPNET = Family(
    "mpnet",
    classes_of("MPNet"),
    (
        ENCODER,
        Constant(
            positions="t5",
            position_embedding="learned",
            relative_buckets=32,
            relative_distance=128,
            activation="gelu",
        ),
        *keys(**{**BERT_SIZES, "vocab_size": 30527}),
        *keys(layer_norm_eps=1e-12),
        *fixed(relative_attention_num_buckets=32, pad_token_id=1),
        OffsetPositions(),
        # The masked head always has this one.
        *fixed(hidden_act="gelu"),
        tied(True),
        ClassCount(),
        Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        Present("mpnet.pooler.dense.weight", "pooler", ("MPNetModel",)),
        IgnoredKeys("gradient_checkpointing"),
    ),
    mpnet_rows,
    prefix="mpnet.",
    copies=masked_copies("lm_head", "mpnet.embeddings.word_embeddings.weight"),
    ignored=(r"embeddings\.position_ids$", r"^(mpnet\.)?pooler\."),  # as of RoBERTa
    renamed=OLD_NORMS,
    covers="relative beside learned positions; masked-LM, text- and token-classification heads;"
    " pooler; no head",
)


# NomicBERT (arXiv:2402.01613): BERT with RoPE in place of learned positions, a gated
# feed-forward, and no biases but those of the norms and heads.

BASE = "nomic_bert"


def stored_rows() -> tuple[TensorRow, ...]:
    """The tensors of the layers as files have them."""
    layer = BASE + ".encoder.layers.{}."
    return (
        *norm(f"{BASE}.emb_ln", "embed.norm"),
        *block(
            layer,
            qkv="attn.Wqkv",
            out="attn.out_proj",
            attention_norm="norm1",
            gate="mlp.fc12",
            up="mlp.fc11",
            down="mlp.fc2",
            ffn_norm="norm2",
        ),
    )


def module_rows() -> tuple[TensorRow, ...]:
    """The same as the classes of transformers have them, which peft adapts."""
    layer = BASE + ".layers.{}."
    return (
        *norm(f"{BASE}.embeddings.LayerNorm", "embed.norm"),
        *block(
            layer,
            q="self_attn.q_proj",
            k="self_attn.k_proj",
            v="self_attn.v_proj",
            out="self_attn.o_proj",
            attention_norm="post_attention_layernorm",
            gate="mlp.gate_proj",
            up="mlp.up_proj",
            down="mlp.down_proj",
            ffn_norm="post_mlp_layernorm",
        ),
    )


def with_ends(config: ModelConfig, layers: tuple[TensorRow, ...]) -> tuple[TensorRow, ...]:
    trunk = (
        TensorRow(f"{BASE}.embeddings.word_embeddings.weight", "embed.tokens"),
        TensorRow(f"{BASE}.embeddings.token_type_embeddings.weight", "embed.types"),
        *layers,
        *linear(f"{BASE}.pooler.dense", "pooler.dense"),
    )
    masked = masked_head(config, "cls.predictions", "transform.dense", "transform.layer_norm")
    classes = output("classifier", "head")
    head = {"masked": masked, "classes": classes, "tags": classes}.get(config.output, ())
    return named_in_class(BASE, config, (*trunk, *head))


NOMIC_BERT = Family(
    "nomic_bert",
    classes_of("NomicBert"),
    (
        Constant(
            family="encoder", norm="layer", norm_placement="post", bias="norm", embedding_norm=True
        ),
        *keys(**{**BERT_SIZES, "vocab_size": 30528}),
        *keys(head_dim=None, type_vocab_size=2, layer_norm_eps=1e-12),
        Choice("hidden_act", "activation", GATED_NAMES, "silu"),
        Length(2048),
        Rope(theta=("rope_theta", 1000.0)),
        tied(True),
        ClassCount(),
        Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        Present(
            "nomic_bert.pooler.dense.weight", "pooler", ("NomicBertForSequenceClassification",)
        ),
        IgnoredKeys("classifier_dropout default_theta"),
    ),
    lambda config: with_ends(config, stored_rows()),
    prefix="nomic_bert.",
    copies=masked_copies("cls.predictions", "nomic_bert.embeddings.word_embeddings.weight"),
    module_rows=lambda config: with_ends(config, module_rows()),
    required_ids={"pad_token_id": 0},
    covers="RoPE with every scaling; gated activations; masked-LM, text- and"
    " token-classification heads; no head",
)


# ModernBERT (arXiv:2412.13663): an encoder with RoPE, of which every third layer sees the whole
# sequence and the others a window with another base; its first layer has no norm before
# attention.

MODERNBERT_DEPTH = 22


class LocalWindows(KeyMapping):
    """Windows of local_attention tokens, half of them on each side, beside the token itself: in the
    sliding layers of layer_types, or without that key in all but every third one."""

    def read(self, hf: HFConfig) -> ConfigFields:
        layers = hf.number("num_hidden_layers", MODERNBERT_DEPTH)
        every = hf.number("global_attn_every_n_layers", 3)
        if not isinstance(layers, int) or layers > MOST_LAYERS:
            raise hf.unsupported("num_hidden_layers", layers, [f"1 to {MOST_LAYERS}"])
        if not isinstance(every, int) or every < 1:
            raise hf.unsupported("global_attn_every_n_layers", every, ["a number above 0"])
        kinds = hf.get("layer_types") or [SLIDING if i % every else FULL for i in range(layers)]
        if len(kinds) != layers or not {*kinds} <= {FULL, SLIDING}:
            raise hf.unsupported("layer_types", kinds, [f"{layers} of", FULL, SLIDING])
        if SLIDING not in kinds:
            return {"rope_window_theta": 0.0}
        pattern = "".join("w" if kind == SLIDING else "f" for kind in kinds)
        window = int(hf.number("local_attention", 128)) // 2 + 1
        return {"window": window, "window_pattern": pattern}

    def write(self, config: ModelConfig) -> Keys:
        kinds = [SLIDING if layer.window else FULL for layer in layers_of(config)]
        return {"layer_types": kinds, "local_attention": 2 * max(config.window - 1, 0)}


def layers_of(config: ModelConfig) -> tuple[ModelConfig, ...]:
    return layer_configs(config, config.n_layers)


def modernbert_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    layer = "model.layers.{}."
    trunk = (
        TensorRow("model.embeddings.tok_embeddings.weight", "embed.tokens"),
        *norm("model.embeddings.norm", "embed.norm"),
        *block(
            layer,
            attention_norm="attn_norm",
            qkv="attn.Wqkv",
            out="attn.Wo",
            ffn_norm="mlp_norm",
            gate_up="mlp.Wi",
            down="mlp.Wo",
        ),
        *norm("model.final_norm", "final_norm"),
    )
    masked = (
        *_dense("head"),
        TensorRow("decoder.weight", "head.weight"),
        TensorRow("decoder.bias", "head.bias"),
    )
    classes = output("classifier", "head")
    heads = {
        "masked": masked,
        "classes": (*_dense("pooler"), *classes),
        "tags": (*_dense("head"), *classes),
    }
    return named_in_class("model", config, (*trunk, *heads.get(config.output, ())))


def _dense(path: str) -> tuple[TensorRow, ...]:
    return *linear("head.dense", f"{path}.dense"), *norm("head.norm", f"{path}.norm")


MODERNBERT = Family(
    "modernbert",
    classes_of("ModernBert"),
    (
        Constant(
            family="encoder",
            norm="layer",
            embedding_norm=True,
            unnormed_layers=1,
            activation="geglu",
            head_dense_bias=False,
            class_head="dense_norm",
            pooler_activation="gelu",
        ),
        DivisibleHeads(),
        *keys(
            vocab_size=50368,
            hidden_size=768,
            num_hidden_layers=MODERNBERT_DEPTH,
            num_attention_heads=12,
            intermediate_size=1152,
            norm_eps=1e-5,
        ),
        Length(8192),
        Rope(
            theta=("global_rope_theta", 160_000.0),
            local=("local_rope_theta", 10_000.0),
            kinds=("default",),
        ),
        LocalWindows(),
        *(FixedKey(f"{name}_activation", ("gelu",)) for name in ("hidden", "classifier")),
        *(FixedKey(f"{name}_bias", (False,)) for name in ("norm", "attention", "mlp")),
        *fixed(classifier_bias=False, decoder_bias=True),
        tied(True),
        Dropout("attention_dropout embedding_dropout mlp_dropout"),
        ClassCount(),
        Choice("classifier_pooling", "pooling", {"cls": "first", "mean": "mean"}, "cls"),
        # Of training, of kernels, and two that are read by no layer.
        IgnoredKeys(
            "classifier_dropout sparse_prediction sparse_pred_ignore_index"
            " initializer_cutoff_factor deterministic_flash_attn reference_compile"
        ),
        IgnoredKeys("repad_logits_with_grad layer_norm_eps position_embedding_type cls_token_id"),
    ),
    modernbert_rows,
    prefix="model.",
    copies=masked_tied_copy("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    covers="windows and two RoPE bases by layer; masked-LM, text- (first token or"
    " mean) and token-classification heads; no head",
)


# DeBERTa-v3 (arXiv:2111.09543) and what v2 (arXiv:2006.03654) has in common with it: BERT whose
# attention reads relative positions by the projections of queries and keys. The classes are those
# of v2 in transformers.

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


def deberta_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "deberta"
    layer = base + ".encoder.layer.{}."
    trunk = (
        *embeddings(base),
        TensorRow(f"{base}.encoder.rel_embeddings.weight", "relative_embedding"),
        *norm(f"{base}.encoder.LayerNorm", "relative_norm"),
        *block(
            layer,
            q="attention.self.query_proj",
            k="attention.self.key_proj",
            v="attention.self.value_proj",
            out="attention.output.dense",
            attention_norm="attention.output.LayerNorm",
            up="intermediate.dense",
            down="output.dense",
            ffn_norm="output.LayerNorm",
        ),
    )
    masked = masked_head(config, "cls.predictions", "transform.dense", "transform.LayerNorm")
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
    classes_of("DebertaV2"),
    (
        Constant(
            family="encoder", norm="layer", norm_placement="post", bias="all", embedding_norm=True
        ),
        *keys(**DEBERTA_SIZES),
        DivisibleHeads(),
        *keys(type_vocab_size=0, layer_norm_eps=1e-7),
        DisentangledPositions(),
        *fixed(conv_kernel_size=0),
        FixedKey("legacy", (True, False)),
        Choice("hidden_act", "activation", PLAIN, "gelu"),
        Choice("pooler_hidden_act", "pooler_activation", POOLER_ACTIVATIONS, "gelu"),
        tied(True),
        ClassCount(),
        Dropout("hidden_dropout_prob attention_probs_dropout_prob"),
        IgnoredKeys("pooler_dropout cls_dropout conv_act conv_groups summary_type"),
    ),
    deberta_rows,
    prefix="deberta.",
    copies=masked_copies("cls.predictions", "deberta.embeddings.word_embeddings.weight"),
    ignored=(r"^mask_predictions\.", r"embeddings\.position_(ids|embeddings\.weight)$"),
    renamed=PUBLISHED_HEAD,
    covers="v3, and v2 without a convolution: disentangled attention with shared keys and log"
    " buckets; masked-LM, text- and token-classification heads; no head",
)


# The text encoder of CLIP (arXiv:2103.00020): a decoder without an output layer, and with the
# projection of the last token of a text, which is its EOS.


class ProjectionWidth(Key):
    """The width of the vector of a text, which a model without the projection states too."""

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: config.projection_width or config.d_model}


CLIP_FIELDS = (
    Constant(norm="layer", bias="all", positions="learned", pooling="last"),
    DivisibleHeads(),
    *keys(
        vocab_size=49408,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        max_position_embeddings=77,
    ),
    ProjectionWidth("projection_dim", "projection_width", 512),
    *keys(layer_norm_eps=1e-5),
    Choice("hidden_act", "activation", PLAIN, "quick_gelu"),
    Dropout("attention_dropout"),
    # Older files have it, and it is of no layer.
    IgnoredKeys("initializer_factor dropout"),
)


def clip_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "text_model."
    layer = base + "encoder.layers.{}."
    trunk = (
        TensorRow(base + "embeddings.token_embedding.weight", "embed.tokens"),
        TensorRow(base + "embeddings.position_embedding.weight", "embed.positions"),
        *projections(layer + "self_attn", "out_proj"),
        *block(
            layer,
            attention_norm="layer_norm1",
            ffn_norm="layer_norm2",
            up="mlp.fc1",
            down="mlp.fc2",
        ),
        *norm(base + "final_layer_norm", "final_norm"),
    )
    if config.output == "none":
        return tuple(row._replace(hf=row.hf.removeprefix(base)) for row in trunk)
    return (*trunk, TensorRow("text_projection.weight", "head.weight"))


CLIP_TEXT = Family(
    "clip_text_model",
    {"CLIPTextModelWithProjection": {"head": "projection"}, "CLIPTextModel": {"head": "none"}},
    CLIP_FIELDS,
    clip_rows,
    copies=lambda config: (),
    prefix="text_model.",
    ignored=(r"embeddings\.position_ids$",),
    covers="the text encoder: the states of all tokens, or the projection of the EOS",
)
