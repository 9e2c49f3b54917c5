"""Every family with every variant in the smallest models that show it: generated products of the
settings, and rows of documents to lay out in different ways."""

import dataclasses
import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import jaxformer as jf
from jaxformer.arrays.params import map_specs, ones
from jaxformer.config.settings import choices, hints, with_settings
from jaxformer.layers.block import empty_cache
from jaxformer.layers.head import head
from jaxformer.layers.kernels import KERNELS, Needs, missing
from jaxformer.layers.masks import TokenLayout
from jaxformer.models.inputs import Inputs, inputs_of
from jaxformer.models.transformer import hidden, specs

HINTS = hints(jf.ModelConfig)
FAMILIES, POSITIONS = choices(HINTS["family"]), choices(HINTS["positions"])
SIZES = dict(vocab_size=37, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, max_length=32)
SIZES |= {"relative.buckets": 8, "relative.distance": 10}


def rows_of(setting, **more):
    """One option for each word that a setting allows."""
    return {word: {setting: word} | more for word in choices(HINTS[setting])}


STRETCHED = {  # lengths and turns at which each way to stretch shows at a few tokens
    "linear": {},
    "dynamic": {"rope.original_length": 32},
    "yarn": {"rope.original_length": 16, "rope.fast": 1.0, "rope.slow": 0.1},
    "llama3": {"rope.original_length": 8, "rope.slow": 0.1, "rope.fast": 1.0},
}
LONGROPE = {
    "rope.scaling": "longrope",
    "rope.factor": 2.0,
    "rope.original_length": 32,
    "rope.short_factor": "1.5 1.25",
    "rope.long_factor": "1.5 4",
}
LATENT = {
    "mixer": "latent",
    "n_kv_heads": 0,
    "latent.kv_rank": 6,
    "latent.query_rank": 5,
    "head_dim": 6,
    "latent.rope_head_dim": 4,
    "attention.value_dim": 3,
}
VARIANTS = {
    "family": rows_of("family"),
    "positions": (
        rows_of("positions")
        | {
            f"rope {name}": {"rope.scaling": name, "rope.factor": 2.0} | more
            for name, more in STRETCHED.items()
        }
        | {"rope in part, interleaved": {"rope.fraction": 0.5, "rope.pairing": "interleaved"}}
        | {"rope with two bases": {"rope.window_theta": 50.0, "window": 3, "window_pattern": "wf"}}
        | {"rope in some layers": {"rope.pattern": "np"}}
        | {
            "sinusoidal half": {"positions": "sinusoidal", "embedding.sinusoids": "half_closed"}
            | {"embedding.position_offset": 2}
        }
        | {"longrope": LONGROPE}
    ),
    "heads": (
        {"grouped": {}, "multi-head": {"n_kv_heads": 0}}
        | {"multi-query, wide values": {"n_kv_heads": 1, "attention.value_dim": 6}}
        | {"latent": LATENT}
        | {"delta": {"layer_pattern": "dm", "recurrent.key_heads": 2, "recurrent.chunk": 3}}
        | {
            "delta of channels": {"layer_pattern": "md", "recurrent.decay": "channel"}
            | {"recurrent.rank": 3, "recurrent.gate": "sigmoid", "recurrent.norm_placement": "pre"}
        }
        | {"mamba2": {"layer_pattern": "sm", "recurrent.key_heads": 2, "recurrent.chunk": 3}}
    ),
    "window": {"none": {}, "w": {"window": 3}, "wf": {"window": 3, "window_pattern": "wf"}},
    "scores": (
        {"plain": {}, "scale": {"attention.scale": 1.0}, "soft-cap": {"attention.soft_cap": 1.0}}
        | {"sinks": {"attention.sinks": True}, "gate": {"attention.output_gate": True}}
    ),
    "query_key_norm": rows_of("attention.query_key_norm"),
    "norm": rows_of("norm"),
    "norm_placement": rows_of("norm_placement"),
    "residual": rows_of("residual") | {"multiplier": {"residual_multiplier": 0.5}},
    "activation": {
        "swiglu": {},
        "gelu": {"activation": "gelu"},
    },  # the others are tested one by one
    "bias": rows_of("bias"),
    "embedding": (
        {"plain": {}, "scale": {"embedding.scale": "sqrt"}, "norm": {"embedding.norm": True}}
        | {"types": {"embedding.token_types": 2}, "multiplier": {"embedding.multiplier": 3.0}}
    ),
    "output": (
        {"own": {}, "tied": {"tied_head": True}, "logit scale": {"head.scale": "rsqrt"}}
        | {"logit soft-cap": {"head.soft_cap": 40.0}, "bias": {"head.bias": True}}
        | {"logit divisor": {"head.divisor": 2.5}}
    ),
    "kernel": {"plain": {}, "blocked": {"attention.kernel": "blocked"}},
}
BASE = {factor: next(iter(options)) for factor, options in VARIANTS.items()}


