"""Files to batches by seven nouns: a Source names files and reads Documents, which are texts
(`documents`) or `records`; tokenized they are a Store (of text, of `examples`, of `ids`); a Split
of it gives Rows, of several a Mixture; a Batch is computed from the seed and the step. A Task says
how rows are made, a Corpus is all that a run reads."""

from jaxformer.data.batches import Batches, EvaluationBatches, RowBlocks, evaluation_batches
from jaxformer.data.corpus import Corpus, ModelLabels, find_texts, prepare
from jaxformer.data.rows import NumpyBatch, RowFormat, Rows
from jaxformer.data.source import Source, find_source
from jaxformer.data.store import TokenStore, open_or_build
from jaxformer.data.task import Task
from jaxformer.data.templates import Template

__all__ = [
    "Batches",
    "Corpus",
    "EvaluationBatches",
    "ModelLabels",
    "NumpyBatch",
    "RowBlocks",
    "RowFormat",
    "Rows",
    "Source",
    "Task",
    "Template",
    "TokenStore",
    "evaluation_batches",
    "find_source",
    "find_texts",
    "open_or_build",
    "prepare",
]
