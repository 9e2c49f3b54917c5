"""What to change where memory ran out: the settings with which a run needs less."""

from jaxformer.arrays.mesh import batch_devices
from jaxformer.runs.train_run import RunOutOfMemory


def advice(error: RunOutOfMemory) -> str:
    """What is printed below the message: the remedies, and what they mean for the
    run directory."""
    run_dir = error.setup.run.run.dir
    remedies = remedies_of(error)
    lines = ["What needs less:"] if remedies else []
    width = max(map(len, remedies), default=0)
    lines += [f"  {settings:<{width}}  {effect}" for settings, effect in remedies.items()]
    lines.append("`jaxformer plan CONFIG` says of any settings whether they fit.")
    if error.saved is not None:
        lines.append(
            f"{run_dir} holds step {error.saved}, from which the same command continues with the"
            " other settings."
        )
    elif error.begun:
        lines.append(f"{run_dir} was begun by an earlier command and holds no checkpoint.")
    else:
        lines.append(
            f"Nothing was trained in {run_dir}: the same command with other settings begins it."
        )
    return "\n".join(lines)


def remedies_of(error: RunOutOfMemory) -> dict[str, str]:
    """By arguments of the command line, how a run needs less with them: recomputing, fewer rows at
    a time, and a state that is split over the devices."""
    setup = error.setup
    if error.on_chip and "experts" in error.place:
        return {"--model.expert_kernel ragged": "experts without a Pallas kernel"}
    if error.on_chip:
        return {"--model.attention_kernel xla": "attention without a fused kernel"}
    remedies: dict[str, str] = {}
    train, devices = setup.run.train, batch_devices(setup.mesh)
    rows = train.batch_size // train.n_microbatches
    can_halve = rows % (2 * devices) == 0
    # A training step stores activations for its backward pass.
    is_step = error.place.startswith(("compiling", "step"))
    if is_step and setup.run.model.remat != "full":
        remedies["--model.remat full"] = "activations recomputed instead of stored"
    if is_step and can_halve:
        # A run that was begun keeps its microbatches, on which its sums depend.
        where = ", in another run.dir" if error.begun or error.saved is not None else ""
        effect = f"activations of {rows // 2} rows at a time instead of {rows}{where}"
        remedies[f"--train.microbatches {2 * train.n_microbatches}"] = effect
    if "evaluation" in error.place and can_halve:
        remedies[f"--train.batch_size {train.batch_size // 2}"] = "half as many rows"
    if setup.mesh.shape["data"] > 1:
        settings = f"--mesh.data 1 --mesh.fsdp {devices}"
        remedies[settings] = "parameters and optimizer state split over all devices"
    return remedies
