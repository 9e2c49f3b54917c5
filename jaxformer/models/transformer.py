"""A model of any family as pure functions: the table of parameters, initial values, logits."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.arrays.exact import exactly, unknown
from jaxformer.arrays.params import (
    Params,
    Spec,
    Specs,
    check_params,
    init_params,
    map_specs,
    rows,
    scaled,
)
from jaxformer.arrays.sharding import explicit_axes
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import Table
from jaxformer.config.variants import Parametrization
from jaxformer.files import ConfigError, first_of
from jaxformer.layers.cache import Cache
from jaxformer.layers.head import HEADS, head
from jaxformer.layers.output import NOTHING, Aux, Output, Request
from jaxformer.models.families import MODEL_FAMILIES
from jaxformer.models.inputs import Inputs, check_inputs, inputs_of
from jaxformer.models.virtual import has_virtual, virtual_counts, virtual_rows, with_virtual

# The branch of the params with what the loss of an objective has beside the model.
OF_OBJECTIVE = "objective"
OptionalTokens = Int[Array | np.ndarray, "B T"] | None
OptionalSource = Int[Array | np.ndarray, "B S"] | None


SpecsOf = Callable[[ModelConfig], Specs]


def mup_specs(specs_of: SpecsOf, config: ModelConfig) -> Specs:
    """Return the table of a config in the maximal update parametrization, muP (Tensor Programs V,
    arXiv:2203.03466, table 3).

    The settings are those of a base model, `model.mup_base`, and each leaf is scaled by how many
    times its fan-in (m) and its fan-out are those of its row in the base:

                                        initial scale   Adam's rate   what it is
        fan-in as in the base           1               1             embeddings, norms, biases
        fan-in and fan-out grow         1 / sqrt(m)     1 / m         matrices of blocks
        fan-in alone grows              1 / m           1 / m         output layers, routers

    The optimizer applies the rates (`training/optimizers/run_optimizer.py`). Scores of attention
    fall as 1 / head_width (`ModelConfig.score_scale`), and the logits of a tied head are divided by
    m (`layers/head.total_divisor`). Where all widths are those of the base all factors are 1.
    """
    table = specs_of(config)
    base = rows(specs_of(config.base_model))
    different = sorted(rows(table).keys() ^ base.keys())
    if different:
        raise ConfigError(
            f"model.mup_base={config.mup_base!r} and this model differ in"
            f" {first_of(different, between=', ')}: name widths there with which both have the same"
            " parameters."
        )

    def widened(path: str, spec: Spec) -> Spec:
        init = base[path].init
        spec = replace(spec, init=init, base_fans=(base[path].fan_in, base[path].fan_out))
        grown_in, grown_out = spec.growth
        # The first row of the table has grown_in = 1, for which both are 1.
        factor = 1 / grown_in if grown_out == 1 else 1 / math.sqrt(grown_in)
        if factor != 1:
            spec = replace(spec, init=scaled(init, factor))
        return spec

    return map_specs(widened, table)


# How the initial values and the learning rates of a model follow its width.
PARAMETRIZATIONS: Table[Callable[[SpecsOf, ModelConfig], Specs]] = Table(
    Parametrization, {"standard": lambda specs_of, config: specs_of(config), "mup": mup_specs}
)


def specs(config: ModelConfig) -> Specs:
    """Return the table of parameters."""
    if not config.vocab_size:
        raise ConfigError("model.vocab_size=0 needs a tokenizer: give the number of tokens here.")
    specs_of = MODEL_FAMILIES[config.family].specs
    table = PARAMETRIZATIONS[config.parametrization](specs_of, config)
    return {name: branch for name, branch in table.items() if branch}


# The cached tables are shared, so they must only be read.
_table = functools.lru_cache(specs)


def without_objective(params: Params) -> Params:
    """Return the params without those that only the loss of an objective reads."""
    if not isinstance(params, dict) or OF_OBJECTIVE not in params:
        return params
    return {name: branch for name, branch in params.items() if name != OF_OBJECTIVE}


def check_model(params: Params, config: ModelConfig) -> None:
    """Raises ConfigError naming every leaf of `params` whose shape does not fit the config."""
    table = _table(config)
    params = without_objective(params)
    if has_virtual(params):
        table = table | {"virtual": virtual_rows(params, config, table)}
    check_params(table, params)


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Return the initial parameters: a nested dict of float32 arrays; blocks have a leading layer
    axis."""
    return init_params(specs(config), key)


