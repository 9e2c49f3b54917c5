"""Makes tokenizers: a byte-level BPE trained on texts, the 256 bytes, or the characters of texts.
All deterministic.

`specials` are tokens that an objective needs beside the end token, which they follow.
"""

from collections.abc import Iterable, Sequence

from jaxformer.config import ConfigError
from jaxformer.tokenizer.bpe import train_on
from jaxformer.tokenizer.files import END_OF_TEXT
from jaxformer.tokenizer.pieces import ANY_CHARACTER, byte_characters
from jaxformer.tokenizer.table import byte_level_bpe
from jaxformer.tokenizer.tokenizer import Tokenizer
from jaxformer.tokenizer.words import BLOCK_CHARACTERS


def train_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str] = (), pattern: str = "gpt2"
) -> Tokenizer:
    """A byte-level BPE of texts, each parted by itself: the end token is 0, then `specials`, 256
    bytes, and merges.

    A text too small for `vocab_size` entries gives fewer. Raises ConfigError where the first three
    do not fit in them.
    """
    if vocab_size < 257 + len(specials):
        others = f", and {len(specials)} tokens that the objective needs" * bool(specials)
        raise ConfigError(
            f"tokenizer.vocab_size={vocab_size} must be at least {257 + len(specials)}: "
            f"the 256 bytes and the end of text{others}."
        )
    special_tokens = [END_OF_TEXT, *specials]
    in_blocks = (
        (text[start : start + BLOCK_CHARACTERS] for start in range(0, len(text), BLOCK_CHARACTERS))
        for text in texts
    )
    vocab, merges = train_on(in_blocks, vocab_size, special_tokens, pattern=pattern)
    return Tokenizer(byte_level_bpe(vocab, merges, special_tokens, pattern))


def byte_tokenizer(specials: Sequence[str] = ()) -> Tokenizer:
    """A token for each byte of UTF-8, its id the byte's value, the end token 256, and then
    `specials`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    backend = Backend(
        models.BPE(vocab={char: byte for byte, char in enumerate(byte_characters())}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT, *specials])
    return Tokenizer(backend)


def character_tokenizer(texts: Iterable[str], specials: Sequence[str] = ()) -> Tokenizer:
    """A token for each character of the texts, in the order of code points, then the end token,
    then `specials`."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    # Without an unknown token in the vocabulary the library refuses an unseen character instead of
    # dropping it.
    backend = Backend(
        models.WordLevel(
            vocab={char: index for index, char in enumerate(sorted(alphabet))}, unk_token="<unk>"
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(ANY_CHARACTER), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END_OF_TEXT, *specials])
    return Tokenizer(backend)
