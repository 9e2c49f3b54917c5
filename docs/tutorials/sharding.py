# %% [markdown]
# # Sharding: one step on eight devices
#
# A model that does not fit on one device, or that one device would train too slowly, is divided
# among several. This notebook divides one small decoder in four ways, shows where each piece of a
# parameter goes, reads from the compiled program what the devices send each other, and checks that
# the result is that of one device.
#
# | name | what is divided | source |
# |---|---|---|
# | data parallelism, `data` | the rows of a batch; every device has all parameters | |
# | fully sharded, `fsdp` | the rows, and the parameters with their moments | arXiv:1910.02054 |
# | tensor parallelism, `tensor` | heads, feed-forward width, vocabulary | arXiv:1909.08053 |
#
# With $\Psi$ parameters in float32, Adam keeps $4\Psi$ bytes of parameters and $8\Psi$ bytes of
# moments between two steps. On $N$ devices, ZeRO (stage 3, arXiv:1910.02054) leaves on each
#
# $$ M_\text{data} = 12\,\Psi \qquad\longrightarrow\qquad M_\text{fsdp} = \frac{12\,\Psi}{N} $$
#
# Megatron-LM (arXiv:1909.08053) divides the first matrix of a feed-forward layer by columns and the
# second by rows, so that the devices add up their outputs only once:
#
# $$ y = f(x A)\,B = \sum_{i=1}^{N} f(x A_i)\,B_i
#    \qquad A = [A_1, \dots, A_N], \quad B = [B_1; \dots; B_N] $$
#
# In the library a mesh is `jf.make_mesh(data, fsdp, tensor)`, `jf.init_state(..., mesh=mesh)` makes
# each parameter in its place, and `jf.make_step` is the same for all meshes. The test that holds
# what this notebook shows is
# `tests/arrays/test_sharding.py::test_a_sharded_step_equals_the_single_device_step_on_each_mesh`.

# %% [markdown]
# ## Eight devices on a CPU
#
# XLA can present a CPU as several devices. The partitioner is that of GPUs and TPUs, so placements
# and results are real; the time of a step means nothing here. The flag has to be set before JAX
# starts.

# %%
import math
import os
import re

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

from collections import Counter

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.patches import Rectangle

import jaxformer as jf
from jaxformer.arrays.mesh import place_batch

print(jax.devices())
assert len(jax.devices()) == 8

# %% [markdown]
# A decoder of two layers, with lengths that eight devices can divide, and four meshes. The last one
# combines all three: two replicas, parameters in two shards, and each layer in two halves.

# %%
config = jf.ModelConfig(
    vocab_size=512,
    d_model=64,
    n_layers=2,
    n_heads=8,
    d_ff=256,
    max_length=32,
    init="fan_in",
    layer_loop="unroll",  # so that the program below says what each layer does
)
meshes = {
    "data 8": jf.make_mesh(data=8),
    "fsdp 8": jf.make_mesh(fsdp=8),
    "tensor 8": jf.make_mesh(tensor=8),
    "2 x 2 x 2": jf.make_mesh(data=2, fsdp=2, tensor=2),
}
for name, mesh in meshes.items():
    print(f"{name:10}", dict(mesh.shape))

# %% [markdown]
# ## Where a parameter is
#
# The table of parameters, `jf.specs(config)`, names each axis of each array. One small table of
# rules in `jaxformer/arrays/sharding.py` maps these names to axes of the mesh: `embed` is divided
# over `fsdp`, and `vocab`, `heads`, `kv_heads` and `mlp` over `tensor`. No layer knows of any mesh.

# %%
table = jf.specs(config)
attention, ffn = table["blocks"]["attention"], table["blocks"]["ffn"]
for name, spec in {
    "embed.tokens": table["embed"]["tokens"],
    "blocks.attention.q": attention["q"],
    "blocks.ffn.up": ffn["up"],
    "blocks.ffn.down": ffn["down"],
}.items():
    print(f"{name:20} {spec.shape!s:18} {spec.axes}")

# %%
optimizer = optax.adamw(1e-3, eps=1e-5)
states = {name: jf.init_state(table, optimizer, mesh=mesh) for name, mesh in meshes.items()}
for name, state in states.items():
    print(f"The embedding table [vocab, embed] on the mesh {name}:")
    jax.debug.visualize_array_sharding(state.params["embed"]["tokens"])

# %% [markdown]
# On `data 8` every device holds the whole table. `fsdp 8` cuts its columns, and `tensor 8` its
# rows. On the last mesh each block is on two devices, because the axis `data` copies it.
#
# `visualize_array_sharding` draws arrays of one or two axes. The next figure draws the last two
# axes of three parameters on all meshes; the numbers in a block are the devices that hold it. The
# matrices of the feed-forward layer show Megatron's division: `tensor` divides `up` by columns, and
# `down` by rows.


