"""A stack as a scan: one program for all layers of a position of the pattern."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.config_model import ModelConfig
from jaxformer.layers.output import Aux, Output, merged
from jaxformer.layers.pattern import layer_configs, period_of
from jaxformer.models.stack import StackCall, layer_of, stacks_of
from jaxformer.params import Params


def scanned(blocks: Params, config: ModelConfig, x: jax.Array, call: StackCall) -> Output:
    """A scan over the whole periods of the pattern, then the remaining layers unrolled."""
    stacks = stacks_of(blocks)
    depth = sum(len(jax.tree.leaves(stacked)[0]) for stacked in stacks)
    configs = layer_configs(config, depth)
    period = period_of(configs)
    times = depth // period
    numbers = [range(p, times * period, period) for p in range(period)]  # of each position's layers

    def body(x: jax.Array, items: list[tuple[Params, jax.Array]]) -> tuple[jax.Array, list[Aux]]:
        found = []
        for p, (layer, i) in enumerate(items):
            run = layer_of(configs[p], call, call.request.at(numbers[p], i), scanned=True)
            x, _, aux = run(x, layer, i)
            found.append(aux)
        return x, found

    traced = [jnp.arange(of.start, of.stop, of.step) for of in numbers]
    layers = _periods(stacks, period, times)
    x, stacked = jax.lax.scan(body, x, list(zip(layers, traced, strict=True)))
    parts = [
        _entry(replace(aux, captures=call.request.named(aux.captures, layer)), i)
        for aux, of_position in zip(stacked, numbers, strict=True)
        for i, layer in enumerate(of_position)
    ]
    for i in range(times * period, depth):
        layer = _entry(stacks[i % len(stacks)], i // len(stacks))
        x, _, aux = layer_of(configs[i], call, call.request.at((i,)))(x, layer, i)
        parts.append(replace(aux, captures=call.request.named(aux.captures, i)))
    return Output(x, None, merged(parts))


def _periods(stacks: list[Params], period: int, times: int) -> list[Params]:
    """For each position of the pattern the params of its layers, [times, ...]."""
    if len(stacks) == period:
        return [jax.tree.map(lambda leaf: leaf[:times], stacked) for stacked in stacks]
    taken = [slice(p, times * period, period) for p in range(period)]
    return [jax.tree.map(lambda leaf, part=part: leaf[part], stacks[0]) for part in taken]


def _entry(stacked: Any, i: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[i], stacked)
