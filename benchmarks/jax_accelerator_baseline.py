"""Our side of train_gpu.py and train_tpu.py: a worker that trains workloads by the library's own
step, or checks the device.

Each line read is a command, each line written a JSON object: `resume`, `logits`, `decoding`, `check
NAME FSDP`, `load NAME BATCH FSDP` (sequences a device), then `compile [NAME=VALUE ...]`, `step` and
`product`, and `quit`. Where memory ends the answer says so under "out_of_memory".
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import jax
import jaxlib
from device_checks import decoding_beside_the_forward_pass, logits_beside_the_cpu, resumes
from jax_baseline import Trainer
from steps import kernels_hold
from workloads import ACCELERATOR_WORKLOADS, shrunk, with_sizes

import jaxformer as jf
from jaxformer.arrays.out_of_memory import is_out_of_memory
from jaxformer.config.run import RunConfig


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

    def logits(self) -> dict[str, Any]:
        return {"logits": logits_beside_the_cpu(self.smoke)}

    def decoding(self) -> dict[str, Any]:
        return {"decoding": decoding_beside_the_forward_pass(self.smoke)}

    def check(self, name: str, fsdp: str) -> dict[str, Any]:
        try:
            return {"kernel": kernels_hold(self.run_of(name, 0, int(fsdp)))}
        except RuntimeError as error:  # wrong, or refused by the compiler
            if is_out_of_memory(error) or isinstance(error, jf.OutOfMemory):
                raise
            return {"failed": f"{error}"[:2000]}

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
