"""The files of a tokenizer in a Hugging Face directory: their names, and the special tokens and
settings that they give it."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from jaxformer.files import ConfigError, read_object, read_text, write_text
from jaxformer.tokenizer.pieces import SPACE, without_panic

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILE = "vocab.json"
ADDED_FILE = "added_tokens.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
IDS_FILE = "generation_config.json"
# The files that `save` writes.
TOKENIZER_FILES = (TOKENIZER_FILE, SETTINGS_FILE, TEMPLATE_FILE, IDS_FILE)
# Files of tokenizers that have no tokenizer.json.
OTHER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.spm", "tekken.json")

# The roles of special tokens, and their names in published tokenizers, the likeliest first.
END_OF_TEXT = "<|endoftext|>"
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "<|eot_id|>")
ROLES = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "eos": (*ENDS, "[EOS]", "[SEP]"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "unk": ("<unk>", "[UNK]"),
    "cls": ("[CLS]", "<s>", "<|cls|>"),
    "sep": ("[SEP]", "</s>", "<|sep|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}
MARKS = tuple(ROLES[role][0] for role in ("cls", "sep", "mask"))
SENTINELS = tuple(f"<extra_id_{index}>" for index in range(100))

# Keys of config.json and generation_config.json, and the roles of the tokens. The target of an
# encoder-decoder begins with `start`; `forced` is the first token that the decoder then writes.
ID_KEYS = {f"{role}_token_id": role for role in ("bos", "eos", "pad")} | {
    "decoder_start_token_id": "start",
    "forced_bos_token_id": "forced",
}

# Keys of generation_config.json that constrain generated text: those that `generation` follows,
# those that it refuses, and penalties that it leaves out.
RULES_TAKEN = (
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_eos_token_id",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "repetition_penalty",
)
RULES_NOT_TAKEN = (
    "constraints",
    "diversity_penalty",
    "dola_layers",
    "encoder_no_repeat_ngram_size",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "guidance_scale",
    "max_time",
    "penalty_alpha",
    "sequence_bias",
    "stop_strings",
    "token_healing",
    "top_h",
    "typical_p",
    "watermarking_config",
)
PENALTIES = ("encoder_repetition_penalty",)
FACTORS = ("repetition_penalty", "guidance_scale", "typical_p", *PENALTIES)  # 1 changes nothing
# Those that say how a token is drawn, which `jaxformer sample` follows.
DRAWING = ("do_sample", "temperature", "top_k", "top_p", "min_p")

# Classes that read tokenizer.json as it is.
GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
# Keys of BERT's classes: the attribute of the normalizer, and the default.
BERT_KEYS: dict[str, tuple[str, bool | None]] = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
EXTRA = ("extra_special_tokens", "additional_special_tokens")


@dataclass(frozen=True)
class TokenizerMetadata:
    """The content of the files beside a tokenizer.json.

    `settings` is tokenizer_config.json. `named_ids` has the ids of the roles for which it names a
    token, `ids` those of the roles for which the files of the model give an id, and `ends` all ids
    of tokens that end a text by these files. `rules` are what `rules_file` says of generated text
    (`stored_rules`). `template` is the text of chat_template.jinja, and `template_name` its path,
    or another name for messages.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    named_ids: dict[str, int] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    rules: dict[str, Any] = field(default_factory=dict)
    rules_file: str = IDS_FILE
    template: str | None = None
    template_name: str = TEMPLATE_FILE

    @classmethod
    def read(cls, folder: Path, backend: tokenizers.Tokenizer) -> "TokenizerMetadata":
        """Read the files of a directory, as far as they exist, and mark special tokens in the
        backend."""
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", SETTINGS_FILE):
            content = read_optional(folder / name)
            add_tokens(backend, content, folder / name)
            for key, value in content.items():
                # tokenizer_config.json is read last and holds, but its null does not hide what the
                # other file names.
                if value is not None or key not in settings:
                    settings[key] = _typed(value)
        model = read_optional(folder / "config.json")
        # As in transformers: the model's, where the tokenizer's own settings name no class.
        class_name = settings.get("tokenizer_class") or model.get("tokenizer_class")
        _follow_class(backend, settings, str(class_name or model.get("model_type", "")))
        named_ids: dict[str, int] = {}
        for role in ROLES:
            value = settings.get(f"{role}_token")
            if value is not None and (token := backend.token_to_id(_content(value))) is not None:
                named_ids[role] = token
        ids: dict[str, int] = {}
        ends: list[int] = []
        # What generation_config.json says is read last, and so holds.
        for name in ("config.json", IDS_FILE):
            content = read_optional(folder / name)
            for key, role in ID_KEYS.items():
                values = content.get(key)
                if not isinstance(values, list):
                    values = [values]
                tokens: list[int] = []
                for value in values:
                    # Old configs write -1 for no token.
                    if value is None or value == -1:
                        continue
                    if type(value) is not int or not 0 <= value < 2**32:
                        raise ConfigError(
                            f"{folder / name}: {key} is {content[key]!r}, and must be the id of a"
                            " token, at least 0."
                        )
                    # Ids without a token, which pad a vocabulary, are left out.
                    if backend.id_to_token(value) is not None:
                        tokens.append(value)
                if tokens:
                    ids[role] = tokens[0]
                    if role == "eos":
                        ends = tokens
        rules, rules_file = stored_rules(folder)
        template_file = folder / TEMPLATE_FILE
        template = None
        if template_file.exists():
            template = read_text(template_file)
        return cls(
            settings=settings,
            named_ids=named_ids,
            ids=ids,
            ends=tuple(ends),
            rules=rules,
            rules_file=str(rules_file),
            template=template,
            template_name=str(template_file),
        )

    def write(
        self,
        folder: Path,
        special_tokens: dict[str, str],
        ids: dict[str, Any],
        max_length: int | None,
        follow: bool = True,
    ) -> None:
        """Write the files beside a tokenizer.json.

        tokenizer_config.json gets the settings that were read; where these lack them, the names of
        `special_tokens`, by role, and `max_length`. `ids` and the rules are added to an existing
        generation_config.json. `follow` is that of `files.replacing`.
        """
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if max_length is not None:
            settings["model_max_length"] = max_length
        # Versions of transformers that clean up decoded text by default would remove spaces before
        # punctuation that the text has.
        if not self.settings:
            settings["clean_up_tokenization_spaces"] = False
        if "tokenizer_class" not in self.settings:  # which has default special tokens
            settings |= {f"{role}_token": name for role, name in special_tokens.items()}
        _write_json(folder / SETTINGS_FILE, settings | self.settings, follow)
        if self.template is not None:
            write_text(folder / TEMPLATE_FILE, self.template, follow)
        entries = ids | self.rules
        if entries:
            _write_json(folder / IDS_FILE, read_optional(folder / IDS_FILE) | entries, follow)

    def cleans(self, backend: tokenizers.Tokenizer) -> bool:
        """Return whether decoded text loses the spaces before punctuation. With BPE it keeps them,
        since they are those of the text."""
        if not self.settings.get("clean_up_tokenization_spaces"):
            return False
        if type(backend.model).__name__ != "BPE":
            return True
        key = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        return bool(self.settings.get(key))


