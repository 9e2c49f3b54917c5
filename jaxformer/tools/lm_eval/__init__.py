"""EleutherAI's evaluation harness: `jaxformer lm_eval --model jaxformer --model_args path=DIRECTORY
--tasks ...`.

The arguments are those of the harness's own command `lm_eval`, which knows only registered models:
`main` registers `harness_model.JaxformerLM` and calls the harness. In Python, `import
jaxformer.tools.lm_eval.harness_model` registers the model.
"""

import sys
from collections.abc import Sequence

from jaxformer.files import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the harness's command line with `arguments` (default: those of the process).

    Returns the exit status: 2 for a mistake in config or input, after one message.
    """
    try:
        # The harness registers its own models only while there are no others.
        import lm_eval.models  # noqa: F401
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        print(
            'error: the evaluation harness is not installed: pip install "jaxformer[lm_eval]"',
            file=sys.stderr,
        )
        return 2
    if "jaxformer" not in model_registry:
        model_registry.register(
            "jaxformer", target="jaxformer.tools.lm_eval.harness_model:JaxformerLM"
        )
    process_argv = sys.argv
    argv = process_argv[1:] if arguments is None else arguments
    sys.argv = ["jaxformer lm_eval", *argv]  # the harness reads no other arguments
    try:
        cli_evaluate()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        sys.argv = process_argv
    return 0
