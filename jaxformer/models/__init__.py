"""The model families, each a short file over the one block."""
