from . import layers, tokenizer
from .adapters.adapted_params import adapt_specs, adapter_mask
from .adapters.lora import LoRA
from .adapters.low_rank import keyed
from .arrays.mesh import make_mesh
from .arrays.out_of_memory import OutOfMemory
from .checkpoints.saving import Checkpoints
from .config.model import ModelConfig
from .config.records import (
    Attention,
    Embedding,
    Experts,
    Head,
    Latent,
    Recurrent,
    RelativePositions,
    Rope,
)
from .config.run import RunConfig
from .config.settings import with_settings
from .files import ConfigError
from .generation.beam import beam_search
from .generation.decode import generate
from .generation.scores import score
from .generation.speculative import speculate
from .interop.peft_reading import read_adapter
from .interop.peft_writing import save_adapter
from .interop.pretrained import save_pretrained
from .layers.standalone import multi_head_attention, transformer_block
from .losses.cross_entropy import softmax_cross_entropy
from .losses.pairs import reference_log_probs
from .models.adapt import adapt, merge, without_adapters
from .models.quantize import quantize
from .models.text_vectors import embed
from .models.transformer import forward, init, specs
from .models.virtual import PrefixTuning, PromptTuning
from .runs.config import load_config
from .runs.loading import Loaded, load
from .runs.model_files import writing_rules
from .runs.objectives import loss_of
from .runs.train_run import Result, train
from .tools.inspect import attention_maps, attention_masks, inspect, logit_lens
from .training.loop import Diverged, Interrupted, SkipSteps, fit, make_evaluate
from .training.program import Profile
from .training.state import TrainState, init_state
from .training.step import make_step

__all__ = [
    "Attention",
    "Checkpoints",
    "ConfigError",
    "Diverged",
    "Embedding",
    "Experts",
    "Head",
    "Interrupted",
    "Latent",
    "LoRA",
    "Loaded",
    "ModelConfig",
    "OutOfMemory",
    "PrefixTuning",
    "Profile",
    "PromptTuning",
    "Recurrent",
    "RelativePositions",
    "Result",
    "Rope",
    "RunConfig",
    "SkipSteps",
    "TrainState",
    "adapt",
    "adapt_specs",
    "adapter_mask",
    "attention_maps",
    "attention_masks",
    "beam_search",
    "embed",
    "fit",
    "forward",
    "generate",
    "init",
    "init_state",
    "inspect",
    "keyed",
    "layers",
    "load",
    "load_config",
    "logit_lens",
    "loss_of",
    "make_evaluate",
    "make_mesh",
    "make_step",
    "merge",
    "multi_head_attention",
    "quantize",
    "read_adapter",
    "reference_log_probs",
    "save_adapter",
    "save_pretrained",
    "score",
    "softmax_cross_entropy",
    "specs",
    "speculate",
    "tokenizer",
    "train",
    "transformer_block",
    "with_settings",
    "without_adapters",
    "writing_rules",
]
