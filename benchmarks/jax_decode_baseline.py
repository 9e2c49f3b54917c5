"""Our side of the decoding comparison: a worker around `jf.generate`, greedy."""

import argparse
import time
from typing import Any

from jaxformer.cli import keep_memory

keep_memory()

import jax  # noqa: E402  (what comes before must come before JAX)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_baseline import save_arrays  # noqa: E402
from serving import serve  # noqa: E402
from workloads import DECODED_SHAPES, SMOKE_DECODED  # noqa: E402

import jaxformer as jf  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", required=True, help="token numbers, comma-separated")
    parser.add_argument("--save-weights", required=True, help="write the values to this .npz")
    parser.add_argument("--shape", default="gpt2_124m", choices=DECODED_SHAPES)
    parser.add_argument("--smoke", action="store_true", help="a small model")
    options = parser.parse_args()
    config = SMOKE_DECODED if options.smoke else DECODED_SHAPES[options.shape]
    params = jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))
    save_arrays(options.save_weights, params)
    prompt = np.array([[int(token) for token in options.prompt.split(",")]], np.int32)
    big = jnp.ones(2**26)
    total = jax.jit(jnp.sum)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def generate(number: str) -> dict[str, Any]:
        begin = time.perf_counter()
        made = np.asarray(jf.generate(params, config, prompt, int(number), temperature=0.0))
        return {"seconds": time.perf_counter() - begin, "tokens": made[0].tolist()}

    kinds: dict[str, Any] = {"float32": params}

    def stored(kind: str, rows: str, number: str) -> dict[str, Any]:
        """Seconds of one and of `number` new tokens in each of equal rows, with weights of a kind,
        which a call before has prepared."""
        if kind not in kinds:
            kinds[kind] = jf.quantize(params, kind)
        batch = np.repeat(prompt, int(rows), axis=0)

        def seconds(count: int) -> float:
            begin = time.perf_counter()
            np.asarray(jf.generate(kinds[kind], config, batch, count, temperature=0.0))
            return time.perf_counter() - begin

        seconds(1)
        return {"first_token_seconds": seconds(1), "seconds": seconds(int(number))}

    def read() -> dict[str, Any]:
        begin = time.perf_counter()
        total(big).block_until_ready()
        return {"bytes_per_second": big.nbytes / (time.perf_counter() - begin)}

    about = {"versions": {"jax": jax.__version__}, "parameter_bytes": size}
    serve(about, {"generate": generate, "read": read, "stored": stored})


if __name__ == "__main__":
    main()
