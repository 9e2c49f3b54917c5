"""Text, token stores and tokenizers in a bucket: the same batches as from the disk, and one message
for what goes wrong."""

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from corpora import prepare, quiet, tokenize
from faulty_server import NONE, Faults
from hub_server import REPOSITORY
from products import slow_but
from tiny_run import line, logged, write_text

from jaxformer.cli import main
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig
from jaxformer.data import Batches
from jaxformer.data import store as store_files
from jaxformer.data.source import find_source
from jaxformer.files import ConfigError, located
from jaxformer.files.bucket import VARIABLE
from jaxformer.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
WORK = ("tokenizing", "training", "reading")


@pytest.fixture(autouse=True)
def copies_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of copies, new for each test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "copies"))
    return tmp_path / "copies"


def records(start: int, count: int = 40) -> bytes:
    texts = [f"document {start + index}: {'so ' * (index % 5)}it goes" for index in range(count)]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


# Names below a source, and their content.
CORPUS = {
    "a.txt": b"one<|endoftext|>\ntwo",
    "b/c.jsonl.gz": gzip.compress(records(0)),
    "b/d.jsonl.zst": zstandard.compress(records(40)),
    "e.jsonl": records(80),
    ".hidden.jsonl": records(120),
    "notes.log": b"of no known suffix",
}


