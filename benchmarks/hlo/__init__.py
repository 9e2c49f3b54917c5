"""What the optimized program of a step does, read from its text (`compiled.as_text()`): products,
bytes of main memory, collectives and loops, and the least time of each kind of operation."""

from hlo.counts import CompiledCollective, Counts, Loop, Operation, count

__all__ = ["CompiledCollective", "Counts", "Loop", "Operation", "count"]
