"""Which implementation of an op runs: the request, the switch, and the explanation.

A request is one of four names:

* ``"cuda"``: the CUDA kernel, called through XLA's FFI; an error where it cannot serve the call.
* ``"pallas"``: the Pallas-Triton kernel on a GPU, the Pallas interpreter on other devices.
* ``"xla"``: the ``jax.numpy`` reference implementation, anywhere.
* ``"auto"``: on a GPU the first of the op's preference that supports the call, and is not known to
  be slower than one after it, or than what JAX ships for it; on other devices ``xla``.

The innermost request wins: an op's ``backend=`` argument, then :func:`use_backend`, then the
environment variable ``JAXLLM_BACKEND`` (read once, at import; empty counts as unset), then
``"auto"``.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast, get_args

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

Backend = Literal["auto", "cuda", "pallas", "xla"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def use_xla(name: str) -> str:
    """What has forward mode and second derivatives of an op or a stem: the end of an error."""
    of_attention = " (implementation='xla' of jaxllm.nn.dot_product_attention)"
    return f"use backend 'xla'{of_attention if name.startswith('flash_attention') else ''}"


class BackendError(RuntimeError):
    """The backend that was asked for cannot serve the call; the message says why."""


# User contexts are part of jit's cache key: switching the backend between two calls of one jitted
# function retraces it, and switching back finds the first compilation again. A ContextVar or an
# environment variable read at trace time would serve a stale one.
_requested = jax.make_user_context(None)
_recorder = jax.make_user_context(None)
_DEFAULT = os.environ.get("JAXLLM_BACKEND", "").strip() or "auto"


@dataclasses.dataclass(eq=False)
class _Block:
    """A ``with`` block of :func:`use_backend` that is open.

    JAX has one request for each thread, and asyncio's tasks share a thread: so each block knows its
    task, and each task its block.

    Attributes:
        restore: Gives the thread back the request that it had before the block.
        task: The asyncio task that entered the block, if one did.
    """

    restore: contextlib.AbstractContextManager[Any]
    task: asyncio.Task[Any] | None


class _OpenBlocks(threading.local):
    """The open blocks of a thread, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_open = _OpenBlocks()
_block_of_task: contextvars.ContextVar[_Block | None] = contextvars.ContextVar(
    "block", default=None
)


def _check(name: object, source: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}; it must be one of {', '.join(BACKENDS)}")
    return cast(Backend, name)