def settings_of(choice):
    """The settings of a choice of options, {factor: option}."""
    return functools.reduce(
        lambda a, b: a | b, (VARIANTS[factor][option] for factor, option in choice.items()), {}
    )


def config_of(choice):
    return with_settings(jf.ModelConfig(), SIZES | settings_of(choice))


def fits(choice):
    """Whether the config allows a choice, its kernel serves it, and its logits can be compared."""
    try:
        config = config_of(choice)
    except jf.ConfigError:
        return False
    if config.norm == "none" and config.head.soft_cap:
        # Without norms the logits are 1e5, of which a cap leaves the rounding alone.
        return False
    kernel = "xla" if config.attention.kernel == "auto" else config.attention.kernel
    return not missing(KERNELS[kernel].lacks, Needs.of_run(config, "cpu", "float32", 16, 3))


IN_ATTENTION = {"positions", "heads", "window", "scores", "query_key_norm", "kernel"}


def meet(a, b):
    """Whether two options are to be held together: both are of attention, which alone mixes tokens,
    or one is the family."""
    factors = {a[0], b[0]}
    return len(factors) == 2 and ("family" in factors or factors <= IN_ATTENTION)


@functools.cache
def pairwise():
    """Choices that together hold every pair of options that `meet` and fit together, by filling in
    greedily."""
    options = [(factor, option) for factor, row in VARIANTS.items() for option in row]
    apart = {
        frozenset((a, b))
        for a, b in itertools.combinations(options, 2)
        if a[0] != b[0] and not fits(dict((a, b)))
    }
    wanted = {frozenset(p) for p in itertools.combinations(options, 2) if meet(*p)} - apart
    order = {option: i for i, option in enumerate(options)}
    choices = []
    while wanted:
        row = sorted(min(wanted, key=lambda pair: sorted(order[o] for o in pair)), key=order.get)
        for factor in [name for name in VARIANTS if name not in dict(row)]:
            able = [
                (factor, o)
                for o in VARIANTS[factor]
                if all(frozenset(((factor, o), r)) not in apart for r in row)
            ]
            row.append(
                max(able, key=lambda o: (sum(frozenset((o, r)) in wanted for r in row), -order[o]))
            )
        wanted -= {frozenset(pair) for pair in itertools.combinations(row, 2)}
        choices.append(dict(row))
    return choices, apart


def holding_each_option(choices, factors=tuple(VARIANTS)):
    """The fewest of these choices, one after another, that together hold each option of these
    factors that one of them has."""
    missing = {option for choice in choices for option in choice.items() if option[0] in factors}
    chosen = []
    while missing:
        best = max(choices, key=lambda choice: len(missing & choice.items()))
        chosen.append(best)
        missing -= best.items()
    return chosen


