"""An op that overwrites its operands gives the same results if they are slices of arrays.

XLA gives an aliased operand and its result one buffer, and first copies an operand that is used
again. But XLA may pass a slice of a larger array as a view, and then the result has its own buffer.
"""

import ast
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_contract import CASES

import jaxllm.ops
from jaxllm import ops, testing
from jaxllm.ops.block import cases as blocks
from jaxllm.ops.embedding import cuda as embedding_cuda
from jaxllm.ops.embedding import pallas as embedding_pallas
from jaxllm.ops.embedding import reference as embedding_reference
from jaxllm.ops.gemm import cuda_fused
from jaxllm.ops.loss import cuda as loss_cuda
from jaxllm.ops.loss import pallas as loss_pallas
from jaxllm.ops.loss import reference as loss_reference
from jaxllm.ops.rotary import cuda as rotary_cuda
from jaxllm.ops.rotary import reference as rotary_reference

EMBEDDING = {"xla": embedding_reference, "pallas": embedding_pallas, "cuda": embedding_cuda}
ROTARY = {"xla": rotary_reference, "cuda": rotary_cuda}
LOSS = {"xla": loss_reference, "pallas": loss_pallas, "cuda": loss_cuda}


class InPlace(NamedTuple):
    """A function that overwrites arguments."""

    function: Callable[..., Any]
    arguments: tuple  # arrays or trees of them
    replaced: Mapping[int, int]  # argument number to the number of the result that overwrites it
    dtype: str


def normal(shape, dtype="float32", seed=0):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def implementation(module, name, backend, **options):
    """Forward or backward of an op, as dispatch would run it."""
    if backend == "pallas" and jax.default_backend() != "gpu":
        options["interpret"] = True
    return lambda *arrays: getattr(module, name)(*arrays, **options)


# XLA passes views of slices that begin at multiples of 256 bytes, as the first two shapes do.
SHAPES = {"rows": (16, 128), "more": (3, 2, 64), "odd": (5, 77)}


def adamw(backend, dtype, **options):
    param, grad, m, v = (
        {name: normal(shape, dtype, seed) for name, shape in SHAPES.items()} for seed in range(4)
    )
    m = jax.tree.map(lambda x: x.astype("float32"), m)
    v = jax.tree.map(lambda x: abs(x.astype("float32")), v)

    def update(param, grad, m, v):
        return ops.adamw_update(param, grad, m, v, step=3, lr=0.01, backend=backend, **options)

    return InPlace(update, (param, grad, m, v), {0: 0, 2: 1, 3: 2}, dtype)


def adamw_with_copy(backend, dtype):
    # Only float32 parameters have a copy.
    return adamw(backend, "float32", copy_dtype=dtype if dtype != "float32" else "float16")


def cross_entropy(backend, dtype):
    options = {"ignore_index": -1, "label_smoothing": 0.0, "z_loss": 0.0, "vocab_size": 125}
    name = "cross_entropy_with_gradient"
    labels = jnp.arange(16, dtype=jnp.int32) - 1
    arguments = (normal((16, 128), dtype), labels, jnp.float32(0.5))
    function = implementation(LOSS[backend], name, backend, **options)
    return InPlace(function, arguments, {0: 1}, dtype)


def cross_entropy_backward(backend, dtype, factor):
    # A factor of one needs no multiplication, but the result must still be written.
    function = implementation(LOSS[backend], "cross_entropy_backward", backend)
    return InPlace(
        lambda dlogits, dloss: (function(dlogits, dloss),),
        (normal((16, 128), dtype), jnp.float32(factor)),
        {0: 0},
        dtype,
    )


def embed_backward(backend, dtype):
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12) % 7 * 3
    tables = normal((64, 128), dtype), normal((12, 128), dtype)
    arguments = (tokens, *tables, normal((2, 12, 128), dtype, 1), normal((64, 128), dtype, 2))
    function = implementation(EMBEDDING[backend], "embed_backward", backend)
    return InPlace(function, arguments, {4: 0}, dtype)


def decode_block(backend, dtype, name):
    (case,) = [case for case in blocks.CASES if (case.op, case.name) == ("decode_block", name)]
    names = list(case.inputs)
    places = {names.index("k_cache"): 1, names.index("v_cache"): 2}

    def block(*arrays):
        return ops.decode_block(*arrays, **case.static, backend=backend)

    return InPlace(block, testing.make_inputs(case, dtype), places, dtype)


