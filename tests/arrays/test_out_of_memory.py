"""Out of memory ends a run in one message, with its place, the figures and what to change; the run
directory stays usable."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny_run import line, logged, saved, train_here, write_text

import jaxformer as jf
from jaxformer.arrays.out_of_memory import is_out_of_memory, memory_of
from jaxformer.cli.train import advice
from jaxformer.runs import kernel_check, states
from jaxformer.runs import train_run as composer
from jaxformer.training.program import Step

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
GIB = 2**30
# As libtpu 0.0.42 raises it, an older libtpu, and jaxlib on a GPU and on a CPU.
TPU = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries"
    " (40.00G) exceeds available HBM (15.75G)."
)
OLDER_TPU = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm."
    " Used 21.95G of 15.48G hbm.\n Exceeded hbm capacity by 6.47G."
)
VMEM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.5M of 16.00M vmem."
GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes."
GPU_REQUEST = (
    "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device ordinal 0"
)
GPU_SHARED = (
    "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 147968, available: 101376"
)
# Whether a kernel does not fit in the memory beside the processors.
ON_CHIP = {
    TPU: False,
    OLDER_TPU: False,
    VMEM: True,
    GPU: False,
    GPU_REQUEST: False,
    GPU_SHARED: True,
}


def error_of(text: str) -> jax.errors.JaxRuntimeError:
    return jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize("text", ON_CHIP)
def test_the_error_of_a_compiler_or_allocator_is_named(text: str) -> None:
    with pytest.raises(jf.OutOfMemory) as caught, memory_of("the step"):
        raise error_of(text)
    assert str(caught.value) == f"the step: {text.splitlines()[0]}"
    assert caught.value.on_chip == ON_CHIP[text]


def test_other_errors_are_no_lack_of_memory() -> None:
    assert not is_out_of_memory(error_of("INTERNAL: cuDNN status 5000"))
    assert not is_out_of_memory(ValueError("out of memory"))


def failing(text: str, after: int = 0) -> Callable[..., Any]:
    """Takes the place of a function: raises from its call number `after` on."""
    calls = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) > after:
                raise error_of(text)
            return original(*args, **options)

        return run

    return wrap


def replace(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, text: str, after: int = 0
) -> None:
    monkeypatch.setattr(owner, name, failing(text, after)(getattr(owner, name)))


SMALL = {"train.steps": 6, "train.eval_every": 0, "train.checkpoint_every": 0}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_a_step_that_does_not_compile_leaves_the_directory_to_other_settings(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run_dir, changes = tmp_path / "run", SMALL
    with monkeypatch.context() as patched:
        replace(patched, Step, "lower", TPU)
        assert train_here(line(run_dir, text, changes)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"out of memory: compiling the step: {TPU}\n")
    assert "Traceback" not in error and "--model.remat full" in error
    assert "--train.microbatches 4" in error and "another run.dir" not in error
    assert "`jaxformer plan CONFIG`" in error
    assert "the same command with other settings begins it" in error
    assert train_here(line(run_dir, text, changes | {"train.microbatches": 4})) == 0
    assert saved(run_dir) == [6]


def test_a_step_that_runs_out_continues_from_its_checkpoint(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run_dir = tmp_path / "run"
    changes = SMALL | {"train.checkpoint_every": 2}
    compiled = composer.compile_step
    with monkeypatch.context() as patched:
        patched.setattr(
            composer, "compile_step", lambda *args: failing(GPU, after=3)(compiled(*args))
        )
        assert train_here(line(run_dir, text, changes)) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"out of memory: step 4: {GPU}\n")
    micro = next(line for line in error.splitlines() if "train.microbatches" in line)
    remat = next(line for line in error.splitlines() if "model.remat" in line)
    assert micro.endswith(", in another run.dir") and "run.dir" not in remat
    assert f"{run_dir} holds step 2" in error
    other = line(run_dir, text, changes | {"train.microbatches": 4})
    assert train_here(other) == 2 and "train.microbatches" in capsys.readouterr().err
    assert train_here(line(run_dir, text, changes | {"model.remat": "full"})) == 0
    assert "Continuing" in capsys.readouterr().out
    assert [entry["step"] for entry in logged(run_dir) if "loss" in entry] == [*range(1, 7)]


def test_an_evaluation_names_itself_and_what_helps_it(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def evaluation(*_: object) -> Any:
        def evaluate(*_: object) -> Any:
            return jnp.zeros(2**44, jnp.float32)  # the real error of this device

        return evaluate

    monkeypatch.setattr(composer, "make_evaluation", evaluation)
    assert train_here(line(tmp_path / "run", text, SMALL | {"train.eval_every": 2})) == 1
    error = capsys.readouterr().err
    assert error.startswith("out of memory: the evaluation after step 2: RESOURCE_EXHAUSTED")
    assert "train.batch_size" in error and "microbatches" not in error and "remat" not in error


def test_the_initial_state_and_the_check_of_the_kernel_are_named(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = {"model.attention.kernel": "blocked", "model.dropout": 0.0}
    settings = line(tmp_path / "run", text, SMALL | checked)
    pairs = zip(settings[1::2], settings[2::2], strict=True)
    run = jf.load_config(settings[0], [f"{name}={value}" for name, value in pairs])
    with monkeypatch.context() as patched:
        replace(patched, states, "init_state", GPU_REQUEST)
        with pytest.raises(jf.OutOfMemory) as caught:
            jf.train(run)
    assert caught.value.place == "the initial state"
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    # Which a start on a CPU leaves out.
    monkeypatch.setattr(composer, "platform", lambda mesh: "gpu")
    prove = failing(VMEM)(kernel_check.prove_attention)
    monkeypatch.setitem(kernel_check.PROOFS, "attention.kernel", prove)
    with pytest.raises(jf.OutOfMemory, match="vmem") as caught:
        jf.train(run)
    assert caught.value.place == "the check of model.attention.kernel"
    assert "--model.attention.kernel xla" in advice(caught.value)
    assert not (tmp_path / "run/config.json").exists()
