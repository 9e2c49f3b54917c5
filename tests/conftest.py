"""Every test runs on a CPU, on one device unless it says otherwise, with the shapes of public functions checked."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = os.environ.setdefault("JAXFORMER_TEST_CACHE", os.path.join(tempfile.gettempdir(), "jaxformer-test-cache"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(CACHE, "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
