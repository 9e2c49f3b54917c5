"""The files of a model: a run directory, a Hugging Face directory, a GGUF file, or an adapter; and
the rules on texts that they state."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, RunSettings, TokenizerConfig
from jaxformer.files import ConfigError, located
from jaxformer.interop.gguf_files import is_gguf
from jaxformer.interop.hf_config import is_pretrained
from jaxformer.interop.peft_config import find_base, is_adapter
from jaxformer.runs.directory import RunDirectory
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import (
    PENALTIES,
    RULES_NOT_TAKEN,
    read_optional,
    stored_rules,
    tokenizer_file,
)

if TYPE_CHECKING:
    from jaxformer.interop.pretrained import Opened

# The longest row when a model directory is evaluated, which does not say how it was trained.
MOST_EVALUATION_TOKENS = 1024
# The words of messages for what is no run.
KIND_NAMES = {"adapter": "adapter", "gguf": "GGUF file", "pretrained": "Hugging Face directory"}


class ModelFiles:
    """What the files of a model say of it. Each is read once, when it is first asked for.

    Args:
      path: a run directory, a Hugging Face directory, a GGUF file, the directory of an adapter of
        peft, or the URL of one of these.
      weights: whether the weights of a Hugging Face directory have to be there. Without them its
        config.json says what the model is.
    """

    def __init__(self, path: str | Path, weights: bool = True) -> None:
        self.path = located(path)
        self.weights = weights

    def __str__(self) -> str:
        return str(self.path)

    @functools.cached_property
    def kind(self) -> Literal["run", "pretrained", "gguf", "adapter"]:
        """What the path leads to. Raises ConfigError where that is no model."""
        # In this order: the directory of an adapter may hold a config.json too, and that of a run
        # is told from one of Hugging Face by its keys (`is_pretrained`).
        if is_adapter(self.path):
            return "adapter"
        if is_gguf(self.path):
            return "gguf"
        if is_pretrained(self.path):
            return "pretrained"
        if (self.path / "config.json").is_file():
            return "run"
        hub = ""
        if not self.path.exists():
            # The name of a model of the hub is no path here.
            hub = f" (hf download {self} --local-dir DIRECTORY gets one)"
        raise ConfigError(
            f"{self} has no config.json: give the run.dir of a training run, the directory of a"
            f" Hugging Face model or of an adapter, or a GGUF file{hub}."
        )

    @functools.cached_property
    def run(self) -> RunConfig:
        """The settings of a run, or those with which another model is evaluated."""
        if self.kind == "run":
            return RunDirectory(self.path).read_run()
        model = self.config
        length = min(model.max_length, MOST_EVALUATION_TOKENS)
        data = DataConfig(train="", sequence_length=length)
        if model.family == "encoder_decoder":
            data = dataclasses.replace(data, objective="seq2seq")
        return RunConfig(
            run=RunSettings(dir=str(self)),
            model=model,
            data=data,
            tokenizer=TokenizerConfig(path=str(self.tokenizer)),
        )

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The config of the model, with its adapter where there is one."""
        if self.kind == "run":
            return self.run.model
        if self.kind == "adapter":
            from jaxformer.interop.peft_reading import adapted_config

            return adapted_config(self.path, self.below.config)
        if self.kind == "pretrained" and not self.weights:
            from jaxformer.interop.pretrained import pretrained_config

            return pretrained_config(self.path)
        return self.opened.config

    @functools.cached_property
    def opened(self) -> "Opened":
        """A Hugging Face directory or a GGUF file before a tensor is read."""
        # Imported here, as all readers of other formats, because a run needs none of them.
        from jaxformer.interop.pretrained import open_pretrained

        return open_pretrained(self.path)

    @functools.cached_property
    def below(self) -> "ModelFiles":
        """The model that an adapter names as its base."""
        return ModelFiles(find_base(self.path), self.weights)

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """What the data.json of a run holds."""
        return RunDirectory(self.path).record()

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes or tags in the order of their numbers; empty where the model has
        or names none."""
        if self.kind == "run":
            return tuple(self.record.get("labels", ()))
        if self.kind != "adapter":
            return self.opened.labels
        # An adapter with a head of its own does not name the classes of that.
        if self.config != self.below.config:
            return ()
        return self.below.labels

    @property
    def has_adapter(self) -> bool:
        """Whether this is an adapter, or a run with one."""
        if self.kind == "run":
            return self.run.adapter.kind != "none"
        return self.kind == "adapter"

    @property
    def lacks_weights(self) -> bool:
        """Whether this is a Hugging Face directory, or an adapter over one, without weights."""
        if self.kind == "adapter":
            return self.below.lacks_weights
        from jaxformer.interop.tensor_files import has_tensors

        return self.kind == "pretrained" and not has_tensors(self.path)

    def or_begun(self, settings: RunSettings) -> "ModelFiles":
        """Return the files in which a run over this model finds its config and its tokenizer: its
        own if it was begun already, else these."""
        own = ModelFiles(settings.dir)
        if not settings.restart and (own.path / "config.json").is_file():
            return own
        return self

    def with_tokenizer(self, settings: TokenizerConfig) -> TokenizerConfig:
        """Return `settings` with the tokenizer of this model if they name none."""
        if settings.path:
            return settings
        return dataclasses.replace(settings, path=str(self.tokenizer))

    @property
    def tokenizer(self) -> Path:
        """The file of its tokenizer, which may be missing; that of the base for an adapter that has
        none."""
        file = tokenizer_file(self.path)
        if self.kind == "adapter" and not file.is_file():
            return self.below.tokenizer
        return file


def writing_rules(model: Tokenizer | str | Path) -> dict[str, Any]:
    """The rules on the texts of a model that its files state, as keywords of `jf.generate` and of
    `jf.beam_search`; `model` is its tokenizer, or its directory where that has no tokenizer.json.

    These are end_token, vocab_size (of a tokenizer) and what generation_config.json states of
    suppress_tokens (with the bad_words_ids of one token), bad_words (the longer ones),
    begin_suppress_tokens, min_length, min_new_tokens, no_repeat_ngram_size, forced_eos_token_id and
    repetition_penalty. How a token is drawn (do_sample, temperature, top_k, top_p, min_p) is not
    among them: beams have no such rules, and `jaxformer sample` reads them itself. Without that
    file those of config.json hold, as in transformers. A
    forced_bos_token_id belongs to the prompt of an encoder-decoder, behind the start token, where
    `Tokenizer.as_target` has it. Raises ConfigError for a rule that is not supported
    (encoder_no_repeat_ngram_size, sequence_bias and others) or is malformed.
    """
    if isinstance(model, Tokenizer):
        ends = model.end_tokens
        metadata = model.metadata
        forced = model.forced_token is not None
        rules = text_rules(metadata.rules, ends, forced, metadata.rules_file)
        return {"end_token": ends, "vocab_size": model.vocab_size} | rules
    stored, file = stored_rules(ModelFiles(model).path)
    values = read_optional(file)
    ends = _ids(values, "eos_token_id", str(file))
    forced = values.get("forced_bos_token_id") is not None
    return {"end_token": ends} | text_rules(stored, ends, forced, str(file))


def text_rules(
    stored: Mapping[str, Any], ends: Iterable[int], has_forced_token: bool, file: str
) -> dict[str, Any]:
    """The stored rules as keywords of `jf.generate`, where `ends` are the end tokens.

    With a forced token the prompt of a target has one token more, which transformers counts as a
    new one.
    """
    for key in RULES_NOT_TAKEN:
        if key in stored:
            raise ConfigError(
                f"{file}: {key} has {str(stored[key])[:80]}, which is not followed here when a text"
                " is written: generate with transformers, or remove it there to write without it."
            )
    penalties = [f"{key}={stored[key]}" for key in PENALTIES if key in stored]
    if penalties:
        warnings.warn(
            f"{file} has {', '.join(penalties)}, which jaxformer does not apply: its texts may"
            " repeat more than those of transformers.",
            stacklevel=4,
        )
    suppressed = [*_ids(stored, "suppress_tokens", file)]
    words = list[tuple[int, ...]]()
    listed = stored.get("bad_words_ids", [])
    if not isinstance(listed, list) or not all(isinstance(word, list) and word for word in listed):
        raise _malformed(file, "bad_words_ids", listed, "a list of lists of token ids")
    for ids in listed:
        word = _ids({"bad_words_ids": ids}, "bad_words_ids", file)
        if len(word) > 1:
            words.append(word)
        elif word[0] not in ends:
            # An end token is no bad word, as in transformers.
            suppressed.append(word[0])
    rules: dict[str, Any] = {
        "suppress_tokens": tuple(dict.fromkeys(suppressed)),
        "bad_words": tuple(words),
        "begin_suppress_tokens": _ids(stored, "begin_suppress_tokens", file),
        "forced_eos_token_id": _ids(stored, "forced_eos_token_id", file) or None,
    }
    for key in ("min_length", "min_new_tokens", "no_repeat_ngram_size"):
        rules[key] = stored.get(key, 0)
        if type(rules[key]) is not int or rules[key] < 0:
            raise _malformed(file, key, stored[key], "a whole number, at least 0")
    penalty = stored.get("repetition_penalty")
    if penalty is not None:
        if not isinstance(penalty, int | float) or not 0 < penalty < math.inf:
            raise _malformed(file, "repetition_penalty", penalty, "a number above 0")
        rules["repetition_penalty"] = float(penalty)
    if has_forced_token:
        rules["min_new_tokens"] = max(0, rules["min_new_tokens"] - 1)
    return {key: value for key, value in rules.items() if value not in ((), None, 0)}


def _ids(stored: Mapping[str, Any], key: str, file: str) -> tuple[int, ...]:
    """The token ids of a key, which has one id, a list of them or None."""
    value = stored.get(key)
    if value is None:
        return ()
    ids = value
    if not isinstance(value, list):
        ids = [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise _malformed(file, key, value, "token ids, at least 0")
    return tuple(ids)


def _malformed(file: str, key: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{file}: {key} is {str(value)[:80]}, and must be {allowed}.")
