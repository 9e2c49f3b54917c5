# %% [markdown]
# # BERT's masking
#
# BERT (arXiv:1810.04805) learns from plain text by filling in blanks. Of the tokens of a text,
# 15 % are chosen at random, and the model predicts these from all others, on both sides:
#
# $$\mathcal{L} = -\frac{1}{|C|} \sum_{t \in C} \log p(x_t \mid \tilde{x}),
# \qquad P(t \in C) = 0.15$$
#
# In the input $\tilde{x}$ that the model reads, a chosen token $x_t$ is (section 3.1 and
# appendix A.1 of the paper)
#
# $$\tilde{x}_t = \begin{cases} \texttt{[MASK]} & \text{with probability } 0.8 \\
# \text{any token} & \text{with probability } 0.1 \\
# x_t & \text{with probability } 0.1 \end{cases}$$
#
# **Our function:** `jaxformer.data.masking.MaskedRows`, the rows of `data.objective=mlm`.
#
# **The test that holds it to these rates:**
# `tests/losses/test_objectives.py::test_masks_have_the_rates_of_bert`.
#
# We look at the masks of real text, count them, and train a tiny encoder to fill in blanks.

# %%
import pydoc_data.topics
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxformer as jf
from jaxformer import data
from jaxformer.config import DataConfig, OptimizerConfig, TokenizerConfig
from jaxformer.losses.heads import accuracy
from jaxformer.runs.objectives import task_of
from jaxformer.training.optimizers.run_optimizer import make_optimizer
from jaxformer.training.optimizers.schedules import make_schedule

# %% [markdown]
# ## The text
#
# Every Python brings half a megabyte of English prose, the language reference that `help("if")`
# shows. We write it into a file, one document for each topic; `<|endoftext|>` separates documents.

# %%
work = Path(tempfile.mkdtemp())
topics = list(pydoc_data.topics.topics.values())
(work / "topics.txt").write_text("<|endoftext|>".join(topics), encoding="utf-8")
print(f"{len(topics)} topics, {sum(map(len, topics)):,} characters")
print(topics[30][:400])

# %% [markdown]
# `data.prepare` does what `train.py` does with its text: it trains a byte-level BPE, here with the
# special tokens of this objective, encodes the text once, and cuts it into rows
# `[CLS] text [SEP]`.

# %%
config = jf.ModelConfig(
    family="encoder",
    d_model=64,
    n_layers=2,
    n_heads=4,
    max_length=64,
    positions="learned",
    norm="layer",
    norm_placement="pre",  # BERT's is "post", which a small model learns more slowly with
    activation="gelu",
    bias="all",
    tied_head=True,
    init="xavier",
    embedding=jf.Embedding(norm=True),
)
settings = DataConfig(
    train=str(work / "topics.txt"),
    objective="mlm",
    sequence_length=64,
    validation_fraction=0.1,
    cache_dir=str(work / "cache"),
)
corpus = data.prepare(settings, TokenizerConfig(vocab_size=1024), task_of(config, settings), seed=0)
tokenizer = corpus.tokenizer
config = replace(config, vocab_size=tokenizer.vocab_size)
rows = corpus.train
mask = tokenizer.special("mask")
assert mask is not None
print(f"{len(rows):,} rows for training, {tokenizer.vocab_size:,} entries of the tokenizer")

# %% [markdown]
# One row. `tokens` is what the model reads, `targets` the text as it is, and `weights` is 1 where a
# token was chosen, and so counts in the loss.

# %%
row = rows.row(100, np.random.default_rng(0))
real = row["segment_ids"] > 0  # a row that the text does not fill ends in padding
print("text  ", tokenizer.decode(row["targets"][real]), "\n")
print("position   text            the model reads")
for place in np.flatnonzero(row["weights"]):
    told, read = row["targets"][place], row["tokens"][place]
    fate = "masked" if read == mask else "kept" if read == told else "replaced"
    print(f"{place:8}   {tokenizer.shown(told)!r:15} {tokenizer.shown(read)!r:15} {fate}")

# %% [markdown]
# ## Counting
#
# The masks are drawn anew whenever a row is read: a row is a function of its number and of a random
# generator, which in training depends on the seed and the step. Reading every row several times
# gives enough draws to hold the rule against.

