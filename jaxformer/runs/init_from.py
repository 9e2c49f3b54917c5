"""Beginning from another model, a run's or a Hugging Face directory's: its shape and tokenizer are taken, its trunk is
carried, another head is new."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxformer.checkpoints import flat_leaves
from jaxformer.config import ConfigError, ModelConfig, RunConfig
from jaxformer.loading import load, run_of
from jaxformer.params import Params
from jaxformer.tokenizer.files import tokenizer_file

# What the new run decides for itself; all else about the model is the old run's.
OWN = ("head", "n_classes", "pooling", "next_sentence", "dropout", "dtype", "layer_loop", "remat", "attention_kernel")
HEADS = ("head", "pooler", "next_sentence")


def adopted(run: RunConfig) -> RunConfig:
    """`run` with the model and the tokenizer of `run.init_from`, where that is set; a run already begun keeps its own."""
    if not run.run.init_from:
        return run
    begun, origin = Path(run.run.dir) / "config.json", Path(run.run.init_from)
    if not begun.is_file() and not (origin / "config.json").is_file():
        raise ConfigError(
            f"run.init_from={run.run.init_from!r} has no config.json: give a run directory, or one of a Hugging Face model."
        )
    model = run_of(begun.parent if begun.is_file() else origin).model
    model = dataclasses.replace(model, **{name: getattr(run.model, name) for name in OWN})
    path = run.tokenizer.path or str(tokenizer_file(begun.parent if begun.is_file() else origin))
    tokenizer = dataclasses.replace(run.tokenizer, path=path)
    return dataclasses.replace(run, model=model, tokenizer=tokenizer)


def carried(run: RunConfig, params: Params, mesh: Mesh | None = None, labels: tuple[str, ...] = ()) -> tuple[Params, str]:
    """`params` with every leaf of `run.init_from`'s that has its place here, and a sentence about what is new.

    A head of classes is carried where these are the data's `labels`, in their order.
    Raises ConfigError where anything but a head has none.
    """
    old = load(run.run.init_from, mesh=mesh)
    found, wanted = flat_leaves(old.params), flat_leaves(params)
    fits = {path for path, leaf in wanted.items() if path in found and found[path].shape == leaf.shape}
    if old.config.output != run.model.output or (old.labels and old.labels != labels):
        fits = {path for path in fits if path.partition(".")[0] != "head"}
    lost = [path for path in [*wanted, *found] if path not in fits and path.partition(".")[0] not in HEADS]
    if lost:
        names = ", ".join(dict.fromkeys(lost))
        raise ConfigError(f"run.init_from={run.run.init_from!r} does not fit this model, beyond its head: {names}.")
    leaves = [jax.device_put(found[path], leaf.sharding) if path in fits else leaf for path, leaf in wanted.items()]
    new = [path for path in wanted if path not in fits]
    made: Any = jax.tree.unflatten(jax.tree.structure(params), leaves)
    return made, f"{len(fits)} tensors are those of {run.run.init_from}; new: {', '.join(new) or 'none'}."


def with_classes(run: RunConfig, labels: tuple[str, ...]) -> RunConfig:
    """`run` with model.n_classes filled from the data's labels where it is 0. Raises ConfigError where they do not fit."""
    model: ModelConfig = run.model
    if model.output not in ("classes", "tags"):
        return run
    if len(labels) < 2:
        raise ConfigError(
            f"the data has {len(labels)} label, and at least 2 make something to learn: look at data.label_field."
        )
    if model.n_classes and model.n_classes < len(labels):
        raise ConfigError(f"model.n_classes={model.n_classes} is less than the data's {len(labels)} labels: set it to 0.")
    return dataclasses.replace(run, model=dataclasses.replace(model, n_classes=model.n_classes or len(labels)))
