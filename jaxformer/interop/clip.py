"""The text encoder of CLIP (arXiv:2103.00020): a decoder without an output layer, and with the
projection of the last token of a text, which is its EOS."""

from jaxformer.config.model import ModelConfig
from jaxformer.interop import fields
from jaxformer.interop.family import Family
from jaxformer.interop.tensor_table import TensorRow, linear, norm, projections


class ProjectionWidth(fields.Key):
    """The width of the vector of a text, which a model without the projection states too."""

    def write(self, config: ModelConfig) -> fields.Keys:
        return {self.hf: config.projection_width or config.d_model}


CLIP_FIELDS = (
    fields.Constant(norm="layer", bias="all", positions="learned", pooling="last"),
    fields.DivisibleHeads(),
    fields.Key("vocab_size", "vocab_size", 49408),
    fields.Key("hidden_size", "d_model", 512),
    fields.Key("intermediate_size", "d_ff", 2048),
    fields.Key("num_hidden_layers", "n_layers", 12),
    fields.Key("num_attention_heads", "n_heads", 8),
    fields.Key("max_position_embeddings", "max_length", 77),
    ProjectionWidth("projection_dim", "projection_width", 512),
    fields.Key("layer_norm_eps", "norm_eps", 1e-5),
    fields.Choice("hidden_act", "activation", fields.PLAIN, "quick_gelu"),
    fields.Dropout("attention_dropout"),
    # Older files have it, and it is of no layer.
    fields.IgnoredKeys("initializer_factor dropout"),
)


def rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    base = "text_model."
    layer = base + "encoder.layers.{}."
    trunk = (
        TensorRow(base + "embeddings.token_embedding.weight", "embed.tokens"),
        TensorRow(base + "embeddings.position_embedding.weight", "embed.positions"),
        *norm(layer + "layer_norm1", "blocks.attention_norm"),
        *projections(layer + "self_attn", "out_proj"),
        *norm(layer + "layer_norm2", "blocks.ffn_norm"),
        *linear(layer + "mlp.fc1", "blocks.ffn.up"),
        *linear(layer + "mlp.fc2", "blocks.ffn.down"),
        *norm(base + "final_layer_norm", "final_norm"),
    )
    if config.output == "none":
        return tuple(row._replace(hf=row.hf.removeprefix(base)) for row in trunk)
    return (*trunk, TensorRow("text_projection.weight", "head.weight"))


CLIP_TEXT = Family(
    "clip_text_model",
    {"CLIPTextModelWithProjection": {"head": "projection"}, "CLIPTextModel": {"head": "none"}},
    CLIP_FIELDS,
    rows,
    copies=lambda config: (),
    prefix="text_model.",
    ignored=(r"embeddings\.position_ids$",),
    covers="the text encoder: the states of all tokens, or the projection of the EOS",
)
