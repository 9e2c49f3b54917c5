"""`jaxformer convert SOURCE TARGET`: a run to a Hugging Face model directory, such a directory to a
run, or an adapter to peft's format or into its model."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from jaxformer.cli.arguments import StepArguments, parse
from jaxformer.files import ConfigError
from jaxformer.interop.hf_config import Dtype
from jaxformer.report import human_count
from jaxformer.tokenizer.metadata import TOKENIZER_FILES

if TYPE_CHECKING:
    from jaxformer.runs.loading import Loaded

CLOSE = 2e-4  # largest float32 difference, relative to the standard deviation of the logits
UNFINISHED = ".unfinished"  # in a target while it is written
# What a conversion writes, besides.
WRITTEN_NAMES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "checkpoints",
    "config.json",
    "data.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "model.tmp",
    *TOKENIZER_FILES,
    "*.tmp",
)
SIZE_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class ConvertArguments(StepArguments):
    """Converts a run to a Hugging Face model directory, which transformers, vLLM and llama.cpp's
    converter read, or such a directory to a run; an adapter to peft's format, or with --merge to a
    whole Hugging Face model."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Run directory, or a directory with a Hugging Face model or an adapter of peft."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to write, which must be new or empty: an adapter of peft if the source has an
    adapter, a Hugging Face model if it is another run, and a run otherwise."""
    merge: bool = False
    """Write the whole model of an adapter, each weight with what the adapter adds to it."""
    verify: bool = False
    """Compare the logits of both models on the same tokens (needs transformers)."""
    dtype: Dtype = "float32"
    """Dtype of the weights of the Hugging Face model."""
    shard_size: str = "5G"
    """Maximum size of a weight file in bytes, for example 500M or 5G."""
    architecture: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Architecture of the Hugging Face model, for example MistralForCausalLM. If not given, the
    simplest one that computes the same."""


def run(arguments: Sequence[str]) -> int:
    asked = parse(ConvertArguments, "convert", arguments)
    limit = _bytes(asked.shard_size)
    from jaxformer.interop.hf_config import is_pretrained
    from jaxformer.interop.logit_parity import require_transformers
    from jaxformer.interop.peft_config import is_adapter
    from jaxformer.runs.loading import load

    if asked.verify:
        require_transformers()
    target = asked.target
    to_run = is_pretrained(asked.source) and not is_adapter(asked.source)
    _require_empty(target)
    model = load(asked.source, asked.step)
    if adapted := _has_adapter(model):
        model = _merged(model, asked)
    elif asked.merge:
        raise ConfigError(f"{asked.source} has no adapter to merge: leave out --merge.")
    with _whole_or_empty(target):
        if adapted and not asked.merge:
            _write_adapter(model, asked)
        elif to_run:
            _write_run(model, asked)
        else:
            _write_pretrained(model, asked, limit)
    return _verified(model, asked.source if to_run else target, asked) if asked.verify else 0


def _require_empty(target: Path) -> None:
    """Raises ConfigError unless the target is new, empty, or holds only what a conversion that was
    killed has left, which is then removed."""
    if target.is_dir() and (target / UNFINISHED).is_file():
        _remove_written(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: choose a new directory.")


@contextlib.contextmanager
def _whole_or_empty(target: Path) -> Iterator[None]:
    """Marks the target as unfinished in this block, and removes what an error or a signal has left
    of it."""
    new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / UNFINISHED).touch()
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror}): choose another directory."
        ) from error
    try:
        yield
        (target / UNFINISHED).unlink()
    except BaseException:
        _remove_written(target)
        if new:
            with contextlib.suppress(OSError):
                target.rmdir()
        raise


def _remove_written(target: Path) -> None:
    for entry in target.iterdir():
        if entry.name != UNFINISHED and any(map(entry.match, WRITTEN_NAMES)):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    (target / UNFINISHED).unlink()  # last, so that what is killed here is finished later


