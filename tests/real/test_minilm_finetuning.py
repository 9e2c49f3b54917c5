"""A few steps from MiniLM tell the topics of docstrings apart better than the same steps of the
same shape from scratch, and its fine-tuned vectors are still those of texts."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from shipped import minilm_directory

import jaxformer as jf
from jaxformer.cli import main

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("minilm")]
ROOT = Path(__file__).parents[2]
FEW = ["train.steps=12", "data.sequence_length=24", "train.eval_every=12", "train.eval_batches=8"]
FEW += ["optimizer.warmup_steps=2", "run.progress=none", "run.tracker=none", "run.sample_tokens=0"]
TEXTS = ["Open a zip archive.", "Extract a compressed file.", "Return the weekday of a date."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the data of `examples/stdlib_docstrings.py`."""
    folder = tmp_path_factory.mktemp("topics")
    spec = importlib.util.spec_from_file_location("docs", ROOT / "examples/stdlib_docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FOLDER = folder / "topics"
    module.main()
    return folder


def trained(folder, name, *settings):
    files = [f"data.{side}={folder}/topics/{side}.jsonl" for side in ("train", "validation")]
    stated = [*FEW, *files, f"run.dir={folder / name}", f"data.cache_dir={folder / 'cache'}"]
    config = f"{ROOT}/configs/topics.py" + (":scratch" if name == "scratch" else "")
    result = jf.train(jf.load_config(config, [*stated, *settings]))
    return next(line for line in reversed(result.metrics) if "val_loss" in line)


def test_fine_tuning_beats_the_same_steps_from_scratch(folder, capsys):
    tuned = trained(folder, "tuned", f"run.init_from={minilm_directory()}")
    scratch = trained(folder, "scratch", f"tokenizer.path={minilm_directory()}")
    print(
        {
            name: (line["val_loss"], line["val_accuracy"])
            for name, line in (("tuned", tuned), ("scratch", scratch))
        }
    )
    assert tuned["val_loss"] < scratch["val_loss"] < 1.1 * math.log(10)
    assert tuned["val_accuracy"] > scratch["val_accuracy"] + 0.1
    capsys.readouterr()
    vectors = []
    for text in TEXTS:
        assert main(["embed", str(folder / "tuned"), "--prompt", text]) == 0
        vectors.append(json.loads(capsys.readouterr().out.splitlines()[-1])["vector"])
    cosines = np.array(vectors) @ np.array(vectors).T
    np.testing.assert_allclose(np.diag(cosines), 1, atol=1e-5)
    assert cosines[0, 1] > cosines[0, 2] + 0.2
