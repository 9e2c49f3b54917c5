# %% [markdown]
# # Positions: six schemes beyond the length they were trained at
#
# Attention by itself does not know the order of its keys. Each scheme below tells it, in another
# way, and they differ most when a model reads a text longer than any that it was trained on. This
# notebook trains one tiny decoder with each, on rows of 64 bytes, and measures the loss at every
# position of rows of 512.
#
# With $q_t, k_s$ a query and a key, $x_t$ the embedding of the token at position $t$:
#
# | `positions=` | formula | source |
# |---|---|---|
# | `learned` | $x_t + P_t$, a learned row for each position | arXiv:1705.03122 |
# | `sinusoidal` | $x_t + [\sin t\theta_i, \cos t\theta_i]$ | arXiv:1706.03762 |
# | `rope` | $(R_t q_t) \cdot (R_s k_s) = q_t \cdot R_{s-t} k_s$ | arXiv:2104.09864 |
# | `alibi` | $q_t \cdot k_s - m_h (t - s)$, a fixed slope $m_h$ for each head | arXiv:2108.12409 |
# | `t5` | $q_t \cdot k_s + b_{h,\,\mathrm{bucket}(t - s)}$, learned | arXiv:1910.10683 |
# | `none` | $q_t \cdot k_s$; the causal mask alone tells positions apart | arXiv:2305.19466 |
#
# Here $\theta_i = 10000^{-2i/D}$, and $R_t$ rotates pair $i$ of a head's dimensions by $t\theta_i$.
#
# The functions are in `jaxformer/layers/`: `sinusoids` and `rope` in `positions.py`, `alibi_slopes`
# and `relative_bucket` in `biases.py`. One test runs every scheme in every family:
# `tests/models/test_family_invariants.py::test_packing_padding_and_caching_change_nothing`. These
# hold the formulas:
#
# - `tests/layers/test_positions.py::test_sinusoids_are_their_formula`
# - `tests/layers/test_positions.py::test_rope_turns_each_pair_as_a_complex_number`
# - `tests/layers/test_positions.py::test_alibi_slopes_are_the_published_ones`
# - `tests/layers/test_positions.py::test_t5_buckets_are_the_published_ones`
# - `tests/layers/test_positions.py::test_stretched_rope_has_the_published_frequencies`

# %%
import os

from jaxformer.config.settings import with_settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import functools
import sysconfig
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxformer as jf

SCHEMES = ("learned", "sinusoidal", "rope", "alibi", "t5", "none")

# %% [markdown]
# ## The text
#
# The source of Python's standard library, as bytes: it is on every machine that runs this. One file
# in ten is held out.

# %%
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
pieces = [np.frombuffer(path.read_bytes(), np.uint8) for path in files]
training = np.concatenate([piece for i, piece in enumerate(pieces) if i % 10])
heldout = np.concatenate(pieces[::10])
print(f"{len(training):,} bytes to train on, {len(heldout):,} held out")

TRAINED, LONG, ROWS = 64, 512, 16


class Batches:
    """`batches[k]` is the batch of step k: windows of the text, each byte a token."""

    def __getitem__(self, step):
        starts = np.random.default_rng(step).integers(0, len(training) - TRAINED - 1, ROWS)
        rows = training[starts[:, None] + np.arange(TRAINED + 1)].astype(np.int32)
        weights = np.ones((ROWS, TRAINED), np.float32)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


# %% [markdown]
# ## Training
#
# The same decoder, seed, batches and steps for each scheme. The far buckets of `t5` begin at a
# distance of `relative.distance`: it is set to the trained length, so that training has seen them
# all.

# %%
STEPS = 200


def model(positions):
    return jf.ModelConfig(
        vocab_size=256,
        d_model=64,
        n_layers=2,
        n_heads=4,
        d_ff=128,
        max_length=TRAINED,
        positions=positions,
        init="fan_in",
        relative=jf.RelativePositions(distance=TRAINED),
    )


def trained(config):
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 40, STEPS, 1e-4)
    optimizer = optax.adamw(schedule, b2=0.98)
    step = jf.make_step(jf.loss_of("causal", config), optimizer)
    state = jf.init_state(jf.specs(config), optimizer, seed=0)
    return jf.fit(step, state, Batches(), steps=STEPS).params


params = {}
for name in SCHEMES:
    began = time.perf_counter()
    params[name] = trained(model(name))
    print(f"{name:10} {time.perf_counter() - began:4.1f} s")

# %% [markdown]
# ## Beyond the trained length
#
# The loss at each position, as the mean over 64 held-out rows. Nothing else changes: the model
# that was trained on 64 bytes reads 512.
#
# One scheme cannot do this. A table of learned positions ends with its last row, and there is
# nothing to take for the next one. The library refuses such a row with the reason, instead of
# taking the last row again and again:

# %%
starts = np.random.default_rng(0).integers(0, len(heldout) - LONG - 1, 64)
rows = heldout[starts[:, None] + np.arange(LONG + 1)].astype(np.int32)

try:
    jf.forward(params["learned"], model("learned"), rows[:, :LONG])
    refused = False
except jf.ConfigError as error:
    refused = True
    print("ConfigError:", error)
assert refused

# %% [markdown]
# Generation is bounded by `max_length` for every scheme. To write on, the newest part of the text
# can be read again, at positions from 0, whenever the context is full:

# %%
prompt = np.frombuffer(b"def ", np.uint8).astype(int).tolist()
key = jax.random.key(0)
try:
    jf.generate(params["learned"], model("learned"), [prompt], 200, temperature=0)
    refused = False
except jf.ConfigError as error:
    refused = True
    print("ConfigError:", error)
assert refused

