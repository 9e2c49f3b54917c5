# %% [markdown]
# # Attention from scratch
#
# Attention lets every token of a sequence read from the others. For queries $Q$, keys $K$ and
# values $V$, the paper *Attention Is All You Need* (arXiv:1706.03762, section 3.2.1) defines it as
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}}\right) V$$
#
# **Our function:** `jaxformer.layers.dot_product_attention`.
#
# **The test that holds it to the formula:**
# `tests/layers/test_positions.py::test_attention_is_its_formula_with_scale_soft_cap_bias_and_sinks`
#
# This notebook writes it in plain `jax.numpy`: one head, masks, several heads, shared key heads
# (GQA) and rotary positions (RoPE), until it computes the attention of a Llama-like model. After
# each step an assertion compares the result with the library's.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxformer as jf
from jaxformer import layers


def assert_equal(ours: jax.Array, library: jax.Array, rounding: float = 1e-5) -> None:
    """Equal up to the rounding of float32."""
    assert ours.shape == library.shape, (ours.shape, library.shape)
    np.testing.assert_allclose(ours, library, rtol=rounding, atol=rounding)
    print(f"equal, shape {list(ours.shape)}")


# %% [markdown]
# ## One head
#
# Attention is a dictionary look-up with soft edges. Each token asks with a *query* vector, each
# token offers a *key* vector, and the dot product of the two is the *score* of that pair. The
# softmax turns the scores of one query into weights that sum to 1, and the result is the mean of
# the *value* vectors under these weights.
#
# The letters here are those of the whole library: T queries, S keys, H the width of a head.


# %%
def attention_weights(q: jax.Array, k: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """softmax(q k^T / sqrt(H)): [T, H], [S, H] -> [T, S]; `mask` [T, S] is true where allowed."""
    scores = q @ k.T / q.shape[-1] ** 0.5  # [T, S]
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    # Subtracting the largest score of each row changes nothing and keeps exp from overflowing.
    exponentials = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def one_head(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """[T, H], [S, H], [S, H] -> [T, H]."""
    return attention_weights(q, k, mask) @ v


T, H = 7, 16
q, k, v = jax.random.normal(jax.random.key(0), (3, T, H))

# The library's function has an axis of heads, [T, N, H]; here N = 1.
library = layers.dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
assert_equal(one_head(q, k, v), library)

# %% [markdown]
# **Why divide by $\sqrt{H}$?** If the elements of q and k are independent with variance 1, their
# dot product has variance H. Scores that grow with the width make the softmax pick one key and
# ignore the rest, and then almost no gradient flows. The division brings the variance back to 1.

# %%
widths = [4, 16, 64, 256, 1024]
spread, largest = [], []
for width in widths:
    a, b = jax.random.normal(jax.random.key(width), (2, 1000, width))
    products = a @ b[:50].T  # [1000, 50]: 1,000 queries, 50 keys
    spread.append(float(products.std()))
    both = jnp.stack([products, products / width**0.5])
    largest.append(jax.nn.softmax(both).max(axis=-1).mean(axis=-1))

np.testing.assert_allclose(spread, np.sqrt(widths), rtol=0.05)  # the deviation is sqrt(H)
unscaled, scaled = np.array(largest).T
assert unscaled[-1] > 0.9 and scaled[-1] < 0.2

plt.figure(figsize=(6, 3))
plt.semilogx(widths, unscaled, "o-", label=r"scores $q \cdot k$")
plt.semilogx(widths, scaled, "o-", label=r"scores $q \cdot k / \sqrt{H}$")
plt.xlabel("width of a head, H")
plt.ylabel("largest of 50 weights (mean)")
plt.legend()
plt.show()

# %% [markdown]
# ## Masks
#
# A mask says which keys a query may see. A score that is masked becomes $-\infty$, so its weight
# is exactly 0.
#
# - A **causal** mask hides the future: query $t$ sees keys $0 \dots t$. Decoders need it, because
#   otherwise predicting the next token would be copying.
# - A **padding** mask hides the filler at the end of a short row.
# - **Segments** keep texts apart that share a row. This library states every mask that way: two
#   tokens see each other if they are in the same segment, and segment 0 is padding.
#   (`tests/layers/test_positions.py::test_the_mask_is_positions_and_segments`)
#
# To see something in the weights, let equal words have equal vectors, used as query and as key.

# %%
words = ["the", "cat", "sat", "on", "the", "mat", "because", "the", "cat", "was", "tired"]
T = len(words)
table = {word: i for i, word in enumerate(dict.fromkeys(words))}
vectors = 2.0 * jax.random.normal(jax.random.key(1), (len(table), H))
x = vectors[jnp.array([table[word] for word in words])]  # [T, H]

causal = jnp.tril(jnp.ones((T, T), bool))
segments = jnp.array([1] * 6 + [2] * 3 + [0] * 2)  # "the ... mat", "because the cat", padding
own = (segments[:, None] == segments[None, :]) & (segments[None, :] != 0)
masks = {"all keys": None, "causal": causal, "causal, two segments, padding": causal & own}

figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), constrained_layout=True)
for axis, (name, mask) in zip(axes, masks.items(), strict=True):
    # A query of padding sees nothing: its row of weights would be 0 / 0, and the library gives 0.
    weights = jnp.nan_to_num(attention_weights(x, x, mask))
    library = layers.dot_product_attention(x[:, None], x[:, None], x[:, None], mask)[:, 0]
    assert_equal(weights @ x, library)
    assert mask is None or float(jnp.where(mask, 0, weights).max()) == 0
    image = axis.imshow(weights, vmin=0, vmax=1, cmap="Blues")
    axis.set_title(name)
    axis.set_xticks(range(T), words, rotation=90)
    axis.set_yticks(range(T), words)
    axis.set_xlabel("key")
