"""Settings: the frozen dataclasses of a model and of a run, their rules, and the files that hold
them.

`from jaxformer.config import DataConfig, TrainConfig` is what config files write; `__init__.pyi`
lists the names with their modules.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
