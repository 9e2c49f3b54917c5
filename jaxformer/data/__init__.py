"""Files to batches: find and read the sources, split them, tokenize once into a store, compute any batch from its step."""

from jaxformer.data.batches import Batches, EvaluationBatches, evaluation_batches
from jaxformer.data.corpus import Corpus, gzip_bits_per_byte, prepare
from jaxformer.data.mixture import Mixture, check_shares
from jaxformer.data.objectives import fields_of, objective_of
from jaxformer.data.phases import length_at
from jaxformer.data.rows import Batch, Rows
from jaxformer.data.sources import Source, find_source
from jaxformer.data.store import TokenStore
from jaxformer.data.texts import find_texts
from jaxformer.data.tokenizing import open_or_build

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "EvaluationBatches",
    "Mixture",
    "Rows",
    "Source",
    "TokenStore",
    "check_shares",
    "evaluation_batches",
    "fields_of",
    "find_source",
    "find_texts",
    "gzip_bits_per_byte",
    "length_at",
    "objective_of",
    "open_or_build",
    "prepare",
]
