"""Run on eight forced host devices: the check of a mesh against one device, for some meshes, sound
and with a gradient that lacks a replica. Prints JSON for test_certificate_devices.py."""

import json
import tempfile
from pathlib import Path

from tiny_run import PLAIN, line, train_here, write_text

from jaxformer.tools.certificate import step_checks
from jaxformer.tools.certificate.writing import evidence_of

MESHES = {
    "data 8": {},
    "fsdp 4": {"mesh.fsdp": 4},
    "tensor 2, context 2": {"mesh.tensor": 2, "mesh.context": 2},
    "experts": {"mesh.expert": 2, "model.feed_forward": "experts", "model.n_experts": 4},
}
SHORT = {"train.steps": 2, "train.checkpoint_every": 0, "optimizer.decay_steps": 2}
SHORT |= {"train.eval_every": 0, "optimizer.warmup_steps": 1, "train.microbatches": 1}
exact = step_checks.gradients


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
            evidence = evidence_of(folder / "run", 1, folder, log=lambda text: None)
            assert [entry["equal"] for entry in evidence.replays] == ["bitwise"]
            sound = step_checks.equals_one_device(evidence)
            results = {"sound": sound.holds, "text": sound.text}
            results["leaves"] = step_checks.accumulated(evidence).holds
            if name == "data 8":
                step_checks.gradients = without_half
                results["broken"] = step_checks.equals_one_device(evidence).holds
                step_checks.gradients = exact
            found[name] = results
    print(json.dumps(found))


if __name__ == "__main__":
    main()
