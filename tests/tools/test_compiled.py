"""Compiling for devices that are not here: targets, reports, and, started by `-m compile`, the real
steps of the configs through the compilers of TPUs and GPUs."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxformer as jf
from jaxformer.arrays.hardware import DEVICES
from jaxformer.arrays.mesh import make_mesh
from jaxformer.arrays.params import rows
from jaxformer.config.run import RunConfig
from jaxformer.config.settings import with_settings
from jaxformer.files import ConfigError
from jaxformer.models.cost import parameter_count
from jaxformer.runs.resolve import resolve_without_data
from jaxformer.tools import plan_compiled as compiled
from jaxformer.tools.plan_compiled import (
    COLLECTIVE,
    GPU_MODELS,
    CompiledReport,
    compile_for_target,
    compiled_report,
    cudnn_of,
    parse_target,
    require_compiler,
    too_large,
)

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(CONFIGS.parent / "benchmarks")
    from hlo import Counts, count


def test_targets_are_read_and_written() -> None:
    for text in ("v5e:4x4", "v5p:2x2x1", "h100:1x8", "b200:2x8", "tpu7x:2x2x1"):
        target = parse_target(text)
        assert str(target) == text
        assert target.platform == ("gpu" if target.kind in GPU_MODELS else "tpu")
        assert target.size == {"v5e:4x4": 16, "v5p:2x2x1": 4, "h100:1x8": 8, "b200:2x8": 16}.get(
            text, 8
        )
        assert target.device.memory > 15 * GIB and target.device.bandwidth > 8e11
    for text in ("v5e", "v5e:4", "v5e:2x2x2", "v5p:2x2", "h100:8", "h100:0x8", "h100:1xa", "x:1x1"):
        with pytest.raises(ConfigError, match=r"no target .* h100:1x8 .* v5e:4x4 or v5p:2x2x4"):
            parse_target(text)


@pytest.mark.parametrize("kind", GPU_MODELS)
def test_a_gpu_is_described_by_its_published_figures(kind: str) -> None:
    target = parse_target(f"{kind}:1x1")
    text = GPU_MODELS[kind].config_text(target.device)
    for value in (target.device.cores, target.device.memory, round(target.device.bandwidth)):
        assert f": {value}\n" in text, value
    assert text.count("{") == text.count("}")


def test_a_compiler_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    for platform in ("gpu", "tpu"):
        with pytest.raises(ConfigError, match=rf"pip install 'jaxformer\[plan-{platform}\]'"):
            require_compiler(platform)


def test_what_jax_asks_of_a_gpu_is_answered_for_the_target_and_then_as_before() -> None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    before = fused.check_cudnn_version, fused.check_compute_capability
    with pytest.raises(KeyError), cudnn_of(parse_target("a100:1x1")):
        assert fused.check_cudnn_version() == 91000
        assert fused.check_compute_capability("8.0")
        assert not fused.check_compute_capability("9.0")
        assert fused.is_cuda_compute_capability_equal("8.0")
        raise KeyError
    assert (fused.check_cudnn_version, fused.check_compute_capability) == before
    with cudnn_of(parse_target("v5e:2x2")):
        assert fused.check_cudnn_version is before[0]


def test_the_words_of_a_program_that_is_too_large_are_figures() -> None:
    for text, needed, capacity in (
        (
            "Ran out of memory in memory space hbm. Used 54.94G of 15.75G hbm. Exceeded",
            54.94,
            15.75,
        ),
        ("required for HLO temporaries (28.29G) exceeds available HBM (15.75G).", 28.29, 15.75),
    ):
        assert too_large(RuntimeError(text)) == pytest.approx((needed * GIB, capacity * GIB))
    with pytest.raises(RuntimeError, match="something else"):
        too_large(RuntimeError("something else"))


def report(**changes: Any) -> CompiledReport:
    fields = {
        "target": "v5e:2x2",
        "device_kind": "TPU v5 lite",
        "mesh": {"data": 1, "fsdp": 4, "tensor": 1},
        "packed": False,
        "dtype": "bfloat16",
        "kernel": "xla (plain XLA attention)",
        "fits": True,
        "capacity": 16 * GIB,
        "needed": 8 * GIB,
        "memory": {"argument": GIB, "temporary": 7 * GIB, "peak": 8 * GIB, "host": 0},
        "flops": 2e12,
        "collectives": {"all-reduce": 3, "all-gather": 1},
        "model_flops": 5e12,
        "warnings": ["slow"],
    }
    return CompiledReport(**(fields | changes))


def test_a_report_says_whether_it_fits() -> None:
    lines = "\n".join(report().lines())
    assert "fits: 8.00 GiB of 16.00 GiB a device" in lines and "the compiler warns: slow" in lines
    assert "the model's are 5.000 TFLOP; the compiler counts 2.000 TFLOP" in lines
    assert "3 all-reduce, 1 all-gather" in lines
    refused = report(fits=False, needed=60 * GIB, memory={})
    lines = "\n".join(refused.lines())
    assert "does not fit: 60.00 GiB of 16.00 GiB a device" in lines and "TFLOP" not in lines
    for one in (report(), refused):
        assert CompiledReport(**json.loads(json.dumps(dataclasses.asdict(one)))) == one


def test_collectives_are_found_in_the_text_of_a_program() -> None:
    """Of a GPU and of a TPU; one that runs beside other instructions counts where it starts."""
    text = """
  %g = ((bf16[8,4]{1,0}), bf16[64,4]{1,0}) all-gather-start(%p), channel_id=1, dimensions={0}
  %d = bf16[64,4]{1,0} all-gather-done(%g)
  %all-reduce.51 = f32[8]{0:T(8)} all-reduce(%d), channel_id=2, to_apply=%add
  ROOT %r = f32[8]{0} ragged-all-to-all(%all-reduce.51, %d), metadata={op_name="all-reduce"}