@functools.cache
def params_of(config):
    """Params well away from their initial values; a leaf depends on its path and shape alone.

    NumPy draws them: JAX would compile a program for each shape.
    """

    def moved(path, spec):
        noise = np.random.default_rng(zlib.crc32(path.encode())).standard_normal(spec.shape)
        return jnp.asarray((spec.init is ones) + 0.3 * noise, spec.dtype)

    return map_specs(moved, specs(config))


DOCUMENT = 6  # the length of all documents and sources: calls of few shapes are few small programs
RNG = np.random.default_rng(0)
DOCUMENTS = {
    "tokens": RNG.integers(0, 37, (4, DOCUMENT), dtype=np.int32),
    "source": RNG.integers(0, 37, (4, DOCUMENT), dtype=np.int32),
    "token_types": RNG.integers(0, 2, (4, DOCUMENT), dtype=np.int32),
}
# documents in a row by number, and padding by its length (of the row, of the source's row)
LAYOUTS = {
    "packed": (0, 1, (6, 6)),
    "padded on the left": ((12, 12), 2),
    "padded on the right": (3, (12, 12)),
    "packed and padded": ((2, 3), 1, (1, 2), 0, (3, 1)),
}


def alone(config, cut=slice(None)):
    """The documents, one a row, as the inputs of `jf.forward`."""
    kept = {
        "tokens": True,
        "source": config.family == "encoder_decoder",
        "token_types": config.embedding.token_types > 0,
    }
    return {name: DOCUMENTS[name][cut] for name, keep in kept.items() if keep}


def laid_out(config, layouts=tuple(LAYOUTS)):
    """One row a layout, as the inputs of `jf.forward`. Padding is of any tokens."""
    batch = {}
    for name in alone(config):
        rows, segments = [], []
        for layout in layouts:
            sizes = [
                piece[name == "source"] if isinstance(piece, tuple) else 0
                for piece in LAYOUTS[layout]
            ]
            parts = [
                np.full(size, 1) if size else DOCUMENTS[name][piece]
                for piece, size in zip(LAYOUTS[layout], sizes, strict=True)
            ]
            ids = [0 if isinstance(piece, tuple) else piece + 1 for piece in LAYOUTS[layout]]
            rows.append(np.concatenate(parts))
            segments.append(np.repeat(ids, [len(part) for part in parts]))
        batch[name] = np.stack(rows).astype(np.int32)
        if ids_name := {"tokens": "segment_ids", "source": "source_segment_ids"}.get(name):
            batch[ids_name] = np.stack(segments).astype(np.int32)
    return batch


def where(layout):
    """For each document of a layout, where it lies in its row."""
    found, at = {}, 0
    for piece in LAYOUTS[layout]:
        if not isinstance(piece, tuple):
            found[piece] = slice(at, at + DOCUMENT)
        at += piece[0] if isinstance(piece, tuple) else DOCUMENT
    return found


def cached(config, batch, size=DOCUMENT, params=None, compiled=False, dtype=jnp.float32):
    """The logits of rows read into a cache, `size` tokens at a time. Compiled, a config has one
    program; else configs share those of their operations."""
    params, inputs = params_of(config) if params is None else params, inputs_of(batch)
    rows, length = inputs.tokens.shape
    cache, logits = empty_cache(config, rows, length, dtype), []
    read = jax.jit(_read, static_argnums=1) if compiled else _read
    layout, types = inputs.layout, inputs.types
    whole = (inputs.tokens, TokenLayout(layout.positions, layout.segments), types)
    for at in range(0, length, size):
        piece = Inputs(*jax.tree.map(lambda a, at=at: a[:, at : at + size], whole))
        if at == 0:
            source, source_layout = inputs.source, inputs.source_layout
            piece = dataclasses.replace(piece, source=source, source_layout=source_layout)
        found, cache = read(params, config, piece, cache)
        logits.append(found)
    return jnp.concatenate(logits, 1)


def _read(params, config, piece, cache):
    x, cache, _ = hidden(params, config, piece, cache)
    return head(params, config, x, piece.layout), cache
