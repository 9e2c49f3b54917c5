"""Where text and records come from: what a setting names, and the documents or records that it
holds."""

from jaxformer.data.sources.source import Piece, Source, find_source, fingerprint

__all__ = ["Piece", "Source", "find_source", "fingerprint"]
