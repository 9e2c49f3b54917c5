"""Combinations of model settings that are refused, each with its reason and the remedy."""

import math
from collections.abc import Iterator
from dataclasses import fields
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


ONE_SIDE = "a decoder sees one side only"
NO_SOURCE = "other models have no source"
OF_LATENT = "the other mixer has no latents"
KEPT = "it names the points that are kept"
OF_WIDTH = "it changes with the width in a way of its own: give the number at all widths as"
# For a setting and those of its values that serve: what needs one of them, a setting with one value
# or, where none is named, with any but its default; and why.
NEEDS = {
    ("family", "decoder encoder_decoder"): {"output=language": "an encoder sees the next token"},
    ("family", "encoder encoder_decoder"): {"pooling=first": "in a decoder it sees itself alone"},
    ("family", "decoder encoder"): {"layer_groups": "layers share within one stack"},
    ("family", "encoder"): {
        "output=masked": ONE_SIDE,
        "next_sentence": ONE_SIDE,
        "pooler": "its first token sees all the others",
    },
    ("family", "encoder_decoder"): {
        "n_encoder_layers": "set model.n_layers",
        "source_window": NO_SOURCE,
        "source_embedding": NO_SOURCE,
    },
    ("output", "language"): {
        "family=encoder_decoder": "it writes its answer as text",
        "head_bias": "the other heads always have a bias, or no matrix",
    },
    ("norm_placement", "pre sandwich output"): {"residual=parallel": "sublayers have one sum"},
    ("norm_placement", "pre sandwich"): {
        "residual=parallel_shared": "sublayers have one sum and one norm",
        "unnormed_layers": "with the others no norm is before a mixer",
    },
    ("feed_forward", "experts"): {"n_experts": "the other has none"},
    ("mixer", "latent"): {
        "kv_rank": OF_LATENT,
        "query_rank": OF_LATENT,
        "rope_head_dim": OF_LATENT,
    },
    ("mixer", "attention"): {
        "attention_temperature": "latents have no such factor",
        "query_key_norm": "latents have norms of their own",
        "positions=disentangled": "it multiplies keys",
    },
    ("positions", "rope learned alibi t5 disentangled none"): {
        "position_embedding=learned": "the others are embedded too"
    },
    ("embedded_positions", "learned sinusoidal"): {
        "position_offset": "the others are not embedded"
    },
    ("positions", "rope"): {
        "position_pattern": "each layer rotates queries and keys or does not",
        "rope_window_theta": "it is a base of RoPE",
        "rope_scaling": "it scales the frequencies of RoPE",
    },
    ("remat", "names"): {"saved": KEPT, "offload": KEPT},
    ("parametrization", "mup"): {"mup_base": "it has the widths that others follow"},
    ("parametrization", "standard"): {
        "embedding_scale": f"{OF_WIDTH} model.embedding_multiplier",
        "logit_scale": f"{OF_WIDTH} model.logit_divisor",
    },
}
# The settings behind properties.
SETTING_OF = {"output": "head", "embedded_positions": "positions"}


def model_conflicts(config: Any) -> list[str]:
    """A message for each rule that a `ModelConfig` breaks."""
    width, heads, kv_heads = config.d_model, config.n_heads, config.n_kv_heads
    if not config.head_dim and width % heads:
        return [
            f"d_model={width} is not divisible by model.n_heads={heads}: choose heads that divide"
            f" it ({divisors(width)}), or set model.head_dim."
        ]
    if heads % config.kv_heads:
        return [
            f"n_heads={heads} is not divisible by model.n_kv_heads={kv_heads}: every key head"
            f" serves the same number of query heads, so choose one of {divisors(heads)}."
        ]
    defaults = {field.name: field.default for field in fields(config)}
    problems = []
    for (other, allowed), needed_by in NEEDS.items():
        if getattr(config, other) in allowed.split():
            continue
        for condition, why in needed_by.items():
            setting, _, value = condition.partition("=")
            current = getattr(config, setting)
            if current == value if value else current != defaults[setting]:
                name, needed = SETTING_OF.get(setting, setting), SETTING_OF.get(other, other)
                values = " or ".join(map(repr, allowed.split()))
                problems.append(f"{name}={current!r} needs model.{needed}={values}: {why}.")
    problems += [*_positions(config), *_experts(config), *_others(config)]
    # What is wrong with this model is wrong with its base too, and is said once.
    if problems or config.parametrization != "mup":
        return problems
    text, widths = config.mup_base, widths_of(config.mup_base)
    if "d_model" not in widths or not {*widths} <= {*WIDTH_SETTINGS} or 0 in widths.values():
        return [
            f"mup_base={text!r} must be widths of the model that learning rates are found at, with"
            " parametrization='mup': d_model and whichever of"
            f" {', '.join(WIDTH_SETTINGS[1:])} are not as here, as in 'd_model=64 n_heads=4'."
        ]
    try:
        config.base_model  # noqa: B018
    except ConfigError as error:
        return [f"mup_base={text!r} is no model: {error}"]
    return []


