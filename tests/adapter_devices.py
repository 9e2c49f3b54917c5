"""Run on eight forced host devices: a step of an adapter of experts on meshes that divide them,
beside one device. Prints JSON for test_expert_adapters.py."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from families import SIZES, params_of

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh
from jaxformer.config.settings import with_settings

EXPERTS = jf.LoRA(rank=2, targets=("experts",))
MAGNITUDES = jf.LoRA(rank=2, targets=("attention",), dora=True, init="pissa")
CASES = {  # the adapter, how the base is quantized, and a mesh
    "expert 2 x fsdp 2 x tensor 2": (
        EXPERTS,
        "nf4_double",
        dict(data=1, fsdp=2, expert=2, tensor=2),
    ),
    "DoRA and PiSSA, fsdp 2 x tensor 2": (MAGNITUDES, None, dict(data=2, fsdp=2, tensor=2)),
}
TOKENS = np.random.default_rng(0).integers(0, 37, (8, 16), dtype=np.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS[:, ::-1], "weights": jnp.ones(TOKENS.shape)}


def stepped(lora, kind, mesh, experts=4):
    """The params after a step, and its loss."""
    config = with_settings(
        jf.ModelConfig(),
        {
            **SIZES
            | {"feed_forward": "experts", "experts.n": experts, "experts.per_token": 2}
            | {"n_layers": 1},
            "bias": "all",
        },
    )
    params = params_of(config)
    params = jf.quantize(params, kind) if kind else params
    adapted = jf.adapt(params, config, lora, jax.random.key(1))
    mask, optimizer = jf.adapter_mask(adapted), optax.sgd(0.5)
    # b away from zero, so that a learns too.
    rng = np.random.default_rng(0)

    def noised(learns, leaf):
        return leaf + np.float32(0.1 * rng.standard_normal(leaf.shape)) if learns else leaf

    adapted = jax.tree.map(noised, mask, adapted)
    state = jf.init_state(adapted, optimizer, mesh=mesh, trainable=mask)
    step = jf.make_step(jf.loss_of("causal", config), optimizer, trainable=mask)
    state, metrics = step(state, BATCH)
    return jax.tree.map(np.asarray, state.params), float(metrics["loss"])


def apart(one, several):
    """The largest difference of losses and parameters, of numbers above 1 as a fraction."""

    def error(a, b):
        difference = np.subtract(a, b, dtype=np.float64)
        return float((np.abs(difference) / np.maximum(np.abs(a), 1)).max())

    return max(jax.tree.leaves(jax.tree.map(error, one, several)))


def main():
    report = {}
    for label, (lora, kind, sizes) in CASES.items():
        several = stepped(lora, kind, make_mesh(**sizes))
        report[label] = apart(stepped(lora, kind, None), several)
    # As many experts as numbers in a key.
    dropping = dataclasses.replace(EXPERTS, dropout=0.5)
    drops = [stepped(dropping, None, make_mesh(4, expert=2), experts=2) for _ in range(2)]
    json.dump({"apart": report, "dropout": apart(*drops), "loss": drops[0][1]}, sys.stdout)


if __name__ == "__main__":
    main()
