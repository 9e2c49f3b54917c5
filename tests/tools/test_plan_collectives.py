"""The collectives of a plan: they follow from the placements, and are those of compiled steps."""

from pathlib import Path

import pytest

import jaxformer as jf
from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.models.cost import parameter_count
from jaxformer.tools.plan.collectives import Collective, collectives_of, sent_bytes
from jaxformer.tools.plan.make import make_plan
from jaxformer.tools.plan.planned import PlannedRun, planned_run
from jaxformer.tools.plan.report import parameters_by_part

ROOT = Path(__file__).parents[2]
# Steps in which the compiler for TPUs sums a whole gradient that the step asks it to scatter.
SUMMED_WHOLE = {"v5e_gpt2", "v5e_gpt2_full", "v5e_gpt2_packed", "v5e_bert_base", "v6e_gpt2"}


def planned(name: str, device: str, devices: int, *overrides: str) -> PlannedRun:
    return planned_run(jf.load_config(ROOT / "configs" / f"{name}.py", overrides), device, devices)


def by_purpose(run: PlannedRun) -> dict[tuple[str, str], Collective]:
    return {(one.kind, one.purpose): one for one in collectives_of(run)}


def matrices_of_layers(run: PlannedRun) -> int:
    parts = parameters_by_part(run)
    return parts["attention"] + parts["ffn"]


def test_collectives_follow_from_the_placements() -> None:
    run = planned("llama_1b", "h100", 8, "mesh.fsdp=4")
    found, microbatches = by_purpose(run), run.run.train.n_microbatches
    gathers = found["all-gather", "weights of the layers, forward"]
    assert gathers.bytes == 2 * matrices_of_layers(run) * microbatches and gathers.devices == 4
    assert gathers.times == 7 * 22 * microbatches  # q, k, v, out, gate, up, down
    assert found["reduce-scatter", "gradients of the layers"].bytes == gathers.bytes
    # Each replica adds up the gradients of its shards in float32, and they are summed once.
    gradients = [one for one in collectives_of(run) if one.axis == "data"]
    norms = parameters_by_part(run)["norms"]
    total = parameter_count(run.model)
    assert sum(one.bytes for one in gradients) == 4 * ((total - norms) / 4 + norms)
    assert {(one.kind, one.devices) for one in gradients} == {("all-reduce", 2)}
    assert not collectives_of(planned("llama_1b", "h100", 1))


@pytest.mark.parametrize(("devices", "sends"), [(4, 3), (16, 17)])
def test_a_windowed_product_passes_shards_on(devices: int, sends: int) -> None:
    windowed = "train.compiler_options=none"
    run = planned("llama_1b", "v5e", devices, f"mesh.fsdp={devices}", windowed)
    found, microbatches = by_purpose(run), run.run.train.n_microbatches
    forward = found["collective-permute", "weights of the layers, forward"]
    assert forward.times == 7 * 22 * microbatches * sends
    shards = 2 * matrices_of_layers(run) * microbatches / devices
    assert forward.bytes == forward.sent("tpu") == sends * shards
    # With remat those of attention are gathered once more; those of gate and up are shared.
    backward = "weights of the layers, backward"
    full = (f"mesh.fsdp={devices}", windowed, "model.remat=full")
    again = by_purpose(planned("llama_1b", "v5e", devices, *full))
    attention = 2 * parameters_by_part(run)["attention"] * microbatches / devices
    gate_and_up = 2 / 3 * 2 * parameters_by_part(run)["ffn"] * microbatches
    assert again["all-gather", backward].bytes == pytest.approx(gate_and_up)
    assert again["collective-permute", backward].bytes == pytest.approx(
        forward.bytes + sends * (attention - gate_and_up / devices)
    )


