# %% [markdown]
# # Looking inside: logit lens, induction heads, activation patching
#
# Give a language model the text `... A B ... A`, and it predicts `B`, even where it has never seen
# `A` followed by `B` before. Elhage et al. (2021, *A Mathematical Framework for Transformer
# Circuits*) found the circuit that does this, and Olsson et al. (arXiv:2209.11895) showed how it
# forms in training:
#
# 1. A **previous-token head** in one layer writes into each position which token stands before it.
# 2. An **induction head** in a later layer looks, from the second `A`, for a position that says
#    "the token before me is `A`". It finds `B` there, and copies it.
#
# A model of two layers learns this within a minute on a CPU. This notebook trains one and finds the
# circuit by three methods. In a row that repeats after $P$ tokens, with $a^{(h)}_{t,s}$ the
# attention weight of head $h$ from position $t$ to position $s$, the **induction score** is the
# weight on the token that came next the last time (arXiv:2209.11895):
#
# $$ \text{score}_h = \operatorname{mean}_{t \ge P}\; a^{(h)}_{t,\; t - P + 1} $$
#
# The **logit lens** (nostalgebraist 2020; arXiv:2303.08112 improves on it) reads the residual
# stream $x^{(l)}$ after layer $l$ as if it were that of the last layer:
#
# $$ \text{logits}^{(l)} = W_\text{out}\, \operatorname{norm}(x^{(l)}) $$
#
# **Activation patching** (arXiv:2202.05262) runs the model on one input, with one activation
# replaced by that of another input, and measures how much of the other input's answer comes back.
#
# Our functions are `jf.attention_maps` and `jf.inspect(params, config, tokens, capture, replace)`.
# Tests that hold them:
#
# - `tests/tools/test_inspect.py::test_intermediates_add_up_to_what_the_model_computes`
# - `tests/tools/test_inspect.py::test_weights_can_be_replaced_and_the_values_follow_them`
# - `tests/tools/test_inspect.py::test_one_position_can_be_patched_and_only_later_ones_move`

# %%
import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxformer as jf

# %% [markdown]
# ## The task: random rows that repeat
#
# Each row is $P$ random tokens, all different, again and again to the end of the row. The first $P$
# tokens cannot be predicted; those after them can. $P$ differs from row to row: with one fixed $P$
# the model could learn to copy the token $P - 1$ positions back, without reading any token.

# %%
VOCABULARY, LENGTH, ROWS = 64, 48, 32
LEAST, MOST = 8, 24  # values of P


def repeated(rng, rows, period=None):
    """Rows [rows, LENGTH + 1] that repeat, and the period of each."""
    periods = rng.integers(LEAST, MOST + 1, rows) if period is None else np.full(rows, period)
    order = rng.permuted(np.tile(np.arange(VOCABULARY), (rows, 1)), axis=1)
    place = np.arange(LENGTH + 1)[None] % periods[:, None]
    return np.take_along_axis(order, place, axis=1).astype(np.int32), periods


class Batches:
    """`batches[k]` is the batch of step k. Tokens that cannot be predicted have no weight."""

    def __getitem__(self, step):
        tokens, periods = repeated(np.random.default_rng(step), ROWS)
        known = np.arange(LENGTH)[None] >= periods[:, None]  # the current token stood here before
        weights = known.astype(np.float32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


print(repeated(np.random.default_rng(0), 1, period=9)[0][0])

# %% [markdown]
# ## Training
#
# Two layers of four heads. For a while the loss stays near $\ln 64 \approx 4.16$, that of a guess,
# or falls to that of a guess among the tokens of the row: a previous-token head has no use without
# an induction head behind it, and an induction head none without a previous-token head. Then both
# form at once and the loss drops: the phase change of Olsson et al.

# %%
config = jf.ModelConfig(
    vocab_size=VOCABULARY,
    d_model=64,
    n_layers=2,
    n_heads=4,
    d_ff=64,
    max_length=LENGTH,
    init="fan_in",
    rope=jf.Rope(theta=100.0),
)
STEPS = 400
schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 50, STEPS, 1e-4)
optimizer = optax.adamw(schedule, b2=0.98, weight_decay=0.01)
curve = []

began = time.perf_counter()
state = jf.fit(
    jf.make_step(jf.loss_of("causal", config), optimizer),
    jf.init_state(jf.specs(config), optimizer, seed=0),
    Batches(),
    steps=STEPS,
    hooks=[lambda step, state, metrics: curve.append(metrics["loss"])],
)
params, curve = state.params, np.array(jax.device_get(curve))
print(f"{time.perf_counter() - began:.0f} seconds, {curve[-50:].mean():.3f} nats at the end")

figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(curve, linewidth=1)
ax.axhline(np.log(VOCABULARY), color="gray", linestyle=":", label="a guess among all tokens")
ax.set(xlabel="step", ylabel="nats per target", title="Loss of the tokens that repeat")
ax.legend()
plt.show()

