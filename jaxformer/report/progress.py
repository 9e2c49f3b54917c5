"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from jaxformer.report.format import human_time

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import Task
    from rich.text import Text

LINE_SECONDS = 2.0
REDRAWS_PER_SECOND = 4
NARROW, NARROWER = 76, 64


class ProgressBar:
    """Shows where a run is; used as a context manager around the steps, it leaves the terminal as
    it found it.

    `mode` is "bar", "lines", "none" (only what `log` says), or "auto": a bar if standard output is
    a terminal, else lines.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
    ) -> None:
        self.total = total_steps
        self.step = start_step
        self.shown: dict[str, float] = {}
        self._mode = mode
        self._bar: Bar | None = None
        self._first: tuple[int, float] | None = None
        self._last_line = float("-inf")

    def __enter__(self) -> Self:
        if self._mode == "auto":
            self._mode = "bar" if sys.stdout.isatty() and _draws() else "lines"
        if self._mode == "bar":
            self._bar = _bar(self)
            self._bar.add_task("", total=self.total, completed=self.step)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Marks `step` steps as done; `metrics` (host numbers) are those of a logged step or of an
        evaluation.

        The clock of the time left starts at the first update, so that compiling is not counted.
        """
        now = time.monotonic()
        self.step = step
        self._first = self._first or (step, now)
        if metrics:
            self.shown.update(metrics)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
        elif self._mode == "lines" and metrics and self._due(now, metrics):
            self._last_line = now
            self.log(self.line(metrics))

    def log(self, text: str) -> None:
        """Prints a line above the bar, or among the lines; characters that the output cannot encode
        become `?`."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), flush=True)

    def seconds_left(self) -> float:
        """Time to the last step at the mean pace since the first update; NaN before there is
        one."""
        if self._first is None or self.step <= self._first[0]:
            return float("nan")
        return (
            (time.monotonic() - self._first[1])
            / (self.step - self._first[0])
            * max(self.total - self.step, 0)
        )

    def line(self, metrics: Mapping[str, Any]) -> str:
        """One plain line about a logged step or an evaluation."""
        parts = [f"step {self.step:>{len(str(self.total))}}/{self.total}"]
        parts += [text(metrics[name]) for name, text in LINE_PARTS.items() if name in metrics]
        if "loss" in metrics and self.step < self.total and self.seconds_left() >= 0:
            parts.append(f"{human_time(self.seconds_left())} left")
        return "  ".join(filter(None, parts))

    def _due(self, now: float, metrics: Mapping[str, Any]) -> bool:
        return (
            now - self._last_line >= LINE_SECONDS
            or "val_loss" in metrics
            or self.step >= self.total
        )


LINE_PARTS: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "val_loss": lambda value: f"validation loss {value:.4f}",
    "val_bits_per_byte": lambda value: f"{value:.3f} bits per byte",
    "val_accuracy": lambda value: f"accuracy {value:.2%}",
    "learning_rate": lambda value: f"lr {value:.2e}",
    "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
    "mfu": lambda value: f"MFU {value:.1%}" if value > 0 else "",
}


def _draws() -> bool:
    """Whether the terminal can redraw a line, which the dumb ones of editors and logs cannot."""
    from rich.console import Console

    return not Console().is_dumb_terminal


def _bar(progress: ProgressBar) -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class Words(ProgressColumn):
        """A column whose words are made when it is drawn, so that a step costs nothing."""

        def __init__(self, words: Callable[[], str], style: str) -> None:
            super().__init__()
            self.words, self.style = words, style

        def render(self, task: "Task") -> "Text":
            return Text(self.words(), style=self.style, no_wrap=True)

    console = Console(force_terminal=True)
    columns: list[ProgressColumn] = [
        Words(lambda: f"step {progress.step}/{progress.total}", "bold"),
        BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
        Words(lambda: _shown(progress, "loss"), "bold"),
        Words(
            lambda: _shown(progress, "tokens_per_second") if console.width >= NARROWER else "",
            "cyan",
        ),
        Words(lambda: _shown(progress, "mfu") if console.width >= NARROW else "", "cyan"),
        Words(lambda: _left(progress), ""),
    ]
    return Bar(*columns, console=console, refresh_per_second=REDRAWS_PER_SECOND, expand=True)


def _shown(progress: ProgressBar, name: str) -> str:
    return LINE_PARTS[name](progress.shown[name]) if name in progress.shown else ""


def _left(progress: ProgressBar) -> str:
    if progress._first is None:
        return "compiling"
    return (
        "done" if progress.step >= progress.total else f"{human_time(progress.seconds_left())} left"
    )
