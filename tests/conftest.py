"""Every test runs on a CPU, on one device unless it says otherwise, with the shapes of public
functions checked."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = os.environ.setdefault(
    "JAXFORMER_TEST_CACHE", os.path.join(tempfile.gettempdir(), "jaxformer-test-cache")
)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(CACHE, "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

from jaxtyping import install_import_hook  # noqa: E402  (the environment above has to be set first)

CHECKED = (
    "attention",
    "block",
    "blocked",
    "dot_product",
    "embed",
    "ffn",
    "head",
    "kernels",
    "norm",
    "positions",
)
install_import_hook(
    [*(f"jaxformer.layers.{space}" for space in CHECKED), "jaxformer.models", "jaxformer.losses"],
    "beartype.beartype",
)


def pytest_ignore_collect(collection_path, config):
    """`pytest -m fast` imports only the files that have a fast test, since the others bring
    PyTorch."""
    if config.option.markexpr != "fast" or not collection_path.name.startswith("test_"):
        return None
    return "mark.fast" not in collection_path.read_text(encoding="utf-8") or None
