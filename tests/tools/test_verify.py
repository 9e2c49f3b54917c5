"""`jaxformer verify`: a run is what its files say, and every alteration of it is caught."""

import fcntl
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import CACHE
from tiny_run import PLAIN, contents, line, train_here, write_text

from jaxformer.cli import main
from jaxformer.files import ConfigError
from jaxformer.report.metrics import first_digest, line_digest
from jaxformer.tools.certificate.chain import Statement, read_run, stated_of
from jaxformer.tools.certificate.record import CERTIFICATE, digest_of, sealed
from jaxformer.tools.certificate.verification import verify

Capture = pytest.CaptureFixture[str]
STEPS = 8
CHANGES = PLAIN | {
    "optimizer.decay_steps": STEPS,
    "train.checkpoint_every": 4,
    "train.eval_every": 4,
    "train.log_every": 1,
    "train.steps": STEPS,
}


class Runs(NamedTuple):
    """A finished run with a certificate, another one of another seed and text, and the text."""

    run: Path
    foreign: Path
    text: Path


def certify(run_dir: Path, key: Path | None = None) -> None:
    """Writes a certificate of the files of a run, signed by a private key if one is given."""
    files = read_run(run_dir)
    stated = stated_of(files.folder, files.record, files.lines)
    content = {"format": 1, "versions": {"jax": "0"}, "checks": [], **stated}
    (run_dir / CERTIFICATE).write_text(json.dumps(sealed(content, key)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("verify")
    made = Runs(folder / "run", folder / "foreign", write_text(folder / "text.txt"))
    assert train_here(line(made.run, made.text, CHANGES)) == 0
    changes = CHANGES | {"run.seed": 7, "tokenizer.vocab_size": 290}
    other = write_text(folder / "other.txt", seed=1)
    assert train_here(line(made.foreign, other, changes)) == 0
    for run_dir in (made.run, made.foreign):
        shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
        certify(run_dir)
    return made


def quiet(_: str) -> None:
    pass


def statements(run_dir: Path, **options: Any) -> list[Statement]:
    return list(verify(run_dir, quiet, cache_dir=f"{CACHE}/data", **options))


def refused(run_dir: Path, **options: Any) -> str:
    """The first statement that something is not as it was; empty where there is none."""
    found = verify(run_dir, quiet, cache_dir=f"{CACHE}/data", **options)
    return next((f"{one.subject}: {one.text}" for one in found if one.verdict == "no"), "")


def test_a_run_is_verified_to_the_bit_and_nothing_in_it_changes(runs: Runs) -> None:
    before = contents(runs.run)
    found = statements(runs.run)
    assert {one.verdict for one in found} == {"equal"}
    subjects = [one.subject for one in found]
    assert {"metrics.jsonl", "checkpoint 4", "checkpoint 8", CERTIFICATE, "data"} <= {*subjects}
    assert sum(name.startswith("step ") for name in subjects) == 5
    assert "evaluation after step 8" in subjects and contents(runs.run) == before
    figures = next(one.text for one in found if one.subject.startswith("step "))
    assert "equal to the bit: grad_norm, learning_rate, loss, state" in figures


# Alterations: each changes a copy of the run.

Alteration = Callable[[Path, random.Random, Runs], None]


def lines_of(run_dir: Path) -> list[bytes]:
    return (run_dir / "metrics.jsonl").read_bytes().splitlines()


def write_lines(run_dir: Path, lines: list[bytes]) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b"".join(text + b"\n" for text in lines))


def changed_line(raw: bytes, rng: random.Random) -> bytes:
    """A line with another number, without which the others stay."""
    entry = json.loads(raw)
    name = rng.choice([key for key, value in entry.items() if isinstance(value, float)])
    entry[name] *= 1 + rng.choice([-1, 1]) * 10.0 ** -rng.randint(1, 6)
    return json.dumps(entry).encode()


def a_figure(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    lines = lines_of(run_dir)
    index = rng.randrange(len(lines))
    write_lines(run_dir, [*lines[:index], changed_line(lines[index], rng), *lines[index + 1 :]])


def the_last_line(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    *lines, last = lines_of(run_dir)
    write_lines(run_dir, [*lines, changed_line(last, rng)])


def a_removed_line(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    lines = lines_of(run_dir)
    del lines[rng.randrange(len(lines))]
    write_lines(run_dir, lines)


def an_inserted_line(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    lines = lines_of(run_dir)
    index = rng.randrange(len(lines))
    lines.insert(index + 1, changed_line(lines[index], rng))
    write_lines(run_dir, lines)


def moved_lines(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    lines = lines_of(run_dir)
    a, b = rng.sample(range(len(lines)), 2)
    lines[a], lines[b] = lines[b], lines[a]
    write_lines(run_dir, lines)


def a_step_left_out(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    """The chain is made anew over what remains."""
    step = rng.randint(1, STEPS)
    rechain(run_dir, [raw for raw in lines_of(run_dir) if json.loads(raw)["step"] != step])


def a_figure_in_a_new_chain(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    a_figure(run_dir, rng, runs)
    rechain(run_dir, lines_of(run_dir))


def a_byte_of_a_checkpoint(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    path = checkpoint_file(run_dir, rng)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randint(1, 255)
    path.write_bytes(content)


def a_removed_byte_of_a_checkpoint(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    path = checkpoint_file(run_dir, rng)
    content = bytearray(path.read_bytes())
    del content[rng.randrange(len(content))]
    path.write_bytes(content)


def checkpoint_file(run_dir: Path, rng: random.Random) -> Path:
    """A file of a checkpoint of which something reads the content."""
    folder = run_dir / "checkpoints" / rng.choice(["4", "8"])
    names = json.loads((folder / "files.json").read_text())["files"]
    return folder / rng.choice(["files.json", *names])


def a_checkpoint_of_another_step(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    a, b = rng.sample(["4", "8"], 2)
    shutil.rmtree(run_dir / "checkpoints" / a)
    shutil.copytree(run_dir / "checkpoints" / b, run_dir / "checkpoints" / a)


def a_checkpoint_of_another_run(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    step = rng.choice(["4", "8"])
    shutil.rmtree(run_dir / "checkpoints" / step)
    shutil.copytree(runs.foreign / "checkpoints" / step, run_dir / "checkpoints" / step)


def a_removed_checkpoint(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    shutil.rmtree(run_dir / "checkpoints" / rng.choice(["4", "8"]))


def other_data(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    path = run_dir / "data.json"
    record = json.loads(path.read_text())
    foreign = json.loads((runs.foreign / "data.json").read_text())
    name = rng.choice(sorted(record))
    path.write_text(json.dumps(record | {name: foreign[name]}, indent=2) + "\n")


def another_tokenizer(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    path = run_dir / "tokenizer.json"
    content = json.loads(path.read_text())
    merges = content["model"]["merges"]
    a, b = rng.sample(range(len(merges)), 2)
    merges[a], merges[b] = merges[b], merges[a]
    path.write_text(json.dumps(content))


def another_setting(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    section = rng.choice(["model", "data", "optimizer", "train"])
    numbers = [key for key, value in config[section].items() if type(value) in (int, float)]
    config[section][rng.choice(numbers)] += 1
    path.write_text(json.dumps(config, indent=2))


def another_version(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    path = run_dir / CERTIFICATE
    certificate = json.loads(path.read_text())
    certificate["versions"]["jax"] = f"0.{rng.randint(1, 99)}"
    path.write_text(json.dumps(certificate))


def an_edited_certificate(run_dir: Path, rng: random.Random, runs: Runs) -> None:
    """Its own digest is made anew in half of the cases."""
    path = run_dir / CERTIFICATE
    certificate = json.loads(path.read_text())
    name = rng.choice(["config", "tokenizer", "data", "chain", "checkpoints"])
    value = certificate[name]
    if isinstance(value, dict):
        entry = rng.choice(sorted(value))
        value[entry] = f"{value[entry]}0"
    else:
        certificate[name] = value[::-1]
    if rng.random() < 0.5:
        certificate["sha256"] = digest_of(certificate)
    path.write_text(json.dumps(certificate))


ALTERATIONS: list[Alteration] = [
    *(a_figure, the_last_line, a_removed_line, an_inserted_line, moved_lines, a_step_left_out),
    *(a_figure_in_a_new_chain, a_byte_of_a_checkpoint, a_removed_byte_of_a_checkpoint),
    *(a_checkpoint_of_another_step, a_checkpoint_of_another_run, a_removed_checkpoint),
    *(other_data, another_tokenizer, another_setting, another_version, an_edited_certificate),
]
SEEDS = 200


def rechain(run_dir: Path, lines: list[bytes]) -> None:
    """Writes lines as a chain, as a forger may who knows how it is made."""
    before, written = first_digest(read_run(run_dir).identity), []
    for raw in lines:
        written.append(json.dumps(json.loads(raw) | {"before": before}).encode())
        before = line_digest(written[-1])
    write_lines(run_dir, written)


def is_caught(alteration: Alteration, seed: int, runs: Runs, folder: Path) -> bool:
    run_dir = folder / f"{alteration.__name__}_{seed}"
    shutil.copytree(runs.run, run_dir)
    alteration(run_dir, random.Random(seed), runs)
    assert contents(run_dir) != contents(runs.run)
    try:
        return bool(refused(run_dir, steps=0))
    except ConfigError:  # files that are no run any more
        return True
    finally:
        shutil.rmtree(run_dir)


@pytest.mark.parametrize("alteration", ALTERATIONS, ids=lambda alteration: alteration.__name__)
def test_an_alteration_is_caught(alteration: Alteration, runs: Runs, tmp_path: Path) -> None:
    assert is_caught(alteration, SEEDS, runs, tmp_path)


@pytest.mark.slow
def test_all_of_200_alterations_are_caught(runs: Runs, tmp_path: Path) -> None:
    missed = [
        (ALTERATIONS[seed % len(ALTERATIONS)].__name__, seed)
        for seed in range(SEEDS)
        if not is_caught(ALTERATIONS[seed % len(ALTERATIONS)], seed, runs, tmp_path)
    ]
    assert missed == []


# What remains where the chain and the certificate are made anew, or are missing.


def copied(runs: Runs, folder: Path, certificate: bool = True) -> Path:
    run_dir = folder / "copy"
    shutil.copytree(runs.run, run_dir)
    if not certificate:
        (run_dir / CERTIFICATE).unlink()
    return run_dir


def changed_entry(run_dir: Path, step: int, name: str, factor: float) -> None:
    """A forger changes a figure of a step and makes the chain anew."""
    lines = [json.loads(raw) for raw in lines_of(run_dir)]
    for entry in lines:
        if entry["step"] == step and name in entry:
            entry[name] *= factor
    rechain(run_dir, [json.dumps(entry).encode() for entry in lines])


@pytest.mark.parametrize(
    ("step", "name", "factor"),
    [
        (3, "loss", 1 + 1e-6),
        pytest.param(7, "grad_norm", 1 - 1e-6, marks=pytest.mark.slow),
        pytest.param(8, "val_loss", 1.01, marks=pytest.mark.slow),
    ],
)
def test_a_figure_in_a_new_chain_without_a_certificate_is_caught_by_doing_its_step_again(
    step: int, name: str, factor: float, runs: Runs, tmp_path: Path
) -> None:
    """A state that is equal to the bit leaves no rounding; an evaluation has none beside it."""
    run_dir = copied(runs, tmp_path, certificate=False)
    changed_entry(run_dir, step, name, factor)
    assert refused(run_dir, steps=0) == ""
    assert f"not equal: {name} " in refused(run_dir, steps=STEPS)


@pytest.mark.slow
def test_a_state_in_a_new_chain_is_seen_by_doing_its_step_again(runs: Runs, tmp_path: Path) -> None:
    run_dir = copied(runs, tmp_path, certificate=False)
    lines = [json.loads(raw) for raw in lines_of(run_dir)]
    lines[2]["state"] = lines[2]["state"][::-1]
    rechain(run_dir, [json.dumps(entry).encode() for entry in lines])
    found = {one.subject: one for one in statements(run_dir, steps=STEPS)}
    assert found["step 3"].verdict == "rounding" and "state, another one" in found["step 3"].text


@pytest.mark.slow
def test_a_forger_who_writes_a_certificate_too_is_caught_by_the_key_alone(
    runs: Runs, tmp_path: Path
) -> None:
    """Of a time nothing else can be said, since no step computes it again."""
    run_dir = copied(runs, tmp_path)
    changed_entry(run_dir, 3, "seconds", 2.0)
    certify(run_dir)
    assert refused(run_dir, steps=STEPS) == ""
    assert "it is not signed" in refused(run_dir, steps=0, public_key="ab" * 32)


def test_a_certificate_that_another_key_signs_is_refused(runs: Runs, tmp_path: Path) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    public_keys = []
    for name in ("mine", "forged"):
        private = ed25519.Ed25519PrivateKey.generate()
        content = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        (tmp_path / name).write_bytes(content)
        public_keys.append(private.public_key().public_bytes_raw().hex())
    run_dir = copied(runs, tmp_path)
    certify(run_dir, tmp_path / "mine")
    assert refused(run_dir, steps=0, public_key=public_keys[0]) == ""
    changed_entry(run_dir, 3, "seconds", 2.0)
    certify(run_dir, tmp_path / "forged")
    assert refused(run_dir, steps=0) == ""
    said = f"it is signed by the key {public_keys[1]}, not by {public_keys[0]}"
    assert said in refused(run_dir, steps=0, public_key=public_keys[0])


def test_other_text_is_refused_and_missing_text_leaves_the_steps_open(
    runs: Runs, tmp_path: Path, capsys: Capture
) -> None:
    content = runs.text.read_text()
    try:
        runs.text.write_text(content.replace("cat", "cow", 1))
        assert refused(runs.run).startswith("data: ") and "other text" in refused(runs.run)
        runs.text.unlink()
        assert main(["verify", str(runs.run), "--data.cache_dir", f"{CACHE}/data"]) == 0
    finally:
        runs.text.write_text(content)
    out = capsys.readouterr().out
    assert "unknown            steps done again: none, since the run cannot be set up" in out
    assert "Not proven: who computed the run." in out


def test_the_command_ends_with_status_1_where_something_was_altered(
    runs: Runs, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = copied(runs, tmp_path)
    the_last_line(run_dir, random.Random(0), runs)
    assert main(["verify", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "NO                 certificate.json: chain is not what it says." in out
    assert "steps done again: none: files are not those of the run." in out


def test_a_folder_without_a_chain_has_one_message(
    runs: Runs, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["verify", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    run_dir = copied(runs, tmp_path)
    with (run_dir / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["verify", str(run_dir)]) == 2
    assert "is still being written by a run" in capsys.readouterr().err
    write_lines(run_dir, [b'{"step": 1, "loss": 2.0}'])
    assert main(["verify", str(run_dir)]) == 2
    assert "none with `before`" in capsys.readouterr().err
    assert main(["verify", str(runs.run), "--steps", "-1"]) == 2
    assert main(["verify", str(runs.run), "--mesh.fsdp", "3"]) == 2
    assert "mesh.fsdp=3" in capsys.readouterr().err
