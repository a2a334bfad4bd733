"""The contract of every op: each implementation against the definition, in every dtype.

The cases are those of ``jaxllm/ops/<family>/cases.py``; a new family is tested by having some.
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
# One case of each op, and two: what does not hang on the shape is tested on these alone.
FIRST_CASES = list({case.op: case for case in reversed(SMALL_CASES)}.values())
FEW_CASES = [
    case
    for op in dict.fromkeys(case.op for case in CASES)
    for case in [case for case in SMALL_CASES if case.op == op][:2]
]


def api_of(case):
    return importlib.import_module(getattr(jaxllm.ops, case.op).__module__)


def op_of(case):
    return getattr(api_of(case), case.op.upper())


def implementations(case):
    """The backends whose kernels take a case."""
    op = op_of(case)
    kernels = [name for name in ("pallas", "cuda") if getattr(op, name)]
    return ["xla", *(name for name in kernels if name not in case.refused_by)]


def parameters(case, *values):
    """One parameter set, marked where it needs a GPU, and with what it shares a process."""
    marks = [pytest.mark.gpu] if case.large or "cuda" in values else []
    marks += [pytest.mark.large] if case.large else []
    name = "-".join(map(str, (case, *values)))
    return pytest.param(case, *values, marks=[*marks, process_group(case, *values)], id=name)


def process_group(case, *values):
    """Where test processes share a GPU: the large cases in a few of them, for its memory's sake.

    The small ones stay together by dtype: their expectation is computed once.
    """
    dtypes = [value for value in values if value in testing.DTYPES]
    group = f"large {LARGE_CASES.index(case) % 4}" if case.large else "-".join([str(case), *dtypes])
    return pytest.mark.xdist_group(group)


def each_backend(cases):
    return [parameters(case, backend) for case in cases for backend in implementations(case)]


def traced_under_each_backend(cases):
    """Parameter sets of what is not run: no GPU is needed, but for cuda the extension."""
    reason = str(ffi.unavailable_reason())
    without_cuda = [] if ffi.is_available() else [pytest.mark.skip(reason=reason)]
    return [
        pytest.param(case, name, id=f"{case}-{name}", marks=without_cuda if name == "cuda" else [])
        for case in cases
        for name in implementations(case)
    ]


def value_and_gradients(fn, inputs):
    """``fn(*inputs)`` and its gradients with respect to the floating inputs, jitted."""
    return program(fn)(inputs)


def program(fn):
    """:func:`value_and_gradients` for many inputs: those of one shape trace ``fn`` once."""

    @jax.jit
    def run(inputs, cotangents):
        out, pull = differentiate(fn, inputs)
        return out, pull(cotangents)

    # Cotangents are made outside of jit, where XLA might leave out the rounding.
    return lambda inputs: run(inputs, testing.cotangents_like(jax.eval_shape(fn, *inputs)))


def differentiate(fn, inputs):
    """``fn(*inputs)``, and what makes the gradients of the floating inputs of its outputs'."""
    leaves, tree = jax.tree.flatten(tuple(inputs))
    floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floating(*some):
        arguments = list(leaves)
        for i, x in zip(floating, some, strict=True):
            arguments[i] = x
        return fn(*tree.unflatten(arguments))

    out, pull = jax.vjp(of_floating, *(leaves[i] for i in floating))
    return out, lambda cotangents: pull(jax.tree.map(of_kind, cotangents, out))


def of_kind(ct, out):
    """A cotangent as JAX asks for it: one of integers has no numbers."""
    floating = jnp.issubdtype(out.dtype, jnp.floating)
    return ct if floating else np.zeros(out.shape, jax.dtypes.float0)


def op_under(case, backend):
    fn = functools.partial(getattr(jaxllm.ops, case.op), **case.static, backend=backend)
    return fn if case.has_backward else without_derivative(fn)


def without_derivative(fn):
    """``fn``, but what differentiates it gets zeros rather than an error."""
    return lambda *inputs: fn(*jax.lax.stop_gradient(inputs))


def definition(case):
    """The plain function that defines the op, which JAX differentiates by itself."""
    if not case.has_backward:
        return op_under(case, "xla")
    return functools.partial(getattr(op_of(case).reference, case.op), **defaults(case))


@pytest.fixture(autouse=True)
def declined_cases_are_skipped(request, skip_if_declined):
    """Skips where ``cuda`` declines a case on this GPU or in this build, and not on an H100."""
    if not request.node.get_closest_marker("gpu") or ffi.device() in (None, ffi.H100):
        return
    values = request.node.callspec.params
    if "cuda" in (values.get("backend"), values.get("forward"), values.get("backward")):
        dtype = values.get("dtype", "float32")
        skip_if_declined(lambda: refusal(values["case"], dtype))


