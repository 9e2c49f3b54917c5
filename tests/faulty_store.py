"""A proxy before a server of S3, which refuses requests as a test states."""

import contextlib
import http.client
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import urlsplit

BODY = "<Error><Code>{code}</Code><Message>refused by the test</Message></Error>"
CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown"}


class Faults:
    """Answers `status` to requests whose "METHOD path" matches `pattern`: the first `count` of
    them. `refused` counts them."""

    def __init__(self, status: int, pattern: str, count: int = 10**9) -> None:
        self.status, self.pattern, self.count, self.refused = status, pattern, count, 0
        self._lock = Lock()

    def meets(self, request: str) -> bool:
        with self._lock:
            meets = self.refused < self.count and bool(re.search(self.pattern, request))
            self.refused += meets
            return meets


@contextlib.contextmanager
def proxy(server: str, faults: Faults) -> Iterator[str]:
    """The address of a proxy before the address of a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if faults.meets(f"{self.command} {self.path}"):
                answer = BODY.format(code=CODES[faults.status]).encode()
                self.send(faults.status, {"Content-Type": "application/xml"}, answer)
                return
            connection = http.client.HTTPConnection(urlsplit(server).netloc)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            self.send(response.status, dict(response.getheaders()), response.read())
            connection.close()

        def send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()
