"""train.deterministic: bitwise equal results of the same program on a GPU, as on other devices.

An H200 with jax 0.11.2 gave two runs of ten steps the same losses and parameters that differ by up
to 3e-5 without it.
"""

import os

from jaxformer.files import ConfigError

OPTION = "--xla_gpu_deterministic_ops"
FLAG = f"{OPTION}=true"
# Without it jax 0.11 and 0.12 do not compile the products of such a program: for an H100 that is
# not there XLA says "Failed to get configs", and on an H200 it ended with an IndexError.
FUSIONS = "--xla_gpu_cudnn_gemm_fusion_level"
FLAGS = (FLAG, f"{FUSIONS}=0")


def require_deterministic() -> None:
    """Adds the flags of deterministic operations to XLA_FLAGS, which XLA reads when its backend
    starts. They have no effect on other devices than GPUs.

    Raises ConfigError where XLA_FLAGS turns them off, and where a GPU has been started without
    them.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    values = [flag for flag in flags if flag.partition("=")[0] == OPTION]
    is_on = bool(values) and values[-1].lower() in (OPTION, FLAG, f"{OPTION}=1")
    if values and not is_on:
        raise ConfigError(
            f"train.deterministic is on, but XLA_FLAGS has {values[-1]}: leave that out of"
            " XLA_FLAGS, or set train.deterministic=False."
        )
    named = {flag.partition("=")[0] for flag in flags}
    missing = [flag for flag in FLAGS if flag.partition("=")[0] not in named]
    if not missing or (is_on and _gpu_has_started()):
        return
    if _gpu_has_started():
        needed = " ".join(FLAGS)
        raise ConfigError(
            f"train.deterministic needs {needed} in XLA_FLAGS before JAX uses the GPU, and this"
            " process has used it already. Start the process anew (restart the kernel of a"
            " notebook), and before the first use of JAX call jf.train, or run"
            f' `import os; os.environ["XLA_FLAGS"] = "{needed}"`.'
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, *missing])


def _gpu_has_started() -> bool:
    """Whether JAX has initialized a GPU in this process."""
    # Imported here, because commands that only plan do not need JAX. The second is not public.
    import jax
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized() and jax.default_backend() == "gpu"
