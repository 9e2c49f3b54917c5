"""Combinations of model settings that are refused, each with its reason and the remedy."""

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from jaxformer.config.records import names_of
from jaxformer.config.settings import WIDTH_SETTING, divisors, names_marked
from jaxformer.config.variants import RECURRENT
from jaxformer.files import ConfigError

# The points of a layer that remat may keep: the products of its matrices, and attention.
POINTS = ("latent", "q", "k", "v", "attention", "out", "gate", "up", "down")
# Points that model.remat=names alone keeps: the inputs of products behind norms and activations.
INPUTS = ("normed", "hidden")

ONE_SIDE = "a decoder sees one side only"
NO_SOURCE = "other models have no source"
OF_LATENT = "the other mixers have no latents"
KEPT = "it names the points that are kept"
OF_WIDTH = "it changes with the width in a way of its own: give the number at all widths as"
# For a setting and those of its values that serve: what needs one of them, a setting with one value
# or, where none is named, with any but its default; and why.
NEEDS = {
    ("family", "decoder encoder_decoder"): {"output=language": "an encoder sees the next token"},
    ("family", "encoder encoder_decoder"): {
        "head.pooling=first": "in a decoder it sees itself alone"
    },
    ("family", "decoder encoder"): {"layer_groups": "layers share within one stack"},
    ("family", "encoder"): {
        "output=masked": ONE_SIDE,
        "head.next_sentence": ONE_SIDE,
        "head.pooler": "its first token sees all the others",
    },
    ("family", "encoder_decoder"): {
        "n_encoder_layers": "set model.n_layers",
        "source_window": NO_SOURCE,
        "embedding.source": NO_SOURCE,
    },
    ("output", "language"): {
        "family=encoder_decoder": "it writes its answer as text",
        "head.bias": "the other heads always have a bias, or no matrix",
    },
    ("norm_placement", "pre sandwich output"): {"residual=parallel": "sublayers have one sum"},
    ("norm_placement", "pre sandwich"): {
        "residual=parallel_shared": "sublayers have one sum and one norm",
        "unnormed_layers": "with the others no norm is before a mixer",
    },
    ("feed_forward", "experts"): {"experts.n": "the other has none"},
    ("mixer", "latent"): {
        "latent.kv_rank": OF_LATENT,
        "latent.query_rank": OF_LATENT,
        "latent.rope_head_dim": OF_LATENT,
    },
    ("mixer", "attention"): {
        "attention.temperature": "latents have no such factor",
        "attention.query_key_norm": "latents have norms of their own",
        "attention.output_gate": "the other mixers have none, or their own",
        "positions=disentangled": "it multiplies keys",
    },
    ("positions", "none learned sinusoidal"): {
        f"mixer={mixer}": "it reads tokens in their order" for mixer in RECURRENT.values()
    },
    ("mixer", "attention latent"): {
        "recurrent.norm_placement": "with one mixer set model.norm_placement"
    },
    ("positions", "rope learned alibi t5 disentangled none"): {
        "embedding.positions=learned": "the others are embedded too"
    },
    ("embedded_positions", "learned sinusoidal"): {
        "embedding.position_offset": "the others are not embedded"
    },
    ("positions", "rope"): {
        "rope.pattern": "each layer rotates queries and keys or does not",
        "rope.window_theta": "it is a base of RoPE",
        "rope.scaling": "it scales the frequencies of RoPE",
    },
    ("rope.scaling", "none linear yarn llama3"): {
        "exact": "the others turn a token by the length of the text in a call"
    },
    ("remat", "names"): {"saved": KEPT, "offload": KEPT},
    ("parametrization", "mup"): {"mup_base": "it has the widths that others follow"},
    ("parametrization", "standard"): {
        "embedding.scale": f"{OF_WIDTH} model.embedding.multiplier",
        "head.scale": f"{OF_WIDTH} model.head.divisor",
    },
}
# Settings that a mixer with a state instead of keys does not have; each is 0 where it is not used.
OF_KEYS = (
    "window",
    "n_kv_heads",
    "attention.value_dim",
    "attention.scale",
    "attention.soft_cap",
    "attention.sinks",
)
# The settings behind properties.
SETTING_OF = {"output": "head.kind", "embedded_positions": "positions"}


