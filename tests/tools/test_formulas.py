"""The stages of the page of attention are the rows of `jaxformer shapes`, and their formulas are
those of the settings."""

from typing import Any

import pytest
from families import SIZES

import jaxformer as jf
from jaxformer.cli.attention import stages_of
from jaxformer.config.settings import with_settings
from jaxformer.tools.model_shapes import formula_of, shapes_of


@pytest.mark.parametrize("family", ["decoder", "encoder", "encoder_decoder"])
def test_every_sublayer_is_a_stage_with_its_formula_and_its_products(family: str) -> None:
    config = with_settings(jf.ModelConfig(), SIZES | {"family": family})
    rows = [row for row in shapes_of(config, 1, 5, 7) if row.makes]
    stages = stages_of(config, 5, 7)
    flat = [each for stage in stages for each in (stage, *stage["products"])]
    assert [each["name"] for each in flat] == [row.name for row in rows]
    for each, row in zip(flat, rows, strict=True):
        sizes = tuple(tuple(size for _, size in axes) for axes in each["makes"])
        assert sizes == row.makes and each["parameters"] == row.parameters
    assert all(stage["formula"] for stage in stages)
    kinds = {"encoder": {"encoder"}, "decoder": {"decoder"}}
    assert {stage["kind"] for stage in stages} - {""} == kinds.get(
        family, {"encoder", "decoder", "cross"}
    )


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_at_a_step_the_shapes_are_those_of_the_target_so_far(family: str) -> None:
    """The page replaces the size of each axis T by the number of the step."""
    config = with_settings(jf.ModelConfig(), SIZES | {"family": family})

    def sizes(length: int, at: int) -> list[Any]:
        return [
            [
                [at if name == "T" else size for name, size in axes]
                for axes in (*of["reads"], *of["makes"])
            ]
            for stage in stages_of(config, length, 7)
            for of in (stage, *stage["products"])
        ]

    assert sizes(6, 4) == sizes(4, 4) != sizes(6, 6)


BASE: dict[str, Any] = SIZES | {"family": "encoder_decoder"}
SHOWN = {  # a change of settings, the sublayer whose formula it changes, and a part of that
    "norm=layer": ("decoder.0.ffn_norm", "x - mean(x)"),
    "norm=rms1p": ("decoder.0.ffn_norm", "(1 + g)"),
    "activation=relu": ("decoder.0.ffn", "relu(x W_up)"),
    "activation=geglu": ("decoder.0.ffn", "gelu(x W_gate)"),
    "activation=swiglu_clamped": ("decoder.0.ffn", "(clip(x W_up, ±7) + 1)) W_down"),
    "bias=all": ("decoder.0.cross", "+ b_V"),
    "bias=ffn": ("decoder.0.ffn", "W_down + c"),
    "positions=learned": ("decoder.embed", "P[position]"),
    "positions=t5": ("decoder.0.attention", "+ bias[distance]"),
    "positions=alibi": ("encoder.0.attention", "slope"),
    "positions=disentangled": ("encoder.0.attention", "+ (Q K_r[distance] + K Q_r[distance])"),
    "norm_placement=post": ("decoder.0.attention", "x ← norm(x + attention(x))"),
    "residual=parallel": ("decoder.0.ffn", "same x"),
    "residual=parallel_shared": ("decoder.0.ffn", "same norm(x)"),
    "attention.query_key_norm=head": ("decoder.0.attention", "norm(x W_Q)"),
    "attention.soft_cap=30": ("decoder.0.attention", "30 tanh"),
    "attention.scale=1": ("decoder.0.attention", "· 1 "),
    "attention.sinks=True": ("decoder.0.attention", "learned logit"),
    "embedding.scale=sqrt": ("encoder.embed", "√D"),
    "embedding.multiplier=30": ("encoder.embed", "E[token] · 30"),
    "residual_multiplier=30": ("decoder.0.ffn", "x ← x + 30 · ffn(norm(x))"),
    "head.divisor=30": ("head", "x / 30"),
    "tied_head=True": ("head", "x Eᵀ"),
    "head.bias=True": ("head", "+ b"),
    "head.soft_cap=30": ("head", "30 tanh"),
    "head.scale=rsqrt": ("head", "x / √D"),
    "embedding.norm=True": ("encoder.embed", "norm("),
    "embedding.token_types=2": ("decoder.embed", "U[token type]"),
}


@pytest.mark.parametrize("change", SHOWN)
def test_a_setting_that_changes_a_sublayer_changes_its_formula(change: str) -> None:
    setting, _, value = change.partition("=")
    typed: Any = {"True": True, "30": 30.0, "1": 1.0, "2": 2}.get(value, value)
    name, part = SHOWN[change]
    before = formula_of(with_settings(jf.ModelConfig(), BASE), name)
    after = formula_of(with_settings(jf.ModelConfig(), BASE | {setting: typed}), name)
    assert part in " ".join(after) and part not in " ".join(before)


def test_cross_attention_reads_the_encoder_and_turns_nothing() -> None:
    config = with_settings(jf.ModelConfig(), BASE | {"positions": "rope"})
    assert "RoPE" in formula_of(config, "decoder.0.attention")[0]
    cross = formula_of(config, "decoder.0.cross")
    assert "m W_K" in cross[0] and "RoPE" not in cross[0] and cross[-1].endswith("cross(norm(x))")
    assert formula_of(config, "other") == ()
