# %% [markdown]
# # T5's span corruption
#
# T5 (arXiv:1910.10683, section 3.1.4) trains an encoder-decoder on plain text. Short spans of the
# text are hidden; each is replaced by one *sentinel* token, and the decoder writes every sentinel
# followed by what it stands for:
#
#     text     Thank you for inviting me to your party last week .
#     source   Thank you <extra_id_0> me to your party <extra_id_1> week . END
#     target   <extra_id_0> for inviting <extra_id_1> last END
#
# Of $n$ tokens, 15 % are hidden in spans of mean length 3:
#
# $$h = \mathrm{round}(0.15\, n), \qquad s = \mathrm{round}(h / 3), \qquad
# |\mathrm{source}| = n - h + s + 1, \qquad |\mathrm{target}| = h + s + 1$$
#
# The 1 is the end token. (The paper's figure closes the target with one more sentinel.) The target
# is short, which makes this objective cheaper than predicting the whole text.
#
# **Our function:** `jaxformer.data.spans.SpanRows`, the rows of `data.objective=span_corruption`.
#
# **The test that holds it:** `tests/losses/test_objectives.py::test_spans_are_those_of_t5`.

# %%
import math
import pydoc_data.topics
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import jaxformer as jf
from jaxformer import data
from jaxformer.config import DataConfig, OptimizerConfig, TokenizerConfig
from jaxformer.data.spans import hidden_counts, raw_length
from jaxformer.runs.objectives import task_of
from jaxformer.training.optimizers.run_optimizer import make_optimizer
from jaxformer.training.optimizers.schedules import make_schedule

# %% [markdown]
# ## On real text
#
# The text is the language reference that every Python brings for `help("if")`: half a megabyte of
# English. The rows are those of the paper: a source of 512 tokens.

# %%
work = Path(tempfile.mkdtemp())
topics = list(pydoc_data.topics.topics.values())
(work / "topics.txt").write_text("<|endoftext|>".join(topics), encoding="utf-8")

config = jf.ModelConfig(
    family="encoder_decoder",
    d_model=64,
    n_layers=2,
    n_heads=4,
    d_ff=128,
    max_length=512,
    positions="t5",
    norm="rms",
    activation="geglu_tanh",
    init="fan_in",
    attention=jf.Attention(scale=1.0),
)
settings = DataConfig(
    train=str(work / "topics.txt"),
    objective="span_corruption",
    sequence_length=114,
    source_length=512,
    cache_dir=str(work / "cache"),
)
corpus = data.prepare(settings, TokenizerConfig(vocab_size=2048), task_of(config, settings), seed=0)
tokenizer, rows = corpus.tokenizer, corpus.train
sentinels = tokenizer.sentinels()
print(f"{len(rows)} rows; {len(sentinels)} sentinels, {tokenizer.shown(sentinels[0])} and so on")

row = rows.row(40, np.random.default_rng(0))
source = row["source"][row["source_segment_ids"] > 0]
target = row["targets"][row["segment_ids"] > 0]
print("\nSOURCE:", tokenizer.decode(source[:150], skip_special_tokens=False))
print("\nTARGET:", tokenizer.decode(target[:40], skip_special_tokens=False))

# %% [markdown]
# ## The lengths
#
# How much text fits into a source of 512? The most for which $n - h + s + 1 \le 512$ is 568 tokens.
# (`raw_length` and `hidden_counts` are the two formulas above.)

# %%
n = raw_length(512, density=0.15, mean=3.0)
h, s = hidden_counts(n, density=0.15, mean=3.0)
print(f"{n} tokens of text: {h} hidden in {s} spans")
assert (n, h, s) == (568, round(0.15 * 568), round(85 / 3))
assert n - h + s + 1 == 512 == len(source)
assert h + s + 1 == 114 == len(target)

# %% [markdown]
# Now the rule against all rows: the sentinels come in order, the same in source and target; put in
# their places, the spans give the text back.


# %%
def spans_of(target: np.ndarray) -> dict[int, list[int]]:
    """The hidden span of each sentinel, in a target without its end token."""
    known = set(sentinels)
    spans: dict[int, list[int]] = {}
    for token in target.tolist():
        if token in known:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    return spans