# %% [markdown]
# ## Induction scores
#
# The rows of the evaluation are two equal halves of $P = 24$ tokens that training never drew.
# `jf.attention_maps` gives the weights of every head, `[L, B, N, T, S]`. Beside the induction score
# stands the previous-token score, the mean weight $a^{(h)}_{t,\,t-1}$.

# %%
PERIOD = LENGTH // 2
tokens, _ = repeated(np.random.default_rng(2**32), 64, PERIOD)
inputs, targets = jnp.array(tokens[:, :-1]), jnp.array(tokens[:, 1:])
maps = jax.jit(jf.attention_maps, static_argnums=1)(params, config, inputs)
weights = np.asarray(maps.decoder)  # [L, B, N, T, S]

now, later = np.arange(PERIOD, LENGTH), np.arange(1, LENGTH)
induction = weights[..., now, now - PERIOD + 1].mean((1, 3))  # [L, N]
previous = weights[..., later, later - 1].mean((1, 3))

layer, head = np.unravel_index(induction.argmax(), induction.shape)
before = previous[0].argmax()
print(f"the strongest induction head is {layer}.{head}: {induction[layer, head]:.2f}")
print(f"the strongest previous-token head is 0.{before}: {previous[0, before]:.2f}")
assert layer == 1, "an induction head reads what an earlier layer wrote"
assert induction[layer, head] > 0.5


def heat_map(ax, values, title, limits=(0, 1)):
    """One cell a head, with its number."""
    image = ax.imshow(values, cmap="viridis", vmin=limits[0], vmax=limits[1])
    for (i, j), value in np.ndenumerate(values):
        dark = value < sum(limits) / 2
        ax.text(j, i, f"{value:.2f}", ha="center", va="center", color="w" if dark else "k")
    ax.set(title=title, xlabel="head", ylabel="layer")
    ax.set(xticks=range(values.shape[1]), yticks=range(values.shape[0]))
    plt.colorbar(image, ax=ax, shrink=0.7)


figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
heat_map(axes[0], previous, "Previous-token score")
heat_map(axes[1], induction, "Induction score")
plt.show()

# %% [markdown]
# The maps of these two heads for one row. In the left one the weight is just below the diagonal. In
# the right one, the second half looks back to the first half, one position further than where the
# same token stands; the dashed line is $s = t - P + 1$.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
for ax, (i, j), title in (
    (axes[0], (0, before), "a previous-token head"),
    (axes[1], (layer, head), "an induction head"),
):
    ax.imshow(weights[i, 0, j], cmap="magma", vmin=0, vmax=1)
    ax.set(title=f"Head {i}.{j}, {title}", xlabel="key position s", ylabel="query position t")
axes[1].plot(now - PERIOD + 1, now, "w--", linewidth=0.8)
plt.show()

# %% [markdown]
# ## Does the model need it?
#
# A score says where a head looks, not whether that matters. `replace` takes a function of an
# intermediate: with its attention weights set to zero, a head adds nothing to the residual stream.
# We remove each head alone and measure the loss on the repeated half, and then the induction heads
# of the last layer together, the strongest first.


