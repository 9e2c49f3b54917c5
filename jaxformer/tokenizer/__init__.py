"""Text to token ids and back: one `Tokenizer`, whether it is trained here, made of bytes or
characters, or read from files.

Names load when they are first used; `__init__.pyi` lists them with their modules.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
