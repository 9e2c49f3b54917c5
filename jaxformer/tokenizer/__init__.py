"""Text to token ids and back: one `Tokenizer`, whether it is trained here, made of bytes or
characters, or read from files."""

from jaxformer.tokenizer.bpe import train_bpe
from jaxformer.tokenizer.files import END_OF_TEXT, MARKS, SENTINELS
from jaxformer.tokenizer.make import byte_tokenizer, character_tokenizer, train_bpe_tokenizer
from jaxformer.tokenizer.tokenizer import Tokenizer

__all__ = [
    "END_OF_TEXT",
    "MARKS",
    "SENTINELS",
    "Tokenizer",
    "byte_tokenizer",
    "character_tokenizer",
    "train_bpe",
    "train_bpe_tokenizer",
]
