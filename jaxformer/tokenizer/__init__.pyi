from .bpe import train_bpe
from .chat import ChatTemplate, set_chat_template
from .metadata import END_OF_TEXT, MARKS, SENTINELS
from .tokenizer import Tokenizer, byte_tokenizer, character_tokenizer, train_bpe_tokenizer

__all__ = [
    "END_OF_TEXT",
    "MARKS",
    "SENTINELS",
    "ChatTemplate",
    "Tokenizer",
    "byte_tokenizer",
    "character_tokenizer",
    "set_chat_template",
    "train_bpe",
    "train_bpe_tokenizer",
]
