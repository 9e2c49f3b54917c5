"""Checks of the step of a run: accumulation, the mesh, saving and reading, and replayed steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.arrays.mesh import batch_devices
from jaxformer.arrays.out_of_memory import memory_of
from jaxformer.checkpoints.digests import Altered, altered_files
from jaxformer.checkpoints.reading import flat_leaves, saved_steps
from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cluster.processes import exchange
from jaxformer.files import located
from jaxformer.runs.metric_logger import as_logged
from jaxformer.tools.certificate.evidence import Evidence, Measured, on_one_device
from jaxformer.tools.certificate.steps import state_digest
from jaxformer.training.state import TrainState, on_mesh
from jaxformer.training.step import Batch, Loss, Sums, gradients

# Leaves with a smaller share of the norm of the whole gradient are compared with this share of it:
# some, such as the bias of keys, have a gradient of rounding alone.
NEGLIGIBLE = 1e-3


def compares_rows(evidence: Evidence) -> str:
    """Why a batch in pieces is another problem than the batch; empty if it is the same."""
    setup = evidence.setup
    if setup.objective.compares_rows:
        return f"each row of data.objective={setup.task.name} is compared with those of its batch"
    if evidence.row_count(evidence.batch) < 2 * batch_devices(setup.mesh):
        return "a batch of this run has one row on each device, which cannot be divided"
    return ""


def accumulated(evidence: Evidence) -> Measured:
    """The gradient of a batch in two microbatches and in one."""
    setup, devices = evidence.setup, batch_devices(evidence.setup.mesh)
    # As many rows as a microbatch of the run, which fit its memory, but at least two on a device.
    size = setup.run.train.batch_size // setup.run.train.n_microbatches
    wanted = max(size // devices // 2 * 2, 2) * devices
    rows = evidence.rows(wanted)
    loss = _comparable(setup.loss)
    with memory_of("the check of accumulation"):
        batch = setup.placed(rows)
        two = _gradient(evidence, loss, batch, 2)
        one = _gradient(evidence, loss, batch, 1)
    figure = _largest_difference(two, one)
    text = f"{evidence.row_count(rows)} rows in 2 microbatches and in 1: the gradients of leaves"
    text += f" differ by {figure:.1e} of their norm at most."
    return Measured(figure <= evidence.tolerance, text, figure, evidence.tolerance)


def one_device(evidence: Evidence) -> str:
    return "the run has one device" if evidence.setup.mesh.size == 1 else ""


def equals_one_device(evidence: Evidence) -> Measured:
    """The gradient of some rows on the mesh and on one of its devices."""
    setup = evidence.setup
    rows = evidence.rows(1)
    loss = _comparable(setup.loss)
    with memory_of("the check of the mesh on one device"):
        batch = setup.placed(rows)
        divided = on_one_device(_gradient(evidence, loss, batch, 1), setup.mesh)
        params = on_one_device(evidence.state.params, setup.mesh)
        lone = TrainState(jnp.int32(0), params, None, evidence.state.frozen)
        key = jax.random.key(0)
        alone = jax.jit(lambda batch: gradients(loss, lone, batch, key, 1)[0])(
            on_one_device(batch, setup.mesh)
        )
    figure = _largest_difference(divided, alone)
    sizes = ", ".join(f"{axis} {size}" for axis, size in setup.mesh.shape.items() if size > 1)
    text = f"{evidence.row_count(rows)} rows on {setup.mesh.size} devices ({sizes}) and on one: the"
    text += f" gradients of leaves differ by {figure:.1e} of their norm at most."
    return Measured(figure <= evidence.tolerance, text, figure, evidence.tolerance)


def _comparable(loss: Loss) -> Loss:
    """The loss without dropout and, where it says so, without the balance of experts, which is that
    of all rows of a microbatch: what is a sum over rows."""

    def alone(params: Any, batch: Batch, key: jax.Array | None) -> Sums:
        sums = loss(params, batch, None)
        return {"loss": sums.get("nats", sums["loss"])}

    return alone


def _gradient(evidence: Evidence, loss: Loss, batch: Batch, pieces: int) -> Any:
    """The gradient of the mean loss of a batch on the mesh."""
    setup, state = evidence.setup, evidence.state

    def compute(state: TrainState, batch: Batch) -> Any:
        key = jax.random.key(0)
        return gradients(loss, state, batch, key, pieces, setup.is_rowwise)[0]

    with on_mesh(setup.mesh):
        return jax.jit(compute)(state, batch)


def _largest_difference(a: Any, b: Any) -> float:
    """The largest norm of the difference of two leaves, relative to the norm of that of `b`."""

    @jax.jit
    def norms(a: Any, b: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        def norm(leaf: jax.Array) -> jax.Array:
            return jnp.linalg.norm(leaf.astype(jnp.float32).reshape(-1))

        first, second = flat_leaves(a), flat_leaves(b)
        differences = {path: norm(first[path] - leaf) for path, leaf in second.items()}
        return differences, {path: norm(leaf) for path, leaf in second.items()}

    differences, sizes = jax.device_get(norms(a, b))
    least = NEGLIGIBLE * float(np.sqrt(sum(float(size) ** 2 for size in sizes.values())))
    ratios = [float(differences[path]) / max(float(sizes[path]), least, 1e-30) for path in sizes]
    largest = max(ratios)
    finite = all(map(np.isfinite, ratios))
    return largest if finite else np.finfo(np.float32).max.item()


def resumed(evidence: Evidence) -> Measured:
    """The next step of the state, and that of the state after it was saved and read."""
    setup, state = evidence.setup, evidence.state
    number = int(state.step)
    with Checkpoints(evidence.folder, run=setup.identity, without=setup.unsaved) as checkpoints:
        checkpoints.save(state, number)
        checkpoints.wait()
        batch = setup.placed(evidence.batch)
        expected = _after(evidence, state, batch)
        restored = checkpoints.restore(setup.target_over_base, evidence.log)
    assert restored is not None  # it was saved
    found = _after(evidence, restored, batch)
    figures = [name for name in expected if found.get(name) != expected[name]]
    text = f"Step {number + 1} from the state after step {number} and from that state read back"
    if not figures:
        return Measured(
            True, f"{text}: every figure and the new state are equal to the bit.", 0.0, 0.0
        )
    listed = ", ".join(f"{name} {found[name]!r}, not {expected[name]!r}" for name in figures)
    return Measured(False, f"{text}: {listed}.")


def _after(evidence: Evidence, state: TrainState, batch: Batch) -> dict[str, str]:
    """The figures of a step, exactly, and the fingerprint of the state after it. `state` is
    donated."""
    state, metrics = evidence.again.program(state, batch)
    figures = as_logged(jax.device_get(metrics))
    return {name: value.hex() for name, value in figures.items()} | {
        "state": state_digest(state, evidence.setup.unsaved)
    }


def not_replayed(evidence: Evidence) -> str:
    return "" if evidence.replays else "no step was replayed (--steps 0), or none was logged"


def replayed(evidence: Evidence) -> Measured:
    """The steps that were done again, against the log."""
    bound = evidence.again.bound
    counts: Mapping[str, list[int]] = {
        equal: [entry["step"] for entry in evidence.replays if entry["equal"] == equal]
        for equal in ("bitwise", "rounding", "no")
    }
    words = {"bitwise": "equal to the bit", "rounding": "equal to rounding", "no": "not equal"}
    stated = "; ".join(
        f"{words[equal]}: {', '.join(map(str, steps))}" for equal, steps in counts.items() if steps
    )
    largest = max(entry["largest_difference"] for entry in evidence.replays)
    return Measured(not counts["no"], f"Steps {stated}.", largest, bound)


def no_checkpoints(evidence: Evidence) -> str:
    folder = located(evidence.setup.run.run.dir)
    return "" if saved_steps(folder) else "the run has no checkpoint yet"


def files_intact(evidence: Evidence) -> Measured:
    """The bytes of the files of all checkpoints."""
    folder = located(evidence.setup.run.run.dir)
    share, problems, steps = (jax.process_index(), jax.process_count()), list[str](), []
    for step in saved_steps(folder):
        steps.append(step)
        try:
            names = altered_files(folder / "checkpoints" / str(step), *share)
            problems += [f"step {step}: {name} was altered" for name in names]
        except Altered as error:
            problems.append(f"step {step}: {error}")
    problems = [
        text for texts in map(str.splitlines, exchange("\n".join(problems))) for text in texts
    ]
    listed = ", ".join(map(str, steps))
    if not problems:
        return Measured(True, f"Every file of the checkpoints of the steps {listed}.", 0.0, 0.0)
    return Measured(False, "; ".join(problems[:5]) + ".", float(len(problems)), 0.0)
