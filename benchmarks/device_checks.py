"""What a device has to get right before anything is timed on it: a run that is continued, a forward
pass beside that of the CPU, and decoding beside the forward pass."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from workloads import SMOKE_FIELDS, TINY_LLAMA, words_file

import jaxformer as jf

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
STEPS, BREAK = 10, 6  # of the run that is stopped and continued
# A model whose heads and widths kernels of a GPU take, and that a CPU computes in a second.
CHECKED = replace(
    TINY_LLAMA, n_layers=4, d_model=512, n_heads=8, d_ff=1408, vocab_size=4096, max_length=256
)
SMOKE_CHECKED = replace(
    CHECKED,
    n_layers=2,
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    d_ff=128,
    vocab_size=512,
    max_length=64,
)
KINDS = ("bfloat16", "int8", "nf4")
# The largest error of logits in float32 beside those of the CPU, as a share of their deviation, and
# by how much of it the logit of a token that decoding took may lie below the highest one of a
# forward pass in bfloat16.
ALLOWED = {"float32": 1e-3, "decoding": 0.1}


def resumes(smoke: bool, settings: dict[str, object] | None = None) -> dict[str, Any]:
    """Trains on the standard library's source twice, once stopped half-way and continued, with
    further settings of the run; how far the two are apart."""
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
        fields |= settings or {}
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


def logits_beside_the_cpu(smoke: bool) -> dict[str, Any]:
    """The largest difference of logits in float32 from those that the CPU of this machine computes
    with the same weights, as a share of their standard deviation."""
    config = replace(SMOKE_CHECKED if smoke else CHECKED, dtype="float32")
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, config.max_length))
    forward = jax.jit(jf.forward, static_argnums=1)
    found = []
    with jax.default_matmul_precision("highest"):
        params = jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))
        for device in (jax.devices()[0], jax.devices("cpu")[0]):
            placed = jax.device_put((params, tokens), device)
            found.append(np.asarray(forward(placed[0], config, placed[1])))
    error = float(np.max(np.abs(found[0] - found[1])) / np.std(found[1]))
    return {"error": error, "right": error <= ALLOWED["float32"]}


def decoding_beside_the_forward_pass(smoke: bool) -> dict[str, Any]:
    """For each kind of weights in bfloat16: by how much the logits of the tokens that greedy
    decoding took lie below the highest ones of a forward pass over them, as a share of the
    standard deviation of logits."""
    config = replace(SMOKE_CHECKED if smoke else CHECKED, dtype="bfloat16")
    length = min(64, config.max_length // 2)  # of the prompt, and of what is written
    prompt = np.random.default_rng(0).integers(config.vocab_size, size=(2, length)).astype(np.int32)
    master = jax.jit(jf.init, static_argnums=0)(config, jax.random.key(0))
    found: dict[str, Any] = {}
    for kind in KINDS:
        params = master if kind == "bfloat16" else jf.quantize(master, kind)
        new = np.asarray(jf.generate(params, config, prompt, length, temperature=0.0))
        tokens = np.concatenate([prompt, new], axis=1)
        logits = jax.jit(jf.forward, static_argnums=1)(params, config, tokens).astype(jnp.float32)
        # The logits [rows, new, vocabulary] that the token after each position was taken from.
        of_new = np.asarray(logits)[:, prompt.shape[1] - 1 : -1]
        taken = np.take_along_axis(of_new, new[..., None], axis=-1)[..., 0]
        found[kind] = float(np.max(of_new.max(axis=-1) - taken) / np.std(of_new))
    return {"below": found, "right": max(found.values()) <= ALLOWED["decoding"]}