"""
    assert COLLECTIVE.findall(text) == ["all-gather", "all-reduce", "ragged-all-to-all"]


def of_pairs(kind: str) -> RunConfig:
    """A tiny run of dpo, of the whole model ("none") or of an adapter."""
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 2, "d_ff": 128, "vocab_size": 256}
    model = with_settings(
        jf.ModelConfig(), {**sizes, "layer_loop": "scan", "attention.kernel": "xla"}
    )
    run = RunConfig(model=model)
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, objective="dpo", sequence_length=32),
        train=dataclasses.replace(run.train, batch_size=2, microbatches=1),
        run=dataclasses.replace(run.run, init_from="base"),
        adapter=dataclasses.replace(run.adapter, kind=kind),
    )


@pytest.mark.parametrize("kind", [pytest.param("none", marks=pytest.mark.slow), "lora"])
def test_the_products_of_dpo_are_those_of_its_program(kind: str, tmp_path: Path) -> None:
    """The reference of a whole model scores batches in a program of its own, and that below an
    adapter in the step, without the adapter."""
    resolved, batch = resolve_without_data(of_pairs(kind), make_mesh(devices=jax.devices()[:1]))
    found = compile_for_target(resolved, batch, DEVICES["cpu"], "cpu", tmp_path / "program")
    assert found.model_flops == count((tmp_path / "program").read_text()).flops
    assert 0 < found.flops < found.model_flops and found.bytes > 0 and found.collectives == {}
    # The reference is held beside the step, which does not read it.
    parameters = 4 * parameter_count(of_pairs(kind).model) if kind == "none" else 0
    assert found.needed == found.memory["peak"] + parameters
    said = "the parameters of the reference are in the memory" in "\n".join(found.lines())
    assert said == (kind == "none")


def test_settings_that_a_run_refuses_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles says what is wrong with the settings, before any compiler."""
    monkeypatch.setattr(compiled, "require_compiler", lambda platform: None)
    run = jf.load_config(CONFIGS / "gpt2_124m.py", ["mesh.fsdp=3"])
    installed = True
    try:
        require_compiler("tpu")
    except ConfigError:
        installed = False
    message = r"fsdp=3 .*does not fit 4 devices" if installed else r"jaxformer\[plan-tpu\]"
    with pytest.raises(ConfigError, match=message):
        compiled_report(run, "v5e:2x2")