def refusal(case, dtype):
    """Why ``cuda`` does not serve a case, or its gradients; None if it does."""
    inputs = jax.eval_shape(lambda: testing.make_inputs(case, dtype))
    try:
        jax.eval_shape(lambda *x: value_and_gradients(op_under(case, "cuda"), x), *inputs)
    except BackendError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=1)  # the backends of one case and dtype are tested in a row
def expectation(op, name, dtype):
    """Inputs of a case, and the definition of them: in float64, and in the dtype itself."""
    (case,) = [case for case in CASES if (case.op, case.name) == (op, name)]
    inputs = testing.make_inputs(case, dtype)
    with jax.enable_x64(True):
        wide = training.cast(inputs, jnp.float64)
        exact = jax.tree.map(np.asarray, value_and_gradients(definition(case), wide))
    return inputs, exact, value_and_gradients(definition(case), inputs)


# What ops take from others and hand on, which changes no value: the definitions know nothing of it.
HANDED_ON = ("normed", "returns_table")


def defaults(case):
    """The op's keyword arguments, defaults included, but for the backend and what is handed on."""
    signature = inspect.signature(getattr(jaxllm.ops, case.op))
    static = {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    left_out = ("backend", *HANDED_ON)
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
    # What `auto` takes of real shapes depends on the GPU: on its SMs and shared memory too.
    + [
        parameters(case, "bfloat16", "auto")
        for case in LARGE_CASES
        if all(dtype != "bfloat16" for _, dtype in case.inexact_under)
    ],
)
def test_matches_the_definition(case, dtype, backend):
    inputs, expected, reference = expectation(case.op, case.name, dtype)
    actual = value_and_gradients(op_under(case, backend), inputs)
    assert jax.tree.map(jax.typeof, actual) == jax.tree.map(jax.typeof, reference)
    testing.assert_close(actual, expected, dtype, reference, what=str(case))


@pytest.mark.parametrize(
    ("case", "backend"), [(case, name) for case in CASES for name in case.refused_by], ids=str
)
def test_refuses(case, backend):
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
def test_any_forward_pairs_with_any_backward(case, forward, backward, monkeypatch):
    inputs = testing.make_inputs(case, "float32")
    expected = value_and_gradients(op_under(case, "xla"), inputs)

    def crossed(op, direction, backend, *arrays, **static):
        # A forward may compute the gradient as well, and has another name then.
        backend = backward if direction == "backward" else forward
        return dispatch(op, direction, backend, *arrays, **static)

    monkeypatch.setattr(api_of(case), "dispatch", crossed)
    actual = value_and_gradients(op_under(case, "xla"), inputs)
    testing.assert_close(actual, expected, "float32", what=f"{case} {forward}/{backward}")


@pytest.mark.parametrize(("case", "backend"), each_backend(FEW_CASES))
@pytest.mark.parametrize("mapped", ["first", "all"])
def test_vmap_is_a_loop(case, backend, mapped):
    fn = op_under(case, backend)
    batches = [testing.make_inputs(case, "float32", seed) for seed in range(3)]
    if mapped == "first":
        batches = [(batch[0], *batches[0][1:]) for batch in batches]
    stacked = [jnp.stack(arrays) for arrays in zip(*batches, strict=True)]
    axes: list[int | None] = [0] * len(stacked)
    if mapped == "first":
        stacked[1:], axes[1:] = batches[0][1:], [None] * len(batches[0][1:])
    run = program(fn)
    expected = [run(batch) for batch in batches]
    actual = jax.vmap(lambda *inputs: run(inputs), tuple(axes))(*stacked)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)
    testing.assert_close(actual, expected, "float32", what=str(case))


