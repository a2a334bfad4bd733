"""Every op exported for a batch of any size, for a CPU and a GPU at once."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from test_contract import FIRST_CASES, differentiate, op_under

from jaxllm import export, testing
from jaxllm.core.backend import BackendError

# The arguments with a batch axis, the first, where they are not those with as many rows as x.
BATCHED = {
    "decode_block": (0, 7, 8, 9, 10, 11),
    "matmul": (0,),
    "matvec": (1,),
    "quantized_matmul": (2,),
    "quantized_matvec": (2,),
    "rope": (0, 1),
}
PLATFORMS = ("cpu", "cuda")
LIMIT = ["b <= 4096"]  # without one, no kernel that counts in 32 bits knows that it may
WITHOUT_KERNELS = ("matmul", "linear")  # XLA multiplies
each_op = pytest.mark.parametrize("case", FIRST_CASES, ids=lambda case: case.op)


def with_batch(case, inputs, resize):
    """The inputs, with the batch axis of each that has one made another by ``resize``."""
    leaves, tree = jax.tree.flatten(inputs)
    rows = leaves[0].shape[0]
    batched = BATCHED.get(
        case.op, [i for i, x in enumerate(leaves) if x.shape and x.shape[0] == rows]
    )
    return tree.unflatten([resize(x) if i in batched else x for i, x in enumerate(leaves)])


def inputs_of(case, batch, dtype="float32"):
    return with_batch(
        case,
        testing.make_inputs(case, dtype),
        lambda x: jnp.resize(x, (batch, *x.shape[1:])),
    )


def everything(case, backend="auto"):
    """The op and its gradients, where it has any."""

    def run(*inputs):
        out, pull = differentiate(op_under(case, backend), inputs)
        return (out, pull(jax.tree.map(jnp.ones_like, out))) if case.has_backward else out

    return jax.jit(run)


def exported(case, *, backend="auto", dtype="float32", constraints=(), platforms=PLATFORMS):
    """The program of an op and its gradients for any batch."""
    (b,) = jax.export.symbolic_shape("b", constraints=constraints)
    shapes = jax.eval_shape(functools.partial(testing.make_inputs, case, dtype))
    inputs = with_batch(case, shapes, lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype))
    return jax.export.export(
        everything(case, backend), platforms=platforms, disabled_checks=export.disabled_checks()
    )(*inputs)


def check_on(device, case, program):
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        for batch in (1, 3):
            inputs = inputs_of(case, batch)
            testing.assert_close(program.call(*inputs), everything(case)(*inputs), "float32")


@each_op
def test_an_exported_op_serves_every_batch(case):
    program = jax.export.deserialize(exported(case).serialize())
    check_on(jax.devices("cpu")[0], case, program)


@pytest.mark.gpu
@each_op
def test_an_exported_op_serves_every_batch_on_a_gpu(case):
    with jax.default_matmul_precision("highest"):
        program = exported(case, constraints=LIMIT)
    check_on(jax.devices("gpu")[0], case, jax.export.deserialize(program.serialize()))


@each_op
def test_kernels_of_any_batch_are_exported_where_they_can(case, with_kernels):
    program = exported(case, constraints=LIMIT)
    found = set(re.findall(r"custom_call @([\w$.]+)", program.mlir_module()))
    found -= {"shape_assertion"}  # JAX's own, of what was assumed of sizes
    assert found <= set(export.custom_calls())
    assert found or case.op in WITHOUT_KERNELS
    assert not found or case.op not in WITHOUT_KERNELS


@each_op
def test_a_named_backend_serves_any_batch_or_says_why_not(case, with_kernels):
    try:
        exported(case, backend="cuda", constraints=LIMIT, platforms=["cuda"], dtype="bfloat16")
    except BackendError as error:
        reason = r"cannot serve \w+: it would have to know whether '\d*\*?b' [<>]=? '\d+'; a constr"
        assert re.search(reason, str(error))
    with pytest.raises(BackendError, match=r"cannot serve \w+: (.* symbolic size|.* no pallas)"):
        exported(case, backend="pallas", platforms=["cuda"])
