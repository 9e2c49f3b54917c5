# %% [markdown]
# # The Transformer of 2017
#
# *Attention Is All You Need* (arXiv:1706.03762) translates with two stacks of blocks. An *encoder*
# reads the source sentence in both directions. A *decoder* writes the target token by token; each
# of its blocks looks at what is written so far (causal self-attention) and at the encoder's output
# (cross-attention). Every sublayer is wrapped as
#
# $$x \leftarrow \mathrm{LayerNorm}(x + \mathrm{Sublayer}(x))$$
#
# and in cross-attention the queries come from the decoder, keys and values from the encoder:
#
# $$\mathrm{Attention}(x_{\mathrm{dec}} W^Q,\; x_{\mathrm{enc}} W^K,\; x_{\mathrm{enc}} W^V)$$
#
# **Our function:** `jf.forward` with `ModelConfig(family="encoder_decoder")`; the stacks are in
# `jaxformer/models/families.py`, the sublayers in `jaxformer/layers/block.py`.
#
# **The tests that hold it:**
# `tests/models/test_family_invariants.py::test_packing_padding_and_caching_change_nothing`, and
# beside it `test_cross_attention_looks_at_every_real_token_of_its_source_and_at_no_other`.
#
# We first train it on the smallest task that needs both stacks, copying, and then on German to
# English. In both we look at the cross-attention.

# %%
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxformer as jf
from jaxformer import data
from jaxformer.config import DataConfig, TokenizerConfig
from jaxformer.layers.positions import sinusoids
from jaxformer.runs.objectives import task_of
from jaxformer.runs.run_evaluation import translate

# %% [markdown]
# ## The model
#
# The settings that make a `ModelConfig` the model of the paper: LayerNorm *after* the sum (`post`),
# ReLU, biases, embeddings times $\sqrt{D}$, one matrix for the embeddings of both sides and the
# output layer, and sinusoidal positions:
#
# $$PE(t, 2i) = \sin(t / 10000^{2i/D}), \qquad PE(t, 2i + 1) = \cos(t / 10000^{2i/D})$$
#
# (`tests/layers/test_positions.py::test_sinusoids_are_their_formula`)

# %%
paper = jf.ModelConfig(
    family="encoder_decoder",
    vocab_size=12,
    d_model=64,
    n_layers=2,
    n_heads=4,
    d_ff=128,
    max_length=64,
    positions="sinusoidal",
    norm="layer",
    norm_placement="post",
    activation="relu",
    bias="all",
    tied_head=True,
    init="xavier",
    embedding=jf.Embedding(scale="sqrt"),
)