text = prompt
while len(text) < 200:
    window, key = text[-TRAINED * 3 // 4 :], jax.random.fold_in(key, len(text))
    settings = {"key": key, "temperature": 0.7, "max_new_tokens": TRAINED - len(window)}
    new = jf.generate(params["learned"], model("learned"), [window], **settings)
    text = text + new[0].tolist()
print(bytes(text).decode("utf-8", "replace"))


# %%
@functools.partial(jax.jit, static_argnums=1)
def loss_by_position(params, config, rows):
    """Nats of each target, the mean over rows: [B, T + 1] -> [T], computed eight rows at a time."""

    def mean_nats(rows):
        logits = jf.forward(params, config, rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean(0)

    return jax.lax.map(mean_nats, rows.reshape(-1, 8, rows.shape[1])).mean(0)


def smooth(curve, width=32):
    """Means of `width` positions each, and their middle positions."""
    return np.arange(width / 2, len(curve), width), curve.reshape(-1, width).mean(1)


curves = {}
for name in SCHEMES:
    length = TRAINED if name == "learned" else LONG
    curves[name] = np.asarray(loss_by_position(params[name], model(name), rows[:, : length + 1]))

figure, axes = plt.subplots(2, 3, figsize=(9, 5), sharex=True, sharey=True, layout="constrained")
for ax, name in zip(axes.flat, SCHEMES, strict=True):
    ax.plot(*smooth(curves[name]))
    ax.axvline(TRAINED, color="gray", linestyle=":")
    ax.set_title(name)
    if name == "learned":
        ax.axvspan(TRAINED, LONG, color="0.92")
        ax.text(0.55, 0.5, "the table ends:\nrefused", transform=ax.transAxes, ha="center")
figure.supxlabel(f"position (trained up to {TRAINED}, dotted)")
figure.supylabel("nats per byte")
figure.suptitle("Loss by position")
plt.show()

# %%
within = {name: curve[TRAINED // 2 : TRAINED].mean() for name, curve in curves.items()}
beyond = {name: curves[name][-TRAINED:].mean() for name in SCHEMES if name != "learned"}
print(f"{'':10} {'32 .. 63':>9} {'448 .. 511':>11}")
for name in SCHEMES:
    print(f"{name:10} {within[name]:9.2f} {beyond.get(name, float('nan')):11.2f}")

# %% [markdown]
# - **sinusoidal** and **rope** see angles that training never drew, and the loss rises soon after
#   the dotted line. That RoPE's scores depend on distances alone does not help: the distances are
#   new too.
# - **alibi** gives far keys ever smaller weights, so what a head reads hardly changes with the
#   length of the text. Its loss stays where it was, which is the claim of its paper.
# - **t5** puts all distances beyond the last one into one bucket, which training has seen. Its loss
#   rises slowly, because ever more keys share the weights.
# - **none** has no positions that could be new, but its weights are spread over more and more keys
#   in the same way.
#
# These are tiny models after 200 steps on code, so the order of the schemes within the trained
# length is no general result. What happens beyond it is what arXiv:2108.12409 and arXiv:2306.15595
# report of large models.

# %%
order = sorted(beyond, key=beyond.get)
print("beyond the trained length, best first:", ", ".join(order))
assert beyond["alibi"] < within["alibi"] + 0.1
assert beyond["rope"] > beyond["alibi"] + 0.2
assert beyond["sinusoidal"] > beyond["alibi"] + 0.2
assert beyond["t5"] < min(beyond["rope"], beyond["sinusoidal"])

# %% [markdown]
# ## RoPE, stretched
#
# RoPE can be given a longer range afterwards. Position interpolation (`linear`, arXiv:2306.15595)
# divides all angles by a factor, so that 512 positions lie in the range of 64, at the price of
# neighbors that are eight times as close as in training. The other scalings keep the fast pairs,
# which tell neighbors apart, and slow down only the slow ones: `yarn` (arXiv:2309.00071) and
# `llama3` (arXiv:2407.21783) by the number of turns of a pair within the trained length, and
# `dynamic` by a larger base, as soon as a text is longer than that. Here nothing is trained again.

# %%
SCALINGS = ("none", "linear", "dynamic", "yarn", "llama3")
stretched = {}
for scaling in SCALINGS:
    config = model("rope")
    if scaling != "none":
        config = with_settings(
            config,
            {
                "rope.scaling": scaling,
                "rope.factor": LONG / TRAINED,
                "rope.original_length": TRAINED,
                "max_length": LONG,
            },
        )
    stretched[scaling] = np.asarray(loss_by_position(params["rope"], config, rows))

figure, axes = plt.subplots(1, 5, figsize=(10, 2.8), sharey=True, layout="constrained")
for ax, scaling in zip(axes, SCALINGS, strict=True):
    ax.plot(*smooth(stretched["none"]), color="0.7")
    ax.plot(*smooth(stretched[scaling]))
    ax.axvline(TRAINED, color="gray", linestyle=":")
    ax.set_title(scaling)
    print(f"{scaling:8} {stretched[scaling][-TRAINED:].mean():.2f} nats at 448 .. 511")
figure.supxlabel("position")
figure.supylabel("nats per byte")
figure.suptitle("RoPE without and with scaling by 8 (gray: without)")
plt.show()

last = {scaling: curve[-TRAINED:].mean() for scaling, curve in stretched.items()}
assert min(last["dynamic"], last["yarn"], last["llama3"]) < last["none"]

# %% [markdown]
# A scaling is a start for training on longer rows, not a replacement of it: the config of such a
# run sets `model.rope.scaling`, `model.rope.factor` and `model.rope.original_length`, and begins
# with `run.init_from` (`docs/models.md`, "Long context", which also has `longrope`).
