"""Files of tensors: what is written is what any reader reads, and whatever is wrong with a file is
said once and by name."""

import contextlib
import errno
import gc
import json
import os
import re
import resource
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import load_file

from jaxformer.files import ConfigError
from jaxformer.interop import tensor_files
from jaxformer.interop.tensor_files import INDEX, SINGLE, TensorFiles, write_tensors

BF16 = np.dtype(ml_dtypes.bfloat16)
Tensors = dict[str, np.ndarray]


def awkward(seed: int = 0) -> Tensors:
    """Every dtype that is written, with a scalar and an empty tensor; odd lengths, so that places
    are uneven."""
    draw = np.random.default_rng(seed).standard_normal
    return {
        "a.bf16": draw((5, 3)).astype(BF16),
        "half": draw(7).astype(np.float16),
        "wide": draw((2, 2, 3)),
        "scalar": np.asarray(draw(), np.float32),
        "none": np.zeros((0, 4), np.float32),
        "hollow": np.zeros((3, 0), BF16),
        "full": draw((9, 5)).astype(np.float32),
    }


def write(folder: Path, tensors: Tensors, limit: int = 1 << 30) -> list[Path]:
    return write_tensors(
        folder, {n: (v.shape, v.dtype) for n, v in tensors.items()}, tensors.__getitem__, limit
    )


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return (
        found.shape == expected.shape
        and found.dtype == expected.dtype
        and found.tobytes() == expected.tobytes()
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("limit", [1 << 30, 64, 1])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path, limit: int) -> None:
    tensors = awkward()
    paths = write(tmp_path, tensors, limit)
    files = TensorFiles(tmp_path)
    assert {path.name for path in paths} == names_in(tmp_path)
    assert files.entries.keys() == tensors.keys()
    for name, value in tensors.items():
        assert files.entries[name].shape == value.shape
        assert same(files.read(name), value), name


def test_the_library_reads_what_is_written_into_numpy_and_torch(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    tensors = awkward()
    [path] = write(tmp_path, tensors)
    for name, value in load_file(path).items():
        expected = tensors[name].astype(np.float64)
        assert (
            value.dtype == torch.bfloat16
            if tensors[name].dtype == BF16
            else value.numpy().dtype == tensors[name].dtype
        )
        assert np.array_equal(value.double().numpy(), expected), name
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert all(same(file.get_tensor(name), value) for name, value in tensors.items())


def test_every_tensor_lies_at_a_multiple_of_its_width(tmp_path: Path) -> None:
    [path] = write(tmp_path, awkward())
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    assert length % 8 == 0
    assert all(
        row["data_offsets"][0] % tensor_files.DTYPES[row["dtype"]].itemsize == 0
        for row in header.values()
    )


@pytest.mark.parametrize(
    "rows",
    [
        slice(2, 5),
        slice(None, 3),
        slice(4, None),
        slice(-2, None),
        slice(3, 3),
        slice(4, 1),
        slice(5, 99),
    ],
)
def test_rows_are_those_of_the_whole(tmp_path: Path, rows: slice) -> None:
    tensors = awkward()
    write(tmp_path, tensors)
    files = TensorFiles(tmp_path)
    for name in ("full", "a.bf16", "half", "none", "hollow"):
        assert same(files.read(name, rows), tensors[name][rows]), name


def test_what_the_library_writes_is_read_whatever_its_name(tmp_path: Path) -> None:
    tensors = awkward()
    save_file(tensors, tmp_path / "weights.safetensors")
    files = TensorFiles(tmp_path)
    assert all(same(files.read(name), value) for name, value in tensors.items())


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    write(tmp_path, {name: np.ones(4, np.float32) for name in "ab"}, 16)
    save_file({"whole": np.ones(4, np.float32)}, tmp_path / SINGLE)
    assert TensorFiles(tmp_path).entries.keys() == {"whole"}


def test_a_tensor_is_cast_to_the_dtype_promised(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 40, dtype=np.float32).reshape(8, 5)
    shapes = {"a": ((8, 5), BF16), "b": ((5, 8), np.dtype(np.float16))}
    write_tensors(tmp_path, shapes, {"a": values, "b": values.T}.__getitem__, 1 << 20)
    files = TensorFiles(tmp_path)
    assert same(files.read("a"), values.astype(BF16))
    assert same(files.read("b"), np.ascontiguousarray(values.T).astype(np.float16))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([np.float32, BF16])), max_size=9),
    st.integers(1, 200),
)
def test_shards_hold_each_tensor_once_within_the_limit(
    sizes: list[tuple[int, Any]], limit: int
) -> None:
    tensors = {f"t{i}": np.full(size, i, dtype) for i, (size, dtype) in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), tensors, limit)
        shards = [path for path in paths if path.name != INDEX]
        held = [load_file(path) for path in shards]
        assert sorted(name for part in held for name in part) == sorted(tensors)
        for part in held:
            assert (
                sum(tensors[name].nbytes for name in part) <= limit
                or len([n for n in part if tensors[n].nbytes]) == 1
            )
        total = sum(value.nbytes for value in tensors.values())
        if total <= limit:
            assert [path.name for path in paths] == [SINGLE]
        if len(shards) > 1:
            assert all(held)
            assert [path.name for path in shards] == [
                f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
            ]
            index = json.loads((Path(folder) / INDEX).read_text())
            assert index["metadata"]["total_size"] == total
            assert index["weight_map"] == {
                n: path.name for path, part in zip(shards, held, strict=True) for n in part
            }
        files = TensorFiles(Path(folder))
        assert all(same(files.read(name), value) for name, value in tensors.items())


