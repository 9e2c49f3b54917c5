"""Warm starts: the parameters of a run or of a Hugging Face model outside of the heads, which may
be new."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxformer.checkpoint_reading import flat_leaves
from jaxformer.config import ConfigError, ModelConfig, RunConfig
from jaxformer.models.transformer import specs as model_specs
from jaxformer.params import Params, rows
from jaxformer.runs.config import OWN, origin_of, with_tokenizer_of

HEADS = ("head", "pooler", "next_sentence")
LeafShapes = dict[str, tuple[int, ...]]


def check_base(run: RunConfig) -> RunConfig:
    """A run with run.init_from, with the tokenizer of that model if it names none. Raises
    ConfigError where its model does not fit.

    A model setting that differs from the base takes effect if the parameters keep their shapes (a
    longer context, another window), and is refused by name otherwise.
    """
    from jaxformer.loading import run_of

    base = Path(run.run.init_from)
    origin = origin_of(Path(run.run.dir), base)
    run = with_tokenizer_of(origin, run)
    if origin != base:
        return run
    there = run_of(base).model
    model = dataclasses.replace(run.model, vocab_size=run.model.vocab_size or there.vocab_size)
    wanted, found = trunk_of(model), trunk_of(there)
    if wanted == found:
        return run
    names = [entry.name for entry in dataclasses.fields(model) if entry.name not in OWN]
    differing = [name for name in names if getattr(model, name) != getattr(there, name)]
    lines = [line for name in differing if (line := _reason(name, model, there))]
    lines = lines or [f"{path}: {found.get(path)} in the base" for path in _apart(wanted, found)]
    reasons = "\n  ".join(lines[:8])
    raise ConfigError(
        f"the parameters of run.init_from={str(base)!r} do not fit this model:\n  {reasons}\n"
        "Remove these settings from the config and the command line, so that those of the base are"
        " used (configs/finetune.py sets none), or train without run.init_from."
    )


def trunk_of(model: ModelConfig) -> LeafShapes:
    """The shape of each parameter outside of the heads, by its path."""
    known = dataclasses.replace(model, n_classes=model.n_classes or 2)  # 0: not known before data
    table = rows({name: part for name, part in model_specs(known).items() if name not in HEADS})
    return {path: spec.shape for path, spec in table.items()}


def _reason(name: str, model: ModelConfig, there: ModelConfig) -> str:
    """Which parameter one setting alone would change; empty if it changes none."""
    asked, found = getattr(model, name), trunk_of(there)
    line = f"model.{name}={asked!r}, but it is {getattr(there, name)!r} in the base"
    try:
        wanted = trunk_of(dataclasses.replace(there, **{name: asked}))
    except ConfigError:
        return line
    if not (apart := _apart(wanted, found)):
        return ""
    path = apart[0]
    shapes = f"{found.get(path, 'missing')} in the base, {wanted.get(path, 'missing')} here"
    return f"{line} ({path}: {shapes})"


def _apart(wanted: LeafShapes, found: LeafShapes) -> list[str]:
    return [path for path in {**wanted, **found} if wanted.get(path) != found.get(path)]


def warm_start(
    run: RunConfig, params: Params, mesh: Mesh | None = None, labels: tuple[str, ...] = ()
) -> tuple[Params, str]:
    """`params` with the leaves of `run.init_from` that fit, and a sentence about those that are
    new.

    A head of classes is used only if its labels are those of the data, in their order. Raises
    ConfigError if a leaf outside of the heads does not fit.
    """
    from jaxformer.loading import load

    old = load(run.run.init_from, mesh=mesh)
    found, wanted = flat_leaves(old.params), flat_leaves(params)
    other_head = old.config.output != run.model.output or (old.labels and old.labels != labels)
    leaves, new = dict(wanted), list[str]()
    for path, leaf in wanted.items():
        renewed = other_head and path.partition(".")[0] == "head"
        if path in found and found[path].shape == leaf.shape and not renewed:
            leaves[path] = jax.device_put(found[path], leaf.sharding)
        else:
            new.append(path)
    without_place = [*new, *(path for path in found if path not in wanted)]
    if lost := [path for path in without_place if path.partition(".")[0] not in HEADS]:
        raise ConfigError(
            f"run.init_from={run.run.init_from!r} does not fit this model outside of its head:"
            f" {', '.join(lost)}."
        )
    made: Any = jax.tree.unflatten(jax.tree.structure(params), list(leaves.values()))
    kept = len(wanted) - len(new)
    return (
        made,
        f"{kept} tensors are those of {run.run.init_from}; new: {', '.join(new) or 'none'}.",
    )
