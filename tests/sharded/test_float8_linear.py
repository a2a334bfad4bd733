"""Float8 linear layers and MLPs on shards: they have the values that they have on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import ALL, make_mesh, on_one_device, put
from jax.sharding import PartitionSpec as P

from jaxllm.core.hoisting import hoist_rounding
from jaxllm.ops import Float8Counts, count_float8, linear, rope_table
from jaxllm.ops.gemm.float8_mlp import float8_mlp
from jaxllm.ops.gemm.float8_norm import NormArrays, float8_norm_linear
from jaxllm.ops.gemm.float8_operands import Rotation
from jaxllm.ops.rotary.packed import PackedRotation

SHARDINGS = {
    "rows": {"x": P(ALL)},
    "two_rows": {"x": P("a", "b")},
    "columns": {"weight": P(None, None, ALL), "bias": P(None, ALL)},
    "depth": {"x": P(None, None, ALL), "weight": P(ALL)},
    "rows_and_columns": {"x": P("a"), "weight": P(None, None, "b"), "bias": P(None, "b")},
    "rows_and_depth": {"x": P("a", None, "b"), "weight": P("b")},
    "fsdp": {"x": P(ALL), "weight": P(ALL)},
    "bias": {"x": P("a"), "bias": P(None, "b")},
}


def arrays():
    generator = np.random.default_rng(0)
    shapes = {"x": (8, 4, 16), "weight": (16, 3, 16), "bias": (3, 16), "dout": (8, 4, 3, 16)}
    drawn = {
        name: (generator.standard_normal(shape) * 10 ** generator.uniform(-2, 2, shape)).astype("f")
        for name, shape in shapes.items()
    }
    # The scales are powers of two, so that division by them is exact in every program.
    drawn = {name: np.clip(x, -448, 448) for name, x in drawn.items()}
    drawn["x"][..., -1] = drawn["weight"][-1] = drawn["weight"][:, 2, -1] = 448
    drawn["dout"][..., 2, -1] = -448
    return drawn


def value_and_gradients(recipe, activation, backend, arrays):
    def fn(x, weight, bias):
        options = {"activation": activation, "precision": recipe, "backend": backend}
        return linear(x, weight, bias, **options)

    dout = arrays["dout"]
    out, pull = jax.vjp(fn, arrays["x"], arrays["weight"], arrays["bias"])
    sharding = jax.typeof(out).sharding
    if not sharding.mesh.empty and sharding.mesh.explicit_axes:
        dout = jax.sharding.reshard(dout, sharding)
    return out, *pull(dout)


@pytest.mark.parametrize(
    ("recipe", "backend"), [("row", "auto"), ("row", "xla"), ("tensor", "auto")]
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.covering(("recipe", "backend", "kind"), ("sharding", "kind"), ("sharding", "recipe"))
def test_sharded_layer_equals_that_of_one_device(recipe, backend, kind, sharding):
    given, mesh = arrays(), make_mesh(kind)
    specs = {name: SHARDINGS[sharding].get(name, P()) for name in given}
    placed = put(mesh, given, specs)
    for activation in (None, "gelu"):
        # A dout that differs in its last bit may be rounded to another float8 number.
        names = ("out", "dx", "dweight", "dbias")[:: 1 if activation is None else 2]
        run = jax.jit(value_and_gradients, static_argnums=(0, 1, 2))
        found = run(recipe, activation, backend, placed)
        wanted = on_one_device(
            lambda a, of=activation: value_and_gradients(recipe, of, "xla", a), given
        )
        every = dict(
            zip(("out", "dx", "dweight", "dbias"), zip(found, wanted, strict=True), strict=True)
        )
        for name in names:
            a, b = (np.asarray(x) for x in every[name])
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * abs(b).max(), err_msg=name)
        for x, gradient in zip(("x", "weight", "bias"), found[1:], strict=True):
            if kind == "Explicit":
                assert gradient.sharding.is_equivalent_to(placed[x].sharding, gradient.ndim)


@pytest.mark.parametrize("recipe", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_weight_rounded_before_a_loop_stays_in_shards(recipe, kind):
    def gradients(weight, x):
        def total(weight):
            return jnp.sin(linear(x, weight, precision=recipe, backend="xla")).sum()

        return jax.value_and_grad(total)(weight)

    def in_loop(weight, xs, hoists):
        step = functools.partial(gradients, weight)
        if hoists:
            step = hoist_rounding(gradients, weight, xs[0])
        return jax.lax.map(step, xs)

    given, mesh = arrays(), make_mesh(kind)
    placed = put(mesh, given, SHARDINGS["fsdp"] | {"bias": P(), "dout": P()})
    weight, xs = placed["weight"], jnp.stack([placed["x"], 2 * placed["x"]])
    run = jax.jit(in_loop, static_argnums=2)
    found, wanted = (run(weight, xs, hoists) for hoists in (True, False))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 * abs(other).max())
    assert found[1].sharding.is_equivalent_to(wanted[1].sharding, found[1].ndim)
    program = jax.make_jaxpr(in_loop, static_argnums=2)(weight, xs, True)
    (loop,) = (eqn for eqn in program.eqns if eqn.primitive.name == "scan")
    assert any("float8" in str(variable.aval.dtype) for variable in loop.invars)


# Of a layer norm with a residual before a layer or an MLP. `up` is the layer's weight.
BLOCK_SHARDINGS = {
    "rows": {"x": P(ALL), "residual": P(ALL)},
    "tensor": {"up": P(None, None, ALL), "bias": P(None, ALL), "down": P(ALL)},
    "rows_and_tensor": {"x": P("a"), "residual": P("a"), "up": P(None, None, "b"), "down": P("b")},
    "fsdp": {"x": P(ALL), "residual": P(ALL), "up": P(ALL), "down": P(None, ALL), "scale": P(ALL)},
}


def block_arrays(kind):
    """Rows and columns of the shards are of different magnitudes: each would have its own scale."""
    generator = np.random.default_rng(0)
    columns = {"gelu": (32,), "rotated": (4, 8, 4)}.get(kind, (2, 32))
    of_dout = (8, 4, *columns) if kind in ("linear", "rotated") else (8, 4, 16)
    shapes = {"x": (8, 4, 16), "residual": (8, 4, 16), "x_bias": (16,), "scale": (16,)}
    shapes |= {"norm_bias": (16,), "up": (16, *columns), "bias": columns}
    shapes |= {"down": (32, 16), "dout": of_dout, "dh": (8, 4, 16)}
    drawn = {name: generator.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    drawn["x"] *= np.linspace(0.1, 1, 8, dtype="f")[:, None, None]
    drawn["up"] *= np.linspace(0.05, 0.5, columns[-1], dtype="f")
    if kind in ("linear", "rotated"):
        del drawn["down"]
    return drawn


def block_with_gradients(kind, backend, arrays):
    def fn(given):
        names = ("x", "residual", "x_bias", "scale", "norm_bias")
        norm = NormArrays(*(given[name] for name in names))
        static = {"eps": 1e-5, "backend": backend}
        if kind in ("linear", "rotated"):
            static["rotation"] = rotation if kind == "rotated" else None
            return float8_norm_linear(norm, given["up"], given["bias"], **static)
        layers = given["up"], given["bias"], given["down"]
        return float8_mlp(norm, *layers, activation=kind, **static)

    options = PackedRotation(16, 8, interleaved=False, by_parts=True)
    rotation = Rotation(*rope_table(jnp.arange(4), 4, theta=10.0), options)
    given = {name: x for name, x in arrays.items() if name not in ("dout", "dh")}
    outputs, pull = jax.vjp(fn, given)
    cotangents = []
    for out, cotangent in zip(outputs, (arrays["dout"], arrays["dh"]), strict=True):
        sharding = jax.typeof(out).sharding
        if not sharding.mesh.empty and sharding.mesh.explicit_axes:
            cotangent = jax.sharding.reshard(cotangent, sharding)
        cotangents.append(cotangent)
    return {"out": outputs[0], "h": outputs[1], **pull(tuple(cotangents))[0]}


@pytest.mark.parametrize("block", ["linear", "rotated", "gelu", "swiglu"])
@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("sharding", BLOCK_SHARDINGS)
@pytest.mark.covering(("sharding", "block"), ("backend", "kind"))
def test_sharded_norm_with_a_layer_or_an_mlp_equals_that_of_one_device(
    block, backend, kind, sharding
):
    given, mesh = block_arrays(block), make_mesh(kind)
    specs = {name: BLOCK_SHARDINGS[sharding].get(name, P()) for name in given}
    if block == "gelu":  # columns without parts
        of_columns = {name: P(*(axis for axis in specs[name][1:])) for name in ("up", "bias")}
        specs["up"] = P(*specs["up"][:1], *of_columns["up"][1:])
        specs["bias"] = of_columns["bias"]
    placed = put(mesh, given, specs)
    found = jax.jit(block_with_gradients, static_argnums=(0, 1))(block, backend, placed)
    wanted = on_one_device(functools.partial(block_with_gradients, block, "xla"), given)
    for name, b in wanted.items():
        # An element that differs in its last bit may be rounded to another float8 number. With a
        # scale for each shard most would be.
        away = np.linalg.norm(np.asarray(found[name]) - np.asarray(b)) / np.linalg.norm(b)
        assert away < 0.004, name
        if kind == "Explicit" and name in placed:
            assert found[name].sharding.is_equivalent_to(placed[name].sharding, b.ndim)


@pytest.mark.parametrize("check_vma", [True, False])
def test_layer_in_a_shard_map_equals_that_of_one_device(check_vma):
    given, mesh = arrays(), make_mesh("Auto")
    specs = {"x": P(ALL), "weight": P(), "bias": P(), "dout": P(ALL)}

    def of_shard(arrays):
        out, dx, *of_weights = value_and_gradients("row", None, "auto", arrays)
        # With check_vma JAX sums the gradients of what all shards share.
        return out, dx, *(x if check_vma else jax.lax.psum(x, ALL) for x in of_weights)

    mapped = jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P(ALL), P(ALL), P(), P()),
        check_vma=check_vma,
    )
    wanted = on_one_device(lambda arrays: value_and_gradients("row", None, "xla", arrays), given)
    for a, b in zip(jax.jit(mapped)(given), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * abs(b).max())


@pytest.mark.parametrize("recipe", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_counts_of_sharded_arrays_are_those_of_one_device(recipe, kind):
    given = arrays()
    given["x"][3, 2, 1], given["dout"][5, 1, 0, 2] = np.inf, np.nan
    given["dout"][0, 0, 0] *= 2.0**-40

    def counts(arrays):
        def loss(x, weight):
            out, dout = linear(x, weight, precision=recipe), arrays["dout"]
            if kind == "Explicit" and not jax.typeof(out).sharding.mesh.empty:
                dout = jax.sharding.reshard(dout, jax.typeof(out).sharding)
            return (out * dout).sum()

        counted = jax.grad(count_float8(loss))
        return counted(Float8Counts.zeros(), arrays["x"], arrays["weight"])

    specs = {name: SHARDINGS["fsdp"].get(name, P()) for name in given}
    placed = put(make_mesh(kind), given, specs)
    found, wanted = jax.jit(counts)(placed), on_one_device(counts, given)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert (np.asarray(found.underflow) > 0).all()
    assert np.asarray(found.overflow).tolist() == [1, 1]