# Rows that fit: 4 TPU chips have as much memory as one GPU has.
ON_FOUR_CHIPS = {"gpt2_124m": 32, "llama_1b": 4, "bert_base": 32, "t5_small": 32}
OFFLOADED = ["model.remat=names", "model.saved=attention", "model.offload=out"]
STEPS = {
    **{(name, "h100:1x8"): [] for name in ON_FOUR_CHIPS},
    **{
        (name, "v5e:2x2"): ["mesh.fsdp=4", f"train.batch_size={rows}", "train.microbatches=1"]
        for name, rows in ON_FOUR_CHIPS.items()
    },
    ("llama3_8b", "h100:1x8"): ["mesh.fsdp=8"],
    ("gpt2_124m", "h100:1x1"): ["train.batch_size=64", "train.microbatches=1", *OFFLOADED],
    ("llama3_8b", "v5e:4x4"): ["mesh.fsdp=16", "train.batch_size=16", "train.microbatches=1"],
}


@pytest.mark.compile
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "target"), STEPS)
def test_the_step_of_a_config_compiles(name: str, target: str, tmp_path: Path) -> None:
    """Scanned, since a compiler for TPUs takes minutes for unrolled layers."""
    try:
        require_compiler(parse_target(target).platform)
    except ConfigError as missing:
        pytest.skip(str(missing))
    changes = ["model.layer_loop=scan", *STEPS[name, target]]
    run = jf.load_config(CONFIGS / f"{name}.py", changes)
    found = compiled_report(run, target, hlo=tmp_path / "program")
    print("\n".join(found.lines()))
    assert found.fits, found.lines()
    counts = count((tmp_path / "program").read_text())
    # Every product of the model is in the program; attention's causal half may be left out.
    assert counts.flops > 0.6 * found.model_flops
    assert all(loop.trips for loop in counts.loops)
    assert (found.collectives and counts.collectives) or target == "h100:1x1"
    assert (found.memory["host"] > 0) == ("model.offload=out" in changes)
    on_gpu = parse_target(target).platform == "gpu"
    assert found.kernel.startswith("cudnn (" if on_gpu else ("tpu (", "blocked ("))
    biased = "__cudnn$fmhaScaleBiasSoftmaxBackward" in counts.custom_calls
    assert biased == (on_gpu and name == "t5_small")


