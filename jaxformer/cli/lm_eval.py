"""`jaxformer lm_eval`: the command line of EleutherAI's evaluation harness, with our models."""

from collections.abc import Sequence

from jaxformer.tools.lm_eval import main


def run(argv: Sequence[str]) -> int:
    return main(argv)
