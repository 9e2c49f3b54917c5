"""Every benchmark runs, in small; what its results are made by, and that its pages are theirs."""

import argparse
import ast
import importlib
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import Command
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jaxformer as jf
from jaxformer.layers import pallas

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
WORKERS = {
    path.stem for path in FOLDER.glob("*_baseline.py")
}  # started by the benchmarks themselves
# The checks of the device are those of train_gpu.
ARGUMENTS = {"train_tpu": ("--part", "times")}
NEEDS = {
    "train_cpu": ("torch",),
    "decode_cpu": ("torch", "transformers"),
    "finetune": ("torch", "transformers", "peft"),
    "leaks": ("torch", "transformers"),
    "tokens": ("tiktoken",),
}

KINDS_OF_TPU = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}


def is_started_by_hand(path: Path) -> bool:
    """Whether a file runs something when it is started; the others are modules of those that do."""
    tests = [node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return any(ast.unparse(test) == "__name__ == '__main__'" for test in tests)


SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if is_started_by_hand(path))
# gpu_queue runs these in small too.
QUEUED = {"gpu_profile", "gpu_deterministic", "gpu_variants", "decode_gpu"}
BENCHMARKS = [name for name in SCRIPTS if name not in WORKERS | QUEUED]


@pytest.fixture(autouse=True)
def benchmarks_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_the_benchmarks_are_found() -> None:
    assert {"train_cpu", "train_gpu", "train_tpu", "startup", "tokens", "same_numbers"} <= {
        *BENCHMARKS
    }


def in_small(name: str, *arguments: str) -> str:
    """What a benchmark prints, started in a process that has imported JAX."""
    path = str(FOLDER / f"{name}.py")
    script = f"""
import runpy, sys
sys.argv = {[path, "--smoke", *arguments]!r}
sys.path.insert(0, {str(FOLDER)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit(0)
"""
    command = Command([], folder=ROOT, environment={"PYTHONPATH": str(ROOT)}, patch=script)
    printed, errors = command.communicate(timeout=600)
    assert command.returncode == 0, f"{printed}\n{errors}"
    assert "Traceback" not in errors
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_in_small(name: str) -> None:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    before = {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}
    printed = in_small(name, *ARGUMENTS.get(name, ()))
    assert "| ---" in printed or "|---" in printed, "no table was printed"
    after = {path: path.stat().st_mtime_ns for path in (FOLDER / "results").iterdir()}
    assert before == after, "a smoke test saves nothing"


@pytest.mark.slow
def test_peers_in_jax_are_measured_and_one_that_is_missing_says_how_it_is_installed() -> None:
    printed = in_small("train_cpu", "--jax-peers")
    lines = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    cells = {line[0].strip("| "): line[1].strip() for line in lines}
    for name in ("jaxformer", "nanodo's model", "a decoder of flax.nnx", "KerasHub's GPT-2"):
        measured = cells[name].replace(",", "").isdigit()
        # flax is a dependency of jaxformer.
        needed = name in ("jaxformer", "a decoder of flax.nnx")
        assert measured or (not needed and "pip install" in cells[name]), cells


@pytest.mark.slow
def test_steps_in_float32_and_bfloat16_are_measured_in_turn() -> None:
    pytest.importorskip("torch")
    printed = in_small("train_cpu", "--dtypes")
    assert all(name in printed for name in ("| bfloat16 ", "| float32 ", "| PyTorch, autocast "))


def test_checkouts_that_differ_are_told_apart() -> None:
    differences = importlib.import_module("same_numbers").differences
    numbers = {(1, "loss"): 2.0, (2, "loss"): math.nan}
    assert differences(numbers, {**numbers}) == 0
    assert differences(numbers, numbers | {(1, "loss"): 2.0 * (1 + 1e-7)}) == pytest.approx(1e-7)
    assert differences(numbers, numbers | {(2, "loss"): 2.0}) == math.inf
    assert differences(numbers, {(1, "loss"): 2.0}) == math.inf
    assert differences({}, {}) == math.inf
    params = {"head": np.array([1.0, -4.0], np.float32)}
    assert differences(params, {"head": np.array([1.5, -4.0], np.float32)}) == 0.125
    assert differences(params, {"head": np.array([[1.0, -4.0]], np.float32)}) == math.inf


def test_an_interval_has_the_median_as_often_as_it_says() -> None:
    intervals = importlib.import_module("intervals")
    # The ranks of the tables of the binomial distribution.
    expected = {5: (1, 0.9375), 8: (2, 0.9297), 10: (2, 0.9785), 20: (6, 0.9586)}
    for number, (rank, coverage) in expected.items():
        assert intervals.interval_ranks(number) == (rank, pytest.approx(coverage, abs=1e-4))
    assert intervals.interval_ranks(4) == (1, 0.875) and intervals.interval_ranks(1) == (1, 0.0)
    rng = np.random.default_rng(0)
    for number in (5, 8):
        draws = np.sort(rng.exponential(size=(20_000, number)))
        rank, coverage = intervals.interval_ranks(number)
        covers = (draws[:, rank - 1] <= np.log(2)) & (np.log(2) <= draws[:, -rank])
        assert covers.mean() == pytest.approx(coverage, abs=0.01)


