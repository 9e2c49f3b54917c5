"""Files of Hugging Face that a run writes while it trains."""

import jax
import numpy as np
import pytest
from several import SMALL, finished, launch_all
from tiny_run import PLAIN, line, saved, train_here, write_text

import jaxformer as jf
from jaxformer.interop.logit_parity import compare

pytestmark = pytest.mark.slow

EXPORTS = PLAIN | {
    "run.export_every": 4,
    "train.checkpoint_every": 2,
    "train.steps": 6,
    "train.eval_every": 0,
    "train.keep_checkpoints": 9,
}


def test_each_directory_is_the_model_of_its_step(tmp_path):
    """Also by transformers, with the average of the weights and in muP, and after a resume."""
    text = write_text(tmp_path / "text.txt")
    changes = {"train.ema": 0.9, "model.parametrization": "mup", "model.mup_base": "d_model=16"}
    run_dir = tmp_path / "run"
    for steps in (2, 6):
        assert train_here(line(run_dir, text, EXPORTS | changes | {"train.steps": steps})) == 0
    assert saved(run_dir) == [2, 4, 6]
    assert {entry.name for entry in (run_dir / "hf").iterdir()} == {"2", "4", "6"}
    for step in (4, 6):
        wanted = jf.load(run_dir, step)
        difference = compare(run_dir / "hf" / str(step), wanted.params, wanted.config)
        assert difference.largest <= 2e-4 * difference.deviation
        found = jf.load(run_dir / "hf" / str(step))
        assert found.tokenizer.fingerprint() == wanted.tokenizer.fingerprint()


def test_an_adapter_is_written_in_the_format_of_peft(tmp_path):
    text = write_text(tmp_path / "text.txt")
    base = {name: value for name, value in EXPORTS.items() if name != "run.export_every"}
    assert train_here(line(tmp_path / "base", text, base)) == 0
    assert jf.load(tmp_path / "base").step == 6
    changes = {"adapter.kind": "lora", "adapter.rank": 2, "run.init_from": tmp_path / "base"}
    assert train_here(line(tmp_path / "run", text, EXPORTS | changes | {"model.dropout": 0})) == 0
    found = jf.load(tmp_path / "run/hf/4", base=tmp_path / "base")
    wanted = jf.load(tmp_path / "run", 4)
    tokens = np.arange(8)[None]
    logits = [np.asarray(jf.forward(each.params, each.config, tokens)) for each in (found, wanted)]
    np.testing.assert_allclose(*logits, atol=1e-5 * logits[0].std())


def test_several_processes_write_what_one_does(tmp_path):
    text = write_text(tmp_path / "text.txt")
    changes = SMALL | {"run.export_every": 4, "mesh.fsdp": 2, "mesh.data": 1}
    finished(launch_all(2, tmp_path / "run", text, changes))
    found = jf.load(tmp_path / "run/hf/4")
    jax.tree.map(np.testing.assert_array_equal, found.params, jf.load(tmp_path / "run", 4).params)


WRONG = {
    "not where a checkpoint is": ({"run.export_every": 3}, "run.export_every=3 is not a multiple"),
    "a model without a class": (
        {"model.layer_pattern": "d", "model.recurrent.decay": "channel"},
        "run.export_every=4 cannot be written as files of Hugging Face",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_written_stops_the_run_before_it_begins(case, tmp_path, capsys):
    changes, message = WRONG[case]
    text = write_text(tmp_path / "text.txt")
    assert train_here(line(tmp_path / "run", text, EXPORTS | changes)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
