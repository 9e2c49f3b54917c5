"""`jaxformer convert SOURCE TARGET`: a run to a Hugging Face model directory, or such a directory
to a run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

from jaxformer.config import ConfigError
from jaxformer.interop.hf_config import Dtype
from jaxformer.report import human_count

if TYPE_CHECKING:
    from jaxformer.loading import Loaded

CLOSE = 2e-4  # of the logits' standard deviation: what float32 on both sides comes to
SIZE_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class ConvertArguments:
    """Writes a run as a model directory that transformers, vLLM and llama.cpp's converter read, or
    the other way round."""

    source: Annotated[Path, tyro.conf.Positional]
    """A run directory, or a Hugging Face model directory."""
    target: Annotated[Path, tyro.conf.Positional]
    """The other of the two; made where it does not exist."""
    verify: bool = False
    """Run both sides on the same tokens, and print how far apart they are (needs transformers)."""
    dtype: Dtype = "float32"
    """Of the weights in a model directory."""
    shard_size: str = "5G"
    """Most bytes of one file of weights, as in 500M or 5G."""
    architecture: str | None = None
    """As what to write a run, as in MistralForCausalLM; the plainest that is exactly it."""
    step: int | None = None
    """Checkpoint of a run to read; the newest where it is not given."""


def run(arguments: Sequence[str]) -> int:
    asked = tyro.cli(
        ConvertArguments, prog="jaxformer convert", args=arguments, use_underscores=True
    )
    limit = _bytes(asked.shard_size)
    from jaxformer.interop.hf_config import is_pretrained
    from jaxformer.interop.verify import require_transformers
    from jaxformer.loading import load

    if asked.verify:
        require_transformers()
    inward = is_pretrained(asked.source)
    if asked.target.exists() and any(
        asked.target.iterdir() if asked.target.is_dir() else [asked.target]
    ):
        raise ConfigError(
            f"{asked.target} is not empty: name a new directory, so that nothing is lost."
        )
    model = load(asked.source, asked.step)
    if inward:
        _write_run(model, asked)
    else:
        _write_pretrained(model, asked, limit)
    return _verified(model, asked.source if inward else asked.target, asked) if asked.verify else 0


def _write_run(model: "Loaded", asked: ConvertArguments) -> None:
    from jaxformer.loading import save_run

    save_run(asked.target, model, asked.source)
    use = (
        ", to sample from or to begin from (--run.init_from)"
        if model.tokenizer
        else ", without a tokenizer"
    )
    print(f"{asked.target}: a run of {model.config.family} {_size(model)}{use}")


def _write_pretrained(model: "Loaded", asked: ConvertArguments, limit: int) -> None:
    from jaxformer.interop.hf_config import read_config_json
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
    kind = read_config_json(asked.target)["architectures"][0]
    count = sum(file.suffix == ".safetensors" for file in files)
    print(
        f"{asked.target}: {kind} {_size(model)}, {asked.dtype}, in {count} file{'s' * (count > 1)}"
    )


def _size(model: "Loaded") -> str:
    import jax

    return f"of {human_count(sum(leaf.size for leaf in jax.tree.leaves(model.params)))} parameters"


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise ConfigError(f"--shard_size {text!r} is no number of bytes: write it as 500M or 5G.")
    return int(float(found[1]) * SIZE_SUFFIXES[found[2].upper()])


def _verified(model: "Loaded", directory: Path, asked: ConvertArguments) -> int:
    """Prints how far both sides are apart; 1 where float32 does not come out equal."""
    from jaxformer.interop.verify import compare

    found = compare(directory, model.params, model.config)
    share = found.largest / found.deviation
    print(
        f"largest logit difference {found.largest:.3g}, {share:.2g} of their standard deviation"
        f" {found.deviation:.3g}"
    )
    print(f"KL, nats: mean {found.kl.mean():.2g}, largest {found.kl.max():.2g}; by position:")
    for at in range(0, len(found.kl), 8):
        print(
            f"{at:6d}  " + " ".join(f"{value:8.1e}" for value in np.asarray(found.kl[at : at + 8]))
        )
    if share <= CLOSE:
        print("both sides agree")
        return 0
    rounded = asked.dtype != "float32" and directory == asked.target
    print(
        f"apart by what {asked.dtype} rounds"
        if rounded
        else f"NOT EQUAL: float32 comes to {CLOSE:g} of the deviation"
    )
    return 0 if rounded else 1
