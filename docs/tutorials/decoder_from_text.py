# %% [markdown]
# # A decoder, from text to sample
#
# A decoder-only language model (GPT, Llama) factors the probability of a text into that of each
# token given those before it, and learns by maximum likelihood:
#
# $$\log p(x) = \sum_{t} \log p(x_t \mid x_{<t}), \qquad
# \mathcal{L} = -\frac{1}{T} \sum_{t=1}^{T} \log p(x_t \mid x_{<t})$$
#
# The model here is that of Llama (arXiv:2302.13971): RMSNorm, RoPE, SwiGLU and, as in its
# successors, grouped-query attention.
#
# **Our functions:** `jf.forward` for the logits, `jf.loss_of("causal", config)` for the loss.
#
# **The tests that hold them:** no token is seen before its turn,
# `tests/models/test_model_invariants.py::test_future_tokens_do_not_move_past_logits`, and each
# token of a text is a target once,
# `tests/data/test_batches.py::test_every_token_but_the_first_is_a_target_once`.
#
# This notebook goes all the way by hand: raw text, a tokenizer, batches, a model, training, a
# sample, and bits per byte. `python train.py configs/quickstart.py` does the same in one line.

# %%
import gzip
import inspect
import math
import sysconfig
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxformer as jf
from jaxformer.config import OptimizerConfig
from jaxformer.training.optimizers.run_optimizer import make_optimizer
from jaxformer.training.optimizers.schedules import make_schedule

# %% [markdown]
# ## Raw text
#
# The source of some modules of the running Python's standard library. The last tenth of each file
# is held out: the model is judged by text that it has not seen.

# %%
library = Path(sysconfig.get_path("stdlib"))
packages = ["asyncio", "concurrent", "email", "http", "json", "logging", "unittest", "urllib"]
files = sorted(path for package in packages for path in (library / package).glob("**/*.py"))
files = [path for path in files if "test" not in path.relative_to(library).parts]
files += sorted(library.glob("[a-s]*.py"))
texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]

training = [text[: len(text) * 9 // 10] for text in texts]
heldout = [text[len(text) * 9 // 10 :] for text in texts]
size = sum(len(text.encode()) for text in training)
print(f"{len(files)} files, {size / 1e6:.1f} MB for training")
print(inspect.cleandoc(training[0])[:300])

# %% [markdown]
# ## A tokenizer
#
# Byte-pair encoding (arXiv:1508.07909) starts from the 256 bytes and merges the most frequent pair
# of neighbors, again and again. `train_bpe` gives the vocabulary and the merges in order.
# (`tests/tokenizer/test_bpe.py::test_training_on_any_text_equals_the_plain_implementation`)

# %%
END = "<|endoftext|>"
work = Path(tempfile.mkdtemp())
(work / "training.txt").write_text(END.join(training), encoding="utf-8")
vocab, merges = jf.tokenizer.train_bpe(str(work / "training.txt"), 1024, [END])
tokenizer = jf.tokenizer.Tokenizer.from_bpe(vocab, merges, [END])
print("first merges:", [a + b for a, b in merges[:12]])
print("later merges:", [a + b for a, b in merges[-12:]])

line = "    def __init__(self, name):\n"
ids = tokenizer.encode(line)
print(len(line), "characters are", len(ids), "tokens:", [tokenizer.shown(token) for token in ids])
assert tokenizer.decode(ids) == line
assert len(vocab) == tokenizer.vocab_size == 1024
# Special tokens and bytes come first; every other token is the merge of two earlier ones.
assert [vocab[len(vocab) - len(merges) + i] for i in range(3)] == [a + b for a, b in merges[:3]]

# %% [markdown]
# ## Batches
#
# All text becomes one array of ids, in which `<|endoftext|>` ends each file. A row of a batch is a
# window of T + 1 ids: the first T are what the model reads, and the last T, one place further, what
# it has to predict.
#
# `batches[k]` depends on k alone. So a run that is interrupted and resumed reads the same batches,
# and no state of an iterator has to be saved.


# %%
def ids_of(texts: list[str]) -> np.ndarray:
    """The ids of the texts one after the other, each with the end token: int32."""
    return np.array(list(tokenizer.encode_iterable(text + END for text in texts)), np.int32)


class Windows:
    """`batches[k]` is the batch of step k: windows from random places."""

    def __init__(self, ids: np.ndarray, rows: int, length: int) -> None:
        self.ids, self.rows, self.length = ids, rows, length

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        last = len(self.ids) - self.length
        starts = np.random.default_rng(step).integers(0, last, self.rows)
        return rows_at(self.ids, starts, self.length)


def rows_at(ids: np.ndarray, starts: np.ndarray, length: int) -> dict[str, np.ndarray]:
    """The windows from `starts` on: tokens and targets int32 [B, T], weights float32 [B, T]."""
    windows = ids[starts[:, None] + np.arange(length + 1)]  # [B, T + 1]
    weights = np.ones((len(starts), length), np.float32)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:], "weights": weights}


LENGTH, ROWS = 128, 16
train_ids, held_ids = ids_of(training), ids_of(heldout)
batches = Windows(train_ids, ROWS, LENGTH)
print(f"{len(train_ids):,} ids for training, {size / len(train_ids):.2f} bytes per token")

batch = batches[0]
assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1]).all()
assert all((batches[0][name] == batch[name]).all() for name in batch)  # the same when asked again

# %% [markdown]
# ## The model
#
# A config is a frozen dataclass, `jf.specs` the table of its parameters, and `jf.forward` a pure
# function of parameters and tokens. Before training, every token is about equally likely, so the
# loss is near $\log V$.

