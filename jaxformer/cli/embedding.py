"""`jaxformer sample RUN --embed`: vectors of texts, as lines of JSON or as one file of NumPy."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxformer.cli.arguments import SampleArguments
from jaxformer.cli.prompting import Model, row_of, typed_lines
from jaxformer.files import ConfigError
from jaxformer.models.text_vectors import embed

ROWS = 32  # texts that are read at once
LENGTH_STEP = 32  # rows are padded to a multiple of this, so that few lengths are compiled

Embed = Callable[..., jax.Array]


def embed_texts(model: Model, args: SampleArguments) -> None:
    """Prints {"text": ..., "vector": [...]} for the prompt, or for each line of standard input, or
    writes the vectors [texts, D] to --output. A text is framed as a text of the objective
    contrastive is. Raises ConfigError for a text that is longer than a row of the model."""
    if args.chat or args.beams or args.pair:
        raise ConfigError("--embed reads texts alone: leave out --chat, --beams and --pair.")
    if args.output and args.output.suffix != ".npy":
        raise ConfigError(f"--output {args.output} is a file of NumPy: name it .npy.")
    if args.output and not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no directory {args.output.parent}.")
    texts = typed_lines() if args.prompt is None else iter([args.prompt])
    vectors_of = jax.jit(
        functools.partial(embed, pooling=args.pooling, normalize=args.normalize == "on"),
        static_argnums=1,
    )
    blocks = []
    for batch, vectors in _batches(model, texts, vectors_of):
        if args.output:
            blocks.append(vectors)
            continue
        for text, vector in zip(batch, vectors.tolist(), strict=True):
            print(json.dumps({"text": text, "vector": vector}, ensure_ascii=False), flush=True)
    if args.output:
        np.save(args.output, np.concatenate(blocks))
        print(f"{sum(map(len, blocks))} vectors of {blocks[0].shape[1]} numbers: {args.output}")


def _batches(
    model: Model, texts: Iterator[str], vectors_of: Embed
) -> Iterator[tuple[list[str], np.ndarray]]:
    """The texts by batches, and their vectors [texts, D] float32."""
    while batch := list(itertools.islice(texts, ROWS)):
        rows = [row_of(model, text) for text in batch]
        longest = max(len(row["tokens"]) for row in rows)
        length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, model.context())
        names = [name for name in ("tokens", "token_types") if name in rows[0]]
        arrays = {name: np.zeros((len(rows), length), np.int32) for name in names}
        segments = np.zeros((len(rows), length), np.int32)
        for index, row in enumerate(rows):
            size = len(row["tokens"])
            segments[index, :size] = 1
            for name, array in arrays.items():
                array[index, :size] = row[name]
        vectors = vectors_of(model.params, model.config, segment_ids=segments, **arrays)
        yield batch, np.asarray(vectors)
