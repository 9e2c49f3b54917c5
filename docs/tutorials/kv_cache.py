# %% [markdown]
# # The key-value cache and its cost
#
# A decoder writes one token at a time. Attention at position $t$ reads the keys and values of all
# positions up to $t$,
#
# $$ y_t = \sum_{s \le t} \operatorname{softmax}_s\left(q_t \cdot k_s / \sqrt{H}\right) v_s $$
#
# and those of earlier positions never change, because no token sees a later one. So they are
# computed once and kept: the *key-value cache*. Shazeer (arXiv:1911.02150) noticed that reading it
# is what limits the speed of decoding. For one sequence it has
#
# $$ \text{bytes} = 2 \cdot L \cdot K \cdot H \cdot S \cdot \text{itemsize} $$
#
# with $L$ layers, $K$ key-value heads of width $H$, and $S$ slots for tokens; the 2 is for keys and
# values. Multi-head attention (MHA) has as many key-value heads as query heads. Multi-query
# attention (MQA, arXiv:1911.02150) has one, and grouped-query attention (GQA, arXiv:2305.13245)
# some number between.
#
# Our functions are `jf.generate`, which keeps its cache on the device, `Cache` in
# `jaxformer/layers/cache.py`, and `empty_cache` in `jaxformer/layers/block.py`. The tests that
# hold them:
#
# - `tests/generation/test_generate.py::test_greedy_generation_equals_the_model_without_a_cache`
# - `tests/models/test_family_invariants.py::test_packing_padding_and_caching_change_nothing`

# %%
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxformer as jf
from jaxformer.generation.decode import decode, start
from jaxformer.generation.sampling import Sampling
from jaxformer.generation.weights import prepared
from jaxformer.layers.block import empty_cache
from jaxformer.layers.head import head
from jaxformer.layers.masks import TokenLayout
from jaxformer.models.inputs import Inputs
from jaxformer.models.transformer import hidden

config = jf.ModelConfig(
    vocab_size=512, d_model=256, n_layers=2, n_heads=8, d_ff=512, max_length=1024
)
params = jf.init(config, jax.random.key(0))
forward = jax.jit(jf.forward, static_argnums=1)
print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, not trained")

# %% [markdown]
# ## Cached decoding is the full forward pass
#
# `one_token` is a step of decoding: it reads one token at its position, writes the token's keys and
# values into the next slot of each layer, and attends to all slots that are written. Its logits
# are those of the full forward pass over all tokens, up to the rounding of float32.


# %%
@functools.partial(jax.jit, static_argnums=1)
def one_token(params, config, token, position, cache):
    """Logits [B, V] after a token [B] at a position, and the cache with it."""
    layout = TokenLayout(jnp.full((token.shape[0], 1), position))
    x, cache, _ = hidden(params, config, Inputs(token[:, None], layout), cache)
    return head(params, config, x, layout)[:, 0], cache


def decoded(params, config, tokens, slots):
    """The logits of `jf.forward`, [B, T, V], from one token after the other; and the cache."""
    cache, rows = empty_cache(config, len(tokens), slots, jnp.float32), []
    for t in range(tokens.shape[1]):
        logits, cache = one_token(params, config, tokens[:, t], t, cache)
        rows.append(logits)
    return jnp.stack(rows, axis=1), cache


tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 48), dtype=np.int32)
full = forward(params, config, tokens)
cached, cache = decoded(params, config, tokens, slots=48)
apart = float(jnp.abs(cached - full).max() / jnp.abs(full).max())
print(f"largest difference of a logit: {apart:.1e} of the largest logit")
assert apart < 1e-5

# %% [markdown]
# `jf.generate` does the same, with the whole loop in one program on the device. Its greedy tokens
# are the likeliest ones of a full forward pass over what it wrote.

# %%
prompt = tokens[:, :8]
made = np.asarray(jf.generate(params, config, prompt, max_new_tokens=40, temperature=0))
text = np.concatenate([prompt, made], axis=1)
likeliest = np.asarray(forward(params, config, text).argmax(-1))
np.testing.assert_array_equal(made, likeliest[:, prompt.shape[1] - 1 : -1])
print(made[0])

# %% [markdown]
# ## What is in it
#
# One array of keys and one of values for each layer, `[B, S, K, H]`, and the position and segment
# of each slot. The formula is the size of the arrays.


