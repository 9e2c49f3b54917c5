"""`jaxformer embed RUN`: vectors of texts, as lines of JSON."""

import functools
import itertools
import json
import math
import warnings

import jax
import numpy as np

from jaxformer.cli.arguments import EmbedArguments
from jaxformer.data.templates import ClassTemplate
from jaxformer.generation.prompts import padded, rounded
from jaxformer.interop.sentence_modules import LISTING, read_text_length
from jaxformer.models.text_vectors import embed
from jaxformer.runs.objectives import row_format
from jaxformer.runs.prompting import check_size, open_model, tokens_of, typed_lines
from jaxformer.tokenizer.tokenizer import closed

ROWS = 32  # texts that are read at once


def run(args: EmbedArguments) -> int:
    """Print {"text": ..., "vector": [...]} for the prompt, or for each line of standard input. A
    text is framed as a text of the objective contrastive is, and cut where its rows, the tokenizer
    or sentence-transformers cut it."""
    model = open_model(**args.model)
    settings = model.tokenizer.metadata.settings
    template = ClassTemplate(row_format(model.run.model, model.run.data), model.tokenizer)
    if (args.path / LISTING).is_file():
        # sentence-transformers adds nothing to the tokenizer's template.
        template.frames[1] = model.tokenizer.frame(1) or closed([], [], 1)
    limit = int(min(read_text_length(args.path, settings) or math.inf, template.length))
    room = max(limit - template.frames[1].added, 0)
    first = settings.get("truncation_side") == "left"  # is cut, and not the end

    texts = typed_lines() if args.prompt is None else iter([args.prompt])
    # Compiled once for each length, of which `rounded` makes few.
    vectors_of = jax.jit(functools.partial(embed, pooling=args.pooling), static_argnums=1)
    while batch := list(itertools.islice(texts, ROWS)):
        rows = []
        for text in batch:
            ids = tokens_of(model.tokenizer, text)
            # Only an empty text is refused: a long one is cut.
            check_size(len(ids), len(ids), "")
            if len(ids) > room:
                warnings.warn(f"texts are cut to {limit} tokens.", stacklevel=2)
            start = 0
            if first:
                start = max(len(ids) - room, 0)
            rows.append(template.framed(ids[start : start + room]))
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