# %%
def blocks_of(array):
    """The devices of each block of the last two axes: {((top, bottom), (left, right)): ids}."""
    found = {}
    for shard in array.addressable_shards:
        last = zip(shard.index[-2:], array.shape[-2:], strict=True)
        block = tuple(cut.indices(length)[:2] for cut, length in last)
        found.setdefault(block, []).append(shard.device.id)
    return found


def draw(ax, array):
    rows, columns = array.shape[-2:]
    for ((top, bottom), (left, right)), ids in blocks_of(array).items():
        corner, width, height = (left, top), right - left, bottom - top
        color = plt.get_cmap("Set3")(ids[0]) if len(ids) < 8 else "0.85"
        ax.add_patch(Rectangle(corner, width, height, facecolor=color, edgecolor="white"))
        text = "all" if len(ids) == 8 else ",".join(map(str, sorted(ids)))
        ax.text((left + right) / 2, (top + bottom) / 2, text, ha="center", va="center")
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[])


shown = {
    "embed.tokens\n[vocab, embed]": ("embed", "tokens"),
    "ffn.up\n[embed, mlp]": ("blocks", "ffn", "up"),
    "ffn.down\n[mlp, embed]": ("blocks", "ffn", "down"),
}
figure, axes = plt.subplots(len(shown), len(states), figsize=(9, 6), layout="constrained")
for i, (label, path) in enumerate(shown.items()):
    axes[i, 0].set_ylabel(label)
    for ax, (name, state) in zip(axes[i], states.items(), strict=True):
        array = state.params
        for part in path:
            array = array[part]
        draw(ax, array)
        if i == 0:
            ax.set_title(name)
figure.suptitle("The devices that hold each block of a parameter")
plt.show()

parts = states["tensor 8"].params["blocks"]["ffn"]
assert {rows for rows, _ in blocks_of(parts["up"])} == {(0, 64)}  # whole rows, divided columns
assert {columns for _, columns in blocks_of(parts["down"])} == {(0, 64)}  # and the other way

# %% [markdown]
# ## Memory of each device
#
# The state between two steps is the parameters and Adam's two moments of each. We add up the shards
# that are on each device, and compare them with the formula at the top.


# %%
def bytes_by_device(tree):
    found = Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device.id] += shard.data.nbytes
    return found


parameters = sum(leaf.size for leaf in jax.tree.leaves(states["data 8"].params))
formula = 12 * parameters
print(f"{parameters:,} parameters, 12 bytes each: {formula:,} bytes")
held = {name: bytes_by_device((s.params, s.optimizer)) for name, s in states.items()}
for name, found in held.items():
    least, most = min(found.values()), max(found.values())
    print(f"{name:10} {least:>9,} to {most:>9,} bytes on a device, {most / formula:.3f} of that")

# A few bytes more than the formula: Adam counts its steps, and vectors may be on all devices.
assert all(0 <= size - formula < 16 for size in held["data 8"].values())
assert all(1 <= size / (formula / 8) < 1.02 for size in held["fsdp 8"].values())
assert all(1 <= size / (formula / 8) < 1.05 for size in held["tensor 8"].values())
assert all(1 <= size / (formula / 4) < 1.05 for size in held["2 x 2 x 2"].values())

# %% [markdown]
# ## What the devices send each other
#
# A step is an ordinary `jax.jit` of the whole computation; XLA divides it by the placements of its
# arguments, and inserts a *collective* wherever a device needs what another one has:
#
# | collective | what each device has afterwards |
# |---|---|
# | all-reduce | the sum of the arrays of all devices |
# | all-gather | the pieces of all devices, one after the other |
# | reduce-scatter | its own piece of the sum |
# | all-to-all | one piece from each device |
# | collective-permute | the array of one other device |
#
# They stand in the text of the compiled program, each as `name = types all-reduce(arguments), ...`;
# a regular expression finds them there, with the bytes of their results.

# %%
loss = jf.loss_of("causal", config)
step = jf.make_step(loss, optimizer)
rng = np.random.default_rng(0)


