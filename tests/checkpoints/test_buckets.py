"""Checkpoints in a bucket: what is read is what was saved, and nothing half done counts."""

import os
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend as gpath_backend
from faulty_store import Faults, proxy
from forced_devices import on_eight_devices

from jaxformer.checkpoints import buckets
from jaxformer.checkpoints.digests import altered_files
from jaxformer.checkpoints.reading import read_checkpoint, saved_steps
from jaxformer.checkpoints.saving import Checkpoints, NotSaved
from jaxformer.files import ConfigError, located
from jaxformer.training.state import TrainState

SIZE = 3000


@pytest.fixture(params=["s3_bucket", "gcs_bucket"])
def run_dir(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory in a new bucket of each kind of store that Orbax can save to."""
    url = request.getfixturevalue(request.param)
    if request.param == "gcs_bucket":  # for TensorStore
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", os.environ["STORAGE_EMULATOR_HOST"])
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    return located(f"{url}/some/run")


def state_of(step: int) -> TrainState:
    params = {"w": jnp.arange(SIZE) + jnp.float32(step), "b": jnp.full(7, step, jnp.bfloat16)}
    return TrainState(jnp.array(step), params, None)


def save(run_dir: Path, *steps: int, **retention: int) -> None:
    with Checkpoints(run_dir, **retention) as checkpoints:
        for step in steps:
            checkpoints.save(state_of(step), step, {"val_loss": float(step)})


def newest(run_dir: Path, lines: list[str] | None = None) -> TrainState:
    with Checkpoints(run_dir) as checkpoints:
        return checkpoints.newest(state_of(0), ([] if lines is None else lines).append)


def assert_is_of(step: int, state: TrainState) -> None:
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(step)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def largest_object(checkpoint: Path) -> Path:
    names = buckets.object_names(checkpoint)
    return max((checkpoint / name for name in names), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_what_is_read_is_what_was_saved_and_retention_deletes_the_others(run_dir: Path) -> None:
    save(run_dir, 1, 2, 3, 4, keep=1, keep_best=1)
    assert saved_steps(run_dir) == [1, 4]
    assert_is_of(4, newest(run_dir))
    assert not altered_files(run_dir / "checkpoints/4")
    names = buckets.object_names(run_dir / "checkpoints")
    assert {name.split("/")[0] for name in names} == {"1", "4"}


def test_a_save_without_its_marker_does_not_count_and_the_next_start_removes_it(
    run_dir: Path,
) -> None:
    save(run_dir, 1, 2, 3, keep=3)
    (run_dir / "checkpoints/3" / buckets.MARKER).unlink()
    for name in buckets.object_names(run_dir / "checkpoints/2"):
        if not name.startswith("state/"):  # as a deletion leaves it that was killed
            (run_dir / "checkpoints/2" / name).unlink()
    assert saved_steps(run_dir) == [1]
    assert_is_of(1, newest(run_dir))
    save(run_dir, 4, keep=3)
    assert saved_steps(run_dir) == [1, 4]
    names = buckets.object_names(run_dir / "checkpoints")
    assert {name.split("/")[0] for name in names} == {"1", "4"}


def test_a_damaged_checkpoint_is_copied_aside_also_after_a_kill_within_the_copy(
    run_dir: Path,
) -> None:
    save(run_dir, 1, 2)
    folder = run_dir / "checkpoints"
    flip(largest_object(folder / "2/state"))
    contents = {name: (folder / "2" / name).read_bytes() for name in _names(folder / "2")}
    (folder / "damaged-2/files.json").write_bytes(b"a copy that was not completed")
    lines: list[str] = []
    assert_is_of(1, newest(run_dir, lines))
    assert "checkpoint of step 2 cannot be read" in lines[0]
    assert f"set aside as {folder}/damaged-2;" in lines[1]
    assert "files are not as they were saved" in (folder / "damaged-2/damage.txt").read_text()
    (folder / "damaged-2/damage.txt").unlink()
    aside = {name: (folder / "damaged-2" / name).read_bytes() for name in _names(folder / "2", 1)}
    assert aside == contents
    assert saved_steps(run_dir) == [1]
    save(run_dir, 2)
    assert saved_steps(run_dir) == [1, 2]
    assert_is_of(2, newest(run_dir))


def _names(checkpoint: Path, aside: int = 0) -> list[str]:
    target = checkpoint.with_name(f"damaged-{checkpoint.name}") if aside else checkpoint
    return buckets.object_names(target)


def test_an_evaluation_that_cannot_be_read_is_left_out(run_dir: Path) -> None:
    save(run_dir, 1, 2, keep_best=1)
    (run_dir / "checkpoints/1/metrics/metrics").write_bytes(b"{")
    with pytest.warns(UserWarning, match="its checkpoint counts as not evaluated"):
        save(run_dir, 3, keep_best=1)
    assert saved_steps(run_dir) == [2, 3]


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
        with pytest.raises(ConfigError, match="there is no bucket absent-one"):
            Checkpoints("s3://absent-one/run")


@pytest.mark.parametrize("status", [500, 503])
def test_what_a_store_refuses_for_a_moment_is_tried_again(
    status: int, s3_server: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(status, r"^(PUT|GET) .*checkpoints/1/", 3)
    with proxy(s3_server, faults) as address:
        run_dir = _through(address, s3_bucket, monkeypatch)
        save(run_dir, 1)
        assert_is_of(1, newest(run_dir))
    assert faults.refused == 3


def test_a_save_that_the_store_refuses_is_one_message_and_the_checkpoints_before_stay(
    s3_server: str, s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy(s3_server, Faults(403, r"^PUT .*checkpoints/2/state/")) as address:
        run_dir = _through(address, s3_bucket, monkeypatch)
        save(run_dir, 1)
        with pytest.raises(NotSaved) as raised:
            save(run_dir, 2)
        assert saved_steps(run_dir) == [1]
        assert_is_of(1, newest(run_dir))
    message = str(raised.value)
    assert "checkpoints/2 could not be saved" in message and "AccessDenied" in message
    assert "Those from before are untouched" in message and message.count("\n") == 0


def _through(address: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory that is reached by way of a proxy."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    gpath_backend.fsspec_backend._get_filesystem.cache_clear()
    return located(f"{bucket}/run")
