"""Checkpoints: saved in the background, verified by digests, read on any mesh."""
