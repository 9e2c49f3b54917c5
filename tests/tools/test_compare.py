"""`jaxformer compare`: runs of one config are one line, and the page holds what was logged."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxformer.cli import main
from jaxformer.config.optimizer import OptimizerConfig
from jaxformer.config.run import RunConfig, RunSettings
from jaxformer.config.saved import to_json
from jaxformer.config.train import TrainConfig
from jaxformer.files import ConfigError
from jaxformer.report.metrics import MetricsLog
from jaxformer.tools.run_comparison import Curve, band_of, configurations, panels_of, read_runs

TOKENS = 32  # of a step


def made(folder: Path, seed: int, rate: float, losses: list[float], data: str = "same") -> Path:
    """A run directory that logged these training losses, and at every second step the same plus
    one as validation loss."""
    folder.mkdir(parents=True)
    config = RunConfig(
        run=RunSettings(dir=str(folder), seed=seed),
        train=TrainConfig(steps=4),
        optimizer=replace(OptimizerConfig(), learning_rate=rate),
    )
    (folder / "config.json").write_text(to_json(config))
    (folder / "data.json").write_text(json.dumps({"train": data, "run_id": folder.name}))
    with MetricsLog(folder) as log:
        for step, loss in enumerate(losses, start=1):
            log.log(step, {"loss": loss, "tokens": step * TOKENS, "tokens_per_second": 100.0})
            if step % 2 == 0:
                log.log(step, {"val_loss": loss + 1})
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    made(tmp_path / "a-1", 1, 1e-3, [5.0, 4.0, 3.0, 2.0])
    made(tmp_path / "a-2", 2, 1e-3, [6.0, 5.0, 4.0, 3.0])
    made(tmp_path / "b", 1, 3e-3, [5.0, 4.5, 4.0, 3.5])
    return tmp_path


def curve(steps: list[float], values: list[float]) -> Curve:
    column = np.array(steps)
    return Curve(column, column * TOKENS, column * 2, np.array(values))


def test_runs_that_differ_in_their_seed_alone_are_one_configuration(runs: Path) -> None:
    found, notes = read_runs([runs])
    groups = configurations(found)
    assert notes == []
    assert [[run.seed for run in group.runs] for group in groups] == [[1, 2], [1]]
    assert [group.name for group in groups] == [f"{runs / 'a-1'} (2 seeds)", str(runs / "b")]
    assert [group.differing for group in groups] == [
        {"optimizer.learning_rate": 1e-3},
        {"optimizer.learning_rate": 3e-3},
    ]


def test_runs_of_other_data_are_not_seeds_of_one(runs: Path) -> None:
    made(runs / "c", 3, 1e-3, [5.0], data="other")
    groups = configurations(read_runs([runs])[0])
    assert [len(group.runs) for group in groups] == [2, 1, 1]
    assert groups[2].differing["data.json: train"] == "other"


def test_what_a_run_starts_from_is_compared_and_how_it_is_started_is_not(runs: Path) -> None:
    written = json.loads((runs / "a-2" / "config.json").read_text())
    written["run"]["progress"], written["launch"]["timeout"] = "none", 7.0
    (runs / "a-2" / "config.json").write_text(json.dumps(written))
    assert len(configurations(read_runs([runs / "a-1", runs / "a-2"])[0])) == 1
    written["run"]["init_from"] = "runs/base"
    (runs / "a-2" / "config.json").write_text(json.dumps(written))
    groups = configurations(read_runs([runs / "a-1", runs / "a-2"])[0])
    assert [group.differing for group in groups] == [
        {"run.init_from": ""},
        {"run.init_from": "runs/base"},
    ]


def test_a_run_is_read_once_and_one_without_losses_is_noted(runs: Path) -> None:
    made(runs / "empty", 1, 1e-3, [])
    (runs / "b" / "config.json").write_text("{")
    found, notes = read_runs([runs / "a-1", runs / "empty", runs])
    assert [run.listed.path.name for run in found] == ["a-1", "a-2"]
    assert len(notes) == 2 and "no loss yet" in notes[0] and "config.json" in notes[1]
    with pytest.raises(ConfigError, match="no run with a logged loss"):
        read_runs([runs / "empty"])


def test_a_curve_has_what_was_logged_by_step_tokens_and_seconds(runs: Path) -> None:
    (run,), _ = read_runs([runs / "a-1"])
    assert run.validation.steps.tolist() == [2, 4]
    assert run.validation.tokens.tolist() == [2 * TOKENS, 4 * TOKENS]
    assert run.validation.values.tolist() == [5.0, 3.0]
    assert run.training.steps.tolist() == [1, 2, 3, 4]
    assert np.all(np.diff(run.training.seconds) >= 0)


def test_a_band_is_the_mean_and_reaches_from_the_lowest_to_the_highest() -> None:
    band = band_of([curve([1, 2, 3], [6.0, 4.0, 2.0]), curve([1, 3], [8.0, 6.0])])
    assert band.mean.steps.tolist() == [1, 2, 3]
    assert band.mean.values.tolist() == [7.0, 5.5, 4.0]
    assert (band.low.tolist(), band.high.tolist()) == ([6.0, 4.0, 2.0], [8.0, 7.0, 6.0])
    assert band.mean.tokens.tolist() == [TOKENS, 2 * TOKENS, 3 * TOKENS]
    shorter = band_of([curve([1, 2, 3], [6.0, 4.0, 2.0]), curve([1, 2], [8.0, 6.0]), curve([], [])])
    assert shorter.mean.steps.tolist() == [1, 2]
    assert len(band_of([curve([], [])]).low) == 0


def figure_of(page: str) -> list[dict[str, Any]]:
    """The traces that the page gives to plotly."""
    found = re.search(r'Plotly\.newPlot\(\s*"curves",\s*', page)
    assert found
    traces: list[dict[str, Any]] = json.JSONDecoder().raw_decode(page, found.end())[0]
    return traces


def numbers(column: Any) -> list[float]:
    """A column of a trace, which plotly writes as a list or as bytes in base 64."""
    if isinstance(column, dict):
        import base64

        values = np.frombuffer(base64.b64decode(column["bdata"]), np.dtype(column["dtype"]))
        return [float(value) for value in values]
    return [float(value) for value in column]


def test_the_page_holds_the_curves_and_loads_nothing(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(runs / "c<b>&", 1, 9e-3, [1.0, 1.0])
    output = tmp_path / "page.html"
    assert main(["compare", str(runs), "--output", str(output)]) == 0
    told = capsys.readouterr()
    assert "4 runs of 3 configurations" in told.out and told.err == ""
    assert "optimizer.learning_rate" in told.out.splitlines()[0]
    page = output.read_text()
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="(?!data:)', page)
    assert "<b>&</" not in page and "&lt;b&gt;&amp;" in page
    named = [trace for trace in figure_of(page) if trace["name"]]
    assert len(named) == 6 and sum(trace["showlegend"] for trace in named) == 3
    assert named[2]["name"].endswith("c&lt;b&gt;&amp;")  # plotly reads names as HTML
    validation, training = named[0], named[3]
    assert numbers(validation["x"]) == [2, 4] and numbers(validation["y"]) == [5.5, 3.5]
    assert numbers(training["y"])[0] == 5.5
    area = [trace for trace in figure_of(page) if trace.get("fill") == "toself"]
    assert numbers(area[0]["y"]) == [6.0, 4.0, 3.0, 5.0]


def test_metrics_by_source_and_layer_have_panels_where_a_run_has_them(
    runs: Path, tmp_path: Path
) -> None:
    plain = panels_of(configurations(read_runs([runs])[0]))
    assert [panel.quantities for panel in plain] == [("validation",), ("training",)]
    folder = made(runs / "d", 1, 9e-3, [1.0, 2.0])
    with MetricsLog(folder, resume_step=2) as log:
        norms = {f"grad_norm/blocks.ffn.{layer}": 0.5 + layer for layer in (0, 10, 2)}
        log.log(3, {"loss": 3.0, "loss/a<b>.2": 2.0, "skipped_spikes": 1, "share/x": 1.0, **norms})
        log.log(3, {"val_loss": 4.0, "dead_units/decoder.0": 0.25, "tasks/x/acc": 1.0})
    groups = configurations(read_runs([runs])[0])
    layers = tuple(f"grad_norm/blocks.ffn.{layer}" for layer in (0, 2, 10))
    assert [panel.quantities for panel in panels_of(groups)[2:]] == [
        ("dead_units/decoder.0",),
        layers,
        ("loss/a<b>.2",),
        ("skipped_spikes",),
    ]
    output = tmp_path / "page.html"
    assert main(["compare", str(runs), "--output", str(output)]) == 0
    page = output.read_text()
    assert "a<b>" not in page
    axes = [trace.get("yaxis") for trace in figure_of(page)]
    # Only the run that has these metrics is in their panels, with a line for each layer.
    assert [axes.count(f"y{panel}") for panel in (3, 4, 5, 6)] == [1, 3, 1, 1]
    norms_drawn = [trace for trace in figure_of(page) if trace.get("yaxis") == "y4"]
    assert [numbers(trace["y"]) for trace in norms_drawn] == [[0.5], [2.5], [10.5]]


def test_without_plotly_the_extra_is_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "plotly.io", None)
    assert main(["compare", str(runs), "--output", str(tmp_path / "page.html")]) == 2
    assert "jaxformer[compare]" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_told_first(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(runs), "--output", str(tmp_path / "none" / "page.html")]) == 2
    assert "does not exist" in capsys.readouterr().err