def test_differences_are_of_pairs_and_may_be_infinite() -> None:
    intervals = importlib.import_module("intervals")
    base = [5.0, 1.0, 3.0, 2.0, 4.0]
    worse = intervals.paired_interval([5.5, 1.25, 3.5, 2.5, math.inf], base)
    assert worse == {
        "median": 0.5,
        "low": 0.25,
        "high": math.inf,
        "pairs": [0.5, 0.25, 0.5, 0.5, math.inf],
    }
    assert intervals.is_apart(worse) and not intervals.is_apart(worse, 0.25)
    # Each seed moves both runs by more than they differ; the pairs do not.
    equal = intervals.paired_interval([5.1, 0.9, 3.1, 1.9, 4.0], base)
    assert not intervals.is_apart(equal) and equal["high"] < 0.11
    assert intervals.interval_text(equal).startswith("+0.0000 (-0.1000 to +0.1000")
    with pytest.raises(ValueError, match="zip"):
        intervals.paired_interval([1.0], base)


def test_every_row_of_the_ablations_is_a_run() -> None:
    ablations = importlib.import_module("ablations")
    runs = set()
    for variant in ablations.VARIANTS:
        settings = ablations.BASE | variant.settings
        lines = [f"{name}={value}" for name, value in settings.items()]
        runs.add(jf.load_config(ROOT / "configs/quickstart.py", lines))
    assert len(runs) == len(ablations.VARIANTS)  # none is another one by another name


def test_the_page_of_ablations_is_that_of_its_runs() -> None:
    ablations = importlib.import_module("ablations")
    saved = FOLDER / "results" / "ablations.json"
    if not saved.exists():
        pytest.skip("python benchmarks/ablations.py has not been run with these rows")
    result = json.loads(saved.read_text())
    experiment = ablations.Experiment(ablations.BASE, ablations.VARIANTS, result)
    assert (ROOT / "docs/ablations.md").read_text() == ablations.page(experiment)


def test_pretraining_and_its_task_read_no_file_of_the_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretraining = importlib.import_module("pretraining")
    library = tmp_path / "library"
    for number in range(40):
        (library / "reader").mkdir(parents=True, exist_ok=True)
        source = f"def function_{number}(a):\n    return a + {number}\n"
        (library / "reader" / f"module_{number}.py").write_text(source)
    monkeypatch.setitem(pretraining.PACKAGES, "LIBRARY", library)
    files = {"reader": pretraining.library_files()}
    monkeypatch.setitem(pretraining.PACKAGES, "packages", lambda: files)
    held_out = {*files["reader"][::5]}
    monkeypatch.setitem(pretraining.PACKAGES, "held_out", lambda paths: held_out)
    pretraining.write_data("t5", tmp_path, 0)
    corpus, train, validation = (
        [json.loads(line) for line in (tmp_path / f"{side}.jsonl").read_text().splitlines()]
        for side in ("corpus", "train", "validation")
    )
    assert [len(corpus), len(train), len(validation)] == [32, 32, 8]
    assert {record["target"] for record in validation} == {
        path.stem.replace("module", "function") for path in held_out
    }
    read = "".join(record["text"] for record in corpus)
    assert all(f"{record['target']}(" not in read for record in validation)


def test_the_blocks_of_kernels_are_those_of_the_shortest_schedule() -> None:
    """The table of the kernels against what was compiled, for the devices of a mesh that are not
    here."""
    blocks = importlib.import_module("attention_blocks")
    rows = json.loads((FOLDER / "results" / "attention_blocks.json").read_text())["rows"]
    for device, kind in KINDS_OF_TPU.items():
        on = AbstractDevice(kind, num_cores=1, platform="tpu")
        mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,), abstract_device=on)
        for length in blocks.LENGTHS:
            with jax.sharding.use_abstract_mesh(mesh):
                chosen = pallas.blocks_for(length)
                assert pallas.blocks_for(length, 1024) == pallas.SMALL_BLOCKS
            large = False
            # With all that a kernel is given, large blocks have to fit.
            if "error" not in rows[f"{device}_256_1024x1024_packed"]:
                sums = [
                    blocks.total(rows[f"{device}_128_{size}"], length)
                    for size in ("512x512", "1024x1024")
                ]
                large = sums[1] < 0.95 * sums[0]
            assert chosen == (pallas.LARGE_BLOCKS if large else pallas.SMALL_BLOCKS)
    assert "error" not in rows["v5e_256_512x512_packed"]
    assert pallas.blocks_for(2**20) == pallas.SMALL_BLOCKS  # without a mesh on this CPU


def test_a_row_of_the_board_claims_only_what_its_interval_shows() -> None:
    rules, intervals = map(importlib.import_module, ("board_rules", "intervals"))
    base = intervals.interval_of([190.0, 200.0, 205.0, 210.0, 220.0])

    def claim(*steps: float) -> str:
        return str(rules.verdict(intervals.interval_of(steps), base, len(steps)))

    assert claim(120, 125, 130, 140, 189) == "faster"
    assert claim(120, 125, 130, 140, 190) == "not told apart"
    assert claim(195, 196, 197, 198, 199) == "not told apart"
    assert claim(100, 125, 200, 240, 290) == "not told apart"
    assert claim(221, 222, 223, math.inf, math.inf) == "slower"
    assert claim(1, 1, 1, 1) == "too few seeds"


