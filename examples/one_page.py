"""A decoder on one page of plain JAX, with the parameters of `jf.init`: its logits, loss and
gradients are the library's.

RMSNorm (arXiv:1910.07467), rotary positions (arXiv:2104.09864), grouped-query attention
(arXiv:2305.13245) and SwiGLU (arXiv:2002.05202), pre-norm: what `jf.forward` computes for the
config below. A test holds the two equal.

    python examples/one_page.py         # trains it for some steps and prints the loss

Legend: B batch, T query length, S key length, N heads, K key-value heads, H head width, D width,
F feed-forward, V vocabulary.
"""

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


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + CONFIG.norm_eps) * scale


def rope(x: jax.Array) -> jax.Array:
    """[B, T, N, H]: pair (i, i + H/2) of the token at position t turns by the angle t
    theta^(-2i/H)."""
    half = x.shape[-1] // 2
    frequencies = CONFIG.rope_theta ** (-jnp.arange(half) / half)  # [H/2]
    angle = jnp.arange(x.shape[1])[:, None, None] * frequencies  # [T, 1, H/2]
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(params: Any, x: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v, where each token sees itself and those before it: [B, T, D] ->
    [B, T, D]."""
    q = rope(jnp.einsum("BTD,DNH->BTNH", x, params["q"]))
    k = rope(jnp.einsum("BSD,DKH->BSKH", x, params["k"]))
    v = jnp.einsum("BSD,DKH->BSKH", x, params["v"])
    group = q.shape[2] // k.shape[2]  # query heads that share a key-value head
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)  # [B, S, N, H]
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(
        jnp.ones(scores.shape[-2:], bool)
    )  # [T, S]: a query sees the keys up to its own position
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    heads = jnp.einsum("BNTS,BSNH->BTNH", weights, v)
    return jnp.einsum("BTNH,NHD->BTD", heads, params["out"])


def feed_forward(params: Any, x: jax.Array) -> jax.Array:
    """(silu(x gate) * (x up)) down: [B, T, D] -> [B, T, D]."""
    return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]


def forward(params: Any, tokens: jax.Array) -> jax.Array:
    """Logits: [B, T] int -> [B, T, V]."""
    x = params["embed"]["tokens"][tokens]  # [B, T, D]
    for i in range(CONFIG.n_layers):
        layer = jax.tree.map(
            lambda stacked, i=i: stacked[i], params["blocks"]
        )  # the layers are stacked on axis 0
        x = x + attention(layer["attention"], rms_norm(layer["attention_norm"]["scale"], x))
        x = x + feed_forward(layer["ffn"], rms_norm(layer["ffn_norm"]["scale"], x))
    return rms_norm(params["final_norm"]["scale"], x) @ params["head"]["weight"].T


def loss(params: Any, batch: Any, key: jax.Array | None) -> dict[str, Any]:
    """The cross-entropy of the next token, as a sum over tokens and their weight."""
    logits = forward(params, batch["tokens"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])  # [B, T]
    return {"loss": (jnp.sum(nats * batch["weights"]), jnp.sum(batch["weights"]))}


class Batches:
    """`batches[k]` is the batch of step k: rows of bytes from this very file."""

    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)

    def __getitem__(self, step: int) -> dict[str, Any]:
        starts = np.random.default_rng(step).integers(0, len(self.text) - 65, 8)
        rows = np.stack([self.text[start : start + 65] for start in starts])
        return {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "weights": np.ones((8, 64), np.float32),
        }


def main(steps: int = 100) -> float:
    """Trains and returns the last loss."""
    optimizer, losses = optax.adamw(3e-3), [0.0]

    def show(step: int, state: Any, metrics: Any) -> None:
        losses.append(float(metrics["loss"]))
        if step % 20 == 0:
            print(f"step {step}: {losses[-1]:.3f} nats a byte", flush=True)

    state = jf.init_state(jf.init(CONFIG, jax.random.key(0)), optimizer)
    jf.fit(jf.make_step(loss, optimizer), state, Batches(), steps=steps, hooks=[show])
    return losses[-1]


if __name__ == "__main__":
    main()
