"""The contract of every op: each backend against the reference implementation, in every dtype.

The cases are those of ``jaxllm/ops/<family>/cases.py``; a new family is tested through its cases.
"""

import functools
import importlib
import inspect
import itertools
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jaxllm
import jaxllm.ops
from jaxllm import testing, training
from jaxllm.core import ffi, vma
from jaxllm.core import op as rules
from jaxllm.core.backend import BackendError
from jaxllm.core.dispatch import dispatch

FAMILIES = [module.name for module in pkgutil.iter_modules(jaxllm.ops.__path__) if module.ispkg]


def family_module(family, name):
    return importlib.import_module(f"jaxllm.ops.{family}.{name}")


CASES = [
    case
    for family in FAMILIES
    for case in family_module(family, "cases").CASES
    if not case.timed_only
]
SMALL_CASES = [case for case in CASES if not case.large]
LARGE_CASES = [case for case in CASES if case.large]
# One case, and two cases, of each op, for tests that do not depend on the shape.
FIRST_CASES = list({case.op: case for case in reversed(SMALL_CASES)}.values())
FEW_CASES = [
    case
    for op in dict.fromkeys(case.op for case in CASES)
    for case in [case for case in SMALL_CASES if case.op == op][:2]
]


MODULES = [rules] + [  # that dispatch ops
    module
    for family in FAMILIES
    for info in pkgutil.iter_modules([f"{jaxllm.ops.__path__[0]}/{family}"])
    if hasattr(module := family_module(family, info.name), "dispatch")
]


def op_of(case):
    """The ``Op`` of a case; None for an op that is composed of others."""
    api = importlib.import_module(getattr(jaxllm.ops, case.op).__module__)
    return getattr(api, case.op.upper(), None)


def implementations(case):
    """The backends that support a case."""
    op = op_of(case)
    is_composed = op is None or op.parts is not None
    kernels = [name for name in ("pallas", "cuda") if is_composed or getattr(op, name)]
    return ["xla", *(name for name in kernels if name not in case.refused_by)]


def parameters(case, *values):
    """One parameter set, marked if it needs a GPU, with its xdist group."""
    marks = [pytest.mark.gpu] if case.large or "cuda" in values else []
    marks += [pytest.mark.large] if case.large else []
    name = "-".join(map(str, (case, *values)))
    return pytest.param(case, *values, marks=[*marks, process_group(case, *values)], id=name)


def process_group(case, *values):
    """The xdist group of a test, for test processes that share a GPU.

    Large cases run in a few processes, to bound their memory. Small cases are grouped by dtype, so
    that their expectation is computed once.
    """
    dtypes = [value for value in values if value in testing.DTYPES]
    group = f"large {LARGE_CASES.index(case) % 4}" if case.large else "-".join([str(case), *dtypes])
    return pytest.mark.xdist_group(group)


def each_backend(cases):
    return [parameters(case, backend) for case in cases for backend in implementations(case)]


def traced_under_each_backend(cases):
    """Parameter sets that are traced and not run: cuda needs the extension and no GPU."""
    reason = str(ffi.unavailable_reason())
    without_cuda = [] if ffi.is_available() else [pytest.mark.skip(reason=reason)]
    return [
        pytest.param(case, name, id=f"{case}-{name}", marks=without_cuda if name == "cuda" else [])
        for case in cases
        for name in implementations(case)
    ]


def value_and_gradients(fn, inputs, outputs=None):
    """``fn(*inputs)`` and its gradients with respect to the floating inputs, jitted.

    The types of the outputs need no trace of their own if they are given.
    """
    return program(fn)(inputs, outputs)


def program(fn):
    """:func:`value_and_gradients` as a function: inputs of one shape trace ``fn`` once."""

    @jax.jit
    def run(inputs, cotangents):
        out, pull = differentiate(fn, inputs)
        return out, pull(cotangents)

    def call(inputs, outputs=None):
        # Cotangents are computed outside of jit: inside, XLA might skip their rounding.
        outputs = jax.eval_shape(fn, *inputs) if outputs is None else outputs
        return run(inputs, testing.cotangents_like(outputs))

    return call


