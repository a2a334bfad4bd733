"""Token tables, LM heads and logits in shards of the vocabulary, with every option."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import ALL, collectives, make_mesh, on_one_device
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import ops, testing

KINDS = ("Auto", "Explicit")
ROWS, WIDTH, VOCAB, POSITIONS = 16, 24, 32, 10
# Of shards with 8 columns the last has padding alone, and the one before it some.
PADDED = {"vocab_size": 21}
EDGES = np.array([0, 7, 8, 15, 16, 20, -1, 19, -100, 3, 3, 9, 14, 17, 2, 5], np.int32)
OUTSIDE = np.where(np.arange(ROWS) == 4, 25, EDGES)  # a column of padding
# The mesh axes of the rows and of the vocabulary.
SHARDINGS = {"V": (None, "b"), "rows x V": ("a", "b"), "V over all": (None, ALL)}

LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": PADDED,
    "edges": {**PADDED, "labels": EDGES},
    "outside": {**PADDED, "labels": OUTSIDE},
    "ignore_index": {"ignore_index": 3, "labels": np.abs(EDGES) % 21},
    "smoothing": {"label_smoothing": 0.2, **PADDED},
    "z_loss": {"z_loss": 0.3},
    "all": {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "sum", **PADDED, "labels": EDGES},
    "bfloat16": {"dtype": "bfloat16", **PADDED, "labels": EDGES},
    "float16": {"dtype": "float16", **PADDED},
}
OF_LINEAR: dict[str, dict[str, Any]] = {
    "transposed": {"transpose_weight": True, **PADDED},
    "two chunks": {"chunk_rows": 8, **PADDED, "label_smoothing": 0.1},
    "chunks that overlap": {"chunk_rows": 3, "transpose_weight": True, "labels": EDGES},
    "bfloat16 chunks": {"chunk_rows": 4, "dtype": "bfloat16", "transpose_weight": True},
}
OF_LOGITS: dict[str, dict[str, Any]] = {
    "none": {"reduction": "none", **PADDED, "labels": EDGES, "z_loss": 0.1},
    "masked": {"masked": True},
    "large": {"size": 1e4, "label_smoothing": 0.1},
}


def normal(seed, *shape, dtype="float32", size=1.0):
    values = np.random.default_rng(seed).standard_normal(shape) * size
    return values.astype(jnp.dtype(dtype))


def labels_of(variant):
    drawn = np.random.default_rng(9).integers(-5, 21, ROWS).astype(np.int32)
    return variant.pop("labels", drawn)


def linear_case(options, rows, of_vocabulary):
    """A function of arrays, the arrays and their shardings, and the indices of gradients."""
    options = dict(options)
    labels, dtype = labels_of(options), options.pop("dtype", "float32")
    shape, spec = (WIDTH, VOCAB), P(None, of_vocabulary)
    if options.get("transpose_weight"):
        shape, spec = shape[::-1], P(of_vocabulary, None)
    arrays = (normal(0, ROWS, WIDTH, dtype=dtype), normal(1, *shape, dtype=dtype, size=0.3), labels)
    fn = functools.partial(ops.linear_cross_entropy, **options)
    return fn, arrays, (P(rows, None), spec, P(rows)), (0, 1)


def logits_case(options, rows, of_vocabulary):
    options = dict(options)
    labels, dtype = labels_of(options), options.pop("dtype", "float32")
    logits = normal(0, ROWS, VOCAB, dtype=dtype, size=options.pop("size", 3.0))
    if options.pop("masked", False):
        # No row lacks all columns, or the column of its label.
        columns = np.arange(VOCAB)
        logits = np.where((columns >= 8) & (columns != labels[:, None]), -np.inf, logits)
        logits = logits.astype(np.float32)
    fn = functools.partial(ops.cross_entropy, **options)
    return fn, (logits, labels), (P(rows, of_vocabulary), P(rows)), (0,)


def embed_case(op, dtype, positions, which, rows, of_vocabulary):
    tokens = np.random.default_rng(3).integers(-4, VOCAB + 4, (4, 8)).astype(np.int32)
    table = normal(1, VOCAB, WIDTH, dtype=dtype)
    arrays = (tokens, table, normal(2, POSITIONS, WIDTH, dtype=dtype) if positions else None)
    specs = (P(rows, None), P(of_vocabulary, None), P(None, None) if positions else None)
    return getattr(ops, op), arrays, specs, which


CASES = {
    **{f"linear {n}": (linear_case, x) for n, x in {**LOSSES, **OF_LINEAR}.items()},
    **{f"logits {n}": (logits_case, x) for n, x in {**LOSSES, **OF_LOGITS}.items()},
    "embed": (embed_case, "embed", "float32", False, (1,)),
    "embed positions": (embed_case, "embed", "float32", True, (1, 2)),
    "embed bfloat16": (embed_case, "embed", "bfloat16", True, (1, 2)),
    "embed position gradient": (embed_case, "embed", "float32", True, (2,)),
    "tied": (embed_case, "tied_embed", "float32", False, (1,)),
    "tied positions": (embed_case, "tied_embed", "float32", True, (1, 2)),
}


def make(name, sharding):
    build, *static = CASES[name]
    return build(*static, *SHARDINGS[sharding])


def value_and_gradients(name, sharding, backend, arrays):
    """The value of a case without a derivative, and with one, and the gradients."""
    fn, _, _, which = make(name, sharding)

    def scalar(*some):
        given = list(arrays)
        for i, x in zip(which, some, strict=True):
            given[i] = x
        out = fn(*given, backend=backend)
        terms = (x * x.astype(jnp.float32) if x.ndim else 3 * x for x in jax.tree.leaves(out))
        return sum(map(jnp.sum, terms)), out

    some = [arrays[i] for i in which]
    (_, out), gradients = jax.value_and_grad(scalar, range(len(some)), has_aux=True)(*some)
    return fn(*arrays, backend=backend), out, gradients


@functools.cache
def expected(name):
    _, arrays, *_ = make(name, "V")
    run = functools.partial(value_and_gradients, name, "V", "xla")
    return on_one_device(lambda arrays: run(arrays), arrays)


def place(mesh, x, spec):
    return None if x is None else jax.device_put(x, NamedSharding(mesh, spec))


@pytest.mark.filterwarnings("error::jaxllm.core.gathers.GatherWarning")
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering(("sharding",), ("kind",))
def test_shards_match_one_device_and_nothing_is_gathered(kind, sharding):
    mesh, given, out_shardings = make_mesh(kind), {}, {}
    # Some for what one sharding shows of the other.
    names = list(CASES)[:: {"rows x V": 1, "V": 2, "V over all": 4}[sharding]]
    for name in names:
        _, arrays, specs, which = make(name, sharding)
        given[name] = [place(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
        of_gradients = tuple(NamedSharding(mesh, specs[i]) for i in which)
        out_shardings[name] = (None, None, of_gradients)

    def run(given):
        return {n: value_and_gradients(n, sharding, "auto", x) for n, x in given.items()}

    jitted = jax.jit(run, out_shardings=out_shardings if kind == "Auto" else None)
    program = jitted.lower(given).compile()
    found = program(given)
    for name, actual in found.items():
        for x, of_gradient in zip(actual[2], out_shardings[name][2], strict=True):
            assert x.sharding.is_equivalent_to(of_gradient, x.ndim), name
        dtype = next(x for x in ("bfloat16", "float16", "float32") if x in name or x == "float32")
        check(name, jax.device_get(actual), expected(name), dtype)
    moved = {kind for kind, _ in collectives(program)}
    # Sums alone; what lies in shards is summed in shards.
    assert moved <= {"all-reduce", "reduce-scatter"}, moved


def check(name, found, wanted, dtype):
    """Compares, with NaN where one device has NaN."""
    found, wanted = (jax.tree.map(lambda x: np.asarray(x, np.float32), x) for x in (found, wanted))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), name)
    found, wanted = (jax.tree.map(np.nan_to_num, x) for x in (found, wanted))
    testing.assert_close(found, wanted, dtype, what=name)


def test_an_outside_label_makes_its_row_nan():
    losses, _, (dlogits,) = expected("logits outside")
    assert math.isnan(losses)
    assert np.isnan(dlogits[4, :21]).all()
    assert not dlogits[:, 21:].any()


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_exact(kind):
    """One shard has a token, so the sum over shards rounds nothing."""
    mesh = make_mesh(kind)
    for dtype in ("float32", "bfloat16", "float16"):
        tokens = np.arange(-4, VOCAB + 4, dtype=np.int32).reshape(4, 10)
        table = normal(0, VOCAB, WIDTH, dtype=dtype)
        arrays = place(mesh, tokens, P()), place(mesh, table, P(ALL))
        out = jax.jit(ops.embed)(*arrays)
        np.testing.assert_array_equal(out, table[np.clip(tokens, 0, VOCAB - 1)])


def test_derivatives_of_derivatives_match_one_device():
    mesh = make_mesh("Explicit")
    options = {**LOSSES["all"], "reduction": "mean"}
    fn, arrays, specs, _ = linear_case(options, "a", "b")

    def second(hidden, weight, labels):
        def gradient(hidden):
            return jax.grad(fn)(hidden, weight, labels, backend="xla")

        return jax.jvp(gradient, (hidden,), (hidden,))[1]

    with jax.set_mesh(mesh):
        found = jax.jit(second)(*map(functools.partial(place, mesh), arrays, specs))
    want = on_one_device(second, *arrays)
    testing.assert_close(jax.device_get(found), want, "float32", what="second derivative")


@pytest.mark.parametrize("check_vma", [True, False])
def test_rows_on_manual_axes_match_one_device(check_vma):
    mesh = make_mesh("Explicit")
    fn, arrays, specs, which = linear_case({"reduction": "sum", "chunk_rows": 3}, "a", "b")

    def run(*arrays):
        return jax.value_and_grad(fn, which)(*arrays)

    def of_shard(*arrays):
        loss, (dhidden, dweight) = run(*arrays)
        if not check_vma:  # else JAX sums the gradient of what all shards share
            dweight = jax.lax.psum(dweight, "a")
        return jax.lax.psum(loss, "a"), (dhidden, dweight)

    mapped = jax.shard_map(
        of_shard,
        mesh=mesh,
        in_specs=(P("a"), P(), P("a")),
        out_specs=(P(), (P("a"), P())),
        axis_names=frozenset("a"),
        check_vma=check_vma,
    )
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)(*map(functools.partial(place, mesh), arrays, specs))
    testing.assert_close(jax.device_get(found), on_one_device(run, *arrays), "float32", what="")
