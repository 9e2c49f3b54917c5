"""Changes of activations over widths: they keep their size in muP and grow in the standard
parametrization."""

import dataclasses

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.config.train import OptimizerConfig
from jaxformer.tools.coordinates import coordinates, disproportionate, widths_between

WIDE = jf.ModelConfig(
    vocab_size=32,
    d_model=128,
    n_layers=3,
    n_heads=8,
    d_ff=256,
    parametrization="mup",
    mup_base="d_model=32 n_heads=2 d_ff=64",
)


def a_batch():
    rng = np.random.default_rng(0)
    rows = np.minimum(rng.integers(0, 32, (4, 17)), rng.integers(0, 32, (4, 17))).astype(np.int32)
    weights = np.ones((4, 16), np.float32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


def test_the_widths_are_the_base_one_between_and_the_models_own():
    models = widths_between(WIDE)
    assert [(m.d_model, m.n_heads, m.d_ff) for m in models] == [
        (32, 2, 64),
        (64, 4, 128),
        (128, 8, 256),
    ]
    assert all(m.n_layers == 2 and m.mup_base == WIDE.mup_base for m in models)
    base = dataclasses.replace(WIDE, d_model=32, n_heads=2, d_ff=64)
    assert len(widths_between(base)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "adamw",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("muon", "normuon", "lion")),
    ],
)
def test_changes_keep_their_size_in_mup(name):
    models = [widths_between(WIDE)[0], widths_between(WIDE)[-1]]
    table = coordinates(models, OptimizerConfig(name=name, learning_rate=3e-3), a_batch())
    assert {*table} == {
        "logits",
        *(
            f"decoder.{layer}.{what}"
            for layer in range(2)
            for what in ("residual", "attention_out", "mlp_out")
        ),
    }
    assert not disproportionate(table), table
    assert all(change > 0 for row in table.values() for change in row.changes)


@pytest.mark.slow
def test_changes_grow_with_the_width_in_the_standard_parametrization():
    models = [
        dataclasses.replace(m, parametrization="standard", mup_base="")
        for m in (widths_between(WIDE)[0], widths_between(WIDE)[-1])
    ]
    table = coordinates(models, OptimizerConfig(learning_rate=3e-3), a_batch())
    assert "logits" in disproportionate(table) and "decoder.1.residual" in disproportionate(table)
    assert table["logits"].growth > 0.5
