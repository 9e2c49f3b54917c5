"""`jaxformer convert SOURCE TARGET`: a run or a GGUF file to a Hugging Face model directory, such a
directory to a run, or an adapter to peft's format or into its model."""

import dataclasses
import math
from pathlib import Path

import jax

from jaxformer.adapters.low_rank import is_adapted
from jaxformer.arrays.params import is_custom
from jaxformer.cli.arguments import ConvertArguments
from jaxformer.files import ConfigError, read_object, store_of
from jaxformer.files.stores import UNFINISHED
from jaxformer.interop.logit_parity import compare, require_transformers
from jaxformer.interop.peft_writing import save_adapter
from jaxformer.interop.pretrained import save_pretrained
from jaxformer.models.adapt import merge
from jaxformer.report import human_count
from jaxformer.runs.loading import Loaded, load, save_run
from jaxformer.runs.model_files import ModelFiles

# Of float32 logits, relative to their standard deviation.
LARGEST_DIFFERENCE = 2e-4


def run(args: ConvertArguments) -> int:
    if args.verify:
        # Before minutes of converting.
        require_transformers()
    target = args.target
    source = ModelFiles(args.source)
    # What a conversion that was killed has left.
    store_of(target / UNFINISHED).remove_folder()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty: choose a new directory.")
    # A run becomes a Hugging Face model, and such a model a run: the source decides.
    to_run = source.kind == "pretrained"
    model = load(source, args.step, weights=args.weights)
    leaves = jax.tree.leaves(model.params, is_leaf=is_custom)
    has_adapter = any(map(is_adapted, leaves))
    if args.merge and not has_adapter:
        raise ConfigError(f"{args.source} has no adapter to merge: leave out --merge.")
    if args.merge:
        # Quantized weights are written as what they stand for.
        rounded = 0
        for leaf in leaves:
            if is_adapted(leaf):
                leaf = leaf.weight
            if is_custom(leaf):
                rounded += math.prod(leaf.shape)
        if rounded:
            print(
                f"{args.source}: {human_count(rounded)} weights are those of the quantized base,"
                " which are rounded, as the adapter was trained on them"
            )
        model = dataclasses.replace(model, params=merge(model.params))
    elif has_adapter and args.verify:
        raise ConfigError(
            f"--verify compares whole models, and {args.source} has an adapter: add --merge, or"
            " leave out --verify."
        )
    size = human_count(sum(leaf.size for leaf in jax.tree.leaves(model.params)))
    # The config.json of a run is written last, and without it there is no run.
    with store_of(target).filled(in_order=to_run) as folder:
        if has_adapter and not args.merge:
            _write_adapter(model, source, args, folder)
        elif to_run:
            save_run(folder, model, source, target)
            use = "without a tokenizer"
            if model.tokenizer:
                use = "to sample from or to fine-tune (--run.init_from)"
            print(f"{target}: a run of {model.config.family} of {size} parameters, {use}")
        else:
            files = save_pretrained(
                folder,
                model.params,
                model.config,
                model.tokenizer,
                architecture=args.architecture,
                dtype=args.dtype,
                labels=model.labels,
                problem_type=model.problem_type,
            )
            kind = read_object(folder / "config.json")["architectures"][0]
            count = sum(file.suffix == ".safetensors" for file in files)
            unit = "files" if count > 1 else "file"
            print(f"{target}: {kind} of {size} parameters, {args.dtype}, in {count} {unit}")
        if args.verify:
            # Of the files that were written, as another program would read them.
            return _verified(model, args, args.source if to_run else folder)
    return 0


def _write_adapter(model: Loaded, source: ModelFiles, args: ConvertArguments, folder: Path) -> None:
    if added := source.run.tokenizer.added:
        raise ConfigError(
            f"{args.source} has added {', '.join(added)} to the vocabulary of its base, which an"
            " adapter of peft cannot say: add --merge, which writes the whole model."
        )
    base: Path | str = ""
    over_base = ""
    if model.base:
        base = model.base.absolute()
        over_base = f" over {base}"
    save_adapter(
        folder,
        model.params,
        model.config,
        base=base,
        learned=model.learned,
        architecture=args.architecture,
        dtype=args.dtype,
    )
    if model.tokenizer is not None:
        model.tokenizer.save(folder / "tokenizer.json")
    print(f"{args.target}: an adapter of peft{over_base}, {args.dtype}")


def _verified(model: Loaded, args: ConvertArguments, directory: Path) -> int:
    """Print how far both models differ, and return the exit status: 1 if float32 logits differ by
    more than rounding."""
    difference = compare(directory, model.params, model.config)
    relative = difference.largest / difference.deviation
    print(
        f"largest logit difference {difference.largest:.3g}, {relative:.2g} of their standard"
        f" deviation {difference.deviation:.3g}"
    )
    if relative <= LARGEST_DIFFERENCE:
        print("both models agree")
        return 0
    if args.dtype != "float32" and directory != args.source:
        print(f"the difference includes the rounding to {args.dtype}")
        return 0
    print(
        f"NOT EQUAL: float32 should differ by at most {LARGEST_DIFFERENCE:g} of the standard"
        " deviation"
    )
    return 1
