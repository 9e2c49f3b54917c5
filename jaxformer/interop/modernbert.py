"""ModernBERT (arXiv:2412.13663): an encoder with RoPE, of which every third layer sees the whole
sequence and the others a window with another base; its first layer has no norm before attention."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.bert import masked_tied_copy, named_in_class
from jaxformer.interop.family import Family
from jaxformer.interop.fields import FULL, SLIDING, ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.rope import Length, Rope
from jaxformer.interop.tensor_table import QKV, STACKED, TensorRow, linear, norm, output
from jaxformer.layers.pattern import layer_configs

MODERNBERT_DEPTH = 22


class LocalWindows(KeyMapping):
    """Windows of local_attention tokens, half of them on each side, beside the token itself: in the
    sliding layers of layer_types, or without that key in all but every third one."""

    def read(self, hf: HFConfig) -> ConfigFields:
        layers = hf.number("num_hidden_layers", MODERNBERT_DEPTH)
        every = hf.number("global_attn_every_n_layers", 3)
        if not isinstance(layers, int) or layers > fields.MOST_LAYERS:
            raise hf.unsupported("num_hidden_layers", layers, [f"1 to {fields.MOST_LAYERS}"])
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


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    layer = "model.layers.{}."
    trunk = (
        TensorRow("model.embeddings.tok_embeddings.weight", "embed.tokens"),
        *norm("model.embeddings.norm", "embed.norm"),
        *norm(layer + "attn_norm", "blocks.attention_norm"),
        *linear(layer + "attn.Wqkv", QKV, STACKED),
        *linear(layer + "attn.Wo", "blocks.attention.out"),
        *norm(layer + "mlp_norm", "blocks.ffn_norm"),
        *linear(layer + "mlp.Wi", ("blocks.ffn.gate", "blocks.ffn.up"), STACKED),
        *linear(layer + "mlp.Wo", "blocks.ffn.down"),
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
    {
        "ModernBertForMaskedLM": {"head": "masked"},
        "ModernBertForSequenceClassification": {"head": "classes"},
        "ModernBertForTokenClassification": {"head": "tags"},
        "ModernBertModel": {"head": "none"},
    },
    (
        fields.Constant(
            family="encoder",
            norm="layer",
            embedding_norm=True,
            unnormed_layers=1,
            activation="geglu",
            head_dense_bias=False,
            class_head="dense_norm",
            pooler_activation="gelu",
        ),
        fields.DivisibleHeads(),
        fields.Key("vocab_size", "vocab_size", 50368),
        fields.Key("hidden_size", "d_model", 768),
        fields.Key("num_hidden_layers", "n_layers", MODERNBERT_DEPTH),
        fields.Key("num_attention_heads", "n_heads", 12),
        fields.Key("intermediate_size", "d_ff", 1152),
        fields.Key("norm_eps", "norm_eps", 1e-5),
        Length(8192),
        Rope(
            theta=("global_rope_theta", 160_000.0),
            local=("local_rope_theta", 10_000.0),
            kinds=("default",),
        ),
        LocalWindows(),
        *(fields.FixedKey(f"{name}_activation", ("gelu",)) for name in ("hidden", "classifier")),
        *(fields.FixedKey(f"{name}_bias", (False,)) for name in ("norm", "attention", "mlp")),
        fields.FixedKey("classifier_bias", (False,)),
        fields.FixedKey("decoder_bias", (True,)),
        fields.tied(True),
        fields.Dropout("attention_dropout embedding_dropout mlp_dropout"),
        fields.ClassCount(),
        fields.Choice("classifier_pooling", "pooling", {"cls": "first", "mean": "mean"}, "cls"),
        # Of training, of kernels, and two that are read by no layer.
        fields.IgnoredKeys("classifier_dropout sparse_prediction sparse_pred_ignore_index"),
        fields.IgnoredKeys("initializer_cutoff_factor deterministic_flash_attn reference_compile"),
        fields.IgnoredKeys("repad_logits_with_grad layer_norm_eps position_embedding_type"),
        fields.IgnoredKeys("cls_token_id"),
    ),
    rows,
    prefix="model.",
    copies=masked_tied_copy("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    covers="windows and two RoPE bases by layer; masked-LM, text- (first token or"
    " mean) and token-classification heads; no head",
)
