"""Experts divided over mesh.expert: eight forced host devices, in a process of their own, equal one
device."""

import pytest
from forced_devices import on_eight_devices, only_most_used

pytestmark = pytest.mark.xdist_group("expert devices")


@pytest.fixture(scope="module", params=["most used", pytest.param("slow", marks=pytest.mark.slow)])
def report(request):
    return on_eight_devices("expert_devices.py", request.param)


def test_a_step_with_divided_experts_equals_the_single_device_step(report):
    for case, errors in report["steps"].items():
        assert errors["loss"] < 1e-6 and errors["params"] < 2e-6, (case, errors)


@only_most_used
def test_rows_arrive_at_their_device_in_the_order_of_their_sources_and_come_back(report):
    assert report["traffic"] == [True] * 16


@only_most_used
def test_decoding_with_divided_experts_gives_the_same_tokens(report):
    assert report["decoding"]["one"] == report["decoding"]["several"]