def resolve(backend: Backend | None = None) -> Backend:
    """The backend that is asked for here and now.

    Args:
        backend: An op's ``backend=`` argument; None defers to the surrounding request.

    Raises:
        BackendError: Another asyncio task of this thread has a :func:`use_backend` block open.
        ValueError: The name is not one of :data:`BACKENDS`.
    """
    if backend is not None:
        return _check(backend, "backend")
    if _open.blocks and _is_of_another_task(_open.blocks[-1]):
        raise BackendError(
            f"another asyncio task of this thread is inside use_backend({_requested.value!r}), "
            "which holds for the whole thread; let no task await inside such a block, or give the "
            "op its backend= argument"
        )
    return _requested.value or _check(_DEFAULT, "the environment variable JAXLLM_BACKEND")


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Asks for a backend for every op that is traced inside the ``with`` block.

    Ops keep the backend that they were traced with: a pullback made inside the block and called
    outside it still runs the kernels of the block.

    The request is the thread's, as JAX's own settings are: other threads do not have it, and all
    asyncio tasks of the thread do. So no task should await inside the block, but for tasks that it
    starts there. While a block is open that another task has entered, an op that is traced, or
    called outside ``jax.jit``, raises an error; a compiled function runs as the innermost open
    block says. Whatever the order in which blocks are left, none leaves its request behind.

    Example:
        >>> with jaxllm.use_backend("pallas"):
        ...     y = jaxllm.ops.layer_norm(x, scale, bias)

    Raises:
        ValueError: The name is not one of :data:`BACKENDS`.
    """
    block = _Block(_requested(_check(backend, "backend")), _current_task())
    block.restore.__enter__()
    _open.blocks.append(block)
    outer = _block_of_task.get()
    _block_of_task.set(block)
    try:
        yield
    finally:
        _block_of_task.set(outer)
        _leave(block)


def _leave(block: _Block) -> None:
    """Gives the thread back its request; the last of overlapping blocks that is left does that."""
    if block not in _open.blocks:
        raise BackendError("use_backend: the block was entered in another thread; leave it there")
    place = _open.blocks.index(block)
    if block is not _open.blocks[-1]:
        inner = _open.blocks[place + 1]
        inner.restore, block.restore = block.restore, inner.restore
    else:
        block.restore.__exit__(None, None, None)
    del _open.blocks[place]


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _is_of_another_task(block: _Block) -> bool:
    """Whether a task is inside a block that neither this one nor the one that started it entered.

    A task that has ended left the block open on purpose, as a cell of a notebook may.
    """
    if block.task is None or block.task is _current_task() or block is _block_of_task.get():
        return False
    return not block.task.done()


@dataclasses.dataclass(frozen=True)
class Call:
    """One op call in a traced function: what runs on a GPU and on other devices, and why.

    Attributes:
        stem: The op and the direction, such as ``"layer_norm_forward"``.
        shapes: The array arguments, such as ``"bf16[8,768] bf16[768] bf16[768]"``.
        on_gpu: The implementation that runs on an NVIDIA GPU.
        fallback: The implementation that runs on any other device.
        rejected: Why each more preferred implementation does not run on the GPU.
        kernels: The FFI calls of a CUDA implementation, without the prefix ``jaxllm_``.
    """

    stem: str
    shapes: str
    on_gpu: str
    fallback: str
    rejected: tuple[tuple[str, str], ...]
    kernels: tuple[str, ...] = ()

    @property
    def implementation(self) -> str:
        """What runs on a GPU, with the names of kernels that are not the op's."""
        if self.kernels in ((), (self.stem,)):
            return self.on_gpu
        return f"{self.on_gpu}: {', '.join(self.kernels)}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The op calls of a traced function, in program order; ``str()`` of it is a table.

    Attributes:
        calls: The calls.
        gathers: What the ops cannot take in shards, and every device gathers: a sentence for each.
    """

    calls: tuple[Call, ...]
    gathers: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("op", "shapes", "on a GPU", "fallback")]
        for call in self.calls:
            rows.append((call.stem, call.shapes, call.implementation, call.fallback))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for i, call in reversed(list(enumerate(self.calls, start=1))):
            lines[i + 1 : i + 1] = [f"    not {name}: {why}" for name, why in call.rejected]
        return "\n".join([*lines, *self.gathers])


_serial = itertools.count()


@contextlib.contextmanager
def record(make_call: Callable[[], Call], name: str) -> Iterator[None]:
    """Names the equations that an op call traces; under :func:`explain`, notes the call as well."""
    calls: dict[int, Call] | None = _recorder.value
    if calls is not None:
        serial = next(_serial)
        calls[serial] = make_call()
        name = f"{name}#{serial}"
    with jax.named_scope(name):
        yield


def unrecorded() -> contextlib.AbstractContextManager[Any]:
    """Op calls inside the ``with`` block have no row in :func:`explain`."""
    return _recorder(None)


# Of every call of explain that is going on. XLA asks for shards in threads of its own.
_gathers: list[dict[str, None]] = []


def note_gather(sentence: str) -> None:
    """Under :func:`explain`, notes that an op gathers an operand."""
    for found in _gathers:
        found[sentence] = None


@contextlib.contextmanager
def _noting_gathers() -> Iterator[dict[str, None]]:
    found: dict[str, None] = {}
    _gathers.append(found)
    try:
        yield found
    finally:
        _gathers.remove(found)


def _is_on_several_devices(x: Any) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, jax.sharding.Sharding) and sharding.num_devices > 1


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Traces ``fn(*args, **kwargs)`` and tells which backend each of its op calls gets, and why.

    Nothing is run, so a machine without a GPU explains what a GPU would run. A call inside
    ``lax.scan`` is listed once; calls that the trace drops are not listed. Where arguments are
    sharded the program is compiled too, because only then XLA has chosen the shardings in between;
    the shapes of calls are those of whole arrays on Auto axes, of shards on Explicit ones.

    In the arguments and in trees of them, arrays and their shapes are traced. All else keeps its
    value, as where ``fn`` is called: a model's config, an option. Numbers that are given by
    position are traced, as by ``jax.jit``, but for a jitted ``fn``, which knows its static ones.
    ``pallas`` names the implementation: in some calls of it, as of empty arrays and of the backward
    of ``cross_entropy``, XLA computes all.

    Example:
        >>> print(jaxllm.explain(jax.grad(loss), params, tokens))
    """
    is_jitted = hasattr(fn, "lower")
    marks = [_traced_leaves(x, numbers=not is_jitted) for x in args]
    marks_by_name = {name: _traced_leaves(x, numbers=False) for name, x in kwargs.items()}
    is_traced = jax.tree.leaves((marks, marks_by_name))
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf, is_one in zip(leaves, is_traced, strict=True) if is_one]

    # Not by static_argnums, which asks for arguments that can be hashed.
    def of_arrays(*traced: Any) -> Any:
        left = iter(traced)
        given = [next(left) if i else leaf for leaf, i in zip(leaves, is_traced, strict=True)]
        positional, named = jax.tree.unflatten(tree, given)
        return fn(*positional, **named)

    calls = _Recorder()
    # A fresh recorder is a fresh jit cache key: every inner jit is traced anew, and seen.
    with _recorder(calls), _noting_gathers() as gathers:
        jaxpr = jax.make_jaxpr(of_arrays)(*arrays)
        if any(map(_is_on_several_devices, arrays)):
            jax.jit(of_arrays).lower(*arrays).compile()
    # A trace visits more than it keeps (a custom_vjp's primal beside its forward rule), so the
    # final program decides, without dead code: an op call is in it where one of its equations is.
    live, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    kernels: dict[int, list[str]] = {}
    for scope, target in _scopes(live):
        serials = [serial for serial in map(int, re.findall(r"#(\d+)", scope)) if serial in calls]
        for serial in serials:
            kernels.setdefault(serial, [])
        if serials and target.startswith("jaxllm_"):
            kernels[serials[-1]].append(target.removeprefix("jaxllm_"))
    listed = (dataclasses.replace(calls[i], kernels=tuple(of)) for i, of in kernels.items())
    return Explanation(tuple(listed), tuple(gathers))


def _traced_leaves(argument: Any, *, numbers: bool) -> Any:
    """Which leaves of an argument are traced: arrays, and of arrays and ``numbers`` alone all."""
    if numbers and all(map(_is_traceable, jax.tree.leaves(argument))):
        return jax.tree.map(_is_traceable, argument)
    return jax.tree.map(_is_array, argument)


def _is_traceable(leaf: Any) -> bool:
    """Whether jit traces a leaf of an argument: an array, its shape or a number."""
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex | np.generic)


def _is_array(leaf: Any) -> bool:
    """Whether a leaf of an argument is an array or its shape, and no type or number of NumPy."""
    if isinstance(leaf, type | np.generic):
        return False
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


class _Recorder(dict):
    """A dict that hashes by identity, as jit's cache key asks."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def _scopes(jaxpr: Jaxpr, outer: str = "") -> Iterator[tuple[str, str]]:
    """The name stack and the FFI target, or "", of every equation in a jaxpr, in order."""
    for equation in jaxpr.eqns:
        scope = f"{outer}/{equation.source_info.name_stack}"
        yield scope, equation.params.get("target_name", "")
        for leaf in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(leaf):
                yield from _scopes(leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf, scope)


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
