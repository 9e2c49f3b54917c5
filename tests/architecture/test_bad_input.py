"""Bad input, and runs and models of somebody else: exit status 2, one clear message that names
what, where, what is allowed and what to do, and nothing lost."""

import fcntl
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import contents, copy, line, reference, write_text

import jaxformer as jf
from jaxformer.arrays.mesh import MESH_AXES, check_batch_size, make_mesh
from jaxformer.cli import main
from jaxformer.files import ConfigError
from jaxformer.tokenizer import byte_tokenizer

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return reference(tmp_path_factory)


def refused(capsys: Capture, arguments: list[str], parts: list[str]) -> None:
    """Status 2, and a message, free of a traceback, with all of `parts`."""
    capsys.readouterr()
    assert main(arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in error
    assert not [part for part in parts if part not in error], error


def train_refused(capsys: Capture, folder: Path, changes: dict[str, Any], parts: list[str]) -> None:
    """As `refused`, and that no run directory was made."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    refused(capsys, ["train", *line(folder / "runs" / "run", text, changes)], parts)
    assert not (folder / "runs").exists()


# Those that a config can tell by itself are in tests/config/test_refused_settings.py.
SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a mesh larger than the devices": (
        {"mesh.fsdp": 3},
        ["mesh.fsdp=3", "1 device (cpu)", "must multiply to 1", "mesh.data=0"],
    ),
    "a corpus shorter than a sequence": (
        {"data.sequence_length": 9000, "model.max_length": 9000},
        ["data.train", "9,001", "give more text", "data.sequence_length"],
    ),
    "a kernel that the device has not": (
        {"model.attention.kernel": "cudnn"},
        ["attention.kernel='cudnn'", "'auto'"],
    ),
    "no run directory": ({"run.dir": ""}, ["run.dir is empty"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting_that_cannot_work_is_named(case: str, tmp_path: Path, capsys: Capture) -> None:
    changes, parts = SETTINGS[case]
    train_refused(capsys, tmp_path, changes, parts)


def test_a_batch_that_the_devices_do_not_divide_is_named() -> None:
    mesh = jax.sharding.AbstractMesh((4, 1, 1, 1, 1), MESH_AXES)
    for batch, pieces, remedy in ((6, 1, 4), (8, 4, 16)):
        with pytest.raises(
            ConfigError, match=rf"train\.batch_size={batch} .* multiple of {remedy}\."
        ):
            check_batch_size(mesh, batch, pieces)
    with pytest.raises(ConfigError, match=r"mesh\.tensor=3 does not fit 4 devices"):
        make_mesh(tensor=3, devices=jax.devices() * 4)


DATA: dict[str, tuple[bytes | None, list[str]]] = {
    "missing": (None, ["data.train", "text.txt does not exist"]),
    "empty": (b"", ["data.train", "text.txt is empty"]),
    "not UTF-8": (
        b"plain text " * 40 + b"caf\xe9 and more",
        ["text.txt is not UTF-8", "byte 0xe9", "offset 443"],
    ),
}


@pytest.mark.parametrize("case", DATA)
@pytest.mark.parametrize("setting", ["data.train", "data.validation"])
def test_a_text_that_cannot_be_used_is_named_with_the_place(
    case: str, setting: str, tmp_path: Path, capsys: Capture
) -> None:
    content, parts = DATA[case]
    path = tmp_path / "bad" / "text.txt"
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    parts = [part.replace("data.train", setting) for part in parts]
    train_refused(
        capsys, tmp_path, {setting: path, "data.cache_dir": tmp_path / "cache"}, [*parts, str(path)]
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs a file that exists and cannot be read, for root too"
)
def test_a_text_that_cannot_be_read_is_named(tmp_path: Path, capsys: Capture) -> None:
    train_refused(
        capsys, tmp_path, {"data.train": "/proc/self/mem"}, ["/proc/self/mem cannot be read"]
    )


def test_a_tokenizer_that_is_missing_or_none_or_too_large_is_named(
    tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "tokenizer.json"
    changes = {"tokenizer.path": path, "model.vocab_size": 256}
    parts = [str(path), "does not exist", "tokenizer.path"]
    train_refused(capsys, tmp_path, changes, parts)
    path.write_text("{}")
    train_refused(capsys, tmp_path, changes, [str(path), "is not a tokenizer.json"])
    byte_tokenizer().save(path)
    parts = ["model.vocab_size=256", "257", "set it to at least 257"]
    train_refused(capsys, tmp_path, changes, parts)


@pytest.mark.slow
def test_a_run_directory_of_another_config_is_left_alone_and_the_fields_are_named(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    run_dir = copy(trained[0], tmp_path / "run")
    before = contents(run_dir)
    changes = {
        "model.n_layers": 3,
        "optimizer.learning_rate": 0.5,
        "run.seed": 2,
        "train.log_every": 3,
    }
    parts = [
        "another config",
        "model.n_layers: 2 in the directory, 3 now",
        "optimizer.learning_rate: 0.006 in the directory, 0.5 now",
    ]
    refused(
        capsys,
        ["train", *line(run_dir, trained[1], changes)],
        [*parts, "run.seed: 1337 in the directory, 2", "another run.dir"],
    )
    assert main(["train", *line(run_dir, trained[1], changes)]) == 2
    assert "log_every" not in capsys.readouterr().err
    assert contents(run_dir) == before


def test_a_run_directory_of_other_text_is_left_alone(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    run_dir, text = copy(trained[0], tmp_path / "run"), write_text(tmp_path / "text.txt", seed=1)
    config = run_dir / "config.json"
    config.write_text(config.read_text().replace(str(trained[1]), str(text)))
    before = contents(run_dir)
    refused(
        capsys,
        ["train", *line(run_dir, text)],
        [str(run_dir), "other text", "train", "nothing was changed"],
    )
    assert contents(run_dir) == before


def test_a_run_directory_in_use_is_left_to_the_process_that_has_it(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    run_dir = copy(trained[0], tmp_path / "run")
    with (run_dir / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(
            capsys,
            ["train", *line(run_dir, trained[1])],
            [str(run_dir), "in use by another process"],
        )
    assert main(["train", *line(run_dir, trained[1])]) == 0


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path, capsys: Capture) -> None:
    text = write_text(tmp_path / "text.txt")
    refused(
        capsys,
        ["train", *line(text / "run", text)],
        [f"{text / 'run'}", "cannot be written", "another run.dir"],
    )


CONFIGS = {  # in files of these names
    "missing mine.py": (None, ["no such file", "quickstart.py"]),
    "a syntax error in mine.py": ("x = 1\nconfig = (\n", ["line 2", "SyntaxError"]),
    "an error in mine.py": (
        "from jaxformer import RunConfig\n\nconfig = RunConfig(modle=3)\n",
        ["line 3", "modle", "model"],
    ),
    "a mistyped field in mine.py": (
        "import jaxformer as jf\nconfig = jf.ModelConfig(n_layer=3)\n",
        ["line 2", "mean model.n_layers?"],
    ),
    "a value out of range in mine.py": (
        "import jaxformer as jf\nconfig = jf.ModelConfig(n_layers=-3)\n",
        ["model.n_layers=-3"],
    ),
    "no config in mine.py": (
        "import jaxformer as jf\nother = jf.RunConfig()\n",
        ["no RunConfig named 'config'", "['other']"],
    ),
    "another language in config.yaml": ("a: 1", ["must be a Python file"]),
    "unknown settings in config.json": ('{"model": {"layers": 3}}', []),
    "half an object in config.json": ("{", ["is not JSON"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_file_that_is_none_is_named_with_the_line(
    case: str, tmp_path: Path, capsys: Capture
) -> None:
    content, parts = CONFIGS[case]
    path = tmp_path / case.split()[-1]
    if content is not None:
        path.write_text(content)
    refused(capsys, ["train", str(path)], [str(path), *parts])


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prompt", ""], ["the prompt is empty", "--prompt"]),
        (["--prompt", "a cat " * 100], ["the prompt is", "tokens", "context", "48", "shorten it"]),
        (["--temperature", "-1"], ["temperature=-1.0", "at least 0"]),
        (["--temperature", "inf"], ["temperature=inf", "finite"]),
        (["--top_p", "2"], ["top_p=2.0", "at most 1"]),
        (["--top_k", "-2"], ["top_k=-2", "at least 0"]),
        (["--min_p", "2"], ["min_p=2.0", "from 0 to 1"]),
        (["--min_p", "0.1", "--beams", "2"], ["--beams and --min_p do not go together"]),
        (["--n", "2", "--chat"], ["--chat and --n do not go together"]),
        (["--n", "0"], ["--n 0", "at least 1"]),
        (["--max_new_tokens", "0"], ["--max_new_tokens 0", "at least 1"]),
        (["--seed", str(2**63)], ["--seed 9223372036854775808", "64 bits"]),
        (["--beams", "1000000"], ["beams=1000000 must be from 1 to 1,024"]),
        (["--step", "3"], ["no checkpoint of step 3", "it holds steps [4, "]),
        (["--promt", "a"], ["--promt", "--prompt"]),
    ],
)
def test_a_sample_that_cannot_be_made_is_refused(
    arguments: list[str], parts: list[str], trained: tuple[Path, Path], capsys: Capture
) -> None:
    refused(capsys, ["sample", str(trained[0]), *arguments], parts)


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_what_is_no_run_is_named(command: str, tmp_path: Path, capsys: Capture) -> None:
    refused(capsys, [command, str(tmp_path)], [str(tmp_path), "has no config.json", "run.dir"])
    assert not os.listdir(tmp_path)


def test_a_text_that_cannot_be_evaluated_on_is_named(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    content, parts = DATA["not UTF-8"]
    path = tmp_path / "text.txt"
    path.write_bytes(content or b"")
    line = ["evaluate", str(trained[0]), "--data.validation", str(path)]
    refused(capsys, line, [str(path), *parts[1:]])


TINY = jf.ModelConfig(vocab_size=20, d_model=16, n_layers=1, n_heads=2, max_length=16)


@pytest.mark.parametrize(
    ("prompt", "new", "parts"),
    [
        ([[]], 4, ["empty"]),
        (np.zeros((0, 3), np.int32), 4, ["empty"]),
        ([[1] * 14], 4, ["14 tokens", "model.max_length=16", "at most 2 new tokens"]),
        ([[1] * 17], 4, ["17 tokens", "model.max_length=16"]),
        ([[3, 20]], 4, ["0 .. 19", "20"]),
        ([[3, -1]], 4, ["0 .. 19", "-1"]),
        ([[3.5]], 4, ["integer tokens [B, T]", "float64"]),
        ([3], 4, ["integer tokens [B, T]"]),
        ([[3]], 0, ["max_new_tokens=0"]),
        ([[3]], -2, ["max_new_tokens=-2"]),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused(
    prompt: Any, new: int, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        jf.generate(jf.init(TINY, jax.random.key(0)), TINY, prompt, new, temperature=0)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_a_row_that_is_all_padding_is_refused() -> None:
    params, segments = jf.init(TINY, jax.random.key(0)), jnp.array([[1, 1], [0, 0]])
    with pytest.raises(ConfigError, match="empty"):
        jf.generate(params, TINY, [[1, 2], [3, 4]], 2, temperature=0, segment_ids=segments)


# Runs and models of somebody else.


@pytest.fixture(scope="module")
def model(trained: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory."""
    target = tmp_path_factory.mktemp("strangers") / "hf"
    assert main(["convert", str(trained[0]), str(target)]) == 0
    return target


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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
        refused(capsys, arguments, [said])


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
    command = ["sample", str(tmp_path / "hf"), "--prompt", "a"]
    refused(capsys, command, ["config.json", said])


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
        refused(capsys, encode, [f"{device} is a device, which may never end"])
    train = ["tokenizer", "train", device, "--vocab_size", "300", "--output", str(tmp_path / "t")]
    refused(capsys, train, [device, "neither a file nor a directory"])
    encode = ["tokenizer", "encode", device, str(trained[1])]
    refused(capsys, encode, [device, "a device, a pipe or a socket"])
