"""T5 (arXiv:1910.10683), both of its versions."""

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import Choice, Constant, Dropout, IgnoredKeys, Key, Ours
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.table import LINEAR, TensorRow

FEED_FORWARD = {
    **{
        "relu": "relu",
        "gated-gelu": "geglu_tanh",
        "gated-silu": "swiglu",
        "gated-relu": "reglu",
        "gelu": "gelu",
    },
    **{
        "gelu_new": "gelu_tanh",
        "silu": "silu",
        "relu2": "relu2",
        "tanh": "tanh",
        "gated-sigmoid": "glu",
    },
    **{
        "gated-gelu_new": "geglu_tanh",
        "gated-gelu_pytorch_tanh": "geglu_tanh",
        "gated-swish": "swiglu",
        "swish": "silu",
    },
}


class StackDepths:
    """`num_layers` of the encoder, num_decoder_layers of the decoder, which are as many where that
    is left out."""

    def read(self, hf: HFConfig) -> Ours:
        layers = hf.get("num_layers", 6)
        return {"n_encoder_layers": layers, "n_layers": hf.get("num_decoder_layers") or layers}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {"num_layers": ours.encoder_layers, "num_decoder_layers": ours.n_layers}


class T5Head:
    """In a version 1 tie_word_embeddings ties, and has the output layer read the stream divided by
    sqrt(d_model).

    Since 5 transformers takes the key for the second alone, and ties where no other output layer is
    stored.
    """

    def read(self, hf: HFConfig) -> Ours:
        scaled = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False)
        tied = hf.get("tie_word_embeddings") is not False or "lm_head.weight" not in hf.names
        return {"tied_head": tied, "logit_scale": "rsqrt" if scaled else "none"}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {
            "tie_word_embeddings": ours.tied_head,
            "scale_decoder_outputs": ours.logit_scale == "rsqrt",
        }


FIELDS = (
    Constant(family="encoder_decoder", norm="rms", positions="t5", attention_scale=1.0),
    Key("vocab_size", "vocab_size", 32128),
    Key("d_model", "d_model", 512),
    Key("d_kv", "head_dim", 64),
    Key("d_ff", "d_ff", 2048),
    StackDepths(),
    Key("num_heads", "n_heads", 8),
    Key("relative_attention_num_buckets", "relative_buckets", 32),
    Key("relative_attention_max_distance", "relative_distance", 128),
    Key("layer_norm_epsilon", "norm_eps", 1e-6),
    Key("n_positions", "max_length", 512),
    Choice("feed_forward_proj", "activation", FEED_FORWARD, "relu"),
    T5Head(),
    Dropout(("dropout_rate",)),
    IgnoredKeys(("initializer_factor", "dense_act_fn", "is_gated_act", "classifier_dropout")),
)


def stack(hf: str, ours: str, config: ModelConfig) -> tuple[TensorRow, ...]:
    """The rows of one stack; `ours` goes before its paths."""
    layer = hf + ".block.{}.layer."
    sublayers = [("SelfAttention", "attention"), *([] if ours else [("EncDecAttention", "cross")])]
    found = [
        TensorRow(
            f"{layer}{i}.{name}.{part}.weight",
            f"{ours}blocks.{block}.{'out' if part == 'o' else part}",
            LINEAR,
        )
        for i, (name, block) in enumerate(sublayers)
        for part in "qkvo"
    ]
    found += [
        TensorRow(f"{layer}{i}.layer_norm.weight", f"{ours}blocks.{block}_norm.scale")
        for i, (_, block) in enumerate(sublayers)
    ]
    ffn, names = (
        f"{layer}{len(sublayers)}",
        {"gate": "wi_0", "up": "wi_1" if config.gated else "wi", "down": "wo"},
    )
    found += [
        TensorRow(f"{ffn}.DenseReluDense.{name}.weight", f"{ours}blocks.ffn.{leaf}", LINEAR)
        for leaf, name in names.items()
    ]
    return (
        *found,
        TensorRow(f"{ffn}.layer_norm.weight", f"{ours}blocks.ffn_norm.scale"),
        TensorRow(
            f"{hf}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{ours}relative_bias",
        ),
        TensorRow(f"{hf}.final_layer_norm.weight", f"{ours}final_norm.scale"),
    )


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    ends = TensorRow("shared.weight", "embed.tokens"), TensorRow("lm_head.weight", "head.weight")
    return (*ends, *stack("encoder", "encoder.", config), *stack("decoder", "", config))


T5 = Family(
    "t5",
    {"T5ForConditionalGeneration": {}},
    FIELDS,
    rows,
    bases=("T5Model", "T5WithLMHeadModel"),
    copies=tied_copy(
        "lm_head.weight",
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
    ),
    ignored=(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),  # of a bug of 2019, never read
)
