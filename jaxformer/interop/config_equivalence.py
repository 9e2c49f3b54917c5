"""Whether two configs compute the same function, which an export has to keep; and models in muP as
standard ones."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from jaxformer.arrays.params import Params, dotted
from jaxformer.config.model import ModelConfig
from jaxformer.config.variants import ATTENTION_FACTORS, BIASED
from jaxformer.layers.block import CROSS
from jaxformer.layers.head import has_pooler, reads_pooler, total_divisor
from jaxformer.layers.norm import NORMS, norm_specs
from jaxformer.layers.pattern import layer_configs, of_source, without_positions


def bias_named(parts: frozenset[str]) -> str:
    """The name in `BIASED` of the parts that carry a bias.

    The parts may lack "norm" where a model's norms have no bias, so that names which differ only in
    it match too.
    """
    exact = [name for name, biased in BIASED.items() if biased == parts]
    but_for_norms = [name for name, biased in BIASED.items() if biased - {"norm"} == parts]
    return (exact or but_for_norms)[0]


def letters(flags: Iterable[object], yes: str, no: str) -> str:
    """A pattern of layers: `yes` for each that the flag is true of, and `no` for each other one."""
    return "".join(yes if flag else no for flag in flags)


def resolved(config: ModelConfig) -> ModelConfig:
    """The config with every default that depends on another field written out, and with defaults in
    the fields that do not change its logits: configs of the same function are then equal."""
    layers = layer_configs(config, config.n_layers)
    # Patterns have one letter for each layer, that of windows for each of the deeper stack.
    is_positioned = [layer.positions == config.positions for layer in layers]
    position_pattern = letters(is_positioned, "p", "n")
    if config.positions == "rope" and not any(is_positioned):
        config = dataclasses.replace(config, position_pattern="p", **without_positions(config))
    expert_pattern = letters([layer.feed_forward == "experts" for layer in layers], "e", "d")
    depth = max(config.n_layers, config.encoder_layers)
    stacks = zip(layer_configs(config, depth), layer_configs(of_source(config), depth), strict=True)
    window_pattern = letters([a.window or b.window for a, b in stacks], "w", "f")

    biased = config.biased if "bias" in norm_specs(config) else config.biased - {"norm"}
    scale = config.score_scale or config.head_width**-0.5
    has_pooler_anyway = has_pooler(dataclasses.replace(config, pooler=False))
    short_factor, long_factor = (" ".join(map(str, numbers)) for numbers in config.rope_factors)
    fields: dict[str, Any] = {
        "n_kv_heads": config.kv_heads,
        "head_dim": config.head_width,
        "value_dim": config.value_width,
        "embedding_width": config.embedded_width,
        "d_ff": config.ff_width,
        # A group of one layer shares nothing.
        "layer_groups": config.layer_groups % config.n_layers,
        "head": config.output,
        "pooling": config.pooled,
        "projection_width": config.projection_width or config.d_model,
        "pooler": config.pooler and not has_pooler_anyway,
        "attention_scale": float(f"{scale:.9g}"),
        "logit_divisor": total_divisor(config),
        "parametrization": "standard",
        "mup_base": "",
        "bias": bias_named(biased),
        "rope_original_length": config.original_length,
        "rope_attention_factor": float(f"{config.rope_scale:.9g}"),
        "rope_fast": config.fast_rotations,
        "rope_short_factor": short_factor,
        "rope_long_factor": long_factor,
        "window_pattern": window_pattern,
        "position_pattern": position_pattern,
        "expert_ff": config.expert_width,
        "expert_pattern": expert_pattern,
        "dense_layers": 0,
    }
    if config.rope_scaling == "none":
        fields["rope_window_theta"] = config.rope_window_theta or config.rope_theta
    if config.positions == "learned":
        fields["position_embedding"] = "auto"
    if reads_pooler(config) and config.class_head == "auto":
        fields["class_head"] = "dense"
    if config.feed_forward == "experts" and "e" not in expert_pattern:
        fields["feed_forward"] = "ffn"
    if config.family == "encoder_decoder":
        fields["n_encoder_layers"] = config.encoder_layers
        fields["source_window"] = config.source_window or config.window
    defaults = {entry.name: entry.default for entry in dataclasses.fields(config)}
    unused = _unused(config, "w" in window_pattern, expert_pattern)
    return dataclasses.replace(config, **fields | {name: defaults[name] for name in unused})


def _unused(config: ModelConfig, has_windows: bool, pattern: str) -> list[str]:
    """The fields that do not change the logits of this config, with this pattern of experts."""
    scaling = config.rope_scaling
    output = config.output
    has_class_layers = reads_pooler(config) or (output == "tags" and config.class_head != "auto")
    matters = {
        "dropout attention_dropout init dtype layer_loop remat attention_kernel": False,
        "expert_kernel router_balance_loss router_z_loss": False,
        "n_experts experts_per_token expert_ff shared_ff expert_capacity expert_pattern": "e"
        in pattern,
        "router router_renormalize router_scale router_bias router_groups": "e" in pattern,
        "router_top_groups": config.router_groups > 1,
        "d_ff": "d" in pattern,
        "max_length": config.embedded_positions == "learned",
        "position_pattern": config.positions == "rope",
        "n_classes": output in ("classes", "tags"),
        "tied_head": output in ("language", "masked"),
        "pooling": output in ("classes", "projection"),
        "projection_width": output == "projection",
        "class_head": has_class_layers,
        "pooler_activation": has_pooler(config) or has_class_layers,
        "head_dense_bias": has_pooler(config) or has_class_layers or output == "masked",
        "window source_window window_pattern rope_window_theta": has_windows,
        "rope_slow rope_fast": scaling in ("yarn", "llama3"),
        "rope_truncate": scaling == "yarn",
        "rope_short_factor rope_long_factor": scaling == "longrope",
        "rope_attention_factor": scaling in ATTENTION_FACTORS,
        "rope_original_length": scaling != "none" or config.attention_temperature > 0,
        "relative_bias": config.positions == "t5",
    }
    unused = [name for names, is_used in matters.items() if not is_used for name in names.split()]
    prefixes = {
        "rope_": ("rope",),
        "relative_": ("t5", "disentangled"),
        "sinusoids": ("sinusoidal",),
    }
    for prefix, positions in prefixes.items():
        if config.positions not in positions:
            names = (entry.name for entry in dataclasses.fields(config))
            unused += [name for name in names if name.startswith(prefix)]
    # The shared key of latent attention has its width with any positions.
    return [name for name in unused if name != "rope_head_dim"]


def differences(config: ModelConfig, stated: ModelConfig) -> list[str]:
    """The fields in which a config and that of a config.json are not the same function, as
    "model.activation='relu2' (there 'swiglu')"."""
    a, b = (dataclasses.asdict(resolved(side)) for side in (config, stated))
    return [f"model.{name}={a[name]!r} (there {b[name]!r})" for name in a if a[name] != b[name]]


def standard_form(params: Params, config: ModelConfig) -> tuple[Params, ModelConfig]:
    """The standard model that computes the logits of one in muP, up to rounding.

    The factor of the scores is in the queries, or in their norm, and the divisor of the logits of a
    tied head is in an output matrix of its own. It is for inference and export: further training
    would have other rates.
    """
    usual = config.attention_scale or config.head_width**-0.5
    factor = (config.score_scale or usual) / usual
    has_norm = config.query_key_norm != "none"
    offset = 0 if config.query_key_norm == "layer" else NORMS[config.norm].offset

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        parent, _, name = dotted(path).rpartition(".")
        if parent.split(".")[-1] not in (config.mixer, CROSS):
            return leaf
        if name == "q_norm":
            return factor * (offset + leaf) - offset
        return factor * leaf if name in ("q", "q_bias") and not has_norm else leaf

    if factor != 1:
        params = jax.tree.map_with_path(scaled, params)
    standard = dataclasses.replace(config, parametrization="standard", mup_base="")
    divisor = total_divisor(config) / config.logit_divisor
    if divisor != 1:
        matrix = params["embed"]["tokens"] / divisor
        params = {**params, "head": {**params.get("head", {}), "weight": matrix}}
        standard = dataclasses.replace(standard, tied_head=False)
    return params, standard