def test_one_shard_at_a_time_is_held_and_each_tensor_is_asked_for_once_in_order(
    tmp_path: Path,
) -> None:
    asked: list[str] = []
    made: dict[str, weakref.ref[np.ndarray]] = {}
    shards = ["ze", "br", "a"]

    def make(name: str) -> np.ndarray:
        gc.collect()
        alive = {other for other, value in made.items() if value() is not None}
        assert alive <= {*next(shard for shard in shards if name in shard)}
        asked.append(name)
        value = np.ones((10, 3), np.float32)
        made[name] = weakref.ref(value)
        return value

    shapes = {name: ((10, 3), np.dtype(np.float32)) for name in "zebra"}
    write_tensors(tmp_path, shapes, make, 250)
    assert asked == list("zebra")
    held = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert [{name for name in held if f"0000{i}-of" in held[name]} for i in (1, 2, 3)] == [
        {*shard} for shard in shards
    ]


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's count of resident file pages"
)
def test_no_page_of_a_file_stays_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"large": np.ones((1 << 10, 1 << 13), np.float32)})  # 32 MiB
    files, resident = TensorFiles(tmp_path), []
    opened = tensor_files._opened

    def file_pages() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.findall(r"RssFile:\s+(\d+) kB", status)[0]) << 10

    @contextlib.contextmanager
    def watched(path: Path) -> Iterator[Any]:
        with opened(path) as file:
            before = file_pages()
            yield file
            resident.append(file_pages() - before)

    monkeypatch.setattr(tensor_files, "_opened", watched)
    files.read("large")
    files.read("large", slice(9, 900))
    assert len(resident) == 2 and max(resident) < 1 << 20


def test_of_an_earlier_save_nothing_is_left_and_of_other_files_all(tmp_path: Path) -> None:
    others = {
        "config.json",
        "model-1-of-2.safetensors",
        "model.safetensors.bak",
        "adapter_model.safetensors",
    }
    for name in others:
        (tmp_path / name).write_text("{}")
    draft = f"model-00009-of-00009.safetensors.{uuid.uuid4().hex}.tmp"
    (tmp_path / draft).write_text("of a save that was killed")
    five = {name: np.ones(8, np.float32) for name in "abcde"}
    for tensors, limit, made in (
        (five, 1 << 20, 1),
        (five, 64, 4),
        (five, 32, 6),
        (awkward(), 1 << 20, 1),
    ):
        assert {path.name for path in write(tmp_path, tensors, limit)} | others == names_in(
            tmp_path
        )
        assert len(names_in(tmp_path)) == made + len(others)
        assert TensorFiles(tmp_path).entries.keys() == tensors.keys()


