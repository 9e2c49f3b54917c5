"""A certificate of a sound run proves what it says, and each check fails where that which it guards
is broken."""

import dataclasses
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_certificate_record import write_key
from tiny_run import PLAIN, ROOT, copy, line, train_here, write_text

from jaxformer.checkpoints.saving import Checkpoints
from jaxformer.cli import main
from jaxformer.layers import kernels
from jaxformer.layers.dot_product import plain
from jaxformer.report.metrics import LARGEST_STEP
from jaxformer.tools.certificate import leaks, step_checks, text_checks
from jaxformer.tools.certificate.checks import CHECKS, examined
from jaxformer.tools.certificate.evidence import Evidence
from jaxformer.tools.certificate.record import read_certificate, seal_problems
from jaxformer.tools.certificate.steps import DoneAgain, compared
from jaxformer.tools.certificate.writing import evidence_of
from jaxformer.tools.step_replay import state_before

Capture = pytest.CaptureFixture[str]
Break = Callable[[pytest.MonkeyPatch, Evidence], Evidence | None]
STEPS, EVERY = 6, 3
CHANGES = PLAIN | {
    "run.certify": True,
    "model.d_model": 16,
    "optimizer.decay_steps": STEPS,
    "optimizer.warmup_steps": 2,
    "train.checkpoint_every": EVERY,
    "train.steps": STEPS,
}
SIGN_KEY = "key.pem"


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with run.certify, whose command ends with status 0."""
    folder = tmp_path_factory.mktemp("certified")
    assert train_here(line(folder / "run", write_text(folder / "text.txt"), CHANGES)) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def sound(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    folder = tmp_path_factory.mktemp("evidence")
    evidence = evidence_of(trained, 1, folder, log=quiet)
    padded = dict(evidence.batch)
    padded["segment_ids"] = evidence.batch["segment_ids"].copy()
    padded["segment_ids"][:, -5:] = 0
    padded["weights"] = evidence.batch["weights"] * (padded["segment_ids"] != 0)
    return dataclasses.replace(evidence, batch=padded)


@pytest.fixture
def evidence(sound: Evidence, tmp_path: Path) -> Evidence:
    """With a directory of its own, and programs that are traced anew."""
    leaks._program.cache_clear()
    return dataclasses.replace(sound, folder=tmp_path)


def result_of(name: str, evidence: Evidence) -> dict[str, Any]:
    (check,) = (check for check in CHECKS if check.name == name)
    with pytest.MonkeyPatch.context() as alone:
        alone.setattr("jaxformer.tools.certificate.checks.CHECKS", (check,))
        (entry,) = examined(evidence)
    return dict(entry)


def with_kernel(patch: pytest.MonkeyPatch, evidence: Evidence, run: Any) -> None:
    name = evidence.setup.model.attention_kernel
    row = dataclasses.replace(kernels.KERNELS[name], run=run)
    patch.setitem(kernels.KERNELS, name, row)


def wrong_kernel(patch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    with_kernel(patch, evidence, lambda q, k, v, mask: 1.01 * plain(q, k, v, mask))


def wrong_experts(patch: pytest.MonkeyPatch, evidence: Evidence) -> Evidence:
    from jaxformer.layers import grouped

    row = grouped.GROUPED_KERNELS["ragged"]
    product = row.product
    patch.setitem(
        grouped.GROUPED_KERNELS,
        "ragged",
        row._replace(product=lambda *arguments: 1.1 * product(*arguments)),
    )
    return with_experts(evidence)


def with_experts(evidence: Evidence) -> Evidence:
    """The run with a model of experts, of which this check makes no array."""
    run = evidence.setup.run
    model = dataclasses.replace(
        run.model, feed_forward="experts", n_experts=4, expert_kernel="ragged"
    )
    setup = dataclasses.replace(evidence.setup, run=dataclasses.replace(run, model=model))
    return dataclasses.replace(evidence, setup=setup)


def without_segments(patch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        sides = [
            side.replace(segments=jnp.minimum(side.segments, 1))
            if side.segments is not None
            else side
            for side in (mask.queries, mask.keys)
        ]
        index = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
        sides = [side.replace(positions=index) for side in sides]
        return plain(q, k, v, mask._replace(queries=sides[0], keys=sides[1]))

    with_kernel(patch, evidence, run)


def with_padding_read(patch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        keys = mask.keys.segments
        if keys is None:
            return plain(q, k, v, mask)
        read = mask.keys.replace(
            segments=jnp.where(keys == 0, 1, keys),
            positions=jnp.where(keys == 0, 0, mask.keys.positions),
        )
        return plain(q, k, v, mask._replace(keys=read))

    with_kernel(patch, evidence, run)


def with_next_token(patch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    def run(q: Any, k: Any, v: Any, mask: Any) -> Any:
        queries = mask.queries.replace(positions=mask.queries.positions + 1)
        return plain(q, k, v, mask._replace(queries=queries))

    with_kernel(patch, evidence, run)


def without_first_tokens(patch: pytest.MonkeyPatch, evidence: Evidence) -> Evidence:
    return of_texts(patch, evidence, 9)


def of_texts(patch: pytest.MonkeyPatch, evidence: Evidence, first: int) -> Evidence:
    """Evidence whose texts begin with the token `first`, where it should be 7."""
    end = evidence.setup.corpus.tokenizer.end_token
    patch.setattr(text_checks, "beginning_of", lambda evidence: (7,))
    row = np.array([[5, end, first, 8, end, first]], np.int32)

    class Rows:
        def __getitem__(self, step: int) -> dict[str, np.ndarray]:
            return {"tokens": row, "segment_ids": np.array([[1, 1, 2, 2, 2, 3]])}

    setup = dataclasses.replace(evidence.setup, batches=Rows())  # type: ignore[arg-type]
    return dataclasses.replace(evidence, setup=setup)


def with_half_a_batch(patch: pytest.MonkeyPatch, evidence: Evidence) -> None:
    exact = step_checks.gradients

    def run(loss: Any, state: Any, batch: Any, key: Any, pieces: int, *rest: Any) -> Any:
        if pieces > 1:
            batch = jax.tree.map(lambda array: array[: len(array) // 2], batch)
        return exact(loss, state, batch, key, 1, *rest)

    patch.setattr(step_checks, "gradients", run)


def with_an_altered_loss(patch: pytest.MonkeyPatch, evidence: Evidence) -> Evidence:
    done = DoneAgain(4, 3, {"loss": 2.0}, "a" * 16, {"loss": 2.0001, "state": "a" * 16})
    return dataclasses.replace(evidence, replays=[compared(done, 1e-3)])


def in_a_copy(evidence: Evidence) -> Evidence:
    copies = len([*evidence.folder.iterdir()])
    run_dir = copy(Path(evidence.setup.run.run.dir), evidence.folder / f"run-{copies}")
    run = evidence.setup.run
    run = dataclasses.replace(run, run=dataclasses.replace(run.run, dir=str(run_dir)))
    setup = dataclasses.replace(evidence.setup, run=run)
    return dataclasses.replace(evidence, setup=setup)


def with_an_altered_line(patch: pytest.MonkeyPatch, evidence: Evidence) -> Evidence:
    altered = in_a_copy(evidence)
    path = Path(altered.setup.run.run.dir) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    entry = json.loads(lines[1])
    entry["loss"] += 1e-6
    lines[1] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    return altered


def with_an_altered_byte(patch: pytest.MonkeyPatch, evidence: Evidence) -> Evidence:
    altered = in_a_copy(evidence)
    folder = Path(altered.setup.run.run.dir) / "checkpoints" / str(STEPS) / "state"
    path = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return altered


def with_lost_moments(patch: pytest.MonkeyPatch, evidence: Evidence) -> Evidence:
    exact = Checkpoints.restore

    def restore(self: Checkpoints, target: Any, log: Any) -> Any:
        state = exact(self, target, log)
        assert state is not None
        return state.replace(optimizer=jax.tree.map(jnp.zeros_like, state.optimizer))

    patch.setattr(Checkpoints, "restore", restore)
    return with_state(evidence)


def with_state(evidence: Evidence) -> Evidence:
    """With a state of its own, which the check donates."""
    return dataclasses.replace(evidence, state=state_before(evidence.setup, LARGEST_STEP, quiet))


# What is broken, and how the same evidence is made without that, by the names of the checks. The
# mesh of a run against one device is in test_certificate_devices.py.
BROKEN: dict[str, tuple[Break, Callable[[pytest.MonkeyPatch, Evidence], Evidence]]] = {
    "attention kernel": (wrong_kernel, lambda _, evidence: evidence),
    "expert kernel": (wrong_experts, lambda _, evidence: with_experts(evidence)),
    "texts apart": (without_segments, lambda _, evidence: evidence),
    "padding apart": (with_padding_read, lambda _, evidence: evidence),
    "future apart": (with_next_token, lambda _, evidence: evidence),
    "first tokens": (without_first_tokens, lambda patch, evidence: of_texts(patch, evidence, 7)),
    "accumulation": (with_half_a_batch, lambda _, evidence: evidence),
    "replayed steps": (with_an_altered_loss, lambda _, evidence: evidence),
    "log chained": (with_an_altered_line, lambda _, evidence: in_a_copy(evidence)),
    "checkpoint files": (with_an_altered_byte, lambda _, evidence: in_a_copy(evidence)),
    "resumed step": (with_lost_moments, lambda _, evidence: with_state(evidence)),
}


def test_every_check_is_broken_once() -> None:
    assert {*BROKEN, "one device"} == {check.name for check in CHECKS}


def test_the_page_of_the_documentation_has_the_table() -> None:
    hook = runpy.run_path(str(ROOT / "docs/hooks/certificates.py"))
    page = (ROOT / "docs/certificates.md").read_text(encoding="utf-8")
    assert page == hook["with_tables"](page), "run python docs/hooks/certificates.py"


@pytest.mark.parametrize("name", BROKEN)
def test_a_check_passes_on_a_sound_run_and_fails_on_a_broken_one(
    name: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it, sound_case = BROKEN[name]
    with pytest.MonkeyPatch.context() as patch:
        entry = result_of(name, sound_case(patch, evidence))
    assert entry["result"] == "proven", entry
    leaks._program.cache_clear()
    entry = result_of(name, break_it(monkeypatch, evidence) or evidence)
    assert entry["result"] == "failed", entry
    figure, bound = entry["figure"], entry["bound"]
    assert figure is None or figure > bound or name == "replayed steps"


def test_a_run_ends_with_a_certificate_that_its_files_bear_out(trained: Path) -> None:
    certificate = read_certificate(trained / "certificate.json")
    assert seal_problems(certificate) == []
    results = {entry["name"]: entry["result"] for entry in certificate["checks"]}
    reasons = {"expert kernel", "first tokens", "one device"}
    assert {name for name, result in results.items() if result == "not applicable"} == reasons
    assert {results[name] for name in results if name not in reasons} == {"proven"}
    assert len(certificate["replayed"]) == 3
    assert {entry["equal"] for entry in certificate["replayed"]} == {"bitwise"}
    assert certificate["chain"]["lines"] == len(
        (trained / "metrics.jsonl").read_text().splitlines()
    )
    assert [*certificate["checkpoints"]] == [str(EVERY), str(STEPS)]
    assert not [*trained.glob(".certify-*")]
    page = (trained / "certificate.html").read_text()
    assert "No check failed" in page and certificate["sha256"] in page
    assert "{{" not in page


def test_a_signed_certificate_is_written_elsewhere(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = write_key(tmp_path / SIGN_KEY, Ed25519PrivateKey.generate())
    before = (trained / "certificate.json").read_bytes()
    output = tmp_path / "signed.json"
    arguments = ["certify", str(trained), "--sign", str(key), "--output", str(output)]
    assert main([*arguments, "--steps", "0"]) == 0
    certificate = read_certificate(output)
    assert certificate["signature"] and seal_problems(certificate) == []
    assert "Signed by the key" in output.with_suffix(".html").read_text()
    assert (trained / "certificate.json").read_bytes() == before
    (replays,) = [one for one in certificate["checks"] if one["name"] == "replayed steps"]
    assert replays["result"] == "not applicable" and certificate["replayed"] == []


def test_a_failed_check_is_first_and_ends_the_command_with_1(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = copy(trained, tmp_path / "run")
    checks = [check for check in CHECKS if check.name in ("accumulation", "checkpoint files")]
    monkeypatch.setattr("jaxformer.tools.certificate.checks.CHECKS", checks)
    monkeypatch.setattr(step_checks, "altered_files", lambda *_: ["state/d"])
    assert main(["certify", str(run_dir), "--steps", "0"]) == 1
    assert "1 of 2 checks failed: checkpoint files" in capsys.readouterr().err
    page = (run_dir / "certificate.html").read_text()
    assert "1 check failed: checkpoint files" in page
    assert page.index("<th>checkpoint files") < page.index("<th>accumulation")


def test_mistakes_are_refused_before_anything_is_computed(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    key = tmp_path / SIGN_KEY
    key.write_text("no key")
    assert main(["certify", str(trained), "--sign", str(key)]) == 2
    assert "no private key in PEM" in capsys.readouterr().err
    assert main(["certify", str(trained), "--steps", "-1"]) == 2
    assert main(["certify", str(tmp_path)]) == 2
    assert main(["certify", str(trained), "--output", str(tmp_path / "no" / "file.json")]) == 2
