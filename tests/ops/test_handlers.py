"""A registered target that is called with wrong buffers returns an error, and touches no memory.

The calls are those that the cases of the contract make. Each is made again, by ``jax.ffi.ffi_call``
itself, with one thing wrong at a time.
"""

import functools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from test_contract import CASES, implementations, op_under, value_and_gradients

import jaxllm
from jaxllm import ops, testing
from jaxllm.core import ffi
from jaxllm.models import gpt2

HANDLERS = Path(__file__).parents[2] / "cuda" / "handlers.h"
STEMS = re.findall(r"HANDLER\((\w+), \w+\)", HANDLERS.read_text())


class Recorded(NamedTuple):
    """A call of a target."""

    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    attributes: dict[str, Any]

    def rank(self):
        """The less, the better to test with: small, and with all optional buffers there."""
        buffers = (*self.operands, *self.results)
        absent = sum(x.size == 0 for x in buffers)
        return self.operands[0].size == 0, absent, single(buffers), sum(x.size for x in buffers)


def single(buffers):
    """How many axes have one element, so that others may be left out unnoticed."""
    return sum(x.shape.count(1) for x in buffers)


def programs():
    """Functions and arguments that make every call between them."""
    for case in CASES:
        if "cuda" in implementations(case):
            for dtype in ("bfloat16", "float32"):
                inputs = jax.eval_shape(functools.partial(testing.make_inputs, case, dtype))
                fn = op_under(case, "cuda")
                yield (lambda *inputs, fn=fn: value_and_gradients(fn, inputs)), inputs
    # A norm that comes with the product before it, of a stack of blocks.
    config = gpt2.GPT2Config(max_seq_len=1024, layers=2)
    params = jax.eval_shape(
        lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), gpt2.init(jax.random.key(0), config))
    )
    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    yield jax.grad(lambda p, x, y: gpt2.loss(p, x, y, config)), (params, tokens, tokens)
    # Float8 is no dtype of the cases.
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((2,), jnp.float32)
    yield ops.flash_attention_float8, (q, q, q, scale, scale, scale)


@functools.cache
def recorded() -> dict[str, list[Recorded]]:
    """For each target one call or two: of 16-bit arrays, and of float32."""
    found: dict[tuple[str, bool], Recorded] = {}
    real = ffi.call

    def call(stem, results, *arrays, aliases=None, **attributes):
        operands = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        new = Recorded(operands, tuple(results), attributes)
        key = stem, any(x.dtype == jnp.bfloat16 for x in operands)
        found[key] = min(found.get(key, new), new, key=Recorded.rank)
        return real(stem, results, *arrays, aliases=aliases, **attributes)

    jax.clear_caches()  # what was traced before makes no calls any more
    with pytest.MonkeyPatch.context() as patch, jaxllm.use_backend("cuda"):
        patch.setattr(ffi, "call", call)
        patch.setattr(ffi, "unavailable_reason", lambda *_: None)
        patch.setattr(ffi, "device", lambda: ffi.H100)  # which has kernels that others have not
        for fn, arguments in programs():
            jax.eval_shape(fn, *arguments)
    by_stem: dict[str, list[Recorded]] = {}
    for (stem, _), one in found.items():
        by_stem.setdefault(stem, []).append(one)
    return by_stem


def test_the_cases_call_every_target():
    assert set(recorded()) == set(STEMS)


@pytest.mark.gpu
def test_the_list_of_handlers_is_what_is_registered():
    assert {f"jaxllm_{stem}" for stem in STEMS} == set(ffi._cuda.registrations())


class Mutation(NamedTuple):
    """A call with one thing wrong."""

    what: str
    key: tuple  # what ANOTHER_CALL says of it: ("operand", 1, "dtype"), ("result", 0, -1)
    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]


def mutations(call: Recorded):
    for kind, buffers in (("operand", call.operands), ("result", call.results)):

        def made(what, key, changed, kind=kind):
            if kind == "operand":
                return Mutation(what, key, tuple(changed), call.results)
            return Mutation(what, key, call.operands, tuple(changed))

        for i, x in enumerate(buffers):
            before, after = buffers[:i], buffers[i + 1 :]
            if x.size:  # of none nothing is read
                for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
                    if x.dtype != dtype:
                        other = jax.ShapeDtypeStruct(x.shape, dtype)
                        what = f"{kind} {i} is {dtype.__name__}, not {x.dtype}"
                        yield made(what, (kind, i, "dtype"), (*before, other, *after))
            for axis, shape in other_shapes(x.shape):
                other = jax.ShapeDtypeStruct(shape, x.dtype)
                what = f"{kind} {i} has shape {shape}, not {x.shape}"
                yield made(what, (kind, i, axis), (*before, other, *after))
            if kind == "operand" or len(buffers) > 1:  # XLA drops a call without results
                yield made(f"{kind} {i} is missing", (kind, i, "missing"), (*before, *after))


