"""The one place where an op and a backend become a function.

The implementations of an op are plain functions in the modules of its family. All have one contract
and one name, the stem: ``layer_norm_forward`` and ``layer_norm_backward``, or ``matvec`` where the
op has no derivative. Beside an implementation of a stem stand

* ``<stem>_unsupported(*arrays, **static)``, which says in a sentence why the implementation cannot
  serve a call, or returns None;
* ``<stem>_slower``, likewise: why ``auto`` prefers the backends after it.

Both get the arrays of their stem. ``<op>_unsupported`` and ``<op>_slower`` stand for the forward.

An op with ``parts`` is a fusion. Where its CUDA kernel serves a call, that kernel runs. Otherwise
``parts`` runs, a function that dispatches other ops: nothing falls back without a row in
:func:`jaxllm.explain` and its reason.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxllm.core import ffi, partition, promotion, shards, vma
from jaxllm.core.backend import Backend, BackendError, Call, record, unrecorded, use_xla
from jaxllm.core.derivatives import without_derivative
from jaxllm.core.layout import pack_like, unpack
from jaxllm.core.sharding_rule import WHOLE, ShardingRule

Implementation = ModuleType | type  # a module of functions, or a class of static ones


class Direction(enum.Enum):
    """Which function of an op a call is; the value ends the stem."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = ""  # the one function of an op without a derivative of its own


@dataclasses.dataclass(frozen=True)
class Op:
    """The implementations of one op.

    Attributes:
        name: The stem of every name that belongs to the op, such as ``"layer_norm"``.
        reference: The ``jax.numpy`` reference implementation: the ``xla`` backend. With ``parts``
            it stands for the kernel on other devices; None where the parts compute the same.
        xla: What JAX itself ships for a GPU that beats the reference there, if anything.
        pallas: The Pallas-Triton kernels, if there are any.
        cuda: The FFI calls to the CUDA kernels, if there are any.
        preference: What ``auto`` tries on a GPU, in order.
        parts: Of a fusion: ``parts(backend, *arrays, **static)``, which dispatches other ops.
        sharding: How it may be sharded where it is dispatched by itself and not in the forward or
            backward of an op: a rule, or a function of arrays and options that returns one. None
            where each device must compute all of it.
        no_derivative: Why JAX must not differentiate the reference implementation; None if it may.
    """

    name: str
    reference: Implementation | None = None
    xla: Implementation | None = None
    pallas: Implementation | None = None
    cuda: Implementation | None = None
    preference: tuple[Backend, ...] = ("cuda", "pallas", "xla")
    parts: Callable[..., Any] | None = None
    sharding: ShardingRule | Callable[..., ShardingRule] | None = None
    no_derivative: str | None = None

    def stem(self, direction: Direction) -> str:
        """The name of an implementation, such as ``"layer_norm_forward"``."""
        return f"{self.name}_{direction.value}" if direction.value else self.name


def dispatch(op: Op, direction: Direction, backend: Backend, *arrays: Any, **static: Any) -> Any:
    """Runs one direction of an op on the implementation that the backend asks for.

    The platform of the program is known at lowering only. So both the GPU's implementation and the
    one for other devices are traced, and ``jax.lax.platform_dependent`` keeps the right one.

    Args:
        op: The op.
        direction: Forward, backward, or the one direction of an op without a derivative.
        backend: A resolved backend.
        *arrays: The implementation's array arguments, or tuples of them; None stands for an absent
            one.
        **static: The implementation's options; hashable.

    Raises:
        BackendError: The backend was asked for by name and cannot serve the call; or, where it is
            differentiated, a kernel was to serve it.
    """
    stem = op.stem(direction)
    arrays = jax.tree.map(jnp.asarray, arrays)  # NumPy's too, in the dtypes that JAX has for them
    if partition.is_wanted(arrays):
        options = tuple(static.items())
        rule = op.sharding or WHOLE
        rule = rule(*arrays, **static) if callable(rule) else rule
        function = shards.Function(_dispatch_shard, (op, direction, backend, options))
        return partition.run(function, op.name, rule, arrays, is_opaque=backend != "xla")
    # In a shard_map all of one type, so that the results' types do not depend on the backend.
    arrays = vma.alike(arrays)
    on_gpu, rejected = _choose(op, stem, backend, arrays, static)
    fallback = {"auto": "xla", "pallas": "pallas-interpreter"}.get(backend, backend)
    if on_gpu == PARTS:
        fallback = PARTS

    def call() -> Call:
        return Call(
            stem=stem,
            shapes=" ".join(describe(array) for array in arrays if array is not None),
            on_gpu=on_gpu,
            fallback="error: needs a GPU" if fallback == "cuda" else fallback,
            rejected=rejected,
        )

    with record(call, f"{stem}[{on_gpu}]"), promotion.defaults():
        if on_gpu == PARTS:
            assert op.parts is not None
            return op.parts(backend, *arrays, **static)
        return _run(
            *arrays,
            op=op,
            stem=stem,
            on_gpu=on_gpu,
            fallback=fallback,
            static=tuple(sorted(static.items())),
            gpu=ffi.device() if on_gpu == "cuda" else None,
        )


