"""The side of a benchmark's worker in the protocol of `pairing.Worker`, with the standard library
alone, since a peer may live in an environment of its own."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(about: dict[str, Any], commands: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Prints what is known of the worker, and then an answer to each line that is read, all as JSON
    objects: a line is a command and its arguments, as strings; `quit` ends it."""
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "quit":
            break
        print(json.dumps(commands[command](*arguments)), flush=True)
