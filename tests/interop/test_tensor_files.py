"""Files of tensors: what is written is what any reader reads, and whatever is wrong with a file is
said once and by name."""

import errno
import gc
import json
import os
import re
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from jaxformer.files import ConfigError
from jaxformer.interop.tensor_files import INDEX, SINGLE, TensorFiles, write_tensors

BF16 = np.dtype(ml_dtypes.bfloat16)


def awkward():
    """Every dtype that is written, with a scalar and empty tensors, and odd lengths."""
    draw = np.random.default_rng(0).standard_normal
    return {
        "a.bf16": draw((5, 3)).astype(BF16),
        "half": draw(7).astype(np.float16),
        "wide": draw((2, 2, 3)),
        "scalar": np.asarray(draw(), np.float32),
        "none": np.zeros((0, 4), np.float32),
        "hollow": np.zeros((3, 0), BF16),
        "full": draw((9, 5)).astype(np.float32),
        "beyond": np.array([np.inf, -np.inf, np.nan, 0], np.float16),
    }


def write(folder, tensors, limit=1 << 30):
    shapes = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    return write_tensors(folder, shapes, tensors.__getitem__, limit)


def same(found, expected):
    kinds = (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return kinds and found.tobytes() == expected.tobytes()


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def ones(names):
    return {name: np.ones(8, np.float32) for name in names}


@pytest.mark.parametrize("limit", [1 << 30, 64])
def test_what_is_written_is_read_back_bit_for_bit_and_by_torch(tmp_path, limit):
    tensors = awkward()
    paths = write(tmp_path, tensors, limit)
    files = TensorFiles(tmp_path)
    assert {path.name for path in paths} == names_in(tmp_path)
    assert files.entries.keys() == tensors.keys()
    for name, value in tensors.items():
        assert same(files.read(name), value), name
        if value.ndim:
            for rows in (slice(2, 5), slice(-2, None), slice(3, 3), slice(4, 1), slice(5, 99)):
                assert same(files.read(name, rows), value[rows]), (name, rows)
    for path in paths:
        if path.name == INDEX:
            continue
        held = load_file(path)
        assert sum(tensors[name].nbytes for name in held) <= limit or len(held) == 1
        for name, value in held.items():
            assert files.entries[name].file == path.name
            expected = tensors[name].astype(np.float64)
            assert (value.dtype == torch.bfloat16) == (tensors[name].dtype == BF16)
            np.testing.assert_array_equal(value.double().numpy(), expected)


def test_what_the_library_writes_is_read_whatever_its_name(tmp_path):
    save_file(awkward(), tmp_path / "weights.safetensors")
    (tmp_path / "training_args.bin").write_bytes(b"no pickle is touched")
    files = TensorFiles(tmp_path)
    assert all(same(files.read(name), value) for name, value in awkward().items())


def test_one_file_goes_before_an_index(tmp_path):
    write(tmp_path, ones("ab"), 32)
    save_file(ones(["whole"]), tmp_path / SINGLE)
    assert TensorFiles(tmp_path).entries.keys() == {"whole"}


def test_a_tensor_is_cast_to_the_dtype_promised(tmp_path):
    values = np.linspace(-3, 3, 40, dtype=np.float32).reshape(8, 5)
    shapes = {"a": ((8, 5), BF16), "b": ((5, 8), np.dtype(np.float16))}
    write_tensors(tmp_path, shapes, {"a": values, "b": values.T}.__getitem__, 1 << 20)
    files = TensorFiles(tmp_path)
    assert same(files.read("a"), values.astype(BF16))
    assert same(files.read("b"), np.ascontiguousarray(values.T).astype(np.float16))
    with pytest.raises(ConfigError, match="a has values beyond the range of float16: save it as"):
        write_tensors(tmp_path, {"a": shapes["b"]}, lambda name: values.T * 1e9, 99)


def test_one_shard_at_a_time_is_held(tmp_path):
    made = {}
    shards = ["ze", "br", "a"]

    def make(name):
        gc.collect()
        alive = {other for other, value in made.items() if value() is not None}
        assert alive <= {*next(shard for shard in shards if name in shard)}
        value = np.ones((10, 3), np.float32)
        made[name] = weakref.ref(value)
        return value

    write_tensors(tmp_path, {name: ((10, 3), np.dtype("f4")) for name in "zebra"}, make, 250)
    held = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert [{name for name in held if f"0000{i}-of" in held[name]} for i in (1, 2, 3)] == [
        {*shard} for shard in shards
    ]


def test_of_an_earlier_save_nothing_is_left_and_of_other_files_all(tmp_path):
    others = {"config.json", "model-1-of-2.safetensors", "adapter_model.safetensors"}
    for name in others:
        (tmp_path / name).write_text("{}")
    (tmp_path / ".model-drafts-killed").mkdir()
    for tensors, limit, files in (
        (ones("abcde"), 1 << 20, 1),
        (ones("abcde"), 64, 4),
        (ones("abcde"), 32, 6),
        (awkward(), 1 << 20, 1),
    ):
        made = {path.name for path in write(tmp_path, tensors, limit)}
        assert made | others == names_in(tmp_path) and len(made) == files
        assert TensorFiles(tmp_path).entries.keys() == tensors.keys()


@pytest.mark.parametrize("limit", [1 << 20, 40])
def test_a_save_that_fails_leaves_the_earlier_model(tmp_path, limit, monkeypatch):
    write(tmp_path, ones("abc"), limit)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def make(name):
        if name == "c":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return np.zeros(8, np.float32)

    shapes = {name: ((8,), np.dtype("f4")) for name in "abc"}
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: No space left on device")):
        write_tensors(tmp_path, shapes, make, limit)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def fails(*paths):
        raise OSError(errno.EIO, "the machine goes down")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ConfigError, match="the machine goes down"):
        write(tmp_path, ones("abc"), 40)
    assert INDEX not in names_in(tmp_path)  # beside shards of two saves


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "file"))):
        write(tmp_path / "file", awkward())


