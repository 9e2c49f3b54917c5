"""Preferences: the losses by their formulas, rows of pairs, and what every objective has to keep:
sums over microbatches and padding that weighs nothing."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpora import prepare
from custom_leaves import LowRank, low_rank
from products import slow_but
from shapes import forward

import jaxformer as jf
from jaxformer.arrays.params import is_custom
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.config.settings import with_settings
from jaxformer.config.train import TrainConfig
from jaxformer.data import Batches, RowFormat, evaluation_batches
from jaxformer.data.templates import PreferenceTemplate
from jaxformer.losses.cross_entropy import row_nats
from jaxformer.runs.evaluation import make_evaluation
from jaxformer.runs.resolve import resolve
from jaxformer.tokenizer import byte_tokenizer

OBJECTIVES = ("dpo", "ipo", "orpo", "simpo")
CONFIG = jf.ModelConfig(
    vocab_size=61,
    d_model=32,
    n_layers=1,
    n_heads=2,
    d_ff=48,
    max_length=32,
    head=jf.Head(soft_cap=5.0),
)
initial = jax.jit(jf.init, static_argnums=0)
scored = jax.jit(jf.reference_log_probs, static_argnums=1)


@pytest.fixture(scope="module")
def models():
    """A model, and its reference; sharper than initial values, so that margins are not small."""
    return [
        jax.tree.map(lambda leaf: 2 * leaf, initial(CONFIG, jax.random.key(seed)))
        for seed in (0, 1)
    ]


def a_batch(pairs=4, seed=0):
    """Pairs whose sides have a prompt of 3 tokens, and completions of other lengths."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 61, (pairs, 2, 17), dtype=np.int32)
    place, ends = np.arange(16), rng.integers(4, 17, (pairs, 2, 1))
    used = place < ends
    return {
        "tokens": np.where(used, text[..., :-1], 0).astype(np.int32),
        "targets": np.where(used, text[..., 1:], 0).astype(np.int32),
        "weights": (used & (place >= 2)).astype(np.float32),
        "segment_ids": used.astype(np.int32),
    }