def model_conflicts(config: Any) -> list[str]:
    """Return a message for each rule that a `ModelConfig` breaks."""
    width = config.d_model
    heads = config.n_heads
    if not config.head_dim and width % heads:
        return [
            f"d_model={width} is not divisible by model.n_heads={heads}: choose heads that divide"
            f" it ({divisors(width)}), or set model.head_dim."
        ]
    if heads % config.kv_heads:
        return [
            f"n_heads={heads} is not divisible by model.n_kv_heads={config.n_kv_heads}: every key"
            f" head serves the same number of query heads, so choose one of {divisors(heads)}."
        ]
    problems = []
    for (other, allowed), needed_by in NEEDS.items():
        if attrgetter(other)(config) in allowed.split():
            continue
        for condition, why in needed_by.items():
            setting, _, value = condition.partition("=")
            record, _, name = setting.rpartition(".")
            holder = config
            if record:
                holder = getattr(config, record)
            current = getattr(holder, name)
            # The class of a record has the default as an attribute.
            applies = current != getattr(type(holder), name)
            if value:
                applies = current == value
            if applies:
                shown = SETTING_OF.get(setting, setting)
                needed = SETTING_OF.get(other, other)
                values = " or ".join(map(repr, allowed.split()))
                problems.append(f"{shown}={current!r} needs model.{needed}={values}: {why}.")
    problems += _further_conflicts(config)
    # What is wrong with this model is wrong with its base too, and is said once.
    if problems or config.parametrization != "mup":
        return problems
    text = config.mup_base
    widths = widths_of(text)
    names = names_marked(type(config), WIDTH_SETTING)
    if "d_model" not in widths or not {*widths} <= {*names} or 0 in widths.values():
        return [
            f"mup_base={text!r} must be widths of the model that learning rates are found at, with"
            " parametrization='mup': d_model and whichever of"
            f" {', '.join(names[1:])} are not as here, as in 'd_model=64 n_heads=4'."
        ]
    try:
        config.base_model  # noqa: B018
    except ConfigError as error:
        return [f"mup_base={text!r} is no model: {error}"]
    return []


