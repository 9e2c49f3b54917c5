"""EleutherAI's evaluation harness: `lm_eval --model jaxformer --model_args path=DIRECTORY --tasks ...`.

The harness finds only models that are registered, so the command `lm_eval` is ours: it registers `model.JaxformerLM` and
hands over, whatever the model, to the harness's own. `python -m jaxformer.lm_eval` is the same command; from Python,
`import jaxformer.lm_eval.model` registers it.
"""

import sys


def main() -> int:
    """Runs the harness's command line and returns the exit status: 2 for a mistake in config or input, in one message."""
    from jaxformer.config import ConfigError

    try:
        import lm_eval.models  # noqa: F401  (the harness registers its own only while there are no others)
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        print('error: the evaluation harness is not installed: pip install "jaxformer[lm_eval]"', file=sys.stderr)
        return 2
    if "jaxformer" not in model_registry:
        model_registry.register("jaxformer", target="jaxformer.lm_eval.model:JaxformerLM")
    try:
        cli_evaluate()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
