"""Attention of sequences in shards: context parallelism."""

import collections
import functools

import jax
import numpy as np
import pytest
from calls import collectives, make_mesh, on_one_device
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm import nn, ops, testing
from jaxllm.core import ffi
from jaxllm.ops.attention import context

KINDS = ("Auto", "Explicit")
FOUR, TWO, EIGHT = P(None, "b"), P(None, "a"), P(None, ("a", "b"))
BATCH, HEADS = P("a", "b"), P(None, "b", "a")


def draw(i, shape):
    return np.random.default_rng(i).standard_normal(shape).astype(np.float32)


def ids(i, length):
    return np.random.default_rng(i).integers(3, size=(2, length)).astype(np.int32)


def table(length, shape=()):
    angles = np.abs(draw(9, (*shape, length, 3)))
    return np.cos(angles), np.sin(angles)


# The lengths of queries and keys, the sharding, and the options. Of 12 queries four devices have
# three each, and swap no halves.
VARIANTS = {
    "causal": (16, 16, EIGHT, {"causal": True}),
    "axes_in_another_order": (16, 16, P(None, ("b", "a")), {"causal": True}),
    "batch": (16, 16, BATCH, {"causal": True}),
    "heads": (16, 16, HEADS, {"causal": True}),
    "odd_shards": (12, 12, FOUR, {"causal": True}),
    "more_keys": (16, 32, FOUR, {"causal": True, "softcap": 2.0}),
    "more_queries": (32, 16, FOUR, {"causal": True}),
    "narrow_window": (16, 16, BATCH, {"causal": True, "window": 3}),
    "wide_window": (16, 24, FOUR, {"causal": True, "window": 7}),
    "window_of_all": (16, 24, FOUR, {"window": 24}),
    "full": (16, 24, BATCH, {}),
    "full_window": (16, 24, FOUR, {"window": 3}),
    "two_sided_window": (16, 24, FOUR, {"window": (6, 1)}),
    "window_to_the_left": (16, 16, BATCH, {"window": (None, 2)}),
    "window_to_the_right": (16, 16, FOUR, {"window": (5, None)}),
    "full_window_more_queries": (40, 16, FOUR, {"window": 4, "softcap": 2.0}),
    "segments": (16, 16, TWO, {"causal": True, "segment_ids": ids(1, 16)}),
    "full_segments": (16, 24, BATCH, {"segment_ids": (ids(1, 16), ids(2, 24))}),
    "full_window_segments": (16, 16, FOUR, {"window": 6, "segment_ids": ids(1, 16)}),
    "rope": (16, 16, TWO, {"causal": True, "rope_table": table(16), "interleaved": True}),
    "rope_of_each": (12, 12, FOUR, {"window": 3, "rope_table": table(12, (2,))}),
    "bias_of_heads": (16, 24, HEADS, {"causal": True}),
    "bias_of_sequences": (16, 16, EIGHT, {"causal": True}),
    "bias_of_each": (16, 16, BATCH, {"window": (5, 3), "segment_ids": ids(1, 16)}),
    "bias_of_all": (16, 24, BATCH, {"softcap": 3.0}),
    "packed": (16, 16, TWO, {"causal": True, "rope_table": table(16, (2,))}),
    "packed_window": (16, 16, TWO, {"window": 3, "segment_ids": ids(1, 16)}),
}


# Of a bias the sequences and the heads.
BIASES = {
    "bias_of_heads": (1, 4), "bias_of_sequences": (2, 1), "bias_of_each": (2, 4),
    "bias_of_all": (1, 1),
}  # fmt: skip


def arrays_of(name):
    T, S, _, options = VARIANTS[name]
    if "packed" in name:
        arrays = {"qkv": draw(0, (2, T, 8 * 8))}
    else:
        shapes = {"q": (2, T, 4, 8), "k": (2, S, 2, 8), "v": (2, S, 2, 8)}
        if name in BIASES:
            shapes["bias"] = (*BIASES[name], T, S)
        arrays = {array: draw(i, shape) for i, (array, shape) in enumerate(shapes.items())}
    return arrays, {key: x for key, x in options.items() if key in ("segment_ids", "rope_table")}


