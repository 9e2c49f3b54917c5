"""Run on eight forced host devices: the probe of a mesh against one device, for some meshes, sound
and with a gradient that lacks half of the rows. Prints JSON for test_verify_kinds.py."""

import json
import tempfile
from pathlib import Path

from tiny_run import PLAIN, line, train_here, write_text

from jaxformer.report.metrics import LARGEST_STEP
from jaxformer.tools import probes
from jaxformer.tools.verify import RepeatedSteps, setup_of_run

MESHES = {
    "fsdp 2, tensor 2, context 2": {"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.context": 2},
    "experts": {"mesh.expert": 2, "model.feed_forward": "experts", "model.experts.n": 4},
}
SHORT = {"train.steps": 2, "train.checkpoint_every": 0, "optimizer.decay_steps": 2}
SHORT |= {"train.eval_every": 0, "optimizer.warmup_steps": 1, "train.microbatches": 1}
exact = probes.gradients


def without_half(loss, state, batch, key, pieces, *rest):
    """On the mesh, whose call has `rowwise`, the gradient of half of the rows."""
    if rest:
        weights = batch["weights"].at[::2].set(0)
        batch = {**batch, "weights": weights}
    return exact(loss, state, batch, key, pieces, *rest)


def main() -> None:
    found = {}
    for name, changes in MESHES.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            text = write_text(folder / "text.txt")
            settings = PLAIN | SHORT | changes | {"run.progress": "none"}
            assert train_here(line(folder / "run", text, settings)) == 0
            again = RepeatedSteps(setup_of_run(folder / "run"))
            (step,) = again.statements([2])
            assert step.verdict == "equal", step
            state = again.newest(LARGEST_STEP)
            evidence = probes.Evidence(again, state, again.batches[int(state.step)])
            results = {"one device": probes.PROBES["one device"](evidence)}
            if "tensor" in name:  # elsewhere each device has one row
                results["accumulation"] = probes.PROBES["accumulation"](evidence)
            if name == "experts":
                probes.gradients = without_half
                results["broken"] = probes.PROBES["one device"](evidence)
                probes.gradients = exact
            found[name] = results
    print(json.dumps(found))


if __name__ == "__main__":
    main()
