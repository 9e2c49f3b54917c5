"""Files of tensors that are damaged, missing, foreign or at odds with their index: said once, by
file and by tensor."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxformer.files import ConfigError
from jaxformer.interop.tensor_files import INDEX, SINGLE, TensorFiles, write_tensors


def write(folder: Path, *names: str, limit: int = 1 << 20) -> None:
    """A model of two float32 numbers a name."""
    shapes = {name: ((2,), np.dtype(np.float32)) for name in names}
    write_tensors(folder, shapes, lambda name: np.ones(2, np.float32), limit)


@pytest.mark.parametrize(
    ("code", "width"),
    [("I64", 8), ("BOOL", 1), ("U8", 1), ("F8_E4M3", 1), ("F8_E5M2", 1), ("I8", 1)],
)
def test_a_dtype_that_is_no_float_is_listed_and_not_read(
    tmp_path: Path, code: str, width: int
) -> None:
    raw(
        tmp_path / SINGLE,
        {"w": {"dtype": code, "shape": [2, 2], "data_offsets": [0, 4 * width]}},
        4 * width,
    )
    files = TensorFiles(tmp_path)
    assert (files.entries["w"].dtype, files.entries["w"].shape) == (code, (2, 2))
    with pytest.raises(
        ConfigError,
        match=f"^w in .*{SINGLE} is of dtype {code}; .* F64, F32, F16, BF16.*unquantized",
    ):
        files.read("w")


def raw(path: Path, header: Any, size: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))


def row(begin: int, end: int, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def cut(size: int) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "{p} is empty"),
    "cut in its data": (
        cut(165),
        (
            r"{p} is damaged: it has 165 bytes where its header promises 168; the first incomplete"
            r" tensor is b\."
        ),
    ),
    "cut by a tensor": (cut(158), "it has 158 bytes .* 168; the first incomplete tensor is a"),
    "cut between tensors": (cut(160), "it has 160 bytes .* 168; the first incomplete tensor is b"),
    "cut in its header": (cut(78), "{p} is truncated: its 78 bytes end within the header"),
    "cut in its length": (cut(5), "{p} is truncated: its 5 bytes end within the header"),
    "too long": (
        lambda p: p.write_bytes(p.read_bytes() + b"xx"),
        "{p} is damaged: it has 170 bytes .* 168. Download",
    ),
    "a web page": (
        lambda p: p.write_text("<!DOCTYPE html><html>"),
        "{p} is not a valid safetensors file",
    ),
    "a pointer": (
        lambda p: p.write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        "{p} is a Git LFS pointer .*git lfs pull",
    ),
    "a hostile length": (
        lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()),
        "not a valid safetensors file",
    ),
    "a header that is a list": (lambda p: raw(p, [1], 0), "{p} is not a valid safetensors file"),
    "a header that is no JSON": (
        lambda p: p.write_bytes((4).to_bytes(8, "little") + b"{{{{"),
        "not a valid safetensors file",
    ),
    "a shape that overflows": (
        lambda p: raw(p, {"a": row(0, 8, (1 << 40, 1 << 40))}, 8),
        "not a valid safetensors file",
    ),
    "a shape that lies": (
        lambda p: raw(p, {"a": row(0, 8, (3,))}, 8),
        "not a valid safetensors file",
    ),
    "tensors that overlap": (
        lambda p: raw(p, {"a": row(0, 8), "b": row(4, 12)}, 12),
        "not a valid safetensors file",
    ),
    "places that are no numbers": (
        lambda p: raw(p, {"a": row("x", "y")}, 8),
        "not a valid safetensors file",
    ),  # type: ignore[arg-type]
    "a place beyond all numbers": (
        lambda p: raw(p, {"a": row(0, 8) | {"data_offsets": [0, 10**400]}}, 8),
        "not a valid safetensors file",
    ),
    "an infinite place": (
        lambda p: raw(p, {"a": row(0, 8) | {"data_offsets": [0, math.inf]}}, 8),
        "not a valid safetensors file",
    ),
    "a header without tensors": (
        lambda p: raw(p, {}, 8),
        "{p} is damaged: it has 18 bytes where its header promises 10",
    ),
    "an unknown dtype": (
        lambda p: raw(p, {"a": row(0, 8, dtype="Q9")}, 8),
        "not a valid safetensors file",
    ),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_with_what_is_wrong(
    tmp_path: Path, kind: str, sharded: bool
) -> None:
    damage, said = DAMAGE[kind]
    write(tmp_path, *(["x", "y"] if sharded else []), "a", "b", limit=16)
    path = tmp_path / ("model-00002-of-00002.safetensors" if sharded else SINGLE)
    assert path.stat().st_size == 168
    damage(path)
    with pytest.raises(ConfigError, match=said.replace("{p}", re.escape(str(path)))):
        TensorFiles(tmp_path)


def test_a_file_that_changes_after_it_was_opened_is_said_and_not_guessed(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    files = TensorFiles(tmp_path)
    cut(-3)(tmp_path / SINGLE)
    with pytest.raises(ConfigError, match="is damaged"):
        files.read("a")
    (tmp_path / SINGLE).unlink()
    with pytest.raises(ConfigError, match=f"{SINGLE} cannot be read"):
        files.read("a")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["pytorch_model.bin"],
            "in pytorch_model.bin, .* not read: .*pickle runs code.*in an environment you trust",
        ),
        (["consolidated.00.pth", "x.pt"], "weights only in consolidated.00.pth, x.pt,"),
        (["model.ckpt"], "model.ckpt"),
        (["weights.pkl"], "weights.pkl"),
        (
            ["tf_model.h5"],
            "only in tf_model.h5, which are not read: only safetensors are read.*from_tf=True",
        ),
        (["flax_model.msgpack"], "flax_model.msgpack.*from_flax=True"),
        ([], f"has no weights: neither {SINGLE}, nor {INDEX}"),
        (
            ["one.safetensors", "two.safetensors"],
            rf"several files of weights \(one.safetensors, two.safetensors\) and no {INDEX}",
        ),
    ],
)
def test_a_directory_without_safetensors_is_refused_with_the_remedy(
    tmp_path: Path, names: list[str], said: str
) -> None:
    for name in ("config.json", *names):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}.*{said}"):
        TensorFiles(tmp_path)


def test_pickles_beside_safetensors_are_not_touched(tmp_path: Path) -> None:
    write(tmp_path, "a", "b")
    (tmp_path / "training_args.bin").write_bytes(b"no pickle")
    assert TensorFiles(tmp_path).entries.keys() == {"a", "b"}


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        TensorFiles(tmp_path / "nowhere")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """a, b, c in shards 1, 2, 3."""
    write(tmp_path, "a", "b", "c", limit=8)
    return tmp_path


def shard(number: int) -> str:
    return f"model-0000{number}-of-00003.safetensors"


def test_all_missing_shards_are_named(sharded: Path) -> None:
    for number in (1, 3):
        (sharded / shard(number)).unlink()
    with pytest.raises(ConfigError, match=f"lacks {shard(1)}, {shard(3)}, which {INDEX} names"):
        TensorFiles(sharded)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ('{"weight_map": ', "is not JSON"),
        ("\x80", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        ("[]", "holds no JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": ["a"]}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "has no weight_map"),
    ],
)
def test_an_index_that_is_none_is_refused(sharded: Path, text: str, said: str) -> None:
    (sharded / INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"{INDEX} {said}"):
        TensorFiles(sharded)


@pytest.mark.parametrize(
    "target",
    [
        "../outside.safetensors",
        "/outside.safetensors",
        "a/b.safetensors",
        "..",
        "",
        ".safetensors",
        "x.bin",
        "c:\\x",
    ],
)
def test_an_index_names_only_safetensors_beside_it(sharded: Path, target: str) -> None:
    (sharded.parent / "outside.safetensors").write_bytes((sharded / shard(1)).read_bytes())
    target = target.format("outside.safetensors")
    change_index(sharded, a=target)
    with pytest.raises(
        ConfigError, match=f"{INDEX} places tensors elsewhere .*: a in {re.escape(repr(target))}"
    ):
        TensorFiles(sharded)


def change_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {
        n: f for n, f in {**index["weight_map"], **changes}.items() if f is not None
    }
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"d": shard(2)}, f"d: not in {shard(2)}, as the index says"),
        (
            {"d": shard(2), "a": None, "e": shard(1)},
            f"a: in {shard(1)}, but the index does not name it",
        ),
        (
            {"a": shard(2), "b": shard(1)},
            f"a: in {shard(1)}, but the index places it in {shard(2)}",
        ),
    ],
)
def test_an_index_and_its_shards_name_the_same_tensors(
    sharded: Path, changes: dict[str, Any], said: str
) -> None:
    change_index(sharded, **changes)
    with pytest.raises(ConfigError, match=f"(?s){INDEX} does not match its files.*{said}"):
        TensorFiles(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, sharded / shard(2))
    with pytest.raises(
        ConfigError, match=f"a: in {shard(2)}, but the index places it in {shard(1)}"
    ):
        TensorFiles(sharded)


def test_a_long_list_of_problems_ends_with_its_length(sharded: Path) -> None:
    change_index(sharded, **{f"x{i}": shard(1) for i in range(30)})
    with pytest.raises(ConfigError, match=r"x19: not in .*\n.*and 10 more") as told:
        TensorFiles(sharded)
    assert "x20" not in str(told.value)