def stored_rules(folder: Path) -> tuple[dict[str, Any], Path]:
    """Return the constraints of a model's directory on generated text with the keys of `DRAWING`,
    and their file: as in transformers, generation_config.json, or config.json where that does not
    exist."""
    file = folder / IDS_FILE
    if not file.exists():
        file = folder / "config.json"
    values = read_optional(file)
    rules = {}
    for key in (*RULES_TAKEN, *RULES_NOT_TAKEN, *PENALTIES, *DRAWING):
        # Values that constrain nothing.
        neutral: tuple[Any, ...] = (None, 0, [], {})
        if key in FACTORS:
            neutral = (None, 1)
        elif key in DRAWING:  # false and 0 are greedy
            neutral = (None,)
        elif key == "forced_eos_token_id":
            neutral = (None, [])
        if values.get(key) not in neutral:
            rules[key] = values[key]
    return rules, file


def guessed_roles(vocab: dict[str, int]) -> dict[str, int]:
    """Return the ids of the roles that follow from the names of tokens."""
    guessed: dict[str, int] = {}
    for role, names in ROLES.items():
        for name in names:
            if name in vocab:
                guessed[role] = vocab[name]
                break
    return guessed


def read_optional(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty where there is no file."""
    return read_object(path) if path.exists() else {}


def _write_json(path: Path, values: dict[str, Any], follow: bool) -> None:
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n", follow)


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer file of a path, which is that file or its directory."""
    if not path.is_dir():
        return path
    file = path / TOKENIZER_FILE
    vocabulary = path / VOCABULARY_FILE
    if not file.is_file() and vocabulary.is_file():
        return vocabulary
    return file


def read_backend(file: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json."""
    if not file.exists():
        raise missing(file)
    remedy = "set tokenizer.path to a tokenizer.json"
    text = read_text(file, remedy)
    try:
        backend = without_panic(tokenizers.Tokenizer.from_str, text)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{file} is not a tokenizer.json of the tokenizers library ({error}): {remedy}."
        ) from None
    if getattr(backend.model, "dropout", None):
        warnings.warn(
            f"{file}: the BPE dropout of {backend.model.dropout} is left out, so that a text has"
            " the same ids each time.",
            stacklevel=2,
        )
        backend.model.dropout = None
    return backend


def missing(file: Path) -> ConfigError:
    """Return the error for a tokenizer.json that does not exist."""
    others = sorted({path.name for pattern in OTHER_FILES for path in file.parent.glob(pattern)})
    if not others:
        return ConfigError(
            f"{file} does not exist: name a tokenizer.json, a directory of one, or of vocab.json"
            " and merges.txt."
        )
    folder = str(file.parent)
    return ConfigError(
        f"{file} does not exist, but {', '.join(others)}: write one with transformers,"
        f" AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})."
    )


def _follow_class(backend: tokenizers.Tokenizer, settings: dict[str, Any], name: str) -> None:
    """Give the backend what the class `name` of transformers reads from tokenizer_config.json, and
    not from tokenizer.json: how BERT's normalizes a text, and whether one begins with a space."""
    name = name.removesuffix("Fast")
    if not name or name in GENERIC_CLASSES:
        return
    normalizer = backend.normalizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        for key, (attribute, default) in BERT_KEYS.items():
            setattr(normalizer, attribute, settings.get(key, default))
    begins_with_space = settings.get("add_prefix_space")
    if begins_with_space is None:
        return
    if "llama" in name.lower():
        is_sentencepiece = getattr(backend.model, "byte_fallback", False)
        if name == "LlamaTokenizer" and is_sentencepiece and not begins_with_space:
            backend.normalizer = None
            spell_spaces(backend, begins_with_space=False)
        return
    steps: Any = backend.pre_tokenizer
    if not isinstance(steps, pre_tokenizers.Sequence):
        steps = [steps]
    for step in steps:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = bool(begins_with_space)


def spell_spaces(backend: tokenizers.Tokenizer, begins_with_space: bool) -> None:
    """Make a backend spell spaces as SentencePiece does, with one before a text or without."""
    scheme = "never"
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if begins_with_space:
        scheme = "first"
        steps.append(decoders.Strip(" ", 1, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=False)
    backend.decoder = decoders.Sequence(steps)


def add_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any], file: Path) -> None:
    """Add the tokens of a file to the backend, and mark its special tokens, as transformers
    does."""
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(str(index).isdecimal() for index in listed):
        raise ConfigError(
            f"{file}: added_tokens_decoder must be an object from ids to tokens: restore or remove"
            " it."
        )
    for index, value in sorted(listed.items(), key=lambda item: int(item[0])):
        token = _added_token(value, f"{file}: added_tokens_decoder[{index}]")
        backend.add_tokens([token])
        actual = backend.token_to_id(token.content)
        if actual != int(index):
            raise ConfigError(
                f"{file} gives {token.content!r} the id {index}, and the vocabulary beside it"
                f" {actual}: the two files do not belong together."
            )
    special: dict[str, Any] = {}  # by where they are, for messages
    for key, value in settings.items():
        if value is None or not key.endswith("_token"):
            continue
        # Other keys may name no token: CodeLlama's fill_token is where its class splits a text.
        is_role = key.removesuffix("_token") in ROLES
        if not is_role:
            is_token = isinstance(value, str | dict)
            if not is_token or backend.token_to_id(_content(value)) is None:
                continue
        special[f"{file}: {key}"] = value
    for key in EXTRA:
        extra = settings.get(key) or []
        if isinstance(extra, list):
            extra = dict(enumerate(extra))
        if not isinstance(extra, dict):
            raise ConfigError(f"{file}: {key} is {extra!r}, and must be a list of tokens.")
        for name, value in extra.items():
            special[f"{file}: {key}[{name}]"] = value
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for where, value in special.items():
        token = _added_token(value, where, special=True)
        if backend.token_to_id(token.content) is None:
            raise ConfigError(
                f"{where} is {token.content!r}, which is not in the vocabulary of tokenizer.json:"
                " name one of its tokens, or add it to its added_tokens."
            )
        if token.content not in added:
            backend.add_tokens([token])


def _typed(value: Any) -> Any:
    """Return a value in which tokens that are objects have their type, which tokenizer_config.json
    states and special_tokens_map.json does not."""
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    if isinstance(value, dict) and "content" in value:
        return {"__type": "AddedToken"} | value
    return value


def _added_token(value: Any, where: str, special: bool = False) -> tokenizers.AddedToken:
    flags = {}
    if isinstance(value, dict):
        flags = {name: bool(value[name]) for name in FLAGS if name in value}
    if special:
        flags["special"] = True
    return tokenizers.AddedToken(_content(value, where), **flags)


def _content(value: Any, where: str = "") -> str:
    content = value
    if isinstance(value, dict):
        content = value.get("content")
    if not isinstance(content, str):
        raise ConfigError(
            f'{where} is {value!r}: a token is its text, or an object with its "content".'
        )
    return content
