"""Prompts that take the rows of texts that have ended: each text is as it would be alone."""

import jax
import numpy as np
import pytest
from families import LATENT
from shapes import MODELS, SIZES, made

import jaxformer as jf
from jaxformer.config import with_settings
from jaxformer.generation import refill as refill_file
from jaxformer.generation.refill import RowWriter, refill
from jaxformer.generation.sampling import Sampling

KEY = jax.random.key(3)
LENGTHS = (9, 3, 30, 1, 30, 9, 3)  # few, since each is a program
COUNT = 20
slow = pytest.mark.slow
VARIANTS = {
    "rope, a window in every second layer": (dict(window=5, window_pattern="wf"), ()),
    "learned": (dict(positions="learned"), slow),
    "relative, an encoder-decoder": (dict(family="encoder_decoder", positions="t5"), ()),
    "alibi, a window": (dict(positions="alibi", window=5), slow),
    "relative": (dict(positions="t5"), slow),
    "latent": (LATENT, slow),
    "experts": (MODELS["experts in groups after a dense layer"], slow),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(refill_file, "CHUNK", 4)


def prompts_of(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZES["vocab_size"], length).tolist() for length in lengths]


@pytest.mark.parametrize(
    "settings", [pytest.param(s, marks=marks, id=name) for name, (s, marks) in VARIANTS.items()]
)
def test_a_text_of_a_refilled_row_is_that_of_its_prompt_alone(settings, monkeypatch):
    caches, advance = [], refill_file._advance

    def advanced(*arguments):
        made, stream = advance(*arguments)
        caches.append((stream.cache.layout.positions.shape[1], int(stream.cache.length)))
        return made, stream

    monkeypatch.setattr(refill_file, "_advance", advanced)
    config = with_settings(jf.ModelConfig(), SIZES | settings)
    params, prompts, sources = made(config), prompts_of(), None
    if config.family == "encoder_decoder":
        prompts, sources = [[1]] * len(LENGTHS), prompts_of()
    alone = []
    for number, prompt in enumerate(prompts):
        source = {} if sources is None else {"source": [sources[number]]}
        alone.append(jf.generate(params, config, [prompt], COUNT, temperature=0, **source)[0])
    found = dict(
        refill(
            params,
            config,
            prompts,
            COUNT,
            rows=2,
            sources=sources,
            stopped=lambda number, text: number % 2 == 1 and len(text) >= 4 + 2 * number,
            temperature=0,
        )
    )
    lengths = [COUNT, 8, COUNT, 12, COUNT, 16, COUNT]
    assert found == {number: row[: lengths[number]].tolist() for number, row in enumerate(alone)}
    # The slots are those of the longest text, and more tokens were read: they were used again.
    slots, read = caches[-1]
    assert slots <= 64 < read


def test_a_text_ends_with_any_of_its_end_tokens():
    config = jf.ModelConfig(**SIZES)
    params, prompts = made(config), prompts_of()
    texts = dict(refill(params, config, prompts, COUNT, temperature=0))
    ends = (texts[0][6], texts[1][2])
    found = dict(refill(params, config, prompts, COUNT, rows=3, temperature=0, end_token=ends))
    for number, text in texts.items():
        length = next((i + 1 for i, token in enumerate(text) if token in ends), COUNT)
        assert found[number] == text[:length]


def test_a_sampled_text_depends_on_its_prompt_and_number_alone(monkeypatch):
    config = jf.ModelConfig(**SIZES)
    params, prompts = made(config), prompts_of()
    rules = {"key": KEY, "temperature": 0.8, "top_k": 20, "end_token": 5}
    texts = dict(refill(params, config, prompts, COUNT, rows=2, **rules))
    assert len({tuple(text) for text in texts.values()}) == len(prompts)
    assert dict(refill(params, config, prompts, COUNT, rows=1, **rules)) == texts
    monkeypatch.setattr(refill_file, "CHUNK", 3)
    others = [prompts[0], *prompts_of(LENGTHS[1:], seed=1)]
    changed = dict(refill(params, config, others, COUNT, rows=5, **rules))
    assert changed[0] == texts[0] and changed[1] != texts[1]
    twice = dict(refill(params, config, [prompts[0]] * 2, COUNT, **rules))
    assert twice[0] == texts[0] != twice[1]


def test_a_text_ends_where_the_caller_says_and_at_the_end_of_the_context():
    config = jf.ModelConfig(**SIZES)
    params = made(config)
    prompts = [*prompts_of(LENGTHS[:5]), *prompts_of((60,))]
    asked = []

    def stopped(number, tokens):
        asked.append((number, len(tokens)))
        return number == 1 and len(tokens) >= 8

    found = dict(refill(params, config, prompts, COUNT, rows=3, stopped=stopped, temperature=0))
    lengths = {number: len(text) for number, text in found.items()}
    assert lengths == {0: COUNT, 1: 8, 2: COUNT, 3: COUNT, 4: COUNT, 5: 4}
    assert (1, 8) in asked and not {(1, 12), (1, 20)} & {*asked}


