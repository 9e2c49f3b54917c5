"""Experts divided over mesh.expert: eight forced host devices, in a process of their own, equal one
device."""

import pytest
from forced_devices import on_eight_devices

GROUP = pytest.mark.xdist_group("expert devices")


@pytest.fixture(scope="session")
def report():
    return on_eight_devices("expert_devices.py")


def assert_equal_to_one_device(steps, number):
    assert len(steps) == number
    for case, errors in steps.items():
        assert errors["loss"] < 1e-6 and errors["params"] < 2e-6, (case, errors)


@GROUP
def test_a_step_with_divided_experts_equals_the_single_device_step(report):
    assert_equal_to_one_device(report["steps"], 12)


@GROUP
def test_rows_arrive_at_their_device_in_the_order_of_their_sources_and_come_back(report):
    assert report["traffic"] == [True] * 16


@GROUP
def test_decoding_with_divided_experts_gives_the_same_tokens(report):
    decoding = report["decoding"]
    for rows in (8, 3):
        assert decoding[f"one, {rows} rows"] == decoding[f"several, {rows} rows"]


@pytest.mark.slow
@GROUP
def test_divided_experts_equal_whole_ones_in_every_family_and_kernel():
    assert_equal_to_one_device(on_eight_devices("expert_devices.py", "slow")["steps"], 11)