def _has_adapter(model: "Loaded") -> bool:
    import jax

    from jaxformer.adapters.low_rank import is_adapted

    return any(map(is_adapted, jax.tree.leaves(model.params, is_leaf=is_adapted)))


def _merged(model: "Loaded", asked: ConvertArguments) -> "Loaded":
    """A model with an adapter, merged if that is asked for. Raises ConfigError for options of a
    whole model where it is not."""
    if asked.merge:
        from jaxformer.adapters.adapted_params import merge

        return dataclasses.replace(model, params=merge(model.params))
    if asked.verify:
        raise ConfigError(
            f"--verify compares whole models, and {asked.source} has an adapter: add"
            " --merge, or leave out --verify."
        )
    return model


def _write_adapter(model: "Loaded", asked: ConvertArguments) -> None:
    from jaxformer.interop.peft_writing import save_adapter

    base = Path(model.base).absolute() if model.base else ""
    save_adapter(
        asked.target,
        model.params,
        model.config,
        base=base,
        learned=model.learned,
        architecture=asked.architecture,
        dtype=asked.dtype,
    )
    if model.tokenizer is not None:
        model.tokenizer.save(asked.target / "tokenizer.json")
    over = f" over {base}" if base else ""
    print(f"{asked.target}: an adapter of peft{over}, {asked.dtype}")


def _write_run(model: "Loaded", asked: ConvertArguments) -> None:
    from jaxformer.runs.loading import save_run

    save_run(asked.target, model, asked.source)
    use = ", to sample from or to fine-tune (--run.init_from)"
    use = use if model.tokenizer else ", without a tokenizer"
    print(f"{asked.target}: a run of {model.config.family} {_size(model)}{use}")


def _write_pretrained(model: "Loaded", asked: ConvertArguments, limit: int) -> None:
    from jaxformer.files import read_object
    from jaxformer.interop.pretrained import save_pretrained

    files = save_pretrained(
        asked.target,
        model.params,
        model.config,
        model.tokenizer,
        shard_bytes=limit,
        architecture=asked.architecture,
        dtype=asked.dtype,
        labels=model.labels,
    )
    kind = read_object(asked.target / "config.json")["architectures"][0]
    count = sum(file.suffix == ".safetensors" for file in files)
    in_files = f"in {count} file{'s' * (count > 1)}"
    print(f"{asked.target}: {kind} {_size(model)}, {asked.dtype}, {in_files}")


def _size(model: "Loaded") -> str:
    import jax

    return f"of {human_count(sum(leaf.size for leaf in jax.tree.leaves(model.params)))} parameters"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise ConfigError(f"--shard_size {text!r} is no number of bytes: write it as 500M or 5G.")
    return int(float(found[1]) * SIZE_SUFFIXES[found[2].upper()])


def _verified(model: "Loaded", directory: Path, asked: ConvertArguments) -> int:
    """Prints how far both models differ; returns 1 if float32 logits differ by more than
    rounding."""
    from jaxformer.interop.logit_parity import compare

    found = compare(directory, model.params, model.config)
    relative = found.largest / found.deviation
    print(
        f"largest logit difference {found.largest:.3g}, {relative:.2g} of their standard deviation"
        f" {found.deviation:.3g}"
    )
    print(f"KL, nats: mean {found.kl.mean():.2g}, largest {found.kl.max():.2g}; by position:")
    for at in range(0, len(found.kl), 8):
        values = np.asarray(found.kl[at : at + 8])
        print(f"{at:6d}  " + " ".join(f"{value:8.1e}" for value in values))
    if relative <= CLOSE:
        print("both models agree")
        return 0
    if asked.dtype != "float32" and directory == asked.target:
        print(f"the difference includes the rounding to {asked.dtype}")
        return 0
    print(f"NOT EQUAL: float32 should differ by at most {CLOSE:g} of the standard deviation")
    return 1
