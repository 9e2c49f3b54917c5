"""`jaxformer plan`: what it says of a run is what the run needs, before it starts."""

import dataclasses
import functools
import importlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from optimizer_variants import VARIANTS
from products import fewest, slow_but

import jaxformer as jf
from jaxformer.arrays.hardware import DEVICES, bfloat16_note, name_of, peak_flops
from jaxformer.cli import main
from jaxformer.config.config_file import read_config
from jaxformer.config.run import RunConfig
from jaxformer.models.cost import activation_bytes, flops_per_token, parameter_count
from jaxformer.runs.resolve import CPU_ACTIVATIONS
from jaxformer.tools.plan import (
    Plan,
    link_bytes,
    make_plan,
    parameters_by_part,
    plan_numbers,
    plan_text,
)
from jaxformer.tools.plan_memory import (
    PlannedRun,
    activations,
    bias_bytes,
    memory_plan,
    planned_run,
    replanned,
)
from jaxformer.training.optimizers.run_optimizer import make_optimizer
from jaxformer.training.optimizers.schedules import make_schedule
from jaxformer.training.state import init_state

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
Capture = pytest.CaptureFixture[str]


def config(name: str, *overrides: str) -> RunConfig:
    return jf.load_config(ROOT / "configs" / f"{name}.py", overrides)


def planned(name: str, device: str = "h100", devices: int = 0, *overrides: str) -> PlannedRun:
    return planned_run(config(name, *overrides), device, devices)


def plan(name: str, device: str = "h100", devices: int = 0, *overrides: str) -> Plan:
    return make_plan(planned(name, device, devices, *overrides))


def held(found: Plan) -> dict[str, float]:
    return {line.name: line.bytes for line in found.memory.held}


@pytest.mark.parametrize(
    "name, device", fewest(itertools.product(CONFIGS, ["h100", "v5e", "cpu"]), 1)
)
def test_every_config_is_planned(name: str, device: str) -> None:
    found = plan(name, device)
    assert sum(parameters_by_part(found.planned).values()) == parameter_count(found.planned.model)
    assert 0 < found.memory.temporary < found.memory.peak
    text = plan_text(found, f"plan of {name}")
    assert name in text and max(map(len, text.splitlines())) <= 100
    assert json.loads(json.dumps(plan_numbers(found)))["memory"]["peak"] == found.memory.peak
    known = found.bound is not None
    assert known == (device != "cpu")
    assert ("Least time" in plan_text(found, "")) == known and "unknown" not in text


@pytest.mark.parametrize("variant", slow_but(VARIANTS, *[*VARIANTS][::4]))
def test_the_state_of_every_optimizer_takes_the_bytes_that_are_planned(variant: str) -> None:
    assert_state_is_planned("quickstart", VARIANTS[variant])


@pytest.mark.parametrize("name, optimizer", [("bert_tiny", "muon"), ("t5_tiny", "adafactor")])
def test_the_state_of_other_families_takes_the_bytes_that_are_planned(
    name: str, optimizer: str
) -> None:
    assert_state_is_planned(name, {"name": optimizer})


def assert_state_is_planned(name: str, settings: dict[str, Any]) -> None:
    overrides = [f"optimizer.{setting}={value}" for setting, value in settings.items()]
    found = plan(name, "cpu", 0, *overrides)
    run = found.planned.run
    schedule = make_schedule(run.optimizer, run.train.steps)
    optimizer = make_optimizer(run.optimizer, schedule, found.planned.specs)
    state = jax.eval_shape(lambda: init_state(found.planned.specs, optimizer))

    def bytes_of(tree: Any) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    params, rest = bytes_of(state.params), bytes_of((state.step, state.optimizer))
    assert held(found)["parameters"] == params and held(found)["optimizer state"] == rest


def test_an_average_of_the_weights_is_counted_with_the_optimizer() -> None:
    without, average = plan("quickstart", "cpu"), plan("quickstart", "cpu", 0, "train.ema=0.999")
    added = held(average)["optimizer state"] - held(without)["optimizer state"]
    assert added == held(without)["parameters"] + 4  # float32, and the number of steps
    eight = plan("llama_1b", "h100", 8, "mesh.fsdp=8", "train.ema=0.999")
    divided = plan("llama_1b", "h100", 8, "mesh.fsdp=8")
    added = held(eight)["optimizer state"] - held(divided)["optimizer state"]
    assert added == held(divided)["parameters"] + 4  # divided as the parameters are