def log_probs_by_hand(params, batch):
    """The sums over completions [B, 2] and their lengths, in float64, each side by itself."""
    sums = np.zeros(batch["tokens"].shape[:2])
    for side in (0, 1):
        logits = forward(params, CONFIG, batch["tokens"][:, side])
        logs = np.asarray(jax.nn.log_softmax(logits), np.float64)
        told = np.take_along_axis(logs, batch["targets"][:, side, :, None], axis=-1)[..., 0]
        sums[:, side] = (told * batch["weights"][:, side]).sum(-1)
    return sums, batch["weights"].sum(-1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_formula(name, policy, reference, lengths, beta, margin=0.5):
    """The loss and the reward margin of each pair, as the papers write them."""
    chosen, rejected = (policy / lengths).T
    h_chosen, h_rejected = (policy - reference).T
    if name == "dpo":
        return -np.log(sigmoid(beta * (h_chosen - h_rejected))), beta * (h_chosen - h_rejected)
    if name == "ipo":
        means = ((policy - reference) / lengths).T
        return (means[0] - means[1] - 1 / (2 * beta)) ** 2, beta * (h_chosen - h_rejected)
    if name == "simpo":
        rewards = beta * (chosen - rejected)
        return -np.log(sigmoid(rewards - margin * beta)), rewards
    odds = [np.exp(mean) / (1 - np.exp(mean)) for mean in (chosen, rejected)]
    ratio = np.log(odds[0] / odds[1])
    return -chosen - beta * np.log(sigmoid(ratio)), beta * (chosen - rejected)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_loss_and_what_is_logged_beside_it_follow_the_formulas(name, models):
    params, reference = models
    batch = a_batch(16)
    policy, lengths = log_probs_by_hand(params, batch)
    before, _ = log_probs_by_hand(reference, batch)
    options = {"beta": 0.3} | ({"margin": 0.2} if name == "simpo" else {})
    loss = jax.jit(jf.loss_of(name, CONFIG, **options))
    found = loss(params, batch | scored(reference, CONFIG, batch), None)
    means = {key: float(total / weight) for key, (total, weight) in found.items()}
    each, margins = by_formula(name, policy, before, lengths, **options)
    expected = {
        "loss": each.mean(),
        "reward_margin": margins.mean(),
        "reward_accuracy": (margins > 0).mean(),
        "log_prob_chosen": policy[:, 0].mean(),
        "log_prob_rejected": policy[:, 1].mean(),
    }
    if name in ("dpo", "ipo"):
        expected["kl"] = (policy - before)[:, 0].sum() / lengths[:, 0].sum()
    assert means == pytest.approx(expected, rel=2e-5)
    assert 0 < expected["reward_accuracy"] < 1  # else the sides could be exchanged unseen


def test_at_the_start_dpo_is_log_2_and_ipo_is_its_target_squared(models):
    batch = a_batch() | scored(models[0], CONFIG, a_batch())
    for name, expected in (("dpo", np.log(2)), ("ipo", (1 / (2 * 0.1)) ** 2)):
        total, count = jax.jit(jf.loss_of(name, CONFIG))(models[0], batch, None)["loss"]
        assert float(total / count) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_dropout_of_model_and_adapter_is_left_out(name, models):
    dropped, key = replace(CONFIG, dropout=0.4), jax.random.key(5)
    of_weights = with_settings(CONFIG, {"attention.dropout": 0.4})
    batch = a_batch() | scored(models[0], dropped, a_batch())

    def adapted(params, config):
        adapter = jf.LoRA(rank=2, targets=("ffn",), dropout=0.4)
        found = jf.adapt(params, config, adapter, jax.random.key(1))
        return jax.tree.map(lambda leaf: leaf + 0.05, found)  # so that it changes the model

    dropping = ((dropped, models[0]), (of_weights, models[0]), (CONFIG, adapted(models[0], CONFIG)))
    for config, params in dropping:
        loss = jax.jit(jf.loss_of(name, config))
        without = float(loss(params, batch, None)["loss"][0])
        assert float(loss(params, batch, key)["loss"][0]) == without
    if name == "dpo":  # the reference is the model itself
        total, count = jf.loss_of(name, dropped)(models[0], batch, key)["loss"]
        assert float(total / count) == pytest.approx(np.log(2), rel=1e-6)
        assert jf.reference_log_probs(models[0], dropped, a_batch()).keys() <= batch.keys()


def test_a_run_applies_no_dropout_to_pairs():
    model = with_settings(CONFIG, {"dropout": 0.4, "attention.dropout": 0.2})
    for name in OBJECTIVES:
        data = DataConfig(objective=name, sequence_length=16)
        run = RunConfig(model=model, data=data)
        resolved = resolve(run, jf.make_mesh(), 1)
        assert resolved.model.dropout == resolved.model.attention_dropout_rate == 0
        assert run.model.dropout == 0.4 and resolved.is_rowwise
    causal = RunConfig(model=model, data=DataConfig(sequence_length=16))
    resolved = resolve(causal, jf.make_mesh(), 0)
    assert resolved.model.dropout == 0.4 and not resolved.is_rowwise


def test_odds_of_a_certain_completion_are_finite_and_have_a_gradient():
    from jaxformer.losses.pairs import log_odds

    for log_p in (0.0, -1e-9, -1e-3, -0.6931, -0.6932, -5.0, -80.0):
        value, slope = jax.value_and_grad(log_odds)(jnp.float32(log_p))
        p = np.exp(min(log_p, -1e-6))
        assert float(value) == pytest.approx(np.log(p / (1 - p)), rel=1e-3, abs=1e-5)
        assert np.isfinite(slope)
        assert log_p > -1e-6 or slope == pytest.approx(1 / (1 - p), rel=1e-2)


@pytest.mark.parametrize("custom", [False, True], ids=["matrix", "custom leaf"])
def test_rows_in_tiles_equal_rows_at_once_in_value_and_gradient(custom):
    rng = np.random.default_rng(0)
    shapes = [(6, 13, 16), (50, 16), (50, 2), (2, 16)]
    x, head, a, b = (jnp.asarray(rng.standard_normal(shape, "f")) for shape in shapes)
    if custom:
        head = LowRank(head, a, b)
    targets = jnp.asarray(rng.integers(0, 50, (6, 13)))
    weights = jnp.asarray(rng.random((6, 13)) > 0.3, jnp.float32)

    def value(tile):
        def of(x, head, bias):
            nats = row_nats(x, head, targets, weights, bias=bias, soft_cap=3.0, tile=tile)
            return jnp.tanh(nats / 30).sum()  # no sum of cross-entropies: each row has its slope

        return jax.jit(jax.value_and_grad(of, (0, 1, 2)))(x, head, jnp.arange(50.0) / 50)

    once, tiles = value(13), value(4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), tiles, once)
    logs = jax.nn.log_softmax(3 * jnp.tanh((x @ (head.array() if custom else head).T) / 3))
    plain = -jnp.take_along_axis(logs, targets[..., None], -1)[..., 0]
    at_once = row_nats(x, head, targets, weights, soft_cap=3.0)
    np.testing.assert_allclose(at_once, (plain * weights).sum(1), rtol=1e-5)


