"""The same tokens through a model here and through transformers on its directory."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from jaxformer.arrays.params import Params
from jaxformer.config.model import ModelConfig
from jaxformer.files import ConfigError
from jaxformer.interop.architectures import read_architecture
from jaxformer.interop.hf_config import read_config_json
from jaxformer.models.transformer import forward

LENGTH = 64  # positions that are compared
# The outputs of transformers that ours are compared with; the first that a model has.
OUTPUTS = ("logits", "prediction_logits", "last_hidden_state")


@dataclass(frozen=True)
class Comparison:
    """The `largest` difference of two logits, and the standard `deviation` of those of
    transformers."""

    largest: float
    deviation: float


def require_transformers() -> None:
    """Raise ConfigError where transformers or PyTorch is not installed."""
    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise ConfigError(
                f"--verify runs the model in transformers too, which needs {name}: pip install"
                " torch transformers, or leave out --verify."
            )


def compare(directory: Path, params: Params, config: ModelConfig) -> Comparison:
    """Compare our logits with those of transformers on `directory`, in float32, on two rows of
    random tokens, one of them padded."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    keys = read_config_json(directory)
    _, architecture = read_architecture(directory / "config.json", keys)
    model = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    if hasattr(model, "set_experts_implementation"):
        # torch's grouped products need widths of whole 16 bytes.
        model.set_experts_implementation("eager")
    padding = keys.get("pad_token_id") or 0
    # tokens and mask [2, T]: random ids but that of padding, which ends the second row.
    ids = np.setdiff1d(np.arange(config.vocab_size), [padding])
    tokens = np.random.default_rng(0).choice(ids, (2, min(LENGTH, config.max_length)))
    mask = np.ones_like(tokens)
    mask[1, tokens.shape[1] * 3 // 4 :] = 0
    tokens = np.where(mask, tokens, padding)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if config.family == "encoder_decoder":
        target = inputs["decoder_input_ids"] = tokens[:, : tokens.shape[1] // 2]
        ours = forward(params, config, target, source=tokens, source_segment_ids=mask)
        mask = np.ones_like(target)
    else:
        ours = forward(params, config, tokens, segment_ids=mask)
    with torch.no_grad():
        outputs = model.eval()(**{name: torch.tensor(array) for name, array in inputs.items()})
    hf = next(outputs[name] for name in OUTPUTS if name in outputs).float().numpy()
    # The one class of ELECTRA's discriminator has no axis there.
    hf = hf.reshape(ours.shape)
    # Of the places [B, T] without padding, or of all classes [B, C] of the rows.
    real = np.ones(len(ours), bool)
    if ours.ndim == 3:
        real = mask.astype(bool)
    difference = np.abs(np.asarray(ours, np.float32) - hf)[real]
    return Comparison(float(difference.max()), float(hf[real].std()))