t, i = np.arange(paper.max_length)[:, None], np.arange(paper.d_model // 2)
angles = t / 10_000.0 ** (2 * i / paper.d_model)
waves = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(paper.max_length, -1)
np.testing.assert_allclose(sinusoids(jnp.arange(paper.max_length), paper.d_model), waves, atol=1e-4)

plt.figure(figsize=(6, 3))
plt.imshow(waves, aspect="auto", cmap="RdBu")
plt.xlabel("dimension")
plt.ylabel("position")
plt.colorbar()
plt.show()

# %% [markdown]
# ## The copy task
#
# The source is ten random symbols, the target is the same ten. The decoder reads the target shifted
# by one place behind a start token (teacher forcing): at place $t$ it has seen the symbols before
# $t$ and has to predict symbol $t$. Symbols are random, so nothing helps but the source.
#
# A batch is a function of the step (`batches[k]`), so that every run sees the same data.

# %%
START, LENGTH, ROWS = 0, 10, 64


class CopyBatches:
    """`batches[k]` is the batch of step k: int32 [ROWS, LENGTH]."""

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        symbols = np.random.default_rng(step).integers(1, paper.vocab_size, (ROWS, LENGTH))
        before = np.pad(symbols[:, :-1], ((0, 0), (1, 0)), constant_values=START)
        arrays = {"source": symbols, "tokens": before, "targets": symbols}
        weights = np.ones(symbols.shape, np.float32)
        return {name: array.astype(np.int32) for name, array in arrays.items()} | {
            "weights": weights
        }


# %% [markdown]
# The learning rate follows the paper (section 5.3): it rises linearly for $w$ steps, then falls
# with the square root of the step,
# $\;D^{-0.5} \min(\mathrm{step}^{-0.5}, \mathrm{step} \cdot w^{-1.5})$. With $D = 512$ and
# $w = 4000$ the peak is 0.0007; small models take more, so here the peak is given.


# %%
def inverse_sqrt(peak: float, warmup: int) -> Callable[[Any], jax.Array]:
    """The paper's schedule, scaled to its peak."""

    def rate(step: Any) -> jax.Array:
        step = step + 1
        return peak * warmup**0.5 * jnp.minimum(step**-0.5, step * warmup**-1.5)

    return rate


optimizer = optax.adam(inverse_sqrt(peak=3e-3, warmup=100), b2=0.98, eps=1e-9)
step = jf.make_step(jf.loss_of("seq2seq", paper), optimizer)
state = jf.init_state(jf.specs(paper), optimizer, seed=0)

# 256 sequences that training does not see; there are 11^10 of them.
fresh = np.random.default_rng(10**6).integers(1, paper.vocab_size, (256, LENGTH))
start = np.full((len(fresh), 1), START)

losses: list[float] = []
copied: dict[int, float] = {}
while copied.get(len(losses), 0) < 1 and len(losses) < 1500:
    state = jf.fit(
        step,
        state,
        CopyBatches(),
        steps=len(losses) + 100,
        hooks=[lambda step, state, metrics: losses.append(float(metrics["loss"]))],
    )
    # Greedy decoding: the source is encoded once, then each new token is read back in.
    written = jf.generate(
        state.params, paper, start, max_new_tokens=LENGTH, source=fresh, temperature=0
    )
    copied[len(losses)] = float((np.asarray(written) == fresh).all(axis=1).mean())
    print(f"step {len(losses)}: loss {losses[-1]:.4f}, {copied[len(losses)]:.0%} copied")

assert losses[0] > 2.3  # the first guesses are no better than chance, log(11) = 2.40
assert copied[len(losses)] == 1, "every fresh sequence is copied without an error"

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), constrained_layout=True)
left.semilogy(losses)
left.axhline(np.log(paper.vocab_size - 1), color="grey", linestyle=":", label="chance, log 11")
left.set_xlabel("step")
left.set_ylabel("loss (nats per symbol)")
left.legend()
right.plot(list(copied), list(copied.values()), "o-")
right.set_xlabel("step")
right.set_ylabel("sequences copied without an error")
right.set_ylim(0, 1.05)
plt.show()

# %% [markdown]
# How does it copy? At place $t$ the decoder has to find source symbol $t$. `jf.attention_maps`
# gives the weights of all layers and heads; the picture is the head whose weights lie closest to
# the diagonal.

# %%
before = np.concatenate([start, fresh[:, :-1]], axis=1)
cross = jf.attention_maps(state.params, paper, before, source=fresh).cross  # [L, B, N, T, S]
assert cross is not None
np.testing.assert_allclose(cross.sum(axis=-1), 1, rtol=1e-4)

diagonal = jnp.einsum("LBNTT->LN", cross) / fresh.size  # the mean weight of symbol t at place t
layer, head = np.unravel_index(int(diagonal.argmax()), diagonal.shape)
print("weight on the diagonal, by layer and head:\n", np.round(np.asarray(diagonal), 2))
assert float(diagonal.max()) > 3 / LENGTH  # evenly spread weights would be 1 / LENGTH

plt.figure(figsize=(4.6, 4))
plt.imshow(cross[layer, 0, head], cmap="Blues", vmin=0, vmax=1)
plt.xticks(range(LENGTH), [str(symbol) for symbol in fresh[0]])
plt.yticks(range(LENGTH), [str(symbol) for symbol in fresh[0]])
plt.xlabel("source")
plt.ylabel("symbol that is written")
plt.title(f"cross-attention, layer {layer}, head {head}")
plt.colorbar(label="weight")
plt.show()

# %% [markdown]
# ## German to English
#
# *Multi30k* (arXiv:1605.00459) has 29,000 German sentences about pictures with their English
# translations. Its files do not come with this library, and a notebook of the documentation does
# not download anything. So the cell below uses
#
# - **Multi30k itself**, if the environment variable `MULTI30K` names a directory with
#   `train.de.gz`, `train.en.gz`, `val.de.gz` and `val.en.gz`, or if there is such a directory
#   `multi30k` here. They are the files that `configs/transformer_multi30k.py` reads too;
# - **otherwise a made-up corpus**: sentences in the style of Multi30k, put together from templates
#   of some forty words. *The results are then those of a toy language*, in which nearly every
#   sentence can be translated without an error.
#
# The made-up sentences keep what makes German to English more than a look-up of words: a time at
# the beginning moves to the end, and in a sentence with "will" the verb comes last in German and
# third in English.

