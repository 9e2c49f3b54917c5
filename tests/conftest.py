"""Every test runs on a CPU, on one device unless it says otherwise, with the shapes of public
functions checked."""

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import sys
import tempfile

# Hundreds of processes import the package: none should have to compile it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["JAX_PLATFORMS"] = "cpu"
CACHE = os.environ.setdefault(
    "JAXFORMER_TEST_CACHE", os.path.join(tempfile.gettempdir(), "jaxformer-test-cache")
)
os.environ.setdefault("JAXFORMER_DATA_CACHE", os.path.join(CACHE, "data"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(CACHE, "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Most of the time goes to the compiler, and these flags take three quarters off it: the code of a
# program is not optimized. The mathematics and what XLA makes of it are the same. `XLA_FLAGS=
# pytest` compiles as a user's process does.
FLAGS = "--xla_backend_optimization_level=0"
# One module of code to a program, where XLA would make up to 32 and compile them in parallel: a
# quarter off a small program, and each worker has a core for itself.
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").split(".")[:2] == ["0", "10"]:
    FLAGS += " --xla_cpu_use_fusion_emitters=false"  # unknown from 0.11.1 on: it ends the process
os.environ.setdefault("XLA_FLAGS", FLAGS)

import hypothesis  # noqa: E402  (the environment above has to be set first)
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

pytest_plugins = ["reliability", "buckets", "faulty_server", "hub_server"]

# No test fails because the machine is slow.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

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
    "standalone",
)
# Files of half a minute and more.
LONGEST = (
    "test_adapter_runs.py",
    "test_benchmarks.py",
    "test_examples.py",
    "test_family_invariants.py",
    "test_fused_kernels.py",
    "test_kills.py",
    "test_lowering.py",
    "test_model_invariants.py",
    "test_not_finite.py",
    "test_quantized.py",
    "test_signals.py",
    "test_streams.py",
    "test_upcycling.py",
    "test_verify_kinds.py",
    "test_virtual_tokens.py",
)
jaxtyped = jaxtyping.jaxtyped


def jaxtyped_outside(**options):
    """`jaxtyping.jaxtyped`, which the import hook calls, but for functions within functions: it
    writes code for each, at every call of the outer one, which took a tenth of the tests' time."""
    decorate = jaxtyped(**options)
    return lambda found: found if "<locals>" in found.__qualname__ else decorate(found)


jaxtyping.jaxtyped = jaxtyped_outside
jaxtyping.install_import_hook(
    [
        *(f"jaxformer.layers.{module}" for module in CHECKED),
        *("jaxformer.models", "jaxformer.losses.cross_entropy"),
    ],
    "beartype.beartype",
)


# What a file that has tests of a mark says: a decorator, or a function that adds the mark.
MARKED = {
    "fast": ("mark.fast",),
    "docs": ("mark.docs",),
    "real": ("mark.real", "MARKS"),
    "slow": ("slow", "covering("),
}


def pytest_ignore_collect(collection_path, config):
    """`pytest -m "MARK or MARK"` imports only the files that have such a test, since the others
    bring PyTorch."""
    marks = config.option.markexpr.split(" or ")
    if not {*marks} <= MARKED.keys() or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return not any(word in text for mark in marks for word in MARKED[mark]) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """One worker runs all tests of a file, so that its fixtures and programs are made once. Tests
    with a group of their own (`xdist_group`) come first: some of these groups take minutes. Then
    come the files that take longest, so that both workers end at about the same time."""
    alone = {item for item in items if item.get_closest_marker("xdist_group")}
    items.sort(key=lambda item: (item not in alone, item.path.name not in LONGEST))
    for item in items:
        if item not in alone:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage has to look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def programs_end_with_their_file():
    """Drops what a test file compiled, once it is done.

    Each program that XLA compiles for a CPU takes several memory maps, of which Linux gives a
    process 65,530: a worker that kept the programs of all files would end in a segmentation fault.
    It would also take 7 GB.
    """
    global before_file
    before_file = resident_bytes()
    yield
    drop_programs()


def pytest_runtest_teardown():
    """The programs of a file of hundreds of tests are dropped before its end too, whenever they
    have taken a gigabyte: such a file alone had 4.2 GB."""
    if resident_bytes() > before_file + 2**30:
        drop_programs()


before_file = 0


def resident_bytes():
    """Of this process; 0 where the system is not Linux."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def drop_programs():
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's own, which else keeps what was freed
        ctypes.CDLL(None).malloc_trim(0)
