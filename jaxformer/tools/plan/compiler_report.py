"""The report of a compiler on one train step: memory, products, bytes and collectives of a
device."""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from jaxformer.arrays.hardware import GIB
from jaxformer.tools.plan.hlo_counts import CompiledCollective, Counts, Loop

# The most collectives that the report lists.
MOST_COLLECTIVES = 12


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one device, by the compiler.

    `argument` is state and batch, of which `alias` is given over to the `output`; `temporary` is
    live at most at one time beside them, `code` the program. `peak` is the compiler's own figure of
    all together where it gives one, else their sum. `host` is what it keeps in the memory of the
    device's host (`model.offload`).
    """

    argument: int
    output: int
    alias: int
    temporary: int
    code: int
    peak: int
    host: int = 0


@dataclass(frozen=True)
class CompiledReport:
    """The report of a compiler on one train step.

    `needed` and `capacity` are bytes of a device, the latter those that JAX takes of it. Where the
    compiler refuses a program that is too large, both are its own figures, and `memory` and
    `counts` are None. `model_flops` are those of a step by `models.cost`, and `peak_flops` the
    published FLOP/s (0: unknown), both of one device. `options` are the lines of
    `option_lines`, `warnings` the compiler's own lines; `notes` say what the figures leave out.
    """

    target: str
    device_kind: str
    mesh: dict[str, int]
    packed: bool
    dtype: str
    kernel: str
    fits: bool
    capacity: int
    needed: int
    memory: MemoryUse | None = None
    counts: Counts | None = None
    model_flops: float = 0.0
    peak_flops: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def mfu_bound(self) -> float:
        """The most MFU at the bound of `counts.seconds`; nan where that is not known. It may
        exceed 1 for long rows, since MFU counts the masked scores that fused attention leaves out.
        """
        seconds = self.counts.seconds if self.counts else 0.0
        return self.model_flops / (self.peak_flops * seconds) if seconds else math.nan

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The report for a terminal."""
        shape = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        on = f"{self.target} ({self.device_kind}, mesh {shape})"
        lines = [f"compiled for {on}: {self.dtype}, attention {self.kernel}"]
        lines += [f"compiler option {line}" for line in self.options]
        fit = "fits" if self.fits else "does not fit"
        lines.append(
            f"{fit}: {self.needed / GIB:.2f} GiB of {self.capacity / GIB:.2f} GiB a device"
        )
        if m := self.memory:
            sizes = {"arguments": m.argument, "temporaries": m.temporary, "peak": m.peak}
            if m.host:
                sizes["in the memory of the host"] = m.host
            lines.append(", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in sizes.items()))
        if self.counts is not None:
            lines += self._count_lines(self.counts)
        lines += self.notes
        lines += [f"the compiler warns: {line}" for line in self.warnings]
        return [
            *lines,
            f"lowered in {self.lower_seconds:.1f} s, compiled in {self.compile_seconds:.1f} s,"
            " nothing was run and no tokens/s are promised",
        ]

    def _count_lines(self, counts: Counts) -> list[str]:
        def tera(flops: float) -> str:
            return f"{flops / 1e12:.3f} TFLOP"

        products = [f"{tera(flops)} of {name}" for name, flops in counts.products.items()]
        inside = [f"{tera(counts.kernels)} in kernels"] if counts.kernels else []
        lines = [
            f"products a device and step: {', '.join(products + inside)}; the model's are"
            f" {tera(self.model_flops)}",
            f"memory traffic: {counts.bytes / GIB:.1f} GiB; the step takes at least"
            f" {counts.seconds * 1e3:.1f} ms without collectives, MFU at most {self.mfu_bound:.1%}",
        ]
        if calls := ", ".join(f"{n} x {target}" for target, n in counts.custom_calls.items()):
            lines.append(f"kernels: {calls}")
        total = sum(entry.count * entry.bytes for entry in counts.collectives)
        if total:
            number = sum(entry.count for entry in counts.collectives)
            lines.append(f"collectives: {number} a step, of arrays of {total / GIB:.3f} GiB in all")
        for entry in counts.collectives[:MOST_COLLECTIVES]:
            size = f"{entry.count} x {entry.bytes / 2**20:.2f} MiB"
            how = f"{entry.kind} (asynchronous)" if entry.asynchronous else entry.kind
            lines.append(f"  {how} {size} among {entry.group or '?'}: {entry.shape}")
        return lines


def report_of(record: dict[str, Any]) -> CompiledReport:
    """The inverse of `CompiledReport.as_json`."""
    lists = ("warnings", "notes", "options")
    changes: dict[str, Any] = {name: tuple(record.get(name, ())) for name in lists}
    if record["memory"] is not None:
        changes["memory"] = MemoryUse(**record["memory"])
    if (counts := record["counts"]) is not None:
        collectives = tuple(CompiledCollective(**entry) for entry in counts["collectives"])
        loops = tuple(Loop(**entry) for entry in counts["loops"])
        changes["counts"] = Counts(**(counts | {"collectives": collectives, "loops": loops}))
    return CompiledReport(**(record | changes))


def memory_of(stats: Any) -> MemoryUse:
    """The bytes of a device in the answer of `compiled.memory_analysis()`."""
    argument, output = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temporary = stats.alias_size_in_bytes, stats.temp_size_in_bytes
    code = stats.generated_code_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    return MemoryUse(
        argument=argument,
        output=output,
        alias=alias,
        temporary=temporary,
        code=code,
        host=stats.host_temp_size_in_bytes,
        # The compiler of TPUs says what is held at once, which is less than the sum of all.
        peak=peak if peak > argument else argument + output - alias + temporary + code,
    )
