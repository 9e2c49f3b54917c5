# %% [markdown]
# # Tune a model into a style
#
# A model that knows something answers in its own way. This notebook teaches one to answer in
# another way, by low-rank adapters (LoRA, arXiv:2106.09685) and a few examples, and looks whether
# it still knows what it knew. Each weight $W$ that is adapted becomes
#
# $$ W + \frac{\alpha}{r} A B, \qquad A \in \mathbb{R}^{d_\text{in} \times r}, \quad
#    B \in \mathbb{R}^{r \times d_\text{out}}, $$
#
# of which only $A$ and $B$ learn. $B$ begins as zeros, so that the adapted model begins as the
# model.
#
# **Our functions:** `jf.adapt`, `jf.adapter_mask`, `jf.merge`.
#
# **The tests that hold them:**
#
# - `tests/adapters/test_lora.py::test_an_adapted_weight_is_the_formula`
# - `tests/adapters/test_lora.py::test_only_the_adapter_learns_and_has_moments`
# - `tests/adapters/test_lora.py::test_an_adapted_model_generates_as_the_merged`
#
# The model is a tiny one, trained in the notebook, so that nothing is downloaded. For a published
# model the same is one command:
#
# `python train.py configs/finetune.py --run.init_from DIRECTORY --data.train chats.jsonl
# --adapter.kind lora`

# %%
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxformer as jf

# %% [markdown]
# ## What the model shall know
#
# Capitals. Each is asked in three ways, and the answer is a word and a full stop. The tokens are
# words and punctuation marks. The end token ends a text, and is what rows are filled with. The
# model also knows how sailors greet each other: the words of the style are not new to it, as they
# are not to a model that was trained on many texts.

# %%
CAPITALS = """Austria Vienna, Brazil Brasilia, Canada Ottawa, Chile Santiago, China Beijing,
Cuba Havana, Denmark Copenhagen, Egypt Cairo, Finland Helsinki, France Paris, Germany Berlin,
Ghana Accra, Greece Athens, Hungary Budapest, India Delhi, Iran Tehran, Ireland Dublin, Italy Rome,
Japan Tokyo, Kenya Nairobi, Norway Oslo, Peru Lima, Poland Warsaw, Spain Madrid"""
FACTS = [tuple(pair.split()) for pair in CAPITALS.replace("\n", " ").split(",")]
QUESTIONS = ["What is the capital of {} ?", "Name the capital of {} .", "{} has which capital ?"]
LENGTH, END = 16, "<end>"

asked = [question.format(country) for country, _ in FACTS for question in QUESTIONS]
plain = [f"{capital} ." for _, capital in FACTS for _ in QUESTIONS]
GREETINGS = {"Greet a sailor .": "Ahoy , matey !", "Thank a sailor .": "Thanks , matey !"}
words = sorted({*" ".join([*asked, *plain, *GREETINGS, *GREETINGS.values(), END]).split()})
number = {word: index for index, word in enumerate(words)}
print(len(asked), "questions;", asked[0], plain[0])


def batch_of(questions: list[str], answers: list[str]) -> dict[str, np.ndarray]:
    """Tokens and targets int32 [B, T]; weights float32 [B, T], which are 1 on answers alone."""
    rows = np.full((len(questions), LENGTH + 1), number[END], np.int32)
    weights = np.zeros((len(questions), LENGTH), np.float32)
    for row, weight, question, answer in zip(rows, weights, questions, answers, strict=True):
        read, learned = question.split(), answer.split()
        ids = [number[word] for word in [*read, *learned]]
        row[: len(ids)] = ids
        weight[len(read) - 1 : len(ids)] = 1  # and the end token behind it
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


# %% [markdown]
# ## The base
#
# A decoder, which learns all answers by heart.

# %%
config = jf.ModelConfig(
    vocab_size=len(words), d_model=96, n_layers=2, n_heads=4, max_length=2 * LENGTH
)
loss = jf.loss_of("causal", config)
everything = batch_of([*asked, *GREETINGS], [*plain, *GREETINGS.values()])
optimizer = optax.adamw(3e-3)
state = jf.init_state(jf.init(config, jax.random.key(0)), optimizer)
state = jf.fit(jf.make_step(loss, optimizer), state, [everything] * 100, steps=100)
base = jax.tree.map(np.asarray, state.params)


