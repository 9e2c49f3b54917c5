"""The options of XLA that programs are compiled with, by platform and mesh.

A compiler refuses a program with an option that it does not have, and those for TPUs change with
the version of libtpu: an option is tried first, with a program that does nothing, in some 30 ms.
"""

import functools
import os

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxformer.arrays.mesh import AnyMesh, replicated
from jaxformer.arrays.sharding import PARAMETERS, platform
from jaxformer.files import ConfigError

# What makes a program for a GPU the same from start to start: no kernel that adds in no fixed
# order, and none that is selected by its time. XLA's own xla_gpu_deterministic_ops ended with an
# IndexError on an H200 (jax 0.11.2). Products are then cuBLASLt's, which chooses by their shapes:
# kernels of Triton would have the tiles that XLA starts to measure with, such as 16 x 8.
DETERMINISTIC = {
    "xla_gpu_exclude_nondeterministic_ops": True,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}


def wanted_options(
    mesh: AnyMesh | None = None, deterministic: bool = False
) -> dict[str, int | str]:
    """Return the options for the devices of a mesh (None: the default device), except those that
    XLA_FLAGS or LIBTPU_INIT_ARGS names."""
    on = platform(mesh)
    options = dict[str, int | str]()
    if on == "cpu":
        # LLVM's first level. Programs run as fast as with the third one (1.00 times, 0.90 to 1.09,
        # 14 samples in turn on two cores of an AMD EPYC with AVX-512); a step takes a quarter less
        # time to compile, and the initial values a fifth of the time.
        options["xla_backend_optimization_level"] = 1
    sizes = {} if mesh is None else mesh.shape
    if on == "tpu" and any(sizes.get(name, 1) > 1 for name in PARAMETERS["embed"]):
        # Weights are gathered before their product, not in pieces during it. A windowed product
        # multiplies each piece of a weight while the next one arrives, and adds up its results in
        # bfloat16 in main memory, once a piece. Without that a step of 16 rows of llama3_8b on
        # v5e:4x4 with fsdp 16 moves 423 GiB of main memory a device instead of 922, and takes at
        # least 2,926 ms instead of 3,256 (`benchmarks/compiled.py`; nothing was run).
        options["xla_tpu_enable_windowed_einsum_for_all_gather"] = "false"
    if on == "gpu" and deterministic:
        options |= DETERMINISTIC
    # What a user asks for by the environment is left to it.
    words = f"{os.environ.get('XLA_FLAGS')} {os.environ.get('LIBTPU_INIT_ARGS')}".split()
    named = {word.lstrip("-").partition("=")[0] for word in words}
    return {name: value for name, value in options.items() if name not in named}


def compiler_options(
    mesh: AnyMesh | None = None, deterministic: bool = False
) -> dict[str, int | str]:
    """Return those of `wanted_options` that the compiler for the devices has. Raises ConfigError
    where it lacks one of a deterministic program."""
    options = wanted_options(mesh, deterministic)
    # The compiler for CPUs, which comes with jaxlib, is not asked, and an abstract mesh has none.
    if platform(mesh) == "cpu" or isinstance(mesh, AbstractMesh):
        return options
    refused = {name for name, value in options.items() if refuses(mesh, name, value)}
    if missing := sorted(refused & DETERMINISTIC.keys()):
        raise ConfigError(
            f"train.deterministic needs {' and '.join(missing)}, which this version of XLA does not"
            " have: set train.deterministic=False, or install another version of jax."
        )
    return {name: value for name, value in options.items() if name not in refused}


@functools.cache
def refuses(mesh: AnyMesh | None, name: str, value: int | str) -> bool:
    """Return whether the compiler for the devices of a mesh has no such option."""
    where = None
    if mesh is not None:
        where = replicated(mesh)
    try:
        jax.jit(
            lambda: jnp.float32(0), out_shardings=where, compiler_options={name: value}
        ).lower().compile()
    except jax.errors.JaxRuntimeError:
        return True
    return False


def keep_compiled(folder: str, named: bool = False) -> None:
    """Turn on JAX's persistent compilation cache, unless the process has one already or `folder`
    is empty. With `named` the names of scopes are part of the key of a program, so that one from
    the cache has the scopes of this code."""
    if named:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if folder and not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