def serves(op: Op, backend: Backend, *arrays: Any, **static: Any) -> bool:
    """Whether the kernel of a fusion serves a call: whether its parts do not run."""
    return _choose(op, op.name, backend, arrays, static)[0] != PARTS


def choose(
    op: Op, direction: Direction, backend: Backend, *arrays: Any, **static: Any
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The implementation that a GPU would run, and why each one before it was rejected.

    Args:
        op: The op.
        direction: As in :func:`dispatch`.
        backend: A resolved backend.
        *arrays: As in :func:`dispatch`.
        **static: The implementation's options.

    Returns:
        ``"cuda"``, ``"pallas"``, ``"xla-gpu"`` for what JAX ships for a GPU, or ``"xla"`` for the
        reference implementation; and pairs of a name and a reason.

    Raises:
        BackendError: The backend was asked for by name and cannot serve the call.
    """
    return _choose(op, op.stem(direction), backend, arrays, static)


def _dispatch_shard(
    op: Op, direction: Direction, backend: Backend, static: tuple, *arrays: Any
) -> Any:
    return dispatch(op, direction, backend, *arrays, **dict(static))


PARTS = "its parts"  # what explain calls them
FUSED = "fused"


@dataclasses.dataclass(frozen=True)
class Composition:
    """A function that is made of ops, in a fused and in an unfused form.

    The fused form has a derivative rule of its own; so the choice is made before it.

    Attributes:
        name: The name of the function, for :func:`jaxllm.explain`.
        fused: ``fused(backend, *arrays, **static)``.
        unfused: Likewise, of the public ops.
        unsupported: ``unsupported(*arrays, **static)`` says in a sentence why the CUDA kernels of
            the fused form cannot serve a call, or returns None.
    """

    name: str
    fused: Callable[..., Any]
    unfused: Callable[..., Any]
    unsupported: Callable[..., str | None]


def compose(composition: Composition, backend: Backend, *arrays: Any, **static: Any) -> Any:
    """Runs a composition in the form that the backend's kernels serve.

    Args:
        composition: The composition.
        backend: A resolved backend.
        *arrays: Arrays, or pytrees of them.
        **static: Options.
    """
    reason = _unfused_reason(composition, backend, arrays, static)
    form = FUSED if reason is None else PARTS

    def call() -> Call:
        shapes = " ".join(map(describe, filter(jax.tree.leaves, arrays)))
        rejected = ((FUSED, reason),) if reason else ()
        return Call(composition.name, shapes, form, PARTS, rejected)

    with record(call, f"{composition.name}[{form}]"):
        function = composition.fused if reason is None else composition.unfused
        return function(backend, *arrays, **static)


def _unfused_reason(
    composition: Composition, backend: Backend, arrays: tuple, static: dict[str, Any]
) -> str | None:
    if backend not in ("auto", "cuda"):
        return f"backend {backend!r} has no fused kernels"
    if reason := ffi.unavailable_reason():
        return reason
    try:
        return composition.unsupported(*arrays, **static)
    except jax.errors.InconclusiveDimensionOperation as error:
        return _on_symbolic_sizes(str(error))


def _choose(
    op: Op, stem: str, backend: Backend, arrays: tuple, static: dict[str, Any]
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The implementation to run on a GPU, and why each one before it was rejected."""
    if op.parts is not None:
        candidates = ["cuda"] if backend in ("auto", "cuda") and op.cuda is not None else []
        candidates.append(PARTS)
    elif backend == "xla" or backend == "auto":
        # "xla" has two implementations on a GPU: what JAX ships, then the reference.
        candidates = [name for name in op.preference if backend == "auto" or name == "xla"]
        if op.xla is not None:
            # Before Pallas's kernels too: cuDNN's attention is faster in the rows of 9b80c94.
            first = next(i for i, name in enumerate(candidates) if name != "cuda")
            candidates.insert(first, "xla-gpu")
    else:
        candidates = [backend]
    rejected = []
    for name in candidates:
        reason = _rejection(op, stem, name, backend, arrays, static)
        if reason is None:
            return name, tuple(rejected)
        rejected.append((name, reason))
    raise BackendError(f"backend {backend!r} cannot serve {stem}: {rejected[0][1]}")


def _rejection(
    op: Op, stem: str, name: str, backend: Backend, arrays: tuple, static: dict[str, Any]
) -> str | None:
    """Why an implementation does not run; None if it does."""
    if name == PARTS:
        return None
    is_symbolic = partition.has_symbolic_sizes(arrays)
    if is_symbolic and name in _SIZED and _module(op, name) is not None:
        return f"an array has a symbolic size; {_SIZED[name]} kernels need sizes that are numbers"
    try:
        reason = _unsupported(op, stem, name, arrays, static)
        if reason is None and backend == "auto":
            reason = _slower(op, stem, name, arrays, static)
        if reason is None and is_symbolic and name == "cuda":
            reason = _undecided(op, stem, arrays, static)
        return reason
    except jax.errors.InconclusiveDimensionOperation as error:
        return _on_symbolic_sizes(str(error))


_SIZED = {"pallas": "Pallas", "xla-gpu": "cuDNN's"}


def _undecided(op: Op, stem: str, arrays: tuple, static: dict[str, Any]) -> str | None:
    """Why a CUDA kernel needs sizes that are numbers; None if it does not."""
    try:
        jax.eval_shape(functools.partial(getattr(op.cuda, stem), **static), *arrays)
    except TypeError as error:  # an int of a size
        return f"an array has a symbolic size: {error}"
    return None


def _on_symbolic_sizes(error: str) -> str:
    comparison = error.partition("\n")[0].partition(" is inconclusive")[0].rpartition("comparison ")
    return f"it would have to know whether {comparison[2]}; a constraint on the size may tell"


def _module(op: Op, name: str) -> Implementation | None:
    return {"cuda": op.cuda, "pallas": op.pallas, "xla-gpu": op.xla, "xla": op.reference}[name]


def _unsupported(op: Op, stem: str, name: str, arrays: tuple, static: dict) -> str | None:
    module = _module(op, name)
    if module is None or not hasattr(module, stem):
        return f"{stem} has no {name} kernel; use backend 'xla' or 'auto'"
    if name == "cuda" and (reason := ffi.unavailable_reason(stem)):
        return reason
    check = predicate(module, op, stem, "unsupported")
    return check(*arrays, **static) if check else None


def predicate(
    module: Implementation | None, op: Op, stem: str, question: Literal["unsupported", "slower"]
) -> Callable[..., str | None] | None:
    """The function of an implementation that answers a question about the calls of a stem."""
    is_forward = stem in (op.name, op.stem(Direction.FORWARD))
    of_op = getattr(module, f"{op.name}_{question}", None) if is_forward else None
    return getattr(module, f"{stem}_{question}", of_op)


def _slower(op: Op, stem: str, name: str, arrays: tuple, static: dict) -> str | None:
    """Why to leave a call to the implementations after this one.

    Of CUDA kernels, where JAX ships one of its own for a GPU: that is the one meant, and it must
    serve the call.
    """
    check = predicate(_module(op, name), op, stem, "slower")
    is_of_jax = name == "cuda" and op.xla is not None
    if check is None or (is_of_jax and _unsupported(op, stem, "xla-gpu", arrays, static)):
        return None
    return check(*arrays, **static)


@functools.partial(
    jax.jit, static_argnames=("op", "stem", "on_gpu", "fallback", "static", "gpu"), inline=True
)
def _run(
    *arrays, op: Op, stem: str, on_gpu: str, fallback: str, static: tuple, gpu: ffi.Device | None
):
    # jit, so that an eager call runs where its arrays are; inline, so that a trace sees through it.
    # A CUDA implementation asks for the GPU as well: a trace for another must not be found again.
    del gpu

    def implementation(name: str) -> Callable:
        options = dict(static)
        if name == "cuda":
            return _undifferentiable(_partial(op.cuda, stem, options), stem, name)
        if name == "pallas-interpreter":
            name, options["interpret"] = "pallas", True
        if op.parts is not None and op.reference is None:
            # As where the parts run on a GPU, they get what a kernel saved as it is.
            return functools.partial(_parts_of, op, options)
        fn = _partial(_module(op, name), stem, options)
        # Only CUDA kernels know the layout that they save in.
        plain = lambda *arrays: fn(*unpack(arrays))  # noqa: E731
        if name == "xla-gpu":
            return _differentiated_as(implementation("xla"), plain)
        if name == "pallas":
            return _undifferentiable(plain, stem, name)
        return without_derivative(plain, op.no_derivative) if op.no_derivative else plain

    def refusal(why: str, instead: str) -> Callable:
        why = f"backend {on_gpu!r} cannot serve {stem}: {why}"
        return functools.partial(_refuse, like=kernel, why=why, instead=instead)

    if on_gpu == fallback == "xla":
        return implementation("xla")(*arrays)
    kernel = implementation(on_gpu)
    axes = vma.axes_of(arrays)
    if fallback == "cuda":
        other = refusal("it needs an NVIDIA GPU", "use backend 'auto', 'xla' or 'pallas' there")
    elif fallback == "pallas-interpreter" and axes:
        why = "Pallas's interpreter does not run in a jax.shard_map with check_vma"
        other = refusal(why, "use backend 'auto' or 'xla' there, or give check_vma=False")
    else:
        other = implementation(fallback)
        if on_gpu == "cuda":  # only CUDA kernels know a layout of their own
            other = pack_like(kernel, other)

    def typed(fn: Callable) -> Callable:
        # Both in one type: a kernel's results vary as its operands do, a constant does not.
        return lambda *arrays: vma.vary(fn(*arrays), axes)

    return jax.lax.platform_dependent(*arrays, cuda=typed(kernel), default=typed(other))


def _partial(module: Implementation | None, stem: str, options: dict[str, Any]) -> Callable:
    return functools.partial(getattr(module, stem), **options)


def _parts_of(op: Op, options: dict[str, Any], *arrays: Any) -> Any:
    """The parts of a fusion on the devices that do not run its kernel."""
    assert op.parts is not None
    with unrecorded():
        return op.parts("xla", *arrays, **options)


def _differentiated_as(reference: Callable, fn: Callable) -> Callable:
    """``fn``, which JAX cannot differentiate, with its reference implementation's derivative."""
    differentiable = jax.custom_jvp(fn)

    @differentiable.defjvp
    def derivative(primals, tangents):
        return jax.jvp(reference, primals, tangents)

    return differentiable


def _undifferentiable(fn: Callable, stem: str, backend: str) -> Callable:
    """A kernel's function, which raises an error where it is differentiated."""
    why = (
        f"backend {backend!r} cannot serve a derivative of {stem}: kernels have none; "
        f"{use_xla(stem)}"
    )
    return without_derivative(fn, why)


def _refuse(*arrays, like: Callable, why: str, instead: str):
    """Stands for what a platform cannot run: traces like the op, refuses to lower."""
    shapes, tree = jax.tree.flatten(jax.eval_shape(like, *arrays))
    static = {"shapes": tuple(shapes), "why": why, "instead": instead}
    return tree.unflatten(_refuse_p.bind(*jax.tree.leaves(arrays), **static))


_refuse_p = Primitive("jaxllm_refuse")
_refuse_p.multiple_results = True


@_refuse_p.def_abstract_eval
def _refuse_abstract(*_, shapes, **__):
    return [ShapedArray(shape.shape, shape.dtype) for shape in shapes]


def _refuse_lowering(context, *_, why, instead, **__):
    platforms = ", ".join(context.module_context.platforms)
    raise BackendError(f"{why}, and this program is compiled for {platforms}; {instead}")


def _refuse_batching(arrays, axes, *, shapes, **static):
    (size,) = {
        array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None
    }
    batched = tuple(jax.ShapeDtypeStruct((size, *shape.shape), shape.dtype) for shape in shapes)
    return _refuse_p.bind(*arrays, shapes=batched, **static), [0] * len(shapes)


mlir.register_lowering(_refuse_p, _refuse_lowering)
batching.primitive_batchers[_refuse_p] = _refuse_batching


def describe(array: Any) -> str:
    """An array's dtype and shape in one word, such as ``bf16[8,768]``; of many, the first's."""
    if not hasattr(array, "dtype"):  # a tuple, or another node of a pytree
        first, *others = jax.tree.leaves(array)
        return describe(first) + (f"+{len(others)}" if others else "")
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    dtype = short.get(array.dtype.name, array.dtype.name.replace("int", "i"))
    return f"{dtype}[{','.join(map(str, array.shape))}]"
