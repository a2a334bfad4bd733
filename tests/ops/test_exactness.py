"""GELU and dgelu are exact at every mean of the pre-activations, in every op that uses them.

The bar: the error of each output and gradient, relative to float64, is at most twice that of the
reference implementation in the same dtype. For negative pre-activations GELU and its derivative are
small, so an absolute error that is harmless at zero is a large relative one there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops, training
from jaxllm.ops.activation import reference as activations
from jaxllm.ops.block import reference as blocks
from jaxllm.ops.gemm import fused, reference
from jaxllm.ops.gemm.tile_order import TileOrdered
from jaxllm.testing import cotangents_like

DTYPES = ("bfloat16", "float16")
MEANS = (-4.0, -3.0, -2.0, -1.0, 0.0, 1.5)  # of the pre-activations; their deviation is 1
SMALL, LARGE = (400, 48, 200), (8192, 768, 3072)  # rows, width, hidden width
TINY = 1e-6
# The largest allowed error of the reference implementation: a few roundings of the dtype.
REFERENCE_BOUND = {"bfloat16": 2e-2, "float16": 3e-3}


def normal(shape, seed, std=1.0, mean=0.0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return mean + std * values


def up_layer(rows, width, hidden, mean):
    weight = normal((width, hidden), 1, width**-0.5)
    return [normal((rows, width), 0), weight, normal(hidden, 2, 0.1, mean)]


def down_layer(width, hidden):
    return [normal((hidden, width), 3, hidden**-0.5), normal(width, 4)]


def layers(rows, width, hidden, mean):
    return up_layer(rows, width, hidden, mean) + down_layer(width, hidden)


def ffn_arrays(rows, width, hidden, mean):
    x, up_weight, up_bias, down_weight, down_bias = layers(rows, width, hidden, mean)
    weights = {
        "up": {"weight": up_weight, "bias": up_bias},
        "down": {"weight": down_weight, "bias": down_bias},
    }
    return [x, {"scale": normal(width, 5, 0.1, 1.0), "bias": normal(width, 6, 0.1)}, weights]


def ffn_block(x, norm, weights, *, backend: Any = "xla"):
    return ops.ffn_block(ops.residual(x), norm, weights, backend=backend).x


# Otherwise XLA for CPUs skips roundings of the reference, and its matmuls stay in float32.
AS_WRITTEN = {"xla_allow_excess_precision": False}
GELU = {"activation": "gelu"}
PLAIN = {"transpose_a": False, "transpose_b": False, "out_dtype": None, "precision": None}
# The op, the reference function that JAX differentiates, and a function that makes inputs.
OPS = {
    "gelu": (
        ops.gelu,
        activations.gelu,
        lambda rows, width, hidden, mean: [normal((rows, hidden), 0, mean=mean)],
    ),
    "bias_gelu": (
        ops.bias_gelu,
        activations.bias_gelu,
        lambda rows, width, hidden, mean: [
            normal((rows, hidden), 0),
            normal(hidden, 2, 0.1, mean),
        ],
    ),
    "linear": (
        functools.partial(ops.linear, **GELU),
        functools.partial(reference.linear, **GELU),
        up_layer,
    ),
    "matmul": (
        functools.partial(ops.matmul, **GELU),
        functools.partial(reference.matmul, **GELU, **PLAIN),
        up_layer,
    ),
    "mlp": (ops.mlp, functools.partial(blocks.mlp, **GELU), layers),
    "ffn_block": (ffn_block, blocks.ffn_block, ffn_arrays),
}


def with_gradients(fn, arrays, cotangents):
    out, pull = jax.vjp(fn, *arrays)
    return jax.tree.leaves((out, pull(cotangents)))


@functools.cache
def program(op, backend):
    """Output and gradients of an op on a backend, jitted; None is the reference function."""
    fn, plain, _ = OPS[op]
    chosen = plain if backend is None else functools.partial(fn, backend=backend)
    return jax.jit(functools.partial(with_gradients, chosen), compiler_options=AS_WRITTEN)


@functools.lru_cache(maxsize=1)  # consecutive tests share a call
def expectation(op, dtype, mean, sizes):
    """Inputs, cotangents, output and gradients in float64, and the reference's errors."""
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), OPS[op][2](*sizes, mean))
    out = jax.eval_shape(OPS[op][0], *arrays)
    cotangents = cotangents_like(out)
    with jax.enable_x64(True):
        exact = program(op, None)(*training.cast((arrays, cotangents), jnp.float64))
    found = program(op, "xla")(arrays, cotangents)
    return arrays, cotangents, exact, [error(*pair) for pair in zip(found, exact, strict=True)]


