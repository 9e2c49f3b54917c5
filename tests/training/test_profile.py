"""`run.profile` and `jf.Profile`: a trace of some steps, and where their time went by named
scopes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_run import line, train_here, write_text

import jaxformer as jf
from jaxformer.config.config_file import check
from jaxformer.config.run import RunSettings
from jaxformer.training.trace import (
    OTHER,
    SCOPES,
    ScopedPass,
    covered,
    operations,
    place_of,
    places_of,
    time_table,
)

MODEL = jf.ModelConfig(vocab_size=128, d_model=32, n_heads=2, n_layers=2, max_length=16)
OPTIMIZER = optax.adamw(1e-3)
# The parts of a step that each model has.
PARTS = {"embed", "attention", "ffn", "norm", "loss", "optimizer"}
MODELS = {
    "unrolled": MODEL,
    "scanned and recomputed": replace(MODEL, layer_loop="scan", remat="full"),
    "encoder": replace(MODEL, family="encoder"),
    "encoder-decoder": replace(MODEL, family="encoder_decoder"),
}


class Batches:
    """`batches[k]` for a model of MODELS."""

    def __init__(self, model: jf.ModelConfig) -> None:
        self.objective = {"decoder": "causal", "encoder": "mlm"}.get(model.family, "seq2seq")
        self.names = ["tokens", "targets"] + ["source"] * (self.objective == "seq2seq")

    def __getitem__(self, step: int) -> dict[str, Any]:
        rng = np.random.default_rng(step)
        ids = {name: rng.integers(1, 128, (2, 16)).astype(np.int32) for name in self.names}
        return {**ids, "weights": np.ones((2, 16), np.float32)}


def step_and_state(model: jf.ModelConfig) -> tuple[Any, Any]:
    step = jf.make_step(jf.loss_of(Batches(model).objective, model), OPTIMIZER)
    return step, jf.init_state(jf.specs(model), OPTIMIZER)


@pytest.fixture(autouse=True)
def named_programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cache of the tests may hold the programs of other code, whose scopes had other names."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = jax.config.values[name]
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.mark.parametrize(
    ("name", "place"),
    {
        "jit(advance)/jvp(layer)/attention/dot_general": ("attention", "forward"),
        "jit(advance)/transpose(jvp(layer))/ffn/jit(silu)/mul": ("ffn", "backward"),
        "jit(advance)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/"
        "layer/norm/mul": ("norm", "recomputed"),
        "jit(advance)/optimizer/mul;jit(advance)/jvp(loss)/add": ("optimizer", "forward"),
        "jit(advance)/jvp(layer)/add": ("layer", "forward"),
        "jit(advance)/jit(norm)/reduce_sum": (OTHER, "forward"),
        "": (OTHER, "forward"),
    }.items(),
)
def test_an_operation_counts_for_its_innermost_scope(name: str, place: tuple[str, str]) -> None:
    assert place_of(name) == ScopedPass(*place)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_product_of_a_step_has_a_scope(name: str) -> None:
    step, state = step_and_state(MODELS[name])
    text = step.lower(state, Batches(MODELS[name])[0]).compile().as_text()
    places = places_of(text)
    assert {place.scope for place in places.values()} >= PARTS
    products = [text for text in text.splitlines() if " dot(" in text]
    scopes = [place_of(text.split('op_name="')[1].split('"')[0]).scope for text in products]
    assert len(scopes) > 10 and {*scopes} <= {"attention", "cross", "ffn", "head", "loss"}
    assert ("cross" in scopes) == (MODELS[name].family == "encoder_decoder")


def test_a_fit_with_a_profile_is_the_same_fit(tmp_path: Path) -> None:
    model = MODELS["scanned and recomputed"]
    step, state = step_and_state(model)
    profile = jf.Profile(step, "3:5", tmp_path)
    found = jf.fit(profile, state, Batches(model), steps=6)
    step, state = step_and_state(model)
    expected = jf.fit(step, state, Batches(model), steps=6)
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert [*profile.steps] == [3, 4] and profile.table.startswith("Steps 3 to 4\n")
    assert (tmp_path / "table.md").read_text().strip() == profile.table
    assert (tmp_path / "memory.prof").stat().st_size > 0
    (trace,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    program = step.lower(state, Batches(model)[0]).compile().as_text()
    times = time_table(operations(trace), [places_of(program)], 2, 1.0)
    assert {place.scope for place in times.places} >= PARTS
    assert {place.direction for place in times.places} == {"forward", "recomputed", "backward"}
    named = sum(time for place, time in times.places.items() if place.scope != OTHER)
    assert named > 0.5 * sum(times.places.values()) > 0
    assert 0 < times.busy <= sum(times.places.values())
    rows = [row.split("|")[1].strip() for row in profile.table.splitlines() if "|" in row]
    assert PARTS | {"parameters", "optimizer state", "batch", "together"} <= {*rows}


def test_a_step_without_a_program_is_traced_too(tmp_path: Path) -> None:
    def step(state: Any, batch: Any) -> Any:
        return state.replace(step=state.step + 1), {"loss": jnp.sum(batch["x"])}

    state = jf.init_state({"w": jnp.ones(2)}, OPTIMIZER)
    profile = jf.Profile(step, "2", tmp_path)
    jf.fit(profile, state, [{"x": np.ones(2)}] * 3, steps=3)
    assert profile.programs == [] and "A step took" in profile.table


def test_a_trace_that_an_error_cuts_short_is_ended(tmp_path: Path) -> None:
    step, state = step_and_state(MODEL)
    profile = jf.Profile(step, "1:9", tmp_path)
    profile(state, Batches(MODEL)[0])
    profile.close()
    profile.close()
    assert profile.table == "" and [*tmp_path.glob("plugins/profile/*/*.xplane.pb")]
    with pytest.raises(jf.ConfigError, match="steps='9:1' names no steps"):
        jf.Profile(step, "9:1", tmp_path)


def xspace(planes: str, path: Path) -> Path:
    path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(planes))
    return path


PROGRAM = """
HloModule jit_advance
ENTRY %main {
  %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, metadata={op_name="jit(advance)/jvp(layer)/ffn/mul"}
  %fusion.2 = (f32[8]{0}, s32[]) fusion(%p), metadata={op_name="jit(advance)/optimizer/mul"}
  %all-reduce.3 = f32[8]{0} all-reduce(%p), metadata={op_name="jit(advance)/jvp(loss)/add"}
  %while.4 = (f32[8]{0:T(128)}) while(%p), metadata={op_name="jit(advance)/jvp()/while"}
}
"""
EXPECTED = {
    ScopedPass("ffn", "forward"): 4000.0,
    ScopedPass("optimizer", "forward"): 2000.0,
    ScopedPass("collectives", "forward"): 1000.0,
}


def event(kind: int, begin: int, length: int, stat: str = "") -> str:
    return f"events {{ metadata_id: {kind} offset_ps: {begin}000 duration_ps: {length}000 {stat} }}"


def kinds(*names: str) -> str:
    entries = (
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for i, name in enumerate(names, 1)
    )
    return " ".join(entries)


def test_the_trace_of_a_tpu_is_read(tmp_path: Path) -> None:
    """A line of operations, among others about the same time; a loop around its operations."""
    names = kinds(
        "%fusion.1 = f32[8]{0} fusion(", "%fusion.2 = (", "%all-reduce.3 = ", "%while.4 ="
    )
    ops = f"{event(4, 0, 9000)} {event(1, 0, 4000)} {event(2, 4000, 2000)} {event(3, 7000, 1000)}"
    modules = f'lines {{ id: 2 name: "Steps" {event(1, 0, 9000)} }}'
    plane = f'name: "/device:TPU:0" {names} lines {{ id: 1 name: "XLA Ops" {ops} }} {modules}'
    trace = xspace(f"planes {{ {plane} }}", tmp_path / "tpu.xplane.pb")
    times = time_table(operations(trace), [places_of(PROGRAM)], 1, 9e-6)
    assert times.places == EXPECTED
    assert (times.busy, times.elapsed) == (7000.0, pytest.approx(9000.0))


def test_the_trace_of_a_gpu_is_read(tmp_path: Path) -> None:
    """Streams that overlap on two devices; kernels of a command buffer have only their own name."""
    names = kinds("fusion_1", "kernel of fusion.2", "ncclDevKernel_AllReduce")
    names += ' stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'

    def stat(name: str) -> str:
        return f'stats {{ metadata_id: 1 str_value: "{name}" }}'

    main = f"{event(1, 0, 4000)} {event(2, 4000, 2000, stat('fusion.2'))}"
    second = event(3, 3500, 1000, stat("all-reduce.3"))
    planes = " ".join(
        f'planes {{ name: "/device:GPU:{i}" {names} lines {{ id: 1 name: "Stream #1" {main} }}'
        f' lines {{ id: 2 name: "Stream #2" {second} }} }}'
        for i in range(2)
    )
    trace = xspace(planes, tmp_path / "gpu.xplane.pb")
    times = time_table(operations(trace), [places_of(PROGRAM)], 1, 8e-6)
    assert times.places == EXPECTED and times.busy == 6000.0
    assert "| ffn         |   0.004 |" in str(times) and "57.1%" in str(times)


def test_a_union_of_intervals_counts_overlaps_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


@pytest.mark.parametrize("steps", ["0:3", "3:3", "ten", "5:", "1:2:3"])
def test_steps_that_are_none_are_refused(steps: str) -> None:
    run = jf.RunConfig(run=RunSettings(profile=steps))
    with pytest.raises(jf.ConfigError, match=r"run.profile=.* names no steps"):
        check(run)


@pytest.mark.slow
def test_a_run_ends_with_the_table_and_the_command_that_opens_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, text = tmp_path / "run", write_text(tmp_path / "text.txt")
    changes = {"train.steps": 6, "train.eval_every": 0, "run.profile": "4:6"}
    assert train_here(line(run_dir, text, changes | {"run.profile": "4:8"})) == 2
    assert "run.profile='4:8' names step 7" in capsys.readouterr().err
    assert train_here(line(run_dir, text, changes)) == 0
    out = capsys.readouterr().out
    assert f"xprof --logdir {run_dir}/profile" in out and "Steps 4 to 5" in out
    assert {scope for scope in SCOPES if f"| {scope} " in out} >= PARTS
    assert len([*(run_dir / "profile/plugins/profile").iterdir()]) == 1
    more = {"train.steps": 8, "run.profile": "2"}
    (run_dir / "profile/table.md").unlink()
    assert train_here(line(run_dir, text, changes | more)) == 0
    assert "these steps were done before; nothing was traced" in capsys.readouterr().out
    assert len([*(run_dir / "profile/plugins/profile").iterdir()]) == 1