def put(root: str | Path, corpus: dict[str, bytes] = CORPUS) -> str:
    """Writes a corpus below a directory or a URL, and gives it as a source."""
    for name, content in corpus.items():
        path = located(f"{root}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(root)


def run_of(cache: str | Path, train: str, **data: Any) -> RunConfig:
    settings = DataConfig(train=train, cache_dir=str(cache), sequence_length=16)
    return RunConfig(data=replace(settings, **data), tokenizer=TokenizerConfig(vocab_size=300))


def batches_of(run: RunConfig, log: Callable[[str], None] = quiet) -> str:
    """A digest of the batches of some steps, and of the held-out rows."""
    corpus = prepare(run, log)
    assert corpus.validation is not None
    digest = hashlib.sha256()
    for rows in (corpus.train, corpus.validation):
        batches = Batches(rows, run.data, 4, run.run.seed)
        for step in (0, 1, 7, 100):
            for name, array in sorted(batches[step].items()):
                digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("bucket", "spec"),
    [
        ("s3_bucket", ""),
        *slow_but([("s3_bucket", "/**/*.jsonl*"), ("gcs_bucket", "/b/*")]),
        ("memory_bucket", "/e.jsonl"),
    ],
)
def test_a_corpus_in_a_bucket_gives_the_batches_of_the_disk(
    bucket: str, spec: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    any_bucket = request.getfixturevalue(bucket)
    local = run_of(tmp_path / "one", put(tmp_path / "text") + spec)
    remote = run_of(tmp_path / "two", put(f"{any_bucket}/text") + spec)
    sources = [find_source(run.data.train, "data.train") for run in (local, remote)]
    names, others = ([file.name for file in source.files] for source in sources)
    assert names == others
    assert batches_of(local) == batches_of(remote)


@pytest.mark.parametrize("bucket", slow_but(["s3_bucket", "gcs_bucket"], "s3_bucket"))
def test_a_cache_in_a_bucket_is_shared_and_read_from_copies(
    bucket: str, tmp_path: Path, copies_of_the_test: Path, request: pytest.FixtureRequest
) -> None:
    text, cache = put(tmp_path / "text"), f"{request.getfixturevalue(bucket)}/cache"
    expected = batches_of(run_of(tmp_path / "cache", text))
    tokenize(run_of(cache, text))
    # Who only makes the tokens needs no room for them.
    assert not [*copies_of_the_test.rglob("*.tokens")]
    for _ in range(2):
        lines: list[str] = []
        assert batches_of(run_of(cache, text), lines.append) == expected
        assert not [line for line in lines for work in WORK if work in line]


def test_a_store_that_was_altered_in_its_bucket_is_named(s3_bucket: str, tmp_path: Path) -> None:
    run = run_of(f"{s3_bucket}/cache", put(tmp_path / "text"))
    tokenize(run)
    tokens = next(iter(located(f"{s3_bucket}/cache").rglob("*.tokens")))
    tokens.write_bytes(bytes([tokens.read_bytes()[0] ^ 1]) + tokens.read_bytes()[1:])
    with pytest.raises(ConfigError) as caught:
        batches_of(run)
    assert str(caught.value).startswith(f"{tokens} was altered since it was written")


def test_token_ids_and_a_tokenizer_in_a_bucket(s3_bucket: str, tmp_path: Path) -> None:
    text = run_of(tmp_path / "cache", put(tmp_path / "text"))
    corpus = prepare(text)
    corpus.tokenizer.save(tmp_path / "mine" / "tokenizer.json")
    corpus.tokenizer.save(f"{s3_bucket}/mine/tokenizer.json")
    np.save(tmp_path / "ids.npy", corpus.train.store.read(0, 10**6))
    put(f"{s3_bucket}/ids", {"ids.npy": (tmp_path / "ids.npy").read_bytes()})
    digests = {
        batches_of(replace(run_of(tmp_path / "cache", train), tokenizer=TokenizerConfig(path=path)))
        for train, path in [
            (f"{tmp_path}/*.npy", f"{tmp_path}/mine"),
            (f"{s3_bucket}/ids/*.npy", f"{s3_bucket}/mine"),
        ]
    }
    assert len(digests) == 1
    assert Tokenizer.load(f"{s3_bucket}/mine").origin == f"{s3_bucket}/mine/tokenizer.json"


def test_an_unchanged_object_is_not_read_again_and_a_changed_one_is(
    s3_bucket: str, s3_faults: Faults, tmp_path: Path
) -> None:
    train = put(f"{s3_bucket}/text")
    run = run_of(tmp_path / "cache", train)
    before = batches_of(run)
    s3_faults.requests.clear()
    lines: list[str] = []
    assert batches_of(run, lines.append) == before
    read = [path for method, path in s3_faults.requests if method == "GET" and "text/" in path]
    assert not read and not any("reading" in line for line in lines)
    located(f"{train}/e.jsonl").write_bytes(records(81))
    assert batches_of(run, lines.append) != before
    assert any("reading" in line for line in lines)


@pytest.mark.slow
def test_interrupted_work_goes_on_from_its_shard(
    s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_files, "SHARD_CHARACTERS", 500)
    text, cache = put(f"{s3_bucket}/text"), f"{s3_bucket}/cache"
    written: list[str] = []
    stops = [3]
    write_shard = store_files.write_index

    def stopping_once(path: Path, *rest: Any) -> Any:
        if len(written) in stops:
            stops.clear()
            raise KeyboardInterrupt
        written.append(path.name)
        return write_shard(path, *rest)

    monkeypatch.setattr(store_files, "write_index", stopping_once)
    with pytest.raises(KeyboardInterrupt):
        prepare(run_of(cache, text))
    resumed = batches_of(run_of(cache, text))
    assert len(written) == len({*written})
    assert resumed == batches_of(run_of(tmp_path / "cache", text))


def message_of(train: str, tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        batches_of(run_of(tmp_path / "cache", train))
    return str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("/text/none.txt", "data.train: {} does not exist; "),
        ("/empty/*", "data.train: no file matches the glob '{}'"),
        ("-none/*.txt", "{} cannot be read (The specified bucket does not exist): look whether"),
    ],
)
def test_a_url_that_names_nothing_is_named(
    spec: str, message: str, s3_bucket: str, tmp_path: Path
) -> None:
    put(f"{s3_bucket}/text")
    url = f"{s3_bucket}{spec}"
    assert message_of(url, tmp_path).startswith(message.format(url))


@pytest.mark.parametrize("kind", ["denied", "throttled", "truncated"])
def test_a_store_that_does_not_answer_ends_in_one_message(
    kind: str, s3_bucket: str, s3_faults: Faults, tmp_path: Path
) -> None:
    url = put(f"{s3_bucket}/text", {"a.txt": CORPUS["a.txt"]}) + "/a.txt"
    method = "GET" if kind == "truncated" else ""
    with s3_faults.fault(kind, "a.txt", method=method) as fault:
        message = message_of(url, tmp_path)
    assert f"{url} cannot be read" in message and "start the same command again" in message
    assert 0 < fault.count < 12


