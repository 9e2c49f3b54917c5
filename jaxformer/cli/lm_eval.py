"""`jaxformer lm_eval --model jaxformer --model_args path=DIRECTORY --tasks ...`: EleutherAI's
evaluation harness, with our models.

The arguments are those of the harness's own command `lm_eval`, which knows only registered models.
"""

import sys
from collections.abc import Sequence

from jaxformer.files import ConfigError

MODEL = "jaxformer.runs.harness:JaxformerLM"


def run(argv: Sequence[str]) -> int:
    """Register the model and run the harness's command line."""
    try:
        # The harness registers its own models only while there are no others.
        import lm_eval.models  # noqa: F401
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError(
            'the evaluation harness is not installed: pip install "jaxformer[lm_eval]".'
        ) from None
    if "jaxformer" not in model_registry:
        model_registry.register("jaxformer", target=MODEL)
    process_argv = sys.argv
    sys.argv = ["jaxformer lm_eval", *argv]  # the harness reads no other arguments
    try:
        cli_evaluate()
    finally:
        sys.argv = process_argv
    return 0
