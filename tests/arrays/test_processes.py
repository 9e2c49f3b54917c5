"""Several processes of train.py, joined over loopback: the numbers of one process on any mesh, one
run directory, and checkpoints that any number of processes continues."""

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from several import SMALL, ends, free_port, launch_all
from tiny_run import ROOT, copy_until, figures, finish, fork, line, logged, saved, write_text

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

FOUR = {"mesh.fsdp": 2, "mesh.tensor": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The run of one process."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    finish(fork(line(run_dir, text, SMALL)))
    return run_dir


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The run of four processes, which is as sharded as four devices can be."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    found = ends(launch_all(4, run_dir, text, SMALL | FOUR))
    assert [status for status, _, _ in found.values()] == [0, 0, 0, 0], found
    return run_dir


def assert_near(found: Path, expected: Path) -> None:
    """The same metrics, up to the order in which floating-point numbers are added."""
    for here, there in zip(figures(found), figures(expected), strict=True):
        assert here == pytest.approx(there, rel=1e-5), here["step"]


def test_processes_have_the_losses_and_evaluations_of_one(
    text: Path, one: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "several"
    changes = SMALL | {"mesh.fsdp": 2, "run.sample_tokens": 8}
    found = ends(launch_all(2, run_dir, text, changes, devices=2))
    assert [status for status, _, _ in found.values()] == [0, 0], found
    assert_near(run_dir, one)
    assert saved(run_dir) == saved(one) and (run_dir / "loss.png").is_file()
    first, *others = (out for _, out, _ in found.values())
    for index in range(2):
        assert f"process {index} of 2: " in first and "2 x cpu" in first
    assert "Done in" in first and "no sample, which one process alone" in first
    assert not any("Done in" in out or "step 4/8" in out or "process 1" in out for out in others)
    assert json.loads((run_dir / "config.json").read_text())["launch"]["processes"] == 0


@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_four_processes_is_continued_by_any_number(
    count: int, four: Path, one: Path, text: Path, tmp_path: Path
) -> None:
    assert_near(four, one)
    run_dir = copy_until(4, four, tmp_path / "run")
    changes = SMALL | {1: {}, 4: FOUR}[count]
    if count == 1:
        out, _ = finish(fork(line(run_dir, text, changes)))
    else:
        found = ends(launch_all(count, run_dir, text, changes))
        assert [status for status, _, _ in found.values()] == [0] * count, found
        out = found[0][1]
    assert f"Continuing {run_dir} from step 4" in out
    if count == 4:
        assert logged(run_dir) == logged(four)  # the same processes: to the bit
    assert_near(run_dir, one)


def scripts(count: int, body: str, *arguments: Any, devices: int = 1) -> list[str]:
    """What each of `count` processes prints that runs `body` after its own initialization."""
    begin = "import jax, sys\n"
    if count > 1:
        begin += (
            f"jax.distributed.initialize('localhost:{free_port()}', {count}, int(sys.argv[1]))\n"
        )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", begin + body, str(index), *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    return [finish(process)[0] for process in processes]


BATCHES = """
import hashlib, json
import numpy as np
from jax.experimental import multihost_utils
from jaxformer.layers.linear import dropout
from jaxformer.arrays.mesh import batch_sharding, place_batch
from jaxformer.runs.config import load_config
from jaxformer.runs.setup import make_setup

setup = make_setup(load_config(sys.argv[2], sys.argv[3:]), lambda line: None)
found = []
def note(array):
    whole = multihost_utils.process_allgather(array, tiled=True)
    found.append([list(whole.shape), hashlib.sha256(np.asarray(whole).tobytes()).hexdigest()])
for step in (0, 2, 3, 7):
    for name, array in sorted(place_batch(setup.batches[step], setup.mesh).items()):
        note(array)
for batch in setup.heldout:
    note(place_batch(batch, setup.mesh)["targets"])
ones = jax.jit(lambda: jax.numpy.ones((8, 32)), out_shardings=batch_sharding(setup.mesh))()
note(jax.jit(lambda key, x: dropout(x, 0.5, key))(jax.random.key(3), ones))
print("FOUND", json.dumps(found))
"""


def test_the_global_batches_and_the_random_numbers_are_those_of_one_process_bitwise(
    text: Path, tmp_path: Path
) -> None:
    def found(count: int, devices: int, **mesh: int) -> set[str]:
        changes = SMALL | {f"mesh.{name}": size for name, size in mesh.items()}
        config, *flags = line(tmp_path / f"{count}-{devices}-{len(mesh)}", text, changes)
        pairs = zip(flags[::2], flags[1::2], strict=True)
        given = [f"{name}={value}" for name, value in pairs]
        outs = scripts(count, BATCHES, config, *given, devices=devices)
        return {out.partition("FOUND")[2] for out in outs}

    expected = found(1, 1)
    assert len(expected) == 1 and "[8, 32]" in next(iter(expected))
    assert found(2, 2, fsdp=2, tensor=2) == expected


OWN_PROGRAM = """
import jax.numpy as jnp
import optax
import jaxformer as jf
from jaxformer.runs.run_evaluation import evaluate_run

run = jf.load_config(sys.argv[2], sys.argv[3:])
result = jf.train(run)
assert result.metrics[-1]["step"] == 8 and jax.process_count() == 2
print("VALUE", evaluate_run(result.run_dir)["val_loss"])

# A leaf of one process that does not learn is placed so that it can be saved.
params = {"weight": jnp.ones((4, 2)), "scale": jnp.full(1, 2.0)}
learning = {"weight": True, "scale": False}
state = jf.init_state(params, optax.adam(0.1), mesh=jf.make_mesh(), trainable=learning)
with jf.Checkpoints(f"{run.run.dir}-state") as checkpoints:
    checkpoints.save(state, 1)
shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
found = jf.Checkpoints(f"{run.run.dir}-state").restore(shapes, print).params["scale"]
assert found.addressable_shards[0].data == 2
"""


def test_a_program_that_has_joined_by_itself_trains_evaluates_and_saves_its_own_state(
    text: Path, one: Path, tmp_path: Path
) -> None:
    config, *flags = line(tmp_path / "run", text, SMALL)
    given = [f"{name}={value}" for name, value in zip(flags[::2], flags[1::2], strict=True)]
    outs = scripts(2, OWN_PROGRAM, config, *given)
    assert_near(tmp_path / "run", one)
    values = [float(out.partition("VALUE ")[2].split()[0]) for out in outs]
    assert values[0] == values[1] == pytest.approx(logged(one)[-1]["val_loss"], rel=1e-5)


DISAGREEING = {
    "settings": ({"train.eval_every": 3}, r"train\.eval_every: 4 in process 0, 3 in process 1"),
    "text": ({"data.train": "other.txt"}, r"data\.json: train: \w+ in process 0, \w+ in process 1"),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_processes_with_other_settings_or_text_are_told_so_in_all(
    case: str, text: Path, tmp_path: Path
) -> None:
    changes, message = DISAGREEING[case]
    if "data.train" in changes:
        changes = {"data.train": write_text(tmp_path / "other.txt", seed=1)}
    found = ends(launch_all(2, tmp_path / "run", text, SMALL, apart={1: changes}))
    for status, _, error in found.values():
        assert status == 2 and "Traceback" not in error, error
        assert re.search(message, error)
    assert not saved(tmp_path / "run")


def test_a_run_directory_in_use_is_told_by_all_processes(text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = ends(launch_all(2, run_dir, text, SMALL))
    assert {status for status, _, _ in found.values()} == {2}
    assert all("is in use by another process" in error for _, _, error in found.values())
