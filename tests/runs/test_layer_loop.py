"""model.layer_loop=auto: the loop of each platform, in a run, in its directory, and in a forward
pass without one."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import jaxformer as jf
from jaxformer.arrays.mesh import MESH_AXES, make_mesh
from jaxformer.arrays.params import map_specs
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig
from jaxformer.config.train import TrainConfig
from jaxformer.models.stack import MOST_UNROLLED, layer_loop_of
from jaxformer.models.transformer import specs
from jaxformer.runs.resolve import resolve, resolve_without_data

SIZES: dict[str, Any] = dict(vocab_size=64, d_model=16, n_heads=2, max_length=32)
DEVICES = {"cpu": "cpu", "gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite"}


def mesh_on(platform: str) -> AbstractMesh:
    device = AbstractDevice(DEVICES[platform], num_cores=1, platform=platform)
    sizes, kinds = zip(*[(1, AxisType.Auto) for _ in MESH_AXES], strict=True)
    return AbstractMesh(sizes, MESH_AXES, axis_types=kinds, abstract_device=device)


def run_of(**model: Any) -> RunConfig:
    return RunConfig(model=ModelConfig(**SIZES | model), data=DataConfig(sequence_length=32))


def loop(platform: str, **model: Any) -> str:
    return resolve(run_of(**model), mesh_on(platform), 0).model.layer_loop


def test_auto_unrolls_on_cpu_scans_on_tpu_and_scans_deep_models_on_gpu() -> None:
    most = MOST_UNROLLED["gpu"]
    assert [loop("cpu", n_layers=n) for n in (1, most, most + 1)] == ["unroll"] * 3
    assert [loop("gpu", n_layers=n) for n in (1, most, most + 1)] == ["unroll", "unroll", "scan"]
    assert [loop("tpu", n_layers=n) for n in (1, most, most + 1)] == ["scan"] * 3


def test_the_deeper_stack_of_an_encoder_decoder_decides() -> None:
    deep = MOST_UNROLLED["gpu"] + 1
    for depths in (dict(n_layers=2, n_encoder_layers=deep), dict(n_layers=deep)):
        config = ModelConfig(**SIZES, family="encoder_decoder", **depths)
        assert layer_loop_of(config, "gpu") == "scan"
    config = ModelConfig(**SIZES, family="encoder_decoder", n_layers=2)
    assert layer_loop_of(config, "gpu") == "unroll"


@pytest.mark.parametrize("platform", DEVICES)
@pytest.mark.parametrize("stated", ["unroll", "scan"])
def test_a_loop_that_is_stated_stays(platform: str, stated: str) -> None:
    assert loop(platform, layer_loop=stated) == stated


@pytest.mark.parametrize("platform", DEVICES)
def test_a_forward_pass_without_a_run_loops_as_the_run_does(platform: str) -> None:
    config = ModelConfig(**SIZES, n_layers=3)
    params = map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs(config))
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    def program(config: ModelConfig) -> str:
        with jax.sharding.use_abstract_mesh(mesh_on(platform)):
            traced = jax.make_jaxpr(lambda params, tokens: jf.forward(params, config, tokens))
            return str(traced(params, tokens))

    stated = replace(config, layer_loop=loop(platform, n_layers=3))  # type: ignore[arg-type]
    assert program(config) == program(stated)
    assert ("scan[" in program(config)) == (platform == "tpu")


def test_a_step_on_a_cpu_is_the_program_of_unrolled_layers() -> None:
    programs = []
    for name in ("auto", "unroll"):
        run = replace(run_of(n_layers=2, layer_loop=name), train=TrainConfig(batch_size=2))
        resolved, batch = resolve_without_data(run, make_mesh(devices=jax.devices()[:1]))
        programs.append(resolved.step.lower(resolved.target, batch).as_text())
    assert programs[0] == programs[1]