def test_all_is_on_the_disk_before_a_file_takes_its_name(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        act = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *paths, act=act, name=name: (act(*paths), done.append(name))
        )
    write(tmp_path, ones("abc"), 40)
    assert done == ["fsync"] * 4 + ["replace"] * 4 + ["fsync"]  # the last of the directory


def raw(path, header, size):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def row(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
INVALID = "{p}, of .* bytes, is not a valid safetensors file .* Download"
DAMAGE = {
    "empty": (lambda p: p.write_bytes(b""), INVALID),
    "cut in its data": (lambda p: p.write_bytes(p.read_bytes()[:165]), "165 bytes.*covered"),
    "a pointer": (lambda p: p.write_text(POINTER), INVALID + ".*git lfs pull"),
    "an unknown dtype": (lambda p: raw(p, {"a": row(0, 8, dtype="Q9")}, 8), INVALID),
    "a pipe": (lambda p: p.unlink() or os.mkfifo(p), "{p} is a device, a pipe or a socket and not"),
    "a missing shard": (lambda p: p.unlink(), "{p} cannot be read: No such file.* Download"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, kind):
    damage, message = DAMAGE[kind]
    write(tmp_path, {name: np.ones(2, np.float32) for name in "xyab"}, 16)
    files, path = TensorFiles(tmp_path), tmp_path / "model-00002-of-00002.safetensors"
    assert path.stat().st_size == 168
    damage(path)
    message = message.replace("{p}", re.escape(str(path)))
    with pytest.raises(ConfigError, match=message):
        TensorFiles(tmp_path)
    with pytest.raises(ConfigError):
        files.read("b")  # opened before


@pytest.mark.parametrize("dtype", ["I64", "U8", "F8_E4M3"])
def test_a_dtype_that_is_no_float_is_listed_and_not_read(tmp_path, dtype):
    size = {"I64": 8}.get(dtype, 1) * 2
    raw(tmp_path / SINGLE, {"w": row(0, size, dtype=dtype)}, size)
    files = TensorFiles(tmp_path)
    assert (files.entries["w"].dtype, files.entries["w"].shape) == (dtype, (2,))
    with pytest.raises(ConfigError, match=f"^w in .* is of dtype {dtype}; .* F64.*unquantized"):
        files.read("w")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model.bin"], "only in pytorch_model.bin, .*a pickle runs code.*you trust"),
        (["tf_model.h5"], "only in tf_model.h5, and only safetensors are read"),
        ([], f"has no weights: no {SINGLE}"),
        (["1.safetensors", "2.safetensors"], "several files of weights .1.*, 2.* and no"),
    ],
)
def test_a_directory_without_safetensors_is_refused_with_the_remedy(tmp_path, names, message):
    for name in ("config.json", *names):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}.*{message}"):
        TensorFiles(tmp_path)


def shard(number):
    return f"model-0000{number}-of-00003.safetensors"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": ', "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
        ('{"weight_map": {"a": "../outside.safetensors"}}', "places .*: '../outside"),
        ('{"weight_map": {"a": "x.bin"}}', "places .*: 'x.bin'"),
        (
            json.dumps({"weight_map": {"a": shard(1), "b": shard(2), "d": shard(3)}}),
            rf"does not match [^$]*c in {shard(3)}: not in the index[^$]*d in .*: not in the file",
        ),
    ],
)
def test_an_index_that_is_wrong_is_refused(tmp_path, text, message):
    write(tmp_path, ones("abc"), 32)
    save_file(ones("a"), tmp_path.parent / "outside.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=f"{INDEX} {message}"):
        TensorFiles(tmp_path)