def _positions(config: Any) -> Iterator[str]:
    positions, scaling, pattern = config.positions, config.rope_scaling, config.window_pattern
    theta, factor = config.rope_window_theta, config.rope_factor
    distance, buckets = config.relative_distance, config.relative_buckets
    width, fraction = config.rope_head_dim or config.head_width, config.rope_fraction
    if positions == "rope" and not 0 < config.rotated_width <= width // 2 * 2:
        name = "rope_head_dim" if config.rope_head_dim else "head_dim"
        yield (
            f"{name}={width} with model.rope_fraction={fraction:g} leaves RoPE no whole pairs of"
            f" dimensions: choose an even {name}, a larger fraction or another model.positions."
        )
    if not pattern or not set(pattern) <= {"w", "f"}:
        yield f"window_pattern={pattern!r} must be letters w (window) and f (full), as in 'wwf'."
    if not config.position_pattern or not set(config.position_pattern) <= {"p", "n"}:
        yield (
            f"position_pattern={config.position_pattern!r} must be letters p (positions) and n"
            " (none), as in 'ppn'."
        )
    if theta and (not config.window or theta < 1):
        yield f"rope_window_theta={theta:g} must be at least 1, and needs a model.window."
    if (factor != 1) == (scaling == "none"):
        yield f"rope_factor={factor:g} with rope_scaling={scaling!r}: set both, the factor above 1."
    fast, slow = config.fast_rotations, config.rope_slow
    if scaling == "yarn" and not (fast > slow > 0 and config.rope_theta > 1):
        yield (
            f"rope_scaling='yarn' needs model.rope_fast={fast:g} above model.rope_slow={slow:g},"
            f" that above 0, and model.rope_theta={config.rope_theta:g} above 1."
        )
    if scaling == "longrope":
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
    nearest = {"t5": buckets // 2, "disentangled": buckets // 2 + 1}.get(positions, 0)
    if distance <= nearest:
        yield (
            f"relative_distance={distance} must be above {nearest} with relative_buckets={buckets}."
        )


def _experts(config: Any) -> Iterator[str]:
    number, chosen, groups = config.n_experts, config.experts_per_token, config.router_groups
    pattern = config.expert_pattern
    if not pattern or not set(pattern) <= {"e", "d"}:
        yield f"expert_pattern={pattern!r} must be letters e (experts) and d (dense), as in 'de'."
    if config.feed_forward != "experts":
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


def _others(config: Any) -> Iterator[str]:
    head_width, rotated, kv_heads = config.head_width, config.rope_head_dim, config.n_kv_heads
    if config.mixer == "latent":
        if not config.kv_rank:
            yield "mixer='latent' needs model.kv_rank, the width of which all keys and values are."
        if not 0 < rotated < head_width:
            yield (
                f"rope_head_dim={rotated} must be 1 to {head_width - 1} with mixer='latent': of the"
                f" {head_width} dimensions of a head (model.head_dim) it counts those with one key"
                " for all heads."
            )
        if kv_heads not in (0, config.n_heads):
            yield (
                f"n_kv_heads={kv_heads} needs model.mixer='attention': with 'latent' each head has"
                " keys of its own, so set it to 0."
            )
    groups, layers, width = config.layer_groups, config.n_layers, config.embedded_width
    if groups and layers % groups:
        yield (
            f"layer_groups={groups} must divide model.n_layers={layers}: choose one of"
            f" {divisors(layers)}."
        )
    if width != config.d_model and config.tied_head and config.output == "language":
        yield (
            f"embedding_width={width} with model.tied_head=True needs model.head='masked': the rows"
            f" of the language head are d_model={config.d_model} wide."
        )
    for name, allowed in (("saved", (*POINTS, "none")), ("offload", (*POINTS, "input"))):
        names = names_of(getattr(config, name))
        if not set(names) <= set(allowed):
            yield f"{name}={' '.join(names)!r} must be names of {' '.join(allowed)}."


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
