"""Every command takes paths relative to the current directory, here that above of all files."""

import os
from pathlib import Path

import pytest
from tiny_run import PLAIN, ROOT, line, write_text

from jaxformer.cli import COMMANDS, main

BELOW = Path("below")  # where all files are
SMALL = PLAIN | {"run.tracker": "none", "train.steps": 2, "optimizer.warmup_steps": 1}
SMALL |= {"optimizer.decay_steps": 2, "train.checkpoint_every": 0}
CLASSES = {
    "model.family": "encoder",
    "model.head.kind": "classes",
    "data.objective": "classes",
    "train.eval_every": 0,
}

# The commands in the order in which one makes what the next reads.
LINES = {
    "prepare": "CONFIG",
    "train": "CONFIG",
    "plan": "CONFIG --device a100",
    "shapes": "CONFIG",
    "doctor": "CONFIG",
    "sample": "below/run --prompt a --max_new_tokens 2",
    "embed": "below/run --prompt a",
    "evaluate": "below/run --data.validation below/text.txt",
    "verify": "below/run --steps 1",
    "attention": "below/run --prompt ab --output below/page.html",
    "compare": "below/run --output below/compare.png",
    "convert": "below/run below/hugging_face",
    "predict": "below/classes --prompt ab",
    "tokenizer train": "below/text.txt --vocab_size 300 --output below/tokenizer.json",
    "tokenizer encode": "below/tokenizer.json below/text.txt --output below/ids.npy",
}


@pytest.mark.slow
def test_every_command_takes_paths_from_the_directory_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    BELOW.mkdir()
    text = write_text(BELOW / "text.txt")
    records = BELOW / "records.jsonl"
    records.write_text('{"text": "ab", "label": "a"}\n{"text": "b", "label": "b"}\n' * 8)
    config = [os.path.relpath(ROOT / "configs/quickstart.py")]
    cache = {"data.cache_dir": BELOW / "cache"}
    classes = SMALL | CLASSES | cache
    settings = " ".join(config + line(BELOW / "run", text, SMALL | cache)[1:])
    assert main(["train", *config, *line(BELOW / "classes", records, classes)[1:]]) == 0
    from_run = {"run.init_from": BELOW / "hugging_face", "tokenizer.path": BELOW / "hugging_face"}
    for command, arguments in LINES.items():
        words = f"{command} {arguments.replace('CONFIG', settings)}".split()
        assert main(words) == 0, (command, capsys.readouterr())
    assert main(["train", *config, *line(BELOW / "again", text, SMALL | cache | from_run)[1:]]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"below"}
    made = {"run", "page.html", "compare.png", "hugging_face", "tokenizer.json", "ids.npy", "again"}
    assert made <= {path.name for path in BELOW.iterdir()}
    names = {command.split()[0] for command in LINES}
    # tests/tools/test_lm_eval.py and tests/cli/test_serve.py have the others.
    assert names == COMMANDS.keys() - {"lm_eval", "serve"}
