"""Projections rotated as a whole, attention of them, and their gradients rounded to float8."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.models.common import SAVE_ATTENTION, SAVE_GEMMS, merge_heads
from jaxllm.ops import (
    attention_block,
    flash_attention,
    flash_attention_packed,
    linear,
    residual,
    rope,
    rope_table,
)
from jaxllm.ops.attention.packing import join, split
from jaxllm.ops.gemm.float8_norm import NormArrays, float8_norm_linear
from jaxllm.ops.gemm.float8_operands import Rotation
from jaxllm.ops.quantization import cuda
from jaxllm.ops.quantization.api_float8 import FLOAT8_ROPE_BACKWARD
from jaxllm.ops.rotary.packed import PackedRotation, rope_packed
from jaxllm.testing import lower_for_cuda

BACKENDS = ["xla", pytest.param("cuda", marks=pytest.mark.gpu)]
INFERENCE = Direction.INFERENCE


@dataclasses.dataclass(frozen=True)
class Projection:
    """The sizes of a projection, and how it rotates."""

    B: int = 2
    T: int = 5
    heads: int = 4
    kv_heads: int = 2
    H: int = 8
    pairs: int | None = None
    by_parts: bool = False
    interleaved: bool = False
    table_per_sequence: bool = False

    @property
    def options(self):
        return PackedRotation(self.heads, self.kv_heads, self.interleaved, by_parts=self.by_parts)

    def draw(self, dtype, seed=0):
        """A projection."""
        columns = ((self.heads + 2 * self.kv_heads) * self.H,)
        if self.by_parts:
            columns = (self.heads // self.kv_heads + 2, self.kv_heads, self.H)
        return jax.random.normal(jax.random.key(seed), (self.B, self.T, *columns)).astype(dtype)

    def table(self):
        """The cosines and sines."""
        shape = (self.B, self.T) if self.table_per_sequence else (self.T,)
        positions = jax.random.randint(jax.random.key(7), shape, 0, 100)
        return rope_table(positions, 2 * (self.pairs or self.H // 2), theta=100.0)


SIZES = [
    Projection(),
    Projection(by_parts=True),
    Projection(by_parts=True, heads=3, kv_heads=3, interleaved=True),
    Projection(interleaved=True, table_per_sequence=True),
    Projection(by_parts=True, table_per_sequence=True, H=32, pairs=8),
    Projection(by_parts=True, heads=6, kv_heads=1, H=7, pairs=2),
    Projection(T=1, H=6, pairs=3, interleaved=True),
    Projection(B=0),
]
each_size = pytest.mark.parametrize("size", SIZES, ids=str)


def by_heads(size, qkv, cos, sin):
    """The rotation of queries and keys that are apart, by the reference implementation."""
    q, k, v = split(qkv, size.heads, size.kv_heads)
    q, k = rope(q, k, cos, sin, interleaved=size.interleaved, backend="xla")
    return join(q, k, v, by_parts=size.by_parts)


@each_size
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.covering(("size", "backend"), ("dtype", "backend"))
def test_queries_and_keys_rotate_and_values_stay(size, dtype, backend):
    qkv, dout, table = size.draw(dtype), size.draw(dtype, 1), size.table()
    rotated = functools.partial(rope_packed, backend=backend, options=size.options)
    found, pull = jax.vjp(lambda qkv: rotated(qkv, *table), qkv)
    expected, pull_by_heads = jax.vjp(lambda qkv: by_heads(size, qkv, *table), qkv)
    testing.assert_close((found, pull(dout)), (expected, pull_by_heads(dout)), dtype)
    for whole, one in zip(
        split(found, size.heads, size.kv_heads)[2:], split(qkv, size.heads, size.kv_heads)[2:],
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(whole, one)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES[1:4], ids=str)
def test_vmap_matches_a_loop(size, backend):
    arrays = jnp.stack([size.draw("float32", seed) for seed in range(3)])
    tables = [jnp.stack([each, 2 * each, -each]) for each in size.table()]
    rotated = functools.partial(rope_packed, backend=backend, options=size.options)
    for axes, given in (((0, None, None), size.table()), ((0, 0, 0), tables)):
        found = jax.vmap(rotated, axes)(arrays, *given)
        each = [
            rotated(
                x, *(t if axis is None else t[i] for t, axis in zip(given, axes[1:], strict=True))
            )
            for i, x in enumerate(arrays)
        ]
        np.testing.assert_array_equal(found, jnp.stack(each))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_projection_that_is_still_needed_keeps_its_values(backend):
    size = Projection(by_parts=True)
    qkv, table = size.draw("float32"), size.table()
    before = np.asarray(qkv)

    def both(qkv):
        qkv = qkv + 1
        return rope_packed(qkv, *table, backend=backend, options=size.options), qkv

    rotated, plain = jax.jit(both)(qkv)
    np.testing.assert_array_equal(plain, before + 1)
    testing.assert_close(rotated, by_heads(size, jnp.asarray(before + 1), *table), "float32")
    rope_packed(qkv, *table, backend=backend, options=size.options)
    np.testing.assert_array_equal(qkv, before)


def stems(fn, *args):
    """The ops of a function, each with what a GPU runs."""
    return [(call.stem, call.on_gpu) for call in jaxllm.explain(fn, *args).calls]


def gradient_of_attention(backend=None, **options):
    size = Projection(T=64, H=64, by_parts=True)
    qkv = jax.ShapeDtypeStruct((2, 64, 4, 2, 64), "bfloat16")

    def total(qkv):
        out = flash_attention_packed(
            qkv, 4, 2, causal=True, rope_table=size.table(), backend=backend, **options
        )
        return out.astype(jnp.float32).sum()

    return jax.value_and_grad(total), qkv


def test_attention_on_hopper_takes_a_rotated_projection(on_hopper):
    found = stems(*gradient_of_attention())
    assert found == [
        ("rope_packed_forward", "cuda"),
        ("flash_attention_packed_forward", "cuda"),
        ("flash_attention_packed_backward", "cuda"),
        ("rope_packed_backward", "cuda"),
    ]


@pytest.mark.parametrize(
    ("policy", "forwards"), [(SAVE_GEMMS, [1, 1]), (SAVE_ATTENTION, [2, 1]), (None, [2, 2])]
)
@pytest.mark.parametrize("precision", [None, "tensor"])
def test_remat_keeps_a_rotated_projection(on_hopper, policy, forwards, precision):
    gradient, arrays = block(Projection(T=64, H=64).table(), precision, policy=policy, remat=True)
    program = lower_for_cuda(gradient, arrays)
    stems = ("rope_packed_forward", "flash_attention_packed_forward")
    assert [program.count(f"@jaxllm_{stem}(") for stem in stems] == forwards


def test_a_policy_that_keeps_gemms_keeps_a_projection_once():
    size, layers = Projection(by_parts=True), 3
    projection = size.draw("float32").shape
    shapes = (size.B, size.T, 32), (layers, 32, *projection[2:]), (layers, 32, 32)

    def step(x, weights):
        qkv = linear(x, weights[0])
        qkv = rope_packed(qkv, *size.table(), backend="xla", options=size.options)
        out = flash_attention_packed(qkv, size.heads, size.kv_heads, causal=True)
        return jnp.sin(x + out @ weights[1]), None

    def total(x, *weights):
        of_layer = jax.checkpoint(step, policy=SAVE_GEMMS, prevent_cse=False)
        return jax.lax.scan(of_layer, x, weights)[0].sum()

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.jit(jax.grad(total, argnums=(1, 2))).lower(*arrays).compile()
    kept = f"f32[{','.join(map(str, (layers, *projection)))}]"
    loops = [line for line in (program.as_text() or "").splitlines() if " while(" in line]
    carried = [line.split(" while(")[0].count(kept) for line in loops]
    assert max(carried) == 1


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_attention_without_cuda_kernels_rotates_its_parts(on_hopper, backend):
    assert not any("rope" in stem for stem, _ in stems(*gradient_of_attention(backend)))


def test_attention_on_other_gpus_rotates_as_it_reads(on_hopper, monkeypatch):
    older = dataclasses.replace(ffi.H100, capability=80, has_sm90a=False)
    monkeypatch.setattr(ffi, "device", lambda: older)
    found = stems(*gradient_of_attention("cuda"))  # else cuDNN may serve it
    assert ("flash_attention_packed_forward", "cuda") in found
    assert not any("rope" in stem for stem, _ in found)


# Widths of heads that have kernels of their own, and others.
WIDTHS = [64, 40, 96, 128, 192, 256, 20]
OPTIONS = {
    "causal": {"causal": True},
    "all keys": {},
    "window": {"causal": True, "window": 70},
    "softcap": {"causal": True, "softcap": 20.0},
    "segments": {"causal": True, "segment_ids": jnp.repeat(jnp.arange(3), jnp.array([1, 70, 79]))},
}


def in_parts_and_usual(size, dtype, **options):
    """Attention with gradients of a projection by parts, and of the same in the usual order."""
    qkv = dataclasses.replace(size, by_parts=True).draw(dtype)
    segments = options.pop("segment_ids", None)
    if segments is not None:
        options["segment_ids"] = jnp.broadcast_to(segments, (size.B, size.T))

    def attend(qkv):
        return flash_attention_packed(qkv, size.heads, size.kv_heads, backend="cuda", **options)

    found, pull = jax.vjp(attend, qkv)
    dout = jax.random.normal(jax.random.key(2), found.shape).astype(dtype)
    expected, pull_usual = jax.vjp(lambda qkv: attend(merge_heads(qkv)), qkv)
    return (found, pull(dout)[0]), (expected, pull_usual(dout)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rotates", [False, True])
def test_queries_in_parts_have_the_bits_of_the_usual_order(width, dtype, name, rotates):
    size = Projection(T=150, heads=6, kv_heads=2, H=width)
    options = dict(OPTIONS[name])
    if rotates:
        options["rope_table"] = size.table()
    found, expected = in_parts_and_usual(size, dtype, **options)
    # Kernels that are not Hopper's rotate queries in the usual order on load, without rounding.
    rounds_alike = not rotates or width != 20 or dtype == "float32"
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        if rounds_alike:
            np.testing.assert_array_equal(one, other)
        testing.assert_close(one, other, dtype)
    assert np.asarray(found[1], np.float32).any()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_rotated_attention_is_that_of_rotated_heads(width, by_parts, return_lse):
    size = Projection(T=300, heads=6, kv_heads=2, H=width, by_parts=by_parts)
    qkv, table = size.draw("bfloat16"), size.table()
    options = {"causal": True, "backend": "cuda"}

    def packed(qkv):
        options_of_both = {**options, "rope_table": table, "return_lse": return_lse}
        out = flash_attention_packed(qkv, size.heads, size.kv_heads, **options_of_both)
        return out[0] if return_lse else out

    def apart(qkv):
        q, k, v = split(qkv, size.heads, size.kv_heads)
        q, k = rope(q, k, *table, backend="cuda")
        return flash_attention(q, k, v, **options).reshape(size.B, size.T, -1)

    found, pull = jax.vjp(packed, qkv)
    expected, pull_apart = jax.vjp(apart, qkv)
    for one, other in ((found, expected), (pull(expected)[0], pull_apart(expected)[0])):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


ROUNDED = [
    Projection(T=24, H=8, interleaved=True),
    Projection(T=168, H=16, heads=5, kv_heads=1, table_per_sequence=True),
    Projection(T=24, H=32, heads=3, kv_heads=3, by_parts=True),
    Projection(T=168, H=64, by_parts=True),
    Projection(T=8, H=64, heads=32, kv_heads=8, table_per_sequence=True),
    Projection(T=168, H=64, table_per_sequence=True, interleaved=True, pairs=12),
    Projection(B=3, T=80, H=40, heads=7, kv_heads=7, interleaved=True),
    Projection(T=200, H=128, heads=5, kv_heads=5),
    Projection(T=136, H=256, heads=3, kv_heads=1, by_parts=True),
    Projection(B=0, T=16, H=16),
]


def rounded_back(size, dqkv, table, backend, *, has_bias=True):
    """``(values, transposed, sums, scale)``."""
    static = {**size.options.static, "has_bias": has_bias}
    return dispatch(FLOAT8_ROPE_BACKWARD, INFERENCE, backend, dqkv, *table, **static)


def assert_rounded_alike(found, expected, dtype):
    """The kernel may contract products and sums otherwise: results may be a unit apart."""
    (values, transposed, sums, scale), (of_parts, _, other_sums, other_scale) = found, expected
    np.testing.assert_array_equal(
        np.asarray(values.view(jnp.uint8)).T, np.asarray(transposed.view(jnp.uint8))
    )
    np.testing.assert_allclose(scale, other_scale, rtol=1e-6 if dtype == "float32" else 2**-7)
    one, other = (
        np.asarray(x.astype(jnp.float32)) * np.asarray(s)
        for x, s in ((values, scale), (of_parts, other_scale))
    )
    smallest = 2.0**-16 * np.asarray(scale)  # of e5m2, whose mantissa has two bits
    assert (np.abs(one - other) <= 0.26 * np.maximum(np.abs(one), np.abs(other)) + smallest).all()
    # A scale in float32 may differ in its last bit; an element that is a unit apart, by an eighth.
    is_apart = np.abs(one - other) > 0.02 * np.abs(one)
    assert is_apart.sum() <= (0.001 if dtype == "float32" else 0.1) * one.size
    if sums is not None:
        testing.assert_close(sums, other_sums, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ROUNDED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_are_rounded_as_by_two_ops(size, dtype, has_bias):
    dqkv, table = size.draw(dtype), size.table()
    assert cuda.float8_rope_backward_unsupported(dqkv, *table, **size.options.static) is None
    found, expected, again = (
        rounded_back(size, dqkv, table, backend, has_bias=has_bias)
        for backend in ("cuda", "xla", "cuda")
    )
    assert_rounded_alike(found, expected, dtype)
    for one, two in zip(found, again, strict=True):
        if one is not None:
            np.testing.assert_array_equal(one.view(jnp.uint8), two.view(jnp.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan, 0.0])
def test_numbers_that_are_not_finite_are_rounded_as_by_two_ops(number):
    size = Projection(T=168, H=64, by_parts=True)
    dqkv = size.draw("bfloat16").at[1, 100, 1, 1, 40].set(number)
    if number == 0:
        dqkv = jnp.zeros_like(dqkv)
    found, expected = (rounded_back(size, dqkv, size.table(), each) for each in ("cuda", "xla"))
    one, other = (np.asarray(each[0].astype(jnp.float32)) for each in (found, expected))
    np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    np.testing.assert_array_equal(np.isinf(one), np.isinf(other))
    np.testing.assert_allclose(found[3], expected[3], rtol=2**-7)


@pytest.mark.gpu
@pytest.mark.parametrize("maps_table", [False, True])
def test_vmap_of_rounding_matches_a_loop(maps_table):
    size = Projection(T=24, H=16, by_parts=True)
    arrays = jnp.stack([size.draw("bfloat16", seed) for seed in range(3)])
    table = size.table()
    tables = tuple(jnp.stack([each, -each, each / 2]) for each in table)

    def of_one(dqkv, table):
        return rounded_back(size, dqkv, table, "cuda")

    found = jax.vmap(of_one, (0, 0 if maps_table else None))(
        arrays, tables if maps_table else table
    )
    for i, x in enumerate(arrays):
        expected = of_one(x, tuple(t[i] for t in tables) if maps_table else table)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one[i].view(jnp.uint8), other.view(jnp.uint8))


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (Projection(T=8, H=12), "heads are 12 wide, and 6 pairs .* 16, 32, 64, 128 or 256"),
        (Projection(T=8, H=48), "heads are 48 wide, and 24 pairs .* 16, 32, 64, 128 or 256"),
        (Projection(T=8, H=16, pairs=4), "4 pairs of columns rotate; .*, all in pairs"),
        (Projection(T=8, H=16, pairs=6, interleaved=True), "6 pairs .* of 8 and of 4"),
        (Projection(T=5, H=16), "10 rows"),
    ],
    ids=str,
)
def test_sizes_that_the_rounding_kernel_does_not_take_are_named(size, reason):
    dqkv, table = size.draw("bfloat16"), size.table()
    found = cuda.float8_rope_backward_unsupported(dqkv, *table, **size.options.static)
    assert found is not None
    assert re.search(reason, found)
    values, transposed, *_ = rounded_back(size, dqkv, table, "auto")  # its parts serve it
    np.testing.assert_array_equal(values.astype(jnp.float32).T, transposed.astype(jnp.float32))


def norm_and_layer(size, rotates, backend="xla"):
    """A norm, a layer with float8 operands and the rotation of its result."""
    generator = np.random.default_rng(0)
    weight = jnp.asarray(generator.standard_normal((32, *size.draw("float32").shape[2:]), "f4"))
    bias = jnp.asarray(generator.standard_normal(weight.shape[1:], "f4"))
    x = jnp.asarray(generator.standard_normal((size.B, size.T, 32), "f4"))
    table = size.table()

    def fn(x, scale, weight, bias):
        arrays = NormArrays(x, None, None, scale, None)
        rotation = Rotation(table[0], table[1], size.options) if rotates else None
        static = {"eps": 1e-5, "backend": backend, "rotation": rotation}
        out, _ = float8_norm_linear(arrays, weight, bias, **static)
        return out if rotates else rope_packed(out, *table, backend=backend, options=size.options)

    return fn, (x, jnp.ones(32), weight / 6, bias)


@pytest.mark.parametrize("size", SIZES[:5], ids=str)
def test_a_layer_that_rotates_is_the_layer_and_the_rotation(size):
    outputs = []
    for rotates in (True, False):
        fn, arrays = norm_and_layer(size, rotates)
        out, pull = jax.vjp(fn, *arrays)
        outputs.append((out, *pull(out + 1)))
    testing.assert_close(outputs[0], outputs[1], "float32")


def test_forward_mode_of_a_layer_that_rotates():
    tangents = []
    for rotates in (True, False):
        fn, arrays = norm_and_layer(SIZES[1], rotates)
        tangents.append(jax.jvp(fn, arrays, arrays)[1])
    testing.assert_close(tangents[0], tangents[1], "float32")


def block(rope_table, precision, *, bias=True, H=64, T=64, policy=None, remat=False):
    """An attention block's sum, with its gradient."""
    D, parts, K = 32, 4, 2
    shapes = {"weight": (D, parts, K, H), "bias": (parts, K, H), "out": (2 * K * H, D)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    arrays |= {"x": jax.ShapeDtypeStruct((2, T, D), "bfloat16")}

    def total(arrays):
        qkv = {"weight": arrays["weight"]} | ({"bias": arrays["bias"]} if bias else {})
        weights = {"qkv": qkv, "out": {"weight": arrays["out"]}}
        h = residual(arrays["x"], "rms")
        norm = {"scale": jnp.ones(D, "bfloat16")}
        options = {"heads": 4, "kv_heads": 2, "causal": True, "rope_table": rope_table}
        h = attention_block(h, norm, weights, **options, precision=precision)
        return jnp.sin(h.x.astype(jnp.float32)).sum()

    return jax.value_and_grad(jax.checkpoint(total, policy=policy) if remat else total), arrays


def test_a_float8_block_rounds_what_it_rotates_back(on_hopper):
    found = stems(*block(Projection(T=64, H=64).table(), "tensor"))
    rotations = [(stem, where) for stem, where in found if "rope" in stem]
    assert rotations == [("rope_packed_forward", "cuda"), ("float8_rope_backward", "cuda")]
    assert ("flash_attention_packed_backward", "cuda") in found


def test_a_float8_block_of_heads_that_the_kernel_declines_rotates_first(on_hopper):
    table = Projection(T=64, H=64, pairs=4).table()
    rotations = [(stem, where) for stem, where in stems(*block(table, "tensor")) if "rope" in stem]
    assert rotations == [
        ("rope_packed_forward", "cuda"),
        ("float8_rope_backward", "its parts"),
        ("rope_packed_backward", "cuda"),
    ]


def test_a_block_with_rows_in_float8_rotates_apart_from_the_layer(on_hopper):
    found = stems(*block(Projection(T=64, H=64).table(), "row"))
    rotations = [(stem, where) for stem, where in found if "rope" in stem]
    assert rotations == [("rope_packed_forward", "cuda"), ("rope_packed_backward", "cuda")]
