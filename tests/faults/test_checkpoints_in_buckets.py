"""Checkpoints in a bucket: half uploads, damage, and a store that refuses."""

from pathlib import Path

import pytest
from bucket_states import assert_is_of, newest, save
from faulty_server import Faults

from jaxformer.checkpoints.buckets import MARKER
from jaxformer.checkpoints.digests import FILES
from jaxformer.checkpoints.reading import saved_steps
from jaxformer.checkpoints.saving import NotSaved
from jaxformer.files import ConfigError, located


def largest_object(checkpoint: Path) -> Path:
    names = checkpoint.names_below()
    return max((checkpoint / name for name in names), key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def contents_of(checkpoint: Path) -> dict[str, bytes]:
    return {name: (checkpoint / name).read_bytes() for name in checkpoint.names_below()}


@pytest.mark.fault(
    "a save to a bucket without its last object, and a checkpoint that was half deleted",
    kept="It does not count, and the next start removes it. The checkpoints from before stay.",
    status="0",
)
def test_a_save_without_its_marker_does_not_count_and_is_removed(s3_bucket: str) -> None:
    run_dir = located(f"{s3_bucket}/run")
    save(run_dir, 1, 2, 3, keep=3)
    (run_dir / "checkpoints/3" / MARKER).unlink()
    for name in (run_dir / "checkpoints/2").names_below():
        if not name.startswith("state/"):  # as a deletion leaves it that was killed
            (run_dir / "checkpoints/2" / name).unlink()
    assert saved_steps(run_dir) == [1]
    assert_is_of(1, newest(run_dir))
    save(run_dir, 4, keep=3)
    assert saved_steps(run_dir) == [1, 4]
    names = (run_dir / "checkpoints").names_below()
    assert {name.split("/")[0] for name in names} == {"1", "4"}


@pytest.mark.fault(
    "newest checkpoint in a bucket with one bit flipped, and a kill while it is set aside",
    kept="It is copied whole to `damaged-<step>`, then deleted, and the checkpoint before it is"
    " read.",
    status="0",
)
@pytest.mark.slow
def test_a_damaged_checkpoint_is_copied_aside_also_after_a_kill_within_the_copy(
    s3_bucket: str,
) -> None:
    run_dir = located(f"{s3_bucket}/run")
    save(run_dir, 1, 2)
    folder = run_dir / "checkpoints"
    flip(largest_object(folder / "2/state"))
    contents = contents_of(folder / "2")
    (folder / f"damaged-2/{FILES}").write_bytes(b"a copy that was not completed")
    lines: list[str] = []
    assert_is_of(1, newest(run_dir, lines))
    assert "checkpoint of step 2 cannot be read" in lines[0]
    assert f"set aside as {folder}/damaged-2;" in lines[1]
    assert "files are not as they were saved" in (folder / "damaged-2/damage.txt").read_text()
    (folder / "damaged-2/damage.txt").unlink()
    assert contents_of(folder / "damaged-2") == contents
    assert saved_steps(run_dir) == [1]
    save(run_dir, 2)
    assert saved_steps(run_dir) == [1, 2]
    assert_is_of(2, newest(run_dir))


@pytest.mark.fault(
    "a store that answers 500 or 503 to single requests of a checkpoint",
    kept="They are tried again, and the save and the read succeed.",
    status="0",
)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["throttled", "failing"])
def test_what_a_store_refuses_for_a_moment_is_tried_again(
    kind: str, s3_faults: Faults, s3_bucket: str
) -> None:
    run_dir = located(f"{s3_bucket}/run")
    with s3_faults.fault(kind, "checkpoints/1/state", times=2, method="PUT") as put:
        save(run_dir, 1)
    with s3_faults.fault(kind, "checkpoints/1/state", times=2, method="GET") as get:
        assert_is_of(1, newest(run_dir))
    assert put.count == get.count == 2


@pytest.mark.fault(
    "a store that refuses to save a checkpoint",
    kept="One message. The checkpoints from before, which are read as they were.",
    status="1",
)
def test_a_save_that_the_store_refuses_is_one_message_and_the_checkpoints_before_stay(
    s3_faults: Faults, s3_bucket: str
) -> None:
    run_dir = located(f"{s3_bucket}/run")
    save(run_dir, 1)
    with (
        s3_faults.fault("denied", "checkpoints/2/state", method="PUT"),
        pytest.raises(NotSaved) as raised,
    ):
        save(run_dir, 2)
    assert saved_steps(run_dir) == [1]
    assert_is_of(1, newest(run_dir))
    message = str(raised.value)
    assert "checkpoints/2 could not be saved" in message and "AccessDenied" in message
    assert "Those from before are untouched" in message and message.count("\n") == 0


@pytest.mark.fault(
    "a store that refuses to give the newest checkpoint",
    kept="Nothing is changed; the message says that this does not show damage.",
    status="2",
)
@pytest.mark.slow
def test_a_checkpoint_that_the_store_does_not_give_is_no_damage(
    s3_faults: Faults, s3_bucket: str
) -> None:
    run_dir = located(f"{s3_bucket}/run")
    save(run_dir, 1, 2)
    with (
        s3_faults.fault("denied", "checkpoints/2/state", method="GET"),
        pytest.raises(ConfigError, match="does not show that it is damaged; nothing was changed"),
    ):
        newest(run_dir)
    assert saved_steps(run_dir) == [1, 2]
