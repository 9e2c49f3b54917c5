"""Combinations of model settings that are refused, each with its reason and the remedy."""

import math
from collections.abc import Iterator
from typing import Any

from jaxformer.config.settings import divisors
from jaxformer.files import ConfigError

# The points of a layer that remat may keep: the products of its matrices, and attention.
POINTS = ("latent", "q", "k", "v", "attention", "out", "gate", "up", "down")

# The settings that model.mup_base may name: what makes a model wide. A model may be widened by
# wider heads or by more of them, so their number is one.
WIDTH_SETTINGS = (
    "d_model",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "value_dim",
    "kv_rank",
    "query_rank",
    "rope_head_dim",
    "d_ff",
    "expert_ff",
    "shared_ff",
    "embedding_width",
    "projection_width",
)
# Factors that follow the width, and the settings of the same factors as plain numbers.
FACTOR_SETTINGS = {
    "embedding_scale": "model.embedding_multiplier",
    "logit_scale": "model.logit_divisor",
}

# Settings of the source of an encoder-decoder, and their defaults.
SOURCE_SETTINGS = {"source_window": 0, "source_embedding": "shared"}
EXCLUDED_PLACEMENTS = {"parallel": ("post",), "parallel_shared": ("post", "output")}


def model_conflicts(config: Any) -> list[str]:
    """A message for each rule that a `ModelConfig` breaks."""
    heads = list(_heads(config))
    rotation = [] if heads else [*_rotation(config)]
    others = [*_family(config), *_source(config), *_embedding(config)]
    others += [*_norms(config), *_positions(config), *_experts(config), *_latent(config)]
    problems = [*heads, *rotation, *others]
    # What is wrong with this model is wrong with its base too, and is said once.
    return problems or [*_parametrization(config)]


def _heads(config: Any) -> Iterator[str]:
    width, heads, kv_heads = config.d_model, config.n_heads, config.n_kv_heads
    if not config.head_dim and width % heads:
        yield (
            f"d_model={width} is not divisible by model.n_heads={heads}: choose heads that divide"
            f" it ({divisors(width)}), or set model.head_dim."
        )
    if heads % config.kv_heads:
        yield (
            f"n_heads={heads} is not divisible by model.n_kv_heads={kv_heads}: every key head"
            f" serves the same number of query heads, so choose one of {divisors(heads)}."
        )


def _rotation(config: Any) -> Iterator[str]:
    width, fraction = config.rope_head_dim or config.head_width, config.rope_fraction
    rotates_pairs = 0 < config.rotated_width <= width // 2 * 2
    if config.positions == "rope" and not rotates_pairs:
        name = "rope_head_dim" if config.rope_head_dim else "head_dim"
        yield (
            f"{name}={width} with model.rope_fraction={fraction:g} leaves RoPE no whole pairs of"
            f" dimensions: choose an even {name}, a larger fraction or another model.positions."
        )


def _family(config: Any) -> Iterator[str]:
    family, output, layers = config.family, config.output, config.n_encoder_layers
    if family == "encoder" and output == "language":
        yield "head='language' needs another model.family: an encoder sees the next token."
    if family != "encoder" and output == "masked":
        yield "head='masked' needs model.family='encoder': a decoder sees one side only."
    for name in config.second_heads if family != "encoder" else ():
        yield f"{name} needs model.family='encoder': a decoder sees one side only."
    if family != "encoder" and config.pooler:
        yield "pooler=True needs model.family='encoder': its first token sees all the others."
    if family == "encoder_decoder" and output != "language":
        yield f"head={output!r} needs another model.family: this one writes its answer as text."
    if family == "decoder" and config.pooling == "first":
        yield "pooling='first' needs model.family='encoder': in a decoder it sees itself alone."
    if family != "encoder_decoder" and layers > 0:
        yield f"n_encoder_layers={layers} needs model.family='encoder_decoder': set n_layers."
    yield from _groups(config)
    yield from _points(config)
    if config.norm_placement in EXCLUDED_PLACEMENTS.get(config.residual, ()):
        yield f"residual={config.residual!r} has one sum or norm for all sublayers: use pre-norms."
    if config.head_bias and output != "language":
        yield f"head_bias=True is for the language head; the head {output!r} always has a bias."


def _groups(config: Any) -> Iterator[str]:
    groups, layers = config.layer_groups, config.n_layers
    if groups and layers % groups:
        yield (
            f"layer_groups={groups} must divide model.n_layers={layers}: choose one of"
            f" {divisors(layers)}."
        )
    if groups and config.family == "encoder_decoder":
        yield f"layer_groups={groups} needs a model.family with one stack: decoder or encoder."


