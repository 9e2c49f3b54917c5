"""A sharded step equals the single-device step: eight forced host devices in a process of their
own, every mesh in turn."""

import pytest
from forced_devices import on_eight_devices, only_most_used

pytestmark = pytest.mark.xdist_group("eight devices")
SPREAD = {"fsdp 8": 8, "tensor 4": 4, "all three": 4}


@pytest.fixture(scope="module", params=["most used", pytest.param("slow", marks=pytest.mark.slow)])
def report(request):
    return on_eight_devices("eight_devices.py", request.param)


def test_a_sharded_step_equals_the_single_device_step_on_each_mesh(report):
    for case, found in report["steps"].items():
        assert found["devices"] == 8, case
        assert found["spread"] == SPREAD[case.split(", ")[1]], case
        assert found["loss"] < 1e-6, case
        assert found["params"] < 2e-6, case  # and their average
        assert found["average placed as params"], case


def test_every_placement_is_said_so_explicit_axes_trace(report):
    """The script traces them: an axis that is not said ends it."""
    assert report["explicit"]


def test_steps_files_and_texts_on_explicit_axes_are_those_on_automatic_ones():
    """On a mesh of the user's own, whose axes `jax.make_mesh` makes explicit by default."""
    found = on_eight_devices("eight_devices.py", "axes")
    assert found["same"] and found["on the mesh"]
    assert found["apart"] < 1e-6


def test_muon_exchanges_no_more_than_a_gather_of_each_matrix():
    """Beside what AdamW does. Without a placement of its own each product gathers its matrices."""
    found = on_eight_devices("eight_devices.py", "muon")
    adamw = found.pop("adamw")
    for figure in ("apart", "matrices"):
        del adamw[figure]
    for name, of_rule in found.items():
        assert of_rule.pop("apart") < 1e-5, name
        matrices = of_rule.pop("matrices")
        assert sum(of_rule.values()) <= sum(adamw.values()) + matrices, name
        assert of_rule["all-to-all"] > 0, name


@only_most_used
def test_exact_logits_of_a_mesh_are_those_of_one_device_to_the_bit(report):
    differ = report["exact"]
    assert differ["data 8"] == differ["fsdp 8"] == 0
    assert "needs a mesh of automatic axes" in differ["explicit"]


@only_most_used
def test_a_model_directory_is_written_from_a_mesh_and_read_onto_one(report):
    assert report["pretrained"] == {"equal": True, "split": 4}
