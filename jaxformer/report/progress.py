"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TextIO, TypeVar

from jaxformer.config.format import escaped, human_time

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

BatchT = TypeVar("BatchT")

LINE_SECONDS = 2.0
EVALUATION_SECONDS = 5.0
REDRAWS_PER_SECOND = 4


class Evaluated(NamedTuple):
    """The progress of an evaluation: `done` of `total` batches since `began`, a value of
    `time.monotonic()`."""

    done: int
    total: int
    began: float

    def time_left(self) -> str:
        """Return the time left at the mean pace so far; empty before the first batch is done."""
        if not self.done:
            return ""
        pace = (time.monotonic() - self.began) / self.done
        return f"{human_time(pace * (self.total - self.done))} left"


class ProgressBar:
    """Shows the progress of a run. A context manager around the steps, which restores the terminal.

    `mode` is "bar", "lines", "none" (prints only what is passed to `log`), or "auto": a bar if
    `stream`, by default standard output, is a terminal, else lines. With `total_steps` of 0 it
    shows only evaluations.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        mode: Literal["auto", "bar", "lines", "none"] = "auto",
        stream: TextIO | None = None,
    ) -> None:
        self.total = total_steps
        self.evaluated: Evaluated | None = None
        self._stream = stream
        self.step = start_step
        self.shown: dict[str, float] = {}
        self._mode = mode
        self._live: Live | None = None
        self._first: tuple[int, float] | None = None
        self._last_line = float("-inf")

    def __enter__(self) -> Self:
        if self._mode == "auto":
            self._mode = "lines"
            # The dumb terminals of editors cannot redraw a line.
            if self.stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
                self._mode = "bar"
        if self._mode == "bar":
            from rich.console import Console  # lines do not need it
            from rich.live import Live

            self._live = Live(
                console=Console(force_terminal=True, file=self.stream),
                get_renderable=self._drawn,
                refresh_per_second=REDRAWS_PER_SECOND,
            )
            self._live.start()
        return self

    @property
    def stream(self) -> TextIO:
        return self._stream or sys.stdout

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Mark `step` steps as done; `metrics` are the numbers of a logged step or of an
        evaluation, on the host.

        The time left is estimated from the first update on, so that compilation does not count.
        """
        now = time.monotonic()
        self.step = step
        # Compilation is over by then, and would spoil the pace.
        self._first = self._first or (step, now)
        self.shown.update(metrics or {})
        if self._mode == "lines" and metrics:
            # A log file of a long run stays readable; metrics.jsonl has every line.
            rare = "val_loss" in metrics or self.step >= self.total
            if rare or now - self._last_line >= LINE_SECONDS:
                self._last_line = now
                self.log(self.line(metrics))

    def log(self, text: str) -> None:
        """Print a line above the bar, or among the lines; characters that the output cannot encode
        become `?`."""
        text = escaped(text)
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        # A log file in another locale shall not end a run.
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        shown = text.encode(encoding, "replace").decode(encoding)
        print(shown, file=self.stream, flush=True)

    def evaluation(self, batches: Iterable[BatchT], total: int) -> Iterator[BatchT]:
        """Yield the batches of an evaluation, as they are read. The bar counts them; in "lines"
        mode there is a line every `EVALUATION_SECONDS`."""
        began = logged = time.monotonic()
        try:
            for number, batch in enumerate(batches):
                self.evaluated = Evaluated(number, total, began)
                if self._mode == "lines" and time.monotonic() - logged >= EVALUATION_SECONDS:
                    logged = time.monotonic()
                    self.log(f"evaluation {number}/{total} batches  {self.evaluated.time_left()}")
                yield batch
        finally:
            self.evaluated = None

    def seconds_left(self) -> float:
        """Return the time to the last step at the mean pace since the first update; NaN before the
        second."""
        if self._first is None or self.step <= self._first[0]:
            return float("nan")
        first, start = self._first
        pace = (time.monotonic() - start) / (self.step - first)
        return pace * max(self.total - self.step, 0)

    def line(self, metrics: Mapping[str, Any]) -> str:
        """Return one plain line about a logged step or an evaluation."""
        fields = [f"step {self.step:>{len(str(self.total))}}/{self.total}"]
        fields += _parts(metrics)
        # Tasks have names of their own: each is shown by it.
        for name, value in metrics.items():
            if name.startswith("tasks/"):
                fields.append(f"{name.removeprefix('tasks/')} {value:.4f}")
        if "loss" in metrics and self.step < self.total and self.seconds_left() >= 0:
            fields.append(f"{human_time(self.seconds_left())} left")
        return "  ".join(fields)

    def status(self) -> str:
        """Return the text at the end of the bar: the time left, or why there is none."""
        if self._first is None:
            return "compiling"
        if self.step >= self.total:
            return "done"
        return f"{human_time(self.seconds_left())} left"

    def _drawn(self) -> "Table":
        """Return the bar. It is composed when it is drawn, so that a step costs nothing."""
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table

        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        if self.evaluated is not None:
            done, total, _ = self.evaluated
            bar = Bar(total, done, complete_style="magenta")
            row.add_row(f"evaluation {done}/{total}", bar, self.evaluated.time_left())
        elif self.total:
            bar = Bar(self.total, self.step, complete_style="cyan", finished_style="green")
            numbers = [*_parts(self.shown, BAR_PARTS), self.status()]
            row.add_row(f"step {self.step}/{self.total}", bar, "  ".join(numbers))
        return row


# How a line writes a number of metrics.jsonl, in this order.
LINE_PARTS = {
    "loss": "loss {:.4f}",
    "val_loss": "validation loss {:.4f}",
    "val_bits_per_byte": "{:.3f} bits per byte",
    "val_accuracy": "accuracy {:.2%}",
    "reward_margin": "margin {:.4f}",
    "val_reward_margin": "margin {:.4f}",
    "reward": "reward {:.4f}",
    "val_reward": "reward {:.4f}",
    "reward_accuracy": "{:.1%} right",
    "val_reward_accuracy": "{:.1%} right",
    "learning_rate": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
}
BAR_PARTS = ("loss", "tokens_per_second", "mfu")


def _parts(metrics: Mapping[str, Any], names: Iterable[str] = LINE_PARTS) -> list[str]:
    """Return the numbers of these names as text; an MFU of 0 is one that is not known."""
    parts = []
    for name in names:
        if name in metrics and (name != "mfu" or metrics[name] > 0):
            parts.append(LINE_PARTS[name].format(metrics[name]))
    return parts
