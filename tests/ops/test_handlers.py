"""A registered handler that gets wrong buffers returns an error before it launches a kernel.

The calls are recorded from the cases of the contract tests. Each call is repeated through
``jax.ffi.ffi_call`` with one buffer changed at a time.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernel_table
import pytest
from test_contract import CASES, implementations, op_under, traced_with_gradients

import jaxllm
from jaxllm import ops, testing
from jaxllm.core import ffi
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.models import gpt2
from jaxllm.ops.gemm import fused
from jaxllm.ops.gemm.api_float8 import (
    FLOAT8_MATMUL_AMAX,
    FLOAT8_MATMUL_DGELU,
    FLOAT8_MATMUL_DSWIGLU,
)
from jaxllm.ops.quantization.api_float8 import (
    FLOAT8_GELU,
    FLOAT8_NORM,
    FLOAT8_ROPE_BACKWARD,
    FLOAT8_ROUND,
    FLOAT8_SCALE_AND_ROUND,
    FLOAT8_SWIGLU,
)
from jaxllm.ops.rotary.packed import ROPE_PACKED

INFERENCE = Direction.INFERENCE
STEMS = list(kernel_table.handlers())


class Recorded(NamedTuple):
    """A call of a handler."""

    operands: tuple[jax.ShapeDtypeStruct, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    attributes: dict[str, Any]

    def rank(self):
        """Sort key: the best call to test has all optional buffers and is small."""
        buffers = (*self.operands, *self.results)
        absent = sum(x.size == 0 for x in buffers)
        size = sum(x.size for x in buffers)
        return self.operands[0].size == 0, absent, -len(buffers), single(buffers), size


def single(buffers):
    """How many axes have one element: with them, a wrong shape could have the same size."""
    return sum(x.shape.count(1) for x in buffers)


def programs():
    """Functions and arguments that together call every handler."""
    for case in CASES:
        if "cuda" in implementations(case):
            for dtype in ("bfloat16", "float32"):
                inputs = testing.input_types(case, dtype)
                fn = op_under(case, "cuda")
                yield traced_with_gradients(fn), inputs
                yield fn, inputs  # without gradients an op may call another handler
    # GEMMs that normalize the residual are only called between blocks.
    config = gpt2.GPT2Config(max_seq_len=1024, layers=2)
    params = jax.eval_shape(
        lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16), gpt2.init(jax.random.key(0), config))
    )
    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    yield jax.grad(lambda p, x, y: gpt2.loss(p, x, y, config)), (params, tokens, tokens)
    # The blocks call it for rows of more tiles than run at once.
    x, residual = (jax.ShapeDtypeStruct((32768, width), jnp.bfloat16) for width in (64, 768))
    weight = jax.ShapeDtypeStruct((64, 768), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((768,), jnp.bfloat16)
    yield functools.partial(fused.matmul_residual, "cuda"), (x, weight, bias, residual)
    # No case names these: linear layers with float8 operands call them.
    for dtype in (jnp.bfloat16, jnp.float32):
        matrix = jax.ShapeDtypeStruct((48, 72), dtype)
        for layout, scales in (("rows", 48), ("transposed", 72), ("both", 1)):
            given = (matrix, jax.ShapeDtypeStruct((scales,), jnp.float32))
            static = {"dtype": "float8_e4m3fn", "layout": layout}
            yield functools.partial(dispatch, FLOAT8_ROUND, INFERENCE, "cuda", **static), given
        static |= {"has_bias": True}
        yield functools.partial(dispatch, FLOAT8_ROUND, INFERENCE, "cuda", **static), given
        yield (
            functools.partial(dispatch, FLOAT8_SCALE_AND_ROUND, INFERENCE, "cuda", **static),
            given[:1],
        )
        # A projection with rotated queries and keys.
        qkv, *table = (
            jax.ShapeDtypeStruct(shape, of)
            for shape, of in (((3, 16, 96), dtype), ((16, 8), jnp.float32), ((16, 8), jnp.float32))
        )
        static = {"heads": 2, "kv_heads": 2, "interleaved": False}
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            call = functools.partial(dispatch, ROPE_PACKED, direction, "cuda", **static)
            yield call, (qkv, *table)
        static |= {"has_bias": True}
        call = functools.partial(dispatch, FLOAT8_ROPE_BACKWARD, INFERENCE, "cuda", **static)
        yield call, (qkv, *table)
    # Nor these, which MLPs with float8 operands call.
    for dtype in (jnp.bfloat16, jnp.float32):
        one, dout = jax.ShapeDtypeStruct((1,), jnp.float32), jax.ShapeDtypeStruct((48, 72), dtype)
        for op, columns in ((FLOAT8_GELU, 72), (FLOAT8_SWIGLU, 144)):
            h = jax.ShapeDtypeStruct((48, columns), dtype)
            for layout in ("rows", "both"):
                static = {"layout": layout}
                yield functools.partial(dispatch, op, Direction.FORWARD, "cuda", **static), (h, one)
            call = functools.partial(dispatch, op, Direction.BACKWARD, "cuda", has_bias=True)
            yield call, (h, dout, one)
        a, b = (jax.ShapeDtypeStruct((rows, 64), jnp.float8_e4m3fn) for rows in (48, 128))
        static = {"out_dtype": dtype.__name__, "parts": 2}
        call = functools.partial(dispatch, FLOAT8_MATMUL_AMAX, INFERENCE, "cuda", **static)
        yield call, (a, b, one, one, jax.ShapeDtypeStruct((128,), dtype))
    a = jax.ShapeDtypeStruct((48, 1536), jnp.float8_e5m2)
    b = jax.ShapeDtypeStruct((80, 1536), jnp.float8_e4m3fn)
    for op, parts, has_bias in (
        (FLOAT8_MATMUL_DGELU, 1, True),
        (FLOAT8_MATMUL_DSWIGLU, 2, False),
    ):
        h = jax.ShapeDtypeStruct((48, parts * 80), jnp.bfloat16)
        call = functools.partial(dispatch, op, INFERENCE, "cuda", has_bias=has_bias)
        yield call, (a, b, one, one, h, one)
    # A float8 GEMM has a workspace where its depth is split.
    for dtype in (jnp.bfloat16, jnp.float32):
        a, b = (jax.ShapeDtypeStruct((rows, 4096), jnp.float8_e4m3fn) for rows in (48, 128))
        scales = (jax.ShapeDtypeStruct((rows,), jnp.float32) for rows in (48, 128))
        call = functools.partial(ops.float8_matmul, out_dtype=dtype)
        yield call, (a, b, *scales, jax.ShapeDtypeStruct((128,), dtype))
    # Nor this, which precedes a GEMM with float8 operands.
    for dtype in (jnp.bfloat16, jnp.float32):
        matrix, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((48, 72), (72,)))
        one = jax.ShapeDtypeStruct((1,), jnp.float32)
        static = {"eps": 1e-5, "layout": "both"}
        call = functools.partial(dispatch, FLOAT8_NORM, Direction.FORWARD, "cuda", **static)
        yield call, (matrix, matrix, weight, weight, weight, one)
    # No case has inputs of flash_attention_float8.
    q = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((2,), jnp.float32)
    yield ops.flash_attention_float8, (q, q, q, scale, scale, scale)


@functools.cache
def recorded() -> dict[str, list[Recorded]]:
    """For each handler one or two calls: with bfloat16 arrays, and with float32."""
    found: dict[tuple[str, bool], Recorded] = {}
    real = ffi.call

    def call(stem, results, *arrays, aliases=None, **attributes):
        operands = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        new = Recorded(operands, tuple(results), attributes)
        key = stem, any(x.dtype == jnp.bfloat16 for x in operands)
        found[key] = min(found.get(key, new), new, key=Recorded.rank)
        return real(stem, results, *arrays, aliases=aliases, **attributes)

    jax.clear_caches()  # functions that were traced before would not call
    with pytest.MonkeyPatch.context() as patch, jaxllm.use_backend("cuda"):
        patch.setattr(ffi, "call", call)
        patch.setattr(ffi, "unavailable_reason", lambda *_: None)
        patch.setattr(ffi, "device", lambda: ffi.H100)  # has kernels that other GPUs lack
        for fn, arguments in programs():
            jax.eval_shape(fn, *arguments)
    by_stem: dict[str, list[Recorded]] = {}
    for (stem, _), one in found.items():
        by_stem.setdefault(stem, []).append(one)
    return by_stem


def test_recorded_calls_cover_every_handler():
    assert set(recorded()) == set(STEMS)


@pytest.mark.gpu
def test_handler_table_matches_the_registrations():
    assert {f"jaxllm_{stem}" for stem in STEMS} == set(ffi._cuda.registrations())


class Mutation(NamedTuple):
    """A call with one wrong buffer."""

    what: str
    key: tuple  # as in VALID_CHANGES: ("operand", 1, "dtype"), ("result", 0, -1)
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
            if x.size:  # an empty buffer is not read
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
    """Shapes with one axis longer or shorter by one, each with the (negative) axis."""
    if not shape:
        yield -1, (2,)
    for axis, size in enumerate(shape):
        for other in (size + 1, size - 1):
            changed = (*shape[:axis], other, *shape[axis + 1 :])
            # Handlers compare element counts, and an empty buffer can mean an absent one.
            if other > 0 and math.prod(changed) != math.prod(shape):
                yield axis - len(shape), changed


# Mutations that are valid calls: workspaces of another size, sizes that only one buffer has, and
# dtypes that may be mixed.
VALID_CHANGES = {
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
    "embed_forward": {("operand", 1, -2), ("operand", 2, -2)},  # table rows that no token selects
    "embed_backward": {("result", 0, -2), ("result", 1, -2)},
    "cross_entropy_forward": {("operand", 0, "dtype"), ("operand", 0, -1)},  # beyond vocab_size
    "nms": {("operand", 0, "dtype")},
    "decode_block": {("operand", 11, -1)},  # how many pages a sequence may have
    # A bias may be float32, and sequences may share it.
    "flash_attention_bias_forward": {("operand", 3, "dtype"), ("operand", 3, -4)},
    "quantize": {("operand", 0, "dtype")},
    "dequantize": {("operand", 1, -1), ("result", 0, "dtype")},
    "quantized_matvec": {("operand", 1, -1)},
    "adamw_update": {("operand", 2, "dtype")},
    "global_norm": {("operand", i, what) for i in range(3) for what in ("dtype", -1, -2)},
    "matmul": {("result", 0, "dtype")},
    "float8_matmul": {("result", 0, "dtype"), ("result", 1, -3)},
    "float8_matmul_amax": {("result", 0, "dtype"), ("result", 1, -1)},
    "float8_round": {("operand", 0, "dtype")},
    "float8_round_transposed": {("operand", 0, "dtype")},
    "float8_round_both": {("operand", 0, "dtype")},
    "float8_gelu_forward": {("operand", 0, "dtype")},
    "float8_gelu_forward_both": {("operand", 0, "dtype")},
    "float8_swiglu_forward": {("operand", 0, "dtype")},
    "float8_swiglu_forward_both": {("operand", 0, "dtype")},
    "wgrad_pair": {("result", 2, -3)},
}


def run(stem: str, call: Recorded | Mutation, attributes: dict[str, Any]) -> None:
    decoded = {name: ffi._ATTRIBUTE_TYPES[type(x)](x) for name, x in attributes.items()}
    # No aliases: a handler also accepts results with buffers of their own.
    # has_side_effect: XLA also runs a call whose results are missing.
    target = jax.ffi.ffi_call(f"jaxllm_{stem}", call.results, has_side_effect=True)
    operands = [jnp.full(x.shape, 0 if is_whole(x) else 0.25, x.dtype) for x in call.operands]
    jax.block_until_ready(jax.jit(lambda *operands: target(*operands, **decoded))(*operands))


def is_whole(x):
    return jnp.issubdtype(x.dtype, jnp.integer)


def serves(stem: str, call: Recorded) -> bool:
    """Whether a valid call runs; it does, unless its kernel needs another GPU."""
    try:
        run(stem, call, call.attributes)
    except jax.errors.JaxRuntimeError as error:
        if ffi.no_hopper_reason() is None or "operation not supported" not in str(error):
            raise
        return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("stem", STEMS)
def test_wrong_buffers_raise_errors(stem):
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
                if mutation.key not in VALID_CHANGES.get(stem, ()):
                    faults.append(f"{mutation.what}: accepted")
        assert serves(stem, call) == is_served, f"{call} does not run any more"
    assert not faults, "\n".join([f"{stem} {call.attributes}", *faults])
    assert refused > 4 * len(recorded()[stem])


def says_what_is_wrong(message: str) -> bool:
    """Whether the error comes from the handler, or from XLA's buffer count."""
    if "CUDA error" in message or "INVALID_ARGUMENT" not in message:
        return False
    return re.search(r"\b(has|have|is|are|does|do|other|number of|missing)\b", message) is not None
