"""The command line: what it prints, what it exits with, and that it does what the functions do."""

import io
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import PLAIN, ROOT, STEPS, copy, line, logged, reference

import jaxformer as jf
from jaxformer.cli import COMMANDS, main
from jaxformer.models.cost import flops_per_token
from jaxformer.report import read_metrics
from jaxformer.runs.summary import peak_text

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return reference(tmp_path_factory)


def sampled(capsys: Capture, run_dir: Path, *more: object) -> str:
    """What `jaxformer sample` prints."""
    assert main(["sample", str(run_dir), *map(str, more)]) == 0
    return capsys.readouterr().out


def test_a_run_leaves_what_the_readme_promises(trained: tuple[Path, Path]) -> None:
    run_dir = trained[0]
    names = {"config.json", "tokenizer.json", "metrics.jsonl", "checkpoints"}
    assert names | {"tensorboard", "loss.png"} <= {entry.name for entry in run_dir.iterdir()}
    lines = read_metrics(run_dir)
    steps = [entry for entry in lines if "loss" in entry]
    assert [entry["step"] for entry in steps] == [*range(1, STEPS + 1)]
    wanted = {"step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second"}
    assert all(wanted <= set(entry) and entry["tokens"] == entry["step"] * 256 for entry in steps)
    assert not any("mfu" in entry for entry in lines)  # the peak of a CPU is not known
    seconds = [entry["seconds"] for entry in lines]
    assert seconds == sorted(seconds) and 0 < seconds[0] < seconds[-1]
    evaluations = [entry for entry in lines if "val_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [6, 12, 18, 24]
    assert (
        steps[-1]["loss"] < steps[0]["loss"] - 1
        and evaluations[-1]["val_loss"] < evaluations[0]["val_loss"]
    )


def test_the_run_shows_what_it_does_and_ends_with_the_next_command(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = 2e12
    monkeypatch.setattr("jaxformer.runs.setup.published_peak", lambda run, mesh: peak)
    monkeypatch.setattr("jaxformer.runs.summary.bfloat16_note", lambda: "what bfloat16 is worth")
    run_dir = tmp_path / "run"
    changes = PLAIN | {"train.steps": 2, "train.checkpoint_every": 0, "run.sample_tokens": 8}
    assert main(["train", *line(run_dir, trained[1], changes)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    banner = (
        "device",
        "what bfloat16 is worth",
        "mesh",
        "parameters",
        "memory",
        "FLOPs",
        "attention",
        "tokens to train on",
        "one epoch",
    )
    ending = ("validation loss", "bits per byte", "Sample", "run directory", "jaxformer sample")
    assert all(word in out for word in (*banner, "loss", "tokens/s", "MFU", *ending))
    run = jf.load_config(run_dir / "config.json")
    flops = flops_per_token(run.model, run.data.sequence_length)
    logged = [entry for entry in read_metrics(run_dir) if "loss" in entry]
    for entry in logged:
        assert entry["mfu"] == pytest.approx(entry["tokens_per_second"] * flops / peak)
    assert len(logged) == 2 and logged[-1]["mfu"] > 0


def test_nothing_is_said_of_the_peak_of_a_cpu() -> None:
    assert peak_text("cpu", None) == ""
    assert "unknown peak" in peak_text("gpu", None)
    assert "peak 989 TFLOP/s" in peak_text("gpu", 989e12)


def test_sampling_greedily_writes_what_generate_returns(
    trained: tuple[Path, Path], capsys: Capture
) -> None:
    prompt, new = "the cat sees", 20
    line = ("--prompt", prompt, "--temperature", 0, "--max_new_tokens", new)
    written = sampled(capsys, trained[0], *line, "--seed", 5)  # on which nothing depends
    loaded = jf.load(trained[0])
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    rules = {"end_token": tokenizer.end_token, "vocab_size": tokenizer.vocab_size}
    made = jf.generate(
        loaded.params, loaded.config, [tokenizer.encode(prompt)], new, temperature=0, **rules
    )
    assert written == prompt + tokenizer.decode(made[0].tolist()) + "\n"


def test_a_seed_repeats_its_sample_and_another_step_is_another_model(
    trained: tuple[Path, Path], capsys: Capture
) -> None:
    def sample(*more: object) -> str:
        return sampled(capsys, trained[0], "--prompt", "the", "--max_new_tokens", 30, *more)

    once = sample("--seed", 3)
    assert once == sample("--seed", 3)
    assert once not in (sample("--seed", 4), sample("--seed", 3, "--step", 4))


def test_a_sample_ends_before_a_stop_string_and_several_are_numbered(
    trained: tuple[Path, Path], capsys: Capture
) -> None:
    line = ("--prompt", "the", "--max_new_tokens", 30, "--seed", 3)
    text = sampled(capsys, trained[0], *line)[:-1]
    stop = text[len("the") + 8 : len("the") + 12]
    first = text.index(stop, len("the"))
    stopped = (*line, "--stop_strings", stop)
    assert sampled(capsys, trained[0], *stopped) == text[:first] + "\n"
    lines = sampled(capsys, trained[0], *stopped, "--n", 2)
    assert lines.startswith("--- 1 of 2\nthe") and "\n--- 2 of 2\nthe" in lines
    assert all(stop not in each[3:] for each in lines.split("\n"))


def test_the_texts_of_a_file_of_prompts_are_those_of_each_alone(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    """Greedy ones as by --prompt, sampled ones by their place in the file; in the order of it."""

    def texts(file: str, *more: str) -> list[dict[str, str]]:
        line = ("--prompts", tmp_path / file, *more, "--max_new_tokens", 20)
        return [json.loads(row) for row in sampled(capsys, trained[0], *line).splitlines()]

    prompts = ["the dog", "a", "the cat sees a tree", "slowly over"]
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts) + "\n")
    greedy = texts("prompts.txt", "--temperature", "0", "--rows", "2")
    assert [row["prompt"] for row in greedy] == prompts
    line = ("--prompt", prompts[1], "--temperature", 0, "--max_new_tokens", 20)
    assert sampled(capsys, trained[0], *line) == f"{prompts[1]}{greedy[1]['text']}\n"
    drawn = texts("prompts.txt", "--seed", "3", "--rows", "1")
    assert drawn == texts("prompts.txt", "--seed", "3", "--rows", "4") != greedy
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": prompts[0], "id": 1}))
    assert texts("one.jsonl", "--seed", "3") == drawn[:1]
    stop = drawn[0]["text"][5:8]
    stopped = texts("prompts.txt", "--seed", "3", "--stop_strings", stop)
    assert [row["text"] for row in stopped] == [row["text"].split(stop)[0] for row in drawn]


WRONG_PROMPTS = [  # a file of prompts, more arguments, words of the message
    ("", "", "has no prompt: give a text file with a prompt a line"),
    ("[1]", "", "prompts.jsonl, prompt 1"),
    ('{"text": "a"}', "", 'prompt 1, has no "prompt" that is a text'),
    ('{"prompt": "a"}', "--chat", "--prompts and --chat do not go together"),
    ('{"prompt": "a"}', "--n 2", "--prompts and --n do not go together"),
    ('{"prompt": "a"}', "--min_p 2", "min_p=2.0 must be from 0 to 1"),
    ('{"prompt": "a"}', "--rows 0", "--rows 0 must be at least 1"),
    ('{"prompt": ""}', "", "the prompt is empty"),
]


def test_a_wrong_file_of_prompts_is_said(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "prompts.jsonl"
    for content, more, message in WRONG_PROMPTS:
        file.write_text(content)
        assert main(["sample", str(trained[0]), "--prompts", str(file), *more.split()]) == 2
        assert message in capsys.readouterr().err


def test_a_sample_streams(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is on the terminal while more is being made."""
    shown: list[str] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            shown.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Terminal())
    line = ["--prompt", "a dog", "--temperature", "0", "--max_new_tokens", "40"]
    assert main(["sample", str(trained[0]), *line]) == 0
    assert len({*shown}) >= 4 and all(b.startswith(a) for a, b in itertools.pairwise(shown))


def test_evaluating_a_run_gives_what_its_training_ended_with(
    trained: tuple[Path, Path], capsys: Capture
) -> None:
    last = logged(trained[0])[-1]
    assert main(["evaluate", str(trained[0])]) == 0
    out = capsys.readouterr().out
    assert (
        f"validation loss {last['val_loss']:.4f} nats per target (perplexity" in out
        and f"bits per byte {last['val_bits_per_byte']:.3f}" in out
    )


def test_evaluating_on_other_text_reads_that_text_alone_with_the_tokenizer_of_the_run(
    trained: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    run_dir = copy(trained[0], tmp_path / "run")
    config = run_dir / "config.json"
    settings = config.read_text().replace(str(trained[1]), str(tmp_path / "gone.txt"))
    config.write_text(settings)
    cache = ["--data.cache_dir", str(tmp_path / "cache")]
    other = tmp_path / "other.txt"
    other.write_text("Zebras quarrel; vexed wizards jump. " * 20)
    assert main(["evaluate", str(run_dir), "--data.validation", str(other), *cache]) == 0
    loss = float(capsys.readouterr().out.partition("loss ")[2].partition(" ")[0])
    assert loss > logged(trained[0])[-1]["val_loss"] + 0.5
    assert (tmp_path / "cache/stores").exists() and not (
        tmp_path / "cache/tokenizers"
    ).exists()  # it brings its own
    assert main(["evaluate", str(run_dir)]) == 2
    assert "gone.txt does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_the_smallest_kind_goes_from_text_to_sample(
    tmp_path: Path, capsys: Capture
) -> None:
    """Characters, no dropout, AdamW, a plain stream, nothing held out: the other side of every
    choice of the tiny run."""
    text = tmp_path / "text.txt"
    text.write_text("abcd efgh " * 100)
    changes = {
        "data.packing": "stream",
        "data.validation_fraction": 0,
        "model.dropout": 0,
        "optimizer.name": "adamw",
        "tokenizer.kind": "characters",
        "train.checkpoint_every": 0,
        "train.microbatches": 1,
        "train.steps": 3,
        "run.progress": "none",
        "run.sample_prompt": "abc",
    }
    assert main(["train", *line(tmp_path / "run", text, changes)]) == 0
    assert main(["sample", str(tmp_path / "run"), "--prompt", "abcd", "--max_new_tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("abcd")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "held out no text" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_tells_of_itself(command: str, capsys: Capture) -> None:
    if command == "lm_eval":
        pytest.importorskip("lm_eval")
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert "usage" in (captured.out + captured.err).lower()


def test_without_a_command_or_with_a_wrong_one_the_commands_are_listed(capsys: Capture) -> None:
    for arguments, status in (([], 2), (["trian"], 2), (["--help"], 0)):
        assert main(arguments) == status
        captured = capsys.readouterr()
        shown = captured.err if status else captured.out
        assert all(f"jaxformer {name}" in shown for name in COMMANDS)
    assert main(["train"]) == 2 and "CONFIG" in capsys.readouterr().err


def test_python_dash_m_jaxformer_is_the_command() -> None:
    run = [sys.executable, "-m", "jaxformer", "--help"]
    found = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0 and all(f"jaxformer {name}" in found.stdout for name in COMMANDS)


def test_help_read_by_a_pipe_that_closes_ends_quietly() -> None:
    line = f"{sys.executable} train.py configs/quickstart.py --help | head -1"
    found = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "usage" in found.stdout and not found.stderr


def test_the_arguments_are_read_before_a_device_is_touched() -> None:
    """A typing error answers at once: neither JAX nor what reads text is imported for it."""
    code = "import sys; from jaxformer.cli import main; "
    code += "status = main(['train', 'configs/quickstart.py', '--model.layers', '3']); "
    code += "sys.exit(status if 'jax' not in sys.modules and 'grain' not in sys.modules else 3)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False
        ).returncode
        == 2
    )


def test_an_empty_path_is_not_the_current_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    monkeypatch.chdir(tmp_path)
    line = ["tokenizer", "train", "text.txt", "--vocab_size", "300", "--output", ""]
    assert main(line) == 2
    assert "the path is empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
