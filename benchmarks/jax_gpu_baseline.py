"""Our side of train_gpu.py: a worker that trains a workload by the library's own step, or checks
the device first."""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax_baseline import Trainer
from steps import kernel_holds
from workloads import SMOKE_FIELDS, WORKLOADS, shrunk, with_sizes, words_file

import jaxformer as jf

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
STEPS, BREAK = 10, 6  # of the run that is stopped and continued


def compile_step(trainer: Trainer, options: dict[str, str]) -> str:
    """Compiles the step with these XLA options, or without where XLA knows them not; what happened,
    in words."""
    with jax.set_mesh(trainer.mesh):
        lowered = trainer.advance.lower(trainer.state, trainer.batch)
        try:
            trainer.advance = lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            if not options or out_of_memory(error):
                raise
            trainer.advance = lowered.compile()
            return f"refused {options}: {str(error)[:200]}"
    return f"{options}" if options else "XLA's defaults"


def out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def resumes(smoke: bool) -> dict[str, Any]:
    """Trains on the standard library's source twice, once stopped half-way and continued; how far
    the two are apart."""
    with tempfile.TemporaryDirectory(prefix="jaxformer-gpu-") as folder:
        fields: dict[str, object] = {
            "run.progress": "none",
            "run.sample_tokens": 0,
            "data.cache_dir": f"{folder}/data",
            "optimizer.decay_steps": STEPS,
            "train.log_every": 1,
        }
        if smoke:
            fields |= SMOKE_FIELDS | {"data.train": words_file(Path(folder))}
        fields["data.validation_fraction"] = 0
        common = [f"{name}={value}" for name, value in fields.items()]

        def train(name: str, steps: int) -> Any:
            config = [*common, f"run.dir={folder}/{name}", f"train.steps={steps}"]
            return jf.train(jf.load_config(CONFIGS / "quickstart.py", config))

        whole = train("whole", STEPS)
        train("stopped", BREAK)
        continued = train("stopped", STEPS)
        losses = [
            [line["loss"] for line in result.metrics if "loss" in line]
            for result in (whole, continued)
        ]
        pairs = zip(jax.tree.leaves(whole.params), jax.tree.leaves(continued.params), strict=True)
        gap = max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)
    return {
        "losses": losses,
        "bitwise": losses[0] == losses[1] and gap == 0,
        "largest_parameter_gap": gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--workload", choices=sorted(WORKLOADS), help="train this; without it, check the device"
    )
    parser.add_argument(
        "--workloads",
        nargs="*",
        default=[],
        choices=sorted(WORKLOADS),
        help="whose kernels to check",
    )
    parser.add_argument(
        "--batch", type=int, default=0, help="sequences a step; 0 takes the workload's own"
    )
    parser.add_argument("--smoke", action="store_true", help="the workload shrunk")
    parser.add_argument(
        "--xla", nargs="*", default=[], metavar="NAME=VALUE", help="compiler options of the step"
    )
    options = parser.parse_args()
    size = shrunk if options.smoke else lambda run: run
    device = jax.devices()[0]
    about: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "runtime": device.client.platform_version,
        },
    }
    if not options.workload:
        print(json.dumps(about), flush=True)
        held = {name: kernel_holds(size(WORKLOADS[name])) for name in options.workloads}
        print(json.dumps({"kernels": held, "resume": resumes(options.smoke)}), flush=True)
        return
    run = with_sizes(size(WORKLOADS[options.workload]), options.batch, 1)
    # bfloat16 on any device, as on a GPU; there "auto" is the same
    trainer = Trainer(replace(run, model=replace(run.model, dtype="bfloat16")), "")
    print(json.dumps(about | {"kernel": trainer.kernel}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "quit":
            break
        try:
            if command == "compile":
                answer: dict[str, Any] = {
                    "xla": compile_step(trainer, dict(o.split("=", 1) for o in options.xla))
                }
            else:
                answer = {"step": trainer.step, "product": trainer.product}[command]()
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            answer = {"out_of_memory": True}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