@pytest.mark.parametrize(("case", "backend"), traced_under_each_backend(FEW_CASES))
def test_in_a_shard_map_gradients_vary_as_their_arguments_do(case, backend):
    # The first argument is each device's own, the others are shared by both. JAX takes a gradient
    # for shared where it has been summed over the devices; types say all of it.
    def check(first, *shared):
        inputs = (jax.lax.pcast(first, "d", to="varying"), *shared)
        out, pull = differentiate(op_under(case, backend), inputs)
        assert all(vma.axes_of(x) == {"d"} for x in jax.tree.leaves(out))
        gradients = pull(jax.tree.map(jnp.ones_like, out))
        floating = [x for x in jax.tree.leaves(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert list(map(vma.axes_of, gradients)) == list(map(vma.axes_of, floating))
        return ()

    mapped = jax.shard_map(check, mesh=AbstractMesh((2,), ("d",)), in_specs=P(), out_specs=())
    jax.eval_shape(mapped, *jax.eval_shape(lambda: testing.make_inputs(case, "float32")))


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
def test_values_are_the_same_without_gradients(case, backend):
    # Where nobody asks for gradients, an op may leave out what they need, or run another kernel.
    fn = op_under(case, backend)
    inputs = testing.make_inputs(case, "float32")
    expected, _ = value_and_gradients(fn, inputs)
    testing.assert_close(jax.jit(fn)(*inputs), expected, "float32", what=str(case))


@pytest.mark.parametrize(("case", "backend"), each_backend(FIRST_CASES))
def test_scan_and_remat_change_nothing(case, backend):
    fn = op_under(case, backend)
    inputs = testing.make_inputs(case, "float32")

    def scanned(*inputs):
        def body(carry, _):
            return carry, jax.checkpoint(fn)(*inputs)

        return jax.tree.map(lambda ys: ys[1], jax.lax.scan(body, None, length=2)[1])

    actual = value_and_gradients(scanned, inputs)
    testing.assert_close(actual, value_and_gradients(fn, inputs), "float32", what=str(case))


@pytest.mark.parametrize(("case", "backend"), traced_under_each_backend(FIRST_CASES))
def test_kernels_are_made_under_64_bit_types_too(case, backend):
    inputs = jax.eval_shape(lambda: testing.make_inputs(case, "float32"))

    def gradients(*inputs):
        out, pull = differentiate(op_under(case, backend), inputs)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    with jax.enable_x64(True):
        testing.lower_for_cuda(gradients, *inputs)


@pytest.mark.parametrize(("case", "backend"), each_backend(FIRST_CASES))
def test_a_transposed_input_under_jit(case, backend):
    fn = op_under(case, backend)
    inputs = testing.make_inputs(case, "float32")
    expected = fn(*inputs)
    turned = jax.jit(lambda first, *rest: fn(first.T, *rest))
    testing.assert_close(turned(inputs[0].T, *inputs[1:]), expected, "float32", what=str(case))


@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    [
        parameters(case, "bfloat16", backend)
        for case in FEW_CASES
        for backend in implementations(case)
        if backend != "xla"  # XLA's scatter-add on a GPU and cuDNN promise no order
    ],
)
def test_gradients_repeat_bit_for_bit(case, dtype, backend):
    inputs = testing.make_inputs(case, dtype)
    run = program(op_under(case, backend))
    first, second = run(inputs), run(inputs)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_auto_makes_one_program_for_a_gpu_and_for_other_devices(case, monkeypatch):
    # A Hopper GPU's kernels and the definition must give back alike, what is kept included.
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    inputs = jax.eval_shape(lambda: testing.make_inputs(case, "bfloat16"))
    program = functools.partial(value_and_gradients, op_under(case, "auto"))
    expected = functools.partial(value_and_gradients, op_under(case, "xla"))
    found, wanted = (jax.eval_shape(lambda *a, f=f: f(a), *inputs) for f in (program, expected))
    assert found == wanted


KERNEL_CASES = [
    case
    for case in FIRST_CASES
    if op_of(case).cuda
    and op_of(case).pallas
    # XLA's products, and kernels that bear other names: see test_gemm.py and test_quantization.py.
    and case.op
    not in (
        "linear",
        "linear_add_layer_norm",
        "mlp",
        "pre_norm_mlp",
        "matmul",
        "quantized_matmul",
        "pre_norm_self_attention",
    )
]


@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
@pytest.mark.parametrize("backend", ["cuda", "pallas", "xla"])
def test_the_program_for_a_gpu_holds_the_kernels_of_its_backend(case, backend):
    if backend == "cuda" and not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    inputs = testing.make_inputs(case, "bfloat16")
    program = testing.lower_for_cuda(
        lambda *inputs: value_and_gradients(op_under(case, backend), inputs), *inputs
    )
    op = op_of(case).name
    module = op_of(case).cuda
    for stem in (f"{op}_forward", f"{op}_backward") if case.has_backward else (op,):
        # The gradients of add are what comes in: there is nothing for a backward kernel to do. XLA
        # multiplies those of linear_cross_entropy, which are there with the loss.
        is_left = case.op == "linear_cross_entropy" and stem.endswith("backward")
        has_kernel = hasattr(module, stem) and not is_left
        assert (f"@jaxllm_{stem}" in program) == (backend == "cuda" and has_kernel)
    assert ("triton" in program) == (backend == "pallas")