@pytest.mark.compile
@pytest.mark.timeout(3600)
def test_a_deterministic_step_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The compiler has both options, and accepts the program under them."""
    try:
        require_compiler("gpu")
    except ConfigError as missing:
        pytest.skip(str(missing))
    changes = ["model.n_layers=2", "train.batch_size=8", "train.microbatches=1"]
    run = jf.load_config(CONFIGS / "gpt2_124m.py", [*changes, "train.deterministic=True"])
    found = compiled_report(run, "h100:1x1", hlo=tmp_path / "program")
    counts = count((tmp_path / "program").read_text())
    assert found.fits and counts.flops > 0.6 * found.model_flops


@pytest.mark.compile
@pytest.mark.timeout(3600)
def test_muon_adds_less_than_one_gather_of_each_matrix_to_the_step_of_adamw(tmp_path: Path) -> None:
    """Matrices are exchanged before and after they are orthogonalized; all else stays."""
    try:
        require_compiler("gpu")
    except ConfigError as missing:
        pytest.skip(str(missing))
    changes = ["model.n_layers=8", "mesh.fsdp=8", "train.batch_size=8", "train.microbatches=1"]
    changes += ["model.layer_loop=scan"]
    by_optimizer = {}
    for name in ("adamw", "muon"):
        run = jf.load_config(CONFIGS / "llama_1b.py", [*changes, f"optimizer.name={name}"])
        compiled_report(run, "h100:1x8", hlo=tmp_path / name)
        sizes = Counter[str]()
        for entry in count((tmp_path / name).read_text()).collectives:
            sizes[entry.kind] += entry.count * entry.bytes
        by_optimizer[name] = sizes
    exchanged = by_optimizer["muon"] - by_optimizer["adamw"]
    table = rows(jf.specs(run.model)).values()
    matrices = [spec for spec in table if spec.is_matrix and spec.is_stacked]
    # Scalars of the norm of the gradient may be summed with others or alone.
    assert [kind for kind, size in exchanged.items() if size > 1000] == ["all-to-all"]
    assert exchanged["all-to-all"] < 4 * sum(math.prod(spec.shape) for spec in matrices)


@pytest.mark.compile
@pytest.mark.timeout(3600)
def test_a_step_on_tpus_gathers_weights_whole_and_casts_them_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option of the table the pieces of a weight are passed on during its product; and
    no program holds the weights of all layers in two dtypes."""
    try:
        require_compiler("tpu")
    except ConfigError as missing:
        pytest.skip(str(missing))
    changes = ["mesh.fsdp=4", "train.batch_size=4", "train.microbatches=1", "model.n_layers=3"]
    programs, path = [], tmp_path / "program"
    run = jf.load_config(CONFIGS / "llama_1b.py", [*changes, "model.layer_loop=scan"])
    option = "xla_tpu_enable_windowed_einsum_for_all_gather"
    for named in (f"--{option}=true", ""):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", named)
        compiled_report(run, "v5e:2x2", hlo=path)
        programs.append(count(path.read_text()))
    without, with_option = programs

    def of_forward_products(counts: Counts, kind: str) -> int:
        names = [entry.op_name for entry in counts.collectives if entry.kind == kind]
        forward = [name for name in names if "jvp()/while" in name and "transpose" not in name]
        return sum("dot_general" in name for name in forward)

    assert of_forward_products(without, "collective-permute") > 0
    assert of_forward_products(with_option, "collective-permute") == 0
    assert of_forward_products(with_option, "all-gather") > 0
    # The shard of the matrix "up" of all layers.
    text = path.read_text()
    assert "f32[3,512,5632]" in text and "bf16[3,512,5632]" not in text


@pytest.mark.compile
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loop", ["unroll", "scan"])
@pytest.mark.parametrize("triton", [False, True])
def test_a_step_with_products_in_8_bits_multiplies_all_matrices_of_the_layers_so(
    loop: str, triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cuBLASLt, forward and both ways back. The compiler measures on a device whether a kernel
    of Triton is faster; without one it takes those, of the same codes, unless they are off."""
    try:
        require_compiler("gpu")
    except ConfigError as missing:
        pytest.skip(str(missing))
    flags = f"--xla_gpu_enable_triton_gemm={str(triton).lower()}"
    monkeypatch.setitem(compiled.ENVIRONMENT, "XLA_FLAGS", flags)
    changes = ["model.n_layers=2", f"model.layer_loop={loop}", "train.products=fp8"]
    changes += ["train.batch_size=8", "train.microbatches=1"]
    run = jf.load_config(CONFIGS / "llama_1b.py", changes)
    compiled_report(run, "h100:1x1", hlo=tmp_path / "program")
    counts = count((tmp_path / "program").read_text())
    table = rows(jf.specs(run.model))
    tokens = 8 * run.data.sequence_length
    of_layers = sum(math.prod(spec.shape) for spec in table.values() if spec.batch and spec.inputs)
    forward = 2 * tokens * of_layers
    products = {name.partition(" -> ")[0]: 0 for name in counts.products}
    for name, flops in counts.products.items():
        products[name.partition(" -> ")[0]] += flops
    # What is left are those of the head.
    assert products.pop("bf16 x bf16") == 6 * tokens * run.model.vocab_size * run.model.d_model
    if triton:
        # It may multiply w^T g^T for g w.
        assert sum(products.values()) == 3 * forward
        return
    gradient_and_values = {"f8e5m2 x f8e4m3fn", "f8e4m3fn x f8e5m2"}
    assert products == dict.fromkeys({"f8e4m3fn x f8e4m3fn", *gradient_and_values}, forward)
    # Queries, keys and values may be one product, or the gradients of their matrices.
    assert counts.custom_calls["__cublas$lt$matmul$f8"] >= 3 * 5 * run.model.n_layers
