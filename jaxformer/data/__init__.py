"""Files to batches: find and read the sources, split them, tokenize once into a store, compute any batch from its step."""

from jaxformer.data.batches import Batches, EvaluationBatches, evaluation_batches
from jaxformer.data.corpus import Corpus, gzip_bits_per_byte, prepare
from jaxformer.data.objectives import fields_of, objective_of
from jaxformer.data.rows import Batch, Rows
from jaxformer.data.sources import Source, find_source
from jaxformer.data.store import TokenStore, open_or_build

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "EvaluationBatches",
    "Rows",
    "Source",
    "TokenStore",
    "evaluation_batches",
    "fields_of",
    "find_source",
    "gzip_bits_per_byte",
    "objective_of",
    "open_or_build",
    "prepare",
]
