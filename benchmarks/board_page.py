"""The page of the board, from its JSON."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ablations import arguments
from board_rules import FACTOR, verdict
from intervals import Interval, interval_of

Answer = dict[str, Any]
BASELINE = "adamw"
HEADER = (
    "recipe",
    "learning rate",
    "steps to the loss",
    "of AdamW's, seed by seed",
    "claim",
    "ms per step",
    "seconds",
)
TITLES = {"quickstart": "The model of the quickstart", "10m": "A model of 10 million parameters"}
RULES = f"""
The rules, the same for each row:

- The task is `configs/quickstart.py` (the standard library's source, its tokenizer and its model)
  with rows of 128 tokens, 8 in a batch: a short run, which says nothing of long ones. The text is
  that of the library of the Python that is named, so two tasks may differ in it. A CPU multiplies
  in float32 and a GPU in bfloat16, as `model.dtype=auto` has it.
- A row that is missing, or has fewer seeds, had not ended when the time of the device did. Of SOAP
  one run with the default of `soap_max_side` was made and left out: it took 119 s instead of 18.
- A schedule ends with its run, so that a run has a loss to show at its end alone. Its steps, the
  horizon, are therefore part of the recipe: horizons on a ladder, each {FACTOR} of the one before,
  are trained from the first step until one reaches the loss and the next shorter one does not. The
  steps to the loss are interpolated between these two, the loss as linear in the logarithm of the
  steps, for each seed by itself.
- The learning rate is tuned by five trials on one horizon, with a seed that is none of those of
  the result: the middle of a row's range, its double, its half, and two more beside or beyond the
  best. The two best are tried with a second seed, and the lower mean wins. Nothing else is tuned.
- Seeds are 0 to n - 1. A seed sets the initial values and the order of the data, so rows with one
  seed begin alike. A seed that does not reach the loss on the longest horizon counts as infinite.
- In brackets: the interval from the smallest to the largest of five seeds, which has the median of
  all seeds with a probability of 94 %, whatever their distribution (order statistics: David and
  Nagaraja, Order Statistics, 2003, section 7.1; `benchmarks/intervals.py`).
- A row is called faster or slower only if its interval of steps lies apart from AdamW's.
- The time of a step is the mean of twenty on one core, in turn with the other rows, and seconds are
  the median steps times that: the runs themselves share the machine with other work.
"""


def page(result: Answer) -> str:
    """The Markdown of the page."""
    lines = [
        "# The board: steps to a loss, by optimizer",
        "",
        (
            "How many steps a recipe needs to reach one validation loss, beside AdamW with the same"
            " number of tuning trials. Made by `benchmarks/board.py` from"
            " `benchmarks/results/board.json`."
        ),
    ]
    for name, task in result["tasks"].items():
        if any(row.get("steps") for row in task.get("rows", {}).values()):
            lines += ["", *_section(TITLES.get(name, name), task)]
    return "\n".join(lines) + "\n" + RULES


def software(task: Answer) -> str:
    """The device of a task and the versions that it ran with."""
    versions = [f"{name} {text}" for name, text in task["machine"].items() if name != "device"]
    return f"{task['machine']['device']} with {', '.join(versions)}"


def _section(title: str, task: Answer) -> list[str]:
    rows = {name: row for name, row in task["rows"].items() if row.get("steps")}
    lines = [
        f"## {title}",
        "",
        (
            f"Steps to a validation loss of {task['target']} nats per token, median of"
            f" {_seeds_text(rows)}, on {software(task)}."
        ),
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{' --- |' * len(HEADER)}",
    ]
    lines += [f"| {' | '.join(cells(name, rows, task['times']))} |" for name in rows]
    lines += ["", "Each is one command line, AdamW's with what is named here added:", ""]
    return lines + _commands(task, rows)


def _seeds_text(rows: Mapping[str, Answer]) -> str:
    counts = sorted({len(row["steps"]) for row in rows.values()})
    return f"{' or '.join(map(str, counts))} seed{'s' * (counts[-1] > 1)}"


def steps_of(row: Answer) -> list[float]:
    """The steps of each seed; infinite where the JSON has null."""
    return [math.inf if steps is None else steps for steps in row["steps"]]


def cells(name: str, rows: Mapping[str, Answer], times: Mapping[str, Answer]) -> list[str]:
    """A row of the table."""
    row, steps = rows[name], steps_of(rows[name])
    interval = interval_of(steps)
    rate = f"{row['tuning']['rate']:g}"
    rate += " (the edge of its trials)" if row["tuning"]["is_at_the_edge"] else ""
    ratio = claim = ""
    if name != BASELINE and BASELINE in rows:
        baseline = steps_of(rows[BASELINE])
        pairs = list(zip(steps, baseline, strict=False))
        ratio = _text(interval_of([value / base for value, base in pairs]), ".2f")
        seeds = min(len(steps), len(baseline))
        claim = verdict(interval, interval_of(baseline), seeds)
    time = times.get(name)
    milliseconds = f"{time['cpu_seconds'] * 1e3:.0f}" if time else ""
    seconds = f"{time['cpu_seconds'] * interval['median']:.1f}" if time else ""
    return [name, rate, _text(interval, ".0f"), ratio, claim, milliseconds, seconds]


def _text(interval: Interval, form: str) -> str:
    low, high = (
        "not reached" if number == math.inf else f"{number:{form}}"
        for number in (interval["low"], interval["high"])
    )
    median = interval["median"]
    middle = "not reached" if median == math.inf else f"{median:{form}}"
    return f"{middle} ({low} to {high})"


def _commands(task: Answer, rows: Mapping[str, Answer]) -> list[str]:
    """The command line of the first row, and what the others add to it."""

    def settings_of(row: Answer) -> Answer:
        interval = interval_of(steps_of(row))
        steps = task["base_steps"] if interval["median"] == math.inf else interval["median"]
        tuned = {"optimizer.learning_rate": row["tuning"]["rate"], "train.steps": round(steps)}
        return {**row["settings"], **tuned}

    base, *others = rows.values()
    settings: Sequence[Answer] = [settings_of(row) for row in others]
    first = shlex.join(arguments({**task["settings"], **settings_of(base)}))
    lines = ["<!-- docs-test: skip: each indented line is added to the first -->", "```"]
    lines.append(f"python train.py configs/quickstart.py {first}")
    return [*lines, *(f"    {shlex.join(arguments(each))}" for each in settings), "```"]
