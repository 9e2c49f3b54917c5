"""The model class that EleutherAI's evaluation harness makes from `--model_args`. Importing this
file registers it."""

from dataclasses import replace
from typing import Any

from lm_eval.api.registry import register_model

from jaxformer.config.train import Weights
from jaxformer.files import ConfigError, located
from jaxformer.runs.harness import HarnessModel
from jaxformer.runs.loading import load
from jaxformer.tokenizer.metadata import TOKENIZER_FILE, missing

IGNORED = {"device", "max_batch_size"}  # given to every model by the harness
# Those of `HarnessModel`, which has their defaults.
PASSED_ON = ("batch_size", "max_length", "max_gen_toks", "add_bos_token")


@register_model("jaxformer")
class JaxformerLM(HarnessModel):
    """A decoder or an encoder-decoder from a run directory or a Hugging Face directory.

    `step` selects a checkpoint; `dtype` is that of weights and products, "auto" as the config says;
    `weights` are as `jf.load` takes them; the other arguments are those of `HarnessModel`. Raises
    ConfigError for an argument that is unknown or out of range, and for a model that is not a
    language model with a decoder.
    """

    def __init__(
        self,
        path: str = "",
        step: int | None = None,
        dtype: str = "auto",
        weights: Weights = "auto",
        **arguments: Any,
    ) -> None:
        unknown = sorted(arguments.keys() - IGNORED - {*PASSED_ON})
        if not path or unknown:
            raise ConfigError(
                f"--model_args holds {', '.join(unknown) or 'no path'}: the model jaxformer needs"
                " path=DIRECTORY, and takes step, weights, batch_size, max_length, max_gen_toks,"
                " dtype and add_bos_token."
            )
        settings: dict[str, Any] = {} if dtype == "auto" else {"dtype": dtype}
        place = located(path)
        model = load(place, step, weights=weights, **settings)
        if model.tokenizer is None:
            raise missing(place / TOKENIZER_FILE)
        super().__init__(
            replace(model, config=replace(model.config, **settings)),
            str(path),
            **{name: arguments[name] for name in PASSED_ON if name in arguments},
        )
