"""A decoder in one file of plain JAX, trained on a text and sampled: copy this file and edit it.

    python examples/one_page.py my.txt                    # trains, and prints a sample at the end
    python examples/one_page.py my.txt --out runs/page    # the same line again continues

RMSNorm, rotary positions, grouped-query attention and SwiGLU (arXiv:1910.07467, 2104.09864,
2305.13245, 2002.05202). A test holds logits, loss and gradients equal to those of the library.
Legend: B batch, T queries, S keys, N heads, K key-value heads, H head width, D width, V vocabulary.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxformer as jf

CONFIG = jf.ModelConfig(
    vocab_size=256, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=128, max_length=64
)
ROWS = 16  # of a batch; each has max_length tokens, and a token is a byte
OPTIMIZER = optax.adamw(3e-3)
TEMPERATURE = 0.8  # of the sample: 1 draws as the model predicts, less prefers likely bytes


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + CONFIG.norm_eps) * scale


def rope(x: jax.Array) -> jax.Array:
    """[B, T, N, H]: pair (i, i + H/2) of the token at position t turns by t theta^(-2i/H)."""
    half = x.shape[-1] // 2
    frequencies = CONFIG.rope.theta ** (-jnp.arange(half) / half)  # [H/2]
    angle = jnp.arange(x.shape[1])[:, None, None] * frequencies  # [T, 1, H/2]
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(params: Any, x: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the token itself and those before it: [B, T, D]."""
    q = rope(jnp.einsum("BTD,DNH->BTNH", x, params["q"]))
    k = rope(jnp.einsum("BSD,DKH->BSKH", x, params["k"]))
    v = jnp.einsum("BSD,DKH->BSKH", x, params["v"])
    group = q.shape[2] // k.shape[2]  # query heads that share a key-value head
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)  # [B, S, N, H]
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))  # [T, S]
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    heads = jnp.einsum("BNTS,BSNH->BTNH", weights, v)
    return jnp.einsum("BTNH,NHD->BTD", heads, params["out"])


def feed_forward(params: Any, x: jax.Array) -> jax.Array:
    """(silu(x gate) * (x up)) down: [B, T, D]."""
    return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]


def forward(params: Any, tokens: jax.Array) -> jax.Array:
    """Logits: [B, T] int -> [B, T, V]."""

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        x = x + attention(layer["attention"], rms_norm(layer["attention_norm"]["scale"], x))
        return x + feed_forward(layer["ffn"], rms_norm(layer["ffn_norm"]["scale"], x)), None

    x = params["embed"]["tokens"][tokens]  # [B, T, D]
    x, _ = jax.lax.scan(block, x, params["blocks"])  # the layers are stacked on axis 0
    return rms_norm(params["final_norm"]["scale"], x) @ params["head"]["weight"].T


def loss(params: Any, batch: Any, key: jax.Array | None) -> dict[str, Any]:
    """The cross-entropy of the next token in nats, as a sum and the number of tokens in it."""
    logits = forward(params, batch["tokens"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])  # [B, T]
    return {"loss": (nats.sum(), nats.size)}


@jax.jit
def next_token(params: Any, window: jax.Array, key: jax.Array) -> jax.Array:
    """A token drawn after those of a window: [T] int -> [] int."""
    logits = forward(params, window[None])[0, -1]  # [V]
    return jax.random.categorical(key, logits / TEMPERATURE)


class Batches:
    """`batches[k]` is the batch of step k, so that nothing about the data has to be saved."""

    def __init__(self, text: np.ndarray) -> None:
        self.text = text

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        starts = np.random.default_rng(step).integers(0, len(self.text) - CONFIG.max_length, ROWS)
        rows = np.stack([self.text[i : i + CONFIG.max_length + 1] for i in starts]).astype(np.int32)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}


def read(file: str) -> list[np.ndarray]:
    """The bytes of a text as nine tenths to train on and one that is held out."""
    try:
        text = np.frombuffer(Path(file).read_bytes(), np.uint8)
    except OSError as error:
        raise jf.ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    least = 10 * (CONFIG.max_length + 1)  # so that a tenth has a row and its last target
    if len(text) < least:
        raise jf.ConfigError(f"{file} has {len(text)} bytes, and training needs {least} or more.")
    return np.split(text, [len(text) * 9 // 10])


def show(step: int, state: jf.TrainState, metrics: Any) -> None:
    name = "val_loss" if "val_loss" in metrics else "loss"  # val_loss: of the text held out
    if step % 20 == 0 or name == "val_loss":
        print(f"step {step}: {name} {float(metrics[name]):.3f} nats a byte", flush=True)


def main(file: str = __file__, steps: int = 500, out: str | None = None) -> jf.TrainState:
    """Trains on the first nine tenths of a text, and prints how the model goes on from there."""
    if steps < 1:
        raise jf.ConfigError(f"--steps is {steps}, and must be 1 or more.")
    text, held_out = read(file)
    state = jf.fit(
        jf.make_step(loss, OPTIMIZER),
        jf.init_state(jf.specs(CONFIG), OPTIMIZER),
        Batches(text),
        steps=steps,
        evaluate=jf.make_evaluate(loss, [Batches(held_out)[k] for k in range(8)]),
        evaluate_every=100,
        checkpoints=jf.Checkpoints(out, every=100, run={"file": file}) if out else None,
        hooks=[show],
    )
    tokens = text[-CONFIG.max_length :].astype(np.int32)
    for key in jax.random.split(jax.random.key(1), 500):
        tokens = np.append(tokens, next_token(state.params, tokens[-CONFIG.max_length :], key))
    print("sample:", bytes(tokens[CONFIG.max_length :].tolist()).decode(errors="backslashreplace"))
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a decoder on a text and prints a sample.")
    parser.add_argument("file", nargs="?", default=__file__, help="a text; without it, this file")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", help="a directory for checkpoints; the same line continues them")
    try:
        main(**vars(parser.parse_args()))
    except jf.ConfigError as error:
        parser.exit(2, f"error: {error}\n")
