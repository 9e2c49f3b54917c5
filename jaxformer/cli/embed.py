"""`jaxformer embed RUN`: vectors of texts, as lines of JSON or as one file of NumPy."""

import functools
import itertools
import json

import jax
import numpy as np

from jaxformer.cli.arguments import EmbedArguments
from jaxformer.cli.prompting import Model, open_model, row_of, typed_lines
from jaxformer.files import ConfigError
from jaxformer.models.text_vectors import embed

ROWS = 32  # texts that are read at once
LENGTH_STEP = 32  # rows are padded to a multiple of this, so that few lengths are compiled


def run(args: EmbedArguments) -> int:
    """Prints {"text": ..., "vector": [...]} for the prompt, or for each line of standard input, or
    writes the vectors [texts, D] to --output. A text is framed as a text of the objective
    contrastive is."""
    if args.output and args.output.suffix != ".npy":
        raise ConfigError(f"--output {args.output} is a file of NumPy: name it .npy.")
    if args.output and not args.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no directory {args.output.parent}.")
    model = open_model(args)
    texts = typed_lines() if args.prompt is None else iter([args.prompt])
    vectors_of = jax.jit(
        functools.partial(embed, pooling=args.pooling, normalize=args.normalize == "on"),
        static_argnums=1,
    )
    blocks = []
    while batch := list(itertools.islice(texts, ROWS)):
        arrays = _rows(model, batch)
        vectors = np.asarray(vectors_of(model.params, model.config, **arrays))[: len(batch)]
        if args.output:
            blocks.append(vectors)
            continue
        for text, vector in zip(batch, vectors.tolist(), strict=True):
            print(json.dumps({"text": text, "vector": vector}, ensure_ascii=False), flush=True)
    if args.output:
        np.save(args.output, np.concatenate(blocks))
        print(f"{sum(map(len, blocks))} vectors of {blocks[0].shape[1]} numbers: {args.output}")
    return 0


def _rows(model: Model, texts: list[str]) -> dict[str, np.ndarray]:
    """The arrays of some texts [texts, length], int32, padded behind."""
    rows = [row_of(model, text) for text in texts]
    longest = max(len(row["tokens"]) for row in rows)
    length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, model.context())
    names = [name for name in ("tokens", "token_types") if name in rows[0]]
    arrays = {name: np.zeros((len(rows), length), np.int32) for name in [*names, "segment_ids"]}
    for index, row in enumerate(rows):
        size = len(row["tokens"])
        arrays["segment_ids"][index, :size] = 1
        for name in names:
            arrays[name][index, :size] = row[name]
    return arrays
