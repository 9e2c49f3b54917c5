"""Decoders with layer norms: GPT-2, GPT-NeoX, BLOOM, GPT-J, GPT-Neo, OPT, Falcon, MPT and
Starcoder2."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop.family import INV_FREQ, decoder_like
from jaxformer.interop.fields import (
    MOST_LAYERS,
    PLAIN,
    SIZES,
    AliasKey,
    Biases,
    Choice,
    ConfigFields,
    Constant,
    DivisibleHeads,
    Dropout,
    FixedKey,
    IgnoredKeys,
    Key,
    KeyRule,
    Keys,
    KeyTable,
    Windows,
    fixed,
    keys,
    letters,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import ATTENTION, FFN, LAYER, ROWS, sizes
from jaxformer.interop.rope import Length, RopeKeys
from jaxformer.interop.tensor_table import (
    BY_HEAD,
    CONV,
    QKV,
    TensorRow,
    block,
    linear,
    norm,
    projections,
    with_rows,
)
from jaxformer.layers.pattern import layer_configs

# GPT-2 (Radford et al. 2019).
H_LAYER = "transformer.h.{}."
GPT2 = decoder_like(
    "gpt2",
    "GPT2",
    (
        TensorRow("transformer.wpe.weight", "embed.positions"),
        *block(
            H_LAYER,
            CONV,
            attention_norm="ln_1",
            qkv="attn.c_attn",
            out="attn.c_proj",
            ffn_norm="ln_2",
            up="mlp.c_fc",
            down="mlp.c_proj",
        ),
        *norm("transformer.ln_f", "final_norm"),
    ),
    (
        Constant({"norm": "layer", "bias": "all", "positions": "learned"}),
        *keys("vocab_size n_positions n_embd n_layer n_head layer_norm_epsilon", n_inner=None),
        Choice("activation_function", "activation", PLAIN, "gelu_new"),
        Choice("scale_attn_weights", "attention.scale", {True: 0.0, False: 1.0}, True),
        *fixed(scale_attn_by_inverse_layer_idx=False),
        Dropout("resid_pdrop embd_pdrop attn_pdrop"),
        # Read by llama.cpp's converter.
        AliasKey("n_ctx", "n_positions", "max_length"),
    ),
    "transformer.wte.weight",
    model="LMHeadModel",
    is_tied=True,
    ignored=(r"\.attn\.(masked_)?bias$",),
)

# GPT-NeoX (arXiv:2204.06745), also the architecture of Pythia.
NEOX_LAYER = "gpt_neox.layers.{}."
GPT_NEOX = decoder_like(
    "gpt_neox",
    "GPTNeoX",
    (
        *linear(NEOX_LAYER + "attention.query_key_value", QKV, BY_HEAD),
        *block(
            NEOX_LAYER,
            attention_norm="input_layernorm",
            out="attention.dense",
            ffn_norm="post_attention_layernorm",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
        ),
        *norm("gpt_neox.final_layer_norm", "final_norm"),
    ),
    (
        Constant({"norm": "layer"}),
        DivisibleHeads(),
        *keys(SIZES, layer_norm_eps=1e-5),
        Length(2048),
        Choice("hidden_act", "activation", PLAIN, "gelu"),
        Choice("use_parallel_residual", "residual", {True: "parallel", False: "sequential"}, True),
        RopeKeys(theta=("rotary_emb_base", 10_000.0), fraction=("rotary_pct", 0.25)),
        AliasKey("rope_theta", "rotary_emb_base", "rope.theta", checked=True),
        AliasKey("partial_rotary_factor", "rotary_pct", "rope.fraction", checked=True),
        Biases({"attention_bias": (ATTENTION, True)}, always=frozenset({"ffn", "norm"})),
        Dropout("attention_dropout hidden_dropout"),
    ),
    "gpt_neox.embed_in.weight",
    head="embed_out.weight",
    # The name of the output layer in the class of transformers 5, by which peft adapts it.
    module_rows=(TensorRow("lm_head.weight", "head.weight"),),
    renamed=((r"^embed_out\b", "lm_head"),),
    ignored=(r"\.attention\.(masked_)?bias$", INV_FREQ),
)

# The layers of BLOOM and Falcon without their norms.
H_TRUNK = (
    *linear(H_LAYER + "self_attention.query_key_value", QKV, BY_HEAD),
    *block(H_LAYER, out="self_attention.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    *norm("transformer.ln_f", "final_norm"),
)

# BLOOM (arXiv:2211.05100): ALiBi, and a norm after the embedding.
BLOOM = decoder_like(
    "bloom",
    "Bloom",
    (
        *norm("transformer.word_embeddings_layernorm", "embed.norm"),
        *H_TRUNK,
        *block(H_LAYER, attention_norm="input_layernorm", ffn_norm="post_attention_layernorm"),
    ),
    (
        Constant(
            {
                "norm": "layer",
                "bias": "all",
                "positions": "alibi",
                "embedding.norm": True,
                "activation": "gelu_tanh",
            }
        ),
        Key("hidden_size", "d_model", instead="n_embed", needed=True),
        Key("n_layer", "n_layers", instead="num_hidden_layers", needed=True),
        Key("n_head", "n_heads", instead="num_attention_heads", needed=True),
        *keys("vocab_size", layer_norm_epsilon=1e-5, seq_length=2048),
        *fixed(apply_residual_connection_post_layernorm=False),
        Dropout("hidden_dropout attention_dropout"),
        # It would leave out biases with pretraining_tp > 1.
        *fixed(slow_but_exact=False),
        IgnoredKeys("offset_alibi pretraining_pp skip_bias_add skip_bias_add_qkv n_inner"),
    ),
    "transformer.word_embeddings.weight",
    ignored=(),
    is_tied=True,
)


def read_rotary_width(hf: HFConfig) -> ConfigFields:
    """Return the part of a head that RoPE rotates, of which rotary_dim is the width."""
    rotated = hf.number("rotary_dim")
    head_width = hf.number("n_embd") // hf.positive("n_head")
    if not 0 < rotated <= head_width or int(head_width * (rotated / head_width)) != rotated:
        raise hf.unsupported("rotary_dim", rotated, [f"an even number up to {head_width}"])
    return {"rope.fraction": rotated / head_width}


# GPT-J (Wang and Komatsuzaki 2021): attention and feed-forward read the same norm.


GPTJ = decoder_like(
    "gptj",
    "GPTJ",
    (
        *projections(H_LAYER + "attn", "out_proj"),
        *block(H_LAYER, attention_norm="ln_1", up="mlp.fc_in", down="mlp.fc_out"),
        *norm("transformer.ln_f", "final_norm"),
        TensorRow("lm_head.bias", "head.bias"),
    ),
    (
        Constant(
            {"norm": "layer", "bias": "ffn_norm", "residual": "parallel_shared", "head.bias": True}
        ),
        Constant({"positions": "rope", "rope.pairing": "interleaved", "rope.theta": 10_000.0}),
        *keys("vocab_size n_positions n_embd n_layer n_head layer_norm_epsilon", n_inner=None),
        KeyRule(read_rotary_width, lambda config: {"rotary_dim": config.rotated_width}),
        Choice("activation_function", "activation", PLAIN, "gelu_new"),
        *fixed(scale_attn_weights=True),
        Dropout("resid_pdrop embd_pdrop attn_pdrop"),
        IgnoredKeys("rotary"),
    ),
    "transformer.wte.weight",
    base="",
    ignored=(r"\.attn\.(masked_)?bias$",),
)

GLOBAL = "global"
LOCAL = "local"


def read_local_layers(hf: HFConfig) -> ConfigFields:
    """Return which layers have a window: attention_types has lists of kinds of layers, each with
    the number of times that it repeats."""
    layers = hf.number("num_layers")
    types = hf.get("attention_types")
    if types is None:
        types = [[[GLOBAL, LOCAL], 12]]
    kinds: list[str] = []
    for entry in types if isinstance(types, list) else [types]:
        match entry:
            case [list(part), int(times)] if times * len(part) <= MOST_LAYERS:
                kinds += part * times
            case _:
                kinds.append("of another structure")
    if len(kinds) != layers or not {*map(str, kinds)} <= {GLOBAL, LOCAL}:
        allowed = [[[[GLOBAL, LOCAL], f"times that give num_layers={layers}"]]]
        raise hf.unsupported("attention_types", types, allowed)
    window = hf.number("window_size", 256)
    if window < 1 or LOCAL not in kinds:
        return {}
    return {"window": window, "window_pattern": letters(map(LOCAL.__eq__, kinds), "w", "f")}


def written_local_layers(config: ModelConfig) -> Keys:
    layers = layer_configs(config, config.n_layers)
    kinds = [LOCAL if layer.window else GLOBAL for layer in layers]
    return {
        "attention_types": [[kinds, 1]],
        "attention_layers": kinds,
        "window_size": config.window or 256,
    }


# GPT-Neo (Black et al. 2021): every second layer has a window, and scores are not scaled.
GPT_NEO = decoder_like(
    "gpt_neo",
    "GPTNeo",
    (
        TensorRow("transformer.wpe.weight", "embed.positions"),
        *projections(H_LAYER + "attn.attention", "out_proj"),
        *block(H_LAYER, attention_norm="ln_1", ffn_norm="ln_2", up="mlp.c_fc", down="mlp.c_proj"),
        *norm("transformer.ln_f", "final_norm"),
    ),
    (
        Constant(
            {"norm": "layer", "bias": "all_but_qkv", "positions": "learned", "attention.scale": 1.0}
        ),
        *keys(
            "vocab_size max_position_embeddings hidden_size num_layers num_heads"
            " layer_norm_epsilon",
            intermediate_size=None,
        ),
        KeyRule(read_local_layers, written_local_layers),
        Choice("activation_function", "activation", PLAIN, "gelu_new"),
        Dropout("resid_dropout embed_dropout attention_dropout"),
        # It repeats attention_types.
        IgnoredKeys("attention_layers"),
    ),
    "transformer.wte.weight",
    is_tied=True,
    ignored=(r"\.attn\.attention\.(masked_)?bias$",),
)

# OPT (arXiv:2205.01068).
OPT_LAYER = "model.decoder.layers.{}."
OPT = decoder_like(
    "opt",
    "OPT",
    (
        TensorRow("model.decoder.embed_positions.weight", "embed.positions"),
        *projections(OPT_LAYER + "self_attn", "out_proj"),
        *block(
            OPT_LAYER,
            attention_norm="self_attn_layer_norm",
            ffn_norm="final_layer_norm",
            up="fc1",
            down="fc2",
        ),
        *norm("model.decoder.final_layer_norm", "final_norm"),
    ),
    (
        Constant(
            {
                "norm": "layer",
                "norm_eps": 1e-5,
                "positions": "learned",
                "embedding.position_offset": 2,
            }
        ),
        *keys(
            "vocab_size max_position_embeddings hidden_size num_hidden_layers num_attention_heads"
            " ffn_dim"
        ),
        Choice("activation_function", "activation", PLAIN, "relu"),
        Choice("do_layer_norm_before", "norm_placement", {True: "pre", False: "post"}, True),
        Biases(
            {"enable_bias": (frozenset({"qkv", "out", "ffn"}), True)}, always=frozenset({"norm"})
        ),
        # Embeddings of another width than the model, as in OPT-350m, have two matrices beside them.
        AliasKey("word_embed_proj_dim", "hidden_size", "d_model", checked=True),
        *fixed(_remove_final_layer_norm=False, layer_norm_elementwise_affine=True),
        Dropout("dropout attention_dropout"),
    ),
    "model.decoder.embed_tokens.weight",
    ignored=(),
    is_tied=True,
)


# Falcon and MPT: decoders with layer norms and few biases, whose queries, keys and values are one
# matrix.


def read_falcon_blocks(hf: HFConfig) -> ConfigFields:
    """Return the number of key heads and the residual connection of Falcon, which four keys state.

    The new architecture has groups of heads, and parallel sublayers with a norm for each
    (Falcon-40B) or one for both (Falcon2-11B). The old one has one key head or as many as heads,
    and parallel sublayers with one norm (Falcon-7B) or sequential ones.
    """
    kv_heads = hf.number("num_attention_heads")
    is_parallel = hf.flag("parallel_attn", True)
    has_one_key = hf.flag("multi_query", True)
    residual = "parallel_shared" if is_parallel else "sequential"
    # Which the old architecture ignores where it has no use for them.
    stated_heads = hf.get("num_kv_heads")
    norms = hf.get("num_ln_in_parallel_attn")
    if hf.flag("new_decoder_architecture", False):
        hf.only("parallel_attn", (True,))
        hf.only("num_ln_in_parallel_attn", (2, 1, None))
        if norms != 1:
            residual = "parallel"
        if stated_heads is not None:
            kv_heads = hf.number("num_kv_heads")
        return {"n_kv_heads": kv_heads, "residual": residual}
    if is_parallel:
        hf.only("num_ln_in_parallel_attn", (1, None))
    if has_one_key:
        kv_heads = 1
    else:
        hf.only("num_kv_heads", (kv_heads, None))
    return {"n_kv_heads": kv_heads, "residual": residual}


def written_falcon_blocks(config: ModelConfig) -> Keys:
    keys: Keys = {
        "new_decoder_architecture": False,
        "multi_query": config.kv_heads == 1,
        "num_kv_heads": config.n_heads,
        "parallel_attn": config.residual != "sequential",
        "num_ln_in_parallel_attn": None,
    }
    if config.residual == "parallel" or config.kv_heads not in (1, config.n_heads):
        keys |= {
            "new_decoder_architecture": True,
            "num_kv_heads": config.kv_heads,
            "num_ln_in_parallel_attn": 2 if config.residual == "parallel" else 1,
        }
    return keys


# Falcon (arXiv:2311.16867).

# The names of the norms before attention and feed-forward, by the residual connection.
FALCON_NORMS = {
    "sequential": {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "parallel": {"attention_norm": "ln_attn", "ffn_norm": "ln_mlp"},
    "parallel_shared": {"attention_norm": "input_layernorm"},
}
FALCON = decoder_like(
    "falcon",
    "Falcon",
    lambda config: (*H_TRUNK, *block(H_LAYER, **FALCON_NORMS[config.residual])),
    (
        Constant({"norm": "layer"}),
        DivisibleHeads(),
        Key("hidden_size", "d_model", instead="n_embed", needed=True),
        *keys(
            "vocab_size num_hidden_layers num_attention_heads",
            ffn_hidden_size=None,
            layer_norm_epsilon=1e-5,
        ),
        KeyRule(read_falcon_blocks, written_falcon_blocks),
        Choice("activation", "activation", PLAIN, "gelu"),
        Biases({"bias": (frozenset({"qkv", "out", "ffn"}), False)}, always=frozenset({"norm"})),
        # transformers 5 adds ALiBi once or twice, depending on the kernel, rounded to bfloat16.
        FixedKey("alibi", (False, None)),
        Length(2048),
        RopeKeys(),
        Dropout("attention_dropout hidden_dropout"),
        IgnoredKeys("apply_residual_connection_post_layernorm ff_factor rotary"),
    ),
    "transformer.word_embeddings.weight",
    is_tied=True,
)


def read_softmax_scale(hf: HFConfig) -> ConfigFields:
    """Return the factor of the scores; null is 1 / sqrt(head width)."""
    if hf.get("softmax_scale") is None:
        return {}
    return {"attention.scale": float(hf.positive("softmax_scale", 0))}


def written_softmax_scale(config: ModelConfig) -> Keys:
    if config.attention.scale == config.head_width**-0.5:
        return {"softmax_scale": None}
    return {"softmax_scale": config.attention.scale}


# MPT (MosaicML 2023). transformers computes all as one kind: with ALiBi, without biases, with a
# feed-forward of four times the width, whatever other keys say.

MPT_LAYER = "transformer.blocks.{}."
MPT = decoder_like(
    "mpt",
    "Mpt",
    (
        *block(
            MPT_LAYER,
            attention_norm="norm_1",
            qkv="attn.Wqkv",
            out="attn.out_proj",
            ffn_norm="norm_2",
            up="ffn.up_proj",
            down="ffn.down_proj",
        ),
        *norm("transformer.norm_f", "final_norm"),
    ),
    (
        Constant({"norm": "layer", "positions": "alibi", "activation": "gelu"}),
        *keys("vocab_size d_model n_layers n_heads", max_seq_len=2048, layer_norm_epsilon=1e-5),
        KeyTable(
            "attn_config",
            (
                KeyRule(read_softmax_scale, written_softmax_scale),
                *fixed(alibi=True, alibi_bias_max=8),
                FixedKey("clip_qkv", (None, 0)),
                *fixed(
                    qk_ln=False,
                    prefix_lm=False,
                    attn_type="multihead_attention",
                    attn_uses_sequence_id=False,
                ),
                # A rate that transformers 5 takes as a whole number alone.
                IgnoredKeys("attn_pdrop attn_impl"),
            ),
        ),
        *fixed(expansion_ratio=4, no_bias=True, logit_scale=None),
        Dropout("resid_pdrop emb_pdrop"),
        IgnoredKeys(
            "init_device learned_pos_emb embedding_fraction norm_type init_config"
            " tokenizer_name verbose"
        ),
    ),
    "transformer.wte.weight",
    ignored=(),
    is_tied=True,
)

# Starcoder2 (arXiv:2402.19173): layer norms, biases, and a feed-forward layer without a gate.
# It has the tensors of Llama, and is behind Falcon, which is the plainer one of the two.
STARCODER2 = decoder_like(
    "starcoder2",
    "Starcoder2",
    with_rows(ROWS, *block(LAYER, up="mlp.c_fc", down="mlp.c_proj")),
    (
        *sizes("rms_norm_eps"),
        *keys(norm_epsilon=1e-5),
        Dropout("residual_dropout embedding_dropout"),
        Constant({"norm": "layer"}),
        Choice("hidden_act", "activation", PLAIN, "gelu_pytorch_tanh"),
        RopeKeys(),
        Windows(kinds=False, default_window=None),
        Biases({"use_bias": (ATTENTION | FFN, True)}, always=frozenset({"norm"})),
        # Of the published files, which transformers does not read.
        IgnoredKeys("layer_norm_epsilon mlp_type norm_type scale_attn_weights"),
    ),
    is_tied=True,
)
