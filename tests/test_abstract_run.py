"""The step of a run without its data is the step of the run: for every objective the same batch,
state and program."""

from dataclasses import replace
from pathlib import Path

import jax
import pytest
from test_objective_batches import CASES, prepared

from jaxformer.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    RunConfig,
    RunSettings,
    TrainConfig,
)
from jaxformer.mesh import make_mesh, place_batch
from jaxformer.plan.abstract import abstract_batch, abstract_run
from jaxformer.runs.setup import make_setup

SIZES = dict(d_model=16, n_layers=2, n_heads=2, max_length=32, layer_loop="scan")


@pytest.mark.parametrize("case", CASES)
def test_the_step_without_data_is_the_step_of_the_run(case: str, tmp_path: Path) -> None:
    run, _ = prepared(case, tmp_path, run=RunSettings(dir=str(tmp_path / "run")))
    run = replace(run, model=replace(run.model, **SIZES), train=TrainConfig(batch_size=4))
    setup = make_setup(run, lambda line: None)
    step, state, batch = abstract_run(setup.run, setup.mesh)
    arrays = place_batch(setup.batches[0], setup.mesh)
    assert {name: (a.shape, a.dtype, a.sharding) for name, a in batch.items()} == {
        name: (a.shape, a.dtype, a.sharding) for name, a in arrays.items()
    }
    assert jax.tree.structure(state) == jax.tree.structure(setup.target)
    assert jax.tree.leaves(state) == jax.tree.leaves(setup.target)
    its_own = setup.step(run.data.sequence_length).lower(setup.target, arrays)
    assert step.lower(state, batch).as_text() == its_own.as_text()


def run_of(**data: object) -> RunConfig:
    model = ModelConfig(vocab_size=64, **SIZES)
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
        batch = abstract_batch(run_of(packing=packing), mesh, packed)
        assert ("segment_ids" in batch) == expected, (packing, packed)
        if expected:
            assert batch["segment_ids"] == batch["tokens"]


def test_a_microbatch_that_the_mesh_cannot_divide_is_refused() -> None:
    mesh = jax.sharding.AbstractMesh((3, 1, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(ConfigError, match=r"not divisible among mesh\.data x mesh\.fsdp = 3"):
        abstract_run(run_of(), mesh)
