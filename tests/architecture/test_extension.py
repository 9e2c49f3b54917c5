"""From outside the package: an objective with its own rows and loss, an activation and a custom
leaf, trained, resumed and evaluated as the package's own are."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpora import prepare
from custom_leaves import LowRank, low_rank
from tiny_run import assert_same_run, line, logged, saved, train_here

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config.run import DataConfig, TokenizerConfig
from jaxformer.data.records import RecordField
from jaxformer.data.templates import Template, joined
from jaxformer.layers.ffn import ACTIVATIONS
from jaxformer.runs.objectives import OBJECTIVES, Objective

SIDES = ("chosen", "rejected")


class Preferences(Template):
    """A prompt with the answer that is preferred and the one that is not, one example a row."""

    packs = False

    def sizes(self, lengths):
        return lengths[:, :1] + np.maximum(lengths[:, 1], lengths[:, 2])[:, None] + 1

    def arrays(self, *parts):
        row = {}
        for side, answer in zip(SIDES, parts[1:], strict=True):
            text = joined(parts[0], answer, [self.end])[: self.length + 1]
            learned = (np.arange(1, len(text)) >= len(parts[0])).astype(np.float32)
            row |= {
                f"{side}_tokens": text[:-1],
                f"{side}_targets": text[1:],
                f"{side}_weights": learned,
            }
        return row


def score(params, config, batch, side):
    """The summed log-probability of each answer: [B]."""
    logs = jax.nn.log_softmax(jf.forward(params, config, batch[f"{side}_tokens"]))
    told = jnp.take_along_axis(logs, batch[f"{side}_targets"][..., None], axis=-1)[..., 0]
    return jnp.sum(told * batch[f"{side}_weights"], axis=-1)


def preference_loss(params, config, batch, key):
    """-log sigmoid of the margin by which the preferred answer is likelier; rows that only fill a
    batch weigh nothing."""
    weight = batch["chosen_weights"].max(axis=-1)
    margin = score(params, config, batch, "chosen") - score(params, config, batch, "rejected")
    total = weight.sum()
    right = ((margin > 0) * weight).sum()
    return {
        "loss": (-(jax.nn.log_sigmoid(margin) * weight).sum(), total),
        "preferred": (right, total),
    }


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "softplus", jax.nn.softplus)
    fields = ("source", RecordField("", "chosen", "text"), RecordField("", "rejected", "text"))
    row = Objective(("decoder",), "language", fields, template=Preferences, loss=preference_loss)
    monkeypatch.setitem(OBJECTIVES, "preferences", row)


CHANGES = {
    "data.objective": "preferences",
    "data.packing": "stream",
    "model.activation": "softplus",
    "optimizer.name": "adamw",
    "optimizer.decay_steps": 12,
    "train.steps": 12,
    "train.eval_every": 6,
    "train.checkpoint_every": 6,
}


def write_records(path: Path) -> Path:
    pairs = [("the cat", " sees", " river"), ("a dog", " likes", " stone")]
    rows = [dict(zip(("source", *SIDES), pairs[k % 2], strict=True)) for k in range(64)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
def test_an_objective_of_somebody_elses_trains_resumes_and_evaluates(registered, tmp_path, capsys):
    records = write_records(tmp_path / "pairs.jsonl")
    assert train_here(line(tmp_path / "whole", records, CHANGES)) == 0
    assert train_here(line(tmp_path / "parts", records, CHANGES | {"train.steps": 6})) == 0
    assert train_here(line(tmp_path / "parts", records, CHANGES)) == 0
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert saved(tmp_path / "whole") == [6, 12]
    evaluations = [entry for entry in logged(tmp_path / "whole") if "val_loss" in entry]
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"] < np.log(2) + 0.2
    assert evaluations[-1]["val_preferred"] == 1
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "whole")]) == 0
    assert f"{evaluations[-1]['val_loss']:.4f}" in capsys.readouterr().out
    with pytest.raises(jf.ConfigError, match="takes no label_smoothing"):
        jf.loss_of("preferences", jf.load(tmp_path / "whole").config, label_smoothing=0.1)


@pytest.mark.slow
def test_a_leaf_of_somebody_elses_goes_through_step_checkpoint_and_resume(registered, tmp_path):
    """Only the low-rank product learns: the weights below it stay, and have no moments."""
    config = jf.ModelConfig(
        vocab_size=61,
        d_model=32,
        n_layers=2,
        n_heads=2,
        d_ff=48,
        max_length=32,
        activation="softplus",
    )
    table = jf.adapt_specs(
        jf.specs(config), {"blocks.attention.*": low_rank, "embed.tokens": low_rank}
    )
    optimizer = optax.adamw(1e-2)

    def trainable(path, leaf):
        return path.endswith((".a", ".b"))

    class Rows:
        def __getitem__(self, step):
            rows = np.random.default_rng(step).integers(0, 61, (4, 17), dtype=np.int32)
            return {
                "tokens": rows[:, :-1],
                "targets": rows[:, 1:],
                "weights": np.ones((4, 16), np.float32),
            }

    def trained(steps, directory=None, **options):
        state = jf.init_state(table, optimizer, trainable=trainable, **options)
        step = jf.make_step(
            jf.loss_of("causal", config), optimizer, trainable=trainable, microbatches=2
        )
        checkpoints = jf.Checkpoints(directory, every=2) if directory else None
        return jf.fit(step, state, Rows(), steps=steps, checkpoints=checkpoints)

    start = jf.init_state(table, optimizer, trainable=trainable)
    whole = trained(6)
    trained(4, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, trained(6, tmp_path), whole)
    before, after = (
        start.params["blocks"]["attention"]["q"],
        whole.params["blocks"]["attention"]["q"],
    )
    assert isinstance(after, LowRank)
    np.testing.assert_array_equal(after.weight, before.weight)
    assert not np.array_equal(after.a, before.a) or not np.array_equal(after.b, before.b)
    moments = sum(leaf.size for leaf in jax.tree.leaves(whole.optimizer))
    learned = sum(
        leaf.size
        for path, leaf in jax.tree.leaves_with_path(whole.params)
        if trainable(path_of(path), leaf)
    )
    assert moments == 2 * learned + 1
    sharded = trained(6, mesh=jf.make_mesh())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), sharded.params, whole.params
    )
    tokens = jf.generate(
        whole.params, config, Rows()[0]["tokens"][:, :4], max_new_tokens=4, temperature=0.0
    )
    assert tokens.shape == (4, 4)


def test_a_field_without_a_setting_is_named_where_it_is_missing(registered, tmp_path):
    records = tmp_path / "pairs.jsonl"
    data = DataConfig(train=str(records), objective="preferences", sequence_length=16)
    run = jf.RunConfig(data=data, tokenizer=TokenizerConfig(kind="bytes"))
    for record, said in {
        '{"source": "q", "chosen": "yes"}': r"no field 'rejected': .*; set data\.objective",
        '{"source": "q", "chosen": "yes", "rejected": 3}': "field 'rejected' is int: it has to be",
    }.items():
        records.write_text(f"{record}\n")
        with pytest.raises(jf.ConfigError, match=said):
            prepare(run)


def path_of(path):
    return jax.tree_util.keystr(path, simple=True, separator=".")
