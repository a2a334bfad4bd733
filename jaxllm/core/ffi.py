"""The bridge to CUDA kernels: registers FFI targets, of ``_cuda`` or a library, and calls them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np

from jaxllm.core import vma

try:
    from jaxllm import _cuda  # type: ignore[attr-defined]

    _import_error = None
except ImportError as error:
    _cuda, _import_error = None, error

_HOW_TO_BUILD = (
    "reinstall jaxllm with nvcc >= 12.3 and a C++ compiler on the PATH "
    "(pip install --force-reinstall --no-deps .)"
)


@dataclasses.dataclass(frozen=True)
class Device:
    """What decides whether a kernel serves a call: facts of a GPU and of the code built for it.

    Attributes:
        capability: The compute capability, 90 for sm_90.
        multiprocessors: The number of SMs that launchers count on.
        shared_bytes: The shared memory that a CTA may take.
        image: The architecture that the extension's code for this GPU was compiled for, such as 80
            where the GPU runs PTX of sm_80; 0 where there is none.
        has_sm90a: Whether that code has the instructions of sm_90a.
        clusters: How many clusters of two CTAs of the row-at-once GEMM run at once; 0 where it does
            not run.
    """

    capability: int
    multiprocessors: int
    shared_bytes: int
    image: int
    has_sm90a: bool
    clusters: int = 0


H100 = Device(
    capability=90,
    multiprocessors=132,
    shared_bytes=227 << 10,
    image=90,
    has_sm90a=True,
    clusters=66,
)

_FACTS = {field.name for field in dataclasses.fields(Device)}


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
    known = extension.device_fact_names() if hasattr(extension, "device_fact_names") else ()
    if _FACTS.difference(known):
        return f"the CUDA extension is older than this version of jaxllm; {_HOW_TO_BUILD}"
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

    In a process without an NVIDIA GPU they can: a program may be compiled for another machine. The
    GPUs are asked for, so JAX's backends are initialized, and ``jax.distributed.initialize`` has to
    come before.

    Args:
        stem: One kernel; that of a library that was loaded needs nothing of ours. None for ours.
    """
    if stem in _loaded:
        return None
    if _fault is not None:
        return _fault
    if reason := _survey()[1]:
        return reason
    gpu = device()
    return _describe_missing_image(gpu) if gpu is not None and gpu.image == 0 else None


def _describe_missing_image(gpu: Device) -> str:
    """Why a GPU of this process has no code in the extension."""
    without = [each for each in devices() if each.image == 0] or [gpu]
    which = "this GPU is" if len(set(devices())) < 2 else "of the GPUs here it has none for"
    names = build_facts().get("architectures", "").split()
    # An architecture without a suffix stands for machine code and PTX.
    code = [f"sm_{name.removesuffix('-real')}" for name in names if not name.endswith("-virtual")]
    ptx = [name.removesuffix("-virtual") for name in names if not name.endswith("-real")]
    code += [f"PTX of compute_{name}" for name in ptx]
    reason = f"the extension has code for {', '.join(code)}; {which} {_names(without)}"
    least = min(each.capability for each in without)
    if any(name.isdecimal() and int(name) <= least for name in ptx):
        reason += f", whose driver is too old for PTX of CUDA {build_facts().get('cuda')}"
    return f"{reason}; reinstall jaxllm on this machine, or with CUDAARCHS for it"


def is_available() -> bool:
    """Whether the CUDA kernels can be called: see :func:`unavailable_reason`."""
    return unavailable_reason() is None


def build_facts() -> dict[str, str]:
    """The CUDA version, architectures and jaxlib of the build; empty if there is none."""
    return dict(_cuda.build_facts()) if _cuda is not None else {}


@functools.cache
def _survey() -> tuple[tuple[Device, ...], str | None]:
    """The GPUs of this process, and why the extension cannot ask for them, if it cannot.

    At import it would be too early: it initializes JAX's backends. JAX keeps those too, so the
    answer stays right. Threads that ask at once both get it.
    """
    if _cuda is None or _fault is not None:
        return (), None
    try:
        local = jax.local_devices(backend="cuda")
    except RuntimeError:  # there is no such backend
        return (), None
    ordinals = [each.local_hardware_id for each in local]
    if None in ordinals:  # a client that does not say: nothing is known
        return (), None
    try:
        found = [_cuda.device_facts(ordinal) for ordinal in ordinals]
    except RuntimeError as error:
        return (), f"the CUDA extension finds no facts of the GPU: {error}"
    return tuple(Device(**{name: each[name] for name in _FACTS}) for each in found), None