def matmul_norm_backward(backend, dtype):
    assert backend == "cuda"
    rows, width, hidden = 256, 768, 264
    arguments = (
        normal((rows, hidden), dtype),
        normal((width, hidden), dtype, 1) / 16,
        normal((rows, width), dtype, 2),
        abs(normal((rows,), seed=3)),
        normal((rows, width), dtype, 4),
    )
    return InPlace(cuda_fused.matmul_norm_backward, arguments, {4: 0}, dtype)


def rope_packed(backend, dtype, name):
    options = {"heads": 2, "kv_heads": 1, "interleaved": False}
    function = implementation(ROTARY[backend], name, backend, **options)
    table = normal((16, 8)), normal((16, 8), seed=1)
    return InPlace(
        lambda *arrays: (function(*arrays),), (normal((2, 16, 64), dtype, 2), *table), {0: 0}, dtype
    )


CALLS = {
    "adamw_update": adamw,
    "adamw_update-copy": adamw_with_copy,
    "cross_entropy_with_gradient": cross_entropy,
    "cross_entropy_backward-by_one": functools.partial(cross_entropy_backward, factor=1.0),
    "cross_entropy_backward-by_half": functools.partial(cross_entropy_backward, factor=0.5),
    "embed_backward": embed_backward,
    "decode_block": functools.partial(decode_block, name="sequences_3"),
    "decode_block-int8": functools.partial(decode_block, name="int8"),
    "decode_block-odd": functools.partial(decode_block, name="odd"),
    "decode_block-head_norms": functools.partial(decode_block, name="head_norms"),
    "decode_block-ring": functools.partial(decode_block, name="ring"),
    "matmul_norm_backward": matmul_norm_backward,
    "rope_packed_forward": functools.partial(rope_packed, name="rope_packed_forward"),
    "rope_packed_backward": functools.partial(rope_packed, name="rope_packed_backward"),
}
# Only the cuda backend has separate kernels by dtype.
KERNELS = [("xla", "float32"), ("pallas", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")]
ALL = [
    pytest.param(name, backend, dtype, marks=[pytest.mark.gpu] if backend == "cuda" else [])
    for name in CALLS
    if name != "matmul_norm_backward"
    for backend, dtype in KERNELS
    if backend != "pallas" or not name.startswith("rope_packed")
] + [pytest.param("matmul_norm_backward", "cuda", "bfloat16", marks=pytest.mark.hopper)]


@pytest.fixture
def call(name, backend, dtype, monkeypatch, skip_if_declined):
    made = CALLS[name](backend, dtype)
    if name == "matmul_norm_backward":
        monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
        dout, weight, *_ = made.arguments
        skip_if_declined(lambda: cuda_fused.row_gemm_unsupported(dout, len(weight)))
    return made


def replaced_arguments(call):
    return tuple(call.arguments[i] for i in call.replaced)


def with_arguments(call, *replaced):
    """The results of the call with other arrays to overwrite."""
    arguments = list(call.arguments)
    for i, argument in zip(call.replaced, replaced, strict=True):
        arguments[i] = argument
    return call.function(*arguments)


def results_in_place(call, results):
    """The results that overwrite arguments."""
    return tuple(results[i] for i in call.replaced.values())


FACTORS = (0.5, 1.0, 0.75)


def stacks(call):
    """Each argument to overwrite, stacked three times with factors; number 1 is the argument."""
    return jax.tree.map(
        lambda x: jnp.stack([(factor * x).astype(x.dtype) for factor in FACTORS]),
        replaced_arguments(call),
    )


def slice_of(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def plain(call):
    """The function ``(big, i) -> results`` of the op on arrays that are not slices."""
    program = jax.jit(lambda *own: with_arguments(call, *own))
    return lambda big, i: program(*jax.tree.map(lambda x: jnp.array(np.asarray(x)[i]), big))


def assert_equal(actual, expected, call, what):
    testing.assert_close(actual, expected, call.dtype, what=what)


def assert_unchanged(big, copy):
    for x, y in zip(jax.tree.leaves(big), jax.tree.leaves(copy), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def copy_of(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


@pytest.mark.parametrize(("name", "backend", "dtype"), ALL)
@pytest.mark.covering(("name",), ("backend",))
def test_slices_of_arguments_match_separate_arrays(call):
    big = stacks(call)
    copy, expected = copy_of(big), plain(call)(big, 1)

    @jax.jit
    def program(big):
        return with_arguments(call, *slice_of(big, 1)), big

    actual, after = program(big)
    assert_equal(actual, expected, call, "a slice of an argument")
    assert_unchanged(big, copy)
    assert_unchanged(after, copy)


@pytest.mark.parametrize(("name", "backend", "dtype"), ALL)
@pytest.mark.covering(("name",), ("backend",))
def test_slices_of_computed_arrays_match_separate_arrays(call):
    big = stacks(call)
    copy, expected = copy_of(big), plain(call)(big, 1)

    @jax.jit
    def program(big):
        flipped = jax.tree.map(lambda x: jnp.flip(x, 0), big)
        return with_arguments(call, *slice_of(flipped, 1)), flipped

    actual, flipped = program(big)
    assert_equal(actual, expected, call, "a slice of a computed array")
    assert_unchanged(jax.tree.map(lambda x: x[::-1], copy_of(flipped)), copy)
    assert_unchanged(big, copy)


@pytest.mark.parametrize(("name", "backend", "dtype"), ALL)
@pytest.mark.covering(("name",), ("backend",))
def test_scanned_slices_match_separate_arrays(call):
    big = stacks(call)
    copy = copy_of(big)

    @jax.jit
    def program(big):
        return lax.scan(lambda _, own: (None, with_arguments(call, *own)), None, big)[1]

    actual, expected = program(big), plain(call)
    for i in range(len(FACTORS)):
        assert_equal(slice_of(actual, i), expected(big, i), call, f"slice {i} of a scan")
    assert_unchanged(big, copy)


@pytest.mark.parametrize(("name", "backend", "dtype"), ALL)
@pytest.mark.covering(("name",), ("backend",))
def test_scan_carry_matches_separate_arrays(call):
    big = stacks(call)
    copy = copy_of(big)

    def step(own, _):
        results = with_arguments(call, *own)
        return results_in_place(call, results), results

    @jax.jit
    def program(big):
        return lax.scan(step, slice_of(big, 1), None, length=2)[1]

    actual = program(big)
    separate = jax.jit(lambda *own: with_arguments(call, *own))
    first = separate(*copy_of(slice_of(big, 1)))
    second = separate(*results_in_place(call, first))
    assert_equal(slice_of(actual, 0), first, call, "the first iteration")
    assert_equal(slice_of(actual, 1), second, call, "the second iteration")
    assert_unchanged(big, copy)


@pytest.mark.parametrize(("name", "backend", "dtype"), ALL)
@pytest.mark.covering(("name",), ("backend",))
def test_slices_written_back_match_separate_arrays(call):
    # A model with the caches of all layers in one array does this.
    big = stacks(call)
    copy = copy_of(big)

    def step(i, big):
        own = results_in_place(call, with_arguments(call, *slice_of(big, i)))
        return jax.tree.map(lambda x, new: x.at[i].set(new), big, own)

    @jax.jit
    def program(big):
        return lax.fori_loop(0, len(FACTORS), step, big)

    actual, separate = program(big), plain(call)
    for i in range(len(FACTORS)):
        expected = results_in_place(call, separate(big, i))
        assert_equal(slice_of(actual, i), expected, call, f"slice {i}, written back")
    assert_unchanged(big, copy)


# Every function that aliases an operand to a result, and its entry in CALLS.
ALIASING = {
    ("optimizer/cuda.py", "adamw_update"): "adamw_update",
    ("optimizer/pallas.py", "_update_leaf"): "adamw_update",
    ("loss/cuda.py", "cross_entropy_with_gradient"): "cross_entropy_with_gradient",
    ("loss/pallas.py", "cross_entropy_with_gradient"): ("cross_entropy_with_gradient"),
    ("loss/cuda.py", "cross_entropy_backward"): "cross_entropy_backward-by_one",
    ("embedding/cuda.py", "embed_backward"): "embed_backward",
    ("block/cuda.py", "decode_block"): "decode_block",
    ("gemm/cuda_fused.py", "matmul_norm_backward"): "matmul_norm_backward",
    ("rotary/cuda.py", "_call_packed"): "rope_packed_forward",
}


def test_every_aliasing_function_is_tested():
    root = Path(jaxllm.ops.__file__).parent
    found = {
        (str(path.relative_to(root)), node.name)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and "aliases" in ast.unparse(node)
    }
    assert found == set(ALIASING)
    assert set(ALIASING.values()) <= set(CALLS)
    assert {case.op for case in CASES if case.in_place} <= set(CALLS)
