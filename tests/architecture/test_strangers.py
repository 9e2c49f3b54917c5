"""Runs and models of somebody else: what is never done with them, and what they cannot do."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_run import copy, reference, write_text

import jaxformer as jf
from jaxformer.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return reference(tmp_path_factory)


@pytest.fixture(scope="module")
def model(trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory."""
    target = tmp_path_factory.mktemp("strangers") / "hf"
    assert main(["convert", str(trained[0]), str(target)]) == 0
    return target


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(capsys: Capture, arguments: list[str], *parts: str) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert not [part for part in parts if part not in error], error


def test_an_evaluation_writes_to_the_users_own_cache_alone(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = copy(trained[0], tmp_path / "theirs")
    path = run_dir / "config.json"
    found = json.loads(path.read_text())
    found["data"]["cache_dir"] = str(tmp_path / "chosen by them")
    found["run"]["compilation_cache"] = str(tmp_path / "theirs too")
    path.write_text(json.dumps(found))
    before = sorted(map(str, run_dir.rglob("*")))
    text = str(write_text(tmp_path / "text.txt", seed=5))
    monkeypatch.setenv("JAXFORMER_DATA_CACHE", str(tmp_path / "mine"))
    assert main(["evaluate", str(run_dir), "--data.validation", text]) == 0
    said = capsys.readouterr().out
    cache = ["--data.cache_dir", str(tmp_path / "other")]
    assert main(["evaluate", str(run_dir), "--data.validation", text, *cache]) == 0
    assert capsys.readouterr().out == said
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "text.txt", "mine", "other"}
    assert sorted(map(str, run_dir.rglob("*"))) == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe{", "config.json is not"),
        (b"[" * 200_000, "config.json is not JSON"),
        (b'{"version": 3, "run": {"seed": 1e400}}', "run.seed=inf"),
        (b'{"\x1b[2Jx": 1}', "config.json is not JSON"),
        (b'{"version": 3, "\\u001b[2Jx": 1}', r"\x1b[2Jx"),
    ],
)
def test_a_damaged_config_is_one_message(
    content: bytes, said: str, trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    run_dir = copy(trained[0], tmp_path / "run")
    (run_dir / "config.json").write_bytes(content)
    for arguments in (["sample", str(run_dir)], ["plan", str(run_dir / "config.json")]):
        refused(capsys, arguments, said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**6}, "n_layers=1000000"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers=1000000000000000000"),
        ({"vocab_size": 10**9}, "the two do not belong together"),
        ({"hidden_size": 2**20, "intermediate_size": 2**22}, "the two do not belong together"),
        ({"eos_token_id": -5}, "eos_token_id is -5"),
        ({"eos_token_id": 10**18}, "eos_token_id is 1000000000000000000"),
        ({"architectures": 1.5}, "architectures=1.5, which are no model type"),
        ({"rope_theta": "x"}, 'rope_theta="x" is not supported'),
        ({"torch_dtype": "\ud800"}, "is not JSON"),
    ],
)
def test_sizes_that_the_files_do_not_have_are_refused_before_anything_is_made(
    changes: dict[str, Any], said: str, model: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(model, tmp_path / "hf")
    changed(tmp_path / "hf/config.json", **changes)
    refused(capsys, ["sample", str(tmp_path / "hf"), "--prompt", "a"], "config.json", said)


def test_a_checkpoint_named_by_another_digit_is_none(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    run_dir = copy(trained[0], tmp_path / "run")
    (run_dir / "checkpoints/²").mkdir()
    assert jf.load(run_dir).config == jf.load(trained[0]).config


@pytest.mark.parametrize("device", ["/dev/zero", "pipe"])
def test_devices_and_pipes_are_no_text(
    device: str, trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    if device == "pipe":
        device = str(tmp_path / "pipe")
        os.mkfifo(device)
    else:
        encode = ["tokenizer", "encode", str(trained[0]), device]
        refused(capsys, encode, f"{device} is a device, which may never end")
    train = ["tokenizer", "train", device, "--vocab_size", "300", "--output", str(tmp_path / "t")]
    refused(capsys, train, device, "neither a file nor a directory")
    refused(capsys, ["tokenizer", "inspect", device], device, "a device, a pipe or a socket")