def devices() -> tuple[Device, ...]:
    """The NVIDIA GPUs that this process runs programs on, in JAX's order."""
    return _survey()[0]


def compute_capabilities() -> tuple[str, ...]:
    """Those of the NVIDIA GPUs of this process, such as ``"9.0"``; they need no extension."""
    try:
        return tuple(gpu.compute_capability for gpu in jax.devices("cuda"))
    except RuntimeError:  # there is no such backend
        return ()


def device() -> Device | None:
    """The GPU that a call is compiled for; None where this process has none, and nothing is known.

    A program may run on any GPU of the process. Of several it has what all of them have.
    """
    found = set(devices())
    if len(found) < 2:
        return next(iter(found), None)
    return Device(**{name: min(getattr(each, name) for each in found) for name in _FACTS})


def no_hopper_reason() -> str | None:
    """Why kernels for Hopper GPUs will not serve this process, in a sentence; None if they will."""
    gpu = device()
    if gpu is None:
        return "this process has no NVIDIA GPU, and the kernel is for Hopper alone"
    if gpu.capability == 90 and gpu.has_sm90a:
        return None
    if len({each.capability for each in devices()}) > 1:
        return f"this process has GPUs of several kinds, {_names(devices())}, and not only Hopper's"
    if gpu.capability != 90:
        return "the kernel needs a Hopper GPU (compute capability 9.0)"
    return "the CUDA extension is not built for sm_90a"


def runs_hopper_kernels() -> bool:
    """Whether launchers with a kernel for Hopper GPUs will use it in this process."""
    return no_hopper_reason() is None


def _names(gpus: Iterable[Device]) -> str:
    return ", ".join(f"sm_{kind}" for kind in sorted({gpu.capability for gpu in gpus}))


@functools.cache
def shared_needs() -> Mapping[str, int]:
    """The shared memory, in bytes, of kernels that take as much on every GPU, by kernel.

    Launchers take these constants too. It is empty without the extension.
    """
    return types.MappingProxyType({} if _cuda is None or _fault else _cuda.shared_needs())


def shared_memory_reason(kernel: str) -> str | None:
    """Why a kernel of :func:`shared_needs` does not fit into the GPU; None if it does.

    Where the GPU is unknown, or the extension is not built, nothing is known against it.
    """
    gpu, need = device(), shared_needs().get(kernel, 0)
    if gpu is None or need <= gpu.shared_bytes:
        return None
    return (
        f"the kernel takes {need / 1024:.1f} KiB of shared memory; "
        f"this GPU has {gpu.shared_bytes >> 10} KiB for a CTA"
    )


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
    decoded = {name: _attribute(stem, name, value) for name, value in attributes.items()}
    out = jax.ffi.ffi_call(
        f"jaxllm_{stem}",
        tuple(results),
        vmap_method="broadcast_all",
        input_output_aliases=dict(aliases or {}),
    )(*vma.alike(arrays), **decoded)
    return vma.vary(out, vma.axes_of(arrays))


def or_empty(array: jax.Array | None, dtype: Any) -> jax.Array:
    """An optional operand: one without elements stands for none."""
    return jnp.zeros(0, dtype) if array is None else array


def _attribute(stem: str, name: str, value: Any) -> Any:
    if type(value) not in _ATTRIBUTE_TYPES:  # such as a symbolic size
        raise TypeError(f"{name} of {stem} is {value!r}; it must be a number or a tuple of numbers")
    return _ATTRIBUTE_TYPES[type(value)](value)


def targets() -> tuple[str, ...]:
    """The names of the custom calls that programs with CUDA kernels hold, sorted.

    They are those of the extension, if it is built, and of libraries that were loaded. A caller of
    ``jax.export`` disables the check of each: see ``docs/export.md``.
    """
    own = _cuda.registrations() if _cuda is not None else {}
    return tuple(sorted({*own, *(f"jaxllm_{stem}" for stem in _loaded)}))
