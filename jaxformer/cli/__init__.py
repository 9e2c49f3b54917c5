"""The command line: `jaxformer train | sample | evaluate | convert | prepare | tokenizer |
attention | lm_eval`.

Exit status: 0 done, 2 a mistake in config or input (one message, no traceback), anything else a
fault.
"""

import ctypes
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

COMMANDS = {
    "train": "CONFIG [--section.field value ...]   trains, or continues, the run of a config",
    "sample": (
        'RUN [--prompt "..."]                 what a trained run writes, fills in or tells of a'
        " text"
    ),
    "evaluate": "RUN [--data.validation PATH]         loss on held-out text, accuracy, or BLEU",
    "convert": "SOURCE TARGET [--verify]              a run to a Hugging Face directory, or back",
    "prepare": (
        "CONFIG [--output DIR] [--shard I/N]       tokenizes the text of a config beforehand"
    ),
    "tokenizer": (
        "train | encode | inspect            makes a tokenizer, writes ids, shows how a text is"
        " split"
    ),
    "attention": 'RUN --prompt "..."                 a page of attention maps',
    "lm_eval": (
        "--model jaxformer --model_args path=RUN --tasks ...   the evaluation harness's command"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] not in COMMANDS:
        asked_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
        lines = [f"  jaxformer {name} {what}" for name, what in COMMANDS.items()]
        mistake = (
            ""
            if asked_for_help or not arguments
            else f"jaxformer has no command {arguments[0]!r}.\n"
        )
        print(
            mistake + "usage:\n" + "\n".join(lines),
            file=sys.stdout if asked_for_help else sys.stderr,
        )
        return 0 if asked_for_help else 2
    keep_memory()
    warnings.showwarning = _note
    from jaxformer.config import ConfigError

    try:
        return int(importlib.import_module(f"jaxformer.cli.{arguments[0]}").run(arguments[1:]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # the argument parser has said what it had to say
        return int(stop.code or 0)
    except BrokenPipeError:  # who reads the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _note(message: Warning | str, *where: object, **more: object) -> None:
    """A warning as a command prints it, without the line of code that it came from."""
    print(f"note: {message}", file=sys.stderr)


def keep_memory() -> None:
    """Lets glibc's malloc keep what a step frees, for the next step: without it a CPU spends its
    time on page faults.

    Process-wide, hence only in the entry point, before JAX is imported. JAXFORMER_MALLOC=system
    turns it off.
    """
    if (
        sys.platform != "linux"
        or os.environ.get("JAXFORMER_MALLOC") == "system"
        or "jax" in sys.modules
    ):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    for parameter, value in (
        (-8, 1),
        (-4, 0),
        (-1, -1),
    ):  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD
        mallopt(parameter, value)