def test_a_fault_that_passes_changes_nothing(
    s3_bucket: str, s3_faults: Faults, tmp_path: Path
) -> None:
    url = f"{put(f'{s3_bucket}/text')}/e.jsonl"
    expected = batches_of(run_of(tmp_path / "one", url))
    with s3_faults.fault("throttled", "e.jsonl", times=1, method="GET") as fault:
        assert batches_of(run_of(tmp_path / "two", url)) == expected
    assert fault.count == 1


@pytest.mark.parametrize("name", ["long.txt", "ids.npy"])
def test_an_object_that_is_replaced_while_it_is_read_is_named(
    name: str, s3_bucket: str, s3_faults: Faults, tmp_path: Path
) -> None:
    path = located(f"{s3_bucket}/{name}")
    content = b"so it goes\n" * 1000
    path.write_bytes(content)
    replaced: list[bool] = []

    def replace_it() -> None:
        if not replaced:
            replaced.append(True)
            path.write_bytes(content + b"more\n")

    with s3_faults.fault(NONE, name, method="GET", before=replace_it):
        message = message_of(str(path), tmp_path)
    assert f"{path} was replaced while it was read" in message


def test_files_of_the_hub_are_read_as_those_of_the_disk(hub: Any, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"text": ["so it goes"] * 1000}), tmp_path / "p.parquet")
    hub.files |= CORPUS | {"p.parquet": (tmp_path / "p.parquet").read_bytes()}
    local = run_of(tmp_path / "one", put(tmp_path / "text", hub.files))
    remote = run_of(tmp_path / "two", f"hf://datasets/{REPOSITORY}")
    assert batches_of(local) == batches_of(remote)
    assert {*hub.read} == hub.files.keys() - {".hidden.jsonl", "notes.log"}
    hub.read.clear()
    assert batches_of(local) == batches_of(remote) and not hub.read


def test_a_bucket_that_may_not_be_written_is_named(
    s3_bucket: str, s3_faults: Faults, tmp_path: Path
) -> None:
    run = run_of(f"{s3_bucket}/cache", put(tmp_path / "text"))
    with s3_faults.fault("denied", method="PUT"), pytest.raises(ConfigError) as caught:
        prepare(run)
    assert f"{s3_bucket}/cache" in str(caught.value) and "cannot be written" in str(caught.value)


@pytest.mark.slow
def test_commands_read_urls_as_files(s3_bucket: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    url = put(s3_bucket, {"text.txt": text.read_bytes()}) + "/text.txt"
    changes = {"train.steps": 6, "model.n_layers": 1, "model.layer_pattern": "d"}
    cached = changes | {"data.cache_dir": f"{s3_bucket}/cache"}
    assert main(["prepare", *line(tmp_path / "none", url, cached)]) == 0
    assert main(["train", *line(tmp_path / "disk", text, changes)]) == 0
    assert main(["train", *line(tmp_path / "bucket", url, cached)]) == 0
    disk, bucket = (logged(tmp_path / name) for name in ("disk", "bucket"))
    assert [entry.get("loss") for entry in disk] == [entry.get("loss") for entry in bucket]
    for name, source in (("disk", str(text)), ("bucket", url)):
        tokenizer, ids = str(tmp_path / f"{name}.tokens"), str(tmp_path / f"{name}.npy")
        options = ["--vocab_size", "300", "--output", tokenizer]
        assert main(["tokenizer", "train", source, *options]) == 0
        assert main(["tokenizer", "encode", tokenizer, source, "--output", ids]) == 0
    assert (tmp_path / "disk.npy").read_bytes() == (tmp_path / "bucket.npy").read_bytes()
    for source in (str(text), url):
        assert main(["evaluate", str(tmp_path / "disk"), "--data.validation", source]) == 0
