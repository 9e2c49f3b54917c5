"""A sharded step equals the single-device step: eight forced host devices in a process of their
own, every mesh in turn."""

import pytest
from forced_devices import on_eight_devices

CASES = [
    *(
        f"llama, 1 microbatches, {mesh}"
        for mesh in ("data 8", "fsdp 8", "tensor 2", "all three", "tensor 4")
    ),
    "gpt2, 2 microbatches, all three",
    "blocked dropout, 2 microbatches, all three",
    "splash, 1 microbatches, all three",
    "tiles, 4 microbatches, all three",
    "lora, 2 microbatches, all three",
    "encoder-decoder, 1 microbatches, all three",
    "encoder, 2 microbatches, all three",
]
SLOW = [
    "latent, 2 microbatches, all three",
    "latent, 2 microbatches, tensor 4",
    "prefix, 2 microbatches, all three",
    "prompt of a source, 1 microbatches, all three",
    "classes, 1 microbatches, all three",
    "disentangled, 2 microbatches, all three",
    "shared layers, 1 microbatches, all three",
    "encoder-decoder, 1 microbatches, tensor 4",
    "splash, 1 microbatches, tensor 4",
    "tiles, 4 microbatches, fsdp 8",
]
PRETRAINED = ["pretrained llama", "pretrained gpt2"]
EXPLICIT = [f"explicit {name}" for name in ("llama", "lora", "encoder-decoder", "encoder")]
SLOW_EXPLICIT = [
    f"explicit {name}"
    for name in (
        "latent",
        "prefix",
        "prompt of a source",
        "classes",
        "disentangled",
        "shared layers",
    )
]


@pytest.fixture(scope="session")
def report():
    return on_eight_devices("eight_devices.py")


def assert_equal_to_one_device(report, cases):
    for case in cases:
        found = report[case]
        assert found["devices"] == 8, case
        assert found["spread"] == (
            1 if "data 8" in case else 2 if "tensor 2" in case else 8 if "fsdp" in case else 4
        ), case
        assert found["loss"] < 1e-6, case
        assert found["params"] < 2e-6, case  # and their average
        assert found["average placed as params"], case


def assert_explicit_axes_trace(report, cases):
    for case in cases:
        assert abs(report[case]["loss"] / report[case]["one device"] - 1) < 1e-5, case


@pytest.mark.xdist_group("eight devices")
def test_a_sharded_step_equals_the_single_device_step_on_each_mesh(report):
    assert sorted(report) == sorted([*CASES, *EXPLICIT, *PRETRAINED])
    assert_equal_to_one_device(report, CASES)


@pytest.mark.slow
@pytest.mark.xdist_group("eight devices")
def test_a_sharded_step_of_further_models_equals_it_on_further_meshes():
    report = on_eight_devices("eight_devices.py", "slow")
    assert sorted(report) == sorted([*SLOW, *SLOW_EXPLICIT])
    assert_equal_to_one_device(report, SLOW)
    assert_explicit_axes_trace(report, SLOW_EXPLICIT)


@pytest.mark.xdist_group("eight devices")
def test_every_placement_is_said_so_explicit_axes_trace(report):
    assert_explicit_axes_trace(report, EXPLICIT)


@pytest.mark.xdist_group("eight devices")
def test_a_model_directory_is_written_from_a_mesh_and_read_onto_one(report):
    assert [report[name] for name in PRETRAINED] == [{"equal": True, "split": 4}] * 2