# %%
ordinary = np.zeros(tokenizer.vocab_size, bool)
ordinary[tokenizer.ordinary()] = True
fates: Counter[str] = Counter()
texts = 0
by_place = np.zeros(settings.sequence_length)
for draw in range(5):
    for number in range(len(rows)):
        row = rows.row(number, np.random.default_rng((draw, number)))
        told, read, chosen = row["targets"], row["tokens"], row["weights"] > 0
        texts += int((ordinary[told] & (row["segment_ids"] > 0)).sum())
        by_place += chosen
        assert not chosen[~ordinary[told]].any()  # [CLS], [SEP] and ends of text are never hidden
        assert (told == read)[~chosen].all()  # what is not chosen stays as it is
        fates["masked"] += int((read[chosen] == mask).sum())
        fates["kept"] += int((read[chosen] == told[chosen]).sum())
        fates["replaced"] += int(((read != mask) & (read != told))[chosen].sum())

chosen_tokens = fates.total()
print(f"{chosen_tokens:,} of {texts:,} ordinary tokens were chosen: {chosen_tokens / texts:.2%}")
assert abs(chosen_tokens / texts - 0.15) < 0.003

rule = {"masked": 0.8, "replaced": 0.1, "kept": 0.1}
for name, wanted in rule.items():
    rate = fates[name] / chosen_tokens
    deviation = (wanted * (1 - wanted) / chosen_tokens) ** 0.5  # of a binomial's rate
    print(f"{name:9} {rate:.2%}, by the rule {wanted:.0%} (+- {deviation:.2%})")
    assert abs(rate - wanted) < 0.01

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), constrained_layout=True)
left.bar(list(rule), [fates[name] / chosen_tokens for name in rule])
for x, wanted in enumerate(rule.values()):
    left.plot([x - 0.4, x + 0.4], [wanted, wanted], "k:", label="the rule" if not x else None)
left.set_ylabel("fraction of the chosen tokens")
left.legend()
right.bar(range(settings.sequence_length), by_place / (5 * len(rows)), width=1.0)
right.axhline(0.15, color="k", linestyle=":")
right.set_xlabel("position in the row")
right.set_ylabel("chance to be chosen")
plt.show()

# %% [markdown]
# Every position has the same chance; the first is `[CLS]`, the last `[SEP]`, and both have none.
#
# **Why not always `[MASK]`?** There are no masks in the texts that the model meets later. If only
# masks were predicted, the model could leave all other tokens unread; since any token may be a
# wrong one, it has to keep a good idea of each (appendix A.1 and C.2 of the paper).
#
# "Any token" is drawn from all ordinary tokens: once in a thousand times it is the token itself,
# which counts as kept here.
#
# ## Training
#
# BERT read 3.3 billion words. To see a model fill in blanks after half a minute, the text has to be
# one in which a hidden word *can* be known from the others. So we make one: sentences about eight
# animals, in which each word about the animal follows from any other.

# %%
ANIMALS = {
    "cow": ("moos", "grass", "on the farm", "calf"),
    "dog": ("barks", "bones", "in the house", "puppy"),
    "cat": ("meows", "fish", "in the kitchen", "kitten"),
    "horse": ("neighs", "hay", "in the stable", "foal"),
    "sheep": ("bleats", "clover", "on the hill", "lamb"),
    "duck": ("quacks", "bread", "on the pond", "duckling"),
    "pig": ("grunts", "corn", "in the yard", "piglet"),
    "hen": ("clucks", "seeds", "in the garden", "chick"),
}
ADJECTIVES = ["big", "small", "white", "brown", "hungry", "happy"]
TIMES = ["today", "again", "every day", "in the morning", "all the time"]


def sentence(rng: random.Random) -> str:
    animal, (sound, food, place, child) = rng.choice([*ANIMALS.items()])
    adjective, time = rng.choice(ADJECTIVES), rng.choice(TIMES)
    return rng.choice(
        [
            f" The {adjective} {animal} {sound} {place}, eats {food} {time} and has a {child}.",
            f" A {animal} with a {adjective} {child} {sound} {time} and eats {food} {place}.",
            f" {time.capitalize()}, the {child} of a {animal} {sound} {place} and eats {food}.",
        ]
    )


rng = random.Random(0)
(work / "animals.txt").write_text("\n".join(sentence(rng) for _ in range(6000)), encoding="utf-8")
settings = replace(settings, train=str(work / "animals.txt"), sequence_length=48)
corpus = data.prepare(settings, TokenizerConfig(vocab_size=700), task_of(config, settings), seed=0)
tokenizer, rows = corpus.tokenizer, corpus.train
config = replace(config, vocab_size=tokenizer.vocab_size)
mask = tokenizer.special("mask")
words = {word for animal, facts in ANIMALS.items() for word in (animal, *facts)}
assert all(len(tokenizer.encode(f" {word}")) == word.count(" ") + 1 for word in words)
print(tokenizer.decode(rows[0]["tokens"], skip_special_tokens=False))

