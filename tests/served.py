"""A server of a small model, in a thread of the test or as a command, and what it has to write."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import uvicorn
from chat_templates import QWEN25, without_blocks
from commands import Command
from conftest import CACHE

import jaxformer as jf
from jaxformer.cli.arguments import ServeArguments
from jaxformer.cli.serve import Server
from jaxformer.runs.prompting import Model, open_model
from jaxformer.tokenizer import byte_tokenizer

NAME = "tiny"


def tiny_model(folder: Path, **settings: Any) -> Path:
    """A directory with a Llama of random weights, a token for each byte and a chat template. It
    writes printable ASCII alone, so that a text tells its tokens."""
    tokenizer = byte_tokenizer(("<|im_start|>", "<|im_end|>"))
    sizes = {"vocab_size": tokenizer.vocab_size, "d_model": 32, "n_layers": 2, "n_heads": 2}
    config = jf.ModelConfig(**{**sizes, "positions": "rope", "max_length": 768, **settings})
    params = jax.tree.map(lambda leaf: 3 * leaf, jf.init(config, jax.random.key(0)))
    model = folder / NAME
    jf.save_pretrained(model, params, config)
    tokenizer.save(model / "tokenizer.json")
    (model / "chat_template.jinja").write_text(without_blocks(QWEN25))
    others = [*range(32), *range(127, 257)]
    (model / "generation_config.json").write_text(json.dumps({"suppress_tokens": others}))
    return model


def expected(model: Model, start: list[int], count: int, **rules: Any) -> str:
    """The greedy text of `jf.generate`."""
    keywords = model.writing_rules() | {"temperature": 0.0} | rules
    row = jf.generate(model.params, model.config, [start], count, **keywords)
    return model.text_after(start, np.asarray(row)[0].tolist())


@contextlib.contextmanager
def served(path: Path, **options: Any) -> Iterator[tuple[str, Server]]:
    """The address of a server in a thread, and the server."""
    args = ServeArguments(path=path, **options)
    server = Server(open_model(**args.model), args)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        loop = uvicorn.Server(uvicorn.Config(server.application(), log_level="error"))
        thread = threading.Thread(target=loop.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not loop.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
        finally:
            loop.should_exit = True
            thread.join()
            server.writer.close()


@contextlib.contextmanager
def serving(model: Path, *arguments: object) -> Iterator[tuple[str, Command]]:
    """The address of `jaxformer serve`, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = ["serve", str(model), "--port", str(port), *map(str, arguments)]
    process = Command(line, environment={"JAX_COMPILATION_CACHE_DIR": f"{CACHE}/xla"}, merged=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