def differentiate(fn, inputs):
    """``fn(*inputs)`` and its VJP with respect to the floating inputs."""
    leaves, tree = jax.tree.flatten(tuple(inputs))
    floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floating(*some):
        arguments = list(leaves)
        for i, x in zip(floating, some, strict=True):
            arguments[i] = x
        return fn(*tree.unflatten(arguments))

    out, pull = jax.vjp(of_floating, *(leaves[i] for i in floating))
    return out, lambda cotangents: pull(jax.tree.map(of_kind, cotangents, out))


def traced_with_gradients(fn):
    """``fn`` and its gradients for cotangents of ones: to be traced once, and not run."""

    def run(*inputs):
        out, pull = differentiate(fn, inputs)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return run


def of_kind(ct, out):
    """The cotangent as JAX expects it: float0 for an integer output."""
    floating = jnp.issubdtype(out.dtype, jnp.floating)
    return ct if floating else np.zeros(out.shape, jax.dtypes.float0)


def op_under(case, backend):
    function = case.call or getattr(jaxllm.ops, case.op)
    fn = functools.partial(function, **case.static, backend=backend)
    return fn if case.has_backward else without_derivative(fn)


def without_derivative(fn):
    """``fn`` with zero gradients instead of an error."""
    return lambda *inputs: fn(*jax.lax.stop_gradient(inputs))


def reference_function(case):
    """The reference implementation of the op, which JAX differentiates."""
    if not case.has_backward:
        return op_under(case, "xla")
    family = getattr(jaxllm.ops, case.op).__module__.split(".")[2]
    return functools.partial(getattr(family_module(family, "reference"), case.op), **defaults(case))


@pytest.fixture(autouse=True)
def declined_cases_are_skipped(request, skip_if_declined):
    """Skips a case that ``cuda`` rejects on this GPU or in this build, but not on an H100."""
    if not request.node.get_closest_marker("gpu") or ffi.device() in (None, ffi.H100):
        return
    values = request.node.callspec.params
    if "cuda" in (values.get("backend"), values.get("forward"), values.get("backward")):
        dtype = values.get("dtype", "float32")
        skip_if_declined(lambda: refusal(values["case"], dtype))


def refusal(case, dtype):
    """The reason why ``cuda`` rejects a case or its gradients; None if it runs."""
    inputs = testing.input_types(case, dtype)
    try:
        jax.eval_shape(lambda *x: value_and_gradients(op_under(case, "cuda"), x), *inputs)
    except BackendError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=1)  # consecutive tests share a case, in each dtype
def exact_program(op, name):
    """The reference implementation and its gradients, for float64 inputs."""
    return program(reference_function(case_named(op, name)))


def case_named(op, name):
    (case,) = [case for case in CASES if (case.op, case.name) == (op, name)]
    return case


@functools.lru_cache(maxsize=1)  # consecutive tests share a case and dtype
def expectation(op, name, dtype):
    """The inputs of a case, the reference results in float64, and those in the dtype.

    The latter are a function, and types: most tests need no more.
    """
    case = case_named(op, name)
    inputs = testing.make_inputs(case, dtype)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, exact_program(op, name)(in_float64(case, inputs)))
    run = functools.partial(value_and_gradients, reference_function(case), inputs)
    return inputs, exact, functools.cache(run), types(jax.eval_shape(run))