def test_shards_take_their_share_of_the_bytes() -> None:
    one, eight = plan("llama_1b"), plan("llama_1b", "h100", 8, "mesh.fsdp=8")
    # All but the norms, which are whole on each device.
    norms = 4 * parameters_by_part(one.planned)["norms"]
    divided = held(one)["parameters"] - norms
    assert held(eight)["parameters"] == divided / 8 + norms
    assert held(eight)["batch"] == held(one)["batch"] / 8


LONG_ROW = ("data.sequence_length=32768", "model.max_length=32768", "train.microbatches=1")


def test_context_divides_state_and_activations() -> None:
    plans = [
        plan("llama_1b", "h100", n, f"mesh.context={n}", "train.batch_size=1", *LONG_ROW)
        for n in (1, 2, 4)
    ]
    one = plans[0]
    norms = 4 * parameters_by_part(one.planned)["norms"]
    for found in plans[1:]:
        count = found.planned.context
        divided = held(one)["parameters"] - norms
        assert held(found)["parameters"] == divided / count + norms
        assert found.planned.rows == 1 and found.planned.positions(32_768) == 32_768 // count
        stages = found.memory.stages.values(), one.memory.stages.values()
        for lines, of_one in zip(*stages, strict=True):
            stored = [line.bytes for line in lines if line.name == "activations"]
            assert stored == [line.bytes / count for line in of_one if line.name == "activations"]
    assert plans[1].memory.peak < 0.6 * one.memory.peak
    assert plans[2].memory.peak < 0.6 * plans[1].memory.peak
    text = " ".join(plan_text(plans[2], "").split())
    assert "context 4" in text and "1 rows of a device at a time, 8,192 tokens of each" in text
    assert "devices of mesh.context exchange tokens for heads before attention" in text
    assert plan_numbers(plans[2])["exchange"] == "heads"
    assert "mesh.context" not in plan_text(one, "")


def test_a_row_that_fits_on_no_device_is_divided_by_context() -> None:
    rows = ("data.sequence_length=262144", "model.max_length=262144", "train.microbatches=1")
    settings = ("mesh.fsdp=8", "train.batch_size=8", *rows)
    found = plan("llama_1b", "h100", 8, *settings)
    assert found.memory.fits is False and found.changes
    for change in found.changes:
        settings = change.settings
        assert settings["mesh.fsdp"] * settings["mesh.context"] == 8 > settings["mesh.fsdp"]
        memory = make_plan(replanned(found.planned, settings)).memory
        assert memory.fits and memory.peak == change.peak
    # Where fewer tokens of a device at a time are enough, rows are not divided.
    short = plan("llama_1b", "a100_40gb", 4, "train.microbatches=1", "train.batch_size=64")
    assert short.changes and not any("mesh.context" in one.settings for one in short.changes)


def test_another_mesh_has_the_kernel_that_it_needs() -> None:
    settings = ("train.batch_size=8", "data.sequence_length=8192", "model.max_length=8192")
    run = planned("gpt2_124m", "h100", 8, *settings, "train.microbatches=1")
    assert run.model.attention.kernel == "cudnn" and run.exchange == "none"
    ring = replanned(run, {"mesh.context": 8})
    assert ring.model.attention.kernel == "ring" == ring.exchange
    assert ring.kernel.startswith("ring")
    assert replanned(ring, {"mesh.context": 4}).model.attention.kernel == "cudnn"