# %%
def repeated_loss(logits):
    """Mean nats of the targets in the second half, whose current token stood in the first."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return nats[:, PERIOD:].mean()


@functools.partial(jax.jit, static_argnums=0)
def without(layer, kept):
    """The loss of the model where a layer has only the heads that are True in `kept` [N]."""

    def silence(weights):  # [B, N, T, S]
        return jnp.where(kept[:, None, None], weights, 0)

    name = f"decoder.{layer}.attention_weights"
    return repeated_loss(jf.inspect(params, config, inputs, replace={name: silence}).logits)


whole = float(repeated_loss(maps.logits))
others = ~np.eye(config.n_heads, dtype=bool)  # row j: all heads but j
ablated = np.array([[without(i, row) for row in others] for i in range(config.n_layers)])
print(f"with all heads {whole:.3f} nats; without head {layer}.{head} {ablated[layer, head]:.3f}")
assert ablated[layer, head] > whole + 0.05

strongest = np.argsort(-induction[1])
together = []
for removed in range(config.n_heads + 1):
    kept = ~np.isin(np.arange(config.n_heads), strongest[:removed])
    together.append(float(without(1, kept)))
assert together[-1] > whole + 1
assert ablated[0, before] > whole + 1  # without what induction heads read, they find nothing

figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
heat_map(axes[0], ablated - whole, "Nats added by removing one head", (0, np.log(VOCABULARY)))
axes[1].bar(range(config.n_heads + 1), together)
axes[1].axhline(np.log(VOCABULARY), color="gray", linestyle=":")
axes[1].set(xlabel="induction heads removed", ylabel="nats", title="Loss of the repeated half")
plt.show()

# %% [markdown]
# The first layer has one strong previous-token head, and the model is lost without it. The second
# has several induction heads that do the same work, so the loss of one is small, and that of all is
# not: a small effect of an ablation does not say that a head does nothing.

# %% [markdown]
# ## The logit lens
#
# `capture=("residual",)` returns the stream after each block. To read it with the model's own
# final norm and output matrix, put it in place of the stream after the *last* block:
# `replace={"decoder.1.residual": stream}`. Before the first block the stream is the embedding.

# %%
streams = {"embedding": params["embed"]["tokens"][inputs]}
captured = jf.inspect(params, config, inputs, capture=("residual",)).values
streams |= {f"after layer {i}": captured[f"decoder.{i}.residual"] for i in range(config.n_layers)}

figure, ax = plt.subplots(figsize=(7, 3.2), layout="constrained")
lens = {}
for name, stream in streams.items():
    logits = jf.inspect(params, config, inputs, replace={"decoder.1.residual": stream}).logits
    right = jnp.take_along_axis(jax.nn.softmax(logits), targets[..., None], axis=-1)[..., 0]
    lens[name] = float(repeated_loss(logits))
    ax.plot(right.mean(0), marker=".", label=f"{name}: {lens[name]:.2f} nats in the second half")
ax.axvline(PERIOD - 0.5, color="gray", linestyle=":")
ax.set(xlabel="position", ylabel="probability", ylim=(0, 1), title="The right token, by the lens")
ax.legend(loc="center left")
plt.show()

np.testing.assert_allclose(logits, maps.logits, atol=1e-4)  # the last one is the model itself
assert lens["after layer 1"] < lens["after layer 0"] - 1

# %% [markdown]
# After the first layer the answer cannot be read yet: what that layer wrote is for the second
# layer, which finds the answer by it.
#
# ## Activation patching: the path of one token
#
# The circuit makes a precise claim about one prediction. At position $P + p$ the current token is
# `A`, which stood at position $p$. We take a *corrupted* input in which another token stands at
# $p$, so that the model finds no earlier `A`. Then we compute the corrupted input again and again,
# each time with one activation, at one position, from the clean input:
#
# $$ \text{restored} = \frac{\log p_\text{patched}(B) - \log p_\text{corrupted}(B)}
#                           {\log p_\text{clean}(B) - \log p_\text{corrupted}(B)} $$

# %%
PLACE = 10
QUERY = PERIOD + PLACE  # where the model has to predict B
unused = jnp.array([np.setdiff1d(np.arange(VOCABULARY), row)[0] for row in tokens])
corrupted = inputs.at[:, PLACE].set(unused)
answers = targets[:, QUERY]
names = [
    f"decoder.{i}.{what}"
    for i in range(config.n_layers)
    for what in ("attention_out", "mlp_out", "residual")
]
clean = jf.inspect(params, config, inputs, capture=tuple(names))


def log_probability(logits):
    """The mean log-probability of the answers at the query position."""
    found = jax.nn.log_softmax(logits[:, QUERY])
    return jnp.take_along_axis(found, answers[:, None], axis=-1).mean()


def patched(name):
    """The answer's log-probability with one position of an activation from the clean run, [T]."""

    def at(position):
        def put(value):  # [B, T, D]
            return value.at[:, position].set(clean.values[name][:, position])

        return log_probability(jf.inspect(params, config, corrupted, replace={name: put}).logits)

    return jax.lax.map(jax.jit(at), jnp.arange(LENGTH))


best = float(log_probability(clean.logits))
worst = float(log_probability(jf.forward(params, config, corrupted)))
restored = {name: (np.asarray(patched(name)) - worst) / (best - worst) for name in names}
print(f"log-probability of the answer: clean {best:.2f}, corrupted {worst:.2f}")

figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
image = ax.imshow(np.stack([*restored.values()]), cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
ax.set(yticks=range(len(names)), yticklabels=names, xlabel="position that is patched")
ax.set_xticks([PLACE, PLACE + 1, QUERY], ["p", "\np + 1", "P + p"])
ax.set_title("How much of the clean answer one activation restores")
plt.colorbar(image, ax=ax)
plt.show()

for name, values in restored.items():
    print(f"{name:24} best at position {values.argmax():2d}: {values.max():.2f}")

# %% [markdown]
# Two activations restore the answer, and they are the two heads of the circuit. What attention of
# layer 0 writes at $p + 1$ says that `A` stands before `B`; what attention of layer 1 writes at
# $P + p$ is the copy of `B`.

# %%
first, second = restored["decoder.0.attention_out"], restored["decoder.1.attention_out"]
assert first.argmax() == PLACE + 1 and first.max() > 0.5
assert second.argmax() == QUERY and second.max() > 0.5

# %% [markdown]
# All of this works on any model that `jf.load` reads. `docs/research.md` has more examples, the
# docstring of `jf.inspect` lists the names of the intermediates, and `jaxformer attention RUN`
# makes a page of the attention maps.
