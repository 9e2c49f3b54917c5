"""Makes tokenizers: a byte-level BPE trained on texts, the 256 bytes, or the characters of texts.

All are deterministic. `specials` are the tokens that an objective needs besides the end token;
their ids follow that of the end token.
"""

from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from jaxformer.files import ConfigError
from jaxformer.tokenizer.bpe import train_on
from jaxformer.tokenizer.byte_level import byte_level_backend, byte_level_bpe
from jaxformer.tokenizer.metadata import END_OF_TEXT
from jaxformer.tokenizer.pieces import ANY_CHARACTER, BYTES
from jaxformer.tokenizer.tokenizer import Tokenizer


def train_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, specials: Sequence[str] = (), pattern: str = "gpt2"
) -> Tokenizer:
    """Return a byte-level BPE of texts; no word extends from one text into the next. Ids are the
    end token (0), `specials`, the 256 bytes, and the merges.

    Texts that are too small for `vocab_size` entries give fewer."""
    lowest = 257 + len(specials)
    if vocab_size < lowest:
        raise ConfigError(
            f"tokenizer.vocab_size={vocab_size} must be at least {lowest}: the 256"
            f" bytes, the end of text and {len(specials)} tokens that the objective needs."
        )
    special_tokens = [END_OF_TEXT, *specials]
    each = ([text] for text in texts)
    vocab, merges = train_on(each, vocab_size, special_tokens, pattern=pattern)
    return Tokenizer(byte_level_bpe(vocab, merges, special_tokens, pattern))


def byte_tokenizer(specials: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with a token for each byte of UTF-8, whose id is the byte; then the end
    token, 256, and `specials`."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = byte_level_backend(BYTES, [], words)
    backend.add_special_tokens([END_OF_TEXT, *specials])
    return Tokenizer(backend)


def character_tokenizer(texts: Iterable[str], specials: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with a token for each character of the texts, in the order of code points;
    then the end token and `specials`."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    vocab = {char: index for index, char in enumerate(sorted(alphabet))}
    # The unknown token is not in the vocabulary, so that an unseen character is an error: without
    # one the library drops it.
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(ANY_CHARACTER), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([END_OF_TEXT, *specials])
    return Tokenizer(backend)
