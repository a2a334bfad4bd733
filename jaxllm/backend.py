"""Which implementation of an op runs: the request, the switch, and the explanation.

A request is one of four names:

* ``"cuda"``: the CUDA kernel, called through XLA's FFI; an error where it cannot serve the call.
* ``"pallas"``: the Pallas-Triton kernel on a GPU, the Pallas interpreter elsewhere.
* ``"xla"``: the ``jax.numpy`` definition, anywhere.
* ``"auto"``: on a GPU the first of the op's preference that supports the call, and is not known to
  be slower than one after it, or than what JAX ships for it; elsewhere ``xla``.

The innermost request wins: an op's ``backend=`` argument, then :func:`use_backend`, then the
environment variable ``JAXLLM_BACKEND`` (read once, at import), then ``"auto"``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, cast, get_args

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

Backend = Literal["auto", "cuda", "pallas", "xla"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class BackendError(RuntimeError):
    """The backend that was asked for cannot serve the call; the message says why."""


# User contexts are part of jit's cache key: switching the backend between two calls of one jitted
# function retraces it, and switching back finds the first compilation again. A ContextVar or an
# environment variable read at trace time would serve a stale one.
_requested = jax.make_user_context(None)
_recorder = jax.make_user_context(None)
_DEFAULT = os.environ.get("JAXLLM_BACKEND", "auto")


def _check(name: object, source: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}; it must be one of {', '.join(BACKENDS)}")
    return cast(Backend, name)


def resolve(backend: Backend | None = None) -> Backend:
    """The backend that is asked for here and now.

    Args:
        backend: An op's ``backend=`` argument; None defers to the surrounding request.

    Raises:
        ValueError: The name is not one of :data:`BACKENDS`.
    """
    if backend is not None:
        return _check(backend, "backend")
    return _requested.value or _check(_DEFAULT, "the environment variable JAXLLM_BACKEND")


@contextlib.contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Asks for a backend for every op that is traced inside the ``with`` block.

    Ops keep the backend that they were traced with: a pullback made inside the block and called
    outside it still runs the kernels of the block.

    Example:
        >>> with jaxllm.use_backend("pallas"):
        ...     y = jaxllm.ops.layer_norm(x, scale, bias)

    Raises:
        ValueError: The name is not one of :data:`BACKENDS`.
    """
    with _requested(_check(backend, "backend")):
        yield


@dataclasses.dataclass(frozen=True)
class Call:
    """One op call in a traced function: what it gets on a GPU and elsewhere, and why.

    Attributes:
        stem: The op and the direction, such as ``"layer_norm_forward"``.
        shapes: The array arguments, such as ``"bf16[8,768] bf16[768] bf16[768]"``.
        on_gpu: The implementation that runs on an NVIDIA GPU.
        elsewhere: The implementation that runs on any other device.
        passed_over: Why each more preferred implementation does not run on the GPU.
    """

    stem: str
    shapes: str
    on_gpu: str
    elsewhere: str
    passed_over: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The op calls of a traced function, in program order; ``str()`` of it is a table."""

    calls: tuple[Call, ...]

    def __str__(self) -> str:
        rows = [("op", "shapes", "on a GPU", "elsewhere")]
        rows += [(call.stem, call.shapes, call.on_gpu, call.elsewhere) for call in self.calls]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        for i, call in reversed(list(enumerate(self.calls, start=1))):
            lines[i + 1 : i + 1] = [f"    not {name}: {why}" for name, why in call.passed_over]
        return "\n".join(lines)


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


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Traces ``fn(*args, **kwargs)`` and tells which backend each of its op calls gets, and why.

    Nothing is compiled or run, so a machine without a GPU explains what a GPU would run. A call
    inside ``lax.scan`` is listed once; calls that the trace drops are not listed.

    Example:
        >>> print(jaxllm.explain(jax.grad(loss), params, tokens))
    """
    calls = _Recorder()
    # A fresh recorder is a fresh jit cache key: every inner jit is traced anew, and seen.
    with _recorder(calls):
        jaxpr = jax.make_jaxpr(fn)(*args, **kwargs)
    # A trace visits more than it keeps (a custom_vjp's primal beside its forward rule), so the
    # final program decides: an op call is in it where one of its equations is.
    kept = dict.fromkeys(
        int(serial)
        for scope in _scopes(jaxpr.jaxpr)
        for serial in re.findall(r"#(\d+)", scope)
        if int(serial) in calls
    )
    return Explanation(tuple(calls[serial] for serial in kept))


class _Recorder(dict):
    """A dict that hashes by identity, as jit's cache key asks."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def _scopes(jaxpr: Jaxpr) -> Iterator[str]:
    """The name stack of every equation in a jaxpr and in the jaxprs inside it, in order."""
    for equation in jaxpr.eqns:
        yield str(equation.source_info.name_stack)
        for leaf in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
            if _is_jaxpr(leaf):
                yield from _scopes(leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf)


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
