"""Private parts of JAX are imported in one place, which says so where a version lacks them."""

from pathlib import Path

import pytest

import jaxformer
from jaxformer.arrays.private_jax import private
from jaxformer.files import ConfigError


def test_what_a_version_of_jax_lacks_is_named():
    with pytest.raises(ConfigError, match=r"^a test needs jax\._src\.clusters\.None_, which jax"):
        private("clusters.None_", "a test")
    with pytest.raises(ConfigError, match=r"jax\._src\.no_module.*jax>=0\.10\.1"):
        private("no_module", "a test")


def test_one_file_imports_private_parts_of_jax():
    package = Path(jaxformer.__file__).parent
    files = [path for path in package.rglob("*.py") if "jax._src" in path.read_text()]
    assert [path.name for path in files] == ["private_jax.py"]
