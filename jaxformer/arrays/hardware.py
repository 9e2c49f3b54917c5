"""What accelerators can do: the manufacturers' published figures, by the names that JAX reports.

NVIDIA's are on the data sheets of its devices, those of TPUs on cloud.google.com/tpu/docs.
All figures are those of one device as JAX counts devices: a TPU7x chip is two. Products are dense
(NVIDIA's "with sparsity" is halved), and links count one direction (published sums are halved).
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from jaxformer.files import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A kind of device.

    kind: what JAX reports as `device_kind`, a regular expression for all of it.
    platform: "gpu", "tpu" or "cpu".
    bfloat16, float32: peak FLOP/s of products in these dtypes, at JAX's default precision: float32
        is TF32 on a GPU, and one pass in bfloat16 on a TPU. None if unknown.
    memory: bytes of device memory. NVIDIA's GB are counted as GiB, which is within 1 % of what its
        driver reports.
    bandwidth: bytes/s of that memory.
    link: bytes/s that a device sends to the others of its host, NVLink domain or slice.
    cores: streaming multiprocessors of a GPU, TensorCores of a TPU.
    capability: the compute capability of an NVIDIA GPU, as (9, 0), by the CUDA C++ programming
        guide; empty for others.
    """

    kind: str
    platform: str
    bfloat16: float | None
    float32: float | None
    memory: int | None
    bandwidth: float | None
    link: float | None
    cores: int = 1
    capability: tuple[int, ...] = ()

    def peak(self, dtype: str) -> float | None:
        """Return the peak FLOP/s of products in a dtype; None if unknown."""
        return self.float32 if dtype == "float32" else self.bfloat16


# TFLOP/s in bfloat16; GB of memory of a GPU, GiB of a TPU; TB/s of that memory; GB/s of the links.
Figures = tuple[float, float, float, float]


def _tpu(kind: str, figures: Figures, cores: int) -> Device:
    """Return a row of a TPU."""
    tflops, memory, bandwidth, link = figures
    return Device(
        kind=kind,
        platform="tpu",
        bfloat16=tflops * 1e12,
        float32=tflops * 1e12,
        memory=round(memory * GIB),
        bandwidth=bandwidth * 1e12,
        link=link * 1e9,
        cores=cores,
    )


def _gpu(kind: str, figures: Figures, cores: int, capability: tuple[int, int] = (9, 0)) -> Device:
    """Return a row of an NVIDIA GPU. TF32 is half of bfloat16 in every generation from Ampere
    on."""
    row = _tpu(f"(NVIDIA )?{kind}", figures, cores)
    half = figures[0] * 0.5e12
    return replace(row, platform="gpu", float32=half, capability=capability)


DEVICES = {
    # NVLink of Hopper: 900 GB/s in both directions together, of Ampere 600, of Blackwell 1800.
    "h100": _gpu("H100 80GB HBM3", (989.4, 80, 3.35, 450), 132),
    # The bridge of NVLink connects two cards; between others it is PCIe's 64 GB/s.
    "h100_pcie": _gpu("H100 PCIe", (756, 80, 2.0, 300), 114),
    "h100_nvl": _gpu("H100 NVL", (835.5, 94, 3.9, 300), 132),
    "h200": _gpu("H200", (989.4, 141, 4.8, 450), 132),
    "h200_nvl": _gpu("H200 NVL", (835.5, 141, 4.8, 450), 132),
    "gh200": _gpu("GH200 480GB", (989.4, 96, 4.0, 450), 132),
    "a100": _gpu("A100-SXM4?-80GB", (312, 80, 2.039, 300), 108, (8, 0)),
    "a100_pcie": _gpu("A100 80GB PCIe", (312, 80, 1.935, 300), 108, (8, 0)),
    "a100_40gb": _gpu("A100-(SXM4?|PCIE)-40GB", (312, 40, 1.555, 300), 108, (8, 0)),
    # HGX of eight: 36 PFLOP/s in bfloat16 with sparsity; DGX B200 has 1,440 GB, 64 TB/s.
    "b200": _gpu("B200", (2250, 180, 8.0, 900), 148, (10, 0)),
    "b300": _gpu("B300( SXM6 AC)?", (2250, 270, 8.0, 900), 148, (10, 3)),
    # NVL72: 360 PFLOP/s in bfloat16 with sparsity, 576 TB/s; 13.4 TB, and 20 TB of memory.
    "gb200": _gpu("GB200", (2500, 186, 8.0, 900), 152, (10, 0)),
    "gb300": _gpu("GB300", (2500, 277, 8.0, 900), 152, (10, 3)),
    # GDDR6, of whose 48 GB the error correction takes a sixteenth; PCIe 4 x16.
    "l40s": _gpu("L40S", (362.05, 45, 0.864, 32), 142, (8, 9)),
    # All-reduce of a pod of 4,096 chips: 1.1 PB/s, which is what each chip sends.
    "v4": _tpu("TPU v4", (275, 32, 1.2, 268.6), 2),
    "v5e": _tpu("TPU (v5 lite|v5e)", (197, 16, 0.819, 200), 1),
    "v5p": _tpu("TPU (v5|v5p)", (459, 95, 2.765, 600), 2),
    "v6e": _tpu("TPU (v6 lite|v6e)", (918, 32, 1.638, 400), 1),
    # Half a chip of 2,307 TFLOP/s, 192 GiB and 7,380 GB/s; both halves can use all of its links.
    "tpu7x": _tpu("TPU7x", (1153.5, 96, 3.69, 600), 1),
    "cpu": Device("cpu", "cpu", None, None, None, None, None),
}


def device_named(name: str) -> Device:
    """Return the row of a name."""
    if name not in DEVICES:
        raise ConfigError(f"there is no device {name!r}: choose one of {', '.join(DEVICES)}.")
    return DEVICES[name]


def name_of(kind: str) -> str | None:
    """Return the name of the row for what JAX reports as `device_kind`, or for its own name; None
    if it is not in the table."""
    for name, device in DEVICES.items():
        if kind == name or re.fullmatch(device.kind, kind):
            return name
    return None


def bfloat16_note() -> str:
    """Return what bfloat16 is worth on this CPU, as far as it was measured (benchmarks/train_cpu.py
    --dtypes); empty where it was not."""
    try:
        facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    if "avx512_bf16" not in facts or "AuthenticAMD" not in facts:
        return ""
    return (
        "avx512_bf16: on an AMD EPYC --model.dtype bfloat16 trains 1.4 to 1.7 times as fast as"
        " float32"
    )


def peak_flops(kind: str, dtype: str) -> float | None:
    """Return the published peak FLOP/s of a device by its `device_kind`; None if it is unknown."""
    name = name_of(kind)
    return None if name is None else DEVICES[name].peak(dtype)
