"""jaxformer: transformers as pure functions in JAX.

Names load when they are first used, so `import jaxformer` costs next to nothing over `import jax`.
`__init__.pyi` lists them with their modules.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
