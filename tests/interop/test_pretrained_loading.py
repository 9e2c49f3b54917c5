"""What `jf.load` takes of the host, and the bits that it keeps, on files that are written here."""

import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxformer as jf
from jaxformer.interop import pretrained
from jaxformer.interop.tensor_files import write_tensors

SHARD = 2_000_000  # bytes
BITS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}


def model(**settings):
    config = jf.ModelConfig(**dict(d_model=128, n_heads=2, max_length=16) | settings)
    return config, jf.init(config, jax.random.key(0))


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_of_a_sharded_directory_the_host_holds_less_than_one_shard(tmp_path, monkeypatch):
    """Beside the arrays of JAX, which tracemalloc does not count, as it does those of numpy."""
    config, params = model(vocab_size=8192, n_layers=16, d_ff=512)
    files = jf.save_pretrained(tmp_path, params, config, shard_bytes=SHARD)
    assert len(files) > 8 and max(leaf.nbytes for leaf in jax.tree.leaves(params)) > 2 * SHARD
    monkeypatch.setattr(pretrained, "HOST_BYTES", 300_000)
    jf.load(tmp_path)  # which compiles
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    loaded = jf.load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert jax.tree.all(jax.tree.map(same_bits, loaded.params, params))
    assert peak < SHARD, f"{peak:,} bytes"


@pytest.mark.parametrize(
    ("dtype", "host_bytes"), [("bfloat16", 1000), ("float16", pretrained.HOST_BYTES)]
)
def test_every_number_of_a_half_precision_file_is_kept_bit_for_bit(
    dtype, host_bytes, tmp_path, monkeypatch
):
    """All of them, with both zeros and infinities and those below the normal range, which float32
    holds exactly too; of those that are no numbers numpy's."""
    config, params = model(vocab_size=512, n_layers=2, d_ff=512)
    monkeypatch.setattr(pretrained, "HOST_BYTES", host_bytes)
    jf.save_pretrained(tmp_path, params, config, dtype=dtype)
    stored = load_file(tmp_path / "model.safetensors")
    every = np.arange(1 << 16, dtype=np.uint16).view(BITS[dtype])
    with np.errstate(invalid="ignore"):
        every = np.where(np.isnan(every), BITS[dtype].type(np.nan), every)
    tensors = {name: np.resize(every, w.shape) for name, w in stored.items()}
    shapes = {name: (w.shape, w.dtype) for name, w in tensors.items()}
    write_tensors(tmp_path, shapes, tensors.__getitem__, 1 << 30)

    loaded = jf.load(tmp_path, dtype=dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {BITS[dtype]}
    assert same_bits(loaded.params["embed"]["tokens"], every.reshape(512, 128))
    jf.save_pretrained(tmp_path / "again", loaded.params, loaded.config)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert [name for name in tensors if not same_bits(again[name], tensors[name])] == []

    wide = jf.load(tmp_path).params
    exact = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float32), loaded.params)
    assert jax.tree.all(jax.tree.map(same_bits, wide, exact))
