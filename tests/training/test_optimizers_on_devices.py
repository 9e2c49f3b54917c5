"""Optimizers on eight forced host devices, in a process of their own."""

import pytest
from forced_devices import on_eight_devices
from optimizer_variants import VARIANTS


@pytest.mark.slow
@pytest.mark.xdist_group("eight devices")
def test_the_steps_of_every_optimizer_equal_those_of_one_device_with_its_state_divided():
    report = on_eight_devices("optimizer_devices.py")
    assert [*report] == [*VARIANTS]
    for name, result in report.items():
        # A basis of SOAP turns by far more than its factors do.
        assert result["apart"] < (2e-3 if "soap" in name else 1e-5), name
        assert result["replicated"] == [], name
