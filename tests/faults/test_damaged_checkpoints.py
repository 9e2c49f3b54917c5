"""Checkpoints that were damaged, or are those of another run: what is kept, and what the command
says."""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import (
    EVERY,
    STEPS,
    assert_same_run,
    contents,
    copy_until,
    finish,
    fork,
    line,
    train_here,
)

import jaxformer as jf
from jaxformer.checkpoints.digests import FILES, digests
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.files import ConfigError
from jaxformer.training.state import TrainState

pytestmark = pytest.mark.slow

NEWEST = STEPS - EVERY


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, seed: int = 0) -> None:
    """Changes one bit."""
    content, rng = bytearray(path.read_bytes()), random.Random(seed)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path: Path) -> None:
    """As a file system does that put the size of a file on the disk and not its content."""
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path) -> None:
    """Exchanges the halves of a file."""
    content = path.read_bytes()
    path.write_bytes(content[len(content) // 2 :] + content[: len(content) // 2])


def array_files(checkpoint: Path) -> list[Path]:
    """Those that a read needs, the largest first."""
    files = [path for path in (checkpoint / "state").rglob("*") if path.parent.name == "d"]
    return sorted(files, key=lambda path: -path.stat().st_size)


def manifest(checkpoint: Path) -> Path:
    return checkpoint / "manifest/metadata"


DAMAGES = {
    "array file flipped": lambda place: flip(array_files(place)[0]),
    "manifest removed": lambda place: manifest(place).unlink(),
}


@pytest.mark.fault(
    "newest checkpoint with a file that is removed, or has one bit flipped",
    kept="It is set aside whole as `damaged-<step>`. The run goes on from the checkpoint before it"
    " and is the uninterrupted one.",
    status="0",
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(
    damage: str, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    expected, text = whole
    run_dir = copy_until(NEWEST, expected, tmp_path / "run")
    place = run_dir / "checkpoints" / str(NEWEST)
    DAMAGES[damage](place)
    before = contents(place)
    out, error = finish(fork(line(run_dir, text)))
    assert f"WARNING: the checkpoint of step {NEWEST} cannot be read" in out
    assert f"from step {NEWEST - EVERY}" in out
    # TensorStore may print a traceback of asyncio for reads that end after the one that failed.
    assert "error: " not in error and "/jaxformer/runs/" not in error
    aside = place.with_name(f"damaged-{NEWEST}")
    reason = (aside / "damage.txt").read_text()
    assert str(place) in reason
    (aside / "damage.txt").unlink()
    assert contents(aside) == before
    assert_same_run(run_dir, expected)


def small_state(step: int) -> TrainState:
    rng = np.random.default_rng(step)
    w = jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)
    c = jnp.asarray(rng.standard_normal(33), jnp.bfloat16)
    moments = {"m": jnp.zeros((16, 8)), "key": jax.random.key(step)}
    return TrainState(jnp.int32(step), {"w": w, "b": {"c": c}}, moments)


def target_like(state: TrainState) -> TrainState:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), state)


def bits_of(state: TrainState) -> list[bytes]:
    leaves = dict(enumerate(jax.tree.leaves(state)))
    return [np.asarray(digest).tobytes() for digest in digests(leaves).values()]


@pytest.mark.fault(
    "newest checkpoint with any of its files zeroed, swapped in halves, cut, removed, or with one"
    " bit flipped anywhere",
    kept="It is set aside as `damaged-<step>` with the name of the file, also where nothing reads"
    " the changed bytes, and the checkpoint before it is read.",
    status="0",
)
def test_every_change_of_a_file_is_damage_whatever_reads_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    older, newer = small_state(1), small_state(2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(older, 1)
        checkpoints.save(newer, 2)
    place, aside = tmp_path / "checkpoints/2", tmp_path / "checkpoints/damaged-2"
    changes: list[Callable[[Path], None]] = [zero, swap, cut, Path.unlink, flip]
    names = [path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file()]
    holding = [name for name in names if name.parts[0] in ("state", "manifest", FILES)]
    assert len(holding) > 10
    # Each file in two or three of the ways.
    for name, change in [*itertools.product(names, changes)][::2]:
        content = (place / name).read_bytes()
        change(place / name)
        with Checkpoints(tmp_path) as checkpoints:
            found = checkpoints.restore(target_like(newer), lambda line: None)
        if name in holding:
            reason = (aside / "damage.txt").read_text()
            assert str(name) in reason or name.parts[0] == "manifest", reason
        assert bits_of(found) == bits_of(older if aside.exists() else newer), f"{name} {change}"
        if aside.exists():
            (aside / "damage.txt").unlink()
            aside.rename(place)
        (place / name).write_bytes(content)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(target_like(newer), lambda line: None)
    assert bits_of(found) == bits_of(newer)
    assert not capfd.readouterr().err


@pytest.mark.fault(
    "newest checkpoint with a file that cannot be read",
    kept="Nothing is changed; the message says how to go on.",
    status="2",
)
def test_a_checkpoint_that_cannot_be_read_for_another_reason_stops_the_run(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = whole
    run_dir = copy_until(NEWEST, expected, tmp_path / "run")
    unreadable = manifest(run_dir / "checkpoints" / str(NEWEST))
    unreadable.unlink()
    unreadable.mkdir()
    before = contents(run_dir)
    assert train_here(line(run_dir, text)) == 2
    error = capsys.readouterr().err
    assert "does not show that it is damaged" in error and "To continue from an earlier" in error
    assert contents(run_dir) == before


@pytest.mark.fault(
    "checkpoint of another run of the same shapes",
    kept="It is refused with what differs; nothing is changed.",
    status="2",
)
def test_the_checkpoint_of_another_run_is_refused(
    whole: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, text = whole
    other = tmp_path / "other"
    assert train_here(line(other, text, {"run.seed": 7, "train.steps": EVERY})) == 0
    run_dir = copy_until(EVERY, expected, tmp_path / "run")
    shutil.copytree(other / f"checkpoints/{EVERY}", run_dir / f"checkpoints/{2 * EVERY}")
    before = contents(run_dir)
    assert train_here(line(run_dir, text)) == 2
    error = capsys.readouterr().err
    assert "is of another run" in error and "run_id: " in error
    assert "seed: 7 in the checkpoint, 1337 here" in error
    with pytest.raises(ConfigError, match="is of another run"):
        jf.load(run_dir)
    assert contents(run_dir) == before