def test_a_tpu_gathers_weights_at_once_by_the_options_of_its_compiler() -> None:
    run = planned("llama_1b", "v5e", 16, "mesh.fsdp=16", "model.remat=full")
    found, microbatches = by_purpose(run), run.run.train.n_microbatches
    # What remat repeats of attention gathers its matrices for itself.
    attention = parameters_by_part(run)["attention"]
    for one_pass, repeated in (("forward", 0), ("backward", attention)):
        gathers = found["all-gather", f"weights of the layers, {one_pass}"]
        assert gathers.bytes == 2 * (matrices_of_layers(run) + repeated) * microbatches
    # The sums of gradients are passed on, as before.
    gradients = found["collective-permute", "gradients of the layers"]
    assert gradients.bytes == 17 / 16 * 2 * matrices_of_layers(run) * microbatches


def test_tensor_parallelism_sums_each_sublayer() -> None:
    run = planned("llama_1b", "h100", 4, "mesh.tensor=4")
    found, microbatches = by_purpose(run), run.run.train.n_microbatches
    outputs = found["all-reduce", "outputs of the sublayers"]
    assert outputs.times == 2 * 22 * microbatches
    assert outputs.bytes == outputs.times * run.rows * 2048 * 2048 * 2
    assert found["all-gather", "table of tokens"].bytes == 4 * 32_000 * 2048 * microbatches
    # The output of attention is read again, that of the feed-forward is not.
    again = by_purpose(planned("llama_1b", "h100", 4, "mesh.tensor=4", "model.remat=full"))
    assert again["all-reduce", "outputs that remat computes again"].times == 22 * microbatches
    one = make_plan(planned("llama_1b", "h100", 1))
    assert make_plan(run).memory.temporary < one.memory.temporary


def long_rows(length: int, rows: int) -> tuple[str, ...]:
    return (
        *(f"model.max_length={length}", f"data.sequence_length={length}"),
        *(f"train.batch_size={rows}", "train.microbatches=1"),
    )