# %% [markdown]
# `jf.loss_of("mlm", config)` is the loss above, as a sum over the chosen tokens and their number;
# only the step divides. The optimizer is that of `configs/bert_tiny.py`: Muon for the matrices of
# the blocks, Adam for the rest.

# %%
batches = data.Batches(corpus.train, settings, 32, seed=0)
assert corpus.validation is not None
heldout = list(data.evaluation_batches(corpus.validation, settings, 32))
steps = 400
rule_of_update = OptimizerConfig(
    name="muon", learning_rate=1e-2, schedule="linear", warmup_steps=30, final_fraction=0.0
)
optimizer = make_optimizer(rule_of_update, make_schedule(rule_of_update, steps), jf.specs(config))
loss = jf.loss_of("mlm", config)
losses: list[float] = []
state = jf.fit(
    jf.make_step(loss, optimizer),
    jf.init_state(jf.specs(config), optimizer, seed=0),
    batches,
    steps=steps,
    hooks=[lambda step, state, metrics: losses.append(float(metrics["loss"]))],
)
params = state.params

# %% [markdown]
# What is it worth? A model that reads nothing can still guess by frequency. The loss of that guess
# is the bar that a model has to get under, and the most frequent token gives its accuracy. The
# held-out sentences are of the same made-up language.

# %%
counts = np.ones(tokenizer.vocab_size)  # one more than each count, so that no token has chance 0
for number in range(len(rows)):
    np.add.at(counts, rows[number]["targets"], 1)
counts[tokenizer.special("cls")] = counts[tokenizer.special("sep")] = 0
chances = counts / counts.sum()
told = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in heldout])
by_frequency = float(-np.log(chances[told]).mean())
most_frequent = float((told == chances.argmax()).mean())


def sums(params: Any, batch: Any, key: jax.Array | None) -> dict[str, Any]:
    """The loss and the accuracy of a batch, each as (sum, weight)."""
    return {**loss(params, batch, key), **accuracy(params, config, batch)}


found = jf.make_evaluate(sums, heldout)(params)
print(f"by frequency: {by_frequency:.2f} nats, {most_frequent:.1%} right")
print(f"the model:    {found['val_loss']:.2f} nats, {found['val_accuracy']:.1%} right")
assert found["val_loss"] < by_frequency / 3
assert found["val_accuracy"] > 0.7 > 3 * most_frequent

plt.figure(figsize=(6, 3))
plt.plot(losses, label="training")
plt.axhline(found["val_loss"], color="C2", linestyle="--", label="held out")
plt.axhline(by_frequency, color="grey", linestyle=":", label="by frequency")
plt.xlabel("step")
plt.ylabel("nats per chosen token")
plt.legend()
plt.show()

# %% [markdown]
# ## Filling in blanks
#
# The model reads a sentence with a blank and gives the probability of every token in its place. It
# looks to both sides: in the first sentence all that tells the animal comes after the blank. (The
# tokens of this tokenizer include the space before a word.)

# %%
forward = jax.jit(jf.forward, static_argnums=1)
questions = {
    " The big[MASK] moos on the farm, eats grass today and has a calf.": " cow",
    " The happy horse neighs in the stable, eats[MASK] again and has a foal.": " hay",
    " A duck with a small[MASK] quacks every day and eats bread on the pond.": " duckling",
}
figure, axes = plt.subplots(1, 3, figsize=(13, 3), constrained_layout=True)
for axis, (question, answer) in zip(axes, questions.items(), strict=True):
    # special_tokens=True reads the name [MASK] in the text as that token.
    ids = tokenizer.encode(question, special_tokens=True)
    around = [tokenizer.special("cls"), *ids, tokenizer.special("sep")]
    tokens = np.zeros((1, settings.sequence_length), np.int32)  # one shape, so one program
    tokens[0, : len(around)] = around
    segments = (np.arange(settings.sequence_length) < len(around)).astype(np.int32)[None]
    logits = forward(params, config, tokens, segment_ids=segments)
    shares = jax.nn.softmax(logits[0, around.index(mask)])
    top, which = jax.lax.top_k(shares, 5)
    assert tokenizer.decode(which[:1]) == answer
    axis.barh([repr(tokenizer.shown(int(token))) for token in which], top)
    axis.invert_yaxis()
    axis.set_title(question.replace("[MASK]", " [MASK]"), fontsize=8)
    axis.set_xlabel("probability")
plt.show()

# %% [markdown]
# `configs/bert_tiny.py` trains on the standard library's source, with the second task of the paper
# (does one text follow the other?), and its `:classifier` fine-tunes that model.
# `configs/bert_base.py` has the sizes of the paper.
