"""The tokenizer in the metadata of a GGUF file: byte-level BPE (`gpt2`), and SentencePiece's BPE
(`llama`), whose merges follow from its vocabulary."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from jaxformer.files import ConfigError
from jaxformer.tokenizer.byte_level import byte_level_backend, split_into_words
from jaxformer.tokenizer.metadata import TokenizerMetadata, spell_spaces
from jaxformer.tokenizer.pieces import BYTES, SPACE, byte_characters, without_panic
from jaxformer.tokenizer.words import WORD_PATTERNS

TokenizerValues = Mapping[str, Any]  # metadata without "tokenizer.ggml."
TOKENIZER_KEYS = "tokenizer.ggml."
TEMPLATE_KEY = "tokenizer.chat_template"
# What llama.cpp's converter takes from generation_config.json, and the names there.
SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}
ARCHITECTURE_KEY = "general.architecture"
# Values of token_type.
CONTROL = 3
USER_DEFINED = 4
# Those of a config.json, and the end of a turn.
GGUF_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}
GEMMA_ARCHITECTURES = ("gemma", "gemma2", "gemma3")

GPT2_WORDS = WORD_PATTERNS["gpt2"].words
LLAMA3_WORDS = WORD_PATTERNS["llama3"].words
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER_CLASS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER_CLASS = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER_CLASS}*{LOWER_CLASS}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER_CLASS}+{LOWER_CLASS}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
# A word that is a token is one, whatever its merges; and BOS begins a text unless the file says
# otherwise, as in llama.cpp.
WHOLE_WORDS = (*LLAMA3, "tekken")
SINGLE_DIGITS = ("smollm", "starcoder")  # each digit is a word
# The pattern of words by `pre`.
PATTERN_OF_PRE = {
    **dict.fromkeys(("gpt-2", *SINGLE_DIGITS), GPT2_WORDS),
    **dict.fromkeys(LLAMA3, LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_WORDS),
    "tekken": TEKKEN_WORDS,
}


def read_gguf(
    metadata: Mapping[str, Any], origin: str
) -> tuple[tokenizers.Tokenizer, TokenizerMetadata]:
    """Return the tokenizer in the metadata of a GGUF file, and what the files beside a
    tokenizer.json would say of it; `origin` names the file in messages."""
    try:
        values = {}
        for key, value in metadata.items():
            if key.startswith(TOKENIZER_KEYS):
                values[key.removeprefix(TOKENIZER_KEYS)] = value
        kind = values.get("model")
        tokens = values.get("tokens")
        if kind not in GGUF_KINDS:
            raise ConfigError(
                f"{origin} has tokenizer.ggml.model={kind!r}; kinds that are read from GGUF are"
                f" {', '.join(GGUF_KINDS)}. Where the same model is a Hugging Face directory, read"
                " that."
            )
        if not isinstance(tokens, list) or len({*tokens}) != len(tokens):
            raise ConfigError(f"{origin} lacks tokenizer.ggml.tokens, or has a token twice in it.")
        # The entries of a tokenizer_config.json.
        settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
        if metadata.get(TEMPLATE_KEY) is not None:
            settings["chat_template"] = metadata[TEMPLATE_KEY]
        ids: dict[str, int] = {}
        for role, name in GGUF_ROLES.items():
            token = values.get(f"{name}_token_id")
            if token is None:
                continue
            if token not in range(len(tokens)):
                raise ConfigError(
                    f"{origin} has {TOKENIZER_KEYS}{name}_token_id={str(token)[:60]}, which is"
                    f" none of its {len(tokens)} tokens."
                )
            ids[role] = token
        ends = [ids[role] for role in ("eos", "eot") if role in ids]
        ids.pop("eot", None)
        for role, token in ids.items():
            settings[f"{role}_token"] = tokens[token]
        begins = kind == "llama" or values.get("pre") in WHOLE_WORDS
        for role, default in {"bos": begins, "eos": False}.items():
            adds = bool(values.get(f"add_{role}_token", default))
            settings[f"add_{role}_token"] = adds and role in ids

        values["architecture"] = metadata.get(ARCHITECTURE_KEY)
        kinds = [operator.index(kind) for kind in values.get("token_type") or [1] * len(tokens)]
        values["token_type"] = kinds
        backend = without_panic(GGUF_KINDS[kind], values, origin)
        # Special tokens, and tokens that are never cut, as the backend matches them in a text.
        vocab = backend.get_vocab()
        special = []
        uncut = []
        for token, token_type in zip(tokens, kinds, strict=True):
            if token_type == CONTROL:
                special.append(token)
            if token_type == USER_DEFINED and token in vocab:
                uncut.append(AddedToken(token, normalized=False))
        special += [tokens[index] for index in ids.values()]
        backend.add_special_tokens(
            [AddedToken(token, normalized=False) for token in dict.fromkeys(special)]
        )
        backend.add_tokens(uncut)

        # The tokens that the file puts before and after a text.
        single = ["$A"]
        pair = ["$B:1"]
        if settings["add_bos_token"]:
            single.insert(0, settings["bos_token"])
            pair.insert(0, f"{settings['bos_token']}:1")
        if settings["add_eos_token"]:
            single.append(settings["eos_token"])
            pair.append(f"{settings['eos_token']}:1")
        if len(single) > 1:
            names = {*single} - {"$A"}
            backend.post_processor = processors.TemplateProcessing(
                single=single,
                pair=single + pair,
                special_tokens=[(name, backend.token_to_id(name)) for name in names],
            )
        rules: dict[str, Any] = {}
        for key, name in SAMPLING_KEYS.items():
            if key in metadata:
                # Of a float32, which is 0.6000000238 for 0.6; a whole number stays one.
                rules[name] = round(metadata[key], 6)
        return backend, TokenizerMetadata(
            settings=settings,
            named_ids=ids,
            ends=tuple(ends),
            rules=rules,
            rules_file=origin,
            template_name=origin,
        )
    except ConfigError:
        raise
    # Of values of a wrong type; and of the tokenizers library, which has no class for its errors.
    except Exception as error:
        raise ConfigError(f"{origin}: its tokenizer cannot be read ({error}).") from None


def _byte_level_bpe(values: TokenizerValues, origin: str) -> tokenizers.Tokenizer:
    """Return a byte-level BPE. A token with a character that stands for no byte is one of text,
    unless it is a special one."""
    spelling = byte_characters()
    vocab = {}
    for index, token in enumerate(values["tokens"]):
        is_special = values["token_type"][index] in (CONTROL, USER_DEFINED)
        if not is_special and not {*token} <= BYTES.keys():
            token = "".join(map(spelling.__getitem__, token.encode()))
        vocab[token] = index
    merges = [tuple(merge.split(" ")) for merge in values.get("merges", ())]
    if not merges:
        raise ConfigError(f"{origin} lacks tokenizer.ggml.merges.")
    name = values.get("pre")
    if name not in PATTERN_OF_PRE:
        raise ConfigError(
            f"{origin} has tokenizer.ggml.pre={name!r}; those that are read from GGUF are"
            f" {', '.join(PATTERN_OF_PRE)}. Where the same model is a Hugging Face directory, read"
            " that."
        )
    words = split_into_words(PATTERN_OF_PRE[name], single_digits=name in SINGLE_DIGITS)
    return byte_level_backend(vocab, merges, words, ignore_merges=name in WHOLE_WORDS)


def _sentencepiece(values: TokenizerValues, origin: str) -> tokenizers.Tokenizer:
    """Return a BPE over characters, with bytes for those that it lacks. The merges of Gemma are in
    the order of the tokens, and the others in that of the scores."""
    is_gemma = values["architecture"] in GEMMA_ARCHITECTURES
    tokens = values["tokens"]
    scores = values.get("scores", [])
    if is_gemma:
        # Runs of spaces, which such a file has as they are.
        tokens = [token if token.strip(" ") else SPACE * len(token) for token in tokens]
        scores = range(0, -len(tokens), -1)
    if len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise ConfigError(f"{origin} has no score for each token in tokenizer.ggml.scores.")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in values.get("merges", ())]
    if not merges:
        # Each way to cut a token into two, the token with the highest score first.
        scored = []
        for token, index in vocab.items():
            pairs = []
            # One cut at a time: those of a long token are as many times as long together.
            for at in range(1, len(token)):
                pair = (token[:at], token[at:])
                if vocab.keys() >= {*pair}:
                    pairs.append(pair)
            pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
            scored += [(scores[index], pair) for pair in pairs]
        scored.sort(key=lambda merge: (merge[0], len(merge[1][0]), len(merge[1][1])), reverse=True)
        merges = [pair for _, pair in scored]
    model = models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True)
    if values.get("unknown_token_id") is not None:
        model.unk_token = tokens[values["unknown_token_id"]]
    backend = tokenizers.Tokenizer(model)
    spell_spaces(backend, not is_gemma and bool(values.get("add_space_prefix", True)))
    if is_gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return backend


GGUF_KINDS: dict[str, Callable[[TokenizerValues, str], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece,
}