def results(name, arrays, extras, backend="auto"):
    """The output of a variant, and the gradients of a sum of squares."""
    options = VARIANTS[name][3] | extras | {"backend": backend}

    def attend(arrays):
        if "packed" in name:
            return ops.flash_attention_packed(arrays["qkv"], 4, 2, **options)
        return ops.flash_attention(**arrays, **options)

    out, pull = jax.vjp(attend, arrays)
    return out, pull(2 * out)[0]


def put(mesh, name):
    spec = VARIANTS[name][2]

    def place(x):
        of_x = P(*spec[: 2 if x.ndim == 3 else x.ndim])
        of_x = P(*spec[1:2]) if x.ndim == 2 and x.dtype == np.float32 else of_x  # a table (T, R)
        return jax.device_put(x, NamedSharding(mesh, of_x))

    given, extras = arrays_of(name)
    bias = given.pop("bias", None)
    arrays, extras = jax.tree.map(place, (given, extras))
    if bias is not None:
        batch, tokens, heads = (*spec, None)[:3]
        of_bias = P(batch if bias.shape[0] > 1 else None, heads, tokens)
        arrays["bias"] = jax.device_put(bias, NamedSharding(mesh, of_bias))
    return arrays, extras


# Every second variant, from the first or the second on: in one program all would take a minute.
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering(("first",), ("kind",))  # a device computes the same under both kinds of axes
def test_sharded_sequences_match_one_device(kind, first):
    mesh = make_mesh(kind)
    names = list(VARIANTS)[first::2]
    given = {name: put(mesh, name) for name in names}

    def run(given):
        return {name: results(name, *arrays) for name, arrays in given.items()}

    wanted = on_one_device(run, {name: arrays_of(name) for name in names})
    with jax.set_mesh(mesh):
        found = jax.jit(run)(given)
    for name, actual in found.items():
        testing.assert_close(jax.device_get(actual), wanted[name], "float32", what=name)
        if kind == "Explicit":
            array = next(iter(given[name][0].values()))
            assert actual[0].sharding.is_equivalent_to(array.sharding, actual[0].ndim), name


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_exact_as_on_one_device(kind):
    mesh = make_mesh(kind)
    arrays, _ = arrays_of("causal")
    arrays = {name: x.astype("bfloat16") for name, x in arrays.items()}
    run = functools.partial(results, "causal", extras={})
    with jax.set_mesh(mesh):
        given = {name: jax.device_put(x, NamedSharding(mesh, FOUR)) for name, x in arrays.items()}
        found = jax.jit(run)(given)
    testing.assert_close(jax.device_get(found), on_one_device(run, arrays), "bfloat16")


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_are_of_keys_and_of_halves_of_queries(kind):
    mesh = make_mesh(kind)
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 8), "float32") for heads in (6, 2))
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, EIGHT))
        for name, x in (("q", q), ("k", k), ("v", k))
    }
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(results, "causal", extras={}))
        found = collections.Counter(collectives(run.lower(arrays).compile()))
    heads, statistic = q.size // 16, q.size // 16 // 8
    # In JAX 0.10 XLA removes the barrier, and merges what both passes gather and send.
    is_merged = jax.__version_info__ < (0, 11) and kind == "Explicit"
    assert found == {
        # Keys and values, in the forward and again in the backward.
        ("all-gather", k.size): 2 if is_merged else 4,
        ("reduce-scatter", k.size // 8): 2,
        # Of one half of the queries q and out; and q, out, dout and dq.
        ("collective-permute", heads): 5 if is_merged else 2 + 4,
        ("collective-permute", statistic): 1 + 1,
    }


@pytest.mark.parametrize("check_vma", [True, False])
def test_partly_manual_axes_match_one_device(check_vma):
    mesh, (arrays, _) = make_mesh("Explicit"), arrays_of("more_queries")
    run = functools.partial(results, "more_queries", extras={})
    mapped = jax.shard_map(
        run, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, check_vma=check_vma
    )
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)({name: jax.device_put(x, BATCH) for name, x in arrays.items()})
    testing.assert_close(jax.device_get(found), on_one_device(run, arrays), "float32")


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_every_backend_matches_one_device(backend):
    mesh = make_mesh("Explicit")
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(results, "packed_window", backend=backend))
        found = run(*put(mesh, "packed_window"))
    run = functools.partial(results, "packed_window", backend="xla")
    wanted = on_one_device(run, *arrays_of("packed_window"))
    testing.assert_close(jax.device_get(found), wanted, "float32")