def hidden(
    params: Params,
    config: ModelConfig,
    inputs: Inputs,
    cache: Cache | None = None,
    key: jax.Array | None = None,
    request: Request = NOTHING,
) -> Output:
    """Return the residual stream before the head [B, T, D], the cache with these tokens if one is
    given, and an `Aux`: sums to add to the loss, metrics, and captures."""
    # Generation has counted the tokens that it reads into a cache.
    if cache is None:
        _check_context(params, config, inputs)
    if "virtual" in params:
        params, inputs = with_virtual(params, config, inputs, key)
    if config.exact:
        if explicit_axes():
            raise ConfigError(
                "model.exact=True needs a mesh of automatic axes, as jaxformer.make_mesh makes it:"
                " each device computes its rows by itself."
            )
        # The compiler would compute the sines of positions that are constants by other rules.
        inputs = replace(
            inputs,
            layout=_with_unknown_positions(inputs.layout, inputs.tokens),
            source_layout=_with_unknown_positions(inputs.source_layout, inputs.tokens),
        )
    with exactly(config.exact):
        return MODEL_FAMILIES[config.family].hidden(params, config, inputs, cache, key, request)


def _with_unknown_positions(layout: Any, tokens: jax.Array) -> Any:
    """Return the layout, if there is one, with positions that the compiler does not know."""
    if layout is None:
        return None
    return replace(layout, positions=unknown(layout.positions, tokens))


def context_of(params: Params, config: ModelConfig, source: bool = False) -> int:
    """Return how many tokens, or tokens of a source, a segment may have: model.max_length, less the
    virtual tokens before them where these take rows of a table of positions."""
    if config.embedded_positions != "learned":
        return config.max_length
    before, before_source = virtual_counts(params, config)
    return max(config.max_length - (before_source if source else before), 0)


def _check_context(params: Params, config: ModelConfig, inputs: Inputs) -> None:
    """Raises ConfigError for rows longer than the learned positions, of which virtual tokens take
    some."""
    if config.embedded_positions != "learned":
        return
    for name, layout in (("tokens", inputs.layout), ("source", inputs.source_layout)):
        # There is no source, or the caller passes positions.
        if layout is None or not layout.ordered:
            continue
        limit = context_of(params, config, name == "source")
        length = layout.positions.shape[1]
        virtual = config.max_length - limit
        if length > limit:
            advice = ", or use fewer virtual tokens" if virtual else ""
            raise ConfigError(
                f"{name} has rows of {length}, and the learned positions of"
                f" model.max_length={config.max_length} reach {limit} behind {virtual} virtual"
                f" tokens: shorten the rows{advice}."
            )


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    segment_ids: OptionalTokens = None,
    positions: OptionalTokens = None,
    source: OptionalSource = None,
    source_segment_ids: OptionalSource = None,
    token_types: OptionalTokens = None,
    **arrays: jax.Array | np.ndarray,
) -> Float[Array, "B *_ V"]:
    """Return the logits: tokens [B, T] int -> [B, T, V] float32, or [B, C] with the head "classes",
    or the residual stream [B, T, D] with the head "none".

    `segment_ids` [B, T] int: tokens attend only within their own number, 0 is padding. `positions`
    [B, T] int default to counting from the start of each segment. An encoder-decoder takes the
    target as `tokens` and the `source` [B, S]; targets attend to the `source_segment_ids` of their
    own number. `arrays` are what an embedding from outside the package reads besides.
    A pure function: jit (with `static_argnums=1`), grad, jvp and vmap apply to it.
    """
    batch = dict(tokens=tokens, segment_ids=segment_ids, positions=positions, source=source)
    batch |= {"source_segment_ids": source_segment_ids, "token_types": token_types}
    return logits_of(params, config, batch | arrays)[0]


def logits_of(
    params: Params, config: ModelConfig, batch: dict[str, Any], request: Request = NOTHING
) -> tuple[jax.Array, Aux]:
    """Apply `forward` to its inputs by name, with what the layers returned beside the logits."""
    check_model(params, config)
    check_inputs(config, batch)
    inputs = inputs_of(batch)
    x, _, aux = hidden(params, config, inputs, request=request)
    logits = head(params, config, x, inputs.layout)
    if HEADS[config.output].of_row:
        logits = logits[:, 0]  # [B, 1, C] -> [B, C]
    return logits, aux
