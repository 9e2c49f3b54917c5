"""A digest of an array says what its bits are, wherever and however it lies."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer.checkpoints.saving
import jaxformer.files.stores
from jaxformer.checkpoints.digests import (
    FILES,
    Altered,
    altered_files,
    as_text,
    checksum,
    digest_on_host,
    digests,
    write_file_digests,
)
from jaxformer.checkpoints.reading import failure_of, read_back
from jaxformer.checkpoints.saving import Checkpoints, NotSaved
from jaxformer.files import ConfigError

KINDS = ("float32", "bfloat16", "float16", "int32", "int8", "uint16", "bool", "float8_e4m3fn")
MESHES = """
import sys, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxformer.checkpoints.digests import as_text, digests
array = jnp.sin(jnp.arange(96.0)).reshape(4, 8, 3).astype(sys.argv[1])
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)
    for place in (P(), P("fsdp"), P(None, ("tensor", "fsdp")), P("tensor", "data")):
        leaf = jax.device_put(array, NamedSharding(mesh, place))
        print(as_text(digests({"leaf": leaf})["leaf"]))
"""


def digest(array: jax.Array) -> str:
    return as_text(digests({"leaf": array})["leaf"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_is_that_of_numpy_and_changes_with_every_bit(kind: str) -> None:
    array = jnp.sin(jnp.arange(60.0)).reshape(3, 4, 5).astype(kind)
    expected = digest(array)
    assert expected == digest_on_host(np.asarray(array))
    content = np.asarray(array).tobytes()
    for index in range(0, 8 * len(content), 7):
        if kind == "bool" and index % 8:  # a bool has one bit
            continue
        changed = bytearray(content)
        changed[index // 8] ^= 1 << index % 8
        other = np.frombuffer(bytes(changed), np.asarray(array).dtype).reshape(array.shape)
        assert digest_on_host(other) != expected
        assert {a == b for a, b in zip(expected, digest_on_host(other), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_digest_does_not_depend_on_the_sharding(kind: str) -> None:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    out = subprocess.run(
        [sys.executable, "-c", MESHES, kind],
        env=os.environ | {"XLA_FLAGS": flags},
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    here = digest(jnp.sin(jnp.arange(96.0)).reshape(4, 8, 3).astype(kind))
    assert out.split() == [here] * 8


def test_values_that_are_exchanged_change_the_digest() -> None:
    array = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    digests_seen = {digest_on_host(array), digest_on_host(array.T), digest_on_host(-array)}
    digests_seen |= {digest_on_host(np.roll(array, shift)) for shift in range(1, 100)}
    assert len(digests_seen) == 102


def test_keys_and_empty_arrays_have_digests() -> None:
    assert digest(jax.random.key(1)) != digest(jax.random.key(2))
    assert digest(jnp.zeros((0, 3))) == "0" * 16


def test_the_first_save_is_read_back(tmp_path: Path) -> None:
    state = {"w": jnp.arange(6.0), "b": jnp.ones((2, 3), jnp.bfloat16)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
    checkpoint = tmp_path / "checkpoints/1"
    read_back(checkpoint)
    path = checkpoint / "manifest/metadata"
    path.write_text(path.read_text().replace('"w"', '"v"'))
    with pytest.raises(Altered):
        read_back(checkpoint)


def test_a_change_of_any_byte_of_a_checkpoint_is_seen(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save({"w": jnp.arange(6.0), "b": jnp.ones((2, 3), jnp.bfloat16)}, 1)
    checkpoint = tmp_path / "checkpoints/1"
    assert altered_files(checkpoint) == []
    files = [path for folder in ("state", "manifest") for path in (checkpoint / folder).rglob("*")]
    for path in filter(Path.is_file, files):
        content = path.read_bytes()
        name = path.relative_to(checkpoint).as_posix()
        for index in range(0, len(content), 7):
            changed = bytearray(content)
            changed[index] ^= 1 << index % 8
            path.write_bytes(changed)
            assert altered_files(checkpoint) == [name]
        path.unlink()
        assert altered_files(checkpoint) == [name]
        path.write_bytes(content)
    shares = [altered_files(checkpoint, index, 3) for index in range(3)]
    assert shares == [[], [], []]
    content = (checkpoint / FILES).read_bytes()
    for other in (b"", b"[]", content[:-9], content.replace(b"state/d/", b"state/../")):
        (checkpoint / FILES).write_bytes(other)
        with pytest.raises(Altered, match="is not what was saved"):
            altered_files(checkpoint)


def test_the_digests_of_files_decide_what_is_damage(tmp_path: Path) -> None:
    error = ValueError("FAILED_PRECONDITION: Data corruption")
    path = tmp_path / "state/d/values"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"as it was saved")
    write_file_digests(tmp_path)
    assert isinstance(failure_of(tmp_path, error), ConfigError)
    path.write_bytes(b"as it Was saved")
    damage = failure_of(tmp_path, error)
    assert isinstance(damage, Altered) and "state/d/values" in str(damage)
    (tmp_path / FILES).unlink()
    damage = failure_of(tmp_path, error)
    assert isinstance(damage, Altered) and f"{FILES} is missing" in str(damage)


@pytest.mark.parametrize("number", [2, 4])
def test_a_checkpoint_of_another_format_is_refused_by_name(number: int, tmp_path: Path) -> None:
    state = {"w": jnp.ones(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, 1)
    path = tmp_path / "checkpoints/1/manifest/metadata"
    manifest = json.loads(path.read_text()) | {"format": number}
    del manifest["sha256"]
    path.write_text(json.dumps(manifest | {"sha256": checksum(manifest)}))
    refused = pytest.raises(ConfigError, match=f"a manifest of format {number}, .* reads format 3")
    with refused, Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(state, print)
    assert (tmp_path / "checkpoints/1").is_dir()


def test_best_regular_and_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 4.0, 6: 5.0, 7: 6.0}
    for steps in ((1, 2, 3, 4), (5, 6, 7)):  # by two processes, as it were
        with Checkpoints(tmp_path, keep=1, keep_every=5, keep_best=2) as checkpoints:
            for step in steps:
                evaluation = {"val_loss": losses[step]} if step != 6 else None
                checkpoints.save({"w": jnp.full(3, step)}, step, evaluation)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 4, 5, 7]


def test_a_reader_removes_nothing_of_a_save_in_progress(tmp_path: Path) -> None:
    draft = tmp_path / "checkpoints/3.orbax-checkpoint-tmp"
    draft.mkdir(parents=True)
    (draft / "part").write_text("being written")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.restore({"w": jnp.ones(3)}, print) is None
    assert (draft / "part").exists()
    with Checkpoints(tmp_path) as checkpoints:  # who saves tidies up
        checkpoints.save({"w": jnp.ones(3)}, 1)
    assert not draft.exists()


def test_what_a_save_wrote_is_on_the_disk_before_older_checkpoints_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before anybody waits for the save: its content before it has its name, then the name."""
    synced = set[str]()
    folder, threads = tmp_path / "checkpoints", set[threading.Thread]()
    older, newer, named = folder / "1", folder / "2", threading.Event()

    def sync(*paths: Path) -> None:
        jaxformer.files.stores.sync(*paths)
        assert older.is_dir()
        threads.add(threading.current_thread())
        for path in paths:
            if path.is_file():
                synced.add(digest_of(path))
        if folder in paths:
            assert (newer / "state").is_dir()
            named.set()
        else:
            assert not newer.exists()

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save({"w": jnp.ones(3)}, 1)
        checkpoints.wait()
        monkeypatch.setattr(jaxformer.checkpoints.saving, "sync", sync)
        checkpoints.save({"w": jnp.ones(3)}, 2)
        assert named.wait(60)
    assert threading.main_thread() not in threads
    written = [path for path in newer.rglob("*") if path.is_file()]
    left = [str(path) for path in written if digest_of(path) not in synced]
    assert len(written) > 8 and not left
    assert not older.exists()


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_save_whose_name_cannot_be_put_on_the_disk_is_not_called_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(*paths: Path) -> None:
        if tmp_path / "checkpoints" in paths:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(jaxformer.checkpoints.saving, "sync", sync)
    told = pytest.raises(NotSaved, match=r"could not be saved \(.*Input/output error")
    with told, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save({"w": jnp.ones(3)}, 1)