# %%
SUBJECTS = {
    "ein Mann": "a man",
    "eine Frau": "a woman",
    "ein Kind": "a child",
    "ein Mädchen": "a girl",
    "ein Junge": "a boy",
    "ein Hund": "a dog",
    "eine Katze": "a cat",
    "ein alter Mann": "an old man",
}
COLORS = {"roten": "red", "blauen": "blue", "grünen": "green", "weißen": "white"}
CLOTHES = {"mit einem {} Hut": "in a {} hat", "mit einem {} Hemd": "in a {} shirt"}
VERBS = {
    ("läuft", "laufen"): ("runs", "run"),
    ("schläft", "schlafen"): ("sleeps", "sleep"),
    ("spielt", "spielen"): ("plays", "play"),
    ("wartet", "warten"): ("waits", "wait"),
    ("singt", "singen"): ("sings", "sing"),
}
PLACES = {
    "im Park": "in the park",
    "am Strand": "on the beach",
    "auf der Straße": "on the street",
    "vor dem Haus": "in front of the house",
    "unter einem Baum": "under a tree",
}
TIMES = {"heute": "today", "jetzt": "now", "am Abend": "in the evening"}


def sentence(rng: random.Random) -> tuple[str, str]:
    """A German sentence and its translation."""
    subject, a_subject = rng.choice([*SUBJECTS.items()])
    (verb, infinitive), (a_verb, an_infinitive) = rng.choice([*VERBS.items()])
    place, a_place = rng.choice([*PLACES.items()])
    time, a_time = rng.choice([*TIMES.items()])
    if rng.random() < 0.5:
        worn, a_worn = rng.choice([*CLOTHES.items()])
        color, a_color = rng.choice([*COLORS.items()])
        subject, a_subject = (
            f"{subject} {worn.format(color)}",
            f"{a_subject} {a_worn.format(a_color)}",
        )
    german, english = rng.choice(
        [
            (f"{subject} {verb} {time} {place}", f"{a_subject} {a_verb} {a_place} {a_time}"),
            (f"{time} {verb} {subject} {place}", f"{a_subject} {a_verb} {a_place} {a_time}"),
            (
                f"{subject} will {time} {place} {infinitive}",
                f"{a_subject} wants to {an_infinitive} {a_place} {a_time}",
            ),
        ]
    )
    return f"{german[0].upper()}{german[1:]}.", f"{english[0].upper()}{english[1:]}."


def write_made_up(folder: Path) -> None:
    """train.de, train.en, val.de and val.en; no German sentence is in both parts."""
    rng = random.Random(0)
    pairs = list(dict.fromkeys(sentence(rng) for _ in range(6000)))
    for name, part in (("val", pairs[:200]), ("train", pairs[200:])):
        for side, language in enumerate(("de", "en")):
            lines = [pair[side] for pair in part]
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")


work = Path(tempfile.mkdtemp())
folder = Path(os.environ.get("MULTI30K", "multi30k")).expanduser().resolve()
real = (folder / "train.de.gz").is_file()
if not real:
    folder = work
    write_made_up(folder)
suffix = ".gz" if real else ""
print("Multi30k" if real else "a made-up corpus, because Multi30k is not here")

# %% [markdown]
# `data.prepare` does what `train.py` does with these files: it trains one byte-level BPE on both
# languages, encodes the pairs, and packs several of them into each row. A pair is one *segment* of
# its row: a target attends only to the source of its own number.

# %%
settings = DataConfig(
    train=f"{folder}/train.{{de,en}}{suffix}",
    validation=f"{folder}/val.{{de,en}}{suffix}",
    objective="seq2seq",
    sequence_length=64,
    cache_dir=str(work / "cache"),
)
config = replace(
    paper,
    d_model=128 if real else 64,
    d_ff=256 if real else 128,
    max_length=128,
    norm_placement="pre",  # as in the config: a small model learns faster so
    dropout=0.1,
)
corpus = data.prepare(
    settings, TokenizerConfig(vocab_size=4000 if real else 800), task_of(config, settings), seed=0
)
tokenizer = corpus.tokenizer
config = replace(config, vocab_size=tokenizer.vocab_size)
batches = data.Batches(corpus.train, settings, 16, seed=0)
assert corpus.validation is not None
heldout = list(data.evaluation_batches(corpus.validation, settings, 16))[:12]
print(f"{corpus.train.documents:,} pairs for training, {len(corpus.train):,} rows")
print(f"{config.vocab_size:,} entries of the tokenizer")

