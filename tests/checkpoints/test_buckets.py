"""Checkpoints in a bucket: what is read is what was saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bucket_states import assert_is_of, newest, save
from forced_devices import on_eight_devices

from jaxformer.checkpoints.digests import altered_files
from jaxformer.checkpoints.reading import read_checkpoint, saved_steps
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.files import ConfigError, located
from jaxformer.runs.directory import RunDirectory


@pytest.mark.parametrize(
    "bucket", ["s3_bucket", pytest.param("gcs_bucket_of_tensorstore", marks=pytest.mark.slow)]
)
def test_what_is_read_is_what_was_saved_and_retention_deletes_the_others(
    bucket: str, request: pytest.FixtureRequest
) -> None:
    run_dir = located(f"{request.getfixturevalue(bucket)}/some/run")
    save(run_dir, 1, 2, 3, keep=1, keep_best=1)
    assert saved_steps(run_dir) == [1, 3]
    assert_is_of(3, newest(run_dir))
    assert not altered_files(run_dir / "checkpoints/3")
    names = (run_dir / "checkpoints").names_below()
    assert {name.split("/")[0] for name in names} == {"1", "3"}


@pytest.mark.slow
def test_shards_of_eight_devices_are_read_on_other_meshes_and_on_one_device(s3_bucket: str) -> None:
    read = on_eight_devices("bucket_devices.py", f"{s3_bucket}/run")
    assert read == {"(4, 2)": [True, 8], "(8, 1)": [True, 8], "(1, 8)": [True, 8]}
    shape = jax.ShapeDtypeStruct(
        (64, 32), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    folder = located(s3_bucket) / "run/checkpoints"
    array = read_checkpoint(folder, 1, {"params.w": shape}, exact=False)["params.w"]
    np.testing.assert_array_equal(array, np.arange(64 * 32).reshape(64, 32) * 1.5)


def test_a_store_that_orbax_has_no_driver_for_is_refused(memory_bucket: str) -> None:
    with pytest.raises(ConfigError, match=r"memory://.* Orbax saves to disks, gs:// and s3://"):
        Checkpoints(memory_bucket)


def test_a_bucket_that_does_not_exist_is_not_made(s3_server: str) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"absent-one/run.* cannot be .*bucket"):
            Checkpoints("s3://absent-one/run")


@pytest.mark.parametrize(
    "begins", [Checkpoints, lambda url: RunDirectory(url).lock(False).__enter__()]
)
def test_a_url_with_an_empty_name_is_refused(begins, s3_bucket: str) -> None:
    # Files would be found under one name, and what Orbax wrote under another.
    message = f"{s3_bucket}/a//run.* empty name between two slashes.* write {s3_bucket}/a/run"
    with pytest.raises(ConfigError, match=message):
        begins(f"{s3_bucket}/a//run")
