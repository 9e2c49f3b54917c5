"""Faults of the server of S3 that `buckets.s3_server` starts: it throttles, fails, cuts off or
refuses the requests for an object."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

# The answers of S3 by the kind of the fault: the status, and the code in its XML.
ANSWERS = {
    "throttled": ("503 Slow Down", "SlowDown"),
    "failing": ("500 Internal Server Error", "InternalError"),
    "denied": ("403 Forbidden", "AccessDenied"),
}
TRUNCATED = "truncated"  # half of the body of an answer, and then the end of the connection
NONE = ""  # no fault, but `before` is called


@dataclass
class Fault:
    """A kind of ANSWERS, TRUNCATED or NONE for the first `times` requests of a `method` whose path
    contains `key`; `before` is called ahead of each. `count` says how many there were."""

    kind: str
    key: str = ""
    times: int = 1 << 30
    method: str = ""
    before: Callable[[], None] = lambda: None
    count: int = 0

    def takes(self, environ: dict[str, Any]) -> bool:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        return self.key in path and self.method in ("", method) and self.count < self.times


@dataclass
class Faults:
    """The faults of the server at the moment, and every request to it: method and path."""

    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def fault(self, kind: str, key: str = "", **options: Any) -> Iterator[Fault]:
        """One more fault during a block."""
        fault = Fault(kind, key, **options)
        self.faults.append(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    def answer(
        self, application: Any, environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        """The answer to a request: that of moto's application unless a fault takes it."""
        with self.lock:
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
            fault = next((fault for fault in self.faults if fault.takes(environ)), Fault(NONE))
            fault.count += 1
        fault.before()
        if fault.kind in ANSWERS:
            return _refused(environ, start, *ANSWERS[fault.kind])
        body = application(environ, start)
        return _half(body) if fault.kind == TRUNCATED else body


@pytest.fixture
def s3_faults(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    """The faults of moto's server of S3. s3fs asks twice where botocore asks twice, instead of five
    times five, as the waits between would take ten seconds."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication
    from s3fs import S3FileSystem

    faults, answer = Faults(), DomainDispatcherApplication.__call__

    def answer_with_faults(application, environ, start):
        return faults.answer(lambda *request: answer(application, *request), environ, start)

    monkeypatch.setattr(DomainDispatcherApplication, "__call__", answer_with_faults)
    monkeypatch.setattr(S3FileSystem, "retries", 2)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    S3FileSystem.clear_instance_cache()
    yield faults
    S3FileSystem.clear_instance_cache()


def _refused(
    environ: dict[str, Any], start: Callable[..., Any], status: str, code: str
) -> Iterable[bytes]:
    # What a client has sent is read, or it would see a closed connection in place of the answer.
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    body = f"<Error><Code>{code}</Code><Message>of the test</Message></Error>".encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def _half(body: Iterable[bytes]) -> Iterator[bytes]:
    """Half of a body, whose Content-Length is that of all of it."""
    content = b"".join(body)
    yield content[: len(content) // 2]
