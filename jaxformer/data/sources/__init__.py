"""Where text and records come from: what a setting names, and the documents or records that it
holds."""

from jaxformer.data.sources.source import IdFiles, Piece, Source, find_ids, find_source, fingerprint

__all__ = ["IdFiles", "Piece", "Source", "find_ids", "find_source", "fingerprint"]