def other_shapes(shape):
    """Shapes with one axis that is longer or shorter by one, and that axis, from the last one."""
    if not shape:
        yield -1, (2,)
    for axis, size in enumerate(shape):
        for other in (size + 1, size - 1):
            changed = (*shape[:axis], other, *shape[axis + 1 :])
            # Buffers are compared by their elements, and none of them may stand for no buffer.
            if other > 0 and math.prod(changed) != math.prod(shape):
                yield axis - len(shape), changed


# What makes another call of a mutation, one that has a meaning: axes of workspaces of any size,
# sizes that only one buffer has, dtypes that may be mixed.
ANOTHER_CALL = {
    "layer_norm_backward": {("result", 3, -2)},
    "add_layer_norm_backward": {("result", 4, -2)},
    "rms_norm_forward": {("operand", 1, "dtype")},
    "rms_norm_backward": {("result", 2, -2)},
    "add_rms_norm_forward": {("operand", 2, "dtype")},
    "add_rms_norm_backward": {("result", 2, -2)},
    "bias_add_backward": {("operand", 0, -2), ("result", 1, -2)},
    "bias_gelu_backward": {("result", 2, -2)},
    "reduce_sum_forward": {
        *(("operand", 0, what) for what in ("dtype", -1, -2)),
        ("result", 1, -1),
    },
    "reduce_max_forward": {*(("operand", 0, axis) for axis in (-1, -2)), ("result", 1, -1)},
    "dot_forward": {("result", 1, -1)},
    "histogram": {*(("operand", 0, axis) for axis in (-1, -2)), ("result", 0, -1)},
    "embed_forward": {("operand", 1, -2), ("operand", 2, -2)},  # rows that no token reads
    "embed_backward": {("result", 0, -2), ("result", 1, -2)},
    "cross_entropy_forward": {("operand", 0, "dtype"), ("operand", 0, -1)},  # beyond vocab_size
    "nms": {("operand", 0, "dtype")},
    "quantize": {("operand", 0, "dtype")},
    "dequantize": {("operand", 1, -1), ("result", 0, "dtype")},
    "quantized_matvec": {("operand", 1, -1)},
    "adamw_update": {("operand", 2, "dtype")},
    "global_norm": {("operand", i, what) for i in range(3) for what in ("dtype", -1, -2)},
    "matmul": {("result", 0, "dtype")},
    "weight_gradients": {("result", 2, -3)},
}


def run(stem: str, call: Recorded | Mutation, attributes: dict[str, Any]) -> None:
    decoded = {name: ffi._ATTRIBUTE_TYPES[type(x)](x) for name, x in attributes.items()}
    # Without aliases: a handler serves operands that have no result in their place.
    # With a side effect XLA makes a call that has lost its results.
    target = jax.ffi.ffi_call(f"jaxllm_{stem}", call.results, has_side_effect=True)
    operands = [jnp.full(x.shape, 0 if is_whole(x) else 0.25, x.dtype) for x in call.operands]
    jax.block_until_ready(jax.jit(lambda *operands: target(*operands, **decoded))(*operands))


def is_whole(x):
    return jnp.issubdtype(x.dtype, jnp.integer)


def serves(stem: str, call: Recorded) -> bool:
    """Whether a call that is right runs; it does, unless its kernel is for other GPUs."""
    try:
        run(stem, call, call.attributes)
    except jax.errors.JaxRuntimeError as error:
        if ffi.no_hopper_reason() is None or "operation not supported" not in str(error):
            raise
        return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("stem", STEMS)
def test_wrong_buffers_are_an_error(stem):
    faults, refused = [], 0
    for call in recorded()[stem]:
        is_served = serves(stem, call)
        for mutation in mutations(call):
            try:
                run(stem, mutation, call.attributes)
            except jax.errors.JaxRuntimeError as error:
                refused += 1
                if not says_what_is_wrong(str(error)):
                    faults.append(f"{mutation.what}: {error}")
            else:
                if mutation.key not in ANOTHER_CALL.get(stem, ()):
                    faults.append(f"{mutation.what}: accepted")
        assert serves(stem, call) == is_served, f"{call} does not run any more"
    assert not faults, "\n".join([f"{stem} {call.attributes}", *faults])
    assert refused > 4 * len(recorded()[stem])


def says_what_is_wrong(message: str) -> bool:
    """Whether it is an error of the handler's, or of XLA's count of its buffers."""
    if "CUDA error" in message or "INVALID_ARGUMENT" not in message:
        return False
    return re.search(r"\b(has|have|is|are|does|do|other|number of|missing)\b", message) is not None
