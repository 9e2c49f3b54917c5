"""`jaxformer embed RUN`: vectors of texts, as lines of JSON."""

import functools
import itertools
import json

import jax
import numpy as np

from jaxformer.cli.arguments import EmbedArguments
from jaxformer.cli.prompting import open_model, row_of, typed_lines
from jaxformer.generation.prompts import padded, rounded
from jaxformer.models.text_vectors import embed

ROWS = 32  # texts that are read at once


def run(args: EmbedArguments) -> int:
    """Prints {"text": ..., "vector": [...]} for the prompt, or for each line of standard input. A
    text is framed as a text of the objective contrastive is."""
    model = open_model(args)
    texts = typed_lines() if args.prompt is None else iter([args.prompt])
    vectors_of = jax.jit(functools.partial(embed, pooling=args.pooling), static_argnums=1)
    while batch := list(itertools.islice(texts, ROWS)):
        rows = [row_of(model, text) for text in batch]
        longest = max(len(row["tokens"]) for row in rows)
        length = min(rounded(longest), model.context())  # so that few lengths are compiled
        arrays = {}
        for name in ("tokens", "token_types"):
            if name in rows[0]:
                arrays[name], segment_ids = padded([row[name].tolist() for row in rows], length)
        vectors = vectors_of(model.params, model.config, segment_ids=segment_ids, **arrays)
        for text, vector in zip(batch, np.asarray(vectors).tolist(), strict=True):
            print(json.dumps({"text": text, "vector": vector}, ensure_ascii=False), flush=True)
    return 0
