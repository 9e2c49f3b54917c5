"""Shows and records a run: numbers and text in, files and lines of the terminal out. It knows
nothing of arrays or models."""

from jaxformer.config.format import human_bytes, human_count, human_time, printable
from jaxformer.report.banner import banner
from jaxformer.report.metrics import MetricsLog, read_metrics
from jaxformer.report.progress import ProgressBar

__all__ = [
    "MetricsLog",
    "ProgressBar",
    "banner",
    "human_bytes",
    "human_count",
    "human_time",
    "printable",
    "read_metrics",
]
