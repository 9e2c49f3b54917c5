"""The command line: `jaxformer COMMAND ...`.

Exit status: 0 success, 2 a mistake in config or input (one message, no traceback), 128 + the number
of a signal that stopped it (130 for SIGINT, 143 for SIGTERM), 3 where another process of the run
was lost, anything else a failure. One that nobody foresaw has a traceback.
"""

import contextlib
import ctypes
import errno
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Sequence

from jaxformer.cluster.signals import guarded, importing
from jaxformer.config.format import escaped
from jaxformer.files import ConfigError

SHOWN_CHARACTERS = 300  # of the message of an error
FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What XLA's messages say where a device has no memory left.
MEMORY_PHRASES = ("RESOURCE_EXHAUSTED", "Out of memory allocating")
STORE_PACKAGES = ("aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "s3fs")

# The arguments of each command, and what it does.
COMMANDS = {
    "train": ("CONFIG [--section.field VALUE ...]", "Train a model, or continue its run."),
    "plan": ("CONFIG [--device h100] [--devices 8]", "What a run needs and costs, before it runs."),
    "shapes": ("CONFIG [--format json]", "The shapes, parameters and FLOPs of each sublayer."),
    "sample": ('RUN [--prompt "..."] [--chat]', "Generate text, or chat."),
    "serve": ("MODEL [--port 8000]", "Serve a model by the API of OpenAI, and a page to chat in."),
    "predict": ('RUN --prompt "..."', "Predict masked tokens, a class, or tags."),
    "embed": ('RUN [--prompt "..."]', "Print the vectors of texts."),
    "evaluate": ("RUN [--data.validation PATH]", "Compute loss, accuracy or BLEU on a text."),
    "convert": ("SOURCE TARGET [--verify]", "Convert a run to a Hugging Face model, or back."),
    "prepare": ("CONFIG", "Tokenize the data before training."),
    "tokenizer": ("train | encode", "Train a tokenizer, or encode a text."),
    "attention": ('RUN --prompt "..."', "Write a page of attention maps."),
    "compare": ("RUN RUN ...", "Draw the curves of runs, and list what differs."),
    "verify": ("RUN [--steps 5]", "Verify the files of a run, its steps, masks and mesh."),
    "doctor": ("CONFIG", "Check what a run needs, before it runs."),
    "lm_eval": ("--model jaxformer --model_args path=RUN", "Run EleutherAI's evaluation harness."),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    open_closed_streams()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        unknown = ""
        if arguments:
            unknown = f"error: there is no command {arguments[0]!r}.\n"
        print(unknown + _usage(), file=sys.stderr)
        return 2

    def command() -> int:
        keep_memory()
        warnings.showwarning = _note
        name, *argv = arguments
        try:
            with importing():
                from jaxformer.cli.arguments import parse
            # Before the command's module, which may import JAX: --help and mistakes need not wait.
            parsed = parse(name, argv)
            with importing():
                module = importlib.import_module(f"jaxformer.cli.{name}")
            status = int(module.run(*parsed))
            sys.stdout.flush()  # or a full disk would be noticed after the exit status is decided
            return status
        except ConfigError as error:
            print(f"error: {escaped(str(error))}", file=sys.stderr)
            return 2
        except SystemExit as stop:  # the argument parser has printed its message
            return int(stop.code or 0)
        except BrokenPipeError:  # the reader of the output, such as `head`, has stopped
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except KeyboardInterrupt:  # or another signal
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            return _reported(error)

    # From here on signals are watched, also while JAX is imported.
    status = guarded(command)
    joined = sys.modules.get("jaxformer.cluster.launch")  # JAX would wait for the others in vain
    if joined:
        return int(joined.leave(status))
    return status


def _reported(error: BaseException) -> int:
    """Print an error that no command foresaw. The exit status: 2 for one of the operating system
    about a file, or of a store, with one line, else 1."""
    # One line: messages of XLA are pages.
    message = escaped(" ".join(str(error).split()))[:SHOWN_CHARACTERS]
    if isinstance(error, OSError) and (error.filename or error.errno in FULL_DISK_ERRORS):
        if error.errno in FULL_DISK_ERRORS:
            # What is left in the buffer would fail again at the end of the process.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        file = escaped(str(error.filename or "standard output, or a file"))
        print(
            f"error: {file}: {error.strerror}: make room, choose another path, or look at its"
            " permissions and limits (ulimit -n).",
            file=sys.stderr,
        )
        return 2
    # The libraries of buckets share no class of errors.
    packages = {type(one).__module__.partition(".")[0] for one in (error, error.__cause__)}
    if packages.intersection(STORE_PACKAGES):
        from jaxformer.files.bucket import explained

        print(f"error: a store could not be reached {escaped(explained(error))}.", file=sys.stderr)
        return 2
    if isinstance(error, MemoryError) or any(words in message for words in MEMORY_PHRASES):
        print(f"out of memory: {message}. Choose smaller sizes.", file=sys.stderr)
        return 1
    traceback.print_exception(error)
    print(
        f"failed: {type(error).__name__}: {message}. It is a fault of jaxformer.", file=sys.stderr
    )
    return 1


def keep_memory() -> None:
    """Make glibc's malloc keep freed memory for the next training step, which otherwise spends its
    time on page faults. On two cores of an AMD EPYC with AVX-512 the small step of
    benchmarks/train_cpu.py is 1.32 times as fast in 1 microbatch (1.12 to 1.48, 12 samples in
    turn), and 1.03 times in 4 (0.99 to 1.17, 14 samples).

    This affects the entire process, so only the entry point does it, before JAX is imported.
    JAXFORMER_MALLOC=system turns it off.
    """
    unwanted = sys.platform != "linux" or os.environ.get("JAXFORMER_MALLOC") == "system"
    if unwanted or "jax" in sys.modules:
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return
    for parameter, value in (
        (-8, 1),  # M_ARENA_MAX
        (-4, 0),  # M_MMAP_MAX
        (-1, -1),  # M_TRIM_THRESHOLD
    ):
        mallopt(parameter, value)


def open_closed_streams() -> None:
    """Open the null device for each standard stream that was closed when the command started.

    Python has None for such a stream, and the next file that is opened would get its number, and
    with it whatever a library prints.
    """
    streams = {"stdin": "r", "stdout": "w", "stderr": "w"}
    for number, (name, mode) in enumerate(streams.items()):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        stream = os.fdopen(number, mode, encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _usage() -> str:
    lines = [
        f"  jaxformer {name:<9} {usage:<39} {purpose}"
        for name, (usage, purpose) in COMMANDS.items()
    ]
    return "usage:\n" + "\n".join(lines) + "\nEach command prints its options with --help."


def _note(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning without the line of code that raised it."""
    print(f"note: {escaped(str(message))}", file=sys.stderr)