def test_attention_exchanges_tokens_for_heads() -> None:
    run = planned("llama_1b", "h100", 8, "mesh.fsdp=2", "mesh.context=4", *long_rows(8192, 2))
    assert run.exchange == "heads" and run.shards == 8
    found = by_purpose(run)
    # Weights and their gradients go over both axes that divide parameters.
    weights = found["all-gather", "weights of the layers, forward"]
    assert (weights.axis, weights.devices) == ("fsdp x context", 8)
    assert weights.bytes == 2 * matrices_of_layers(run)
    # One row of a device, of whose tokens it has a quarter: queries of 32 heads, keys and values of
    # 4, and the output.
    tokens, heads = 8192 // 4, 32 + 4 + 4 + 32
    forward = found["all-to-all", "tokens of attention for heads, and back"]
    assert (forward.axis, forward.devices, forward.times) == ("context", 4, 4 * 22)
    assert forward.bytes == 22 * 2 * tokens * heads * 64
    assert found["all-to-all", "gradients of tokens and heads"].bytes == forward.bytes
    again = "all-to-all", "tokens for heads again, backward"
    assert found[again].bytes == 22 * 2 * tokens * 32 * 64
    # What remat does not store is exchanged again.
    mesh = ("mesh.fsdp=2", "mesh.context=4", "model.remat=full")
    full = by_purpose(planned("llama_1b", "h100", 8, *mesh, *long_rows(8192, 2)))
    assert full[again].bytes == forward.bytes
    # Eight devices need the four heads of keys and values twice.
    eight = by_purpose(planned("llama_1b", "h100", 8, "mesh.context=8", *long_rows(8192, 1)))
    repeated = eight["all-to-all", forward.purpose].bytes
    assert repeated == 22 * 2 * (8192 // 8) * (32 + 8 + 8 + 32) * 64


def test_looked_up_rows_are_exchanged_over_context_and_then_over_fsdp() -> None:
    run = planned("llama_1b", "h100", 8, "mesh.fsdp=2", "mesh.context=4", *long_rows(8192, 2))
    rows = {one.axis: one for one in collectives_of(run) if one.purpose == "looked-up rows"}
    assert list(rows) == ["fsdp", "context"]
    assert rows["fsdp"].bytes == 2 * (8192 // 4) * 2048 == rows["context"].bytes / 2


def test_heads_that_the_devices_do_not_divide_need_the_keys_of_all() -> None:
    settings = ("mesh.context=8", *long_rows(8192, 1))
    # A device has keys and values of 12 heads of 64.
    keys = 12 * 2 * (2 * (8192 // 8) * 12 * 64)
    ring = planned("gpt2_124m", "h100", 8, *settings)
    assert ring.exchange == "ring"
    found = by_purpose(ring)
    for purpose, width in (("keys and values, forward", 1), ("gradients of keys and values", 2)):
        one = found["collective-permute", purpose]
        assert (one.times, one.bytes) == (12 * 2 * 8, 8 * width * keys)
    balance = found["collective-permute", "tokens of the decoder in a balanced order"]
    assert balance.bytes == 4 * (8192 // 8) * 768 * 2
    gather = planned("gpt2_124m", "v5e", 8, *settings)
    assert gather.exchange == "gather"
    found = by_purpose(gather)
    for kind, purpose in (
        ("all-gather", "keys and values of all tokens, forward"),
        ("all-gather", "keys and values of all tokens, backward"),
        ("reduce-scatter", "gradients of keys and values"),
    ):
        assert found[kind, purpose].bytes == 8 * keys
    assert balance.purpose in {one.purpose for one in collectives_of(gather)}


def test_gradients_are_summed_once_unless_dropout_depends_on_the_batch() -> None:
    pieces = ("train.microbatches=4", "train.batch_size=256")
    apart, layers = "all-reduce", "gradients of the layers"
    once = by_purpose(planned("gpt2_124m", "h100", 8, *pieces))[apart, layers]
    each = by_purpose(planned("gpt2_124m", "h100", 8, *pieces, "model.dropout=0.1"))[apart, layers]
    assert (each.times, each.bytes) == (4 * once.times, 4 / 2 * once.bytes)  # in bfloat16


def test_what_a_device_sends() -> None:
    assert sent_bytes("all-gather", 800, 8, "gpu") == 700
    assert sent_bytes("reduce-scatter", 800, 8, "tpu") == 700
    assert sent_bytes("all-reduce", 800, 8, "tpu") == 1400
    assert sent_bytes("all-reduce", 800, 8, "gpu") == 800
    assert sent_bytes("collective-permute", 100, 8, "tpu") == 100


def test_planned_collectives_are_those_that_the_compilers_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the steps of both vendors that `benchmarks/plan_memory.py` compiled and saved."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import plan_memory

    found = plan_memory.sent(plan_memory.saved("plan_memory"))
    assert len(found) >= 20 and {name.startswith("v") for name in found} == {True, False}
    steps = [step_of(name) for name in found]
    axes = {
        name for step in steps for one in collectives_of(step) for name in one.axis.split(" x ")
    }
    assert axes == {*MESH_AXES}
    for name, (compiled, planned) in found.items():
        if name in SUMMED_WHOLE:
            # An all-reduce in a ring sends twice what a reduce-scatter does.
            scattered = planned["reduce-scatter"]
            assert not compiled["reduce-scatter"]
            assert compiled["all-reduce"] == pytest.approx(2 * scattered, rel=0.05)
            compiled["all-reduce"] -= round(scattered)
        assert planned.total() == pytest.approx(compiled.total(), rel=0.1), name
        if name.startswith("v"):
            # The compiler options of a TPU say whether its weights are gathered in pieces.
            for kinds in (compiled, planned):
                kinds["all-gather"] += kinds.pop("collective-permute", 0)
        for kind, size in compiled.items():
            if size > 0.05 * compiled.total() and name not in SUMMED_WHOLE:
                assert planned[kind] == pytest.approx(size, rel=0.1), (name, kind)


def step_of(name: str) -> PlannedRun:
    import plan_memory

    return plan_memory.planned_step(plan_memory.saved("plan_memory")[name])
