"""The files beside a tokenizer.json in a Hugging Face directory, which say what its special tokens
are for."""

import contextlib
import json
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILE = "vocab.json"
ADDED_FILE = "added_tokens.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
IDS_FILE = "generation_config.json"

# Special tokens by what they are for, and what published tokenizers call them, the likeliest first.
END_OF_TEXT = "<|endoftext|>"
ROLES = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]"),
    "eos": (
        END_OF_TEXT,
        "<|end_of_text|>",
        "</s>",
        "<eos>",
        "<|eos|>",
        "<|im_end|>",
        "<|eot_id|>",
        "[EOS]",
        "[SEP]",
    ),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "unk": ("<unk>", "[UNK]"),
    "cls": ("[CLS]", "<s>", "<|cls|>"),
    "sep": ("[SEP]", "</s>", "<|sep|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}

# Keys of config.json and generation_config.json, and what the token is for: `start` is what the
# target of an encoder-decoder begins with, `forced` what is then written first.
IDS = {f"{role}_token_id": role for role in ("bos", "eos", "pad")} | {
    "decoder_start_token_id": "start",
    "forced_bos_token_id": "forced",
}

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
EXTRA = ("extra_special_tokens", "additional_special_tokens")

# What tokenizers that have no tokenizer.json are kept in.
OTHER_FORMS = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.spm", "tekken.json")


@dataclass(frozen=True)
class Beside:
    """What the files beside a tokenizer.json say.

    `settings` is tokenizer_config.json; `named` are the ids of the roles that it names a token for,
    `ids` those of roles that a model's own files give by number, `ends` all that these say to end a
    text; `template` is the text of chat_template.jinja.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    named: dict[str, int] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    template: str | None = None

    @classmethod
    def read(cls, folder: Path, backend: "tokenizers.Tokenizer") -> "Beside":
        """The files of a directory, those that are there; the backend learns which of its tokens
        are special.

        Raises ConfigError for a file that is malformed, and for a token that the vocabulary lacks.
        """
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", SETTINGS_FILE):
            found = read_object(folder / name)
            _learn(backend, found, folder / name)
            settings |= {
                key: _typed(value)
                for key, value in found.items()
                if value is not None or key not in settings
            }
        contents = {
            role: _content(value)
            for role in ROLES
            if (value := settings.get(f"{role}_token")) is not None
        }
        named = {
            role: token
            for role, content in contents.items()
            if (token := backend.token_to_id(content)) is not None
        }
        ids: dict[str, list[int]] = {}
        for name in ("config.json", IDS_FILE):
            ids |= _numbers(backend, read_object(folder / name), folder / name)
        first = {role: several[0] for role, several in ids.items()}
        template = folder / TEMPLATE_FILE
        ends = tuple(ids.get("eos", ()))
        return cls(
            settings,
            named,
            first,
            ends,
            template.read_text(encoding="utf-8") if template.is_file() else None,
        )

    def cleans(self, backend: "tokenizers.Tokenizer") -> bool:
        """Whether a decoded text loses the spaces before punctuation: not with BPE, whose spaces
        are those of the text."""
        bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        wanted = bool(self.settings.get("clean_up_tokenization_spaces"))
        return wanted and (type(backend.model).__name__ != "BPE" or bool(self.settings.get(bpe)))


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none. Raises ConfigError for anything
    else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): restore it, or remove it.") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} is no JSON object, but {type(found).__name__}: restore it, or remove it."
        )
    return found


def write_whole(path: Path, text: str) -> None:
    """Writes a file, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def tokenizer_file(path: Path) -> Path:
    """The file that a path to a tokenizer, or to a directory that holds one, means."""
    if not path.is_dir():
        return path
    files = path / TOKENIZER_FILE, path / VOCABULARY_FILE
    return next((file for file in files if file.is_file()), files[0])


def read_backend(file: Path) -> "tokenizers.Tokenizer":
    """The tokenizer of a tokenizer.json. Raises ConfigError."""
    import tokenizers

    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise missing(file) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}): set tokenizer.path to a tokenizer.json."
        ) from None
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{file} is not a tokenizer.json of the tokenizers library ({error}): set"
            " tokenizer.path to one."
        ) from None


def without_tokenizer(folder: Path | str) -> ConfigError:
    """What to say where text is to be read or written, and a model's directory has no
    tokenizer.json."""
    file = Path(folder) / TOKENIZER_FILE
    if _others(file):
        return missing(file)
    return ConfigError(f"{folder} has no {TOKENIZER_FILE}, so there is no text to read or write.")


