"""What tests and benchmarks share: cases, random inputs, errors and tolerances.

Public, so that an op outside this library can be held to the same contract.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax.typing import ArrayLike, DTypeLike

DTYPES = ("float32", "bfloat16", "float16")

# The error that is never held against an implementation: a few roundings in its output dtype.
FLOORS = {"float64": 1e-13, "float32": 4e-6, "bfloat16": 1e-2, "float16": 1.5e-3}


@dataclasses.dataclass(frozen=True)
class Normal:
    """A normally distributed input.

    Attributes:
        shape: Its shape.
        mean: The mean of its values.
        std: Their standard deviation.
        dtype: Its dtype; None means the dtype under test.
        constant: Whether no gradient flows into it: the op returns zeros, and benchmarks ask for
            none.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 1.0
    dtype: str | None = None
    constant: bool = False


@dataclasses.dataclass(frozen=True)
class Integers:
    """An input of integers drawn from ``low <= value < high``.

    Attributes:
        shape: Its shape.
        high: One more than the largest value.
        low: The smallest value.
        distinct: Whether no value comes twice; ``high - low`` is at least the size then.
        skew: 1 draws all values alike; with more, small ones come more often than large ones, as
            tokens do in text: of draws ``u`` from 0 to 1 the power ``u**skew`` is taken.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    high: int
    low: int = 0
    distinct: bool = False
    skew: int = 1
    dtype: str = "int32"


@dataclasses.dataclass(frozen=True)
class Boxes:
    """An input of boxes, corners ``(x1, y1, x2, y2)`` with ``x1 <= x2`` and ``y1 <= y2``.

    They are whole numbers, so that areas are exact, and no rounding decides on a box.

    Attributes:
        shape: Its shape; the last axis has the four corners.
        field: The first corners are drawn from the square from 0 to this.
        side: The sides are drawn from 0 to this.
    """

    shape: tuple[int, ...]
    field: float
    side: float


@dataclasses.dataclass(frozen=True)
class Case:
    """One named call of one op: what tests check, and benchmarks time.

    Attributes:
        op: The name of a function in ``jaxllm.ops``.
        name: The case's name, such as ``"gpt2_124m"``.
        inputs: The array arguments by name, in order; one may be a tree of arrays.
        static: The keyword arguments.
        forward_elements: Elements that the forward must move between chip and memory, each large
            input read once and each large output written once.
        backward_elements: Likewise for the backward.
        gradient_elements: Likewise for outputs and gradients in one program, where an op's forward
            computes the gradients as well and the backward alone says nothing.
        forward_flops: Floating-point operations of the forward, where they matter (GEMMs).
        backward_flops: Likewise for the backward.
        gradient_flops: Likewise for outputs and gradients in one program.
        donated: Inputs whose memory the op takes for its results where the caller gives it away.
        forward_fixed_bytes: Bytes that the forward must move beside, in whatever dtype.
        has_backward: Whether the op has a derivative.
        saves_more: Whether the forward writes more where a backward follows. It is timed so.
        in_place: The inputs that the first outputs replace; they are donated where it is timed.
        refused_by: The backends with a kernel for the op that does not take this call.
        inexact_under: The backends, each with a dtype, that leave the call to a library whose error
            is beyond what the tests allow. They are timed, and not compared with the reference.
        large: Too large for a CPU: run on a GPU only, and timed there.
        timed_only: Too large also for the comparison with the reference, whose float32
            intermediates would not fit beside those of other test processes.
        call: What is called instead of the op, where that one takes or returns more than
            arrays.
    """

    op: str
    name: str
    inputs: Mapping[str, Any]
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    forward_elements: int = 0
    backward_elements: int = 0
    gradient_elements: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    gradient_flops: int = 0
    donated: tuple[str, ...] = ()
    forward_fixed_bytes: int = 0
    has_backward: bool = True
    saves_more: bool = False
    in_place: tuple[str, ...] = ()
    refused_by: tuple[str, ...] = ()
    inexact_under: tuple[tuple[str, str], ...] = ()
    large: bool = False
    timed_only: bool = False
    call: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"

    def forward_bytes(self, dtype: DTypeLike) -> int:
        """Bytes that the forward must move in ``dtype``."""
        return self.forward_elements * jnp.dtype(dtype).itemsize + self.forward_fixed_bytes

    def backward_bytes(self, dtype: DTypeLike) -> int:
        """Bytes that the backward must move in ``dtype``."""
        return self.backward_elements * jnp.dtype(dtype).itemsize

    def gradient_bytes(self, dtype: DTypeLike) -> int:
        """Bytes that one program for outputs and gradients must move in ``dtype``."""
        return self.gradient_elements * jnp.dtype(dtype).itemsize


def make_inputs(case: Case, dtype: DTypeLike, seed: int = 0) -> tuple[Any, ...]:
    """Random arguments for a case, floating ones in ``dtype``; equal seeds give equal values."""
    specs, tree = jax.tree.flatten(tuple(case.inputs.values()))
    return tree.unflatten(_draw(spec, dtype, (seed, i)) for i, spec in enumerate(specs))


def input_types(case: Case, dtype: DTypeLike) -> tuple[Any, ...]:
    """The shapes and dtypes of :func:`make_inputs`, to trace an op with: no value is drawn."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, getattr(spec, "dtype", None) or dtype),
        tuple(case.inputs.values()),
    )


