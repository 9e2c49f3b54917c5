"""A byte-level BPE from its two tables, the bytes of each id and the merges in order, or from
GPT-2's files of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

from jaxformer.files import ConfigError
from jaxformer.tokenizer.metadata import (
    ADDED_FILE,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    add_tokens,
    missing,
    read_optional,
)
from jaxformer.tokenizer.pieces import (
    BYTES,
    byte_characters,
    check_pattern,
    check_special_tokens,
    without_panic,
)
from jaxformer.tokenizer.words import WORD_PATTERNS

MERGES_FILE = "merges.txt"
GPT2_SPECIAL = ("<|endoftext|>",)
MARKED_WORD = "a</w>"  # an entry of vocabularies that mark the end of a word, as CLIP's does
ROBERTA_SPECIAL = ("<s>", "</s>", "<unk>", "<pad>", "<mask>")

# The special tokens of the families that split text as GPT-2 does, by the tokenizer class or the
# model_type that a directory names.
SPECIAL_TOKENS = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj"), GPT2_SPECIAL),
    **dict.fromkeys(("roberta", "bart", "longformer", "led"), ROBERTA_SPECIAL),
}


def byte_level_bpe(
    vocab: dict[int, bytes],
    merges: Sequence[tuple[bytes, bytes]],
    special_tokens: Sequence[str] = (),
    pattern: str = "gpt2",
) -> tokenizers.Tokenizer:
    """Return a tokenizer of the tokenizers library with these ids; special tokens that the
    vocabulary lacks follow its last id."""
    check_pattern(pattern)
    check_special_tokens(special_tokens)
    ids = {entry: index for index, entry in vocab.items()}
    if len(ids) < len(vocab):
        repeated, _ = Counter(vocab.values()).most_common(1)[0]
        raise ConfigError(f"the vocabulary holds {repeated!r} at several ids: an entry has one id.")
    absent = sorted({bytes([byte]) for byte in range(256)} - ids.keys())
    if absent:
        raise ConfigError(
            f"the vocabulary lacks {len(absent)} of the 256 bytes, the first {absent[0]!r}: add"
            " them."
        )
    characters = byte_characters()
    names = {entry: "".join(map(characters.__getitem__, entry)) for entry in ids}
    for name in special_tokens:
        names[name.encode()] = name
        ids.setdefault(name.encode(), max(ids.values()) + 1)
    strings = {names[entry]: index for entry, index in ids.items()}
    named_merges = []
    for number, (first, second) in enumerate(merges):
        if not ids.keys() >= {first, second, first + second}:
            raise ConfigError(
                f"merge {number}, {first!r} and {second!r}: one of them or their sum is not in the"
                " vocabulary."
            )
        named_merges.append((names[first], names[second]))
    if len(strings) < len(ids) or not strings.keys() >= {*map("".join, named_merges)}:
        raise ConfigError(
            f"special_tokens={[*special_tokens]!r}: one is written as an entry is; take another"
            " name."
        )
    words = split_into_words(WORD_PATTERNS[pattern].words)
    backend = byte_level_backend(strings, named_merges, words)
    backend.add_special_tokens([*special_tokens])
    return backend


def gpt2_files(file: Path) -> tuple[dict[str, int], tuple[str, ...], bool] | None:
    """Return the vocabulary of a vocab.json, the special tokens of the model's family, and whether
    a text begins with a space; None where `from_files` does not read it.

    tokenizer_config.json or config.json gives the family; without them it is RoBERTa where the
    vocabulary holds all of its special tokens, else GPT-2."""
    vocab: dict[str, Any] = read_optional(file)
    if not all(type(index) is int and index >= 0 for index in vocab.values()):
        raise ConfigError(f"{file} must be an object from tokens to ids: restore it.")
    settings = read_optional(file.with_name(SETTINGS_FILE))
    family = str(settings.get("tokenizer_class") or "")
    family = family.removesuffix("Fast").removesuffix("Tokenizer").lower()
    if not family:
        guessed = "roberta" if vocab.keys() >= {*ROBERTA_SPECIAL} else "gpt2"
        family = str(read_optional(file.with_name("config.json")).get("model_type") or guessed)
    if family not in SPECIAL_TOKENS or settings.get("add_bos_token"):
        return None
    if not BYTES.keys() <= vocab.keys() or MARKED_WORD in vocab:
        return None
    if not file.with_name(MERGES_FILE).is_file():
        return None
    return vocab, SPECIAL_TOKENS[family], bool(settings.get("add_prefix_space", False))


def from_files(file: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocab.json and the merges.txt beside it, with the special tokens
    and the template that transformers adds for the model's family."""
    files = gpt2_files(file)
    if files is None:
        raise missing(file.with_name(TOKENIZER_FILE))
    vocab, special_tokens, space = files
    merges_file = file.with_name(MERGES_FILE)
    try:
        _, merges = without_panic(models.BPE.read_file, str(file), str(merges_file))
        words = pre_tokenizers.ByteLevel(add_prefix_space=space)
        backend = byte_level_backend(vocab, merges, words)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"{merges_file} holds no merges of entries of {file.name} ({error}): restore the two"
            " files."
        ) from None
    added = file.with_name(ADDED_FILE)
    ids = {index: content for content, index in read_optional(added).items()}
    add_tokens(backend, {"added_tokens_decoder": ids}, added)
    names = [name for name in special_tokens if name in vocab]
    backend.add_special_tokens(names)
    if {"<s>", "</s>"} <= {*names}:
        end = ("</s>", vocab["</s>"])
        start = ("<s>", vocab["<s>"])
        backend.post_processor = processors.RobertaProcessing(
            end, start, trim_offsets=True, add_prefix_space=space
        )
    return backend


def split_into_words(pattern: str, single_digits: bool = False) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer of the words of a regular expression, in bytes; with `single_digits`
    each digit is a word."""
    is_gpt2 = pattern == WORD_PATTERNS["gpt2"].words
    steps: list[pre_tokenizers.PreTokenizer] = []
    if single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if not is_gpt2:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2))
    return pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]


def byte_level_backend(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    words: pre_tokenizers.PreTokenizer,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    """Return a tokenizer of these tables; with `ignore_merges` a word that is a token is one,
    whatever its merges."""
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend
