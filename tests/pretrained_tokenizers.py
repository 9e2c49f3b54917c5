"""A tokenizer of each kind that published models have, trained on the spot and saved by
transformers; and hard texts."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

transformers.logging.set_verbosity_error()
HOME = tempfile.TemporaryDirectory()

TEXTS = [
    (
        "The quick brown fox jumps over the lazy dog, doesn't it? I'm sure we've seen 's and 're ."
        " Yes !"
    ),
    "Grüße aus Köln: 12,345.67 € für Äpfel\n\tdef f(x):\n        return x_1 + x_2\r\n",
    "你好世界 こんにちは 안녕 مرحبا بالعالم שלום नमस्ते 🙂",
    "the the the cat sat on the mat and that was that , that 's all ; n't",
] * 8
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS = (  # o200k
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "▁"
CLEANED = {"clean_up_tokenization_spaces": True}
SENTENCE = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"}
ALPHABET = sorted({character for text in TEXTS for character in text.replace(" ", SPACE)})

# Texts on which tokenizers differ.
HARD = [
    "", " ", "  \t ", "plain words", " leading", "trailing  ", "a  b   c    d", "tab\there",
    "line\r\nline\n\n\n", "\r",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd "
    "\U0001f1e9\U0001f1ea \u2764\ufe0f 🙂",
    "你好世界こんにちは", "\uff0c\uff01\u3000", "مرحبا بالعالم، كيف الحال؟", "שָׁלוֹם", "नमस्ते दुनिया",
    "e\u0301 \u1e9b\u0323 \ufb01 \u2460 \u212b \u00bd", "zero\u200bwidth\u00a0no-break",
    "a\u0000b", "\ufeffbom",
    "\U0001f9ff\ufffd", "\u2581meta\u2581", "x" * 3000, "don't . I'm , we 've ! n't ' quoted ' ?",
    "1234567 3.14159 x_1", "<0x0A> ##a [unused1] <extra_id_0>", "<S> </S> [cls]",
]  # fmt: skip


def with_names(names: list[str]) -> list[str]:
    """Texts with the names of special tokens in all places."""
    whole = [
        name
        for first in names
        for name in (first, f" {first} ", f"a{first}b", f"a {first} b", f"{first}{first}\n")
    ]
    return [*HARD, *whole, " ".join(names), "".join(names), f"The {names[0]} cat\t{names[-1]}  "]


def bpe(pre: Any, decoder: Any, specials: list[Any], **options: Any) -> Backend:
    backend = Backend(models.BPE(**options))
    backend.pre_tokenizer, backend.decoder = pre, decoder
    alphabet = ALPHABET if options else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def template(backend: Backend, single: str, pair: str | None = None) -> Any:
    names = {part for part in f"{single} {pair or ''}".split() if not part.startswith("$")}
    ids = [
        (name, backend.token_to_id(name)) for name in sorted(name.split(":")[0] for name in names)
    ]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def gpt2() -> tuple[Backend, dict[str, Any]]:
    backend = bpe(
        pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), ["<|endoftext|>"]
    )
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    end = "<|endoftext|>"
    return backend, {"bos_token": end, "eos_token": end, "unk_token": end}


def llama3() -> tuple[Backend, dict[str, Any]]:
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    pre = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"]
    backend = bpe(pre, decoders.ByteLevel(), names)
    ending = template(
        backend, "<|begin_of_text|> $A", "<|begin_of_text|> $A <|begin_of_text|>:1 $B:1"
    )
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ending])
    return backend, {"bos_token": names[0], "eos_token": "<|eot_id|>"} | CLEANED


def split_bytes(pattern: str, names: list[str]) -> Backend:
    """Byte-level pieces within what a pattern splits."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    within = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = bpe(pre_tokenizers.Sequence([split, within]), decoders.ByteLevel(), names)
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def qwen3() -> tuple[Backend, dict[str, Any]]:
    backend = split_bytes(QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.normalizer = normalizers.NFC()
    return backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def gpt_oss() -> tuple[Backend, dict[str, Any]]:
    names = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>"]
    roles = {"bos_token": names[0], "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    return split_bytes(GPT_OSS, names), roles


def llama2() -> tuple[Backend, dict[str, Any]]:
    spaced = [text.replace(" ", SPACE) for text in TEXTS]
    trained = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = dict(initial_alphabet=ALPHABET[:60], limit_alphabet=120)
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=names, show_progress=False, **alphabet
    )
    trained.train_from_iterator(spaced, trainer)
    spec = json.loads(trained.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]  # the bytes are tokens of text
    backend = Backend.from_str(json.dumps(spec))
    backend.pre_tokenizer = None  # type: ignore[assignment]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    whole = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), *whole])
    backend.post_processor = template(backend, "<s> $A", "<s> $A <s>:1 $B:1")
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return backend, roles | {"pad_token": "</s>"}


def bert() -> tuple[Backend, dict[str, Any]]:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=names, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = template(backend, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    roles = {f"{name[1:-1].lower()}_token": name for name in names}
    return backend, roles | CLEANED | {"model_max_length": 512}


def unigram(names: list[str], unknown: str, later: list[str]) -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=names, unk_token=unknown, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(later)
    backend.post_processor = template(backend, "$A </s>", "$A </s> $B </s>")
    return backend


def t5() -> tuple[Backend, dict[str, Any]]:
    sentinels = [f"<extra_id_{index}>" for index in range(10)]
    backend = unigram(["<pad>", "</s>", "<unk>"], "<unk>", sentinels[::-1])
    space = pre_tokenizers.Metaspace()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    roles = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return backend, roles | CLEANED | {"extra_special_tokens": sentinels}


def bart() -> tuple[Backend, dict[str, Any]]:
    mask = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
    names = ["<s>", "<pad>", "</s>", "<unk>", mask]
    backend = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), names)
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    roles = {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": mask}
    return backend, SENTENCE | roles | CLEANED


def marian() -> tuple[Backend, dict[str, Any]]:
    backend = unigram(["</s>", "<unk>"], "<unk>", ["<pad>"])
    return backend, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def mbart() -> tuple[Backend, dict[str, Any]]:
    languages = ["en_XX", "ro_RO"]
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    backend = unigram(names, "<unk>", [*languages, "<mask>"])
    backend.post_processor = template(backend, "$A </s> en_XX", "$A $B </s> en_XX")
    roles = {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return backend, SENTENCE | roles | {"extra_special_tokens": languages}


# What the model's own files say beside the tokenizer's: by name of the token.
MODELS: dict[str, tuple[Callable[[], tuple[Backend, dict[str, Any]]], dict[str, str]]] = {
    "gpt2": (gpt2, {}),
    "llama3": (llama3, {}),
    "llama2": (llama2, {}),
    "qwen3": (qwen3, {}),
    "gpt_oss": (gpt_oss, {}),
    "bert": (bert, {}),
    "t5": (t5, {"decoder_start_token_id": "<pad>"}),
    "bart": (bart, {"decoder_start_token_id": "</s>", "forced_bos_token_id": "<s>"}),
    "mbart": (mbart, {"decoder_start_token_id": "ro_RO"}),
    "marian": (marian, {"decoder_start_token_id": "<pad>", "bos_token_id": "</s>"}),
}


@functools.cache
def saved(kind: str) -> Path:
    """The directory of a tokenizer with its accompanying files, as transformers writes them."""
    make, numbers = MODELS[kind]
    backend, settings = make()
    folder = Path(HOME.name) / kind
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **settings).save_pretrained(
        folder
    )
    ids = {key: backend.token_to_id(token) for key, token in numbers.items()}
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of"} | ids))
    return folder


def copied(folder: Path, target: Path, **settings: Any) -> Path:
    """The files of a directory once more, with other settings in its tokenizer_config.json."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    change(target / "tokenizer_config.json", settings)
    return target


def change(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | settings))
