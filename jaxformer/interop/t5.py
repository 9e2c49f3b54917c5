"""T5 (arXiv:1910.10683), both of its versions, mT5 (arXiv:2010.11934), UMT5 (arXiv:2304.09151) with
relative positions of each layer, and their encoders alone, as in diffusion models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxformer.config.model import ModelConfig
from jaxformer.interop.family import Copy, Family, tied_copy
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


@dataclass(frozen=True)
class T5Head(KeyMapping):
    """tie_word_embeddings ties the output layer, whose input is then divided by sqrt(d_model) (T5
    1.0). In transformers 5 it means only the division, and the layer is tied where no other is
    stored; where it is not known what is stored, the key decides. mT5 has no division."""

    has_scale: bool = True

    def read(self, hf: HFConfig) -> ConfigFields:
        stated = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False)
        scaled = stated and self.has_scale
        lacks = hf.names is not None and "lm_head.weight" not in hf.names
        tied = hf.get("tie_word_embeddings") is not False or lacks
        return {"tied_head": tied, "logit_scale": "rsqrt" if scaled else "none"}

    def write(self, config: ModelConfig) -> Keys:
        keys: Keys = {"tie_word_embeddings": config.tied_head}
        if self.has_scale:
            keys["scale_decoder_outputs"] = config.logit_scale == "rsqrt"
        return keys


# Key, field, and the default of T5.
T5_SIZE_KEYS = (
    ("vocab_size", "vocab_size", 32128),
    ("d_model", "d_model", 512),
    ("d_kv", "head_dim", 64),
    ("d_ff", "d_ff", 2048),
    ("num_heads", "n_heads", 8),
    ("relative_attention_num_buckets", "relative_buckets", 32),
    ("relative_attention_max_distance", "relative_distance", 128),
    ("layer_norm_epsilon", "norm_eps", 1e-6),
    ("n_positions", "max_length", 512),
)
T5_DEPTH = 6


def shared_fields(activation: str, default: Mapping[str, int]) -> tuple[KeyMapping, ...]:
    """The keys of a model with one stack or two; `default` has the sizes that are not T5's."""
    return (
        Constant(norm="rms", positions="t5", attention_scale=1.0),
        *(Key(hf, field, default.get(hf, usual)) for hf, field, usual in T5_SIZE_KEYS),
        Choice("feed_forward_proj", "activation", T5_FEED_FORWARD, activation),
        Dropout("dropout_rate"),
        IgnoredKeys("initializer_factor dense_act_fn is_gated_act classifier_dropout"),
    )


def both_stacks(depth: int, head: T5Head) -> tuple[KeyMapping, ...]:
    return (
        Constant(family="encoder_decoder"),
        Key("num_layers", "n_encoder_layers", depth),
        Key("num_decoder_layers", "n_layers", depth, instead="num_layers"),
        head,
    )


class EncoderAlone(KeyMapping):
    """The keys of the decoder are not read, and it is written that there is none."""

    def read(self, hf: HFConfig) -> ConfigFields:
        unread = {"num_decoder_layers", "scale_decoder_outputs", "tie_word_embeddings"}
        hf.keys_read.update(unread)
        return {"family": "encoder"}

    def write(self, config: ModelConfig) -> Keys:
        return {"is_encoder_decoder": False}


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
    bias_name = "layer.0.SelfAttention.relative_attention_bias.weight"
    bias = TensorRow(f"{hf}.block.0.{bias_name}", f"{prefix}relative_bias")
    if config.relative_bias == "layer":
        bias = TensorRow(f"{hf}.block.{{}}.{bias_name}", f"{prefix}blocks.attention.relative_bias")
    return (
        *matrices,
        TensorRow(f"{ffn}.layer_norm.weight", f"{prefix}blocks.ffn_norm.scale"),
        bias,
        TensorRow(f"{hf}.final_layer_norm.weight", f"{prefix}final_norm.scale"),
    )


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    ends = TensorRow("shared.weight", "embed.tokens"), TensorRow("lm_head.weight", "head.weight")
    return (*ends, *stack("encoder", "encoder.", config), *stack("decoder", "", config))


# Of a bug of 2019; never read.
UNUSED_BIAS = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
EMBEDDING_NAMES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5_like(model_type: str, name: str, keys: Sequence[KeyMapping], covers: str) -> Family:
    """A family of encoder-decoders with the tensors of T5; `name` begins its classes. `covers` is
    as in `Family`."""
    return Family(
        model_type,
        {f"{name}ForConditionalGeneration": {}},
        keys,
        rows,
        bases=(f"{name}Model", f"{name}WithLMHeadModel"),
        copies=tied_copy("lm_head.weight", *EMBEDDING_NAMES),
        ignored=(UNUSED_BIAS,),
        covers=covers,
    )


def encoder_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    return (TensorRow("shared.weight", "embed.tokens"), *stack("encoder", "", config))


def encoder_like(model_type: str, name: str, keys: Sequence[KeyMapping]) -> Family:
    """The encoder of such a family alone, also out of the files of both stacks."""
    return Family(
        model_type,
        {f"{name}EncoderModel": {"head": "none"}},
        keys,
        encoder_rows,
        copies=lambda config: (Copy("encoder.embed_tokens.weight", "shared.weight"),),
        ignored=(r"^decoder\.", r"^lm_head\."),
        covers="the encoder alone: the states of all tokens, as in diffusion models",
    )


T5_KEYS = shared_fields("relu", {})
T5 = t5_like(
    "t5",
    "T5",
    (*T5_KEYS, *both_stacks(T5_DEPTH, T5Head())),
    "v1 and v1.1: stacks of different depth; tied and untied; gated activation",
)
T5_ENCODER = encoder_like(
    "t5", "T5", (*T5_KEYS, Key("num_layers", "n_layers", T5_DEPTH), EncoderAlone())
)

MT5_DEPTH = 8
MT5_SIZES = {"vocab_size": 250112, "d_ff": 1024, "num_heads": 6}
MT5_KEYS = shared_fields("gated-gelu", MT5_SIZES)
MT5 = t5_like(
    "mt5",
    "MT5",
    (*MT5_KEYS, *both_stacks(MT5_DEPTH, T5Head(has_scale=False))),
    "as t5, with logits that are not scaled",
)
MT5_ENCODER = encoder_like(
    "mt5", "MT5", (*MT5_KEYS, Key("num_layers", "n_layers", MT5_DEPTH), EncoderAlone())
)

UMT5_KEYS = (*MT5_KEYS, Constant(relative_bias="layer"))
UMT5 = t5_like(
    "umt5",
    "UMT5",
    (*UMT5_KEYS, *both_stacks(MT5_DEPTH, T5Head())),
    "as t5, with a table of relative positions for each layer",
)
UMT5_ENCODER = encoder_like(
    "umt5", "UMT5", (*UMT5_KEYS, Key("num_layers", "n_layers", MT5_DEPTH), EncoderAlone())
)
