"""Rows divided over mesh.context: eight forced host devices, in a process of their own, equal one
device."""

import pytest
from forced_devices import on_eight_devices, only_most_used

from jaxformer.arrays.mesh import make_mesh
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.train import MeshConfig, TrainConfig
from jaxformer.files import ConfigError
from jaxformer.layers.exchange import exchange_of
from jaxformer.tools.plan_memory import planned_run

GROUP = pytest.mark.xdist_group("context devices")


@pytest.fixture(scope="module", params=["most used", pytest.param("slow", marks=pytest.mark.slow)])
def report(request):
    return on_eight_devices("context_devices.py", request.param)


@GROUP
def test_divided_rows_equal_whole_ones_for_every_positional_scheme(report):
    for case, errors in report["steps"].items():
        assert errors["loss"] < 1e-6 and errors["params"] < 2e-6, (case, errors)


@GROUP
def test_every_kernel_equals_the_plain_one_on_divided_rows_forward_and_backward(report):
    assert max(report["attentions"].values()) < 2e-6, report["attentions"]


@GROUP
@pytest.mark.slow
@pytest.mark.parametrize("report", ["slow"], indirect=True)
def test_splash_attention_gathers_keys_where_devices_divide_no_heads(report):
    assert report["splash"]["error"] < 1e-6
    assert report["splash"]["balanced"]


@GROUP
def test_decoding_with_a_divided_cache_gives_the_same_tokens(report):
    decoding = report["decoding"]
    assert decoding["several"] == decoding["one"]
    assert decoding["share"] == 8


@GROUP
def test_a_recurrence_over_divided_rows_of_several_texts_has_the_gradients_of_one_device(report):
    assert max(report["recurrences"].values()) < 1e-5, report["recurrences"]


@GROUP
@only_most_used
def test_balanced_rows_have_an_early_and_a_late_piece_on_each_device(report):
    assert report["arrangement"] == [True] * 6


@pytest.mark.parametrize(
    "heads, sizes, expected",
    [
        (12, {"context": 1, "tensor": 2}, "none"),
        (12, {"context": 4, "tensor": 1}, "heads"),
        (12, {"context": 2, "tensor": 2}, "heads"),
        (12, {"context": 8, "tensor": 1}, "gather"),
        (12, {"context": 4, "tensor": 2}, "gather"),
    ],
)
def test_heads_are_exchanged_where_the_devices_divide_them(heads, sizes, expected):
    assert exchange_of(64, heads, sizes) == expected


def a_run(length=512, heads=4, context=4, kernel="auto", **model):
    return RunConfig(
        model=with_settings(
            ModelConfig(),
            {
                "vocab_size": 512,
                "d_model": 64,
                "n_layers": 2,
                "n_heads": heads,
                "attention.kernel": kernel,
                **model,
            },
        ),
        data=DataConfig(sequence_length=length),
        mesh=MeshConfig(context=context),
        train=TrainConfig(batch_size=2),
    )


@pytest.mark.parametrize(
    "device, heads, length, chosen",
    [
        ("h100", 4, 512, "cudnn"),
        ("h100", 2, 512, "ring"),
        ("v5e", 4, 512, "tpu"),
        ("v5e", 2, 1024, "tpu"),
        ("v5e", 2, 512, "ring"),
    ],
)
def test_the_kernel_of_divided_rows_is_one_that_serves_them(device, heads, length, chosen):
    planned = planned_run(a_run(length, heads), device, 4)
    assert planned.model.attention.kernel == chosen
    assert planned.mesh.shape["context"] == 4


def test_dropout_of_weights_on_divided_rows_takes_plain_attention():
    planned = planned_run(a_run(heads=2, dropout=0.1), "h100", 4)
    assert planned.model.attention.kernel == "xla"
    assert "not ring: it has no dropout of attention weights" in planned.kernel


@pytest.mark.parametrize(
    "run, message",
    [
        (a_run(length=510), "mesh.context=4 does not divide rows of 510 tokens"),
        (a_run(context=1, kernel="ring"), "mesh.context, which is 1"),
        (a_run(heads=2, kernel="blocked"), "does not divide model.n_heads"),
        (a_run(heads=2, kernel="ring", dropout=0.1), "no dropout of attention weights"),
    ],
)
def test_settings_that_do_not_fit_divided_rows_are_refused(run, message):
    with pytest.raises(ConfigError, match=message):
        planned_run(run, "cpu", run.mesh.context)


def test_the_axis_is_one_unless_it_is_asked_for():
    assert make_mesh().shape["context"] == 1
