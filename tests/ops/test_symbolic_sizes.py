"""Every op exported with a symbolic batch size, for CPU and GPU at once."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import FIRST_CASES, differentiate, op_under

from jaxllm import export, testing
from jaxllm.core.backend import BackendError

# The arguments whose first axis is the batch, for ops where the size of that axis does not tell.
BATCHED = {
    "decode_block": (0, 7, 8, 9, 10, 11),
    "matmul": (0,),
    "matvec": (1,),
    "quantized_matmul": (2,),
    "quantized_matvec": (2,),
    "rope": (0, 1),
}
PLATFORMS = ("cpu", "cuda")
LIMIT = ["b <= 4096"]  # kernels with 32-bit indices reject an unbounded size
NO_KERNELS = ("matmul", "linear")  # auto picks XLA
each_op = pytest.mark.parametrize("case", FIRST_CASES, ids=lambda case: case.op)


def with_batch(case, inputs, resize):
    """The inputs, with ``resize`` applied to those that have a batch axis."""
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
        lambda x: jax.device_put(np.resize(x, (batch, *x.shape[1:]))),
    )


def everything(case, backend="auto"):
    """The op and its gradients, where it has any."""

    def run(*inputs):
        out, pull = differentiate(op_under(case, backend), inputs)
        return (out, pull(jax.tree.map(jnp.ones_like, out))) if case.has_backward else out

    return jax.jit(run)


def exported(case, *, backend="auto", dtype="float32", constraints=(), platforms=PLATFORMS):
    """An op and its gradients, exported for any batch size."""
    (b,) = jax.export.symbolic_shape("b", constraints=constraints)
    shapes = testing.input_types(case, dtype)
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
def test_exported_op_is_exact_for_every_batch_size(case):
    program = jax.export.deserialize(exported(case).serialize())
    check_on(jax.devices("cpu")[0], case, program)


@pytest.mark.gpu
@each_op
def test_exported_op_is_exact_for_every_batch_size_on_a_gpu(case):
    with jax.default_matmul_precision("highest"):
        program = exported(case, constraints=LIMIT)
    check_on(jax.devices("gpu")[0], case, jax.export.deserialize(program.serialize()))


@each_op
def test_symbolic_batch_exports_kernels(case, with_kernels):
    program = exported(case, constraints=LIMIT)
    found = set(re.findall(r"custom_call @([\w$.]+)", program.mlir_module()))
    found -= {"shape_assertion"}  # JAX's check of the size constraints
    assert found <= set(export.custom_calls())
    assert found or case.op in NO_KERNELS
    assert not found or case.op not in NO_KERNELS


@each_op
def test_explicit_backend_exports_symbolic_batch_or_gives_the_reason(case, with_kernels):
    try:
        exported(case, backend="cuda", constraints=LIMIT, platforms=["cuda"], dtype="bfloat16")
    except BackendError as error:
        reason = r"cannot serve \w+: it would have to know whether '\d*\*?b' [<>]=? '\d+'; a constr"
        assert re.search(reason, str(error))
    with pytest.raises(BackendError, match=r"cannot serve \w+: (.* symbolic size|.* no pallas)"):
        exported(case, backend="pallas", platforms=["cuda"])
