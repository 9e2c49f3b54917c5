"""Run on eight forced host devices: lowers the step with cuDNN attention for CUDA. Prints JSON for
test_lowering.py."""

import itertools
import json
import math
import re
import sys

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxformer.arrays import sharding

# The devices are of this machine and the program is for others.
sharding.platform = lambda mesh=None: "gpu"
# JAX asks the GPU that is attached, and cuDNN, what they can do.
cudnn.check_cudnn_version = lambda: 91000
cudnn.check_compute_capability = lambda capability: True
cudnn.is_cuda_compute_capability_equal = lambda capability: capability == "9.0"

from test_lowering import FAMILIES, SIZES, a_run  # noqa: E402

from jaxformer.arrays.mesh import make_mesh  # noqa: E402
from jaxformer.layers.kernels import HOPPER  # noqa: E402
from jaxformer.runs import resolve  # noqa: E402

resolve._capability = lambda mesh: HOPPER


def main() -> None:
    report = {}
    for family, packed, name in itertools.product(FAMILIES, [False, True], SIZES):
        data, fsdp, context, tensor = sizes = SIZES[name]
        devices = jax.devices()[: math.prod(sizes)]
        mesh = make_mesh(data, fsdp, tensor, context=context, devices=devices)
        run = a_run(family, "cudnn")
        resolved, batch = resolve.resolve_without_data(run, mesh, packed)
        step, state = resolved.step, resolved.target
        text = step.lower(state, batch, lowering_platforms=("cuda",)).as_text()
        report[f"{family}, packed {packed}, {name}"] = len(re.findall(r"@__cudnn\$fmha", text))
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