@pytest.mark.parametrize("limit", [1 << 20, 40])
def test_a_save_that_fails_leaves_the_earlier_model(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: np.ones(8, np.float32) for name in "abc"}
    write(tmp_path, tensors, limit)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def make(name: str) -> np.ndarray:
        if name == "c":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return np.zeros(8, np.float32)

    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: No space left on device")):
        write_tensors(tmp_path, {n: (v.shape, v.dtype) for n, v in tensors.items()}, make, limit)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_disk_that_takes_no_more_is_said_with_its_path(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))  # bytes of any file
    try:
        with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}: .*File too large"):
            write(tmp_path, {"a": np.ones(1 << 16, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == set()


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "file"))):
        write(tmp_path / "file", awkward())


def test_all_is_on_the_disk_before_a_file_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str) -> Callable[..., None]:
        act = getattr(os, name)

        def both(*places: Any) -> None:
            act(*places)
            done.append(name)

        return both

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name))
    write(tmp_path, {name: np.ones(8, np.float32) for name in "abc"}, 40)
    assert done == ["fsync"] * 4 + ["replace"] * 4 + ["fsync"]  # the last of the directory


@pytest.mark.parametrize("limit", [1 << 30, 40], ids=["one file", "shards"])
def test_a_link_at_the_place_of_a_file_stays_and_its_file_is_replaced(
    limit: int, tmp_path: Path
) -> None:
    tensors = {name: np.full(8, ord(name), np.float32) for name in "abc"}
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    folder.mkdir()
    names = [path.name for path in write(tmp_path / "plain", tensors, limit)]
    for number, name in enumerate(names):
        (folder / name).symlink_to(elsewhere / f"{number}")
    write(folder, tensors, limit)
    assert all((folder / name).is_symlink() for name in names)
    assert names_in(folder) == {*names} and names_in(elsewhere) == {*map(str, range(len(names)))}
    found = TensorFiles(folder)
    for name, value in tensors.items():
        np.testing.assert_array_equal(found.read(name), value)


@pytest.mark.parametrize("name", [SINGLE, INDEX, "model-00001-of-00002.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_what_is_no_file_is_neither_replaced_nor_removed(
    kind: str, name: str, tmp_path: Path
) -> None:
    place = tmp_path / name
    place.mkdir() if kind == "directory" else os.mkfifo(place)
    with pytest.raises(ConfigError, match=rf"{re.escape(str(place))} is .* and not a file: move"):
        write(tmp_path, {"a": np.ones(8, np.float32)})
    assert names_in(tmp_path) == {name}


def test_between_the_shards_of_two_saves_there_is_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: np.ones(8, np.float32) for name in "abc"}
    write(tmp_path, tensors, 40)
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "the machine goes down"))
    )
    with pytest.raises(ConfigError, match="the machine goes down"):
        write(tmp_path, tensors, 40)
    assert INDEX not in names_in(tmp_path)


@pytest.mark.parametrize(
    ("shape", "dtype", "limit", "said"),
    [
        ((3, 2), np.float32, 9, r"w: the params make it \(2, 3\), the config \(3, 2\)"),
        ((2, 3), np.int8, 9, "float64, float32, float16, bfloat16, not w: int8"),
        ((2, 3), np.float32, 0, "shard_bytes=0 must be at least 1"),
        ((2, 3), np.float16, 9, "w has values beyond the range of float16: save it as bfloat16"),
    ],
)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, shape: Any, dtype: Any, limit: int, said: str
) -> None:
    value = np.full((2, 3), 1e9, np.float32)
    with pytest.raises(ConfigError, match=said):
        write_tensors(tmp_path, {"w": (shape, np.dtype(dtype))}, lambda name: value, limit)
    assert names_in(tmp_path) == set()


def test_infinities_are_written_as_they_are(tmp_path: Path) -> None:
    value = np.array([np.inf, -np.inf, np.nan, 0], np.float32)
    for dtype in (np.dtype(np.float16), BF16):
        write_tensors(tmp_path, {"w": ((4,), dtype)}, lambda name: value, 99)
        assert np.array_equal(
            TensorFiles(tmp_path).read("w").astype(np.float32), value, equal_nan=True
        )
