"""Makes tokenizers: a byte-level BPE trained on texts, the 256 bytes, or the characters of texts. All deterministic."""

from collections.abc import Iterable

from jaxformer.config import ConfigError
from jaxformer.tokenizer.tokenizer import END_OF_TEXT, Tokenizer


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with GPT-2's pre-tokenizer: the end token is 0, then 256 bytes, then merges up to `vocab_size`.

    A text too small for so many merges gives fewer entries. Raises ConfigError where `vocab_size` is below 257.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise ConfigError(f"tokenizer.vocab_size={vocab_size} must be at least 257: the 256 bytes and the end of text.")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend)


def byte_tokenizer() -> Tokenizer:
    """A token for each byte of UTF-8, its id the byte's value, and the end token 256."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


def character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A token for each character of the texts, in the order of code points, and then the end token."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    # Without an unknown token in the vocabulary the library refuses an unseen character instead of dropping it.
    backend = Backend(
        models.WordLevel(vocab={char: index for index, char in enumerate(sorted(alphabet))}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte: Latin-1's own where it is visible, else the next code point from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]