def a_batch():
    rows = rng.integers(0, config.vocab_size, (16, config.max_length + 1), dtype=np.int32)
    weights = np.ones((16, config.max_length), np.float32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


batches = [a_batch() for _ in range(3)]
states["one device"] = jf.init_state(table, optimizer)
meshes["one device"] = None
programs = {
    name: step.lower(state, place_batch(batches[0], meshes[name])).compile()
    for name, state in states.items()
}
text = programs["fsdp 8"].as_text()
gathers = [line.strip() for line in text.splitlines() if " all-gather(" in line and "= f32" in line]
print(gathers[0][:250])

# %%
COLLECTIVE = re.compile(
    r" = (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\("
)
ARRAY = re.compile(r"[fsu](\d+)\[([\d,]*)\]")  # as in f32[64,256]


def collectives(program):
    """The (kind, bytes of the results) of each collective of a program."""
    found = []
    for types, kind in COLLECTIVE.findall(program.as_text()):
        sizes = [
            int(bits) // 8 * math.prod(int(size) for size in shape.split(",") if size)
            for bits, shape in ARRAY.findall(types)
        ]
        found.append((kind, sum(sizes)))
    return found


sent = {}
for name, program in programs.items():
    sent[name] = {}
    for kind, size in collectives(program):
        times, total = sent[name].get(kind, (0, 0))
        sent[name][kind] = (times + 1, total + size)
kinds = sorted({kind for found in sent.values() for kind in found})
print(" " * 12 + "".join(f"{kind:>26}" for kind in kinds))
for name, found in sent.items():
    cells = ["-" if kind not in found else "{} x, {:,} B".format(*found[kind]) for kind in kinds]
    print(f"{name:12}" + "".join(f"{cell:>26}" for cell in cells))

# %% [markdown]
# - **One device** sends nothing.
# - **data**: each device has the gradients of its own rows, and an all-reduce adds them up: about
#   as many bytes as there are parameters, 4 each.
# - **fsdp**: before a device can multiply, it needs the whole matrix, so all-gathers bring the
#   shards together. The gradients are added up as before; on GPUs and TPUs each device receives
#   only the piece that it updates (reduce-scatter), whereas XLA for CPUs adds them up whole
#   (all-reduce) and cuts the piece out. The few all-to-alls are of the embedding table: each device
#   looks up its columns for the tokens of all, and gives every device those of its rows.
# - **tensor**: each device has its part of every matrix and of its gradient, and neither travels.
#   Instead, activations `[512 tokens, 64]` are added up: after attention and after the feed-forward
#   layer, forward and backward, in each layer, and before the output matrix. The embedding table is
#   gathered, because any token may stand in any row.

# %%
assert not sent["one device"]
assert set(sent["data 8"]) == {"all-reduce"}
gradients = 4 * parameters
assert gradients <= sent["data 8"]["all-reduce"][1] < 1.05 * gradients
assert sent["fsdp 8"]["all-gather"][1] > 0.5 * gradients
assert sent["tensor 8"]["all-reduce"][0] >= 4 * config.n_layers
activation = 4 * batches[0]["tokens"].size * config.d_model
for kind, size in collectives(programs["tensor 8"]):
    if kind == "all-reduce" and size > 4096:  # beside scalars and sums over the vocabulary
        assert size % activation < 64, (kind, size)

# %% [markdown]
# `jaxformer plan CONFIG --mesh.fsdp 8` says the memory and the least time of a step on a given
# machine before anything runs, and with `--compile` what its compiler makes of it.
#
# ## The result is that of one device
#
# Three steps from the same seed on the same batches. Sums over devices have another order than
# sums on one device, so the last bits of float32 may differ, and nothing else. (The `eps=1e-5` of
# the optimizer above is for this comparison. Adam divides a gradient by its own size, so a gradient
# that is nothing but rounding error would move its parameter as much as any other.)

# %%
losses, params = {}, {}
for name, state in states.items():
    losses[name] = []
    for batch in batches:
        state, metrics = programs[name](state, place_batch(batch, meshes[name]))
        losses[name].append(float(metrics["loss"]))
    states[name] = state  # a step donates the state that it is given
    params[name] = jax.tree.map(np.asarray, state.params)
    print(f"{name:10}", *(f"{value:.6f}" for value in losses[name]))

for name in meshes:
    np.testing.assert_allclose(losses[name], losses["one device"], rtol=1e-6)
    apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), params[name], params["one device"])
    worst = max(jax.tree.leaves(apart))
    print(f"{name:10} largest difference of a parameter: {worst:.1e}")
    assert worst < 2e-6

# %% [markdown]
# ## Memory of a step
#
# While a step runs it needs temporary memory too: activations, gradients, and under `fsdp` the
# matrices that were gathered. The compiler states it for one device.

# %%
order = ["one device", "data 8", "fsdp 8", "tensor 8", "2 x 2 x 2"]
pieces = {
    "parameters": [max(bytes_by_device(states[name].params).values()) for name in order],
    "Adam's moments": [max(bytes_by_device(states[name].optimizer).values()) for name in order],
    "temporary": [programs[name].memory_analysis().temp_size_in_bytes for name in order],
}
figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
bottom = np.zeros(len(order))
for label, sizes in pieces.items():
    ax.bar(order, np.array(sizes) / 2**20, bottom=bottom, label=label)
    bottom += np.array(sizes) / 2**20
ax.set(ylabel="MiB on one device", title="Memory of a train step on each device")
ax.legend()
plt.show()

total = dict(zip(order, bottom, strict=True))
assert total["fsdp 8"] < total["data 8"] < total["one device"]
assert total["tensor 8"] < total["data 8"]

# %% [markdown]
# `data` divides the activations and keeps all parameters; `fsdp` divides both, and pays with the
# gathers; `tensor` divides the layers themselves, and pays with a sum after each. Which of them is
# best depends on the links between the devices: `docs/scale.md` and `docs/plan.md` say how to
# decide.