axes[0].set_ylabel("query")
figure.colorbar(image, ax=axes, label="weight")
plt.show()

# %% [markdown]
# Every "the" finds the other "the"s, and "cat" finds "cat". In the middle, nothing lies above the
# diagonal. On the right, the second text no longer sees the first one, and the two rows of padding
# are empty.
#
# ## Several heads
#
# One set of weights can express one kind of relation. With N heads the model has N sets, each of
# its own queries, keys and values of width $H = D / N$ (arXiv:1706.03762, section 3.2.2):
#
# $$\mathrm{MultiHead}(x) = \sum_{n} \mathrm{Attention}(x W^Q_n, x W^K_n, x W^V_n)\, W^O_n$$
#
# The paper concatenates the heads and multiplies by one matrix $W^O$. Cut into N blocks of rows,
# that matrix gives the sum above. `jnp.einsum` names every axis, so nothing is transposed by hand.


# %%
def multi_head(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """[T, N, H], [S, N, H], [S, N, H] -> [T, N, H]."""
    scores = jnp.einsum("TNH,SNH->NTS", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("NTS,SNH->TNH", jax.nn.softmax(scores, axis=-1), v)


N = 4
q, k, v = jax.random.normal(jax.random.key(2), (3, T, N, H))
assert_equal(multi_head(q, k, v, causal), layers.dot_product_attention(q, k, v, causal))

# Heads do not see each other: each is what `one_head` computes.
each = [one_head(q[:, n], k[:, n], v[:, n], causal) for n in range(N)]
assert_equal(multi_head(q, k, v, causal), jnp.stack(each, axis=1))

# %% [markdown]
# ## Grouped-query attention
#
# A decoder keeps the keys and values of all earlier tokens (the KV cache), and reading them limits
# the speed of generation. *Grouped-query attention* (arXiv:2305.13245) has only K key and value
# heads, each shared by a group of N / K query heads; the cache shrinks by that factor.
# K = N is ordinary attention, and K = 1 is multi-query attention.
#
# The simplest implementation repeats each key head for its group. The library does not repeat,
# which would cost memory, but gives the result of it:
# `tests/layers/test_positions.py::test_attention_is_its_formula_with_scale_soft_cap_bias_and_sinks`
# has two key heads for four.


# %%
def grouped(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """[T, N, H], [S, K, H], [S, K, H] -> [T, N, H], where K divides N."""
    group = q.shape[1] // k.shape[1]
    return multi_head(q, jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1), mask)


for K in (4, 2, 1):
    shared_k, shared_v = k[:, :K], v[:, :K]
    library = layers.dot_product_attention(q, shared_k, shared_v, causal)
    assert_equal(grouped(q, shared_k, shared_v, causal), library)
    print(f"  {N} query heads, {K} key heads: {2 * K * H} cached numbers a token and layer")

# %% [markdown]
# ## Rotary positions
#
# Nothing so far depends on the order of the keys: shuffling the keys and values (without a mask)
# leaves the result as it is.

# %%
shuffled = jax.random.permutation(jax.random.key(3), T)
assert_equal(multi_head(q, k[shuffled], v[shuffled]), multi_head(q, k, v))

# %% [markdown]
# *RoPE* (arXiv:2104.09864) puts the position into queries and keys. Dimensions are taken in pairs,
# and pair $i$ of the token at position $t$ is rotated by the angle $t\,\theta_i$ with
# $\theta_i = 10000^{-2i/H}$. A pair is a complex number, and rotating it is multiplying by
# $e^{\mathrm{i} t \theta_i}$:
#
# $$\langle R_t\, q,\; R_s\, k \rangle = \mathrm{Re} \sum_i q_i\, \bar{k}_i\,
# e^{\mathrm{i} (t - s) \theta_i}$$
#
# The score depends on the *distance* $t - s$ alone. (`jaxformer.layers.rope`;
# `tests/layers/test_positions.py::test_rope_turns_each_pair_as_a_complex_number`)


# %%
def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """[T, N, H], [T] -> [T, N, H]; pair i is (x[i], x[i + H/2]), as in Llama's weights."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10_000.0 ** (-jnp.arange(half) / half)  # [T, H/2]
    pairs = jax.lax.complex(x[..., :half], x[..., half:])  # [T, N, H/2]
    turned = pairs * jnp.exp(1j * angles)[:, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


positions = jnp.arange(T)
assert_equal(rope(q, positions), layers.rope(q, positions))


def rotated_scores(positions: jax.Array) -> jax.Array:
    return jnp.einsum("TNH,SNH->NTS", rope(q, positions), rope(k, positions))


# Moving all tokens by 100 places changes every angle and no score (but larger angles round more).
assert_equal(rotated_scores(positions), rotated_scores(positions + 100), rounding=2e-4)

# The score of two equal vectors, here of width 128, by their distance: highest at 0, then lower
# in waves, since the fast pairs have turned away while the slow ones still point the same way.
distances = np.arange(-64, 65)
ones = jnp.ones((len(distances), 1, 128))
turned = rope(ones, jnp.asarray(distances))
by_distance = np.asarray(jnp.einsum("TNH,NH->T", turned, ones[0])) / 128
near, far = by_distance[np.abs(distances) < 8].mean(), by_distance[np.abs(distances) > 32].mean()
assert distances[by_distance.argmax()] == 0 and near > far + 0.1

plt.figure(figsize=(6, 3))
plt.plot(distances, by_distance)
plt.xlabel("distance between query and key, in tokens")
plt.ylabel("score of equal vectors")
plt.show()

# %% [markdown]
# ## The attention of a model
#
# Now the pieces together: in a block of a Llama-like decoder, attention reads the normalized
# residual stream $x$ [T, D]. It has matrices q [D, N, H], k and v [D, K, H] and out [N, H, D].
# `jf.inspect` returns intermediates of the real model to compare with.

# %%
config = jf.ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2)
params = jf.init(config, jax.random.key(4))
tokens = jax.random.randint(jax.random.key(5), (1, T), 0, config.vocab_size)

names = ["decoder.0.attention_weights", "decoder.0.attention_out"]
found = jf.inspect(params, config, tokens, capture=names).values

layer = jax.tree.map(lambda leaf: leaf[0], params["blocks"])  # layers are stacked on axis 0
x = params["embed"]["tokens"][tokens[0]]  # [T, D]
x = layers.rms_norm(x, layer["attention_norm"]["scale"], config.norm_eps)

own = layer["attention"]
q = rope(jnp.einsum("TD,DNH->TNH", x, own["q"]), positions)
k = rope(jnp.einsum("TD,DKH->TKH", x, own["k"]), positions)
v = jnp.einsum("TD,DKH->TKH", x, own["v"])
out = jnp.einsum("TNH,NHD->TD", grouped(q, k, v, causal), own["out"])

assert_equal(out, found["decoder.0.attention_out"][0])

repeated = jnp.repeat(k, config.n_heads // config.kv_heads, axis=1)
weights = jnp.stack([attention_weights(q[:, n], repeated[:, n], causal) for n in range(N)])
assert_equal(weights, found["decoder.0.attention_weights"][0])

# %% [markdown]
# The weights of these four heads: the model is untrained, so each query spreads its attention
# nearly evenly over what it may see. `jf.attention_maps` gives the weights of all layers of any
# model, and `jaxformer attention RUN --prompt "..."` makes a page of them.

# %%
figure, axes = plt.subplots(1, N, figsize=(13, 3.4), constrained_layout=True)
for n, axis in enumerate(axes):
    image = axis.imshow(weights[n], vmin=0, cmap="Blues")
    axis.set_title(f"head {n} (key head {n // 2})")
    axis.set_xlabel("key")
axes[0].set_ylabel("query")
figure.colorbar(image, ax=axes, label="weight")
plt.show()

np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)  # each row is a distribution
even = causal / causal.sum(axis=-1, keepdims=True)
assert float(jnp.abs(weights - even).max()) < 0.1

# %% [markdown]
# ## What the library adds
#
# The formula is all of the mathematics. What differs in practice is how it is computed: in blocks
# that never hold all T x S scores (`blocked`), or by the fused kernels of cuDNN and Pallas. They
# have to give the numbers of this page, which
# `tests/layers/test_kernels.py::test_the_blocked_kernel_equals_the_plain_one_on_every_mask`
# checks for outputs and gradients. A whole decoder in this style, in 150 lines, is
# `examples/one_page.py`.
