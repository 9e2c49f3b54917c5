"""train.deterministic: bitwise equal results of the same program on a GPU, as on other devices.

Without it an H200 with jax 0.11.2 gave ten steps, stopped and continued, the losses of ten steps
and parameters up to 3.4e-5 apart. With its flag in XLA_FLAGS that run ended with an IndexError of
XLA ("raw_hash_map"), in a place that is not known. jax 0.10.2 compiles deterministic steps for an
H100 that is not there; 0.11 and 0.12 refuse to without the device.
"""

import os

from jaxformer.files import ConfigError

OPTION = "--xla_gpu_deterministic_ops"
FLAG = f"{OPTION}=true"


def require_deterministic() -> None:
    """Adds the flag of deterministic operations to XLA_FLAGS, which XLA reads when its backend
    starts. It has no effect on other devices than GPUs."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    values = [flag for flag in flags if flag.partition("=")[0] == OPTION]
    if values and values[-1].lower() in (OPTION, FLAG, f"{OPTION}=1"):
        return
    if values:
        raise ConfigError(
            f"train.deterministic is on, but XLA_FLAGS has {values[-1]}: leave that out of"
            " XLA_FLAGS, or set train.deterministic=False."
        )
    if _gpu_has_started():
        raise ConfigError(
            f"train.deterministic needs {FLAG} in XLA_FLAGS before JAX uses the GPU, and this"
            " process has used it already. Start the process anew (restart the kernel of a"
            " notebook), and before the first use of JAX call jf.train, or run"
            f' `import os; os.environ["XLA_FLAGS"] = "{FLAG}"`.'
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, FLAG])


def _gpu_has_started() -> bool:
    """Whether JAX has initialized a GPU in this process."""
    # Imported here, because commands that only plan do not need JAX. The second is not public.
    import jax
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized() and jax.default_backend() == "gpu"
