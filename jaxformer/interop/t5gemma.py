"""T5Gemma (arXiv:2504.06225): an encoder-decoder of the layers of Gemma 2."""

import dataclasses

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Family, tied_copy
from jaxformer.interop.fields import ConfigFields, KeyMapping, Keys, Windows
from jaxformer.interop.gemma import GEMMA2_CAPS, GEMMA2_SIZES, GEMMA_BLOCK, GEMMA_LAYERS
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import INV_FREQ
from jaxformer.interop.rope import Rope
from jaxformer.interop.tensor_table import TensorRow, linear, norm, projections

# The keys of one stack, in a table of its own; dropout and ties are those of the model.
STACK_KEYS = (
    *(row for row in GEMMA2_SIZES if not isinstance(row, fields.Dropout)),
    *GEMMA_BLOCK,
    *GEMMA2_CAPS,
    Rope(),
    Windows(GEMMA_LAYERS, every=2),
    fields.IgnoredKeys("dropout_rate tie_word_embeddings"),
)
ENCODER, DECODER = (fields.KeyTable(side, STACK_KEYS) for side in ("encoder", "decoder"))
KEY_OF_FIELD = {row.field: row.hf for row in STACK_KEYS if isinstance(row, fields.Key)}


class BothStacks(KeyMapping):
    """The tables of the two stacks, which may differ in their depth and the width of their window.

    In transformers the window of the encoder has as many tokens on each side beside the token
    itself, and that of the decoder counts the token in.
    """

    def read(self, hf: HFConfig) -> ConfigFields:
        encoder, decoder = ENCODER.read(hf), DECODER.read(hf)
        depths = encoder.pop("n_layers"), decoder.pop("n_layers")
        windows = encoder.pop("window", 0), decoder.pop("window", 0)
        source_pattern = encoder.pop("window_pattern", "f" * depths[0])
        target_pattern = decoder.pop("window_pattern", "f" * depths[1])
        shorter, longer = sorted((source_pattern, target_pattern), key=len)
        if not longer.startswith(shorter):
            kinds = hf.table("encoder").get("layer_types")
            raise hf.unsupported("encoder.layer_types", kinds, ["those of the decoder"])
        for field in encoder.keys() | decoder.keys():
            if encoder.get(field) != decoder.get(field):
                key = f"encoder.{KEY_OF_FIELD.get(field, field)}"
                raise hf.unsupported(key, encoder.get(field), [decoder.get(field)])
        return decoder | {
            "n_encoder_layers": depths[0],
            "n_layers": depths[1],
            "source_window": windows[0] + 1 if windows[0] else 0,
            "window": windows[1],
            "window_pattern": longer,
        }

    def write(self, config: ModelConfig) -> Keys:
        on_each_side = max(config.source_window - 1, 0)
        encoder = dataclasses.replace(
            config, n_layers=config.encoder_layers, window=on_each_side, source_window=0
        )
        return ENCODER.write(encoder) | DECODER.write(config)


def stack(side: str, prefix: str) -> tuple[TensorRow, ...]:
    """The rows of one stack; `prefix` begins its paths in the params."""
    layer, blocks = f"model.{side}.layers.{{}}.", f"{prefix}blocks."
    sublayers = {"self_attn": "attention", "cross_attn": "cross"}
    if side == "encoder":
        del sublayers["cross_attn"]
    tensor_rows: list[TensorRow] = []
    for name, sublayer in sublayers.items():
        tensor_rows += projections(layer + name, "o_proj", blocks + sublayer)
    for leaf in ("gate", "up", "down"):
        tensor_rows += linear(f"{layer}mlp.{leaf}_proj", f"{blocks}ffn.{leaf}")
    for name, sublayer in (sublayers | {"feedforward": "ffn"}).items():
        tensor_rows += norm(f"{layer}pre_{name}_layernorm", f"{blocks}{sublayer}_norm")
        tensor_rows += norm(f"{layer}post_{name}_layernorm", f"{blocks}{sublayer}_output_norm")
    return (
        TensorRow(f"model.{side}.embed_tokens.weight", f"{prefix}embed.tokens"),
        *tensor_rows,
        *norm(f"model.{side}.norm", f"{prefix}final_norm"),
    )


HEAD = "lm_head.out_proj.weight"
ROWS = (*stack("encoder", "encoder."), *stack("decoder", ""), TensorRow(HEAD, "head.weight"))
T5GEMMA = Family(
    "t5gemma",
    {"T5GemmaForConditionalGeneration": {}},
    (
        fields.Constant(family="encoder_decoder", source_embedding="separate"),
        BothStacks(),
        # The tables of the stacks have it.
        fields.AliasKey("vocab_size", "decoder.vocab_size", "vocab_size"),
        fields.Dropout("dropout_rate attention_dropout"),
        fields.IgnoredKeys("classifier_dropout_rate"),
        fields.tied(True),
    ),
    lambda config: ROWS,
    prefix="model.",
    bases=("T5GemmaModel",),
    copies=tied_copy(HEAD, "model.decoder.embed_tokens.weight"),
    ignored=(INV_FREQ,),
    covers="layers of Gemma 2 in both stacks, of different depth; windows; soft caps; an embedding"
    " of the source; stacks of different width (9b-2b) and T5Gemma 2 are refused",
)
