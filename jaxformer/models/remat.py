"""Which arrays a layer stores for its backward pass, and which it recomputes (`model.remat`).

The points of a layer have names: the products of its matrices are named as their parameters, and
"attention" is the output of the attention kernel with its log-sum-exp. On GPU and TPU norms,
activations and rotations are computed again even with `none`: they take less time than reading
what they would store. The input of a layer is always kept: on the device, or with "input" in
`model.offload` by its host.

none       every point                     dots   products without a batch axis, and attention
names      those of `model.saved`          full   attention alone

The inputs of products behind a norm ("normed") and an activation ("hidden") are points too, which
`names` alone keeps, and their codes of 8 bits ("codes", `train.products`), which `none` alone
keeps. Fused attention is computed again only where `names` leaves "attention" out.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxformer.arrays.params import NARROW_PRODUCT
from jaxformer.arrays.sharding import PARAMETERS, free_axes, platform
from jaxformer.config.model import ModelConfig
from jaxformer.config.rules import POINTS, names_of
from jaxformer.files import ConfigError

# A fused kernel that gives no names to its outputs: JAX's primitive of cuDNN.
FUSED = ("dot_product_attention_fwd_wrapper",)
# The points that `names` stores if model.saved is empty.
DEFAULT = ("q", "k", "v", "attention", "out")


def kept_points(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the points that a layer keeps on the device."""
    if config.remat == "none":
        return (*POINTS, "codes")
    if config.remat != "names":
        return ("attention",)
    if config.saved == "none":
        return ()
    saved = names_of(config.saved) or DEFAULT
    return tuple(name for name in saved if name not in names_of(config.offload))


def recomputed(layer: Callable[..., Any], config: ModelConfig, scanned: bool) -> Callable[..., Any]:
    """Return the layer under the policy of its config. Outside of a scan, the compiler must be kept
    from merging the second computation with the first (`prevent_cse`)."""
    policies = jax.checkpoint_policies
    offloaded = names_of(config.offload)
    names = list(kept_points(config))
    divided = any(free_axes().get(name, 1) > 1 for name in PARAMETERS["embed"])
    if platform() == "gpu" and not scanned and not divided:
        # The weights as products read them, in 16 bits. Or the backward pass would cast them again,
        # from float32 copies of the slices of their stacks, which wait for it: 4.6 ms of the 158.5
        # of a step of llama_1b on an H100, and 1.8 GiB more at the peak, by the count of
        # benchmarks/compiled.py. On a mesh that divides them their casts are small.
        names.append("weight")
    if offloaded:
        if platform() == "cpu":
            raise ConfigError(
                f"model.offload={config.offload!r} moves activations from an accelerator to its"
                " host, and this is a CPU: leave it empty."
            )
        saved = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=names,
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        saved = policies.save_only_these_names(*names)
    if config.remat == "dots":
        saved = policies.save_from_both_policies(saved, policies.dots_with_no_batch_dims_saveable)

    fused = FUSED if "attention" in names else ()

    def policy(primitive: Any, *values: Any, **parameters: Any) -> Any:
        if config.remat == "dots" and primitive is NARROW_PRODUCT:
            left, right, out = re.split(",|->", parameters["equation"])
            return not {*left} & {*right} & {*out}
        return primitive.name in fused or saved(primitive, *values, **parameters)

    def named(x: jax.Array, *arguments: Any) -> Any:
        return layer(checkpoint_name(x, "input"), *arguments)

    run = named if "input" in offloaded else layer
    return jax.checkpoint(run, policy=policy, prevent_cse=not scanned)