def cotangents_like(outputs: Any, seed: int = 1) -> Any:
    """Random cotangents in the structure, shapes and dtypes of an op's outputs.

    Their values are normally distributed and such as bfloat16 holds, the same in every dtype.
    """
    leaves, tree = jax.tree.flatten(outputs)
    return tree.unflatten(
        _to_device(
            _normal(Normal(leaf.shape, dtype="bfloat16"), None, (seed, i)).astype(leaf.dtype)
        )
        for i, leaf in enumerate(leaves)
    )


def _normal(spec: Normal, dtype: DTypeLike | None, seed: tuple[int, int]) -> Any:
    values = spec.mean + spec.std * _random("normal", spec.shape, seed)
    return values.astype(spec.dtype or dtype)


def _draw(
    spec: Normal | Integers | Boxes, dtype: DTypeLike | None, seed: tuple[int, int]
) -> jax.Array:
    if isinstance(spec, Normal):
        return _to_device(_normal(spec, dtype, seed))
    if isinstance(spec, Boxes):
        corners = _random("uniform", (2, *spec.shape[:-1], 2), seed)
        low = (corners[0] * spec.field).round()
        high = low + (corners[1] * spec.side).round()
        return jnp.concatenate([low, high], axis=-1, dtype=dtype)
    if spec.distinct:
        order = np.argsort(_random("uniform", (spec.high - spec.low,), seed))
        values = spec.low + order[: math.prod(spec.shape)].reshape(spec.shape)
        return _to_device(values.astype(spec.dtype))
    share = _random("uniform", spec.shape, seed) ** spec.skew
    values = spec.low + (share * (spec.high - spec.low)).astype("int32")
    return _to_device(values.astype(spec.dtype))


def _to_device(values: Any) -> jax.Array:
    return jax.device_put(values)  # jnp.asarray would compile a program for each shape


# Up to this size the host draws numbers sooner than a program for their shape is compiled.
_MAX_ON_HOST = 1 << 20


def _random(law: str, shape: tuple[int, ...], seed: tuple[int, int]) -> Any:
    """float32 numbers, ``"normal"`` or ``"uniform"`` from 0 to less than 1."""
    if math.prod(shape) > _MAX_ON_HOST:
        key = jax.random.fold_in(jax.random.key(seed[0]), seed[1])
        return getattr(jax.random, law)(key, shape, jnp.float32)
    generator = np.random.default_rng(seed)
    draw = generator.standard_normal if law == "normal" else generator.random
    return draw(shape, np.float32)