def _further_conflicts(config: Any) -> Iterator[str]:
    rope = config.rope
    name = "head_dim"
    scaled = config.head_width
    if config.latent.rope_head_dim:
        name = "latent.rope_head_dim"
        scaled = config.latent.rope_head_dim
    if config.positions == "rope" and not 0 < config.rotated_width <= scaled // 2 * 2:
        yield (
            f"{name}={scaled} with model.rope.fraction={rope.fraction:g} leaves RoPE no whole pairs"
            f" of dimensions: choose an even {name}, a larger fraction or another model.positions."
        )
    if rope.window_theta and not config.window:
        yield f"rope.window_theta={rope.window_theta:g} needs a model.window."
    if rope.scaling == "longrope":
        pairs = -(-config.rotated_width // 2)
        for name, numbers in zip(("short_factor", "long_factor"), rope.factors, strict=True):
            if len(numbers) != pairs or not all(0 < number < math.inf for number in numbers):
                yield (
                    f"rope.{name}={getattr(rope, name)!r} must be {pairs} numbers above 0 with"
                    " model.rope.scaling='longrope': one for each pair of dimensions that RoPE"
                    " rotates."
                )
        if config.original_length < 2:
            yield f"rope.original_length={config.original_length} must be 2 or more for 'longrope'."
    distance = config.relative.distance
    buckets = config.relative.buckets
    nearest = 0
    if config.positions == "t5":
        nearest = buckets // 2
    elif config.positions == "disentangled":
        nearest = buckets // 2 + 1
    if distance <= nearest:
        yield (
            f"relative.distance={distance} must be above {nearest} with"
            f" model.relative.buckets={buckets}."
        )
    if config.feed_forward == "experts" and not config.experts.n:
        yield "feed_forward='experts' needs model.experts.n, their number."
    if config.mixer == "latent":
        shared = config.latent.rope_head_dim
        if not config.latent.kv_rank:
            yield (
                "mixer='latent' needs model.latent.kv_rank, the width of which all keys and values"
                " are."
            )
        if not 0 < shared < config.head_width:
            yield (
                f"latent.rope_head_dim={shared} must be 1 to {config.head_width - 1} with"
                f" model.mixer='latent': of the {config.head_width} dimensions of a head"
                " (model.head_dim) it counts those with one key for all heads."
            )
    if config.mixer == "latent" and config.n_kv_heads not in (0, config.n_heads):
        yield (
            f"n_kv_heads={config.n_kv_heads} needs model.mixer='attention': with 'latent' each"
            " head has keys of its own, so set it to 0."
        )
    yield from _recurrent(config)
    if config.exact and config.experts.capacity:
        yield (
            "exact=True needs model.experts.capacity=0: a token is dropped because of the others in"
            " its row."
        )
    if config.exact and config.output in ("classes", "projection") and config.pooled == "mean":
        yield (
            f"exact=True needs model.head.pooling 'first' or 'last' with model.head.kind="
            f"{config.output!r}: the order of a mean over tokens depends on the row."
        )
    if config.layer_groups and config.n_layers % config.layer_groups:
        yield (
            f"layer_groups={config.layer_groups} must divide model.n_layers={config.n_layers}:"
            f" choose one of {divisors(config.n_layers)}."
        )
    width = config.embedded_width
    if width != config.d_model and config.tied_head and config.output == "language":
        yield (
            f"embedding.width={width} with model.tied_head=True needs model.head.kind='masked': the"
            f" rows of the language head are d_model={config.d_model} wide."
        )
    for name, allowed in (("saved", (*POINTS, *INPUTS, "none")), ("offload", (*POINTS, "input"))):
        names = names_of(getattr(config, name))
        if not set(names) <= set(allowed):
            yield f"{name}={' '.join(names)!r} must be names of {' '.join(allowed)}."


def _recurrent(config: Any) -> Iterator[str]:
    mixers = {config.mixer} | {RECURRENT.get(letter, "") for letter in config.layer_pattern}
    mixers &= {*RECURRENT.values()}
    if not mixers:
        if config.recurrent != type(config.recurrent)():
            yield (
                "recurrent has settings of model.mixer='delta' or 'mamba2', or of d or s in"
                " model.layer_pattern."
            )
        return
    if config.family != "decoder":
        yield (
            f"family={config.family!r} is not for model.mixer='delta' or 'mamba2', or d or s in"
            " model.layer_pattern: a state has read the tokens of one side, so choose"
            " model.family='decoder'."
        )
    for name in ("decay", "rank", "gate", "negative_eigenvalues", "norm_eps"):
        value = getattr(config.recurrent, name)
        if "delta" not in mixers and value != getattr(type(config.recurrent), name):
            yield (
                f"recurrent.{name}={value!r} is for model.mixer='delta': 'mamba2' has one decay of"
                " a head and one kind of gate, so leave it out."
            )
    for setting in OF_KEYS:
        value = attrgetter(setting)(config)
        if config.mixer in mixers and value:
            yield (
                f"{setting}={value!r} is for keys of all tokens, and model.mixer={config.mixer!r}"
                " has a state instead: leave it out."
            )
    heads = config.recurrent_heads
    shared = config.recurrent_key_heads
    if heads % shared:
        yield (
            f"recurrent.key_heads={shared} must divide the {heads} heads of model.recurrent.heads:"
            f" choose one of {divisors(heads)}."
        )


def widths_of(text: str) -> dict[str, int]:
    """Return the numbers in a setting such as 'd_model=64 n_heads=4' by name, separated by commas
    or spaces; 0 for what is no number above 0."""
    widths = {}
    for entry in names_of(text):
        name, _, number = entry.partition("=")
        widths[name] = 0
        if number.isdecimal():
            widths[name] = int(number)
    return widths