@jax.jit
def _error(found, exact):
    def norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    return norm(found.astype(exact.dtype) - exact) / norm(exact)


def error(found, exact):
    """The relative error to float64 in the Euclidean norm; infinite for NaN."""
    with jax.enable_x64(True):
        assert exact.dtype == jnp.float64
        return float(jnp.nan_to_num(_error(found, exact), nan=jnp.inf))


def check(found, exact, errors):
    assert len(found) == len(exact) == len(errors)
    for i, (a, e, of_reference) in enumerate(zip(found, exact, errors, strict=True)):
        assert error(a, e) <= 2 * of_reference + TINY, (
            f"array {i} {a.shape}: error {error(a, e):.3g}, the reference's {of_reference:.3g}"
        )


CALLS = [
    pytest.param(op, dtype, mean, id=f"{op}-{dtype}-{mean:g}")
    for op in OPS
    for dtype in DTYPES
    for mean in MEANS
]


@pytest.mark.parametrize(("op", "dtype", "mean"), CALLS)
@pytest.mark.covering(("op", "dtype"), ("op", "mean"))
def test_reference_error_is_within_its_bound(op, dtype, mean):
    *_, errors = expectation(op, dtype, mean, SMALL)
    assert max(errors) <= REFERENCE_BOUND[dtype]


@pytest.mark.parametrize(("op", "dtype", "mean"), CALLS)
@pytest.mark.covering(("op", "dtype"), ("op", "mean"))
def test_pallas_is_as_exact_as_the_reference(op, dtype, mean):
    arrays, cotangents, exact, errors = expectation(op, dtype, mean, SMALL)
    check(program(op, "pallas")(arrays, cotangents), exact, errors)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "dtype", "mean"), CALLS)
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_cuda_is_as_exact_as_the_reference(op, dtype, mean, sizes):
    arrays, cotangents, exact, errors = expectation(op, dtype, mean, sizes)
    check(program(op, "cuda")(arrays, cotangents), exact, errors)


@pytest.mark.hopper
def test_large_calls_run_the_fused_kernels():
    # Otherwise the test above would not cover the fused kernels.
    arrays = layers(*LARGE, 0.0)
    text = jax.jit(functools.partial(ops.mlp, backend="cuda")).lower(*arrays).as_text()
    assert "jaxllm_matmul_bias_gelu" not in text  # float32
    for op, kernels in {
        "mlp": ["matmul_bias_gelu", "matmul_dgelu"],
        "ffn_block": ["matmul_bias_gelu", "matmul_dgelu", "matmul_norm_backward"],
        "linear": ["matmul_bias_gelu"],
    }.items():
        arrays, cotangents, *_ = expectation(op, "bfloat16", 0.0, LARGE)
        text = program(op, "cuda").lower(arrays, cotangents).as_text()
        assert all(f"@jaxllm_{kernel}(" in text for kernel in kernels), op


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_dgelu_is_as_exact_as_recomputed_dgelu(backend, dtype, mean):
    # All backends can save dgelu as the Hopper kernels do, so this needs no Hopper GPU.
    arrays, cotangents, exact, errors = expectation("mlp", dtype, mean, SMALL)

    def run(arrays, dout):
        x, up_weight, up_bias, down_weight, down_bias = arrays
        options = {"saves_derivative": True, "out_columns": dout.shape[-1]}
        hidden, derivative = reference.matmul_bias_gelu(x, up_weight, up_bias, **options)
        saved = TileOrdered(jnp.zeros(0), ()).pack(derivative)
        dh, dup_bias = fused.matmul_dgelu(backend, dout, down_weight, saved, up_bias)
        gradients = (dh @ up_weight.T, x.T @ dh, dup_bias, hidden.T @ dout, dout.sum(0))
        return (hidden @ down_weight + down_bias, *gradients)

    run = jax.jit(run, compiler_options=AS_WRITTEN)
    check(run(arrays, cotangents), exact, errors)
