"""The options of XLA that programs are compiled with, by platform and mesh.

A compiler refuses a program with an option that it does not have, and those for TPUs change with
the version of libtpu: an option is tried first, with a program that does nothing, in some 30 ms.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxformer.arrays.mesh import AnyMesh, replicated
from jaxformer.arrays.sharding import PARAMETERS, platform


class OptionRow(NamedTuple):
    """An option; `applies` takes the platform and the sizes of the axes of the mesh, if any."""

    name: str
    value: int | str
    applies: Callable[[str, Mapping[str, int]], bool]
    effect: str


COMPILER_OPTIONS = (
    # Programs run as fast as with LLVM's third level (1.00 times, 0.90 to 1.09, 14 samples in turn
    # on two cores of an AMD EPYC with AVX-512); a step takes a quarter less time to compile, and
    # the initial values a fifth of the time.
    OptionRow(
        "xla_backend_optimization_level",
        1,
        lambda platform, sizes: platform == "cpu",
        "LLVM's first level",
    ),
    # A windowed product multiplies each piece of a weight while the next one arrives, and adds up
    # its results in bfloat16 in main memory, once a piece. Without that a step of 16 rows of
    # llama3_8b on v5e:4x4 with fsdp 16 moves 423 GiB of main memory a device instead of 922, and
    # takes at least 2,926 ms instead of 3,256 (`benchmarks/compiled.py`; nothing was run).
    OptionRow(
        "xla_tpu_enable_windowed_einsum_for_all_gather",
        "false",
        lambda platform, sizes: (
            platform == "tpu" and any(sizes.get(name, 1) > 1 for name in PARAMETERS["embed"])
        ),
        "weights are gathered before their product, not in pieces during it",
    ),
)


def compiler_options(mesh: AnyMesh | None = None) -> dict[str, int | str]:
    """The options for the devices of a mesh (None: the default device): the rows that apply and
    that its compiler has, except those that XLA_FLAGS or LIBTPU_INIT_ARGS names."""
    return {row.name: row.value for row in rows_for(mesh) if not _is_refused(mesh, row)}


def option_lines(mesh: AnyMesh | None = None) -> list[str]:
    """A line for each of `compiler_options`, and one for each row that the compiler does not
    have."""
    return [
        f"{row.name} is left out: this compiler does not have it"
        if _is_refused(mesh, row)
        else f"{row.name}={row.value} ({row.effect})"
        for row in rows_for(mesh)
    ]


def rows_for(mesh: AnyMesh | None) -> list[OptionRow]:
    """The rows of the table for the devices of a mesh that no variable of the environment names."""
    words = f"{os.environ.get('XLA_FLAGS')} {os.environ.get('LIBTPU_INIT_ARGS')}".split()
    named = {word.lstrip("-").partition("=")[0] for word in words}
    on, sizes = platform(mesh), {} if mesh is None else dict(mesh.shape)
    return [row for row in COMPILER_OPTIONS if row.name not in named and row.applies(on, sizes)]


def _is_refused(mesh: AnyMesh | None, row: OptionRow) -> bool:
    # The compiler for CPUs, which comes with jaxlib, is not asked, and an abstract mesh has none.
    if platform(mesh) == "cpu" or isinstance(mesh, AbstractMesh):
        return False
    return refuses(mesh, row.name, row.value)


@functools.cache
def refuses(mesh: AnyMesh | None, name: str, value: int | str) -> bool:
    """Whether the compiler for the devices of a mesh has no such option."""
    where = None if mesh is None else replicated(mesh)
    try:
        jax.jit(
            lambda: jnp.float32(0), out_shardings=where, compiler_options={name: value}
        ).lower().compile()
    except jax.errors.JaxRuntimeError:
        return True
    return False


def keep_compiled(folder: str, named: bool = False) -> None:
    """Turns on JAX's persistent compilation cache, unless the process has one already or `folder`
    is empty. With `named` the names of scopes are part of the key of a program, so that one from
    the cache has the scopes of this code."""
    if named:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    if folder and not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
