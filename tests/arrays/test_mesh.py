"""Where parameters and batches go: what a mesh cannot split is named with its bytes, or refused."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jaxformer as jf
from jaxformer.arrays.mesh import MESH_AXES, check_split, parameter_sharding, place_batch
from jaxformer.config.settings import with_settings

pytestmark = pytest.mark.fast

SIZES = {"vocab_size": 257, "d_model": 16, "n_heads": 4, "n_kv_heads": 1, "n_layers": 2, "d_ff": 24}


def mesh_of(data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1) -> AbstractMesh:
    return AbstractMesh((data, fsdp, 1, context, tensor), MESH_AXES)


def test_each_parameter_that_a_mesh_does_not_divide_is_named_with_its_bytes() -> None:
    lines = check_split(jf.specs(with_settings(jf.ModelConfig(), SIZES)), mesh_of(tensor=2))
    assert [line.partition(",")[0] for line in lines] == [
        "embed.tokens",
        "blocks.attention.k",
        "blocks.attention.v",
        "head.weight",
    ]
    assert lines[0] == "embed.tokens, 16.1 KiB, is not split along vocab 257 by tensor 2"
    assert lines[1].endswith("kv_heads 1 by tensor 2")
    assert check_split(jf.specs(with_settings(jf.ModelConfig(), SIZES)), mesh_of(fsdp=2)) == []
    assert check_split(jf.specs(with_settings(jf.ModelConfig(), SIZES)), mesh_of(data=8)) == []


def test_parameters_are_divided_over_fsdp_and_context_together() -> None:
    specs = jf.specs(with_settings(jf.ModelConfig(), SIZES))
    assert check_split(specs, mesh_of(fsdp=2, context=4)) == []
    with pytest.raises(jf.ConfigError, match="embed 16 by fsdp x context 6"):
        check_split(specs, mesh_of(fsdp=2, context=3))
    # Rows are divided over it, whether or not parameters are.
    lines = check_split(specs, mesh_of(context=3))
    assert lines[0] == "embed.tokens, 16.1 KiB, is not split along embed 16 by context 3"


@pytest.mark.parametrize("name, size", [("tensor", 5), ("fsdp", 3)])
def test_a_mesh_that_splits_nothing_is_refused(name: str, size: int) -> None:
    with pytest.raises(
        jf.ConfigError, match=rf"mesh\.{name}={size} splits no parameter(.|\n)*by {name} {size}"
    ):
        check_split(jf.specs(with_settings(jf.ModelConfig(), SIZES)), mesh_of(**{name: size}))


def test_an_axis_is_split_where_the_mesh_divides_it() -> None:
    place = parameter_sharding(mesh_of(fsdp=2, tensor=4), (257, 16), ("vocab", "embed"))
    assert place.spec == PartitionSpec(None, "fsdp")


def test_rows_that_the_devices_cannot_share_are_refused_and_scalars_are_copied() -> None:
    mesh = jf.make_mesh()
    placed = place_batch({"x": np.ones((3, 2)), "scale": np.float32(2)}, mesh)
    assert placed["scale"].shape == () and placed["x"].sharding.mesh == mesh
    assert place_batch(placed, mesh)["x"] is placed["x"]
    bare = place_batch({"x": np.ones(3)}, None)
    assert isinstance(bare["x"], jax.Array)
    with pytest.raises(
        jf.ConfigError, match=r"batch\['x'\] has 3 rows, not divisible among the 2 devices"
    ):
        place_batch({"x": np.ones((3, 2))}, mesh_of(data=2))
