"""The step of a run without its data is the step of the run: for every objective the same batch,
state and program."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from objective_runs import CASES, prepared
from products import slow_but

from jaxformer.arrays.mesh import MESH_AXES, make_mesh, place_batch
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, RunSettings
from jaxformer.config.settings import with_settings
from jaxformer.config.train import TrainConfig
from jaxformer.files import ConfigError
from jaxformer.models.cost import activation_bytes
from jaxformer.runs.resolve import CPU_ACTIVATIONS, resolve, resolve_without_data
from jaxformer.runs.setup import make_setup

SIZES = dict(d_model=16, n_layers=2, n_heads=2, max_length=32, layer_loop="scan")


@pytest.mark.parametrize("case", slow_but(CASES, *[*CASES][::4]))
def test_the_step_without_data_is_the_step_of_the_run(case: str, tmp_path: Path) -> None:
    run, _ = prepared(case, tmp_path, run=RunSettings(dir=str(tmp_path / "run")))
    run = replace(run, model=with_settings(run.model, SIZES), train=TrainConfig(batch_size=4))
    setup = make_setup(run, lambda line: None)
    resolved, batch = resolve_without_data(setup.run, setup.mesh)
    state = resolved.target
    arrays = place_batch(setup.batches[0], setup.mesh)
    assert {name: (a.shape, a.dtype, a.sharding) for name, a in batch.items()} == {
        name: (a.shape, a.dtype, a.sharding) for name, a in arrays.items()
    }
    assert jax.tree.structure(state) == jax.tree.structure(setup.target)
    assert jax.tree.leaves(state) == jax.tree.leaves(setup.target)
    its_own = setup.step.lower(setup.target, arrays)
    assert resolved.step.lower(state, batch).as_text() == its_own.as_text()


def run_of(**data: object) -> RunConfig:
    model = with_settings(ModelConfig(), {"vocab_size": 64, **SIZES})
    return RunConfig(model=model, data=DataConfig(sequence_length=32, **data))


def test_rows_are_packed_as_the_settings_or_the_caller_says() -> None:
    mesh = make_mesh()
    for packing, packed, expected in (
        ("stream", None, False),
        ("documents", None, True),
        ("best_fit", None, True),
        ("stream", True, True),
        ("documents", False, False),
    ):
        _, batch = resolve_without_data(run_of(packing=packing), mesh, packed)
        assert ("segment_ids" in batch) == expected, (packing, packed)
        if expected:
            assert batch["segment_ids"] == batch["tokens"]


def test_the_dtype_of_the_logits_is_that_of_the_loss_and_of_no_evaluation() -> None:
    for dtype, is_rounded in (("float32", False), ("bfloat16", True)):
        run = replace(run_of(), train=TrainConfig(batch_size=4, logits_dtype=dtype))
        resolved, batch = resolve_without_data(run, make_mesh())
        loss = jax.make_jaxpr(resolved.loss)(resolved.target.params, batch, None)
        assert ("bf16[128,64]" in str(loss)) == is_rounded
        assert "logits_dtype" not in resolved.loss_options


def test_a_microbatch_that_the_mesh_cannot_divide_is_refused() -> None:
    mesh = jax.sharding.AbstractMesh((3, 1, 1, 1, 1), MESH_AXES)
    with pytest.raises(ConfigError, match=r"not divisible among mesh\.data x mesh\.fsdp = 3"):
        resolve_without_data(run_of(), mesh)


def test_a_batch_is_split_on_a_cpu_only_where_its_activations_take_more_than_4_gb(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def selected(batch: int, mesh: Any = None, **train: Any) -> int:
        run = replace(run_of(), train=TrainConfig(batch_size=batch, **train))
        run = replace(run, data=replace(run.data, sequence_length=256))
        train_settings = resolve(run, mesh or make_mesh(), 0).run.train
        assert train_settings.n_microbatches == train_settings.microbatches
        return train_settings.n_microbatches

    def on(platform: str, **axes: int) -> AbstractMesh:
        device = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=1, platform=platform)
        sizes = tuple(axes.get(name, 1) for name in MESH_AXES)
        kinds = (AxisType.Auto,) * len(sizes)
        return AbstractMesh(sizes, MESH_AXES, axis_types=kinds, abstract_device=device)

    assert [selected(batch) for batch in (1, 7, 16, 4096)] == [1] * 4
    assert 1e9 <= CPU_ACTIVATIONS <= 8e9 and selected(2**18) > 1
    model = with_settings(run_of().model, {"attention.kernel": "blocked"})
    four_rows = 4 * activation_bytes(model, 256)
    monkeypatch.setattr("jaxformer.runs.resolve.CPU_ACTIVATIONS", four_rows)
    # Of 7 rows there are 7 microbatches or 1.
    assert [selected(batch) for batch in (1, 3, 4, 7, 8, 12, 16)] == [1, 1, 1, 7, 2, 3, 4]
    assert selected(16, microbatches=1) == 1 and selected(16, microbatches=16) == 16
    # Devices of a CPU share its memory, and each has a row at least.
    assert [selected(16, on("cpu", data=size)) for size in (1, 2, 4, 8)] == [4, 4, 4, 2]
    assert selected(16, on("gpu")) == selected(16, on("tpu")) == 1
    # Of a pair both sequences count.
    pairs = replace(run_of(objective="dpo"), train=TrainConfig(batch_size=64))
    monkeypatch.setattr("jaxformer.runs.resolve.CPU_ACTIVATIONS", 32 * activation_bytes(model, 32))
    assert resolve(pairs, make_mesh(), 0).run.train.n_microbatches == 4