def restored(source: np.ndarray, spans: dict[int, list[int]]) -> list[int]:
    """The text, without the end token of the source."""
    return [token for item in source[:-1].tolist() for token in spans.get(item, [item])]


lengths: list[int] = []
for number in range(len(rows) - 1):  # the last one is shorter
    row = rows[number]
    source = row["source"][row["source_segment_ids"] > 0]
    target = row["targets"][row["segment_ids"] > 0]
    spans = spans_of(target[:-1])
    assert len(source) == 512 and len(target) == 114 and len(spans) == s
    assert list(spans) == sentinels[:s] == source[np.isin(source, sentinels)].tolist()
    assert restored(source, spans) == rows.store.read(number * n, (number + 1) * n).tolist()
    # The decoder reads the target one place later, behind the start token.
    assert row["tokens"].tolist() == [tokenizer.start_token, *target[:-1].tolist()]
    lengths += map(len, spans.values())

print(f"{len(lengths):,} spans: mean length {np.mean(lengths):.3f}, the longest has {max(lengths)}")
assert math.isclose(np.mean(lengths), h / s)  # 85 / 28, in every row alike
assert min(lengths) == 1

# %% [markdown]
# A mean of 3 is not a length of 3. All divisions of the $h$ hidden tokens into $s$ spans are
# equally likely, and of the $\binom{h - 1}{s - 1}$ divisions those with a span of length $k$ in a
# given place number $\binom{h - k - 1}{s - 2}$. So short spans are the most frequent.

# %%
k = np.arange(1, 16)
expected = np.array([math.comb(h - i - 1, s - 2) / math.comb(h - 1, s - 1) for i in k.tolist()])
measured = np.array([np.mean(np.array(lengths) == i) for i in k])
assert np.abs(measured - expected).max() < 5 * (0.25 / len(lengths)) ** 0.5  # 5 deviations

plt.figure(figsize=(6, 3))
plt.bar(k, measured, label=f"{len(lengths):,} spans of the text")
plt.plot(k, expected, "ko", markersize=4, label="all divisions equally likely")
plt.xlabel("length of a span, in tokens")
plt.ylabel("fraction of the spans")
plt.legend()
plt.show()

# %% [markdown]
# ## Training a tiny T5
#
# To see that it works in a minute, the text has to be one in which a hidden span *can* be known.
# So we make one of lists in a fixed order: weekdays, months, numbers, letters. With the word before
# a gap and the word after it, the gap is determined, and so is its length.

# %%
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June"]
MONTHS += ["July", "August", "September", "October", "November", "December"]
GREEK = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def line(rng: random.Random) -> str:
    """One of the lists, from a random place on, as often as it takes."""
    words = rng.choice([NUMBERS, WEEKDAYS, MONTHS, GREEK])
    first, count = rng.randrange(len(words)), rng.randint(30, 60)
    return " " + " ".join(words[(first + i) % len(words)] for i in range(count))


rng = random.Random(0)
(work / "lists.txt").write_text("\n".join(line(rng) for _ in range(3000)), encoding="utf-8")
settings = DataConfig(
    train=str(work / "lists.txt"),
    objective="span_corruption",
    sequence_length=16,
    source_length=40,
    cache_dir=str(work / "cache"),
)
corpus = data.prepare(settings, TokenizerConfig(vocab_size=600), task_of(config, settings), seed=0)
tokenizer = corpus.tokenizer
sentinels = tokenizer.sentinels()
config = replace(config, vocab_size=tokenizer.vocab_size)
words = {word: tokenizer.encode(f" {word}") for word in [*NUMBERS, *WEEKDAYS, *MONTHS, *GREEK]}
assert all(len(ids) == 1 for ids in words.values())  # the tokenizer has learned every word

row = corpus.train[0]
print("source:", tokenizer.decode(row["source"], skip_special_tokens=False))
print("target:", tokenizer.decode(row["targets"], skip_special_tokens=False))