def _source(config: Any) -> Iterator[str]:
    for name, default in SOURCE_SETTINGS.items():
        if getattr(config, name) != default and config.family != "encoder_decoder":
            yield f"{name} needs model.family='encoder_decoder': other models have no source."


def _embedding(config: Any) -> Iterator[str]:
    width, d_model = config.embedded_width, config.d_model
    if width != d_model and config.tied_head and config.output == "language":
        yield (
            f"embedding_width={width} with model.tied_head=True needs model.head='masked': the rows"
            f" of the language head are d_model={d_model} wide."
        )
    if config.position_embedding == "learned" and config.positions == "sinusoidal":
        yield "position_embedding='learned' needs model.positions that are not embedded too."


def _norms(config: Any) -> Iterator[str]:
    if config.unnormed_layers and config.norm_placement not in ("pre", "sandwich"):
        yield (
            f"unnormed_layers={config.unnormed_layers} needs model.norm_placement='pre' or"
            f" 'sandwich': with {config.norm_placement!r} no norm is before a mixer."
        )


def _experts(config: Any) -> Iterator[str]:
    number, chosen, groups = config.n_experts, config.experts_per_token, config.router_groups
    pattern = config.expert_pattern
    if not pattern or not set(pattern) <= {"e", "d"}:
        yield f"expert_pattern={pattern!r} must be letters e (experts) and d (dense), as in 'de'."
    if config.feed_forward != "experts":
        if number:
            yield f"n_experts={number} needs model.feed_forward='experts'."
        return
    if not number:
        yield "feed_forward='experts' needs model.n_experts, their number."
        return
    if chosen > number:
        yield (
            f"experts_per_token={chosen} is above model.n_experts={number}: a token is routed to"
            f" each expert once at most, so choose 1 to {number}."
        )
    if number % groups:
        yield (
            f"n_experts={number} is not divisible by model.router_groups={groups}: choose one of"
            f" {divisors(number)} groups."
        )
    elif config.router_top_groups > groups:
        yield (
            f"router_top_groups={config.router_top_groups} is above model.router_groups={groups}:"
            f" choose 1 to {groups}."
        )
    elif groups > 1 and chosen > config.router_top_groups * (number // groups):
        yield (
            f"experts_per_token={chosen} is above the {number // groups} experts of"
            f" {config.router_top_groups} groups: raise model.router_top_groups."
        )


def _latent(config: Any) -> Iterator[str]:
    width, rotated, kv_heads = config.head_width, config.rope_head_dim, config.n_kv_heads
    if config.mixer != "latent":
        for name in ("kv_rank", "query_rank", "rope_head_dim"):
            if getattr(config, name):
                yield f"{name}={getattr(config, name)} needs model.mixer='latent'."
        return
    if not config.kv_rank:
        yield "mixer='latent' needs model.kv_rank, the width of what all keys and values are of."
    if not 0 < rotated < width:
        yield (
            f"rope_head_dim={rotated} must be 1 to {width - 1} with mixer='latent': of the"
            f" {width} dimensions of a head (model.head_dim) it counts those with one key for all"
            " heads."
        )
    if kv_heads not in (0, config.n_heads):
        yield (
            f"n_kv_heads={kv_heads} needs model.mixer='attention': with 'latent' each head has keys"
            " of its own, so set it to 0."
        )
    if config.attention_temperature:
        yield "attention_temperature needs model.mixer='attention': 'latent' has no such factor."
    if config.positions == "disentangled":
        yield "positions='disentangled' needs model.mixer='attention', whose keys it multiplies."
    if config.query_key_norm != "none":
        yield (
            f"query_key_norm={config.query_key_norm!r} needs model.mixer='attention': 'latent' has"
            " norms of its latents."
        )


def _parametrization(config: Any) -> Iterator[str]:
    text, is_mup = config.mup_base, config.parametrization == "mup"
    if not is_mup and text:
        yield f"mup_base={text!r} needs model.parametrization='mup'."
    if not is_mup:
        return
    widths = widths_of(text)
    if "d_model" not in widths or not {*widths} <= {*WIDTH_SETTINGS} or 0 in widths.values():
        yield (
            f"mup_base={text!r} must be widths of the model that learning rates are found at, with"
            " parametrization='mup': d_model and whichever of"
            f" {', '.join(WIDTH_SETTINGS[1:])} are not as here, as in 'd_model=64 n_heads=4'."
        )
        return
    for name, value in {"embedding_scale": "sqrt", "logit_scale": "rsqrt"}.items():
        if getattr(config, name) == value:
            yield (
                f"{name}={value!r} changes with the width in a way of its own, which"
                f" parametrization='mup' excludes: set it to 'none', and the number to use at all"
                f" widths as {FACTOR_SETTINGS[name]}."
            )
    try:
        config.base_model  # noqa: B018
    except ConfigError as error:
        yield f"mup_base={text!r} is no model: {error}"


def widths_of(text: str) -> dict[str, int]:
    """The numbers in a setting such as 'd_model=64 n_heads=4' by name, separated by commas or
    spaces; 0 for what is no number above 0."""
    entries = (entry.partition("=") for entry in names_of(text))
    return {name: int(number) if number.isdecimal() else 0 for name, _, number in entries}


def names_of(text: str) -> tuple[str, ...]:
    """The names in a setting, which are separated by commas or spaces."""
    return tuple(text.replace(",", " ").split())


def numbers_of(text: str) -> tuple[float, ...]:
    """The numbers in a setting, which are separated by commas or spaces; none if one is not a
    number."""
    try:
        return tuple(map(float, names_of(text)))
    except ValueError:
        return ()


def _points(config: Any) -> Iterator[str]:
    for name, allowed in (("saved", (*POINTS, "none")), ("offload", (*POINTS, "input"))):
        names = names_of(getattr(config, name))
        if names and not (config.remat == "names" and set(names) <= set(allowed)):
            yield (
                f"{name}={' '.join(names)!r} needs remat='names', and names of {' '.join(allowed)}."
            )


def _positions(config: Any) -> Iterator[str]:
    positions, scaling, pattern = config.positions, config.rope_scaling, config.window_pattern
    rope, offset, theta = positions == "rope", config.position_offset, config.rope_window_theta
    factor, distance = config.rope_factor, config.relative_distance
    buckets = config.relative_buckets
    if not pattern or not set(pattern) <= {"w", "f"}:
        yield f"window_pattern={pattern!r} must be letters w (window) and f (full), as in 'wwf'."
    layers = config.position_pattern
    if layers != "p" and not (rope and layers and set(layers) <= {"p", "n"}):
        yield (
            f"position_pattern={layers!r} must be letters p (positions) and n (none), and needs"
            f" model.positions='rope', not {positions!r}: each layer rotates queries and keys."
        )
    if offset > 0 and config.embedded_positions not in ("learned", "sinusoidal"):
        yield (
            f"position_offset={offset} needs model.positions='learned' or 'sinusoidal', not"
            f" {positions!r}."
        )
    if theta > 0 and (not rope or not config.window or theta < 1):
        yield (
            f"rope_window_theta={theta:g} must be at least 1, and needs model.positions='rope' and"
            " a model.window."
        )
    if scaling != "none" and not rope:
        yield f"rope_scaling={scaling!r} needs model.positions='rope', not {positions!r}."
    if (factor != 1) == (scaling == "none"):
        yield f"rope_factor={factor:g} with rope_scaling={scaling!r}: set both, the factor above 1."
    fast, slow = config.fast_rotations, config.rope_slow
    if scaling == "yarn" and not (fast > slow > 0 and config.rope_theta > 1):
        yield (
            f"rope_scaling='yarn' needs model.rope_fast={fast:g} above model.rope_slow={slow:g},"
            f" that above 0, and model.rope_theta={config.rope_theta:g} above 1."
        )
    if scaling == "longrope":
        yield from _longrope(config)
    nearest = {"t5": buckets // 2, "disentangled": buckets // 2 + 1}.get(positions, 0)
    if distance <= nearest:
        yield (
            f"relative_distance={distance} must be above {nearest} with relative_buckets={buckets}."
        )


def _longrope(config: Any) -> Iterator[str]:
    pairs = -(-config.rotated_width // 2)
    for name in ("rope_short_factor", "rope_long_factor"):
        numbers = numbers_of(getattr(config, name))
        if len(numbers) != pairs or not all(0 < number < math.inf for number in numbers):
            yield (
                f"{name}={getattr(config, name)!r} must be {pairs} numbers above 0 with"
                " rope_scaling='longrope': one for each pair of dimensions that RoPE rotates."
            )
    if config.original_length < 2:
        yield f"rope_original_length={config.original_length} must be 2 or more for 'longrope'."
