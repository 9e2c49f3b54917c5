"""A base of which only config.json is there: `plan`, `shapes` and `prepare` need no weights."""

import json
import shutil
from pathlib import Path

import pytest
from pretrained import directory, each
from pretrained_variants import FURTHER_VARIANTS, VARIANTS

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.interop.pretrained import open_pretrained, pretrained_config
from jaxformer.interop.tensor_files import INDEX
from jaxformer.tokenizer import train_bpe_tokenizer

ROOT = Path(__file__).parents[2]
SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    place = tmp_path / "base"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(SIZES))
    return place


# transformers 5 writes tie_word_embeddings=true for an mT5 of which the weights say otherwise.
@each([name for name in VARIANTS if name != "mt5 untied"], slow=FURTHER_VARIANTS - {"mt5 untied"})
def test_config_json_alone_says_what_the_model_is(name: str, tmp_path: Path) -> None:
    shutil.copy(directory(name) / "config.json", tmp_path)
    found = pretrained_config(tmp_path)
    assert found == pretrained_config(directory(name)) == open_pretrained(directory(name)).config


def test_names_in_the_index_are_those_of_the_tensors(tmp_path: Path) -> None:
    config = SIZES | {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not pretrained_config(tmp_path).head.pooler
    names = {"bert.pooler.dense.weight": "model-00001-of-00001.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert pretrained_config(tmp_path).head.pooler


@pytest.mark.parametrize(
    "adapter",
    [
        [],
        ["--adapter.kind", "lora", "--adapter.base", "nf4", "--data.objective", "dpo"],
        ["--adapter.kind", "prefix", "--adapter.tokens", "4"],
    ],
)
def test_a_plan_needs_no_weights(adapter: list[str], base: Path, capsys: Capture) -> None:
    asked = [str(ROOT / "configs" / "finetune.py"), "--run.init_from", str(base)]
    asked += ["--data.sequence_length", "32", *adapter]
    assert main(["plan", *asked, "--device", "h100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"the model is that of config.json in {base}, which has no weights" in out
    assert "does NOT fit" not in out
    assert main(["shapes", *asked]) == 0


def test_text_is_prepared_and_a_run_still_asks_for_the_weights(
    base: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_text("a text of some words")
    text = ["--data.train", str(tmp_path / "text.txt"), "--data.cache_dir", str(tmp_path)]
    text += ["--data.sequence_length", "8", "--data.objective", "causal"]
    train_bpe_tokenizer(["a text of some words"], 280).save(base)
    asked = [str(ROOT / "configs" / "finetune.py"), "--run.init_from", str(base), *text]
    assert main(["prepare", *asked]) == 0
    with pytest.raises(jf.ConfigError, match="has no weights"):
        jf.load_config(asked[0], [f"run.init_from={base}"])
    assert main(["train", *asked, "--run.dir", str(tmp_path / "run")]) == 2
    assert "has no weights" in capsys.readouterr().err and not (tmp_path / "run").exists()