# The sharding of queries and of keys.
@pytest.mark.parametrize("specs", [(TWO, TWO), (TWO, P()), (P("a"), P())], ids=str)
def test_attention_of_nn_takes_shards_on_explicit_axes_that_jax_nn_refuses(specs):
    mesh = make_mesh("Explicit")
    q, k = draw(1, (2, 4, 4, 8)), draw(2, (2, 8, 2, 8))  # the last keys are seen by no query
    attend = functools.partial(nn.dot_product_attention, is_causal=True)
    wanted = on_one_device(attend, q, k, k)
    q, k = (
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, k), specs, strict=True)
    )
    with jax.set_mesh(mesh):
        found = attend(q, k, k)
    testing.assert_close(jax.device_get(found), wanted, "float32")


def test_attention_of_nn_names_shards_that_no_implementation_takes():
    q = jax.device_put(draw(1, (2, 4, 4, 8)), NamedSharding(make_mesh("Explicit"), TWO))
    message = (
        r"does not take these shards .*: query f32\[2,4@a,4,8\].*It runs because mask is given"
    )
    with pytest.raises(ValueError, match=message):
        nn.dot_product_attention(q, q, q, mask=np.ones((4, 4), bool))


def visible_pairs(piece, T, S, left, right):
    """The pairs of a query and a key that it sees, counted one by one."""
    positions = [query + S - T for query in piece.queries]
    return sum(p - left <= key <= p + right for p in positions for key in piece.keys)


@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_zigzag_gives_each_device_as_many_pairs(shards):
    T = 8 * shards
    pieces = context.make_pieces(shards, T, T, causal=True, window=None)
    pairs = [sum(visible_pairs(piece, T, T, T, 0) for piece in of) for of in pieces]
    assert len(set(pairs)) == 1
    assert sum(pairs) == T * (T + 1) // 2
    # What a device holds first, it computes itself.
    assert [piece.queries.start for piece, _ in pieces] == [8 * i for i in range(shards)]


@pytest.mark.parametrize(
    ("causal", "window", "left", "right"),
    [
        (True, None, 99, 0),
        (True, 3, 2, 0),
        (True, 9, 8, 0),
        (True, 30, 29, 0),
        (False, None, 99, 99),
        (False, 4, 3, 3),
        (False, (7, 2), 7, 2),
        (False, (None, 5), 99, 5),
        (False, (0, None), 0, 99),
    ],
)
@pytest.mark.parametrize(("T", "S"), [(24, 24), (24, 40), (40, 16)])
def test_pieces_have_all_keys_that_queries_see(T, S, causal, window, left, right):
    pieces = context.make_pieces(4, T, S, causal=causal, window=window)
    pairs = sum(visible_pairs(piece, T, S, left, right) for of in pieces for piece in of)
    whole = context.Piece(range(T), range(S), 0)
    assert pairs == visible_pairs(whole, T, S, left, right)
    assert sorted(q for of in pieces for piece in of for q in piece.queries) == list(range(T))


def test_cuda_kernels_serve_every_piece(monkeypatch):
    monkeypatch.setattr(ffi, "unavailable_reason", lambda stem=None: None)
    mesh = make_mesh("Explicit")
    arrays, extras = put(mesh, "rope")
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(results, "rope", backend="cuda"))
        text = run.trace(arrays, extras).lower(lowering_platforms=("cuda",)).as_text()
    # In a branch for each of two devices, two chunks.
    for direction in ("forward", "backward"):
        assert text.count(f"@jaxllm_flash_attention_{direction}") == 4
        assert text.count(f"@jaxllm_rope_{direction}") > 0