def test_the_page_of_the_board_is_that_of_its_json() -> None:
    board_page = importlib.import_module("board_page")
    result = json.loads((FOLDER / "results" / "board.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "results" / "board.md").read_text(encoding="utf-8")
    assert page == board_page.page(result), "python benchmarks/board.py --page"
    for task in result["tasks"].values():
        for row in filter(None, task["rows"].values()):
            assert len(row["tuning"]["trials"]) == 5, "the same number of trials for each row"


def test_every_row_of_the_board_is_a_config(tmp_path: Path) -> None:
    board = importlib.import_module("board")
    runs = board.Board(argparse.Namespace(task="10m", smoke=False, folder=tmp_path))
    for recipe in board.RECIPES.values():
        settings = runs.settings(recipe, recipe.center, 200, 0)
        lines = [f"{name}={value}" for name, value in settings.items()]
        run = jf.load_config(ROOT / "configs" / "quickstart.py", lines)
        assert run.optimizer.learning_rate == recipe.center and run.train.steps == 200


@pytest.mark.slow
def test_a_run_of_the_board_is_that_of_its_command_line(tmp_path: Path) -> None:
    board, workloads = map(importlib.import_module, ("board", "workloads"))
    options = argparse.Namespace(task="quickstart", smoke=True, folder=tmp_path)
    options.text = workloads.words_file(tmp_path)
    runs, recipe = board.Board(options), board.RECIPES["muon"]
    lines = [f"{name}={value}" for name, value in runs.settings(recipe, 0.01, 6, 3).items()]
    lines += [f"run.dir={tmp_path / 'run'}", "run.progress=none"]
    trained = jf.train(jf.load_config(ROOT / "configs" / "quickstart.py", lines))
    # Another horizon and seed before, with the same program.
    runs._trained(recipe, 0.01, 4, 0)
    numbers = runs._trained(recipe, 0.01, 6, 3)
    for name, number in numbers.items():
        assert number == pytest.approx(trained.metrics[-1][name], rel=1e-5)


@pytest.mark.parametrize("name", ["t5", "bert"])
def test_the_page_of_what_pretraining_is_worth_is_that_of_its_json(name: str) -> None:
    pretraining = importlib.import_module("pretraining")
    path = FOLDER / "results" / f"pretraining_{name}.json"
    row, runs = pretraining.ROWS[name], Path("runs/pretraining", name)
    result = json.loads(path.read_text(encoding="utf-8"))
    experiment = pretraining.task_experiment(row, runs, result)
    page = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert page == pretraining.page(name, row, runs, experiment)
    scratch, pretrained = experiment.variants
    assert len(experiment.runs_of(scratch)) == len(experiment.runs_of(pretrained)) >= 5
    difference = experiment.difference(pretrained, scratch)
    assert difference["high"] < 0, "pre-training helps, beyond the differences of seeds"


MEASURES = """import json, os, pathlib
pathlib.Path(os.environ["BENCHMARK_RESULTS"], "x.json").write_text(json.dumps({"samples": [1]}))
"""


def test_entries_of_the_queue_run_in_order_and_each_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By scripts that measure and fail. What did not end is measured again, and no other."""
    queue, out = importlib.import_module("gpu_queue"), tmp_path / "out"
    for folder in (out, tmp_path / "results"):
        folder.mkdir()
    (tmp_path / "measures.py").write_text(MEASURES)
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(queue, "HERE", tmp_path)
    monkeypatch.setattr(queue, "SHORTEST", 3)
    monkeypatch.setattr(queue, "TORCH_ENVIRONMENT", tmp_path / "torch")
    entries = [queue.Entry(2, "first", "measures.py", 9), queue.Entry(1, "second", "fails.py", 9)]
    options = argparse.Namespace(out=out, seconds=60, commit="abc", smoke=True)
    for state in ("ended", "known already"):
        work = queue.Queue(options, "NVIDIA H200")
        work.run(entries)
        assert work.states["first"].startswith(state)
        assert work.states["second"].startswith("failed with status 3")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["first:", "second:", "second:"]
    found = json.loads((out / "gpu_first_nvidia_h200.json").read_text())
    assert found["result"] == {"samples": [1]}
    assert (found["state"], found["commit"], found["device"]) == ("ended", "abc", "NVIDIA H200")


def test_every_entry_of_the_queue_names_a_script_and_a_place_on_the_page_of_results() -> None:
    module = importlib.import_module("gpu_queue")
    numbers = [entry.number for entry in module.entries()]
    assert numbers == sorted(numbers)
    page = (ROOT / "docs/results/measured.md").read_text()
    for entry in module.entries():
        assert (ROOT / "benchmarks" / entry.command.split()[0]).is_file()
    assert "<!-- results: gpu_queue -->" in page
