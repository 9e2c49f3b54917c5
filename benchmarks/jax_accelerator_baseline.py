"""Our side of train_gpu.py and train_tpu.py: a worker that trains workloads by the library's own
step, or checks the device.

Each line read is a command, each line written a JSON object: `resume`, `check NAME FSDP`, `load
NAME BATCH FSDP` (sequences a device), then `compile [NAME=VALUE ...]`, `step` and `product`, and
`quit`. Where memory ends the answer says so under "out_of_memory".
"""

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
from workloads import ACCELERATOR_WORKLOADS, SMOKE_FIELDS, shrunk, with_sizes, words_file

import jaxformer as jf
from jaxformer.arrays.out_of_memory import is_out_of_memory
from jaxformer.config.run import RunConfig

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
            if not options or is_out_of_memory(error):
                raise
            trainer.advance = lowered.compile()
            return f"refused {options}: {str(error)[:200]}"
    return f"{options}" if options else "XLA's defaults"


def resumes(smoke: bool) -> dict[str, Any]:
    """Trains on the standard library's source twice, once stopped half-way and continued; how far
    the two are apart."""
    with tempfile.TemporaryDirectory(prefix="jaxformer-gpu-") as folder:
        fields: dict[str, object] = {
            "run.progress": "none",
            "run.sample_tokens": 0,
            "data.cache_dir": f"{folder}/data",
            "optimizer.warmup_steps": 2,
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


class Commands:
    """What the worker can be asked, by the first word of a line."""

    def __init__(self, smoke: bool) -> None:
        self.smoke = smoke
        self.trainer: Trainer | None = None

    def run_of(self, name: str, batch: int, fsdp: int) -> RunConfig:
        """A workload in bfloat16 on any device, as "auto" is on a GPU or TPU."""
        run = ACCELERATOR_WORKLOADS[name]
        run = shrunk(run) if self.smoke else run
        rows = (batch or run.train.batch_size) * jax.device_count()
        model = replace(run.model, dtype="bfloat16")
        return replace(with_sizes(run, rows, 1), model=model, mesh=replace(run.mesh, fsdp=fsdp))

    def resume(self) -> dict[str, Any]:
        return {"resume": resumes(self.smoke)}

    def check(self, name: str, fsdp: str) -> dict[str, Any]:
        return {"kernel": kernel_holds(self.run_of(name, 0, int(fsdp)))}

    def load(self, name: str, batch: str, fsdp: str) -> dict[str, Any]:
        self.trainer = None  # whose memory is needed
        self.trainer = Trainer(self.run_of(name, int(batch), int(fsdp)), "")
        return {"kernel": self.trainer.kernel}

    def compile(self, *xla: str) -> dict[str, Any]:
        return {"xla": compile_step(self.loaded, dict(text.split("=", 1) for text in xla))}

    def step(self) -> dict[str, Any]:
        return self.loaded.step()

    def product(self) -> dict[str, Any]:
        return self.loaded.product(256 if self.smoke else 0)

    @property
    def loaded(self) -> Trainer:
        assert self.trainer is not None, "load comes first"
        return self.trainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="the workloads shrunk")
    commands = Commands(parser.parse_args().smoke)
    device = jax.devices()[0]
    about: dict[str, Any] = {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "platform": device.platform,
        "versions": {
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "runtime": device.client.platform_version,
        },
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "quit":
            break
        try:
            answer = getattr(commands, command)(*arguments)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            answer = {"out_of_memory": str(error).splitlines()[0]}
        except jf.OutOfMemory as error:
            answer = {"out_of_memory": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