def in_float64(case, inputs):
    """The inputs with floating ones in float64; small ones are converted without a program."""
    if case.large:
        return training.cast(inputs, jnp.float64)

    def wide(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jax.device_put(np.asarray(x, np.float64)) if floating else x

    return jax.tree.map(wide, inputs)


def types(tree):
    """Shapes and dtypes, and which ones are weak."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), tree
    )


@functools.lru_cache(maxsize=256)  # several tests compare with the same, in the order of the cases
def plain_result(op, name, backend):
    """The inputs of a small case in float32, its outputs and gradients."""
    case = case_named(op, name)
    inputs = testing.make_inputs(case, "float32")
    return inputs, value_and_gradients(op_under(case, backend), inputs)


# Arguments that change no value: the reference functions lack them.
WITHOUT_EFFECT = ("normalized", "attend")


def defaults(case):
    """The keyword arguments of the op, with defaults, without backend and ``WITHOUT_EFFECT``."""
    signature = inspect.signature(getattr(jaxllm.ops, case.op))
    static = {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    left_out = ("backend", *WITHOUT_EFFECT)
    return {name: v for name, v in (static | dict(case.static)).items() if name not in left_out}


@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    [
        parameters(case, dtype, backend)
        for case in CASES
        for dtype in testing.DTYPES
        for backend in implementations(case)
        if (backend, dtype) not in case.inexact_under
    ]
    # For large shapes the choice of `auto` depends on the SMs and shared memory of the GPU.
    + [
        parameters(case, "bfloat16", "auto")
        for case in LARGE_CASES
        if all(dtype != "bfloat16" for _, dtype in case.inexact_under)
    ],
)
@pytest.mark.covering(("case",), ("case", "kernel"), ("op", "backend", "dtype"))
def test_matches_reference(case, dtype, backend):
    inputs, expected, reference, of_reference = expectation(case.op, case.name, dtype)
    actual = value_and_gradients(op_under(case, backend), inputs, of_reference[0])
    assert types(actual) == of_reference
    testing.assert_close(actual, expected, dtype, reference, what=str(case))


@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_input_types_are_those_of_the_inputs(case):
    for dtype in testing.DTYPES:
        assert testing.input_types(case, dtype) == types(testing.make_inputs(case, dtype))


@pytest.mark.parametrize(
    ("case", "backend"), [(case, name) for case in CASES for name in case.refused_by], ids=str
)
def test_unsupported_cases_are_rejected(case, backend):
    with pytest.raises(BackendError, match=f"backend '{backend}' cannot serve {case.op}"):
        op_under(case, backend)(*testing.make_inputs(case, "float32"))


@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        parameters(case, *pair)
        for case in FEW_CASES
        if case.has_backward
        for pair in itertools.permutations(implementations(case), 2)
    ],
)
@pytest.mark.covering(("case",), ("op", "forward", "backward"))
def test_any_forward_pairs_with_any_backward(case, forward, backward, monkeypatch):
    inputs, expected = plain_result(case.op, case.name, "xla")
    phase = forward

    def crossed(op, direction, _, *arrays, **static):
        return dispatch(op, direction, phase, *arrays, **static)

    for module in MODULES:
        monkeypatch.setattr(module, "dispatch", crossed)

    @jax.jit
    def run(inputs, cotangents):
        nonlocal phase
        phase = forward
        out, pull = differentiate(op_under(case, "xla"), inputs)
        phase = backward  # of every dispatch in the backward pass
        return out, pull(cotangents)

    actual = run(inputs, testing.cotangents_like(expected[0]))
    testing.assert_close(actual, expected, "float32", what=f"{case} {forward}/{backward}")


@pytest.mark.parametrize(("case", "backend"), each_backend(FEW_CASES))
@pytest.mark.parametrize("mapped", ["first", "all"])
@pytest.mark.covering(("case",), ("op", "backend"), ("op", "mapped"))
def test_vmap_matches_a_loop(case, backend, mapped):
    fn = op_under(case, backend)
    batches = [testing.make_inputs(case, "float32", seed) for seed in range(3)]
    if mapped == "first":
        batches = [(batch[0], *batches[0][1:]) for batch in batches]

    def stack(*leaves):
        return jax.device_put(np.stack(leaves))

    stacked = [jax.tree.map(stack, *arrays) for arrays in zip(*batches, strict=True)]
    axes: list[int | None] = [0] * len(stacked)
    if mapped == "first":
        stacked[1:], axes[1:] = batches[0][1:], [None] * len(batches[0][1:])
    run = program(fn)
    expected = [run(batch) for batch in batches]
    actual = jax.vmap(lambda *inputs: run(inputs), tuple(axes))(*stacked)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
    testing.assert_close(actual, expected, "float32", what=str(case))


@pytest.mark.parametrize(("case", "backend"), traced_under_each_backend(FEW_CASES))
def test_shard_map_gradients_have_the_vma_of_their_arguments(case, backend):
    # The first argument varies over the mesh axis, the others do not. The gradient of an argument
    # must have the same varying manual axes (vma) as the argument.
    def check(first, *shared):
        inputs = (jax.lax.pcast(first, "d", to="varying"), *shared)
        out, pull = differentiate(op_under(case, backend), inputs)
        assert all(vma.axes_of(x) == {"d"} for x in jax.tree.leaves(out))
        gradients = pull(jax.tree.map(jnp.ones_like, out))
        floating = [x for x in jax.tree.leaves(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert list(map(vma.axes_of, gradients)) == list(map(vma.axes_of, floating))
        return ()

    mapped = jax.shard_map(check, mesh=AbstractMesh((2,), ("d",)), in_specs=P(), out_specs=())
    jax.eval_shape(mapped, *testing.input_types(case, "float32"))


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        parameters(case, backend)
        for case in FEW_CASES
        if case.has_backward
        for backend in implementations(case)
        if backend != "xla"
    ],
)
@pytest.mark.covering(("op", "backend"))
def test_output_is_the_same_without_gradients(case, backend):
    # Without gradients an op may skip residuals, or run another kernel.
    inputs, (expected, _) = plain_result(case.op, case.name, backend)
    actual = jax.jit(op_under(case, backend))(*inputs)
    testing.assert_close(actual, expected, "float32", what=str(case))


@pytest.mark.parametrize(("case", "backend"), each_backend(FIRST_CASES))
def test_scan_and_remat_change_no_results(case, backend):
    fn = op_under(case, backend)
    inputs, expected = plain_result(case.op, case.name, backend)

    def scanned(*inputs):
        def body(carry, _):
            return carry, jax.checkpoint(fn)(*inputs)

        return jax.tree.map(lambda ys: ys[1], jax.lax.scan(body, None, length=2)[1])

    actual = value_and_gradients(scanned, inputs, expected[0])
    testing.assert_close(actual, expected, "float32", what=str(case))


@pytest.mark.parametrize(("case", "backend"), traced_under_each_backend(FIRST_CASES))
def test_kernels_lower_under_x64(case, backend):
    inputs = testing.input_types(case, "float32")
    with jax.enable_x64(True):
        testing.lower_for_cuda(traced_with_gradients(op_under(case, backend)), *inputs)


@pytest.mark.parametrize(("case", "backend"), each_backend(FIRST_CASES))
def test_transposed_input_under_jit_gives_the_same_output(case, backend):
    fn = op_under(case, backend)
    inputs = testing.make_inputs(case, "float32")
    expected = fn(*inputs)
    transposed = jax.jit(lambda first, *rest: fn(first.T, *rest))
    testing.assert_close(transposed(inputs[0].T, *inputs[1:]), expected, "float32", what=str(case))


@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    [
        parameters(case, "bfloat16", backend)
        for case in FEW_CASES
        for backend in implementations(case)
        if backend != "xla"  # XLA's scatter-add on a GPU and cuDNN are not deterministic
    ],
)
@pytest.mark.covering(("op", "backend"))
def test_gradients_repeat_bit_for_bit(case, dtype, backend):
    inputs = testing.make_inputs(case, dtype)
    run = program(op_under(case, backend))
    first, second = run(inputs), run(inputs)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def given_to(case):
    """The arguments that a case has; others of the same op may have the same in other sizes."""
    return case.op, *case.inputs, *case.static, "large" if case.large else "small"


@pytest.mark.parametrize(
    ("case", "given"), [pytest.param(case, given_to(case), id=str(case)) for case in CASES]
)
@pytest.mark.covering(("given",))
def test_auto_on_hopper_has_the_output_types_of_the_reference(
    case, given, with_hopper_gpus, monkeypatch
):
    # Hopper kernels and the reference must have outputs and residuals of the same types.
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    inputs = testing.input_types(case, "bfloat16")
    found, wanted = (
        jax.eval_shape(traced_with_gradients(op_under(case, backend)), *inputs)
        for backend in ("auto", "xla")
    )
    assert found == wanted


# Kernels that a program for a GPU does not call under the name of the op, each with the reason.
_GRADIENT_BY_XLA = "XLA computes the gradient, an elementwise broadcast, and fuses it with its user"
_XLA_GEMM = "XLA runs the GEMM, and the kernels are those of {}; see {}.py"
KERNEL_EXEMPTIONS: dict[tuple[str, str], str] = {
    ("add_backward", "cuda"): "both gradients are the cotangent itself",
    ("dot_backward", "cuda"): _GRADIENT_BY_XLA,
    ("reduce_max_backward", "cuda"): _GRADIENT_BY_XLA,
    ("reduce_sum_backward", "cuda"): _GRADIENT_BY_XLA,
    ("linear", "pallas"): "XLA runs the GEMMs; Pallas has kernels for an activation alone",
    ("matmul_backward", "cuda"): "both GEMMs are calls of the kernel of the forward",
    ("self_attention_forward", "cuda"): "the kernel is flash_attention_packed_forward",
    ("quantized_matmul", "cuda"): _XLA_GEMM.format("dequantize", "test_quantization"),
}


def kernels_called(case, backend, program):
    """Maps each kernel that a backend should have for an op to whether the program calls it.

    Of an op that is composed of others: some kernel.
    """
    op = op_of(case)
    if backend == "pallas":
        return {case.op: "triton" in program}
    if op is None:
        return {case.op: "@jaxllm_" in program}
    suffixes = ("_forward", "_backward") if case.has_backward else ("",)
    target = f"@jaxllm_{op.name}"
    names = {suffix: target + suffix for suffix in suffixes}
    if op.name == "matmul":  # one kernel, whose target bears no direction
        names["_forward"] = f"{target}("
    return {case.op + suffix: name in program for suffix, name in names.items()}


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, id=f"{case}-{backend}")
        for case in FIRST_CASES
        for backend in implementations(case)
    ],
)
def test_lowered_program_calls_the_kernels_of_its_backend(case, backend, with_kernels):
    inputs = testing.input_types(case, "bfloat16")
    program = testing.lower_for_cuda(traced_with_gradients(op_under(case, backend)), *inputs)
    assert backend == "cuda" or "@jaxllm_" not in program
    assert backend == "pallas" or "triton" not in program
    if backend == "xla":
        return
    for kernel, is_called in kernels_called(case, backend, program).items():
        reason = KERNEL_EXEMPTIONS.get((kernel, backend))
        if reason is None:
            assert is_called, f"{case}: the {backend} program does not call {kernel}"
        else:
            assert not is_called, (
                f"{case}: the {backend} program calls {kernel}; remove its exemption: {reason}"
            )


def test_kernel_exemptions_are_of_tested_kernels():
    tested = {
        (kernel, backend)
        for case in FIRST_CASES
        for backend in implementations(case)
        for kernel in kernels_called(case, backend, "")
        if backend != "xla"
    }
    unknown = {key: why for key, why in KERNEL_EXEMPTIONS.items() if key not in tested}
    assert not unknown, f"exemptions of kernels that no case has: {unknown}"