# %%
steps = 700
rule = OptimizerConfig(
    name="muon", learning_rate=1e-2, schedule="linear", warmup_steps=50, final_fraction=0.0
)
optimizer = make_optimizer(rule, make_schedule(rule, steps), jf.specs(config))
loss = jf.loss_of("span_corruption", config)
losses: list[float] = []
state = jf.fit(
    jf.make_step(loss, optimizer),
    jf.init_state(jf.specs(config), optimizer, seed=0),
    data.Batches(corpus.train, settings, 32, seed=0),
    steps=steps,
    hooks=[lambda step, state, metrics: losses.append(float(metrics["loss"]))],
)
params = state.params
assert corpus.validation is not None
heldout = list(data.evaluation_batches(corpus.validation, settings, 32))[:16]
held = jf.make_evaluate(loss, heldout)(params)["val_loss"]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}; held out {held:.3f} nats per token")

# %% [markdown]
# The bar to get under: a model that knows how often each token occurs, and reads nothing.

# %%
told = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in heldout])
counts = np.bincount(told, minlength=config.vocab_size)
shares = counts[counts > 0] / counts.sum()
by_frequency = float(-(shares * np.log(shares)).sum())
assert held < by_frequency / 4

plt.figure(figsize=(6, 3))
plt.plot(losses, label="training")
plt.axhline(held, color="C2", linestyle="--", label="held out")
plt.axhline(by_frequency, color="grey", linestyle=":", label="by frequency")
plt.xlabel("step")
plt.ylabel("nats per target")
plt.legend()
plt.show()

# %% [markdown]
# ## Filling in spans
#
# The model has never seen the held-out rows. It writes the whole target, greedily: sentinels, spans
# and the end token. A span counts as right if all of it is. Every row ends with a hidden span
# (its source ends with a sentinel), and how far that one goes, no word after it tells. So the last
# span of each row is left out.

# %%
batch = {name: np.concatenate([each[name] for each in heldout[:4]]) for name in heldout[0]}
written = jf.generate(
    params,
    config,
    np.full((len(batch["source"]), 1), tokenizer.start_token),
    max_new_tokens=settings.sequence_length,
    source=batch["source"],
    source_segment_ids=batch["source_segment_ids"],
    temperature=0,
    end_token=tokenizer.end_token,
)
right, spans_seen, end = 0, 0, tokenizer.end_token
for made, told, real in zip(
    np.asarray(written), batch["targets"], batch["segment_ids"], strict=True
):
    hidden = spans_of(told[real > 0][:-1])
    hidden.popitem()
    ended = made.tolist().index(end) if end in made else len(made)
    ours = spans_of(made[:ended]) if made[0] in sentinels else {}
    right += sum(ours.get(sentinel) == span for sentinel, span in hidden.items())
    spans_seen += len(hidden)
print(f"{right} of {spans_seen} spans are right ({right / spans_seen:.0%})")
assert right / spans_seen > 0.8

# %% [markdown]
# And in a text of our own:

# %%
text = " Monday Tuesday Wednesday<extra_id_0> Saturday Sunday Monday Tuesday Wednesday Thursday"
text += " Friday Saturday Sunday\n one two three four five six seven eight nine ten one<extra_id_1>"
ids = tokenizer.as_source(tokenizer.encode(text, special_tokens=True))
source = np.zeros((1, settings.source_length), np.int32)
source[0, : len(ids)] = ids
made = jf.generate(
    params,
    config,
    [[tokenizer.start_token]],
    max_new_tokens=settings.sequence_length,
    source=source,
    source_segment_ids=(np.arange(settings.source_length) < len(ids)).astype(np.int32)[None],
    temperature=0,
    end_token=tokenizer.end_token,
)
print("source:", tokenizer.decode(ids, skip_special_tokens=False))
print("target:", tokenizer.decode(made[0], skip_special_tokens=False))

# %% [markdown]
# `configs/t5_tiny.py` trains the same objective on the standard library's source, and
# `configs/t5_small.py` has the sizes of the published model. `jaxformer sample RUN --prompt` reads
# the names of sentinels in its prompt.
