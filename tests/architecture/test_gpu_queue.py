"""The queue of measurements on a GPU: order, limits, and what is left out."""

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEASURES = """import json, os, pathlib
pathlib.Path(os.environ["BENCHMARK_RESULTS"], "x.json").write_text(json.dumps({"samples": [1]}))
"""


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with scripts of its own that measure, sleep and fail."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu_queue")
    (tmp_path / "results").mkdir()
    (tmp_path / "measures.py").write_text(MEASURES)
    (tmp_path / "sleeps.py").write_text(f"{MEASURES}import time; time.sleep(60)")
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "SHORTEST", 3)
    monkeypatch.setattr(module, "TORCH_ENVIRONMENT", tmp_path / "torch")
    return module


def ran(queue: ModuleType, out: Path, entries: list[Any], seconds: float = 60, **facts: str) -> Any:
    named = {"commit": "abc", "device": "NVIDIA H200", **facts}
    options = argparse.Namespace(out=out, seconds=seconds, commit=named["commit"], smoke=True)
    out.mkdir(exist_ok=True)
    work = queue.Queue(options, named["device"])
    work.run(entries)
    return work


def test_entries_run_in_order_and_each_writes_what_it_measured(
    queue: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = [queue.Entry(2, "first", "measures.py", 9), queue.Entry(1, "second", "fails.py", 9)]
    work = ran(queue, tmp_path / "out", entries)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["first:", "second:"]
    found = json.loads((tmp_path / "out/gpu_first_nvidia_h200.json").read_text())
    assert found["result"] == {"samples": [1]}
    assert (found["state"], found["commit"], found["device"]) == ("ended", "abc", "NVIDIA H200")
    assert work.states["second"].startswith("failed with status 3")


def test_an_entry_of_the_same_commit_and_device_is_left_out_unless_it_did_not_end(
    queue: ModuleType, tmp_path: Path
) -> None:
    entries = [queue.Entry(1, "a", "measures.py", 9), queue.Entry(1, "b", "fails.py", 9)]
    ran(queue, tmp_path / "out", entries)
    again = ran(queue, tmp_path / "out", entries)
    assert again.states["a"] == "known already"
    assert again.states["b"].startswith("failed")
    (tmp_path / "out/gpu_a_nvidia_h200.json").rename(
        tmp_path / "results" / "gpu_a_nvidia_h200.json"
    )
    assert ran(queue, tmp_path / "new", entries[:1]).states["a"] == "known already"
    for other in ({"commit": "def"}, {"device": "NVIDIA H100"}):
        assert ran(queue, tmp_path / "new", entries[:1], **other).states["a"].startswith("ended")


def test_an_entry_is_ended_at_its_limit_and_keeps_what_it_had_written(
    queue: ModuleType, tmp_path: Path
) -> None:
    work = ran(queue, tmp_path / "out", [queue.Entry(1, "slow", "sleeps.py", 2)])
    assert work.states["slow"].startswith("out of time")
    found = json.loads((tmp_path / "out/gpu_slow_nvidia_h200.json").read_text())
    assert found["result"] == {"samples": [1]} and found["seconds"] < 30


def test_every_entry_names_a_script_and_a_place_on_the_page_of_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("gpu_queue")
    numbers = [entry.number for entry in module.entries()]
    assert numbers == sorted(numbers)
    page = (ROOT / "docs/results/measured.md").read_text()
    for entry in module.entries():
        assert (ROOT / "benchmarks" / entry.command.split()[0]).is_file()
    assert "<!-- results: gpu_queue -->" in page


def test_time_is_told_by_kinds_and_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    profile = importlib.import_module("gpu_profile")
    backward = "jit(advance)/transpose(jvp(layer))/attention"
    for name, op_name, flops, kind in (
        ("fusion.1", f"{backward}/mul", 0, "attention"),
        ("fusion.2", f"{backward}/transpose(jvp(norm))/mul", 0, "norms"),
        ("gemm_fusion_dot.3", f"{backward}/dot_general", 8, "products"),
        ("custom-call.4 __cudnn$fmhaSoftmaxBackward", backward, 8, "attention"),
        ("input_transpose_fusion", f"{backward}/transpose", 0, "copies"),
        ("fusion.5", "jit(advance)/jvp(layer)/ffn/erf", 0, "activation"),
        ("fusion.6", "jit(advance)/optimizer/add", 0, "optimizer"),
        ("fusion.7", "", 0, "other"),
    ):
        assert profile.kind_of_instruction(name, op_name, flops) == kind, name
    names = {
        "nvjet_tst_192x192_64x4_2x1_v_bz_TNT": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma": "attention",
        "triton_per_fused_native_layer_norm_native_layer_norm_backward_5": "norms",
        "triton_poi_fused_gelu_gelu_backward_3": "activation",
        "triton_red_fused__log_softmax_nll_loss_forward_7": "loss",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copies",
    }
    kernels = profile.torch_kernels([[name, 0, 1] for name in names])
    assert {kernel.name: kernel.kind for kernel in kernels} == names
    # Two kernels side by side, a pause, and one more, in two steps; times in nanoseconds.
    ran = [("a", "products", 0, 4e6), ("b", "norms", 2e6, 6e6), ("a", "products", 8e6, 9e6)]
    found = profile.by_kind([profile.Kernel(*kernel) for kernel in ran], 2)
    assert found["kinds"]["products"] == 2.5 and found["kinds"]["norms"] == 2
    assert found["gaps_ms"] == 1 and found["traced_ms"] == 4.5
    assert found["longest"][0] == {"kernel": "a", "kind": "products", "ms": 2.5, "count": 1}