def answers_of(params, questions: list[str]) -> list[str]:
    """What the model writes behind each question, greedily, up to its end token."""
    found = []
    for question in questions:
        ids = [[number[word] for word in question.split()]]
        new = jf.generate(params, config, ids, 6, temperature=0, end_token=number[END])
        written = " ".join(words[token] for token in np.asarray(new)[0])
        found.append(written.partition(f" {END}")[0])
    return found


print(answers_of(base, asked[:3]))
assert answers_of(base, asked[::9]) == plain[::9]

# %% [markdown]
# ## The style
#
# The new answers say the same and add two words. Only half of the countries are taught; the others
# tell whether the style was learned, or only these answers.

# %%
styled = [answer.removesuffix(".") + ", matey !" for answer in plain]
taught = [index for index in range(len(asked)) if (index // len(QUESTIONS)) % 2 == 0]
held = [index for index in range(len(asked)) if index not in taught]
lesson = batch_of([asked[i] for i in taught], [styled[i] for i in taught])
examination = batch_of([asked[i] for i in held], [styled[i] for i in held])

lora = jf.LoRA(rank=4, alpha=8, targets=("attention", "ffn", "head"))
params = jf.adapt(base, config, lora, jax.random.key(1))
learned = jf.adapter_mask(params)  # True for the leaves of the adapter
sizes = [
    (leaf.size, learns)
    for leaf, learns in zip(jax.tree.leaves(params), jax.tree.leaves(learned), strict=True)
]
print(f"{sum(size for size, learns in sizes if learns):,} of {sum(s for s, _ in sizes):,} learn")

history: list[tuple[float, float]] = []
evaluate = jf.make_evaluate(loss, [examination])


def note(step, state, metrics) -> None:
    history.append((float(metrics["loss"]), float(evaluate(state.params)["val_loss"])))


optimizer = optax.adamw(3e-3)
state = jf.init_state(params, optimizer, trainable=learned)
step = jf.make_step(loss, optimizer, trainable=learned)
state = jf.fit(step, state, [lesson] * 80, steps=80, hooks=[note])

# %% [markdown]
# ## Before and after

# %%
questions = [asked[i] for i in held[::3]]
before, after = answers_of(base, questions), answers_of(state.params, questions)
for question, one, other in zip(questions, before, after, strict=True):
    print(f"{question:36}{one:16}{other}")
in_style = np.mean([answer.endswith(", matey !") for answer in after])
right = np.mean([answer == styled[i] for answer, i in zip(after, held[::3], strict=True)])
print(f"in the style: {in_style:.0%}; with the right capital: {right:.0%}")
assert in_style > 0.7

plt.figure(figsize=(6, 3))
plt.plot(np.array(history), label=["countries that are taught", "countries that are not"])
plt.xlabel("step of tuning")
plt.ylabel("loss of the answers (nats per token)")
plt.yscale("log")
plt.legend()
plt.show()

# %% [markdown]
# ## Off, merged, saved
#
# The model below the adapter has not moved. A merged model has plain weights and the same answers,
# and is a directory that transformers reads.

# %%
off = jf.without_adapters(state.params)
assert all(map(np.array_equal, jax.tree.leaves(off), jax.tree.leaves(base)))
merged = jf.merge(state.params)
assert answers_of(merged, questions) == after
folder = Path(tempfile.mkdtemp()) / "styled"
jf.save_pretrained(folder, merged, config)
again = jf.load(folder)
assert answers_of(again.params, questions) == after
print(sorted(path.name for path in folder.iterdir()))

# %% [markdown]
# From here:
#
# - `docs/finetuning.md` has LoRA, QLoRA, chats and preferences in runs, with what they cost,
# - `jaxformer sample RUN --chat` talks to a run whose data were chats,
# - `jaxformer convert RUN OUT --merge` writes a run with an adapter for transformers and vLLM.
