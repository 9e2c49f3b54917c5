"""Models of Hugging Face in a bucket: the parameters are those of the directory on the disk."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from faulty_server import Faults

import jaxformer as jf
from jaxformer.files import ConfigError, located
from jaxformer.files.bucket import VARIABLE
from jaxformer.interop.pretrained import pretrained_config
from jaxformer.runs.model_files import ModelFiles

CONFIG = jf.ModelConfig(
    vocab_size=300, d_model=16, n_layers=2, n_heads=2, d_ff=32, max_length=32, tied_head=True
)


@pytest.fixture(autouse=True)
def copies_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of copies, new for each test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "copies"))
    return tmp_path / "copies"


def saved(directory: Path, shard_bytes: int, seed: int = 0) -> Any:
    params = jf.init(CONFIG, jax.random.key(seed))
    jf.save_pretrained(directory, params, CONFIG, shard_bytes=shard_bytes)
    return params


def put(directory: Path, url: str) -> str:
    for path in directory.iterdir():
        (located(url) / path.name).write_bytes(path.read_bytes())
    return url


def require_equal(a: Any, b: Any) -> None:
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("shard_bytes", [20_000, 10**9])
def test_a_model_in_a_bucket_is_that_of_the_disk(
    shard_bytes: int, s3_bucket: str, s3_faults: Faults, tmp_path: Path
) -> None:
    saved(tmp_path / "model", shard_bytes)
    url = put(tmp_path / "model", f"{s3_bucket}/model")
    # What transformers does not read is not copied.
    (located(url) / "original.bin").write_bytes(b"0" * 1000)
    expected, found = jf.load(tmp_path / "model"), jf.load(url)
    assert found.config == expected.config
    require_equal(expected.params, found.params)
    assert not [path for path in (tmp_path / "copies").rglob("*") if path.name == "original.bin"]
    s3_faults.requests.clear()
    require_equal(jf.load(url).params, found.params)
    read = [
        path for method, path in s3_faults.requests if method == "GET" and "safetensors" in path
    ]
    assert all(path.endswith(".json") for path in read)


def test_the_config_of_a_model_is_read_without_its_weights(
    s3_bucket: str, tmp_path: Path, copies_of_the_test: Path
) -> None:
    saved(tmp_path / "model", 20_000)
    url = located(put(tmp_path / "model", f"{s3_bucket}/model"))
    assert pretrained_config(url) == pretrained_config(tmp_path / "model")
    assert not [*copies_of_the_test.rglob("*.safetensors")]


def test_a_model_that_was_saved_anew_is_copied_anew(memory_bucket: str, tmp_path: Path) -> None:
    saved(tmp_path / "one", 20_000)
    url = put(tmp_path / "one", f"{memory_bucket}/model")
    assert len(ModelFiles(url).config.family) and jf.load(url)
    for path in [*located(url).iterdir()]:
        path.unlink()
    params = saved(tmp_path / "two", 10**9, seed=1)
    put(tmp_path / "two", url)
    require_equal(jf.load(url).params, params)


def test_a_model_without_a_shard_is_named(memory_bucket: str, tmp_path: Path) -> None:
    saved(tmp_path / "model", 20_000)
    url = put(tmp_path / "model", f"{memory_bucket}/model")
    shard = sorted(located(url).glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name} cannot be read"):
        jf.load(url)


def test_an_adapter_and_its_base_in_a_bucket(memory_bucket: str, tmp_path: Path) -> None:
    params = saved(tmp_path / "model", 10**9)
    url = put(tmp_path / "model", f"{memory_bucket}/model")
    adapted = jf.adapt(params, CONFIG, jf.LoRA(rank=2), jax.random.key(1))
    jf.save_adapter(tmp_path / "adapter", adapted, CONFIG, base=url)
    adapter_url = put(tmp_path / "adapter", f"{memory_bucket}/adapter")
    # An adapter on the disk that names its base in the bucket is read with that base named.
    with pytest.raises(ConfigError, match="which whoever made the adapter has chosen"):
        jf.load(tmp_path / "adapter")
    for adapter, base in ((adapter_url, None), (tmp_path / "adapter", url)):
        loaded = jf.load(adapter, base=base)
        assert str(loaded.base) == url
        require_equal(jf.merge(loaded.params), jf.merge(adapted))


@pytest.mark.slow
def test_a_gguf_file_in_a_bucket(memory_bucket: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import gguf_models
    from transformers import LlamaForCausalLM

    path = gguf_models.written(tmp_path / "a.gguf", "llama", gguf_models.tiny(LlamaForCausalLM))
    url = f"{memory_bucket}/models/a.gguf"
    located(url).parent.mkdir()
    located(url).write_bytes(path.read_bytes())
    require_equal(jf.load(url).params, jf.load(path).params)