# %%
def cache_bytes(cache):
    """The bytes of the keys and values, of real arrays or of their shapes alone."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(cache.layers))


def formula(config, rows, slots, itemsize):
    layers, heads, width = config.n_layers, config.kv_heads, config.head_width
    return rows * 2 * layers * heads * width * slots * itemsize


keys, values = (slots.array for slots in cache.layers[0])
print("keys of layer 0:", keys.shape, keys.dtype, "- tokens read:", cache.length)
assert config.n_layers * (keys.nbytes + values.nbytes) == formula(config, 2, 48, itemsize=4)
assert cache_bytes(cache) == formula(config, 2, 48, itemsize=4)

# %% [markdown]
# `jax.eval_shape` gives the shapes of a computation without computing it, and so the cache of a
# model that does not fit on this machine. This is Llama 3 8B (arXiv:2407.21783), 8,192 tokens in
# bfloat16: 1 GiB for each sequence. With 32 key-value heads instead of 8 it would be 4 GiB.

# %%
llama = jf.ModelConfig(
    vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, max_length=8192
)
shapes = jax.eval_shape(functools.partial(empty_cache, llama, 1, 8192, jnp.bfloat16))
print(f"{cache_bytes(shapes) / 2**30:.2f} GiB")
assert cache_bytes(shapes) == formula(llama, 1, 8192, itemsize=2) == 2**30

# %% [markdown]
# ## Time and memory of a token
#
# Without a cache, each new token needs a forward pass over all tokens before it; with one, a pass
# over a single token, and a read of the cache. We measure both at several lengths: the library's
# decode loop, for 32 tokens that end at the given length, and `jf.forward`. Memory is what stays
# allocated between tokens (the cache) and what a program needs while it runs, as the compiler
# states it.

# %%
NEW = 32  # tokens that are decoded in one call
LENGTHS = (64, 128, 256, 512, 1024)


def shortest(prepare, run):
    """Seconds of the faster of two runs, after one that warms up."""
    times = []
    for _ in range(3):
        ready = jax.block_until_ready(prepare())
        began = time.perf_counter()
        jax.block_until_ready(run(ready))
        times.append(time.perf_counter() - began)
    return min(times[1:])


def with_cache(config, params, length, rows=1):
    """Seconds of a token of each row, bytes that stay, and temporary bytes.

    Prompts and caches have lengths of a ladder (32 times 1, 2, 3, 4, 6, 8, 12 and so on), so that
    few programs serve all lengths: the cache may have more slots than there are tokens."""
    prompt = np.ones((rows, length - NEW), np.int32)
    weights = prepared(params, config)

    def prompt_read():
        return start(params, config, prompt, NEW, jax.random.key(0))

    stream = prompt_read()
    program = decode.lower(weights, config, Sampling(temperature=0), NEW, stream).compile()
    seconds = shortest(prompt_read, lambda stream: program(weights, stream))
    slots = stream.cache.layout.positions.shape[1]  # of [rows, slots]
    assert length <= slots and cache_bytes(stream.cache) == formula(config, rows, slots, itemsize=4)
    return seconds / NEW, cache_bytes(stream.cache), program.memory_analysis().temp_size_in_bytes


def without_cache(config, params, length):
    """The same of the forward pass over all tokens, which gives one new token."""
    tokens = jnp.ones((1, length), jnp.int32)
    program = forward.lower(params, config, tokens).compile()
    seconds = shortest(lambda: tokens, lambda tokens: program(params, tokens))
    return seconds, 0, program.memory_analysis().temp_size_in_bytes


measured = {  # [lengths, 3]
    "with a cache": np.array([with_cache(config, params, length) for length in LENGTHS]),
    "without": np.array([without_cache(config, params, length) for length in LENGTHS]),
}
ratios = measured["without"][:, 0] / measured["with a cache"][:, 0]
for length, ratio in zip(LENGTHS, ratios, strict=True):
    print(f"{length:5} tokens: without a cache a token takes {ratio:6.1f} times as long")
assert ratios[-1] > 5
kept = measured["with a cache"][:, 1]

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for name, (seconds, stays, temporary) in ((name, found.T) for name, found in measured.items()):
    axes[0].plot(LENGTHS, 1e3 * seconds, marker="o", label=name)
    axes[1].plot(LENGTHS, (stays + temporary) / 2**20, marker="o", label=name)
axes[1].plot(LENGTHS, kept / 2**20, "k:", label="the cache alone")
axes[0].set(title="Time of a token", ylabel="milliseconds", yscale="log")
axes[1].set(title="Memory beside the parameters", ylabel="MiB", yscale="log")
for ax in axes:
    ax.set(xlabel="tokens so far", xscale="log")
    ax.set_xticks(LENGTHS, LENGTHS)
    ax.minorticks_off()
    ax.legend()
plt.show()

# %% [markdown]
# The cached step has a part that does not depend on the length, the products with the weights, and
# one that grows with it, reading the cache. The forward pass grows with every token, and its
# attention weights, `[B, N, T, T]`, with the square.
#
# A cache costs memory for each *sequence*, where parameters are shared by all. With many sequences
# and long contexts, the cache is the larger part, and it is what the next two ideas make smaller.
#
# ## Fewer key-value heads
#
# `n_kv_heads` is $K$ in the formula: several query heads share one head of keys and values.

# %%
HEADS = {"MHA": 8, "GQA, K = 4": 4, "GQA, K = 2": 2, "MQA": 1}
ROWS, LENGTH = 8, 512
found = {}
for name, kv_heads in HEADS.items():
    grouped = dataclasses.replace(config, n_kv_heads=kv_heads)
    values = with_cache(grouped, jf.init(grouped, jax.random.key(0)), LENGTH, ROWS)
    found[name] = values
    print(f"{name:10} {values[1] / 2**20:5.0f} MiB, {1e3 * values[0]:5.1f} ms a step")
assert found["MHA"][1] == 8 * found["MQA"][1]

figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
axes[0].bar([*HEADS], [values[1] / 2**20 for values in found.values()])
axes[1].bar([*HEADS], [1e3 * values[0] for values in found.values()], color="tab:orange")
axes[0].set(title=f"Cache of {ROWS} sequences of {LENGTH} tokens", ylabel="MiB")
axes[1].set(title="Time of a decoding step, on this CPU", ylabel="milliseconds")
plt.show()

# %% [markdown]
# ## Windows
#
# With `window` $W$ (arXiv:2004.05150, arXiv:2310.06825) a token attends to the newest $W$ tokens
# alone, itself among them, so of the $S$ slots of a layer it needs $\min(S, W)$. To see that older
# ones do not count, we decode 40 tokens, overwrite all slots that lie behind the window, and decode
# one more.

# %%
WINDOW, LAST = 16, 40
FAR = LAST - WINDOW + 1  # the slots before this one are behind the window of token 40


def with_damage(config):
    """How much the logits of token 40 change when the slots behind its window are overwritten."""
    _, cache = decoded(params, config, tokens[:, :LAST], slots=LAST + 1)
    overwritten = jax.tree.map(lambda entries: entries.at[:, :FAR].set(100), cache.layers)
    damaged = dataclasses.replace(cache, layers=overwritten)
    logits = [one_token(params, config, tokens[:, LAST], LAST, c)[0] for c in (cache, damaged)]
    return float(jnp.abs(logits[0] - logits[1]).max())


windowed = dataclasses.replace(config, window=WINDOW)
print("largest change of a logit:", with_damage(windowed), "with the window,", end=" ")
print(with_damage(config), "without")
assert with_damage(windowed) == 0
assert with_damage(config) > 0.1

# %% [markdown]
# A ring of $W$ slots a layer would therefore be enough. The library does not have one: its cache
# keeps all $S$ slots of each layer, and the mask hides those behind the window, so a window
# saves no memory in decoding. The next figure has both: what is allocated, from the arrays, and
# what a token needs, from the formula with $\min(S, W)$ in place of $S$.

# %%
contexts = np.array([64, 128, 256, 512, 1024])
allocated = {}
for window in (0, 256, 64):
    model = dataclasses.replace(config, window=window)
    allocated[window] = [
        cache_bytes(jax.eval_shape(functools.partial(empty_cache, model, 1, slots, jnp.float32)))
        for slots in contexts.tolist()
    ]
assert allocated[0] == allocated[256] == allocated[64]

figure, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
ax.plot(contexts, np.array(allocated[0]) / 2**20, "ko", label="allocated, for every window")
for window in (0, 256, 64):
    needed = np.minimum(contexts, window or contexts)
    sizes = [formula(config, 1, slots, itemsize=4) / 2**20 for slots in needed]
    ax.plot(
        contexts, sizes, label=f"needed with window {window}" if window else "needed, no window"
    )
ax.set(xlabel="tokens so far", ylabel="MiB", xscale="log", yscale="log")
ax.set_title("Keys and values of one sequence")
ax.set_xticks(contexts, contexts)
ax.set_yticks([0.25, 0.5, 1, 2, 4], ["1/4", "1/2", 1, 2, 4])
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# Where a model alternates windows and full attention (`window_pattern="wf"`), half of its layers
# need $\min(S, W)$ slots, and the others all of them.
