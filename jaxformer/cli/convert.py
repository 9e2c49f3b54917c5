"""`jaxformer convert SOURCE TARGET`: a run or a GGUF file to a Hugging Face model directory, such a
directory to a run, or an adapter to peft's format or into its model."""

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxformer.adapters.adapted_params import merge
from jaxformer.adapters.low_rank import is_adapted
from jaxformer.cli.arguments import ConvertArguments
from jaxformer.files import ConfigError, is_remote, located, read_object, store_errors
from jaxformer.files.uploads import LocalFolder
from jaxformer.interop.hf_config import is_pretrained
from jaxformer.interop.logit_parity import compare, require_transformers
from jaxformer.interop.peft_config import is_adapter
from jaxformer.interop.peft_writing import save_adapter
from jaxformer.interop.pretrained import save_pretrained
from jaxformer.report import human_count
from jaxformer.runs.loading import Loaded, load, run_of, save_run
from jaxformer.tokenizer.metadata import TOKENIZER_FILES

CLOSE = 2e-4  # largest float32 difference, relative to the standard deviation of the logits
UNFINISHED = ".unfinished"  # in a target while it is written
# Patterns of the names of all other files that a conversion writes.
WRITTEN_NAMES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "checkpoints",
    "config.json",
    "data.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "reference.json",
    "rollbacks.json",
    *TOKENIZER_FILES,
    "*.tmp",
    ".model-drafts-*",
)
SIZE_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def run(args: ConvertArguments) -> int:
    limit = _bytes(args.shard_size)
    if args.verify:
        require_transformers()
    target = args.target
    to_run = is_pretrained(args.source) and not is_adapter(args.source)
    with store_errors(target, "read"):
        require_empty(target)
    if is_remote(target) and not to_run:
        return _into_store(args)
    model = load(args.source, args.step, weights=args.weights)
    has_adapter = _has_adapter(model)
    if has_adapter:
        model = _merged(model, args)
    elif args.merge:
        raise ConfigError(f"{args.source} has no adapter to merge: leave out --merge.")
    with complete_or_empty(target):
        if has_adapter and not args.merge:
            _write_adapter(model, args)
        elif to_run:
            _write_run(model, args)
        else:
            _write_pretrained(model, args, limit)
    return _verified(model, args.source if to_run else target, args) if args.verify else 0


def _into_store(args: ConvertArguments) -> int:
    """Converts into a temporary folder, and puts its files into the target, which is a URL."""
    local = LocalFolder(args.target)
    status = run(dataclasses.replace(args, target=local.path))
    local.close()
    print(f"{args.target}: has these files now")
    return status


def require_empty(target: Path) -> None:
    """Raises ConfigError unless the target is new or empty. What a conversion that was killed has
    left in it is removed first."""
    if target.is_dir() and (target / UNFINISHED).is_file():
        _remove_written(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: choose a new directory.")


@contextlib.contextmanager
def complete_or_empty(target: Path) -> Iterator[None]:
    """Marks the target as unfinished in this block, and removes what an error or a signal has left
    of it."""
    if is_remote(target):
        # The config.json of a run is written last, and without it there is no run.
        yield
        return
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
    # The mark goes last, so that a process that is killed here leaves it for the next one.
    (target / UNFINISHED).unlink()


def _has_adapter(model: Loaded) -> bool:
    return any(map(is_adapted, jax.tree.leaves(model.params, is_leaf=is_adapted)))


def _merged(model: Loaded, args: ConvertArguments) -> Loaded:
    """A model with an adapter, merged where --merge says so."""
    if args.merge:
        return dataclasses.replace(model, params=merge(model.params))
    if args.verify:
        raise ConfigError(
            f"--verify compares whole models, and {args.source} has an adapter: add"
            " --merge, or leave out --verify."
        )
    if added := run_of(args.source).tokenizer.added:
        raise ConfigError(
            f"{args.source} has added {', '.join(added)} to the vocabulary of its base, which an"
            " adapter of peft cannot say: add --merge, which writes the whole model."
        )
    return model


def _write_adapter(model: Loaded, args: ConvertArguments) -> None:
    base = located(model.base).absolute() if model.base else ""
    save_adapter(
        args.target,
        model.params,
        model.config,
        base=base,
        learned=model.learned,
        architecture=args.architecture,
        dtype=args.dtype,
    )
    if model.tokenizer is not None:
        model.tokenizer.save(args.target / "tokenizer.json")
    over_base = f" over {base}" if base else ""
    print(f"{args.target}: an adapter of peft{over_base}, {args.dtype}")


def _write_run(model: Loaded, args: ConvertArguments) -> None:
    save_run(args.target, model, args.source)
    use = "to sample from or to fine-tune (--run.init_from)"
    print(
        f"{args.target}: a run of {model.config.family} {_size(model)},"
        f" {use if model.tokenizer else 'without a tokenizer'}"
    )


def _write_pretrained(model: Loaded, args: ConvertArguments, limit: int) -> None:
    files = save_pretrained(
        args.target,
        model.params,
        model.config,
        model.tokenizer,
        shard_bytes=limit,
        architecture=args.architecture,
        dtype=args.dtype,
        labels=model.labels,
    )
    kind = read_object(args.target / "config.json")["architectures"][0]
    count = sum(file.suffix == ".safetensors" for file in files)
    in_files = f"in {count} files" if count > 1 else f"in {count} file"
    print(f"{args.target}: {kind} {_size(model)}, {args.dtype}, {in_files}")


def _size(model: Loaded) -> str:
    return f"of {human_count(sum(leaf.size for leaf in jax.tree.leaves(model.params)))} parameters"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not match or not float(match[1]):
        raise ConfigError(f"--shard_size {text!r} is no number of bytes: write it as 500M or 5G.")
    return int(float(match[1]) * SIZE_SUFFIXES[match[2].upper()])


def _verified(model: Loaded, directory: Path, args: ConvertArguments) -> int:
    """Prints how far both models differ, and returns the exit status: 1 if float32 logits differ by
    more than rounding."""
    difference = compare(directory, model.params, model.config)
    relative = difference.largest / difference.deviation
    print(
        f"largest logit difference {difference.largest:.3g}, {relative:.2g} of their standard"
        f" deviation {difference.deviation:.3g}"
    )
    if relative <= CLOSE:
        print("both models agree")
        return 0
    if args.dtype != "float32" and directory == args.target:
        print(f"the difference includes the rounding to {args.dtype}")
        return 0
    print(f"NOT EQUAL: float32 should differ by at most {CLOSE:g} of the standard deviation")
    return 1
