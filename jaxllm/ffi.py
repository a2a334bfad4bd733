"""The bridge to CUDA kernels: registers FFI targets, of ``_cuda`` or a library, and calls them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jaxllm import varying

try:
    from jaxllm import _cuda  # type: ignore[attr-defined]

    _import_error = None
except ImportError as error:
    _cuda, _import_error = None, error

_HOW_TO_BUILD = (
    "reinstall jaxllm with nvcc >= 12.3 on the PATH (pip install --force-reinstall --no-deps .)"
)


def _describe_fault(extension: Any, import_error: ImportError | None) -> str | None:
    """Why the extension cannot be used, in a sentence."""
    if extension is None:
        # The package is there, so an ImportError without a cause means that the module is not.
        if isinstance(import_error, ModuleNotFoundError) or "cannot import" in str(import_error):
            return f"the CUDA extension is not built; {_HOW_TO_BUILD}"
        return f"the CUDA extension does not load ({import_error}); {_HOW_TO_BUILD}"
    built, running = extension.build_facts()["jaxlib"], jaxlib.version.__version__
    # XLA runs handlers of older FFI headers and refuses newer ones, late and obscurely.
    if _version(built) > _version(running):
        return (
            f"the CUDA extension was built for jaxlib {built}, newer than the installed {running}; "
            + _HOW_TO_BUILD
        )
    return None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


_fault = _describe_fault(_cuda, _import_error)
if _cuda is not None and _fault is None:
    for _name, _capsule in _cuda.registrations().items():
        jax.ffi.register_ffi_target(_name, _capsule, platform="CUDA")


_loaded: set[str] = set()  # stems of libraries that are not ours


def load(library: str | Path, handlers: Mapping[str, str]) -> None:
    """Registers the FFI handlers of a shared library of your own, for :func:`call`.

    Args:
        library: Its path.
        handlers: The symbol of the handler of each stem, such as
            ``{"softsign_forward": "SoftsignForward"}``.

    Raises:
        OSError: The library does not load.
        AttributeError: It has no such symbol; nothing has been registered then.
        ValueError: A stem is taken, by a kernel of jaxllm or of a library loaded before.
    """
    taken = _loaded | (
        {name.removeprefix("jaxllm_") for name in _cuda.registrations()} if _cuda else set()
    )
    if clash := sorted(taken & handlers.keys()):
        raise ValueError(f"handlers has {clash}, which are registered already; name them otherwise")
    symbols = ctypes.cdll.LoadLibrary(str(library))
    capsules = {stem: jax.ffi.pycapsule(getattr(symbols, name)) for stem, name in handlers.items()}
    for stem, capsule in capsules.items():
        jax.ffi.register_ffi_target(f"jaxllm_{stem}", capsule, platform="CUDA")
    _loaded.update(handlers)


def unavailable_reason(stem: str | None = None) -> str | None:
    """Why the CUDA kernels cannot be called from this process, in a sentence; None if they can.

    Args:
        stem: One kernel; that of a library that was loaded needs nothing of ours. None for ours.
    """
    return None if stem in _loaded else _fault


def is_available() -> bool:
    """Whether the CUDA extension is built and fits the installed jaxlib (not: whether a GPU is)."""
    return _fault is None


def build_facts() -> dict[str, str]:
    """The CUDA version, architectures and jaxlib of the build; empty if there is none."""
    return dict(_cuda.build_facts()) if _cuda is not None else {}


@functools.cache
def no_hopper_reason() -> str | None:
    """Why kernels for Hopper GPUs will not serve this process, in a sentence; None if they will."""
    if "90a" not in build_facts().get("architectures", ""):
        return "the CUDA extension is not built for sm_90a"
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return "this process has no NVIDIA GPU, and the kernel is for Hopper alone"
    if {device.compute_capability for device in devices} != {"9.0"}:
        return "the kernel needs a Hopper GPU (compute capability 9.0)"
    return None


# XLA decodes an attribute by its exact type: a bare Python float would arrive as an f64.
_ATTRIBUTE_TYPES = {
    bool: np.bool_,
    int: np.int64,
    float: np.float32,
    tuple: lambda values: np.array(values, np.float32),
}


def call(
    stem: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *arrays: jax.Array,
    aliases: Mapping[int, int] | None = None,
    **attributes: bool | int | float | tuple[float, ...],
) -> Any:
    """Calls the FFI target ``jaxllm_<stem>``.

    Args:
        stem: The op and direction, such as ``"layer_norm_forward"``.
        results: Shape and dtype of each result, workspaces included.
        *arrays: The operands.
        aliases: For an operand's index the index of the result that is written over it. Both have
            one shape and dtype. XLA copies the operand first where somebody else still needs it.
        **attributes: Static values; int arrives as int64, float as float32, bool as bool, and a
            tuple of floats as a span of float32.

    Under ``jax.vmap`` every operand and result gets the new leading axis, and one call serves the
    whole batch: the handler must understand it. In a ``jax.shard_map`` the results vary along the
    axes along which any operand does.

    Returns:
        A tuple of arrays, one for each entry of ``results``.
    """
    decoded = {name: _ATTRIBUTE_TYPES[type(value)](value) for name, value in attributes.items()}
    out = jax.ffi.ffi_call(
        f"jaxllm_{stem}",
        tuple(results),
        vmap_method="broadcast_all",
        input_output_aliases=dict(aliases or {}),
    )(*varying.alike(arrays), **decoded)
    return varying.vary(out, varying.axes_of(arrays))