row = batches[0]
for name in ("source", "tokens"):
    ids, numbers = (
        row[name][0],
        row[f"{name}_segment_ids" if name == "source" else "segment_ids"][0],
    )
    print(f"{name:7}", [tokenizer.decode(ids[numbers == n]) for n in range(1, numbers.max() + 1)])

# %% [markdown]
# The loss has 10 % label smoothing (section 5.4 of the paper). With it `loss` is what is minimized
# and `nats` the plain cross-entropy.

# %%
steps = 450 if real else 180
schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 60, steps)
optimizer = optax.adam(schedule, b2=0.98, eps=1e-9)
step = jf.make_step(jf.loss_of("seq2seq", config, label_smoothing=0.1), optimizer)
nats: list[float] = []
state = jf.fit(
    step,
    jf.init_state(jf.specs(config), optimizer, seed=0),
    batches,
    steps=steps,
    hooks=[lambda step, state, metrics: nats.append(float(metrics["nats"]))],
)
params = state.params

# %% [markdown]
# Does the decoder use the source at all, or has it only learned likely English? The same held-out
# targets, each with the sources of another row, tell: all that is lost then came through
# cross-attention.

# %%
SOURCE = ("source", "source_segment_ids")
exchanged = [
    {name: np.roll(array, 1, axis=0) if name in SOURCE else array for name, array in batch.items()}
    for batch in heldout
]
plain = jf.loss_of("seq2seq", config)
own = jf.make_evaluate(plain, heldout)(params)["val_loss"]
other = jf.make_evaluate(plain, exchanged)(params)["val_loss"]
print(f"held-out loss: {own:.3f} nats per token; with the sources of other rows {other:.3f}")
assert other > own + 0.3

plt.figure(figsize=(6, 3))
plt.plot(nats, label="training")
plt.axhline(own, color="C2", linestyle="--", label="held out")
plt.axhline(other, color="C3", linestyle=":", label="held out, sources of other rows")
plt.xlabel("step")
plt.ylabel("nats per token")
plt.legend()
plt.show()

# %% [markdown]
# Translations by beam search, of sentences that training has not seen:

# %%
pairs = [tuple(map(str, piece.record)) for piece in corpus.validation_records()][:64]
written = translate(params, config, tokenizer, [german for german, _ in pairs], beams=3)
for (german, english), ours in list(zip(pairs, written, strict=True))[:5]:
    print(f"source     {german}\nreference  {english}\nours       {ours}\n")

exact = np.mean([ours == english for (_, english), ours in zip(pairs, written, strict=True)])
print(f"{exact:.0%} of {len(pairs)} translations equal the reference")
if not real:  # in real text there are many good translations, of which the reference is one
    assert exact > 0.9

# %% [markdown]
# With Multi30k, a few minutes give rough translations: the model has seen each sentence once. With
# twice the width and 1,600 steps, the config `transformer_multi30k` reaches 40.4 BLEU on
# test_2016_flickr.
#
# ## Which word comes from which
#
# The cross-attention of the last layer, as the mean over its heads. Each row is a token that is
# written, and says where the decoder looks while it decides on it.

# %%
# A sentence that is not translated word by word, if there is one: the order changes after a time.
moved = [n for n, (german, _) in enumerate(pairs) if german.startswith(("Am Abend", "Heute"))]
number = next((n for n in moved if len(pairs[n][0].split()) > 8), 0)
source = tokenizer.as_source(tokenizer.encode(pairs[number][0]))
target = tokenizer.as_target(tokenizer.encode(written[number]))
cross = jf.attention_maps(params, config, np.array([target]), source=np.array([source])).cross
assert cross is not None
weights = cross[-1, 0].mean(axis=0)  # [T, S]
np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-4)

rows = [tokenizer.shown(token) for token in [*target[1:], tokenizer.end_token]]
columns = [tokenizer.shown(token) for token in source]
plt.figure(figsize=(0.45 * len(columns) + 2, 0.35 * len(rows) + 1))
plt.imshow(weights, cmap="Blues", vmin=0, aspect="auto")
plt.xticks(range(len(columns)), columns, rotation=60, ha="right")
plt.yticks(range(len(rows)), rows)
plt.xlabel("source")
plt.ylabel("token that is written")
plt.colorbar(label="weight")
plt.tight_layout()
plt.show()

# %% [markdown]
# For a run directory, `jaxformer attention RUN --prompt "..."` makes a page with the maps of all
# layers and heads, and `jaxformer sample RUN --prompt "..." --beams 5` translates.
