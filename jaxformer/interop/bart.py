"""BART (arXiv:1910.13461), and Marian (arXiv:1804.00344) with its tensors."""

import dataclasses

from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import KeyMapping
from jaxformer.interop.tensor_table import AS_ROW, TensorRow, linear, norm

STACKS = ("encoder", "decoder")


def shared_fields(vocab_size: int) -> tuple[KeyMapping, ...]:
    """The keys of both, with the default of vocab_size."""
    return (
        fields.Constant(family="encoder_decoder", norm="layer", norm_placement="post", bias="all"),
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
        fields.Choice("activation_function", "activation", fields.PLAIN, "gelu"),
        fields.Choice("scale_embedding", "embedding_scale", {False: "none", True: "sqrt"}, False),
        fields.Present(
            "final_logits_bias", "head_bias", ("BartForConditionalGeneration", "MarianMTModel")
        ),
        fields.tied(True),
        fields.Dropout("dropout attention_dropout"),
        fields.IgnoredKeys(
            "encoder_layerdrop decoder_layerdrop activation_dropout classifier_dropout"
            " classif_dropout init_std num_hidden_layers hidden_size num_attention_heads"
            " extra_pos_embeddings force_bos_token_to_be_generated add_bias_logits"
            " gradient_checkpointing static_position_embeddings"
        ),
        # Written by the first versions of transformers with these models.
        *(fields.FixedKey(key, (False,)) for key in ("normalize_before", "add_final_layer_norm")),
    )


def stack(side: str, prefix: str) -> tuple[TensorRow, ...]:
    """The rows of one stack; `prefix` begins its paths in the params."""
    layer = f"model.{side}.layers.{{}}."
    projections = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
    sublayers = {"self_attn": "attention", "encoder_attn": "cross"}
    if side == "encoder":
        del sublayers["encoder_attn"]
    attention: list[TensorRow] = []
    for name, block in sublayers.items():
        for projection, leaf in projections.items():
            attention += linear(f"{layer}{name}.{projection}", f"{prefix}blocks.{block}.{leaf}")
        attention += norm(f"{layer}{name}_layer_norm", f"{prefix}blocks.{block}_norm")
    return (
        *attention,
        *linear(layer + "fc1", f"{prefix}blocks.ffn.up"),
        *linear(layer + "fc2", f"{prefix}blocks.ffn.down"),
        *norm(layer + "final_layer_norm", f"{prefix}blocks.ffn_norm"),
        TensorRow(f"model.{side}.embed_positions.weight", f"{prefix}embed.positions"),
        *norm(f"model.{side}.layernorm_embedding", f"{prefix}embed.norm"),
    )


ROWS = (
    TensorRow("model.shared.weight", "embed.tokens"),
    TensorRow("lm_head.weight", "head.weight"),
    TensorRow("final_logits_bias", "head.bias", AS_ROW),
    *stack("encoder", "encoder."),
    *stack("decoder", ""),
)
REPEATED = tuple(f"model.{side}.embed_tokens.weight" for side in STACKS)

BART = Family(
    "bart",
    {"BartForConditionalGeneration": {}},
    (
        *shared_fields(50265),
        fields.Constant(positions="learned", position_offset=2, embedding_norm=True),
        fields.FixedKey("normalize_embedding", (True,)),
    ),
    lambda config: ROWS,
    prefix="model.",
    bases=("BartModel",),
    copies=tied_copy("lm_head.weight", "model.shared.weight", *REPEATED),
    covers="encoders and decoders of different depth; scaled embedding",
)

# Sinusoidal positions, sines before cosines.
MARIAN = dataclasses.replace(
    BART,
    model_type="marian",
    architectures={"MarianMTModel": {}},
    bases=("MarianModel",),
    fields=(
        *shared_fields(58101),
        fields.Constant(positions="sinusoidal", sinusoid_order="half"),
        fields.FixedKey("share_encoder_decoder_embeddings", (True,)),
        fields.AliasKey("decoder_vocab_size", "vocab_size", "vocab_size", checked=True),
        fields.FixedKey("normalize_embedding", (False,)),
    ),
    ignored=(r"(en|de)coder\.embed_positions\.weight$",),
    covers="sinusoidal positions; encoders and decoders of different depth; scaled embedding",
)
