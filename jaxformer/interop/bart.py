"""BART (arXiv:1910.13461), and the encoder-decoders with its tensors: Marian (arXiv:1804.00344),
Pegasus (arXiv:1912.08777), mBART (arXiv:2001.08210), and M2M100 (arXiv:2010.11125) with NLLB."""

from collections.abc import Callable, Mapping

import numpy as np

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.tensor_table import AS_ROW, TensorRow, linear, norm, projections

STACKS = ("encoder", "decoder")


def shared_fields(
    vocab_size: int, activation: str = "gelu", scaled: bool = False
) -> tuple[KeyMapping, ...]:
    """The keys of all, with the defaults of vocab_size, activation_function and scale_embedding."""
    return (
        fields.Constant(family="encoder_decoder", norm="layer", bias="all"),
        fields.Key("vocab_size", "vocab_size", vocab_size),
        fields.Key("d_model", "d_model", 1024),
        fields.Key("encoder_layers", "n_encoder_layers", 12),
        fields.Key("decoder_layers", "n_layers", 12),
        # Sizes that config.json has for each stack, and that have to be equal here.
        fields.Key("encoder_ffn_dim", "d_ff", 4096),
        fields.AliasKey("decoder_ffn_dim", "encoder_ffn_dim", "d_ff", checked=True, default=4096),
        fields.Key("encoder_attention_heads", "n_heads", 16),
        fields.AliasKey(
            "decoder_attention_heads",
            "encoder_attention_heads",
            "n_heads",
            checked=True,
            default=16,
        ),
        fields.Key("max_position_embeddings", "max_length", 1024),
        fields.Choice("activation_function", "activation", fields.PLAIN, activation),
        fields.Choice("scale_embedding", "embedding_scale", {False: "none", True: "sqrt"}, scaled),
        fields.tied(True),
        fields.Dropout("dropout attention_dropout"),
        fields.IgnoredKeys(
            "encoder_layerdrop decoder_layerdrop activation_dropout classifier_dropout"
            " classif_dropout init_std num_hidden_layers hidden_size num_attention_heads"
            " extra_pos_embeddings force_bos_token_to_be_generated add_bias_logits"
            " gradient_checkpointing static_position_embeddings"
        ),
    )


def placed_norms(placement: str) -> tuple[KeyMapping, ...]:
    """Norms before the sublayers and at the end of each stack ("pre"), or after the sums ("post"),
    with the keys that the first versions of transformers with these models wrote."""
    keys, is_pre = ("normalize_before", "add_final_layer_norm"), placement == "pre"
    return (
        fields.Constant(norm_placement=placement),
        *(fields.FixedKey(key, (is_pre,)) for key in keys),
    )


def with_bias(name: str) -> fields.Present:
    """The bias of the logits, which the class `name` has."""
    return fields.Present("final_logits_bias", "head_bias", (name,))


def normed_embeddings(is_normed: bool) -> tuple[KeyMapping, ...]:
    """Whether the embeddings have a norm, which files state too."""
    return (
        fields.Constant(embedding_norm=is_normed),
        fields.FixedKey("normalize_embedding", (is_normed,)),
    )


def stack(side: str, prefix: str) -> tuple[TensorRow, ...]:
    """The rows of one stack; `prefix` begins its paths in the params."""
    layer = f"model.{side}.layers.{{}}."
    sublayers = {"self_attn": "attention", "encoder_attn": "cross"}
    if side == "encoder":
        del sublayers["encoder_attn"]
    attention: list[TensorRow] = []
    for name, block in sublayers.items():
        attention += projections(layer + name, "out_proj", f"{prefix}blocks.{block}")
        attention += norm(f"{layer}{name}_layer_norm", f"{prefix}blocks.{block}_norm")
    return (
        *attention,
        *linear(layer + "fc1", f"{prefix}blocks.ffn.up"),
        *linear(layer + "fc2", f"{prefix}blocks.ffn.down"),
        *norm(layer + "final_layer_norm", f"{prefix}blocks.ffn_norm"),
        TensorRow(f"model.{side}.embed_positions.weight", f"{prefix}embed.positions"),
        *norm(f"model.{side}.layernorm_embedding", f"{prefix}embed.norm"),
        *norm(f"model.{side}.layer_norm", f"{prefix}final_norm"),
    )


