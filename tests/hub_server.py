"""A server on loopback with the part of the Hugging Face hub by which fsspec lists and reads the
files of a data set."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

REPOSITORY = "someone/corpus"
TREE = f"/api/datasets/{REPOSITORY}/tree/main"
FILE = f"/datasets/{REPOSITORY}/resolve/main/"


class Handler(BaseHTTPRequestHandler):
    """Answers for the files of `server.files`, their content by their name."""

    server: Any

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        content = self.server.files.get(path.removeprefix(FILE))
        if content is not None:
            self.server.read.append(path.removeprefix(FILE))
            first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
            part = content[int(first) : int(last or len(content)) + 1]
            stop = int(first) + len(part) - 1
            self.answer(part, 206, Content_Range=f"bytes {first}-{stop}/{len(content)}")
        elif path.startswith(TREE):
            self.answer_with_tree(
                path.removeprefix(TREE).strip("/"), "recursive=true" in query.lower()
            )
        elif path == f"/api/datasets/{REPOSITORY}":
            self.answer(json.dumps({"id": REPOSITORY, "sha": "0" * 40, "tags": []}).encode())
        else:
            self.answer(b"{}", 404)

    do_HEAD = do_GET

    def answer_with_tree(self, folder: str, recursive: bool) -> None:
        entries: dict[str, dict[str, Any]] = {}
        for name, content in self.server.files.items():
            if not name.startswith(folder):
                continue
            start = folder and f"{folder}/"
            parts = name.removeprefix(start).split("/")
            # Directories are listed too, and with `recursive` what is below them.
            for count in range(1, len(parts) + 1 if recursive else 2):
                path = start + "/".join(parts[:count])
                kind = "file" if path == name else "directory"
                size = len(content) if path == name else 0
                oid = str(hash(content))
                entries[path] = {"type": kind, "oid": oid, "size": size, "path": path}
        self.answer(json.dumps([*entries.values()]).encode(), 200 if entries else 404)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub with the data set REPOSITORY of the files in `files`; `read` has the names of those
    that were asked for."""
    constants = pytest.importorskip("huggingface_hub.constants")
    from huggingface_hub import HfFileSystem

    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.read = {}, []
    url = f"http://127.0.0.1:{server.server_port}"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    HfFileSystem.clear_instance_cache()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    HfFileSystem.clear_instance_cache()
    server.shutdown()
    thread.join()
    server.server_close()