def _others(file: Path) -> list[str]:
    return sorted({path.name for form in OTHER_FORMS for path in file.parent.glob(form)})


def missing(file: Path) -> ConfigError:
    """What to say where there is no tokenizer.json."""
    others = _others(file)
    if file.name != TOKENIZER_FILE or not others:
        return ConfigError(
            f"{file} does not exist: name a tokenizer.json, a directory of one, or of vocab.json"
            " and merges.txt."
        )
    if any(name.endswith(".spm") for name in others) and "merges.txt" not in others:
        return ConfigError(
            f"{file.parent} has no tokenizer.json, but {', '.join(others)}, which only Marian's own"
            " tokenizer reads: make token ids with that of transformers, and call the model from"
            " Python."
        )
    return ConfigError(
        f"{file.parent} has no tokenizer.json, but {', '.join(others)}: write one with"
        " transformers, "
        f"AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})."
    )


def _learn(backend: "tokenizers.Tokenizer", settings: dict[str, Any], file: Path) -> None:
    """Gives the backend the tokens that a file adds to it or makes special, as transformers
    does."""
    from tokenizers import AddedToken

    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(str(index).isdecimal() for index in listed):
        raise ConfigError(
            f"{file}: added_tokens_decoder is no object from ids to tokens: restore it, or"
            " remove it."
        )
    for index, value in sorted(listed.items(), key=lambda item: int(item[0])):
        where = f"{file}: added_tokens_decoder[{index}]"
        content = _content(value, where)
        flags = {name: bool(value[name]) for name in (*FLAGS, "special") if name in value}
        backend.add_tokens([AddedToken(content, **flags)])
        if backend.token_to_id(content) != int(index):
            raise ConfigError(
                f"{where} is {content!r}, which is token {backend.token_to_id(content)} of"
                " tokenizer.json: the two files do not belong together."
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for where, value in _special(backend, settings, file):
        content = _content(value, where)
        if backend.token_to_id(content) is None:
            raise ConfigError(
                f"{where} is {content!r}, which is not in the vocabulary of tokenizer.json: "
                "name one of its tokens, or add it to its added_tokens."
            )
        if content not in known:
            flags = (
                {name: bool(value[name]) for name in FLAGS if name in value}
                if isinstance(value, dict)
                else {}
            )
            backend.add_tokens([AddedToken(content, special=True, **flags)])


def _is_token(backend: "tokenizers.Tokenizer", value: Any) -> bool:
    """Whether a setting names a token: CodeLlama's fill_token is none, but what its class splits a
    text at."""
    return isinstance(value, str | dict) and backend.token_to_id(_content(value)) is not None


def _special(
    backend: "tokenizers.Tokenizer", settings: dict[str, Any], file: Path
) -> list[tuple[str, Any]]:
    """The special tokens that a file names, each with where it stands."""
    roles = {f"{role}_token" for role in ROLES}
    found = [
        (f"{file}: {key}", value)
        for key, value in settings.items()
        if value is not None
        and (key in roles or (key.endswith("_token") and _is_token(backend, value)))
    ]
    for key in EXTRA:
        more = settings.get(key) or []
        if not isinstance(more, list | dict):
            raise ConfigError(f"{file}: {key} is {more!r}, and must be a list of tokens.")
        entries = more.items() if isinstance(more, dict) else enumerate(more)
        found += [(f"{file}: {key}[{place}]", value) for place, value in entries]
    return found


def _typed(value: Any) -> Any:
    """A value in which tokens that are objects say so, as tokenizer_config.json has it, and
    special_tokens_map.json not."""
    if isinstance(value, list):
        return [_typed(entry) for entry in value]
    return (
        {"__type": "AddedToken"} | value
        if isinstance(value, dict) and "content" in value
        else value
    )


def _content(value: Any, where: str = "") -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise ConfigError(
            f'{where} is {value!r}: a token is its text, or an object with its "content".'
        )
    return content


def _numbers(
    backend: "tokenizers.Tokenizer", found: dict[str, Any], file: Path
) -> dict[str, list[int]]:
    """The roles that a model's file gives by one number or by several; ids without a token are
    padding."""
    ids: dict[str, list[int]] = {}
    for key, role in IDS.items():
        values = found[key] if isinstance(found.get(key), list) else [found.get(key)]
        for value in values:
            if value is not None and type(value) is not int:
                raise ConfigError(
                    f"{file}: {key} is {found[key]!r}, and must be the id of a token."
                )
            if value is not None and value >= 0 and backend.id_to_token(value) is not None:
                ids.setdefault(role, []).append(value)
    return ids
