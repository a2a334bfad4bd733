"""Gradients of arguments that ``jax.vmap`` does not map, of ops with several outputs.

JAX sums them over the batch. An output that depends on no mapped argument has the cotangent of the
whole batch, which must count once.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxllm import ops
from jaxllm.testing import assert_close, lower_for_cuda

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]


def arrays(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


TOKENS = jnp.array([[0, 1, 1], [2, 3, 0], [1, 1, 1]])


def tied_embed(positions, token_table, tokens, backend):
    x, lm_head = ops.tied_embed(tokens, token_table, positions, backend=backend)
    return x @ lm_head.T, lm_head


def add_rms_norm(x, residual, scale, backend):
    return ops.add_rms_norm(x, residual, scale, backend=backend)


def add_layer_norm(x, scale, bias, backend):
    return ops.add_layer_norm(x, x, scale, bias, backend=backend)


def rope(cos, q, k, backend):
    return ops.rope(q, k, cos, 0.1 * cos, backend=backend)


def with_lse(q, k, v, backend):
    return ops.flash_attention(q, k, v, return_lse=True, backend=backend)


HEADS = (1, 8, 1, 8)
CALLS = [
    (tied_embed, arrays((3, 4), (5, 4)), TOKENS),
    (add_rms_norm, arrays((2, 8), (2, 8)), arrays((3, 8))[0]),
    (add_layer_norm, arrays((2, 8), (8,)), arrays((3, 8))[0]),
    (rope, arrays((2, 3), (2, 2, 6)), arrays((3, 2, 1, 6))[0]),
    (with_lse, arrays(HEADS, HEADS), arrays((3, *HEADS))[0]),
]


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(
    ("call", "shared", "mapped"), [pytest.param(*c, id=c[0].__name__) for c in CALLS]
)
def test_gradients_of_shared_arguments_are_those_of_a_loop(call, shared, mapped, backend):
    def loss(shared, last):
        outputs = call(*shared, last, backend=backend)
        return sum(jnp.sum(jnp.sin(out * (i + 1))) for i, out in enumerate(outputs))

    def in_a_loop(shared):
        return sum(loss(shared, last) for last in mapped)

    by_vmap = jax.vmap(loss, (None, 0))
    # The derivative of what is mapped, traced by jit or not, and a mapped derivative.
    found = jax.jit(jax.grad(lambda shared: jnp.sum(by_vmap(shared, mapped))))(shared)
    traced = jax.jit(jax.grad(lambda shared: jnp.sum(jax.jit(by_vmap)(shared, mapped))))(shared)
    each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(shared, mapped)
    expected = jax.jit(jax.grad(in_a_loop))(shared)
    close = functools.partial(assert_close, expected=expected, dtype="float32")
    close(found)
    close(traced)
    close(jax.tree.map(lambda x: x.sum(0), each))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_lm_head_alone_may_have_mapped_cotangents(backend):
    def lm_head(token_table):
        return ops.tied_embed(TOKENS, token_table, backend=backend)[1]

    (table,) = arrays((5, 4))
    assert (jax.jacrev(lm_head)(table) == jnp.eye(20).reshape(5, 4, 5, 4)).all()


@pytest.mark.parametrize("sizes", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_batch_has_empty_outputs_and_gradients(backend, sizes):
    def loss(x, scale):
        return jnp.sum(ops.rms_norm(x, scale, backend=backend))

    of_batch = jax.value_and_grad(loss, (0, 1))
    for _ in sizes:
        of_batch = jax.vmap(of_batch, (0, None))
    x, scale = arrays((*sizes, 3, 8), (8,))
    shapes = [out.shape for out in jax.tree.leaves(of_batch(x, scale))]
    assert shapes == [sizes, x.shape, (*sizes, 8)]
    lower_for_cuda(of_batch, x, scale)
