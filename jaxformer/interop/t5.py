"""T5 (arXiv:1910.10683), both of its versions."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import (
    GATED_NAMES,
    PLAIN,
    Choice,
    ConfigFields,
    Constant,
    Dropout,
    IgnoredKeys,
    Key,
    KeyMapping,
    Keys,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.tensor_table import LINEAR, TensorRow

# "gated-gelu" is the approximation by tanh there.
T5_FEED_FORWARD = {**PLAIN, "gated-gelu": "geglu_tanh"} | {
    f"gated-{name}": value for name, value in GATED_NAMES.items() if value != "geglu"
}


class T5Head(KeyMapping):
    """tie_word_embeddings ties the output layer, whose input is then divided by sqrt(d_model) (T5
    1.0). In transformers 5 it means only the division, and the layer is tied where no other is
    stored; where it is not known what is stored, the key decides."""

    def read(self, hf: HFConfig) -> ConfigFields:
        scaled = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False)
        lacks = hf.names is not None and "lm_head.weight" not in hf.names
        tied = hf.get("tie_word_embeddings") is not False or lacks
        return {"tied_head": tied, "logit_scale": "rsqrt" if scaled else "none"}

    def write(self, config: ModelConfig) -> Keys:
        return {
            "tie_word_embeddings": config.tied_head,
            "scale_decoder_outputs": config.logit_scale == "rsqrt",
        }


FIELDS = (
    Constant(family="encoder_decoder", norm="rms", positions="t5", attention_scale=1.0),
    Key("vocab_size", "vocab_size", 32128),
    Key("d_model", "d_model", 512),
    Key("d_kv", "head_dim", 64),
    Key("d_ff", "d_ff", 2048),
    Key("num_layers", "n_encoder_layers", 6),
    Key("num_decoder_layers", "n_layers", 6, instead="num_layers"),
    Key("num_heads", "n_heads", 8),
    Key("relative_attention_num_buckets", "relative_buckets", 32),
    Key("relative_attention_max_distance", "relative_distance", 128),
    Key("layer_norm_epsilon", "norm_eps", 1e-6),
    Key("n_positions", "max_length", 512),
    Choice("feed_forward_proj", "activation", T5_FEED_FORWARD, "relu"),
    T5Head(),
    Dropout("dropout_rate"),
    IgnoredKeys("initializer_factor dense_act_fn is_gated_act classifier_dropout"),
)


def stack(hf: str, prefix: str, config: ModelConfig) -> tuple[TensorRow, ...]:
    """The rows of one stack; `prefix` begins its paths in the params."""
    layer = hf + ".block.{}.layer."
    sublayers = [("SelfAttention", "attention"), ("EncDecAttention", "cross")]
    if hf == "encoder":
        sublayers.pop()
    matrices = []
    for i, (name, block) in enumerate(sublayers):
        path = f"{prefix}blocks.{block}"
        for letter, leaf in {"q": "q", "k": "k", "v": "v", "o": "out"}.items():
            hf_name = f"{layer}{i}.{name}.{letter}.weight"
            matrices.append(TensorRow(hf_name, f"{path}.{leaf}", LINEAR))
        matrices.append(TensorRow(f"{layer}{i}.layer_norm.weight", f"{path}_norm.scale"))
    ffn = f"{layer}{len(sublayers)}"
    names = {"gate": "wi_0", "up": "wi_1" if config.gated else "wi", "down": "wo"}
    for leaf, name in names.items():
        path = f"{prefix}blocks.ffn.{leaf}"
        matrices.append(TensorRow(f"{ffn}.DenseReluDense.{name}.weight", path, LINEAR))
    bias = f"{hf}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return (
        *matrices,
        TensorRow(f"{ffn}.layer_norm.weight", f"{prefix}blocks.ffn_norm.scale"),
        TensorRow(bias, f"{prefix}relative_bias"),
        TensorRow(f"{hf}.final_layer_norm.weight", f"{prefix}final_norm.scale"),
    )


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    ends = TensorRow("shared.weight", "embed.tokens"), TensorRow("lm_head.weight", "head.weight")
    return (*ends, *stack("encoder", "encoder.", config), *stack("decoder", "", config))


# Of a bug of 2019; never read.
UNUSED_BIAS = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
EMBEDDING_NAMES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")

T5 = Family(
    "t5",
    {"T5ForConditionalGeneration": {}},
    FIELDS,
    rows,
    bases=("T5Model", "T5WithLMHeadModel"),
    copies=tied_copy("lm_head.weight", *EMBEDDING_NAMES),
    ignored=(UNUSED_BIAS,),
)