@pytest.mark.parametrize("name", slow_but(["dpo", "orpo"], "dpo"))
def test_a_pair_is_never_split_so_an_accumulated_step_equals_the_big_one(name, models):
    batch = a_batch(8) | scored(models[1], CONFIG, a_batch(8))

    def stepped(pieces):
        state = jf.init_state(models[0], optax.sgd(1.0))
        step = jf.make_step(jf.loss_of(name, CONFIG), optax.sgd(1.0), microbatches=pieces)
        state, metrics = step(state, batch)
        return state, {name: float(value) for name, value in metrics.items()}

    (whole, metrics), (parts, same) = map(stepped, (1, 4))
    assert same == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, parts.params, whole.params)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, whole.params, models[0]))
    assert moved > 1e-3


@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_rows_that_only_fill_a_batch_weigh_nothing(name, models):
    batch = a_batch(3)
    filled = {key: np.concatenate([a, np.zeros_like(a[:1])]) for key, a in batch.items()}
    evaluate = make_evaluation(name, CONFIG)
    found = [evaluate(models[0], [one | scored(models[1], CONFIG, one)]) for one in (batch, filled)]
    # Margins are small differences of sums of about -40, whose last bit is 4e-6.
    assert found[0] == pytest.approx(found[1], rel=1e-6, abs=4e-6)


@pytest.mark.slow
def test_a_reference_without_adapters_is_that_of_the_arrays_and_gets_no_gradient(models):
    """`reference_of` gives the weights below the adapters, where the batch has no scores."""
    table = jf.adapt_specs(jf.specs(CONFIG), {"blocks.attention.*": low_rank})
    drawn = jf.init_state(table, optax.sgd(0.1)).params
    base = models[0]

    def put(leaf, weight):
        return LowRank(weight, leaf.a, leaf.b) if is_custom(leaf) else weight

    params = jax.tree.map(put, drawn, base, is_leaf=is_custom)

    def below(params):
        return jax.tree.map(lambda n: n.weight if is_custom(n) else n, params, is_leaf=is_custom)

    def gradient(loss, batch):
        return jax.jit(jax.value_and_grad(lambda p: loss(p, batch, None)["loss"][0]))(params)

    batch = a_batch()
    given = gradient(jf.loss_of("dpo", CONFIG), batch | scored(base, CONFIG, batch))
    made = gradient(jf.loss_of("dpo", CONFIG, reference_of=below), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), made, given)
    assert abs(float(given[0]) / 4 - np.log(2)) > 1e-3  # the adapter says something


# ---- rows


def template(length):
    return PreferenceTemplate(RowFormat(length, length), byte_tokenizer())


def arrays(length, *texts):
    (parts,) = template(length).encode([tuple(text.decode() for text in texts)], {})
    return template(length).arrays(*map(np.array, parts))


def test_a_row_holds_both_sides_after_the_same_prompt():
    row = arrays(10, b"abc", b"YES", b"N")
    end = byte_tokenizer().end_token
    assert row["tokens"].tolist() == [[*b"abcYES", 0, 0, 0, 0], [*b"abcN", *[0] * 6]]
    assert row["targets"].tolist() == [[*b"bcYES", end, 0, 0, 0, 0], [*b"bcN", end, *[0] * 6]]
    assert row["weights"].tolist() == [[0, 0, 1, 1, 1, 1, *[0] * 4], [0, 0, 1, 1, *[0] * 6]]
    assert row["segment_ids"].tolist() == [[1] * 6 + [0] * 4, [1] * 4 + [0] * 6]
    dtypes = {name: str(array.dtype) for name, array in row.items()}
    assert dtypes.pop("weights") == "float32" and {*dtypes.values()} == {"int32"}


def test_a_long_prompt_loses_its_start_on_both_sides_and_then_a_completion_its_end():
    end = byte_tokenizer().end_token
    row = arrays(8, b"0123456789", b"YES", b"N")  # 9 tokens a side, 4 for YES and its end
    assert row["tokens"].tolist() == [[*b"56789YES"], [*b"56789N", 0, 0]]
    assert row["targets"][0].tolist() == [*b"6789YES", end]
    long = arrays(8, b"0123456789", b"YESYESYES", b"N")
    assert long["tokens"].tolist() == [[*b"6789YESY"], [*b"6789N", 0, 0, 0]]
    assert long["targets"][0].tolist() == [*b"789YESYE"] and end in long["targets"][1]
    short = arrays(8, b"01", b"YESYESYES", b"N")
    assert short["tokens"][0].tolist() == [*b"01YESYES"] and short["weights"].sum() == 7 + 2
    counted = template(8).sizes(np.array([[10, 4, 2], [2, 10, 2], [2, 5, 2], [4, 5, 5]]))
    assert counted.tolist() == [[13, 11], [11, 3], [6, 3], [8, 8]]


