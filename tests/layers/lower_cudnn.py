"""Run on eight forced host devices: lowers the step with cuDNN attention for CUDA, and computes
attention with plain mathematics in place of cuDNN on each mesh. Prints JSON for test_lowering.py.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import Mesh

from jaxformer.arrays import sharding

# The devices are of this machine and the program is for others.
sharding.platform = lambda mesh=None: "gpu"
# JAX asks the GPU that is attached, and cuDNN, what they can do.
cudnn.check_cudnn_version = lambda: 91000
cudnn.check_compute_capability = lambda capability: True
cudnn.is_cuda_compute_capability_equal = lambda capability: capability == "9.0"

from test_lowering import FAMILIES, SIZES, a_run  # noqa: E402

from jaxformer.arrays.mesh import make_mesh  # noqa: E402
from jaxformer.layers.dot_product import plain  # noqa: E402
from jaxformer.layers.kernels import KERNELS, attend  # noqa: E402
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of  # noqa: E402
from jaxformer.runs import resolve  # noqa: E402
from jaxformer.training.state import on_mesh  # noqa: E402

resolve.name_of = lambda kind: "h100"


def mesh_named(name: str) -> Mesh:
    data, fsdp, _, context, tensor = sizes = SIZES[name]
    devices = jax.devices()[: math.prod(sizes)]
    return make_mesh(data, fsdp, tensor, context=context, devices=devices)


def lowered_calls() -> dict[str, list[str]]:
    """The calls of cuDNN in the steps of all families and biases, on one mesh after the other."""
    report = {}
    # Rows of a decoder with segments are packed, of others padded.
    cases = [
        case
        for case in itertools.product(FAMILIES, ["rope", "t5", "alibi"], [False, True])
        if case[0] != "decoder" or case[1] == "rope" or not case[2]
    ]
    for (family, positions, packed), name in zip(cases, itertools.cycle(SIZES)):
        mesh = mesh_named(name)
        run = a_run(family, "cudnn", positions=positions)
        resolved, batch = resolve.resolve_without_data(run, mesh, packed)
        step, state = resolved.step, resolved.target
        text = step.lower(state, batch, lowering_platforms=("cuda",)).as_text()
        calls = re.findall(r"@__cudnn\$fmha(ScaleBias)?Softmax(Backward)?", text)
        report[f"{family}, {positions}, packed {packed}, {name}"] = sorted(map("".join, calls))
    return report


def error_of(name: str, biased_rows: int) -> float:
    """The largest relative error of the output and the gradients of q, k, v and a bias of so many
    rows, where each device of a mesh computes its rows and heads by plain attention."""
    rng = np.random.default_rng(0)
    shapes = [(8, 32, 4, 16), (8, 32, 2, 16), (8, 32, 2, 16), (biased_rows, 4, 32, 32)]
    inputs = [jnp.array(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    ids = jnp.array(np.arange(32) < rng.integers(8, 33, (8, 1)), jnp.int32)
    layout = layout_of(ids, None, ids)

    def outputs(kernel, inputs):
        def attention(q, k, v, bias):
            mask = AttentionMask(layout, layout, scoring=Scoring(bias=bias), max_segments=1)
            return attend(kernel, q, k, v, mask)

        out, back = jax.vjp(attention, *inputs)
        return out, *back(jnp.cos(out))

    expected = jax.jit(functools.partial(outputs, "xla"))(inputs)
    mesh = mesh_named(name)
    with on_mesh(mesh):
        run = jax.jit(functools.partial(outputs, "cudnn"))
        assert ("shard_map" in str(run.trace(inputs).jaxpr)) == (mesh.size > 1)
        computed = run(inputs)
    pairs = zip(jax.device_get(computed), jax.device_get(expected), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def main() -> None:
    report: dict[str, Any] = {"calls": lowered_calls()}
    KERNELS["cudnn"] = dataclasses.replace(KERNELS["cudnn"], run=plain)
    report["errors"] = {
        f"{name}, a bias of {rows} rows": error_of(name, rows) for name in SIZES for rows in (1, 8)
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
