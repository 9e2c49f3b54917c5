"""BART (arXiv:1910.13461), and what Marian shares with it."""

from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import (
    PLAIN,
    Choice,
    Constant,
    Dropout,
    FixedKey,
    IgnoredKeys,
    Key,
    KeyMapping,
    Ours,
    Present,
    Tied,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.table import AS_ROW, TensorRow, linear, norm

STACKS = ("encoder", "decoder")


class SharedSizes:
    """Sizes that the file states for both stacks, and that are one here."""

    keys = (("ffn_dim", "d_ff", 4096), ("attention_heads", "n_heads", 16))

    def read(self, hf: HFConfig) -> Ours:
        found = {}
        for name, ours, default in self.keys:
            found[ours] = hf.get(f"encoder_{name}", default)
            if hf.get(f"decoder_{name}", default) != found[ours]:
                hf.only(f"decoder_{name}", (found[ours],))
        return found

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {
            f"{side}_{name}": getattr(ours, field)
            for name, field, _ in self.keys
            for side in STACKS
        }


def fields(vocab_size: int) -> tuple[KeyMapping, ...]:
    """The keys that both have."""
    return (
        Constant(family="encoder_decoder", norm="layer", norm_placement="post", bias="all"),
        Key("vocab_size", "vocab_size", vocab_size),
        Key("d_model", "d_model", 1024),
        Key("encoder_layers", "n_encoder_layers", 12),
        Key("decoder_layers", "n_layers", 12),
        SharedSizes(),
        Key("max_position_embeddings", "max_length", 1024),
        Choice("activation_function", "activation", PLAIN, "gelu"),
        Choice("scale_embedding", "embedding_scale", {False: "none", True: "sqrt"}, False),
        Present("final_logits_bias", "head_bias"),
        Tied(True),
        Dropout(("dropout", "attention_dropout")),
        IgnoredKeys(
            (
                "encoder_layerdrop",
                "decoder_layerdrop",
                "activation_dropout",
                "classifier_dropout",
                "classif_dropout",
                "init_std",
            )
        ),
        IgnoredKeys(
            (
                "num_hidden_layers",
                "hidden_size",
                "num_attention_heads",
                "extra_pos_embeddings",
                "force_bos_token_to_be_generated",
            )
        ),
        IgnoredKeys(("add_bias_logits", "gradient_checkpointing", "static_position_embeddings")),
        # Of the first transformers with these models, whose code served others too.
        *(FixedKey(key, (False,)) for key in ("normalize_before", "add_final_layer_norm")),
    )


def stack(side: str, ours: str) -> tuple[TensorRow, ...]:
    """The rows of one stack; `ours` goes before its paths."""
    layer, parts = (
        f"model.{side}.layers.{{}}.",
        {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"},
    )
    sublayers = {"self_attn": "attention"} | ({} if ours else {"encoder_attn": "cross"})
    found = [
        row
        for name, block in sublayers.items()
        for row in (
            *(
                row
                for part, leaf in parts.items()
                for row in linear(f"{layer}{name}.{part}", f"{ours}blocks.{block}.{leaf}")
            ),
            *norm(f"{layer}{name}_layer_norm", f"{ours}blocks.{block}_norm"),
        )
    ]
    return (
        *found,
        *linear(layer + "fc1", f"{ours}blocks.ffn.up"),
        *linear(layer + "fc2", f"{ours}blocks.ffn.down"),
        *norm(layer + "final_layer_norm", f"{ours}blocks.ffn_norm"),
        TensorRow(f"model.{side}.embed_positions.weight", f"{ours}embed.positions"),
        *norm(f"model.{side}.layernorm_embedding", f"{ours}embed.norm"),
    )


ROWS = (
    TensorRow("model.shared.weight", "embed.tokens"),
    TensorRow("lm_head.weight", "head.weight"),
    TensorRow("final_logits_bias", "head.bias", AS_ROW),
    *stack("encoder", "encoder."),
    *stack("decoder", ""),
)


BART = Family(
    "bart",
    {"BartForConditionalGeneration": {}},
    (
        *fields(50265),
        Constant(positions="learned", position_offset=2, embedding_norm=True),
        FixedKey("normalize_embedding", (True,)),
    ),
    lambda config: ROWS,
    prefix="model.",
    bases=("BartModel",),
    copies=tied_copy(
        "lm_head.weight",
        "model.shared.weight",
        *(f"model.{side}.embed_tokens.weight" for side in STACKS),
    ),
)
