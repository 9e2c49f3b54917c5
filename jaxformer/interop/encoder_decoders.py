"""Encoder-decoders: BART and those with its tensors, T5 and its encoder alone, and T5Gemma."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.config.model import ModelConfig
from jaxformer.interop.family import INV_FREQ, Copy, Family, tied_copy
from jaxformer.interop.fields import (
    GATED_NAMES,
    PLAIN,
    AliasKey,
    Choice,
    ConfigFields,
    Constant,
    Dropout,
    IgnoredKeys,
    Key,
    KeyMapping,
    KeyRule,
    Keys,
    KeyTable,
    Present,
    Windows,
    fixed,
    keys,
    tied,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import GEMMA2_CAPS, GEMMA_BLOCK, SIZES_OF_ALL
from jaxformer.interop.rope import RopeKeys
from jaxformer.interop.tensor_table import AS_ROW, LINEAR, TensorRow, block, norm, projections

# BART (arXiv:1910.13461), and the encoder-decoders with its tensors: Marian (arXiv:1804.00344),
# Pegasus (arXiv:1912.08777), mBART (arXiv:2001.08210), and M2M100 (arXiv:2010.11125) with NLLB.

STACKS = ("encoder", "decoder")


def bart_stack(side: str, stack: str) -> tuple[TensorRow, ...]:
    """Return the rows of one stack; `stack` begins its paths in the params."""
    layer = f"model.{side}.layers.{{}}."
    return (
        *projections(layer + "self_attn", "out_proj", f"{stack}blocks.attention"),
        *projections(layer + "encoder_attn", "out_proj", f"{stack}blocks.cross"),
        *block(
            layer,
            LINEAR,
            stack,
            attention_norm="self_attn_layer_norm",
            cross_norm="encoder_attn_layer_norm",
            up="fc1",
            down="fc2",
            ffn_norm="final_layer_norm",
        ),
        TensorRow(f"model.{side}.embed_positions.weight", f"{stack}embed.positions"),
        *norm(f"model.{side}.layernorm_embedding", f"{stack}embed.norm"),
        *norm(f"model.{side}.layer_norm", f"{stack}final_norm"),
    )


BART_ROWS = (
    TensorRow("model.shared.weight", "embed.tokens"),
    TensorRow("lm_head.weight", "head.weight"),
    TensorRow("final_logits_bias", "head.bias", AS_ROW),
    *bart_stack("encoder", "encoder."),
    *bart_stack("decoder", ""),
)
REPEATED = tuple(f"model.{side}.embed_tokens.weight" for side in STACKS)

LEARNED_POSITIONS = Constant({"positions": "learned", "embedding.position_offset": 2})
SINUSOIDAL = Constant({"positions": "sinusoidal", "embedding.sinusoids": "half"})  # sines first
# Sinusoids that some files hold; they are computed.
TABLES = r"(en|de)coder\.embed_positions\.weights?$"


def bart_like(
    model_type: str,
    name: str,
    *more: KeyMapping,
    norms: str,
    normed_embedding: bool,
    model: str = "ForConditionalGeneration",
    activation: str = "gelu",
    scaled: bool = False,
    head_bias: bool = True,
    **others: Any,
) -> Family:
    """Return a family with the tensors of BART, and the keys `more` beside those of all.

    Its class is `name` + `model`, with `head_bias` a bias of the logits. `norms` are before the
    sublayers and at the end of each stack ("pre"), or after the sums ("post"). `activation` and
    `scaled` are the defaults of activation_function and scale_embedding; `others` are as in
    `Family`.
    """
    is_pre = norms == "pre"
    keys_of_all = (
        Constant({"family": "encoder_decoder", "norm": "layer", "bias": "all"}),
        Constant({"norm_placement": norms, "embedding.norm": normed_embedding}),
        *keys(
            "vocab_size d_model decoder_layers encoder_ffn_dim encoder_attention_heads"
            " max_position_embeddings"
        ),
        Key("encoder_layers", "n_encoder_layers", needed=True),
        # Sizes that config.json has for each stack, and that have to be equal here.
        AliasKey("decoder_ffn_dim", "encoder_ffn_dim", "d_ff", checked=True),
        AliasKey("decoder_attention_heads", "encoder_attention_heads", "n_heads", checked=True),
        Choice("activation_function", "activation", PLAIN, activation),
        Choice("scale_embedding", "embedding.scale", {False: "none", True: "sqrt"}, scaled),
        # Of the first versions of transformers with these models.
        *fixed(
            normalize_before=is_pre,
            add_final_layer_norm=is_pre,
            normalize_embedding=normed_embedding,
        ),
        tied(True),
        Dropout("dropout attention_dropout"),
        IgnoredKeys(
            "num_hidden_layers hidden_size num_attention_heads extra_pos_embeddings"
            " force_bos_token_to_be_generated add_bias_logits static_position_embeddings"
        ),
    )
    if head_bias:
        more += (Present("final_logits_bias", "head.bias", (name + model,)),)
    return Family(
        model_type,
        {name + model: {}},
        (*keys_of_all, *more),
        lambda config: BART_ROWS,
        prefix="model.",
        bases=(f"{name}Model",),
        copies=tied_copy("lm_head.weight", "model.shared.weight", *REPEATED),
        ignored=(TABLES,),
        **others,
    )


BART = bart_like("bart", "Bart", LEARNED_POSITIONS, norms="post", normed_embedding=True)

MARIAN = bart_like(
    "marian",
    "Marian",
    SINUSOIDAL,
    *fixed(share_encoder_decoder_embeddings=True),
    AliasKey("decoder_vocab_size", "vocab_size", "vocab_size", checked=True),
    norms="post",
    normed_embedding=False,
    model="MTModel",
)


def sinusoid_tables(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the tables of positions that Pegasus stores, [T, D] for each stack."""
    width = config.d_model
    frequencies = 10_000.0 ** -(2 * np.arange(-(-width // 2)) / width)
    angle = np.arange(config.max_length)[:, None] * frequencies
    table = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)[:, :width].astype(np.float32)
    return {f"model.{side}.embed_positions.weight": table for side in STACKS}


PEGASUS = bart_like(
    "pegasus", "Pegasus", SINUSOIDAL, norms="pre", normed_embedding=False, computed=sinusoid_tables
)

MBART = bart_like("mbart", "MBart", LEARNED_POSITIONS, norms="pre", normed_embedding=True)


M2M100 = bart_like(
    "m2m_100",
    "M2M100",
    SINUSOIDAL,
    Constant({"embedding.sinusoids": "half_closed"}),
    # The first token has the position pad_token_id + 1.
    KeyRule(
        lambda hf: {"embedding.position_offset": hf.whole("pad_token_id", 1, least=0) + 1},
        lambda config: {"pad_token_id": config.embedding.position_offset - 1},
    ),
    norms="pre",
    normed_embedding=False,
    activation="relu",
    scaled=True,
    head_bias=False,
)


# T5 (arXiv:1910.10683), both of its versions, mT5 (arXiv:2010.11934), UMT5 (arXiv:2304.09151)
# with relative positions of each layer, and their encoders alone, as in diffusion models.

# "gated-gelu" is the approximation by tanh there.
T5_FEED_FORWARD = {**PLAIN, "gated-gelu": "geglu_tanh"} | {
    f"gated-{name}": value for name, value in GATED_NAMES.items() if value != "geglu"
}


def t5_head(has_scale: bool) -> KeyRule:
    """Return the row of the output layer.

    tie_word_embeddings ties it, and its input is then divided by sqrt(d_model) (T5 1.0). In
    transformers 5 it means only the division, and the layer is tied where no other is stored; where
    it is not known what is stored, the key decides. mT5 has no division.
    """

    def read(hf: HFConfig) -> ConfigFields:
        is_tied = hf.get("tie_word_embeddings") is not False
        logit_scale = "none"
        if has_scale and hf.get("scale_decoder_outputs", is_tied):
            logit_scale = "rsqrt"
        if hf.names is not None and "lm_head.weight" not in hf.names:
            is_tied = True
        return {"tied_head": is_tied, "head.scale": logit_scale}

    def write(config: ModelConfig) -> Keys:
        keys: Keys = {"tie_word_embeddings": config.tied_head}
        if has_scale:
            keys["scale_decoder_outputs"] = config.head.scale == "rsqrt"
        return keys

    return KeyRule(read, write)


def t5_shared_fields(activation: str) -> tuple[KeyMapping, ...]:
    """Return the keys of a model with one stack or two."""
    return (
        Constant({"norm": "rms", "positions": "t5", "attention.scale": 1.0}),
        *keys("vocab_size d_model d_ff num_heads"),
        *keys(d_kv=64, layer_norm_epsilon=1e-6, n_positions=512),
        Key("relative_attention_num_buckets", "relative.buckets", 32),
        Key("relative_attention_max_distance", "relative.distance", 128),
        Choice("feed_forward_proj", "activation", T5_FEED_FORWARD, activation),
        Dropout("dropout_rate"),
        IgnoredKeys("dense_act_fn is_gated_act"),
    )


def t5_stack(side: str, stack: str, config: ModelConfig) -> tuple[TensorRow, ...]:
    """Return the rows of one stack; `stack` begins its paths in the params."""
    layer = f"{side}.block.{{}}.layer."
    # Behind attention, in a decoder also to the source.
    ffn = STACKS.index(side) + 1
    up = "wi"
    if config.gated:
        up = "wi_1"
    bias_name = "0.SelfAttention.relative_attention_bias.weight"
    return (
        *projections(f"{layer}0.SelfAttention", "o", f"{stack}blocks.attention", end=""),
        *projections(f"{layer}1.EncDecAttention", "o", f"{stack}blocks.cross", end=""),
        *block(
            layer,
            LINEAR,
            stack,
            attention_norm="0.layer_norm",
            cross_norm="1.layer_norm",
            gate=f"{ffn}.DenseReluDense.wi_0",
            up=f"{ffn}.DenseReluDense.{up}",
            down=f"{ffn}.DenseReluDense.wo",
            ffn_norm=f"{ffn}.layer_norm",
        ),
        # A table of each layer, or one for all, which lies in the first of them.
        TensorRow(layer + bias_name, f"{stack}blocks.attention.relative_bias"),
        TensorRow(layer.format(0) + bias_name, f"{stack}relative_bias"),
        *norm(f"{side}.final_layer_norm", f"{stack}final_norm"),
    )


# Of a bug of 2019; never read.
UNUSED_BIAS = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
EMBEDDING_NAMES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5_like(
    model_type: str, name: str, mappings: Sequence[KeyMapping], has_scale: bool = True
) -> tuple[Family, Family]:
    """Return the encoder of a T5 alone, also out of the files of both stacks, and the family of
    encoder-decoders. `name` begins its classes."""
    both_stacks = (
        Constant({"family": "encoder_decoder"}),
        Key("num_layers", "n_encoder_layers", needed=True),
        Key("num_decoder_layers", "n_layers", instead="num_layers", needed=True),
        t5_head(has_scale),
    )
    # The keys of the decoder are not read, and it is written that there is none.
    encoder_alone = (
        Constant({"family": "encoder"}),
        *keys("num_layers"),
        IgnoredKeys(
            "num_decoder_layers scale_decoder_outputs tie_word_embeddings",
            written={"is_encoder_decoder": False},
        ),
    )
    embedding = TensorRow("shared.weight", "embed.tokens")
    both = Family(
        model_type,
        {f"{name}ForConditionalGeneration": {}},
        (*mappings, *both_stacks),
        lambda config: (
            embedding,
            TensorRow("lm_head.weight", "head.weight"),
            *t5_stack("encoder", "encoder.", config),
            *t5_stack("decoder", "", config),
        ),
        bases=(f"{name}Model", f"{name}WithLMHeadModel"),
        copies=tied_copy("lm_head.weight", *EMBEDDING_NAMES),
        ignored=(UNUSED_BIAS,),
    )
    alone = Family(
        model_type,
        {f"{name}EncoderModel": {"head.kind": "none"}},
        (*mappings, *encoder_alone),
        lambda config: (embedding, *t5_stack("encoder", "", config)),
        copies=lambda config: (Copy("encoder.embed_tokens.weight", "shared.weight"),),
        ignored=(r"^decoder\.", r"^lm_head\."),
    )
    return alone, both


T5_ENCODER, T5 = t5_like("t5", "T5", t5_shared_fields("relu"))
MT5_KEYS = t5_shared_fields("gated-gelu")
MT5_ENCODER, MT5 = t5_like("mt5", "MT5", MT5_KEYS, has_scale=False)
UMT5_KEYS = (*MT5_KEYS, Constant({"relative.bias": "layer"}))
UMT5_ENCODER, UMT5 = t5_like("umt5", "UMT5", UMT5_KEYS)


# T5Gemma (arXiv:2504.06225): an encoder-decoder of the layers of Gemma 2.

# The keys of one stack, in a table of its own; dropout and ties are those of the model.
STACK_KEYS = (
    *(row for row in SIZES_OF_ALL if not isinstance(row, Dropout)),
    *GEMMA_BLOCK,
    *GEMMA2_CAPS,
    RopeKeys(),
    Windows(every=2),
    IgnoredKeys("dropout_rate tie_word_embeddings"),
)
ENCODER, DECODER = (KeyTable(side, STACK_KEYS) for side in ("encoder", "decoder"))
KEY_OF_FIELD = {row.field: row.hf for row in STACK_KEYS if isinstance(row, Key)}
KEY_OF_FIELD["rope.theta"] = "rope_theta"


def read_both_stacks(hf: HFConfig) -> ConfigFields:
    """Return the fields of the tables of the two stacks, which may differ in their depth and the
    width of their window.

    In transformers the window of the encoder has as many tokens on each side beside the token
    itself, and that of the decoder counts the token in.
    """
    encoder = ENCODER.read(hf)
    decoder = DECODER.read(hf)
    for side in (encoder, decoder):
        side.pop("rope.window_theta", None)  # both kinds of layers have one base
        side.setdefault("window", 0)
        side.setdefault("window_pattern", "f" * side["n_layers"])
    both = {
        "n_encoder_layers": encoder.pop("n_layers"),
        "n_layers": decoder.pop("n_layers"),
        "source_window": encoder.pop("window"),
        "window": decoder.pop("window"),
    }
    if both["source_window"]:
        both["source_window"] += 1
    patterns = (encoder.pop("window_pattern"), decoder.pop("window_pattern"))
    shorter, longer = sorted(patterns, key=len)
    if not longer.startswith(shorter):
        kinds = hf.table("encoder").get("layer_types")
        raise hf.unsupported("encoder.layer_types", kinds, ["those of the decoder"])
    for field in encoder.keys() | decoder.keys():
        if encoder.get(field) != decoder.get(field):
            key = f"encoder.{KEY_OF_FIELD.get(field, field)}"
            raise hf.unsupported(key, encoder.get(field), [decoder.get(field)])
    return decoder | both | {"window_pattern": longer}


def written_both_stacks(config: ModelConfig) -> Keys:
    on_each_side = max((config.source_window or config.window) - 1, 0)
    encoder = dataclasses.replace(
        config, n_layers=config.encoder_layers, window=on_each_side, source_window=0
    )
    return ENCODER.write(encoder) | DECODER.write(config)


def t5gemma_stack(side: str, stack: str) -> tuple[TensorRow, ...]:
    """Return the rows of one stack; `stack` begins its paths in the params."""
    layer = f"model.{side}.layers.{{}}."
    return (
        TensorRow(f"model.{side}.embed_tokens.weight", f"{stack}embed.tokens"),
        *projections(layer + "self_attn", "o_proj", f"{stack}blocks.attention"),
        *projections(layer + "cross_attn", "o_proj", f"{stack}blocks.cross"),
        *block(
            layer,
            LINEAR,
            stack,
            attention_norm="pre_self_attn_layernorm",
            attention_output_norm="post_self_attn_layernorm",
            cross_norm="pre_cross_attn_layernorm",
            cross_output_norm="post_cross_attn_layernorm",
            gate="mlp.gate_proj",
            up="mlp.up_proj",
            down="mlp.down_proj",
            ffn_norm="pre_feedforward_layernorm",
            ffn_output_norm="post_feedforward_layernorm",
        ),
        *norm(f"model.{side}.norm", f"{stack}final_norm"),
    )


HEAD = "lm_head.out_proj.weight"
T5GEMMA = Family(
    "t5gemma",
    {"T5GemmaForConditionalGeneration": {}},
    (
        Constant({"family": "encoder_decoder", "embedding.source": "separate"}),
        KeyRule(read_both_stacks, written_both_stacks),
        # The tables of the stacks have it.
        AliasKey("vocab_size", "decoder.vocab_size", "vocab_size"),
        Dropout("dropout_rate attention_dropout"),
        tied(True),
    ),
    lambda config: (
        *t5gemma_stack("encoder", "encoder."),
        *t5gemma_stack("decoder", ""),
        TensorRow(HEAD, "head.weight"),
    ),
    prefix="model.",
    bases=("T5GemmaModel",),
    copies=tied_copy(HEAD, "model.decoder.embed_tokens.weight"),
    ignored=(INV_FREQ,),
)
