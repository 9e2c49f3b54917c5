"""A run whose directory is in a bucket, and the commands that read it there."""

from pathlib import Path

import pytest
from tiny_run import PLAIN, assert_same_run, line, logged, train_here, write_text

from jaxformer.cli import main
from jaxformer.files import located
from jaxformer.files.bucket import CLAIM

STEPS = {"train.steps": 8, "train.eval_every": 4, "optimizer.decay_steps": 8}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3_bucket", "gcs_bucket_of_tensorstore"])
def test_a_run_in_a_bucket_is_that_of_a_disk_and_all_commands_read_it(
    kind: str, request, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = request.getfixturevalue(kind)
    settings, text = PLAIN | STEPS, write_text(tmp_path / "text.txt")
    assert train_here(line(tmp_path / "local", text, settings | {"run.tracker": "none"})) == 0
    folder = located(url := f"{bucket}/runs/mine")
    exports = {"run.export_every": 4, "train.checkpoint_every": 4}
    in_bucket: dict[str, object] = settings | exports | {"run.dir": url, "run.profile": "2"}
    assert train_here(line(tmp_path, text, in_bucket | {"train.steps": 5})) == 0
    assert train_here(line(tmp_path, text, in_bucket)) == 0
    # The first command evaluated its last step, of which the run on the disk knows nothing.
    assert [entry for entry in logged(folder) if entry["step"] != 5 or "loss" in entry] == logged(
        tmp_path / "local"
    )
    names = {entry.name for entry in folder.iterdir()}
    assert {"config.json", "loss.png", "metrics.jsonl", "tensorboard", "profile", "hf"} <= names
    assert CLAIM not in names
    assert len([*(folder / "tensorboard").iterdir()]) == 2 and [*(folder / "profile").rglob("*.pb")]
    capsys.readouterr()
    hugging_face = f"{bucket}/hugging_face"
    for command in (
        ["evaluate", url],
        ["sample", url, "--prompt", "a", "--max_new_tokens", "3"],
        ["attention", url, "--prompt", "a b", "--output", str(tmp_path / "page.html")],
        ["compare", bucket, "--output", f"{bucket}/compare.png"],
        ["convert", url, hugging_face],
    ):
        assert main(command) == 0, (command, capsys.readouterr())
    assert "1 runs of 1 configurations" in capsys.readouterr().out
    assert (located(hugging_face) / "model.safetensors").is_file()
    for step in ("4", "8"):
        assert (folder / "hf" / step / "model.safetensors").is_file()
    warm = settings | {"run.dir": f"{bucket}/warm", "run.init_from": url, "train.steps": 1}
    assert train_here(line(tmp_path, text, warm)) == 0
    assert train_here(line(tmp_path, text, in_bucket | {"run.restart": True})) == 0
    assert (folder / "before-1" / "checkpoints" / "8").is_dir()
    assert_same_run(folder, tmp_path / "local")
