"""What the contract leaves open of the norms: where a stream begins and ends, and the errors."""

import jax
import jax.numpy as jnp
import pytest

from jaxllm.core import ffi
from jaxllm.ops import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    linear_add_layer_norm,
    rms_norm,
)
from jaxllm.ops.norm import cuda
from jaxllm.testing import assert_close, lower_for_cuda

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 64


def arrays(*shapes, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


ROWS, WEIGHT = (3, 5, WIDTH), (WIDTH,)
# Each op that returns a norm and the stream that it is of, and shapes of its arrays.
OPS = {
    "add_layer_norm": (add_layer_norm, [ROWS, ROWS, WEIGHT, WEIGHT]),
    "add_layer_norm_x_bias": (add_layer_norm, [ROWS, ROWS, WEIGHT, WEIGHT, WEIGHT]),
    "add_rms_norm": (add_rms_norm, [ROWS, ROWS, WEIGHT]),
    "linear_add_layer_norm": (
        linear_add_layer_norm,
        [(3, 5, 32), (32, WIDTH), ROWS, WEIGHT, WEIGHT, WEIGHT],
    ),
}


def gradients_of_norm(fn, zeros, inputs, **options):
    """The gradients of a sum of the norm, to which the stream adds ``zeros`` of itself, or not."""
    (weights,) = arrays(ROWS)

    def loss(*inputs):
        out, stream = fn(*inputs, **options)
        return (weights * out).sum() + (0 if zeros is None else (zeros * stream).sum())

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_a_stream_that_nobody_reads_adds_no_gradient(op, backend):
    fn, shapes = OPS[op]
    inputs = arrays(*shapes)
    expected = gradients_of_norm(fn, jnp.zeros(ROWS), inputs, backend="xla")
    actual = gradients_of_norm(fn, None, inputs, backend=backend)
    assert_close(actual, expected, "float32", what=op)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_a_norm_that_nobody_reads_leaves_the_stream_its_gradient(op, backend):
    fn, shapes = OPS[op]

    def gradients(backend):
        return jax.jit(
            jax.grad(lambda *a: fn(*a, backend=backend)[1].sum(), argnums=range(len(shapes)))
        )(*arrays(*shapes))

    assert_close(gradients(backend), gradients("xla"), "float32", what=op)
    assert all(jnp.isfinite(x).all() for x in gradients(backend))


@pytest.mark.parametrize("op", OPS)
def test_no_zeros_are_written_for_a_stream_that_nobody_reads(op):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    fn, shapes = OPS[op]
    inputs = arrays(*shapes)

    def calls(zeros):
        program = lower_for_cuda(
            lambda *a: gradients_of_norm(fn, zeros, a, backend="cuda"), *inputs
        )
        lines = [x for x in program.splitlines() if "_norm_backward(" in x]
        assert len(lines) == 1
        return lines[0]

    assert "tensor<0xf32>" not in calls(jnp.zeros(ROWS)).split("->")[0]
    assert "tensor<0xf32>" in calls(None).split("->")[0]


# On a GPU with more SMs than the workspace has rows for, the workspace says how many CTAs run.
@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 770])
@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_a_workspace_of_few_rows_is_enough(monkeypatch, op, most, width):
    monkeypatch.setattr(cuda, "_MAX_PARTIAL_ROWS", most)
    x = jax.random.normal(jax.random.key(0), (1000 + most, width))  # of other rows than elsewhere
    scale = 1 + jax.random.normal(jax.random.key(1), (width,)) / 8

    def gradients(backend):
        return jax.jit(jax.grad(lambda *a: jnp.sin(op(*a, backend=backend)).sum(), (0, 1)))(
            x, scale
        )

    assert_close(gradients("cuda"), gradients("xla"), "float32")


@pytest.mark.parametrize("op", [add_layer_norm, add_rms_norm])
def test_the_first_norm_adds_the_gradient_along_the_stream(op):
    x, scale = arrays(ROWS, WEIGHT)

    def gradients(fn):
        def loss(x, scale):
            out, stream = fn(x, scale)
            return (jnp.sin(out) + out * stream + stream**2).sum()

        return jax.grad(loss, argnums=(0, 1))(x, scale)

    def written_out(x, scale):
        return op(x, jnp.zeros_like(x), scale)

    def first(x, scale):
        return op(x, None, scale)

    assert_close(first(x, scale), written_out(x, scale), "float32")
    assert_close(gradients(first), gradients(written_out), "float32")


def test_a_bias_is_added_with_a_residual():
    x, scale = arrays(ROWS, WEIGHT)
    with pytest.raises(ValueError, match="x_bias is given and residual is None"):
        add_layer_norm(x, None, scale, x_bias=scale)
