"""The real train step lowers for GPU and TPU on meshes of several devices, for every family and
kernel, packed or not, without any such device."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from products import fewest, slow_but

from jaxformer.arrays.mesh import MESH_AXES
from jaxformer.config.model import ModelConfig
from jaxformer.config.records import Attention
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.config.train import TrainConfig
from jaxformer.runs.resolve import resolve_without_data

HERE = Path(__file__).parents[1]
FAMILIES = ("decoder", "encoder", "encoder_decoder")
# The sizes of the axes data, fsdp, context and tensor.
SIZES = {
    "1 device": (1, 1, 1, 1, 1),
    "4 devices": (1, 4, 1, 1, 1),
    "8 devices": (2, 2, 1, 1, 2),
    "divided rows": (1, 2, 1, 4, 1),
}
DEVICES = {
    "gpu": AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu"),
}
KERNELS = [("tpu", "tpu"), ("gpu", "blocked"), ("tpu", "blocked")]
CALLS = {"tpu": "tpu_custom_call", "cudnn": "__cudnn$fmha"}


def a_run(family, kernel, remat="none", positions="rope"):
    model = ModelConfig(
        family=family,
        vocab_size=512,
        d_model=128,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_ff=256,
        layer_loop="scan",
        positions=positions,
        dtype="bfloat16",
        remat=remat,
        attention=Attention(kernel=kernel),
    )
    data = DataConfig(sequence_length=128)
    return RunConfig(model=model, data=data, train=TrainConfig(batch_size=16, microbatches=2))


def mesh_of(platform, sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(sizes, MESH_AXES, axis_types=kinds, abstract_device=DEVICES[platform])


# Every mesh with every kernel, and every family with both, packed and not in turns.
STEPS = [
    (sizes, platform, kernel, FAMILIES[(i + j) % 3], (i + j // 2) % 2 == 1)
    for i, sizes in enumerate(SIZES)
    for j, (platform, kernel) in enumerate(KERNELS)
]


def lowered(run, mesh, packed=None):
    """The program of the step of a run."""
    resolved, batch = resolve_without_data(run, mesh, packed)
    return resolved.step.lower(resolved.target, batch).as_text()


MOST_USED = fewest(STEPS, 1)
SEVERAL_AXES = [row for row in STEPS if row[0] in ("8 devices", "divided rows")]


@pytest.mark.parametrize(
    "sizes, platform, kernel, family, packed",
    [*MOST_USED, *slow_but([row for row in SEVERAL_AXES if row not in MOST_USED])],
)
def test_the_step_lowers_on_every_mesh(sizes, platform, kernel, family, packed):
    mesh = mesh_of(platform, SIZES[sizes])
    text = lowered(a_run(family, kernel), mesh, packed)
    assert f"num_partitions = {mesh.size}" in text
    assert CALLS.get(kernel, "") in text


@pytest.mark.parametrize(
    "platform, kernel, family",
    [
        ("tpu", "tpu", "decoder"),
        pytest.param("tpu", "tpu", "encoder_decoder", marks=pytest.mark.slow),
        ("gpu", "ring", "encoder_decoder"),
    ],
)
def test_the_step_lowers_where_devices_divide_rows_and_no_heads(platform, kernel, family):
    run = dataclasses.replace(
        a_run(family, kernel), data=DataConfig(sequence_length=2048, span_length=8.0)
    )
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, max_length=2048))
    text = lowered(run, mesh_of(platform, (1, 1, 1, 8, 1)))
    assert CALLS.get(kernel, "collective_permute") in text
    assert ("all_gather" in text) == (kernel == "tpu")


@pytest.mark.parametrize(
    "platform, family",
    slow_but([("gpu", "encoder_decoder"), ("tpu", "decoder")], ("tpu", "decoder")),
)
def test_dropout_stores_no_array_of_all_weights(platform, family):
    """A step with dropout lowers with blocked attention: no array has all queries and keys."""

    def step_with(kernel):
        run = a_run(family, kernel)
        model = dataclasses.replace(run.model, dropout=0.1, max_length=384)
        run = dataclasses.replace(run, model=model, data=DataConfig(sequence_length=384))
        return lowered(run, mesh_of(platform, SIZES["8 devices"]))

    assert "x384x384x" in step_with("xla")
    assert "x384x384x" not in step_with("auto")


@functools.cache
def calls(platform, kernel, remat):
    """How often a step runs the kernel."""
    mesh = mesh_of(platform, SIZES["8 devices"])
    text = lowered(a_run("decoder", kernel, remat), mesh)
    return text.count(CALLS.get(kernel, "stablehlo.exponential"))


@pytest.mark.parametrize(
    "platform, kernel, remat",
    [("tpu", "tpu", "names"), pytest.param("gpu", "blocked", "full", marks=pytest.mark.slow)],
)
def test_remat_computes_fused_attention_no_more_often(platform, kernel, remat):
    """A step runs each kernel as often with remat as without."""
    found = calls(platform, kernel, remat)
    assert found == calls(platform, kernel, "none") > 0
    if platform == "tpu":
        assert found == 3  # forward, and the gradients of queries and of keys and values


@pytest.mark.parametrize("platform, remat", [("tpu", "full"), ("gpu", "none")])
def test_a_loop_on_tpus_ties_the_weights_of_a_layer_to_its_number(platform, remat):
    """Without that XLA for TPUs casts those of all layers before the loop and keeps them. It is
    done again in the backward pass: what came of it is not stored."""
    text = lowered(a_run("decoder", "blocked", remat), mesh_of(platform, SIZES["4 devices"]))
    tied = len(re.findall(r"stablehlo\.subtract .*: tensor<128x256xf32>", text))
    # The matrices gate and up.
    assert tied == (4 if platform == "tpu" else 0)


@pytest.mark.parametrize(
    "platform, sizes, casts", [("gpu", (2, 1, 1, 1, 1), 1), ("gpu", (1, 2, 1, 1, 1), 2)]
)
def test_the_backward_pass_on_a_gpu_reads_the_casts_of_the_forward_pass(platform, sizes, casts):
    """Where layers are unrolled, and no device has a part of the weights alone."""
    run = a_run("decoder", "blocked")
    model = dataclasses.replace(run.model, layer_loop="unroll")
    text = lowered(dataclasses.replace(run, model=model), mesh_of(platform, sizes))
    cast = r"stablehlo\.convert .*tensor<128x256xf32>\) -> tensor<128x256xbf16>"
    # The matrices gate and up of each layer.
    assert len(re.findall(cast, text)) == 2 * casts * model.n_layers


@pytest.mark.parametrize("point, width", [("hidden", 256), ("normed", 128)])
def test_inputs_of_products_are_stored_where_they_are_named(point, width):
    def stored(saved):
        """How many arrays of that width a backward pass reads."""
        run = a_run("decoder", "blocked", "names")
        model = dataclasses.replace(run.model, saved=saved, layer_loop="unroll", n_layers=1)
        text = lowered(dataclasses.replace(run, model=model), mesh_of("gpu", (1, 1, 1, 1, 1)))
        barriers = re.findall(r"optimization_barrier .*", text)
        return max(line.count(f"x{width}xbf16>") for line in barriers)

    of_layer = {"hidden": 1, "normed": 2}
    assert stored(f"up,{point}") - stored("up") == of_layer[point]


def test_the_host_keeps_the_points_that_it_is_asked_to_and_the_inputs_of_layers():
    def moved(offload):
        """How many arrays of a layer go to the host."""
        run = a_run("decoder", "blocked", "names")
        model = dataclasses.replace(run.model, saved="none", offload=offload)
        text = lowered(dataclasses.replace(run, model=model), mesh_of("tpu", SIZES["4 devices"]))
        return text.count('"pinned_host"')

    assert [moved(offload) for offload in ("out", "out,input")] == [1, 2]


@pytest.mark.parametrize(
    ("platform", "devices", "in_a_ring"),
    slow_but([("tpu", 8, True), ("tpu", 4, False), ("gpu", 8, False)], ("tpu", 8, True)),
)
def test_the_gradient_of_the_head_is_scattered(platform, devices, in_a_ring):
    """Where XLA for TPUs would sum all of it on every device, in a ring."""
    run = a_run("decoder", "xla")
    model = dataclasses.replace(run.model, d_model=1024, n_heads=8, vocab_size=16384)
    data, train = DataConfig(sequence_length=1024), TrainConfig(batch_size=16, microbatches=1)
    run = dataclasses.replace(run, model=model, data=data, train=train)
    text = lowered(run, mesh_of(platform, (1, devices, 1, 1, 1)))
    assert ("stablehlo.collective_permute" in text) is in_a_ring
    assert ("stablehlo.reduce_scatter" in text) is not in_a_ring


@pytest.mark.slow
def test_the_step_lowers_with_cudnn_on_every_mesh():
    """cuDNN's calls are divided by JAX for devices that are there, so eight are forced. A kernel in
    its place gives the values of one device on all of them."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    changes = {"XLA_FLAGS": flags, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    command = [sys.executable, HERE / "layers/lower_cudnn.py"]
    done = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    # Biases and their gradients are divided by heads, and those gradients summed over the devices.
    assert len(report["errors"]) == 2 * len(SIZES)
    assert max(report["errors"].values()) < 1e-5
    report = report["calls"]
    assert len(report) == 2 * len(FAMILIES) + 2 * (1 + 2 + 2)
    for case, calls in report.items():
        # Forward and backward of each attention of the scanned layer: in an encoder-decoder of two
        # to the sequence itself, and of one to the source, which has no bias.
        of_one, to_itself = ["", "Backward"], 2 if "encoder_decoder" in case else 1
        to_source = of_one * (to_itself - 1)
        bias = "" if "rope" in case else "ScaleBias"
        assert calls == sorted([bias + way for way in of_one] * to_itself + to_source), case
