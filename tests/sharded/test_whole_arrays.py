"""What is of whole arrays: random bits, norms and means on sharded arrays, and tiles."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    ALL,
    CALLS,
    SHAPE,
    collectives,
    expected,
    make_mesh,
    on_one_device,
    put,
    value_and_gradients,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import ops, testing
from jaxllm.core import shards
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.block import attention, ffn
from jaxllm.ops.gemm import tile_order
from jaxllm.training import loader

KINDS = ("Auto", "Explicit")
LEAVES = {
    "first": (16, 24),
    "last": (8, 32),
    "middle": (4, 8, 6),
    "both": (2, 8, 8),
    "whole": (24,),
}
SPECS = {"first": P(ALL), "last": P(None, ALL), "middle": P(None, ALL), "whole": P()}
SPECS |= {"both": P("a", None, "b")}


def drawn(dtype, mean=0.0, seed=0):
    return {
        name: np.asarray(
            mean + np.random.default_rng((seed, i)).standard_normal(shape), np.float32
        ).astype(dtype)
        for i, (name, shape) in enumerate(LEAVES.items())
    }


def is_tree(node):
    return isinstance(node, dict) and "first" in node


def as_is(tree):
    return jax.tree.map(lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}"), jax.device_get(tree))


@pytest.mark.parametrize("backend", ["auto", "pallas", "xla"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering(("backend",), ("kind",))
def test_stochastic_rounding_is_the_same_bits_as_on_one_device(kind, backend):
    mesh = make_mesh(kind)
    # The Pallas kernel numbers the elements of a shard in one sequence.
    specs = {name: P(ALL) for name in ("first", "whole")} if backend == "pallas" else SPECS
    options = {"step": 3, "lr": 0.01, "seed": 7}
    masters, copies = drawn(np.float32, 1.0), {"copy_dtype": jnp.bfloat16}
    trees = drawn(np.float32, seed=1), drawn(np.float32, seed=2), drawn(np.float32, 9.0, seed=3)
    params = {name: x.astype(jnp.bfloat16) for name, x in masters.items()}
    programs = {"masters": (masters, copies), "params": (params, {})}

    def run(backend):
        def update(given):
            return {
                name: ops.adamw_update(*given[name], **options, **more, backend=backend)
                for name, (_, more) in programs.items()
            }

        return update

    given = {name: (params, *trees) for name, (params, _) in programs.items()}
    if backend == "pallas":
        given = jax.tree.map(lambda tree: {n: tree[n] for n in specs}, given, is_leaf=is_tree)
    wanted = on_one_device(run(backend), given)
    unrounded = on_one_device(
        lambda given: ops.adamw_update(*given, step=3, lr=0.01, **copies), given["masters"]
    )
    assert any(
        (as_is(a) != as_is(b)).any()
        for a, b in zip(wanted["masters"][3].values(), unrounded[3].values(), strict=True)
    )
    placed = {name: tuple(put(mesh, tree, specs) for tree in of) for name, of in given.items()}
    found = jax.jit(run(backend))(placed)
    jax.tree.map(np.testing.assert_array_equal, as_is(found), as_is(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_donated_state_is_updated_in_place_and_keeps_its_shardings(kind):
    mesh = make_mesh(kind)
    trees = [put(mesh, drawn(np.float32, 1.0, seed), SPECS) for seed in range(4)]
    shardings = jax.tree.map(lambda x: x.sharding, trees[0])

    def update(params, grads, m, v):
        return ops.adamw_update(params, grads, m, v, step=1, lr=0.1)

    wanted = on_one_device(update, *map(jax.device_get, trees))
    out_shardings = (shardings,) * 3 if kind == "Auto" else None
    run = jax.jit(update, donate_argnums=(0, 2, 3), out_shardings=out_shardings)
    program = run.lower(*trees).compile()
    assert not [kind for kind, _ in collectives(program)]
    bytes_of_shards = sum(
        x.addressable_shards[0].data.nbytes for tree in (0, 2, 3) for x in trees[tree].values()
    )
    aliased = getattr(program.memory_analysis(), "alias_size_in_bytes", None)
    assert aliased == bytes_of_shards
    found = program(*trees)
    testing.assert_close(jax.device_get(found), wanted, "float32")
    for tree in found:
        for name, x in tree.items():
            assert x.sharding.is_equivalent_to(shardings[name], x.ndim), name


@pytest.mark.parametrize("kind", KINDS)
def test_global_norm_counts_each_element_once(kind):
    mesh, tree = make_mesh(kind), drawn(np.float32)
    exact = np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in tree.values()))
    given = put(mesh, tree, SPECS)
    stacked = {name: np.stack([x, 2 * x]) for name, x in tree.items()}
    of_stacked = put(mesh, stacked, {name: P(None, *spec) for name, spec in SPECS.items()})
    found = jax.jit(lambda trees: (ops.global_norm(trees[0]), jax.vmap(ops.global_norm)(trees[1])))
    program = found.lower((given, of_stacked)).compile()
    one, two = program((given, of_stacked))
    np.testing.assert_allclose(one, exact, rtol=1e-6)
    np.testing.assert_allclose(two, [exact, 2 * exact], rtol=1e-6)
    assert {kind for kind, _ in collectives(program)} == {"all-reduce"}


def test_global_norm_passes_no_empty_array_to_a_kernel():
    tree = [np.ones((16, 9), np.float32), np.zeros((0, 4), np.float32)]
    program = jax.jit(ops.global_norm).trace(tree)
    calls = [e for e in program.jaxpr.eqns if e.primitive.name.startswith("custom_")]
    assert calls
    assert all(0 not in v.aval.shape for e in calls for v in e.invars)
    assert ops.global_norm(tree) == 12
    assert ops.global_norm(tree[1:]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_stochastic_rounding_under_vmap_is_the_same_bits(kind):
    mesh = make_mesh(kind)
    trees = [drawn(np.float32, mean, seed) for seed, mean in enumerate((1.0, 0.0, 0.0, 9.0))]
    stacked = [jax.tree.map(lambda x: np.stack([x, 2 * x]), tree) for tree in trees]
    options = {"step": 3, "lr": 0.01, "seed": 7, "copy_dtype": jnp.bfloat16}
    update = jax.vmap(lambda *trees: ops.adamw_update(*trees, **options))
    wanted = on_one_device(update, *stacked)
    specs = {name: P(None, *spec) for name, spec in SPECS.items()}
    found = jax.jit(update)(*(put(mesh, tree, specs) for tree in stacked))
    jax.tree.map(np.testing.assert_array_equal, as_is(found), as_is(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_mean_counts_labels_of_all_shards(kind):
    mesh = make_mesh(kind)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 24, 64).astype(np.int32)
    labels[:13], labels[40:48] = -100, -100  # all of the first shard and one more, and of the sixth
    hidden, weight = rng.standard_normal((64, 16)), rng.standard_normal((16, 24))
    arrays = {"hidden": hidden.astype(np.float32), "weight": weight.astype(np.float32)}

    def losses(arrays, labels, backend):
        logits = arrays["hidden"] @ arrays["weight"]
        return (
            ops.cross_entropy(logits, labels, backend=backend)
            + 2 * ops.linear_cross_entropy(
                arrays["hidden"], arrays["weight"], labels, chunk_rows=3, backend=backend
            )
        )  # fmt: skip

    run = jax.value_and_grad(losses)
    wanted = on_one_device(lambda *x: run(*x, "xla"), arrays, labels)
    given = put(mesh, arrays, {"hidden": P(ALL), "weight": P()})
    labels = jax.device_put(labels, NamedSharding(mesh, P(ALL)))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda *x: run(*x, "auto"))(given, labels)
    testing.assert_close(jax.device_get(found), wanted, "float32")


@pytest.mark.parametrize(
    ("shape", "tiles", "spec"),
    [
        ((8 * 128, 200), (8, 1), (ALL, None)),
        ((16, 128, 200), (16, 1, 1), (ALL, None, None)),
        ((2, 8 * 128, 200), (2, 8, 1), (None, ALL, None)),
        ((16, 64, 200), (8, 1), (ALL, None, None)),  # all rows are one dimension
        ((128, 8 * 384), (1, 8), (None, ALL)),
        ((2, 128, 4 * 384), (2, 1, 4), ("a", None, "b")),
    ],
)
def test_shards_in_tile_order_are_the_rows_and_columns_of_the_shards(shape, tiles, spec):
    mesh = make_mesh("Auto")
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    packed = tile_order.pack(jnp.asarray(x))
    assert packed.whole_tiles == tiles
    # Each device has its rows and columns, packed; together they are the whole array, packed.
    by_tiles = spec if len(tiles) == len(spec) else (spec[0], spec[-1])
    parts = tuple(8 if by == ALL else SHAPE.get(by, 1) for by in by_tiles)
    placed = jax.device_put(x, NamedSharding(mesh, P(*spec)))
    local = jax.shard_map(
        lambda x: tile_order.pack(x).array, mesh=mesh, in_specs=P(*spec), out_specs=P(*by_tiles)
    )
    np.testing.assert_array_equal(jax.jit(local)(placed), packed.array)
    back = jax.shard_map(
        lambda array: packed.shard(array, parts).unpack(),
        mesh=mesh, in_specs=P(*by_tiles), out_specs=P(*spec),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(back)(packed.array), x)


@pytest.mark.parametrize(
    ("shape", "tiles", "shardable"),
    [
        ((100, 200), (1, 1), ""),
        ((4, 256, 200), (4, 2, 1), "row0 row1"),
        ((4, 128, 200), (4, 1, 1), "row0"),
        ((4, 64, 200), (2, 1), "row0"),
        ((100, 2 * 384), (1, 2), "F"),
        ((256, 2 * 384), (2, 2), "row0 F"),
        ((128, 384), (1, 1), ""),
    ],
)
def test_rows_and_columns_that_fill_no_tile_are_not_sharded(shape, tiles, shardable):
    packed = tile_order.pack(jnp.zeros(shape))
    assert packed.whole_tiles == tiles
    rule = ShardingRule("... F -> ... F", "... F")
    (operands,) = rule.operands([packed])
    call = shards.Call(shards.Function(lambda x: x, ()), "", rule, operands)
    layout = shards.make_layout(call, [packed], shards.trace_call(lambda x: x, [packed]))
    assert layout.shardable & set(layout.operands[0]) == set(shardable.split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    ["layer_norm", "linear", "flash_attention", "global_norm", "cross_entropy-none", "embed"],
)
@pytest.mark.covering(("name",), ("kind",))
def test_eager_calls_run_on_shards(name, kind):
    mesh = make_mesh(kind)
    (call,) = [call for call in CALLS if str(call) == name]
    given = put(mesh, call.arrays(), call.specs({call.sharded.split()[0]: ALL}))
    found = value_and_gradients(call, "auto", given)
    testing.assert_close(jax.device_get(found), expected(call), call.dtype, what=name)
    first = next(iter(given.values()))
    if name != "global_norm":
        assert math.prod(found[0].sharding.shard_shape(found[0].shape)) == found[0].size / 8
    assert found[0].sharding.device_set == first.sharding.device_set


@pytest.mark.parametrize("with_mesh", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering(("kind",), ("with_mesh",))
def test_numpy_arrays_and_numbers_mix_with_sharded_arrays(kind, with_mesh):
    mesh = make_mesh(kind)
    names = ("layer_norm", "linear", "flash_attention-all_options", "embed", "linear_cross_entropy")
    calls = {str(call): call for call in CALLS if str(call) in names}
    assert len(calls) == len(names)
    constants = {name: call.arrays() for name, call in calls.items()}
    given = {}
    for name, call in calls.items():
        spec = call.specs({call.sharded.split()[0]: ALL})
        first = "token_table" if name == "embed" else next(iter(call.inputs))
        spec = spec if name != "embed" else {first: P()}
        given[name] = put(mesh, {first: constants[name].pop(first)}, spec)

    def run(given):
        def loss(some, name, backend):
            out = calls[name](some | constants[name], backend)
            return jnp.sum(out * out)

        return {name: jax.value_and_grad(loss)(some, name, backend) for name, some in given.items()}

    backend = "xla"
    wanted = on_one_device(run, jax.device_get(given))
    backend = "auto"
    if with_mesh:
        with jax.set_mesh(mesh):
            found = jax.jit(run)(given)
    else:
        found = jax.jit(run)(given)
    for name, actual in found.items():
        testing.assert_close(jax.device_get(actual), wanted[name], "float32", what=name)


def test_whether_a_block_is_fused_is_decided_by_shapes_alone():
    mesh, found = make_mesh("Explicit"), []

    def ask(x, qkv, out):
        layers = ({"weight": qkv}, {"weight": out})
        h = ops.residual(x)
        found.append(attention._unsupported(h, None, *layers, None, None, None, attend=None))
        found.append(ffn._unsupported(h, None, *layers, activation="gelu"))
        return x

    arrays = {
        "x": jnp.zeros((8, 8, 64)),
        "qkv": jnp.zeros((64, 3, 4, 16)),
        "out": jnp.zeros((64, 64)),
    }
    specs = {"x": P("a"), "qkv": P(None, None, "b"), "out": P("b")}
    with jax.set_mesh(mesh):
        jax.jit(ask)(**put(mesh, arrays, specs))
    assert len(found) == 2


@pytest.mark.parametrize("spec", [P(None, "a", "b"), P("a", "b"), P(None, ("b", "a")), P("b")])
def test_a_batch_that_is_read_in_shards_is_the_whole_batch(spec):
    tokens = np.arange(4 * 8 * 12, dtype=np.int32).reshape(4, 8, 12)
    sharding = NamedSharding(make_mesh("Auto"), spec)

    def read(rows):
        return (tokens.reshape(-1, 12)[rows.start : rows.stop],)

    (found,) = loader.load_batch(sharding, tokens.shape, read)
    assert found.sharding == sharding
    np.testing.assert_array_equal(found, tokens)
