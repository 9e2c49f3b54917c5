"""Combinations of model settings that are refused, each with its reason and the remedy."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxformer.settings import divisors

if TYPE_CHECKING:
    from jaxformer.config_model import ModelConfig


def model_conflicts(config: "ModelConfig") -> list[str]:
    """A message for each rule that `config` breaks."""
    heads = list(_heads(config))
    return [
        *heads,
        *(_rotation(config) if not heads else ()),
        *_family(config),
        *_positions(config),
    ]


def _heads(config: "ModelConfig") -> Iterator[str]:
    width, heads = config.d_model, config.n_heads
    if not config.head_dim and width % heads:
        yield (
            f"d_model={width} is not divisible by model.n_heads={heads}: choose heads that divide"
            f" it ({divisors(width)}), or set model.head_dim."
        )
    if heads % config.kv_heads:
        yield (
            f"n_heads={heads} is not divisible by model.n_kv_heads={config.n_kv_heads}: every key"
            f" head serves the same number of query heads, so choose one of {divisors(heads)}."
        )


def _rotation(config: "ModelConfig") -> Iterator[str]:
    rotates_pairs = 0 < config.rotated_width <= config.head_width // 2 * 2
    if config.positions == "rope" and not rotates_pairs:
        yield (
            f"head_dim={config.head_width} is odd, or model.rope_fraction="
            f"{config.rope_fraction:g} of it is less than one dimension, but RoPE rotates pairs:"
            " use an even width and a larger fraction, or change model.positions."
        )


def _family(config: "ModelConfig") -> Iterator[str]:
    family, output = config.family, config.output
    if family == "encoder" and output == "language":
        yield (
            "head='language' needs model.family 'decoder' or 'encoder_decoder': an encoder sees"
            " the next token."
        )
    if family != "encoder" and (output == "masked" or config.next_sentence):
        yield (
            "head='masked' and model.next_sentence need model.family='encoder': a decoder sees"
            " one side only."
        )
    if family == "encoder_decoder" and output != "language":
        yield (
            f"head={output!r} needs model.family 'encoder' or 'decoder': an encoder-decoder"
            " writes its answer as text."
        )
    if family == "decoder" and config.pooling == "first":
        yield (
            "pooling='first' needs model.family='encoder': a decoder's first token sees itself"
            " alone."
        )
    if family != "encoder_decoder" and config.n_encoder_layers > 0:
        yield (
            f"n_encoder_layers={config.n_encoder_layers} needs model.family='encoder_decoder';"
            " set model.n_layers."
        )
    if config.residual == "parallel" and config.norm_placement == "post":
        yield (
            "residual='parallel' has one sum for all sublayers, so norm_placement='post' has no"
            " place: use another."
        )
    if family != "encoder" and config.pooler:
        yield (
            "pooler=True needs model.family='encoder': a pooler reads the first token, which"
            " must see them all."
        )
    if config.head_bias and output != "language":
        yield (
            f"head_bias=True is for the language head, and the head {output!r} has a bias anyway:"
            " leave it out."
        )


def _positions(config: "ModelConfig") -> Iterator[str]:
    rope, scaling = config.positions == "rope", config.rope_scaling
    if not config.window_pattern or not set(config.window_pattern) <= {"w", "f"}:
        yield (
            f"window_pattern={config.window_pattern!r} must be letters w (window) and f (full),"
            " as in 'wwf'."
        )
    if config.position_offset > 0 and config.positions != "learned":
        yield (
            f"position_offset={config.position_offset} needs model.positions='learned', and they"
            f" are {config.positions!r}."
        )
    theta = config.rope_window_theta
    if theta > 0 and (not rope or not config.window or theta < 1):
        yield (
            f"rope_window_theta={theta:g} must be at least 1, and needs model.positions='rope'"
            " and a model.window."
        )
    if scaling != "none" and not rope:
        yield (
            f"rope_scaling={scaling!r} needs model.positions='rope', and they are"
            f" {config.positions!r}."
        )
    if (config.rope_factor != 1) == (scaling == "none"):
        yield (
            f"rope_factor={config.rope_factor:g} with rope_scaling={scaling!r}: set both, the"
            " factor above 1."
        )
    fast, slow = config.rope_beta_fast, config.rope_beta_slow
    if scaling == "yarn" and not (fast > slow > 0 and config.rope_theta > 1):
        yield (
            f"rope_scaling='yarn' needs model.rope_beta_fast={fast:g} above model.rope_beta_slow="
            f"{slow:g}, that above 0, and model.rope_theta={config.rope_theta:g} above 1."
        )
    distance, buckets = config.relative_distance, config.relative_buckets
    if config.positions == "t5" and distance <= buckets // 2:
        yield (
            f"relative_distance={distance} must be above half of model.relative_buckets={buckets}:"
            " that many distances have a row of their own."
        )