ROWS = (
    TensorRow("model.shared.weight", "embed.tokens"),
    TensorRow("lm_head.weight", "head.weight"),
    TensorRow("final_logits_bias", "head.bias", AS_ROW),
    *stack("encoder", "encoder."),
    *stack("decoder", ""),
)
REPEATED = tuple(f"model.{side}.embed_tokens.weight" for side in STACKS)

LEARNED = fields.Constant(positions="learned", position_offset=2)
SINUSOIDAL = fields.Constant(positions="sinusoidal", sinusoid_order="half")  # sines first
# Sinusoids that some files hold; they are computed.
TABLES = r"(en|de)coder\.embed_positions\.weights?$"


def bart_like(
    model_type: str,
    name: str,
    keys: tuple[KeyMapping, ...],
    covers: str,
    base: str,
    computed: Callable[[ModelConfig], Mapping[str, np.ndarray]] = lambda config: {},
) -> Family:
    """A family with the tensors of BART; `name` is its class, and `base` that without a head.
    `covers` and `computed` are as in `Family`."""
    return Family(
        model_type,
        {name: {}},
        keys,
        lambda config: ROWS,
        prefix="model.",
        bases=(base,),
        copies=tied_copy("lm_head.weight", "model.shared.weight", *REPEATED),
        ignored=() if LEARNED in keys else (TABLES,),
        computed=computed,
        covers=covers,
    )


BART = bart_like(
    "bart",
    "BartForConditionalGeneration",
    (
        *shared_fields(50265),
        *placed_norms("post"),
        *normed_embeddings(True),
        with_bias("BartForConditionalGeneration"),
        LEARNED,
    ),
    "encoders and decoders of different depth; scaled embedding",
    base="BartModel",
)

MARIAN = bart_like(
    "marian",
    "MarianMTModel",
    (
        *shared_fields(58101),
        *placed_norms("post"),
        *normed_embeddings(False),
        with_bias("MarianMTModel"),
        SINUSOIDAL,
        fields.FixedKey("share_encoder_decoder_embeddings", (True,)),
        fields.AliasKey("decoder_vocab_size", "vocab_size", "vocab_size", checked=True),
    ),
    "sinusoidal positions; encoders and decoders of different depth; scaled embedding",
    base="MarianModel",
)


def sinusoid_tables(config: ModelConfig) -> dict[str, np.ndarray]:
    """The tables of positions that Pegasus stores, [T, D] for each stack."""
    width = config.d_model
    frequencies = 10_000.0 ** -(2 * np.arange(-(-width // 2)) / width)
    angle = np.arange(config.max_length)[:, None] * frequencies
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, :width].astype(np.float32)
    return {f"model.{side}.embed_positions.weight": table for side in STACKS}


PEGASUS = bart_like(
    "pegasus",
    "PegasusForConditionalGeneration",
    (
        *shared_fields(50265),
        *placed_norms("pre"),
        *normed_embeddings(False),
        with_bias("PegasusForConditionalGeneration"),
        SINUSOIDAL,
    ),
    "norms before the sublayers; sinusoidal positions; scaled embedding",
    base="PegasusModel",
    computed=sinusoid_tables,
)

MBART = bart_like(
    "mbart",
    "MBartForConditionalGeneration",
    (
        *shared_fields(50265),
        *placed_norms("pre"),
        *normed_embeddings(True),
        with_bias("MBartForConditionalGeneration"),
        LEARNED,
    ),
    "mBART-50 too: norms before the sublayers and of the embedding; tokens of languages",
    base="MBartModel",
)


class PositionsAfterPadding(KeyMapping):
    """The first token has the position pad_token_id + 1."""

    def read(self, hf: HFConfig) -> ConfigFields:
        padding = hf.number("pad_token_id", 1)
        if not isinstance(padding, int) or padding < 0:
            raise hf.unsupported("pad_token_id", padding, ["an id from 0"])
        return {"position_offset": padding + 1}

    def write(self, config: ModelConfig) -> Keys:
        return {"pad_token_id": config.position_offset - 1}


M2M100 = bart_like(
    "m2m_100",
    "M2M100ForConditionalGeneration",
    (
        *shared_fields(128112, activation="relu", scaled=True),
        *placed_norms("pre"),
        *normed_embeddings(False),
        SINUSOIDAL,
        fields.Constant(sinusoid_range="closed"),
        PositionsAfterPadding(),
    ),
    "M2M100 and NLLB: norms before the sublayers; sinusoidal positions behind that of padding;"
    " tokens of languages; NLLB-MoE is refused",
    base="M2M100Model",
)