@pytest.mark.parametrize(
    ("facts", "is_said"),
    [
        ("vendor_id : AuthenticAMD\nflags : fpu avx512_bf16", True),
        ("vendor_id : AuthenticAMD\nflags : fpu avx512f", False),
        ("vendor_id : GenuineIntel\nflags : fpu avx512_bf16 amx_bf16", False),
        (None, False),
    ],
)
def test_bfloat16_is_named_on_the_cpus_on_which_it_was_measured(
    facts: str | None, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpuinfo"
    if facts is not None:
        file.write_text(facts, encoding="utf-8")
    monkeypatch.setattr("jaxformer.arrays.hardware.Path", lambda _: file)
    assert ("--model.dtype bfloat16" in bfloat16_note()) == is_said


def test_products_are_those_of_the_cost_model() -> None:
    found = plan("t5_small", "h100", 0, "model.dropout=0.0")
    run = found.planned.run
    per_token = flops_per_token(run.model, run.data.sequence_length, run.data.source_length)
    assert found.products.per_token == per_token
    tokens = run.train.batch_size * run.data.sequence_length
    assert found.products.model == per_token * tokens
    assert not found.products.recomputed
    full = plan("t5_small", "h100", 0, "model.dropout=0.0", "model.remat=full").products
    # The products of the blocks are computed once more, and are less than all.
    assert 0 < full.recomputed < full.model / 3


def seen_pairs(length: int, window: int, causal: bool) -> int:
    """Counted one by one."""
    return sum(
        (not causal or key <= query) and abs(query - key) < (window or length)
        for query in range(length)
        for key in range(length)
    )


@pytest.mark.parametrize(
    ("name", "device", "windows", "settings"),
    [
        ("llama_1b", "h100", [0, 0], []),
        ("llama_1b", "h100", [48, 48], ["model.window=48"]),
        ("llama_1b", "h100", [48, 0], ["model.window=48", "model.window_pattern=wf"]),
        ("llama_1b", "v5e", [48, 48], ["model.window=48"]),
        # Blocked attention computes the keys beyond a window.
        ("llama_1b", "h100", [0, 0], ["model.window=48", "model.attention.kernel=blocked"]),
        ("bert_base", "v5e", [48, 48], ["model.window=48", "model.dropout=0.0"]),
        ("bert_base", "v5e", [0, 0], ["model.dropout=0.0"]),
    ],
)
def test_what_windows_hide_is_no_product(
    name: str, device: str, windows: list[int], settings: list[str]
) -> None:
    sizes = ["model.n_layers=2", "data.sequence_length=128", "model.max_length=128"]
    found = plan(name, device, 0, *sizes, *settings)
    model, rows = found.planned.model, found.planned.sequences
    pairs = [seen_pairs(128, window, model.family == "decoder") for window in windows]
    hidden = sum(128**2 - of_layer for of_layer in pairs)
    # Six products of a number of each score: with keys and values, forward, and twice backward.
    assert found.products.skipped == rows * hidden * 12 * model.n_heads * model.head_width
    assert found.bound is not None
    peak = DEVICES[device].bfloat16
    assert found.bound.products == pytest.approx(found.products.done / peak)


def test_the_bound_is_the_largest_of_its_parts_and_falls_with_devices() -> None:
    one, eight = plan("llama_1b"), plan("llama_1b", "h100", 8, "mesh.fsdp=8")
    for found in (one, eight):
        parts = dict(found.bound._asdict())
        assert found.bound.seconds == max(parts.values()) == parts[found.bound.binds]
        assert 0 < found.mfu <= 1.1
    assert one.bound.links == 0 < eight.bound.links
    assert one.bound.seconds / 8 <= eight.bound.seconds < one.bound.seconds
    assert one.bound.products == pytest.approx(one.products.done / DEVICES["h100"].bfloat16)


def test_what_the_mesh_leaves_undivided_is_named() -> None:
    left = plan("bert_base", "h100", 4, "mesh.tensor=4")
    text = " ".join(plan_text(left, "").split())
    assert "embed.tokens" in text and "is not split along vocab 30522 by tensor 4" in text
    padded = plan("bert_base", "h100", 4, "mesh.tensor=4", "model.vocab_size=30528")
    assert padded.mfu == pytest.approx(1.0, abs=0.01) and "not split" not in plan_text(padded, "")
    with pytest.raises(jf.ConfigError, match=r"mesh.fsdp=5 splits no parameter"):
        plan("quickstart", "h100", 5, "mesh.fsdp=5", "model.d_ff=1000", "train.batch_size=40")


def test_links_take_the_weights_the_gradients_and_the_sums_of_sublayers() -> None:
    run = planned("llama_1b", "h100", 8, "mesh.fsdp=4")
    parts, microbatches = parameters_by_part(run), run.run.train.n_microbatches
    matrices = parts["attention"] + parts["ffn"] + parts["head"]
    weights = 3 * microbatches * 2 * matrices * 3 / 4
    total = sum(parts.values())
    gradients = 2 * ((total - parts["norms"]) / 4 + parts["norms"]) / 2
    assert link_bytes(run) == pytest.approx(weights + gradients)
    summed = planned("llama_1b", "v5e", 4, "mesh.tensor=4", "train.microbatches=1")
    stream = summed.rows * 2048 * 2048 * 2
    assert link_bytes(summed) == pytest.approx(2 * 22 * 2 * stream * 2 * 3 / 4)


# To plan all saved steps takes half a minute.
SHARES = pytest.mark.parametrize("share", [0, pytest.param(1, marks=pytest.mark.slow)])


@functools.cache
def saved_steps(share: int) -> dict[str, tuple[dict[str, Any], PlannedRun]]:
    """Of the steps of both vendors that `benchmarks/plan_memory.py` compiled and saved every third
    (0) or the others (1), planned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import plan_memory

        rows = enumerate(plan_memory.saved("plan_memory").items())
        results = dict(row for number, row in rows if bool(number % 3) == share)
        return {name: (found, plan_memory.planned_step(found)) for name, found in results.items()}


@SHARES
def test_links_send_no_more_than_the_compilers_programs(share: int) -> None:
    shares = []
    for name, (result, step) in saved_steps(share).items():
        if step.mesh.size == 1 or "collectives" not in result:
            continue
        sent = 0.0
        for kind, devices, size in result["collectives"]:
            part = 1 - 1 / (devices or step.mesh.size)
            if kind == "collective-permute":
                part = 1.0
            elif kind == "all-reduce":
                part = 1.0 if step.device.platform == "gpu" else 2 * part
            sent += size * part
        shares.append(link_bytes(step) / sent)
        assert shares[-1] < 1.05, name
    assert len(shares) >= 10 and statistics.median(shares) > 0.5, shares


def test_less_is_stored_with_remat_and_with_microbatches() -> None:
    temporary = [
        plan("llama_1b", "h100", 0, f"model.remat={remat}").memory.temporary
        for remat in ("none", "names", "full")
    ]
    assert temporary == sorted(temporary, reverse=True) and len(set(temporary)) == 3
    host = ("model.remat=names", "model.saved=none", "model.offload=attention,input")
    assert plan("llama_1b", "h100", 0, *host).memory.temporary < temporary[2]
    few = plan("gpt2_124m", "h100", 0, "train.microbatches=4").memory.temporary
    assert few > plan("gpt2_124m", "h100", 0, "train.microbatches=16").memory.temporary


@pytest.mark.parametrize("name", ["transformer_base", "t5_small", "tinystories"])
def test_the_microbatches_that_auto_selects_on_a_cpu_store_4_gb_at_most(name: str) -> None:
    run = planned(name, "cpu", 0, "model.vocab_size=40000")
    stacks, count = activations(run), run.run.train.n_microbatches
    biases = sum(bias_bytes(run, stack)[0] for stack in run.stacks)
    stored = sum(stack.stored for stack in stacks) - biases
    assert count > 1 and 0.25 * CPU_ACTIVATIONS < stored <= CPU_ACTIVATIONS
    row_bytes = activation_bytes(run.model, run.length, run.source_length)
    assert stored == pytest.approx(run.rows * row_bytes)


@pytest.mark.parametrize(("device", "kernel"), [("a100", "blocked"), ("h100", "cudnn")])
def test_packed_rows_take_the_kernel_of_the_compute_capability(device: str, kernel: str) -> None:
    found = planned_run(config("gpt2_124m"), device, packed=True)
    assert found.run.model.attention.kernel == kernel and found.kernel.startswith(kernel)


def test_the_changes_fit_and_are_the_smallest() -> None:
    found = plan("llama_1b", "a100_40gb", 4, "train.microbatches=1", "train.batch_size=64")
    assert found.memory.fits is False and found.changes
    for change in found.changes:
        memory = make_plan(replanned(found.planned, change.settings)).memory
        assert memory.fits and memory.peak == change.peak
    fsdp = [c.settings["mesh.fsdp"] for c in found.changes if set(c.settings) == {"mesh.fsdp"}]
    for size in fsdp:
        less = {"mesh.fsdp": size // 2}
        assert not make_plan(replanned(found.planned, less)).memory.fits


def test_a_run_that_fits_needs_no_change_and_one_that_cannot_has_none() -> None:
    assert plan("quickstart").changes is None
    hopeless = plan("llama3_8b", "l40s", 1, "train.batch_size=4")
    assert hopeless.changes == []
    assert "use more devices" in plan_text(hopeless, "")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("h100_nvl", "h100_nvl"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_found_by_what_jax_calls_it(kind: str, name: str | None) -> None:
    assert name_of(kind) == name
    assert peak_flops(kind, "bfloat16") == (name and DEVICES[name].bfloat16)


def test_each_kind_is_that_of_one_row_and_has_all_figures() -> None:
    for name, device in DEVICES.items():
        if name != "cpu":
            assert None not in dataclasses.astuple(device)
            assert device.float32 <= device.bfloat16
    assert peak_flops("cpu", "float32") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--device", "h1000"], "there is no device 'h1000': choose one of h100,"),
        (["quickstart", "--device", "h100", "--devices", "-2"], "--devices -2"),
        (["quickstart", "--device", "h100", "--devices", "3", "--mesh.fsdp", "2"], "must multiply"),
        (["quickstart", "--device", "h100", "--devices", "3"], "not divisible among"),
        (
            ["shakespeare_char", "--device", "h100", "--model.vocab_size", "0"],
            "model.vocab_size=0, and the size of this tokenizer is not known",
        ),
        (["gpt2_124m", "--device", "v5e", "--model.attention.kernel", "cudnn"], "cannot run here"),
    ],
)
def test_what_cannot_be_planned_is_one_message(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    arguments[0] = str(ROOT / "configs" / f"{arguments[0]}.py")
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err and "Traceback" not in told.err and not told.out


def test_the_command_prints_text_or_json(capsys: Capture) -> None:
    path = str(ROOT / "configs" / "gpt2_124m.py")
    given = [path, "--device", "v5e", "--devices", "4", "--mesh.fsdp", "4"]
    assert main(["plan", *given]) == 0
    text = capsys.readouterr().out
    option = "xla_tpu_enable_windowed_einsum_for_all_gather"
    words = (
        f"{option}=false",
        "4 x v5e",
        "attention",
        "exact",
        "estimate",
        "not faster than",
        "No speed is promised",
    )
    assert all(word in text for word in words)
    assert not re.search(r"\d tokens/s|tokens per second", text)
    assert main(["plan", *given, "--json"]) == 0
    numbers: dict[str, Any] = json.loads(capsys.readouterr().out)
    found = plan("gpt2_124m", "v5e", 4, "mesh.fsdp=4")
    assert numbers["memory"]["peak"] == found.memory.peak
    assert numbers["compiler_options"] == {option: "false"}
    assert numbers["bound"]["seconds"] == found.bound.seconds


def test_classes_that_only_the_data_knows_are_assumed_and_said() -> None:
    run = read_config(ROOT / "configs" / "bert_tiny.py:scratch")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=4096))
    found = make_plan(planned_run(run, "h100"))
    assert "2 classes are assumed" in plan_text(found, "")


def test_a_large_model_on_many_devices_is_planned_without_the_platform_that_it_is_for() -> None:
    """benchmarks/startup.py times it."""
    sizes = ["--model.d_model", "8192", "--model.n_layers", "80", "--model.n_heads", "64"]
    sizes += ["--model.d_ff", "28672", "--train.batch_size", "1024", "--mesh.fsdp", "256"]
    command = [sys.executable, "-m", "jaxformer", "plan", "configs/llama3_8b.py", *sizes]
    command += ["--device", "v5p", "--devices", "256", "--json"]
    environment = {**os.environ, "JAX_PLATFORMS": "tpu"}  # of which there is none here
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    numbers = json.loads(done.stdout)
    assert sum(numbers["parameters"].values()) == 70_553_706_496
    assert numbers["memory"]["fits"] and numbers["bound"]["mfu"] > 0.5


@SHARES
def test_planned_memory_is_near_what_the_compilers_said(share: int) -> None:
    steps = {name: step for name, step in saved_steps(share).items() if "needed" in step[0]}
    assert len(steps) >= 20 and {name.startswith("v") for name in steps} == {True, False}
    errors = {
        name: memory_plan(step).peak / result["needed"] - 1
        for name, (result, step) in steps.items()
    }
    assert statistics.median(map(abs, errors.values())) <= 0.1
    assert not {name for name, error in errors.items() if error < -0.05}


def test_memory_that_was_measured_on_a_gpu_is_within_a_tenth_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    accelerator = importlib.import_module("accelerator")
    path = ROOT / "benchmarks/results/train_gpu_nvidia_h200.json"
    measured = {
        (name, row["batch"]): row["peak_bytes"]
        for name, rows in json.loads(path.read_text(encoding="utf-8"))["rows"].items()
        for row in rows
        if row["with"] == "jaxformer" and "peak_bytes" in row
    }
    for (name, batch), peak in measured.items():
        run = accelerator.with_sizes(accelerator.ACCELERATOR_WORKLOADS[name], batch, 1)
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="bfloat16"))
        planned = make_plan(planned_run(run, "h200", 1)).memory.peak
        assert planned == pytest.approx(peak, rel=0.1), name
    assert len(measured) == 7
