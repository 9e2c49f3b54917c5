"""Beginning from another model, a run's or a Hugging Face directory's: its trunk is taken over,
another head is new."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxformer.checkpoints import flat_leaves
from jaxformer.config import ConfigError, ModelConfig, RunConfig
from jaxformer.loading import load, run_of
from jaxformer.models.transformer import specs as model_specs
from jaxformer.params import Params, rows
from jaxformer.runs.config import OWN
from jaxformer.tokenizer.files import tokenizer_file

HEADS = ("head", "pooler", "next_sentence")
LeafShapes = dict[str, tuple[int, ...]]


def check_base(run: RunConfig) -> RunConfig:
    """`run`, with the tokenizer of `run.init_from` where it names none. Raises ConfigError where
    its model does not fit.

    Every setting of the model that is another than the base's takes effect, or is refused by name:
    what the parameters of the trunk have the shape for is computed as asked (a longer context,
    another window), what they have not is refused.
    """
    begun, base = Path(run.run.dir), Path(run.run.init_from)
    if not run.run.init_from:
        return run
    if not run.tokenizer.path:
        origin = begun if (begun / "config.json").is_file() else base
        run = dataclasses.replace(
            run, tokenizer=dataclasses.replace(run.tokenizer, path=str(tokenizer_file(origin)))
        )
    if (begun / "config.json").is_file():
        return run  # it took over what it needs when it was begun
    there = run_of(base).model
    model = dataclasses.replace(run.model, vocab_size=run.model.vocab_size or there.vocab_size)
    wanted, found = trunk_of(model), trunk_of(there)
    if wanted == found:
        return run
    lines = [line for name in _differing(model, there) if (line := _reason(name, model, there))]
    lines += (
        []
        if lines
        else [f"{path}: {list(found.get(path, ()))} there" for path in _apart(wanted, found)[:8]]
    )
    raise ConfigError(
        f"the parameters of run.init_from={str(base)!r} do not fit the model asked for:\n  "
        + "\n  ".join(lines)
        + "\nLeave these settings out of the config and the command line, which then are the"
        " base's "
        "(configs/finetune.py sets none), or train without run.init_from."
    )


def trunk_of(model: ModelConfig) -> LeafShapes:
    """The shape of each parameter outside of the heads, by its path."""
    known = dataclasses.replace(
        model, n_classes=model.n_classes or 2
    )  # not known before the data is
    table = rows({name: part for name, part in model_specs(known).items() if name not in HEADS})
    return {path: spec.shape for path, spec in table.items()}


def _differing(model: ModelConfig, there: ModelConfig) -> list[str]:
    names = [entry.name for entry in dataclasses.fields(model) if entry.name not in OWN]
    return [name for name in names if getattr(model, name) != getattr(there, name)]


def _reason(name: str, model: ModelConfig, there: ModelConfig) -> str:
    """Which parameters one setting alone would change; empty where it changes none."""
    asked, found = getattr(model, name), trunk_of(there)
    line = f"model.{name}={asked!r}, and it is {getattr(there, name)!r} there"
    try:
        wanted = trunk_of(dataclasses.replace(there, **{name: asked}))
    except ConfigError:
        return line
    apart = _apart(wanted, found)
    if not apart:
        return ""
    path = apart[0]
    there_shape, here = (
        list(shapes[path]) if path in shapes else "missing" for shapes in (found, wanted)
    )
    return f"{line} ({path}: {there_shape} there, {here} asked for)"


def _apart(wanted: LeafShapes, found: LeafShapes) -> list[str]:
    return [path for path in {**wanted, **found} if wanted.get(path) != found.get(path)]


def warm_start(
    run: RunConfig, params: Params, mesh: Mesh | None = None, labels: tuple[str, ...] = ()
) -> tuple[Params, str]:
    """`params` with every leaf of `run.init_from`'s that has its place here, and a sentence about
    what is new.

    A head of classes is taken over where these are the data's `labels`, in their order.
    Raises ConfigError where anything but a head has none.
    """
    old = load(run.run.init_from, mesh=mesh)
    found, wanted = flat_leaves(old.params), flat_leaves(params)
    fits = {
        path for path, leaf in wanted.items() if path in found and found[path].shape == leaf.shape
    }
    if old.config.output != run.model.output or (old.labels and old.labels != labels):
        fits = {path for path in fits if path.partition(".")[0] != "head"}
    lost = [
        path
        for path in [*wanted, *found]
        if path not in fits and path.partition(".")[0] not in HEADS
    ]
    if lost:
        names = ", ".join(dict.fromkeys(lost))
        raise ConfigError(
            f"run.init_from={run.run.init_from!r} does not fit this model, beyond its head:"
            f" {names}."
        )
    leaves = [
        jax.device_put(found[path], leaf.sharding) if path in fits else leaf
        for path, leaf in wanted.items()
    ]
    new = [path for path in wanted if path not in fits]
    made: Any = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return (
        made,
        f"{len(fits)} tensors are those of {run.run.init_from}; new: {', '.join(new) or 'none'}.",
    )


def with_classes(run: RunConfig, labels: tuple[str, ...]) -> RunConfig:
    """`run` with model.n_classes filled from the data's labels where it is 0. Raises ConfigError
    where they do not fit."""
    model: ModelConfig = run.model
    if model.output not in ("classes", "tags"):
        return run
    if len(labels) < 2:
        raise ConfigError(
            f"the data has {len(labels)} label, and at least 2 make something to learn: look at"
            " data.label_field."
        )
    if model.n_classes and model.n_classes < len(labels):
        raise ConfigError(
            f"model.n_classes={model.n_classes} is less than the data's {len(labels)} labels: set"
            " it to 0."
        )
    return dataclasses.replace(
        run, model=dataclasses.replace(model, n_classes=model.n_classes or len(labels))
    )
