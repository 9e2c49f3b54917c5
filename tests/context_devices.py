"""Run on eight forced host devices: what mesh.context divides, beside one device. Prints JSON for
test_context.py. With the argument "slow": those of the slow tests."""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from eight_devices import BERT, DELTA, LATENT, MAMBA2, SEQUENCE_TO_SEQUENCE, steps
from learning_steps import a_run

import jaxformer as jf
from jaxformer.arrays.mesh import make_mesh
from jaxformer.config.settings import with_settings
from jaxformer.layers import exchange, kernels, ring
from jaxformer.layers.block import empty_cache
from jaxformer.layers.dot_product import plain
from jaxformer.layers.masks import AttentionMask, Scoring, layout_of

MESHES = {
    "context 8": dict(data=1, context=8),
    "context 4": dict(data=2, context=4),
    "context 2": dict(data=1, fsdp=2, tensor=2, context=2),
}
RING = {"attention.kernel": "ring"}
# Changes to the model "llama" of shapes.py, which has four query heads and two key heads: eight
# devices do not divide them, and four do. Beside them the meshes, with changes for these.
CASES = {"rope": ({}, [("context 2", {}), ("context 8", RING)])}
SLOW_CASES = {
    "dropout, alibi": ({"dropout": 0.1, "positions": "alibi"}, [("context 8", {})]),
    # Weights are dropped in blocks where a device has all tokens of a row.
    "blocked dropout, no positions": (
        {"dropout": 0.1, "attention.kernel": "blocked", "positions": "none"},
        [("context 4", {})],
    ),
    "encoder, learned": (BERT | {"positions": "learned"}, [("context 2", {})]),
    "encoder-decoder, t5": (SEQUENCE_TO_SEQUENCE, [("context 8", {})]),
    "encoder-decoder, rope": (SEQUENCE_TO_SEQUENCE | {"positions": "rope"}, [("context 2", RING)]),
    "dynamic": (
        {"rope.scaling": "dynamic", "rope.factor": 2.0, "rope.original_length": 8}
        | {"layer_loop": "scan", "n_layers": 3},
        [("context 8", RING)],
    ),
    "tiles": ({"positions": "sinusoidal"}, [("context 8", {})]),
    "latent": (LATENT, [("context 2", {}), ("context 8", RING)]),
    "delta": (DELTA | {"recurrent.decay": "channel"}, [("context 2", {}), ("context 8", RING)]),
    "mamba2": (MAMBA2, [("context 4", {})]),
}


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention: its numbers of queries, keys, query heads and key heads, and its mask."""

    queries: int = 32
    keys: int = 32
    heads: int = 4
    kv_heads: int = 2
    value_width: int = 8
    causal: bool = True
    window: int = 0
    packed: bool = False
    soft_cap: float = 0.0
    sinks: bool = False
    relative: bool = True


ATTENTIONS = {
    "window, packed, capped, sinks": Attention(
        window=5, packed=True, soft_cap=3.0, sinks=True, value_width=6
    ),
    "keys that do not divide": Attention(keys=21, causal=False, relative=False),
}
SLOW_ATTENTIONS = {
    "causal": Attention(),
    "packed cross": Attention(keys=48, kv_heads=4, causal=False, packed=True, relative=False),
    "window to both sides": Attention(heads=6, kv_heads=3, causal=False, window=4),
}


def gradients(kernel, case):
    """The output of a kernel, and the gradients of q, k, v and the sinks."""
    rng = np.random.default_rng(0)
    shapes = [
        (2, case.queries, case.heads, 8),
        (2, case.keys, case.kv_heads, 8),
        (2, case.keys, case.kv_heads, case.value_width),
        (2, case.queries, case.heads, case.value_width),
    ]
    q, k, v, slope = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    sinks = rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None

    def layout(length):
        text = np.arange(length)
        ids = np.where(text < length // 3, 1, np.where(text < length * 5 // 6, 2, 0))
        segments = jnp.asarray(np.tile(ids, (2, 1)).astype(np.int32)) if case.packed else None
        return layout_of(jnp.zeros((2, length), jnp.int32), None, segments)

    def run(q, k, v, sinks):
        scoring = Scoring(0.0, case.soft_cap, None, sinks)
        sides = layout(case.queries), layout(case.keys)
        mask = AttentionMask(*sides, case.causal, case.window, scoring, case.relative)
        return kernel(q, k, v, mask)

    @jax.jit
    def both(*arrays):
        out, back = jax.vjp(run, *arrays)
        return out, back(slope)

    return both(q, k, v, sinks)


def attentions(cases, label):
    """The largest error of each kernel on a mesh."""
    report = {}
    for name, case in cases.items():
        expected = gradients(plain, case)
        with jax.set_mesh(make_mesh(**MESHES[label])):
            for kernel in ("ring", "blocked", "xla"):
                computed = gradients(lambda *a, k=kernel: kernels.attend(k, *a), case)
                errors = jax.tree.map(
                    lambda a, b: float(np.abs(np.asarray(a) - b).max()), computed, expected
                )
                report[f"{name}, {kernel}"] = max(jax.tree.leaves(errors))
    return report


def splash():
    """A step in which the devices divide no heads, so that each gathers keys: packed, windowed, and
    by its lowered text balanced."""
    changes = {"n_heads": 3, "n_kv_heads": 1, "head_dim": 8, "window": 200, "n_layers": 1}
    run = a_run("llama", 4, vocab_size=64, max_length=512, **changes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (4, 512), dtype=np.int32)
    ids = np.where(np.arange(512) < 150, 1, np.where(np.arange(512) < 450, 2, 0))
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, 1),
        "weights": np.ones(tokens.shape, np.float32),
        "segment_ids": np.tile(ids, (4, 1)).astype(np.int32),
    }
    params = jf.init(run.model, jax.random.key(0))

    def value(kernel):
        config = with_settings(run.model, {"attention.kernel": kernel})

        def loss(params):
            total, weight = jf.loss_of("causal", config)(params, batch, None)["loss"]
            return total / weight

        return jax.jit(jax.value_and_grad(loss))

    expected = value("xla")(params)
    with jax.set_mesh(make_mesh(4, context=2)):
        computed = value("tpu")(params)
        text = value("tpu").lower(params).as_text()
    errors = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), computed, expected)
    return {"error": max(jax.tree.leaves(errors)), "balanced": "collective_permute" in text}


def decoding(**changes):
    """Greedy tokens of one device and of a mesh whose cache is divided, and its share of it."""
    config = dataclasses.replace(a_run("llama", vocab_size=64, **changes).model, max_length=64)
    params, prompt = jf.init(config, jax.random.key(3)), np.arange(24).reshape(2, 12) % 64

    def generated():
        out = jf.generate(params, config, prompt.astype(np.int32), max_new_tokens=20, temperature=0)
        return np.asarray(out).tolist()

    one = generated()
    with jax.set_mesh(make_mesh(context=8)):
        cache = jax.jit(lambda: empty_cache(config, 2, 32, jnp.float32))()
        several = generated()
        entries = jax.tree.leaves(cache.layers)[0]
        share = entries.size // entries.addressable_shards[0].data.size
    return {"one": one, "several": several, "share": share}


def recurrences(labels, model=DELTA, length=32):
    """The largest error on each mesh of a gradient through a recurrence and attention, where rows
    have several texts and padding: they begin on another device than they end."""
    config = a_run("llama", vocab_size=64, **model).model
    params = jf.init(config, jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 64, (8, length), dtype=np.int32)
    index = np.arange(length)
    ids = np.where(index < 2, 0, np.where(index < 9, 1, np.where(index < 27, 2, 3)))
    segments = np.tile(ids, (8, 1)).astype(np.int32)
    segments[1] = 1
    segments[2, -2:] = 0

    def gradient():
        def value(params):
            logits = jf.forward(params, config, tokens, segment_ids=segments)
            return jnp.square(jnp.where(segments[..., None] != 0, logits, 0)).mean()

        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(value))(params))

    expected = gradient()
    report = {}
    for label in labels:
        with jax.set_mesh(make_mesh(**MESHES[label])):
            found = gradient()
        errors = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, expected)
        report[label] = float(max(jax.tree.leaves(errors)))
    return report


def arrangement():
    """Whether `balanced` is the order of `balanced_index`, and `in_order` its inverse."""
    x = np.arange(2 * 48 * 3).reshape(2, 48, 3)
    equal = []
    for devices in (2, 4, 8):
        with jax.set_mesh(make_mesh(8 // devices, context=devices)):
            moved = jax.jit(exchange.balanced)(x)
            back = jax.jit(exchange.in_order)(moved)
        index = exchange.balanced_index(48, devices)
        equal += [np.array_equal(moved, x[:, index]), np.array_equal(back, x)]
    return equal


def main() -> None:
    ring.LONGEST_BLOCK = 2
    slow = sys.argv[1:] == ["slow"]
    runs = {
        name: (a_run("llama", 16, **({"vocab_size": 64, "n_layers": 1} | changes)), places)
        for name, (changes, places) in (SLOW_CASES if slow else CASES).items()
    }
    report = {"steps": steps(runs, MESHES)}
    if slow:
        report["attentions"] = attentions(SLOW_ATTENTIONS, "context 8")
        report["splash"] = splash()
        report["decoding"] = decoding(**LATENT)
        report["recurrences"] = recurrences(["context 4", "context 8"])
        # A device has two tokens, and a convolution reads three before each.
        report["recurrences"]["short"] = recurrences(["context 8"], length=16)["context 8"]
        report["recurrences"]["mamba2"] = recurrences(["context 4"], MAMBA2)["context 4"]
    else:
        report["attentions"] = attentions(ATTENTIONS, "context 2")
        report["arrangement"] = arrangement()
        report["decoding"] = decoding()
        report["recurrences"] = recurrences(["context 2"])
        report["recurrences"]["mamba2"] = recurrences(["context 2"], MAMBA2)["context 2"]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
