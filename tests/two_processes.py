"""One process of a run of several: `python two_processes.py INDEX COUNT PORT CONFIG
[--section.field value ...]`."""

import sys

import jax


def main() -> int:
    index, count, port, *arguments = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    from jaxformer.cli import main as command

    return command(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main())
