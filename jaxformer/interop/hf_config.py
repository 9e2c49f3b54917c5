"""The keys of a Hugging Face config.json, with a record of those that were read, so that unknown
ones can be reported."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

from jaxformer.files import ConfigError, read_object

# Keys that do not change the logits of any architecture: dropout, initial values, heads that are
# not read, kernels, and what generation and other programs read.
NEUTRAL = """
_name_or_path _attn_implementation _attn_implementation_autoset _from_model_config _commit_hash
architectures model_type auto_map torch_dtype dtype transformers_version use_cache
cache_implementation initializer_range output_attentions output_hidden_states return_dict
chunk_size_feed_forward gradient_checkpointing task_specific_params problem_type finetuning_task
prefix tokenizer_class torchscript bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id
decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens
begin_suppress_tokens max_length min_length do_sample early_stopping num_beams num_beam_groups
diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences output_scores
return_dict_in_generate remove_invalid_values exponential_decay_length_penalty language id2label
label2id num_labels _num_labels is_encoder_decoder use_bfloat16 tf_legacy_loss attention_dropout
hidden_dropout classifier_dropout pretraining_tp layer_types _sliding_window_pattern output_past
n_special predict_special_tokens max_sequence_length is_llama_config transformers.js_config
unsloth_fixed unsloth_version directionality pooler_fc_size pooler_num_attention_heads
pooler_num_fc_layers pooler_size_per_head pooler_type sentence_transformers
sbert_ce_default_activation_function summary_type summary_use_proj summary_activation
summary_proj_to_labels summary_first_dropout summary_last_dropout reorder_and_upcast_attn
attention_softmax_in_fp32 scale_attention_softmax_in_fp32 bias_dropout_fusion
masked_softmax_fusion init_std initializer_factor dropout activation_dropout layerdrop
encoder_layerdrop decoder_layerdrop classifier_dropout_prob classifier_dropout_rate classif_dropout
cls_dropout pooler_dropout qa_dropout seq_classif_dropout output_router_logits
"""
# Keys of any architecture that do, and the values for which nothing is missing here.
QUANTIZATION = "quantization_config"
REQUIRED: dict[str, tuple[Any, ...]] = {
    QUANTIZATION: (None, {}),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": (None, {}),
    "cross_attention_hidden_size": (None,),
}
LARGEST = 2**31 - 1  # number in a config.json
Dtype = Literal["float32", "bfloat16", "float16"]  # of weights that are stored or loaded


@dataclass
class HFConfig:
    """The keys of one config.json; `names` are the tensors beside it, which some settings depend
    on (None: not known, because the files are not there), and `keys_read` the keys that were read
    so far."""

    values: Mapping[str, Any]
    names: Collection[str] | None = ()
    keys_read: set[str] = field(default_factory=set)

    def with_values(self, values: Mapping[str, Any]) -> "HFConfig":
        """Return these keys with other values of some, and the same record of what was read."""
        return replace(self, values={**self.values, **values})

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        value = self.values.get(key, default)
        # A giant number would overflow where it is a width, or make room for it.
        if type(value) is int and abs(value) > LARGEST:
            raise self.unsupported(key, value, [f"-{LARGEST} to {LARGEST}"])
        return value

    def number(self, key: str, default: float | None = None) -> int | float:
        """Return the number of a key. ConfigError for null, for what is none, and where the key is
        missing and has no default."""
        return self.checked_number(key, self.get(key, default))

    def positive(self, key: str, default: float | None = None) -> int | float:
        """Return what `number` does, of one above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.unsupported(key, value, ["a number above 0"])
        return value

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return what `number` does, of a whole one from `least`."""
        value = self.number(key, default)
        if not isinstance(value, int) or value < least:
            raise self.unsupported(key, value, [f"a whole number from {least}"])
        return value

    def checked_number(self, key: str, value: Any) -> int | float:
        """Return `value`, read from a key or from an entry of it. ConfigError where it is no
        number."""
        if type(value) not in (int, float) or not abs(value) < inf:
            raise self.unsupported(key, value, ["a number"])
        return value

    def only(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raise ConfigError where the value of a key is not one of `allowed`, of which the first is
        the default."""
        value = self.get(key, allowed[0])
        # True == 1, but one is not allowed for the other.
        if (value, type(value) is bool) not in [(x, type(x) is bool) for x in allowed]:
            raise self.unsupported(key, value, allowed)

    def flag(self, key: str, default: bool) -> bool:
        self.only(key, (default, not default))
        return bool(self.values.get(key, default))

    def table(self, key: str) -> dict[str, Any]:
        value = self.get(key) or {}
        if not isinstance(value, dict):
            raise self.unsupported(key, value, [None, {"rope_type": "default"}])
        return value

    def unsupported(self, key: str, value: Any, allowed: Collection[Any]) -> ConfigError:
        names = self.values.get("architectures") or [self.values.get("model_type", "this model")]
        return ConfigError(
            f"{key}={json.dumps(value)} is not supported for {names[0]}; supported:"
            f" {', '.join(map(json.dumps, allowed))}."
        )

    def unknown(self) -> list[str]:
        """Return the keys with a value that were not read and are not known to be neutral."""
        neutral = self.keys_read | {*NEUTRAL.split()} | REQUIRED.keys()
        unknown = []
        for key in sorted(self.values.keys() - neutral):
            # A value that is empty or false changes nothing in any version that has the key.
            if self.values[key] not in (None, False, [], {}):
                unknown.append(key)
        return unknown


PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
# Functions of sentence-transformers that stand for one of these.
CLASS_ACTIVATIONS = {"Identity": "regression", "Sigmoid": "multi_label_classification"}


def read_problem_type(values: Mapping[str, Any], path: Path) -> str:
    """Return what the head of classes of a config.json answers, in the words of transformers: one
    class of several, each class for itself, or numbers; empty where it says nothing. ConfigError
    for others."""
    function = values.get("sbert_ce_default_activation_function")
    newer = values.get("sentence_transformers")
    if isinstance(newer, dict):
        function = newer.get("activation_fn") or function
    if function:
        name = str(function).rpartition(".")[2]
        if name not in CLASS_ACTIVATIONS:
            raise ConfigError(
                f"{path} applies {str(function)!r} to the logits of its classes, which is not"
                f" followed; {' and '.join(CLASS_ACTIVATIONS)} are: remove it to see probabilities."
            )
        return CLASS_ACTIVATIONS[name]
    problem_type = values.get("problem_type") or ""
    if problem_type and problem_type not in PROBLEM_TYPES:
        raise ConfigError(
            f"{path} has problem_type={json.dumps(problem_type)[:80]}, which is none of"
            f" {', '.join(PROBLEM_TYPES)}."
        )
    return str(problem_type)


def quantization_method(values: Mapping[str, Any]) -> str:
    """Return the method by which the weights beside a config.json are packed; empty for none."""
    config = values.get(QUANTIZATION)
    if not isinstance(config, dict):
        return ""
    return str(config.get("quant_method", ""))


def check_dtype(name: str) -> None:
    """Raise ConfigError for a dtype in which weights are neither stored nor loaded."""
    if name not in get_args(Dtype):
        raise ConfigError(f"dtype={name!r} is not one of {', '.join(get_args(Dtype))}.")


def read_config_json(directory: Path) -> dict[str, Any]:
    """Return the keys of a directory's config.json."""
    return read_object(directory / "config.json", "download it again")


def is_pretrained(directory: Path) -> bool:
    """Return whether a directory holds a Hugging Face model: by its config.json, or by its weights
    where that is not the config.json of a run."""
    if not (directory / "config.json").is_file():
        return False
    keys = read_config_json(directory).keys()
    if {"model_type", "architectures"} & keys:
        return True
    return "run" not in keys and any(directory.glob("*.safetensors*"))