def error(actual: ArrayLike, expected: ArrayLike) -> float:
    """How far ``actual`` is from ``expected``: the worse of two relative errors.

    One is in the Euclidean norm, the other the largest deviation over the largest value, which
    sees a single wrong element or row; where all of ``expected`` is zero, it is the largest
    deviation itself. NaN, or an infinity of one sign, in one place and not the other is an infinite
    error; so is a difference of shape.
    """
    if np.shape(actual) != np.shape(expected):
        return float("inf")
    if np.size(expected) == 0:
        return 0.0
    if np.size(expected) < _LARGE:
        measures = _measure(np.asarray(actual), np.asarray(expected), np)
    else:
        with jax.enable_x64(True):
            measures = _measure_large(actual, expected)
    alike, difference, scale, largest_difference, largest = (float(value) for value in measures)
    if not alike:
        return float("inf")
    if largest == 0:  # no scale to be relative to
        return largest_difference
    return max(math.sqrt(difference / scale), largest_difference / largest)


_LARGE = 2**22  # elements that are worth a compilation


def _measure(a: Any, e: Any, xp: Any) -> tuple[Any, ...]:
    """What the error is made of, in float64; numbers that are not finite count as zero."""
    a, e = (x.astype(xp.float64) for x in (a, e))
    alike = xp.array_equal(*(xp.where(xp.isfinite(x), 0, x) for x in (a, e)), equal_nan=True)
    finite = xp.isfinite(e)
    a, e = (xp.where(finite, x, 0) for x in (a, e))
    d = a - e
    return alike, (d * d).sum(), (e * e).sum(), xp.abs(d).max(), xp.abs(e).max()


# Compiled, nothing of the arrays' size is written on the way.
_measure_large = jax.jit(functools.partial(_measure, xp=jnp))


def tolerance(dtype: DTypeLike, reference_error: float = 0.0) -> float:
    """The error an implementation may have: the dtype's floor, or twice the reference's own."""
    return max(FLOORS[jnp.dtype(dtype).name], 2 * reference_error)


def assert_close(
    actual: Any, expected: Any, dtype: DTypeLike, reference: Any = None, what: str = ""
) -> None:
    """Checks every array of a structure against its expected value.

    Args:
        actual: What the implementation gave.
        expected: The same in higher precision.
        dtype: The dtype under test; chooses the floor.
        reference: The reference's result in ``dtype``, if its error should widen the tolerance. Or
            a function that returns it, which is called only if an error is above the floor.
        what: Begins the error message.

    Raises:
        AssertionError: An error is above its tolerance; the message has both numbers.
    """
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected), f"{what}: unequal numbers of arrays"
    errors = [error(a, e) for a, e in zip(actual, expected, strict=True)]
    if callable(reference):
        reference = reference() if any(found > tolerance(dtype) for found in errors) else None
    references = jax.tree.leaves(reference) if reference is not None else [None] * len(actual)
    assert len(references) == len(actual), f"{what}: unequal numbers of arrays"
    for i, (a, e, r, found) in enumerate(zip(actual, expected, references, errors, strict=True)):
        allowed = tolerance(dtype, error(r, e) if r is not None else 0.0)
        assert found <= allowed, f"{what} array {i} {a.shape}: error {found:.3g} > {allowed:.3g}"


def lower_for_cuda(fn: Callable[..., Any], *args: Any, device_kind: str = "NVIDIA H200") -> str:
    """The StableHLO of ``fn(*args)`` for an NVIDIA GPU; needs no GPU.

    Args:
        fn: The function; each call lowers it anew.
        *args: Its arguments, arrays or ``jax.ShapeDtypeStruct``.
        device_kind: The GPU that Pallas kernels are lowered for.
    """
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform="gpu")
    # Pallas asks the mesh which GPU it compiles for.
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(lambda *a: fn(*a)).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text()
