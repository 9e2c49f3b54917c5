"""A JAX peer of the comparison: a worker that trains a GPT-2 of another library a step at a time,
as its users write that.

It needs JAX, NumPy and the peer only, so it can run under another Python than the one that has
jaxformer. Where the peer is missing, its first line says how it is installed.
"""

import argparse
import importlib
import importlib.metadata
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import numpy as np
from serving import serve

try:
    import jax
    import jax.numpy as jnp
    import optax
except ImportError:  # a Python without JAX has no peer either
    serve({"missing": "jax and optax are not installed: pip install jax optax"}, {})
    sys.exit()

BETAS, EPSILON, DECAY, MOST_NORM = (0.9, 0.95), 1e-8, 0.1, 1.0
Step = Callable[[Any, Any], Any]  # tokens, targets [B, T] -> the loss before the update


def adamw(rate: float) -> optax.GradientTransformation:
    """AdamW that decays matrices only, of gradients clipped to a norm of 1."""

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(MOST_NORM),
        optax.adamw(rate, *BETAS, EPSILON, weight_decay=DECAY, mask=is_matrix),
    )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def nanodo_step(options: argparse.Namespace) -> Step:
    """nanodo's model: GPT-2's without biases, with the approximate GELU."""
    nanodo = importlib.import_module("nanodo.model")
    sizes = dict(D=options.d_model, H=options.heads, L=options.length)
    sizes |= dict(N=options.layers, V=options.vocab, F=options.d_ff)
    model = nanodo.TransformerDo(nanodo.DoConfig(**sizes, fsdp_enabled=False))
    optimizer = adamw(options.rate)
    tokens = jnp.zeros((1, options.length), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    state = optimizer.init(params)

    def train(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            return cross_entropy(model.apply(params, tokens), targets)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(train, donate_argnums=(0, 1))

    def step(tokens: jax.Array, targets: jax.Array) -> jax.Array:
        nonlocal params, state
        params, state, loss = jitted(params, state, tokens, targets)
        return loss

    return step


def nnx_step(options: argparse.Namespace) -> Step:
    """GPT-2 of the layers of flax.nnx, as its guides write a Transformer."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            width = options.d_model
            self.attention_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                options.heads, width, decode=False, use_bias=True, rngs=rngs
            )
            self.ffn_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
            self.up = nnx.Linear(width, options.d_ff, rngs=rngs)
            self.down = nnx.Linear(options.d_ff, width, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.attention_norm(x), mask=mask)
            return x + self.down(jax.nn.gelu(self.up(self.ffn_norm(x)), approximate=False))

    class Decoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            normal = nnx.initializers.normal(0.02)
            width = options.d_model
            self.tokens = nnx.Embed(options.vocab, width, embedding_init=normal, rngs=rngs)
            self.positions = nnx.Embed(options.length, width, embedding_init=normal, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(options.layers)])
            self.final_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.tokens.attend(self.final_norm(x))

    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, adamw(options.rate), wrt=nnx.Param)

    @nnx.jit
    def train(model: Any, optimizer: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        def loss_of(model: Any) -> jax.Array:
            return cross_entropy(model(tokens), targets)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    return lambda tokens, targets: train(model, optimizer, tokens, targets)


def keras_step(options: argparse.Namespace) -> Step:
    """KerasHub's GPT-2, by `train_on_batch`."""
    keras, keras_hub = map(importlib.import_module, ("keras", "keras_hub"))
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=options.vocab,
        num_layers=options.layers,
        num_heads=options.heads,
        hidden_dim=options.d_model,
        intermediate_dim=options.d_ff,
        dropout=0.0,
        max_sequence_length=options.length,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    optimizer = keras.optimizers.AdamW(
        options.rate, DECAY, *BETAS, epsilon=EPSILON, global_clipnorm=MOST_NORM
    )
    optimizer.exclude_from_weight_decay(
        var_list=[variable for variable in model.trainable_variables if len(variable.shape) < 2]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=None, jit_compile=True)

    def step(tokens: Any, targets: Any) -> Any:
        inputs = {"token_ids": tokens, "padding_mask": jnp.ones_like(tokens)}
        return model.train_on_batch(inputs, targets, return_dict=True)["loss"]

    return step


# For each peer its step, the packages whose versions count, and how it is installed.
PEERS = {
    "nanodo": (
        nanodo_step,
        ("nanodo", "flax"),
        "pip install flax && pip install --no-deps git+https://github.com/google-deepmind/nanodo",
    ),
    "nnx": (nnx_step, ("flax",), "pip install flax"),
    "keras_hub": (keras_step, ("keras", "keras-hub"), "pip install keras-hub"),
}


class Trainer:
    """Trains on one batch of random tokens, drawn as torch_baseline.py draws them."""

    def __init__(self, step: Step, options: argparse.Namespace) -> None:
        shape = (options.batch, options.length + 1)
        text = np.random.default_rng(0).integers(options.vocab, size=shape)
        self.tokens, self.targets = jnp.asarray(text[:, :-1]), jnp.asarray(text[:, 1:])
        self.advance = step

    def step(self) -> dict[str, float]:
        begin, cpu_begin = time.perf_counter(), time.process_time()
        loss = float(jax.block_until_ready(self.advance(self.tokens, self.targets)))
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        return times | {"loss": loss, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    for name in ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab", "length", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--style", choices=("gpt2",), default="gpt2")
    parser.add_argument("--rate", type=float, required=True, help="learning rate")
    options = parser.parse_args()
    make_step, packages, installation = PEERS[options.peer]
    try:
        step = make_step(options)
    except ImportError as error:
        serve({"missing": f"not installed ({error}): {installation}"}, {})
        return
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *packages)}
    serve({"versions": versions}, {"step": Trainer(step, options).step})


if __name__ == "__main__":
    main()
