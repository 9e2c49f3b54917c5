"""Leaves that replace weights: adapters of low rank, quantized weights."""