def test_texts_come_as_they_end_and_few_programs_serve_all_prompts():
    config = jf.ModelConfig(**SIZES)
    params, before = made(config), refill_file._advance._cache_size()
    rules = {"temperature": 0, "stopped": lambda number, tokens: number == 2}
    numbers = [number for number, _ in refill(params, config, prompts_of(), COUNT, **rules)]
    assert numbers[0] == 2 and sorted(numbers) == [*range(len(LENGTHS))]
    assert refill_file._advance._cache_size() <= before + 1


REFUSED = {
    "an empty prompt": ({"prompts": [[1], []]}, "a prompt is empty"),
    "no space": ({"prompts": [[1] * 64]}, "exceed the context of 64"),
    "no rows": ({"rows": 0}, "rows=0"),
    "no key": ({"temperature": 1.0}, "needs key="),
    "sources of a decoder": ({"sources": [[1]]}, "source= is for an encoder-decoder"),
    "too few sources": ({"sources": [[1], [2]]}, "2 sources and 1 prompts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_continued_is_refused(name):
    changes, message = REFUSED[name]
    config = jf.ModelConfig(**SIZES)
    arguments = {"prompts": [[1]], "temperature": 0} | changes
    with pytest.raises(jf.ConfigError, match=message):
        [*refill(made(config), config, arguments.pop("prompts"), COUNT, **arguments)]


def test_without_prompts_there_is_no_text():
    config = jf.ModelConfig(**SIZES)
    assert [*refill(made(config), config, [], temperature=0)] == []


def test_rules_hold_in_refilled_rows():
    config = jf.ModelConfig(**SIZES)
    params = made(config)
    prompts = prompts_of((9, 3, 17, 5))
    words = ((7, 8), (3,))
    rules = {"temperature": 0, "repetition_penalty": 1.3, "bad_words": words, "min_new_tokens": 2}
    rules |= {"presence_penalty": 0.5, "no_repeat_ngram_size": 2, "end_token": 11}
    texts = dict(refill(params, config, prompts, COUNT, rows=2, **rules))
    for number, prompt in enumerate(prompts):
        alone = np.asarray(jf.generate(params, config, [prompt], COUNT, **rules))[0].tolist()
        assert texts[number] == alone[: len(texts[number])]
        assert {*alone[len(texts[number]) :]} <= {11}


GROWING = {
    "rope, a window in every second layer": dict(window=40, window_pattern="wf"),
    "recurrent": dict(layer_pattern="dm", recurrent=jf.Recurrent(chunk=4)),
    "latent": LATENT,
}


@pytest.mark.parametrize("settings", GROWING.values(), ids=GROWING)
def test_texts_that_come_later_are_those_of_their_prompts_while_slots_grow_and_shrink(
    settings, monkeypatch
):
    monkeypatch.setattr(refill_file, "LEAST_SLOTS", 32)
    config = with_settings(jf.ModelConfig(), SIZES | {"max_length": 160} | settings)
    params, prompts = made(config), prompts_of((3, 5, 100, 2))
    counts = (40, 30, 40, 20)
    writer = RowWriter(params, config, Sampling(temperature=0), 2, (160, 0))
    texts, running, slots, waiting = {}, {}, [], [0, 1, 2, 3]
    while waiting or running:
        for _ in writer.free()[: len(waiting)]:
            number = waiting.pop(0)
            row = writer.read(prompts[number], jax.random.key(0), counts[number])
            running[row], texts[number] = number, []
        for row, new in writer.advance(1 + len(slots) % 4).items():
            texts[running[row]] += new.tokens.tolist()
            if running[row] == 2 and len(texts[2]) > 10:  # nobody wants more of it
                writer.end(row)
        slots.append(writer.slots)
        running = {row: number for row, number in running.items() if row not in writer.free()}
    for number, text in texts.items():
        alone = jf.generate(params, config, [prompts[number]], counts[number], temperature=0)[0]
        assert text == alone[: len(text)].tolist()
        assert len(text) == counts[number] or number == 2
    assert (slots[0], max(slots), slots[-1]) == (64, 256, 64) and len(texts[2]) < 40


def test_rows_with_numbers_of_their_own_have_the_texts_of_programs_with_them():
    """Each text beside others whose rules are another: those that a row does not use change
    nothing in it."""
    config = jf.ModelConfig(**SIZES)
    params, prompts = made(config), prompts_of((9, 3, 17))
    numbers = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.8, "top_k": 9, "min_p": 0.05},
        {"temperature": 1.2, "top_p": 0.7, "frequency_penalty": 1.0},
    ]
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    neutral |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    writer = RowWriter(params, config, Sampling(), 3, (64, 0), own_numbers=True)
    for prompt, own in zip(prompts, numbers, strict=True):
        writer.read(prompt, jax.random.fold_in(KEY, 0), COUNT, **neutral | own)
    texts = {row: [] for row in range(3)}
    while len(writer.free()) < 3:
        for row, new in writer.advance(3).items():
            texts[row] += new.tokens.tolist()
    for row, own in enumerate(numbers):
        assert [(0, texts[row])] == [*refill(params, config, [prompts[row]], COUNT, key=KEY, **own)]
