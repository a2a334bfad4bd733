"""What ``jax.export`` asks of a program with kernels: see ``docs/export.md``."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jaxllm.core import ffi
from jaxllm.ops import pallas_call
from jaxllm.ops.attention import xla as attention


def custom_calls() -> tuple[str, ...]:
    """The custom calls that an op may put into a program for a GPU.

    They are the CUDA kernels of this build and of the libraries that :func:`jaxllm.core.ffi.load`
    has loaded, the Pallas kernels, and cuDNN's attention.
    """
    return (*ffi.targets(), pallas_call.TARGET, *attention.TARGETS)


def disabled_checks() -> list[DisabledSafetyCheck]:
    """The safety checks of ``jax.export.export`` that a program with kernels needs disabled.

    JAX refuses to export custom calls that it does not know to be stable. Those of
    :func:`custom_calls` may change from version to version of jaxllm, XLA and cuDNN, so load the
    program with the versions that exported it.

    Example:
        >>> checks = jaxllm.export.disabled_checks()
        >>> exported = jax.export.export(
        ...     jax.jit(fn), platforms=["cpu", "cuda"], disabled_checks=checks
        ... )(*args)
    """
    return [DisabledSafetyCheck.custom_call(target) for target in custom_calls()]