# %%
config = jf.ModelConfig(
    vocab_size=tokenizer.vocab_size,
    d_model=128,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    max_length=512,
    tied_head=True,
)
params = jf.init(config, jax.random.key(0))
count = sum(leaf.size for leaf in jax.tree.leaves(params))
print(f"{count:,} parameters")

logits = jf.forward(params, config, batch["tokens"])
assert logits.shape == (ROWS, LENGTH, config.vocab_size)

# The loss by hand, and the library's as (sum, weight).
log_p = jax.nn.log_softmax(logits)
by_hand = -np.take_along_axis(np.asarray(log_p), batch["targets"][..., None], axis=-1).sum()
loss = jf.loss_of("causal", config)
total, weight = loss(params, batch, None)["loss"]
np.testing.assert_allclose(by_hand, total, rtol=1e-5)
print(f"loss {total / weight:.3f} nats per token; log V = {math.log(config.vocab_size):.3f}")
assert abs(total / weight - math.log(config.vocab_size)) < 0.2

# %% [markdown]
# ## Training
#
# `jf.make_step` compiles the loss, its gradient and the update into one program, and `jf.fit` runs
# it. The optimizer is the quickstart's, Muon for the matrices of the blocks and Adam for the rest;
# any `optax.GradientTransformation` serves.

# %%
steps = 150
rule = OptimizerConfig(
    name="muon", learning_rate=1e-2, schedule="linear", warmup_steps=20, final_fraction=0.0
)
schedule = make_schedule(rule, steps)
optimizer = make_optimizer(rule, schedule, jf.specs(config))
history: list[tuple[float, float]] = []
state = jf.fit(
    jf.make_step(loss, optimizer, schedules={"learning_rate": schedule}),
    jf.init_state(params, optimizer),
    batches,
    steps=steps,
    hooks=[
        lambda step, state, metrics: history.append(
            (float(metrics["loss"]), float(metrics["learning_rate"]))
        )
    ],
)
params = state.params
losses, rates = np.array(history).T
print(f"loss {losses[0]:.2f} -> {losses[-10:].mean():.2f} nats per token")
assert losses[-10:].mean() < losses[0] - 2

figure, axis = plt.subplots(figsize=(6, 3))
axis.plot(losses)
axis.set_xlabel("step")
axis.set_ylabel("loss (nats per token)")
other = axis.twinx()
other.plot(rates, color="C1", linestyle="--")
other.set_ylabel("learning rate", color="C1")
plt.show()

# %% [markdown]
# ## A sample
#
# `jf.generate` reads the prompt into a cache of keys and values, then runs the whole loop of single
# tokens on the device. At temperature 0 it always takes the likeliest token; here it draws from the
# 40 likeliest.

# %%
prompt = "class Server:\n    def __init__(self, "
made = jf.generate(
    params,
    config,
    [tokenizer.encode(prompt)],
    max_new_tokens=150,
    key=jax.random.key(1),
    temperature=0.7,
    top_k=40,
)
print(prompt + tokenizer.decode(made[0]))

# Greedy decoding with the cache is what the full model says without one.
greedy = jf.generate(params, config, [tokenizer.encode(prompt)], max_new_tokens=8, temperature=0)
whole = np.concatenate([tokenizer.encode(prompt), greedy[0]])
logits = jf.forward(params, config, whole[None, :-1])
assert (np.asarray(logits.argmax(axis=-1))[0, -8:] == np.asarray(greedy[0])).all()

# %% [markdown]
# ## Bits per byte
#
# Nats per token cannot be compared between tokenizers: with larger tokens there are fewer of them,
# and each is harder. Bits per byte can. They are the size of the text if the model were used to
# compress it:
#
# $$\mathrm{bits\ per\ byte} = \frac{-\sum_t \log_2 p(x_t \mid x_{<t})}
# {\mathrm{bytes\ of\ the\ text}}$$

# %%
starts = np.arange(0, len(held_ids) - LENGTH - 1, LENGTH)  # neighboring rows: every token once
starts = starts[: len(starts) // ROWS * ROWS]
held = [rows_at(held_ids, part, LENGTH) for part in starts.reshape(-1, ROWS)]
nats = jf.make_evaluate(loss, held)(params)["val_loss"]

targets = held_ids[1 : len(starts) * LENGTH + 1]
bytes_per_token = tokenizer.token_bytes()[targets].sum() / len(targets)  # the end token has none
bits = nats / math.log(2) / bytes_per_token
text = tokenizer.decode(targets).replace(END, "").encode()
packed = 8 * len(gzip.compress(text, 9)) / len(text)
print(f"{nats:.3f} nats per token, {bytes_per_token:.2f} bytes per token")
print(f"{bits:.3f} bits per byte; gzip -9 takes {packed:.3f} for the same text")
assert bits < packed

plt.figure(figsize=(5, 2.2))
plt.barh(["plain text", "gzip -9", "this model"], [8, packed, bits])
plt.xlabel("bits per byte")
plt.gca().invert_yaxis()
plt.show()

# %% [markdown]
# After a minute of training the model takes fewer bits than `gzip -9`, although it has never seen
# this text, and gzip adapts to a text while it packs it. From here:
#
# - `python train.py configs/quickstart.py --data.train book.txt` trains on your own text,
# - `jaxformer evaluate RUN` prints bits per byte for a run,
# - `checkpoints=jf.Checkpoints("runs/own", every=50)` in `jf.fit` makes this loop resumable.