def records(folder: Path, lines: list[dict]) -> RunConfig:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(
        train=str(path), cache_dir=str(folder / "cache"), sequence_length=16, objective="dpo"
    )
    return RunConfig(data=data, tokenizer=TokenizerConfig(kind="bytes"))


PAIRS = [{"prompt": f"q{i}", "chosen": "yes" * (i % 3 + 1), "rejected": "no"} for i in range(20)]


def test_records_become_batches_of_whole_pairs(tmp_path):
    run = records(tmp_path, PAIRS)
    corpus = prepare(run)
    batch = Batches(corpus.train, run.data, 4, 7)[3]
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "weights", "segment_ids"), (4, 2, 16)
    )
    for row in batch["tokens"]:
        chosen, rejected = (bytes(side[side > 0].tolist()).decode() for side in row)
        prompt = rejected.removesuffix("no")
        assert {"prompt": prompt, "chosen": chosen.removeprefix(prompt), "rejected": "no"} in PAIRS
    (held,) = evaluation_batches(corpus.validation, run.data, 4)
    assert (held["weights"].sum((1, 2)) > 0).sum() == len(corpus.validation) == 2


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_side_without_text_is_named_with_its_file_and_line(side, tmp_path):
    run = records(tmp_path, [*PAIRS[:3], PAIRS[3] | {side: ""}, *PAIRS[4:]])
    message = rf"pairs\.jsonl, line 4: the field '{side}' is empty: it has to be a string with text"
    with pytest.raises(jf.ConfigError, match=message):
        prepare(run)
    skipping = replace(run, data=replace(run.data, malformed="skip"))
    assert prepare(skipping).train.documents + prepare(skipping).validation.documents == 19


def test_what_is_no_pair_is_one_message(tmp_path):
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    for bad, message in (
        ({"prompt": "q", "chosen": "yes"}, "line 1: no field 'rejected'"),
        (pair | {"rejected": 3}, "'rejected' is int: it has to be a string with text"),
        (pair | {"prompt": None}, "'prompt' is null: it has to be a string"),
    ):
        with pytest.raises(jf.ConfigError, match=message):
            prepare(records(tmp_path, [bad, *PAIRS]))
    run = records(tmp_path, PAIRS)
    with pytest.raises(jf.ConfigError, match=r"dpo needs model\.family decoder"):
        prepare(replace(run, model=jf.ModelConfig(family="encoder")))


# ---- settings


def test_settings_reach_the_loss_and_are_refused_where_it_has_none(models):
    batch = a_batch() | scored(models[1], CONFIG, a_batch())
    config = with_settings(CONFIG, {"attention.kernel": "xla", "dtype": "float32"})

    def value(name, **train):
        data = DataConfig(objective=name, sequence_length=16)
        run = RunConfig(model=config, data=data, train=TrainConfig(**train))
        loss = resolve(run, jf.make_mesh(), 1).loss
        return float(loss(models[0], batch, None)["loss"][0])

    def expected(name, **options):
        return float(jf.loss_of(name, config, **options)(models[0], batch, None)["loss"][0])

    for name in OBJECTIVES:
        assert value(name) == expected(name) == expected(name, beta=2.0 if name == "simpo" else 0.1)
        assert value(name, preference_beta=0.4) == expected(name, beta=0.4) != value(name)
        with pytest.raises(jf.ConfigError, match="takes no z_loss: leave it out"):
            value(name, z_loss=1e-4)
    assert value("simpo", preference_margin=0.0) == expected("simpo", margin=0.0) != value("simpo")
    message = "'dpo' takes no margin: leave it out, and the setting"
    with pytest.raises(jf.ConfigError, match=message):
        value("dpo", preference_margin=0.0)
    with pytest.raises(jf.ConfigError, match="'causal' takes no beta"):
        value("causal", preference_beta=0.1)


def test_a_loss_that_lacks_its_reference_says_what_gives_one(models):
    with pytest.raises(jf.ConfigError, match=r"no reference_chosen .* jf\.reference_log_probs"):
        jf.loss_of("ipo", CONFIG)(models[0], a_batch(), None)
